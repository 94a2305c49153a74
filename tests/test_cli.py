"""`python -m headloss` prints the documented output and returns the documented exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headloss as hl
from headloss import kernels
from headloss.__main__ import _bytes, main, objective_of
from headloss.integrations.seams import fits
from headloss.losses.catalogue import TERMS, table
from headloss.testing import doctor, gate, plain

SIZES = ["--tokens", "16384", "--hidden", "4096", "--vocab", "128256"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["plan", *SIZES, "--gpu-memory", "80GiB", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------------- plan


def test_plan_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SIZES, "--objective", "gspo", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    assert "16384 tokens in 8 segments of at most 2048, hidden 4096, vocabulary 128256" in shown
    assert "gspo: segment-scoped" in shown
    # float32 logits, their softmax and their gradient in bfloat16: T V (4 + 2 * 2) bytes.
    assert f"{16384 * 128256 * 8 / (1 << 20):.1f} MiB  logits and their gradient" in shown


def test_plan_keeps_to_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    for budget in ("512MiB", "2GiB"):
        found = plan(capsys, "--objective", "gspo", "--memory-budget", budget)
        assert 0 < found["bytes"]["logits"] <= _bytes(budget)
        assert found["plain_bytes"] == 16384 * 128256 * 8
        assert found["total_bytes"] == sum(found["bytes"].values())


@pytest.mark.parametrize(
    ("arguments", "schedule"),
    [
        (["--objective", "grpo"], "one_pass"),
        (["--objective", "gspo", "--segment-length", "512"], "one_pass"),
        (["--objective", "gspo", "--segment-length", "16384"], "recompute"),
        (["--objective", "gspo", "--segment-length", "16384", "--frozen-head"], "frozen"),
        # The `frozen` schedule needs a loss of log-probs alone, so it does not apply to an entropy
        # term.
        (
            ["--objective", "gspo+entropy", "--segment-length", "16384", "--frozen-head"],
            "recompute",
        ),
        (["--objective", "cross_entropy", "--schedule", "recompute"], "recompute"),
    ],
)
def test_plan_chooses(
    capsys: pytest.CaptureFixture[str], arguments: list[str], schedule: str
) -> None:
    assert plan(capsys, *arguments)["schedule"] == schedule


@pytest.mark.parametrize(("size", "budget"), [("80GiB", 1280), ("24576MiB", 384), (1 << 30, 16)])
def test_plan_for_a_gpu_that_is_not_here(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    size: str | int,
    budget: int,
) -> None:
    """`headloss plan --gpu-memory` budgets a 64th of the named GPU's memory for logits, whatever
    GPU this machine has."""
    arguments = ["plan", *SIZES, "--objective", "gspo", "--gpu-memory", f"{size}"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "vocabulary 128256, bfloat16, cuda\n" in shown and "backend    triton\n" in shown
    whole = f"one part in 64 of the GPU's memory, {64 * budget} MiB"
    assert f"budget     {budget:10.1f} MiB  {whole}\n" in shown
    for name, other in (("multiprocessors", 20), ("memory", 8 << 30)):
        value = {"cuda": other, "cpu": 0}
        monkeypatch.setattr(kernels, name, lambda device, value=value: value[device.type])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "choose", lambda *_: "reference")  # no local Triton
    assert main(arguments) == 0
    assert capsys.readouterr().out == shown
    assert main([*arguments, "--dtype", "float64", "--device", "cuda"]) == 0
    assert "backend    reference\n" in capsys.readouterr().out


def test_plan_options_reach_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, "--chunk-tokens", "1000")["chunks"] == 17
    half = plan(capsys, "--dtype", "bfloat16")["plain_bytes"]
    assert plan(capsys, "--dtype", "float32")["plain_bytes"] == half * 3 // 2
    # A teacher's logits are counted in addition to the student's.
    alone = plan(capsys, "--objective", "cross_entropy", "--chunk-tokens", "512")
    taught = plan(capsys, "--objective", "cross_entropy+distillation", "--chunk-tokens", "512")
    assert taught["bytes"]["logits"] >= 2 * alone["bytes"]["logits"]


@pytest.mark.parametrize("objective", ["gspo", "grpo+z_loss", "dpo", "cross_entropy"])
@pytest.mark.parametrize("frozen", [False, True])
def test_plan_is_that_of_the_engine(
    capsys: pytest.CaptureFixture[str], objective: str, frozen: bool
) -> None:
    """`headloss plan` from sizes equals the engine's plan for real tensors."""
    sizes = ["--tokens", "96", "--hidden", "8", "--vocab", "50", "--segment-length", "16"]
    given = ["--dtype", "float32", "--device", "cpu", "--memory-budget", "6000B", "--json"]
    flags = ["--frozen-head"] * frozen
    assert main(["plan", *sizes, *given, *flags, "--objective", objective]) == 0
    shown = json.loads(capsys.readouterr().out)
    zeros = torch.zeros(96)
    batch = hl.Batch(
        zeros.long(),
        hl.Segments.from_lengths([16] * 6),
        advantages=zeros,
        old_logps=zeros,
        ref_logps=zeros,
    )
    found = hl.plan(
        torch.zeros(96, 8, requires_grad=True),
        hl.Head(torch.zeros(50, 8, requires_grad=not frozen)),
        batch,
        objective_of(objective),
        hl.Options(memory_budget=6000),
    )
    assert (shown["schedule"], shown["bytes"]) == (found.schedule, found.bytes)
    assert (shown["chunks"], tuple(shown["tile"])) == (len(found.chunks), found.tile)


def test_every_term_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for factory in TERMS:
        assert plan(capsys, "--objective", factory.__name__)["total_bytes"] > 0


def test_what_is_known_of_a_term_does_not_depend_on_the_dtype(capsys) -> None:
    """The command `plan` accepts a term with --dtype float64, although the command tries terms on
    float32 sample fields."""
    assert plan(capsys, "--objective", "aot", "--dtype", "float64")["schedule"] == "recompute"


@pytest.mark.parametrize("objective", ["cross_entropy", "gspo", "dpo"])
def test_plan_of_very_many_tokens(capsys: pytest.CaptureFixture[str], objective: str) -> None:
    tokens = (1 << 24) - 1
    found = plan(capsys, "--objective", objective, "--tokens", f"{tokens}")
    # chunks of a per-segment objective must end where a segment ends
    size = 4224 if objective == "cross_entropy" else 4096
    assert found["chunk_tokens"] == size and found["chunks"] == -(-tokens // size)
    assert found["plain_bytes"] == tokens * 128256 * 8
    found = plan(capsys, "--objective", "gspo", "--tokens", f"{tokens}", "--vocab", "1")
    assert found["bytes"]["logits"] <= 1200 << 20
    with pytest.raises(SystemExit):
        plan(capsys, "--tokens", "1000000000000")
    assert "--tokens: got 1000000000000, want at most" in capsys.readouterr().err


def test_objective_of() -> None:
    assert repr(objective_of("gspo+z_loss + kl")) == repr(hl.gspo() + hl.z_loss() + hl.kl())
    for text, objective in (
        ("1e-4*z_loss", 1e-4 * hl.z_loss()),
        ("gspo + 1e+2 * kl-.5*entropy", hl.gspo() + 1e2 * hl.kl() - 0.5 * hl.entropy()),
        ("-entropy", -1.0 * hl.entropy()),
    ):
        assert repr(objective_of(text)) == repr(objective + hl.Objective(()))
    for text in ("x*z_loss", "*z_loss", "1e*z_loss", "nan*z_loss"):
        with pytest.raises(ValueError, match=r"got '.*', want NUMBER\*TERM: 1e-4\*z_loss"):
            objective_of(text)
    with pytest.raises(ValueError, match=r"--objective: got 'gsop', want .* did you mean gspo\?"):
        objective_of("kl+gsop")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000000", 10**6), ("512MiB", 1 << 29), ("2GiB", 1 << 31), ("0.5KiB", 512), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert _bytes(text) == size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], ("--tokens", "'0'", "positive")),
        (["--hidden", "-3"], ("--hidden", "'-3'", "positive")),
        (["--vocab", "1e5"], ("--vocab", "'1e5'", "positive")),
        (["--objective", "gspo+magic"], ("--objective", "'magic'", "cross_entropy", "gspo")),
        (["--objective", "gspo++kl"], ("--objective", "''")),
        (["--memory-budget", "3MB"], ("--memory-budget", "'3MB'", "512MiB")),
        (["--memory-budget", "0"], ("--memory-budget", "'0'")),
        (["--memory-budget", "9" * 400], ("--memory-budget", "'999", "512MiB")),
        (["--gpu-memory", "80GB"], ("--gpu-memory", "'80GB'", "want bytes, e.g. 512MiB, 2GiB")),
        (["--gpu-memory", "0GiB"], ("--gpu-memory", "'0GiB'", "want bytes")),
        (["--gpu-memory", "80GiB", "--device", "cpu"], ("--gpu-memory", "--device cpu", "cuda")),
        (["--dtype", "int8"], ("--dtype", "int8", "bfloat16")),
        (["--schedule", "frozen"], ("schedule", "frozen", "requires a gradient")),
        (["--schedule", "fast"], ("--schedule", "fast", "one_pass")),
        (["--device", "abacus"], ("--device", "abacus", "cuda")),
        (
            ["--objective", "dpo", "--segment-length", "6000"],
            ("segments: got 3, want a multiple of 2", "dpo"),
        ),
        (["--tokens", f"{10**12}", "--vocab", f"{10**9}"], ("--vocab", "2^60")),
    ],
)
def test_bad_values_get_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *SIZES, *arguments])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["plan"], ["check", "--device", "cuda:99"]]
)
def test_bad_commands_get_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_no_command_gets_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "headloss train gspo" in captured.out and captured.err == ""


# ---------------------------------------------------------------------- check


def test_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "QUICK", gate.QUICK[:2])
    assert main(["check", "--quick", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "8 of 8 cases within budget" in shown
    assert len([line for line in shown.splitlines() if line.endswith("  ok")]) == 8


def test_check_fails_where_an_error_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`headloss check` returns exit status 1 if a gradient is wrong by more than the allowed
    error."""
    case = gate.Case(objective="grpo", schedule="one_pass", dtype=torch.float32)
    monkeypatch.setattr(gate, "cases", lambda quick: [case])
    real = gate.run

    def wrong(*arguments):
        found = real(*arguments)
        found["weight"] = found["weight"] * (1 + 1e-4)
        return found

    monkeypatch.setattr(gate, "run", wrong)
    assert main(["check", "--device", "cpu"]) == 1
    assert "0 of 1 cases within budget" in capsys.readouterr().out

    def broken(*arguments):
        raise RuntimeError("no such kernel\nand a long trace")

    monkeypatch.setattr(gate, "run", broken)
    assert main(["check", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "grpo, one_pass, float32: RuntimeError: no such kernel" in shown
    assert "long trace" not in shown


@pytest.mark.parametrize("objective", sorted({c.objective for c in gate.cases()}))
def test_every_objective_of_the_gate(objective: str) -> None:
    schedules = {c.schedule for c in gate.cases() if c.objective == objective}
    for schedule in schedules:
        verdict = gate.check(gate.Case(objective=objective, schedule=schedule, dtype=torch.float32))
        assert verdict.ok, verdict
        quantities = {"loss", "logps", "hidden"} | ({"weight"} if schedule != "frozen" else set())
        assert {c.quantity for c in verdict.comparisons} == quantities


def test_judge_measures_against_float64() -> None:
    hidden = torch.randn(12, 8, requires_grad=True)
    head = hl.Head(torch.randn(30, 8, requires_grad=True))
    batch = hl.Batch(torch.randint(30, (12,)))
    oracle = plain(hidden, head, batch, hl.cross_entropy())
    off = {"loss": oracle.loss * 1.01, "hidden": oracle.gradients["hidden"]}
    loss, gradient = gate.judge(off, hidden, head, batch, hl.cross_entropy())
    assert loss.error == pytest.approx(0.01) and not loss.ok
    assert gradient.error == 0 and gradient.ok
    assert not dataclasses.replace(gradient, error=float("nan")).ok


# ---------------------------------------------------------------------- terms


def test_terms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["terms"]) == 0
    assert capsys.readouterr().out.strip() == table().strip()


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "headloss", "plan", *SIZES, "--vocab", "0"]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("headloss: argument --vocab: got '0'")


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(["terms"], "1"), (["terms"], ""), (["--help"], ""), ([], "")],
)
def test_output_that_nobody_reads_ends_the_command(arguments: list[str], unbuffered: str) -> None:
    """`headloss terms | head` prints no traceback of a broken pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "headloss", *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        cwd=Path(__file__).parents[1],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_a_broken_pipe_of_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise BrokenPipeError("a socket")

    monkeypatch.setattr(doctor, "report", broken)
    with pytest.raises(BrokenPipeError, match="a socket"):
        main(["doctor"])


# ---------------------------------------------------------------------- version and doctor


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"headloss {hl.__version__}\n"


def test_doctor_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line[10:] for line in lines[:10]}
    assert len(found) == 10 and len(lines) == 10 + len(fits())  # one line per adapter
    assert found["torch"] == torch.__version__
    assert found["GPU"] == "none" and found["missing"].startswith("a GPU that torch sees")
    assert {found[d] for d in ("bfloat16", "float32", "float64")} == {"reference"}
    assert found["product"] == "PyTorch's"


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without a working Triton, `headloss doctor` shows the reason under "missing"."""
    properties = argparse.Namespace(name="Some GPU", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(doctor, "_version", lambda package: "1" if package != "peft" else None)
    monkeypatch.setattr(kernels, "_failure", lambda: "ImportError: no compiler")
    lines = doctor.report()
    assert lines[3] == "GPU       Some GPU, 80 GiB"
    assert lines[4] == "bfloat16  reference"
    assert lines[8] == "extras    train"
    assert "ImportError: no compiler" in lines[9] and "headloss[trl]: peft" in lines[9]


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    for command in ("plan", "check", "doctor", "terms", "train", "compare"):
        assert f"\n    {command} " in shown
    assert "headloss plan --tokens 16384" in shown
