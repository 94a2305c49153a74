"""The benchmarks support heads with a bias or an adapter, float16, and changing numbers of
tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import against
import cases
import contestants
import measure
import oracle
import pytest
import report
import run
import torch
import works
from plain import SCALING
from torch import Tensor

CPU = torch.device("cpu")
TINY = works.Setting(tokens=40, width=12, vocabulary=61, dtype=torch.float32, segments=9)
TRAINS = ("hidden", "weight", "bias", "lora_a", "lora_b")
EVERYTHING = replace(TINY, bias=True, lora=3, trains=TRAINS)


def in_float64(work: works.Work, inputs: works.Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and all full gradients in float64, by autograd."""
    leaves = [t.detach().double().requires_grad_() for t in (inputs.hidden, *inputs.parts)]
    x, weight, bias, a, b = leaves
    log_p = (x @ weight.T + bias + SCALING * (x @ a.T) @ b.T).log_softmax(1)
    logp = log_p[torch.arange(len(x)), inputs.targets]
    loss = work.loss(works.Values(logp), inputs)
    return loss.detach(), dict(zip(TRAINS, torch.autograd.grad(loss, leaves), strict=True))


@pytest.mark.parametrize("name", ["ce", "grpo", "gspo"])
def test_oracle_of_a_bias_and_an_adapter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "BLOCK", 7 * TINY.vocabulary)
    inputs, work = works.make_inputs(EVERYTHING, CPU), works.WORKS[name]
    loss, true = in_float64(work, inputs)
    found = oracle.make_oracle(work, inputs, EVERYTHING)
    torch.testing.assert_close(found.values["loss"], loss, rtol=1e-12, atol=1e-12)
    assert found.gradients.keys() == set(TRAINS)
    for key, value in found.gradients.items():
        want = true[key][found.places(key)]
        torch.testing.assert_close(value, want, rtol=1e-10, atol=1e-12)
    # `inputs.old` was computed with the benchmark's head, so it is close to the current log-probs.
    assert float((found.values["logps"] - inputs.old).abs().max()) < 0.5


@pytest.mark.parametrize("name", ["ce", "grpo"])
@pytest.mark.parametrize("contestant", ["headloss", "headloss, recompute", "eager"])
def test_contestants_of_a_bias_and_an_adapter(name: str, contestant: str) -> None:
    work, inputs = works.WORKS[name], works.make_inputs(EVERYTHING, CPU)
    found = contestants.CONTESTANTS[contestant].make(work, EVERYTHING)(inputs)
    true = oracle.make_oracle(work, inputs, EVERYTHING)
    measured = oracle.errors(found, true)
    assert measured.keys() >= set(TRAINS) and max(measured.values()) < 1e-5
    for wrong in ("bias", "lora_a", "lora_b"):
        values = found.values | {wrong: 1.02 * found.values[wrong]}
        (miss,) = oracle.misses(oracle.errors(replace(found, values=values), true), oracle.EXACT)
        assert miss.startswith(wrong)


def test_only_what_is_trained_gets_a_gradient() -> None:
    setting = replace(TINY, lora=3, trains=("hidden", "lora_a", "lora_b"))
    inputs, work = works.make_inputs(setting, CPU), works.WORKS["ce"]
    for name in ("headloss", "eager"):
        values = contestants.CONTESTANTS[name].make(work, setting)(inputs).values
        assert values.keys() & set(works.LEAVES) == set(setting.trains)
    limit = measure.make_limit(setting, inputs)(inputs)
    assert limit[0].shape == inputs.hidden.shape and limit[1] is None
    assert setting.flops == 2 * 2 * 40 * 12 * 61 and EVERYTHING.flops == 3 * 2 * 40 * 12 * 61


def test_each_call_has_its_own_number_of_tokens() -> None:
    setting = replace(TINY, changing=True)
    sets = works.make_sets(setting, CPU, 6)
    assert [len(i.targets) for i in sets] == [40, 39, 38, 37, 36, 35]
    assert all(i.weight is sets[0].weight for i in sets)
    assert not torch.equal(sets[1].targets, sets[2].targets[:39])
    work = works.WORKS["grpo"]
    for i in sets:
        assert int(i.lengths.sum()) == len(i.hidden) == len(i.old) == len(i.ids)
        assert i.ids.bincount().tolist() == i.lengths.tolist()
        assert len(i.advantages) == len(i.lengths) and i.hidden.is_leaf
        found = contestants.CONTESTANTS["headloss"].make(work, setting)(i)
        true = oracle.make_oracle(work, i, setting)
        assert max(oracle.errors(found, true).values()) < 1e-5
        assert float((true.values["logps"] - i.old).abs().max()) < 0.5
        assert measure.make_limit(setting, sets[0])(i)[0].shape == i.hidden.shape
    assert len(works.make_sets(TINY, CPU, 6)) == 2 and len(works.make_sets(TINY, CPU, 1)) == 1


def test_the_gate_and_the_race_of_changing_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the benchmark in which each call has a different number of tokens, the accuracy check
    makes calls with two numbers of tokens, and no two timed calls have equal numbers of tokens."""
    seen: list[int] = []

    def make(work: works.Work, setting: works.Setting) -> contestants.Run:
        eager = contestants.CONTESTANTS["eager"].make(work, setting)

        def run(inputs: works.Inputs) -> contestants.Found:
            seen.append(len(inputs.targets))
            return eager(inputs)

        return run

    spy = contestants.Contestant(name="spy", make=make)
    monkeypatch.setitem(contestants.CONTESTANTS, "spy", spy)
    setting = replace(TINY, changing=True)
    case = cases.Case(
        row="r", works=("ce",), setting=setting, contestants=("spy",), group="small"
    )
    (row,) = measure.run_case(case, 2, CPU)
    assert row["status"] == "ok" and row["runs"] == 6
    assert seen == [40, 39, 39, *range(40, 33, -1)]
    assert row["tflops"] * row["ms"] == pytest.approx(replace(setting, tokens=37).flops / 1e9)
    seen.clear()
    measure.run_once(case, CPU, lambda name: True)
    assert seen == [40, 39]


def test_the_rows_of_small_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark of small calls has nine variants in three sizes, and each of the 27 rows passes
    the accuracy check."""
    rows = [case for case in cases.table() if case.row.startswith("small calls, ")]
    assert len(rows) == 27 and {case.group for case in rows} == {"small"}
    assert {case.setting.tokens for case in rows} == {256, 1024, 4096}
    kinds = list(dict.fromkeys(case.row for case in rows))
    assert [kind.removeprefix("small calls, ") for kind in kinds] == list(cases.KINDS)
    output, tables = tmp_path / "rows.json", tmp_path / "rows.md"
    arguments = ["--quick", "--device", "cpu", "--repeats", "1", "--only", "small calls*"]
    files = ["--output", str(output), "--markdown", str(tables)]
    assert run.main([*arguments, *files]) == 0
    results = json.loads(output.read_text())
    of = {(r["row"], r["work"], r["contestant"]): r for r in results["rows"]}
    trained = {"small calls, bias": {"bias", "weight"}, "small calls, LoRA": {"lora_a", "lora_b"}}
    trained |= {"small calls, frozen head": set()}
    for kind in kinds:
        for work in cases.KINDS[kind.removeprefix("small calls, ")][0]:
            for name in ("headloss", "eager"):
                row = of[kind, work, name]
                wanted = trained.get(kind, {"weight"}) | {"hidden"}
                wanted = set() if kind == "small calls, no gradient" else wanted
                assert row["status"] == "ok" and row["host_ms"] > 0
                assert row["errors"].keys() & set(works.LEAVES) == wanted
            assert of[kind, work, "torch.compile"]["reason"] == "needs a GPU"
    assert of["small calls, float16", "ce", "headloss"]["dtype"] == "float16"
    lines = report.small(results).splitlines()
    plain = (("ce", "grpo"), {})
    for kind, (kind_works, _) in {"": plain, **cases.KINDS}.items():
        for work in kind_works:
            name = f"{work}, {kind}" if kind else work
            assert sum(f"| {name} |" in line for line in lines) == 1
    row = of["small calls, LoRA", "ce", "headloss"]
    worst = max(row["errors"]["lora_a"], row["errors"]["lora_b"])
    text = tables.read_text().partition("### small calls, LoRA")[2]
    assert f"| {row['errors']['hidden']:.0e} | {worst:.0e} | exact |" in text
    capsys.readouterr()


def test_small_calls_that_are_behind_are_told_by_kind() -> None:
    def row(kind: str, work: str, name: str, ms: float, peak: int) -> dict:
        found = {"case": kind + work, "row": f"small calls{kind}", "group": "small", "work": work}
        found |= {"contestant": name, "ms": ms, "tokens": 256, "run": 0}
        return found | {"working_bytes": peak << 20, "accumulator_bytes": 0}

    names = ("headloss", "eager", "torch.compile")
    rows = [
        row(kind, work, name, ms, peak)
        for kind, work, times, peaks in (
            ("", "ce", (1.0, 2.0, 1.5), (10, 20, 30)),
            (", LoRA", "ce", (2.0, 3.0, 1.5), (10, 20, 5)),
            (", LoRA", "grpo", (1.0, 3.0, 1.5), (25, 20, 30)),
        )
        for name, ms, peak in zip(names, times, peaks, strict=True)
    ]
    results = {"runs": [{"machine": "M", "versions": {}, "commit": "c"}], "rows": rows}
    assert report.losing(results).splitlines() == [
        "- small calls of cross-entropy, LoRA: torch.compile or eager PyTorch is faster in 1 of 1, "
        "of 256 tokens at most, by up to 0.5 ms",
        "- small calls of GRPO, LoRA: eager PyTorch needs less memory in 1 of 1, by up to 5 MiB",
    ]


def test_two_versions_in_calls_of_changing_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    setting = replace(EVERYTHING, changing=True)
    case = cases.Case(row="a", works=("ce",), setting=setting, contestants=("headloss",))
    against.main([case], Path(run.__file__).parents[1], CPU, 3)
    assert "ce, headloss: old / new" in capsys.readouterr().out
