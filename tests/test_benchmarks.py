"""Benchmarks run on tiny shapes: float64 reference, accuracy check, result files and report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import against
import cases
import contestants
import measure
import oracle
import parallel
import parallel_timeline
import pytest
import ranks
import report
import run
import start
import torch
import works
from torch import Tensor
from worlds import script_on

CPU = torch.device("cpu")
TINY = works.Setting(
    tokens=40,
    width=12,
    vocabulary=61,
    dtype=torch.float32,
    segments=(3, 9),
    teacher=True,
    candidates=4,
)


def everything(work: works.Work, inputs: works.Inputs) -> dict[str, Tensor]:
    """Return all values and gradients by autograd through float64 logits."""
    leaves = [t.detach().double().requires_grad_() for t in (inputs.hidden, inputs.weight)]
    z = leaves[0] @ leaves[1].T
    assert inputs.teacher_hidden is not None and inputs.teacher_weight is not None
    assert inputs.candidates is not None
    chosen = torch.zeros_like(z).scatter(1, inputs.candidates, 1)
    rest = ((1 - chosen) * z.softmax(1)).sum(1, keepdim=True).log()
    q = (inputs.teacher_hidden.double() @ inputs.teacher_weight.double().T).softmax(-1)
    values = works.Values(
        logp=z[torch.arange(len(z)), inputs.targets] - z.logsumexp(1),
        lse=z.logsumexp(1),
        entropy=torch.distributions.Categorical(logits=z).entropy(),
        divergence=torch.nn.functional.kl_div(z.log_softmax(-1), q, reduction="none").sum(-1),
        candidates=torch.cat([z.log_softmax(1)[chosen > 0].view(len(z), -1), rest], 1),
    )
    loss = work.loss(values, inputs)
    hidden, weight = torch.autograd.grad(loss, leaves)
    return {"loss": loss.detach(), "hidden": hidden, "weight": weight}


@pytest.mark.parametrize("name", works.WORKS)
def test_oracle_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "BLOCK", 7 * TINY.vocabulary)
    setting = replace(TINY, segments=10) if name == "dpo" else TINY  # DPO needs pairs
    inputs = works.make_inputs(setting, CPU)
    found = oracle.make_oracle(works.WORKS[name], inputs, setting)
    true = everything(works.WORKS[name], inputs)
    torch.testing.assert_close(found.values["loss"], true["loss"], rtol=1e-12, atol=1e-12)
    for key, places in (("hidden", found.rows), ("weight", found.columns)):
        torch.testing.assert_close(
            found.gradients[key], true[key][places], rtol=1e-10, atol=1e-12, check_dtype=False
        )


@pytest.mark.parametrize("name", works.WORKS)
@pytest.mark.parametrize("contestant", ["headloss", "headloss, recompute", "eager"])
def test_objective_and_plain_loss_agree(name: str, contestant: str) -> None:
    setting = replace(TINY, teacher=name == "distillation")
    if name == "dpo":  # DPO needs pairs
        setting = replace(setting, segments=10)
    inputs = works.make_inputs(setting, CPU)
    made = contestants.CONTESTANTS[contestant].make(works.WORKS[name], setting)
    true = oracle.make_oracle(works.WORKS[name], inputs, setting)
    found = oracle.errors(made(inputs), true)
    assert {"hidden", "weight"} <= found.keys()
    assert max(found.values()) < 1e-4


@pytest.mark.parametrize("schedule", ["held", "recompute", "frozen"])
def test_a_plain_loss_on_head_stats(schedule: str) -> None:
    setting = replace(TINY, trains=("hidden",)) if schedule == "frozen" else TINY
    inputs = works.make_inputs(setting, CPU)
    made = contestants.CONTESTANTS[f"head_stats, {schedule}"].make(works.WORKS["grpo"], setting)
    true = oracle.make_oracle(works.WORKS["grpo"], inputs, setting)
    found = oracle.errors(made(inputs), true)
    assert set(setting.trains) <= found.keys() and max(found.values()) < 1e-4


@pytest.mark.parametrize("separable", ["undeclared", "token", "sequence"])
def test_a_plain_loss_as_a_function(separable: str) -> None:
    inputs, work = works.make_inputs(TINY, CPU), works.WORKS["grpo"]
    made = contestants.CONTESTANTS[f"head_function, {separable}"].make(work, TINY)
    found = oracle.errors(made(inputs), oracle.make_oracle(work, inputs, TINY))
    assert found.keys() == {"loss", "hidden", "weight"} and max(found.values()) < 1e-4


def test_a_softmax_over_some_columns() -> None:
    setting = replace(TINY, support=5, segments=8)
    inputs, work = works.make_inputs(setting, CPU), works.WORKS["grpo"]
    true = oracle.make_oracle(work, inputs, setting)
    z = (inputs.hidden.detach().double() @ inputs.weight.detach().double().T).gather(
        1, inputs.support
    )
    torch.testing.assert_close(true.values["logps"], z.log_softmax(1)[:, 0])
    assert torch.equal(inputs.support[:, 0], inputs.targets)
    for name in ("headloss", "headloss, recompute", "eager"):
        found = contestants.CONTESTANTS[name].make(work, setting)(inputs)
        assert max(oracle.errors(found, true).values()) < 1e-4
    assert setting.flops == 8 * 40 * 12 * 5


def test_nearly_certain_tokens() -> None:
    setting = replace(TINY, tokens=400, width=32, vocabulary=256, segments=10, certain=0.6)
    inputs = works.make_inputs(setting, CPU)
    true = oracle.make_oracle(works.WORKS["scores"], inputs, setting)
    assert 0.6 < float((true.values["logps"].exp() > 0.99).double().mean()) < 0.8
    assert int((inputs.advantages == 0).sum()) == 16  # groups of only right or only wrong answers


def test_inputs_look_trained() -> None:
    setting = replace(TINY, tokens=1000, width=256, vocabulary=9001, segments=25, quiet=2)
    inputs = works.make_inputs(setting, CPU)
    true = oracle.make_oracle(works.WORKS["scores"], inputs, setting)
    assert 0.35 < float(true.values["logps"].exp().mean()) < 0.65
    drift = (true.values["logps"] - inputs.old).float()
    assert float(inputs.segment_mean(drift).abs().max()) < 6e-4
    assert 0.08 < float(drift.std()) < 0.12
    assert int((inputs.advantages == 0).sum()) == 20


def test_gate() -> None:
    inputs = works.make_inputs(TINY, CPU)
    true = oracle.make_oracle(works.WORKS["ce"], inputs, TINY)
    good = contestants.CONTESTANTS["eager"].make(works.WORKS["ce"], TINY)(inputs)
    assert oracle.misses(oracle.errors(good, true), oracle.EXACT) == []
    for name, spoil in (
        ("hidden", lambda g: g * 1.02),
        ("weight", lambda g: g.index_fill(0, true.columns[:1], torch.nan)),
        ("nll", lambda g: g + 2e-4),
    ):
        bad = replace(good, values=good.values | {name: spoil(good.values[name])})
        (miss,) = oracle.misses(oracle.errors(bad, true), oracle.EXACT)
        assert miss.startswith(name)
    half = replace(good, values={"weight": good.values["weight"] / 2}, factor=2.0)
    assert oracle.errors(half, true)["weight"] < 1e-5


def test_failing_and_missing_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(work: works.Work, setting: works.Setting) -> contestants.Run:
        import no_such_peer  # noqa: F401

        raise AssertionError

    def broken(work: works.Work, setting: works.Setting) -> contestants.Run:
        def run(inputs: works.Inputs) -> contestants.Found:
            raise RuntimeError("no kernel in /usr/lib/some/kernel.py\nmore")

        return run

    def wrong(work: works.Work, setting: works.Setting) -> contestants.Run:
        return lambda inputs: contestants.Found(values={"loss": torch.tensor(torch.nan)})

    for name, make in (("absent", absent), ("broken", broken), ("wrong", wrong)):
        made = contestants.Contestant(name=name, make=make)
        monkeypatch.setitem(contestants.CONTESTANTS, name, made)
    names = ("eager", "absent", "broken", "wrong", "CCE")
    case = cases.Case(row="r", works=("ce",), setting=TINY, contestants=names)
    rows = {row["contestant"]: row for row in measure.run_case(case, 2, CPU)}
    assert rows["eager"]["status"] == "ok" and rows["eager"]["runs"] == 2
    assert rows["absent"]["status"] == "skipped" and "no_such_peer" in rows["absent"]["reason"]
    assert rows["broken"]["reason"] == "RuntimeError: no kernel in kernel.py"
    assert rows["wrong"]["status"] == "failed" and rows["wrong"]["reason"] == "loss nan > 1e-04"
    assert rows["CCE"]["reason"] == "needs a GPU"
    assert all("ms" not in rows[name] for name in names[1:])


def test_a_case_that_fails_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_oracle(work: works.Work, *given: object) -> oracle.Oracle:
        if work.name == "gspo":
            raise RuntimeError("no memory for it")
        return oracle.make_oracle(work, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "make_oracle", make_oracle)
    output = tmp_path / "found.json"
    arguments = ["--quick", "--device", "cpu", "--repeats", "8", "--seconds", "0"]
    names = ["--only", "GRPO, half*", "GSPO, ragged*", "--contestants", "headloss"]
    assert run.main([*arguments, *names, "--output", str(output)]) == 1
    found = json.loads(output.read_text())
    (row,) = found["rows"]
    assert row["row"] == "GRPO, half the rows" and row["runs"] == measure.FEW
    assert len(found["runs"][0]["tried"]) == 2
    assert "contestant: all" not in (said := capsys.readouterr()).out
    assert "FAILED GSPO, ragged" in said.out and "no memory for it" in said.err


def test_limit_products(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = replace(TINY, teacher=False)
    inputs = works.make_inputs(setting, CPU)
    dx, dw = measure.make_limit(setting, inputs)(inputs)
    true = everything(works.WORKS["ce"], works.make_inputs(TINY, CPU))
    torch.testing.assert_close(dx, true["hidden"], check_dtype=False)
    torch.testing.assert_close(dw, true["weight"], check_dtype=False)
    # With several chunks, the timed matmuls use the logit gradient of the first chunk for every
    # chunk, so every chunk gets the first chunk's rows of dX.
    monkeypatch.setattr(measure, "CHUNK", 16)
    chunked, _ = measure.make_limit(setting, inputs)(inputs)
    torch.testing.assert_close(chunked[:16], dx[:16])
    torch.testing.assert_close(chunked[16:32], dx[:16])
    torch.testing.assert_close(chunked[32:], dx[:8])
    assert setting.flops == 6 * 40 * 12 * 61 and TINY.flops == 8 * 40 * 12 * 61
    assert replace(setting, trains=()).flops == 2 * 40 * 12 * 61


def test_memory_counts_the_larger_of_dw_and_its_accumulator() -> None:
    setting = replace(TINY, teacher=False)
    inputs = works.make_inputs(setting, CPU)
    values = {"hidden": torch.empty(100), "weight": torch.empty(50), "loss": torch.empty(1)}
    found = contestants.Found(values=values)
    assert measure.memory(found, 1000, inputs) == {
        "peak_bytes": 1000,
        "returned_bytes": 604,
        "accumulator_bytes": 0,
        "working_bytes": 1000 - 604,
    }
    summed = measure.memory(replace(found, accumulator=300), 1000, inputs)
    assert summed["working_bytes"] == 1000 - 704 and summed["returned_bytes"] == 604


def test_parts_cover_the_lists() -> None:
    for whole in (list(cases.table()), list(cases.full())):
        assert len({case.name for case in whole}) == len(whole)
        parts = [case for index in (1, 2, 3) for case in cases.part(whole, index, 3)]
        assert sorted(c.name for c in parts) == sorted(c.name for c in whole)
        for case in whole:
            assert set(case.contestants) <= contestants.CONTESTANTS.keys()
            assert set(case.works) <= works.WORKS.keys()


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, tables = tmp_path / "deep" / "quick.json", tmp_path / "quick.md"
    files = ["--output", str(output), "--markdown", str(tables)]
    few = ["--repeats", "1", "--contestants", "headloss", "head*place", "*place, metrics", "*token"]
    few += ["eager", "CCE"]
    arguments = ["--quick", "--device", "cpu", *few, *files]
    assert run.main([*arguments, "--part", "1/2"]) == 0
    first = json.loads(output.read_text())
    assert run.main([*arguments, "--part", "2/2", "--commit", "abc"]) == 0
    found = json.loads(output.read_text())
    assert [len(found["runs"]), found["runs"][1]["commit"]] == [2, "abc"]
    assert found["runs"][0]["versions"]["torch"] == torch.__version__
    assert found["rows"][: len(first["rows"])] == first["rows"]
    assert {row["case"] for row in found["rows"]} == {case.name for case in cases.quick()}
    assert all(row["status"] != "failed" for row in found["rows"])
    # A benchmark case that runs again replaces its former rows.
    assert run.main([*arguments, "--only", "cross-entropy*"]) == 0
    again = json.loads(output.read_text())
    assert len(again["rows"]) == len(found["rows"])
    assert {row["run"] for row in again["rows"] if row["row"] == "cross-entropy"} == {2}
    assert list(output.parent.iterdir()) == [output]
    # --resume skips cases that were begun, and --minutes stops new cases.
    assert run.main([*arguments, "--resume"]) == 0
    assert run.main([*arguments, "--minutes", "-1", "--only", "GRPO*"]) == 0
    assert json.loads(output.read_text()) == again
    text = tables.read_text()
    for case in cases.quick():
        assert f"### {case.name}" in text
    assert "| CCE | - |" in text and "skipped: needs a GPU" in text
    summary = report.goals(again)
    rows = {c.row for c in cases.table() if c.group == "table"}
    assert summary.count("\n| ") == 2 + len(rows)
    capsys.readouterr()


def test_against_another_version(capsys: pytest.CaptureFixture[str]) -> None:
    """A version timed against itself runs under a second name, with equal results."""
    before = against.load(Path(run.__file__).parents[1])
    inputs = works.make_inputs(TINY, CPU)
    found = []
    for package in (works.hl, before):
        with against.using(package):
            make = contestants.CONTESTANTS["headloss"].make
            found.append(make(works.WORKS["gspo"], TINY)(inputs).values)
    assert before is not works.hl and before.__name__ == against.NAME
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    case = cases.Case(row="a", works=("ce",), setting=TINY, contestants=("headloss", "eager"))
    against.main([case, replace(case, group="small")], Path(run.__file__).parents[1], CPU, 4)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("ce, headloss: old / new" in line for line in lines)


def test_versions_that_disagree_are_not_timed() -> None:
    """Two versions with different results are not timed; both versions get the same memory
    budget."""
    inputs, setting = works.make_inputs(TINY, CPU), replace(TINY, teacher=False)
    case = cases.Case(row="a", works=("ce",), setting=setting, contestants=("headloss",))
    right = against.Side.of(works.hl, "headloss", "ce", case, inputs)
    wrong = right._replace(run=lambda i: contestants.Found(values={"loss": torch.tensor(9.0)}))
    with pytest.raises(ValueError, match="loss: the two are"):
        against.race(wrong, right, case, [inputs], CPU, 1)
    with pytest.raises(ValueError, match="torch.compile: needs a GPU"):
        against.Side.of(works.hl, "torch.compile", "ce", case, inputs)
    with against.using(works.hl):
        assert contestants._options().memory_budget == against.MEMORY
        assert contestants._options(memory_budget=7).memory_budget == 7
    assert contestants._options().memory_budget is None


def test_the_bound_of_a_median() -> None:
    ratios = [1 + i / 100 for i in range(30)]
    assert against.lower_bound(ratios) == ratios[9] and against.lower_bound([0.9]) == 0.9


def test_small_calls_tell_the_host_time() -> None:
    setting = replace(TINY, teacher=False)
    case = cases.Case(
        row="small calls", works=("ce",), setting=setting, contestants=("headloss",), group="small"
    )
    (row,) = measure.run_case(case, 1, CPU)
    assert 0 < row["host_ms"] <= row["ms"] and row["runs"] == measure.SMALL
    table = report.small({"runs": [run.about(CPU, "a")], "rows": [row | {"run": 0}]})
    assert f"| 12, 61 | 40 | ce | {row['ms']:.2f} ({row['host_ms']:.2f})," in table


def test_parallel(tmp_path: Path) -> None:
    """The study of vocabulary-parallel runs checks and times two ranks, and writes its rows into a
    JSON file and a table."""
    script, path = Path(run.__file__).parent / "studies" / "parallel.py", tmp_path / "parallel.json"
    printed = script_on(2, str(script), "--quick", "--repeats=1", f"--out={path}")
    assert re.search(r"\[ +[\d.]+ s\] vocabulary \(64, 16, 96\) gspo, 2 ranks \.\.\.", printed)
    found = json.loads(path.read_text())
    assert list(found) == ["2"] and all(one["ok"] for one in found["2"]["checks"].values())
    assert len(found["2"]["checks"]) >= 20
    works = [(row["work"], row["objective"]) for row in found["2"]["rows"]]
    assert sorted(works) == works and len(works) == 8
    text = path.with_suffix(".md").read_text()
    assert "2 ranks, CPU" in text and "all within the error budget" in text
    one = {"work": "slice of 8", "alone": {"ms": 80.0, "ms_in_a_row": 72.0}}
    one |= {"ms": 12.5, "ms_in_a_row": 10.0}
    assert parallel.efficiency(one, 4) == 0.8
    assert parallel.efficiency(one, 4, "ms_in_a_row") == 0.9
    both = parallel.merged(found, {"4": found["2"], "2": {"rows": [], "checks": {}}})
    assert list(both) == ["2", "4"] and both["2"]["rows"] == found["2"]["rows"]
    assert parallel.table(both).count("\n| vocabulary |") == 6


def test_a_timeline_of_calls_in_a_row() -> None:
    """A timeline shows the kernels from one pause kernel (`spin_kernel`) to the next one: a line
    for each long kernel and each kernel after an idle gap, and a line for each group of short
    kernels."""
    names = ("spin_kernel", "gemm dW", "copy", "fill", "nvjet", "nccl", "spin_kernel", "gemm dW")
    at = (0.0, 11.0, 500.0, 503.0, 530.0, 540.0, 900.0, 911.0)
    takes = (11.0, 489.0, 3.0, 2.0, 370.0, 100.0, 11.0, 489.0)
    events = [
        {"cat": "kernel", "ts": begin, "dur": dur, "name": name}
        for begin, dur, name in zip(at, takes, names, strict=True)
    ]
    spans = parallel_timeline.of_gpu([*reversed(events), {"cat": "cpu_op", "ts": 1, "dur": 2}])
    found = parallel_timeline.period(spans)
    assert [name for *_, name in found] == list(names[:6])
    assert [tuple(line) for line in parallel_timeline.lines(found)] == [
        (0.0, 0.011, 0, "1 x spin_kernel"),
        (0.011, 0.489, 0, "gemm"),
        (0.5, 0.005, 0, "2 x copy, fill"),
        (0.53, 0.37, 25, "gemm"),
        (0.54, 0.1, 0, "nccl"),
    ]
    with pytest.raises(ValueError, match="got 1 pauses"):
        parallel_timeline.period(spans[:6])


def test_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A call launches few operations before it first reads from the device, and one matmul
    afterwards."""
    monkeypatch.setattr(start, "CALLS", 2)
    start.main(tiny=True)
    table = capsys.readouterr().out.splitlines()[1:]
    found = {line[:34].strip(): [int(n) for n in line[34:].split()] for line in table}
    assert len(found) == 6
    for work in ("ce", "grpo"):
        assert found[work][3] <= 11 and found[work][4] == 1
        assert found[f"{work}, static"][1] == 0


def test_rows_of_an_earlier_commit_are_marked() -> None:
    """Rows of an earlier commit are marked in the tables, and a comparison with another
    implementation uses rows of one run only."""

    def row(case: str, contestant: str, number: int, share: float) -> dict:
        found = {"case": case, "row": case, "group": "table", "goal": "", "contestant": contestant}
        found |= {"tokens": 8, "width": 4, "vocabulary": 9, "work": "ce", "run": number, "ms": 1.0}
        found |= {"of_limit": share, "limit_ms": 2.0 + number, "working_bytes": 0}
        found |= {"peak_bytes": 1 << 20}
        return found | {"status": "ok", "tolerance": "exact"}

    runs = [
        {"machine": "M", "versions": {"torch": "2"}, "commit": commit} for commit in ("old", "new")
    ]
    rows = [row("a", "headloss", 1, 0.9), row("a", "QuACK", 0, 0.8), row("a", "TRL", 1, 0.5)]
    rows.append(row("b", "headloss", 0, 0.7))
    results = {"runs": runs, "rows": rows}
    text = report.tables(results)
    assert text.startswith("M; torch 2; commit new.\n\nRows marked [old] are of an earlier run: M;")
    assert "| QuACK [old] |" in text and "| TRL |" in text and "limit 3.00 ms" in text
    a, b = report.goals(results).splitlines()[-2:]
    assert a.startswith("| a |") and "0.50 TRL" in a and "QuACK" not in a
    assert b.startswith("| b [old] |") and "0.70" in b
    assert "Rows marked" not in report.tables({"runs": runs, "rows": rows[:1] + rows[2:3]})


def test_rows_where_a_peer_is_faster_are_listed() -> None:
    def row(contestant: str, ms: float, working: int, accumulator: int = 0) -> dict:
        found = {"case": "a", "row": "a", "group": "table", "contestant": contestant, "work": "ce"}
        found |= {"width": 1024, "vocabulary": 1024, "dtype": "bfloat16", "run": 0, "ms": ms}
        more = {"working_bytes": working << 20, "accumulator_bytes": accumulator << 20}
        return found | more | {"of_limit": 1 / ms}

    ours = [row("headloss", 2, 40, 4), row("headloss, recompute", 4, 10)]
    peers = [row("QuACK", 1, 11), row("TRL", 5, 9, 4), row("CCE", 4, 2)]
    times = {"headloss": 1.5, "eager": 1.0, "torch.compile": 2.0}
    run = {"machine": "M", "versions": {}, "commit": "c"}
    assert report.behind({"runs": [run], "rows": ours + peers}) == (
        "- *a*: faster than 0.50 (default): QuACK 1.00; less than 10 MiB (recompute): CCE 2 MiB"
    )
    assert report.behind({"runs": [run], "rows": ours}) == "Nobody, in any row."
    alone = [row(name, ms, 0) | {"group": "small", "tokens": 256} for name, ms in times.items()]
    first, memory, small = report.losing({"runs": [run], "rows": ours + peers + alone}).split("\n")
    assert first == "- a, H = 1024, V = 1024: QuACK 1.00; headloss 0.50"
    assert memory.endswith(": CCE")
    assert small.endswith("faster in 1 of 1, of 256 tokens at most, by up to 0.5 ms")
    assert report.losing({"runs": [run], "rows": ours + alone[:1]}) == "- nowhere in these rows"


def test_spans() -> None:
    spans = [(0.0, 2.0, False), (1.0, 4.0, True), (6.0, 10.0, False)]
    want = {"collectives": 0.3, "exposed": 0.2, "idle": 0.2}
    assert ranks._shares(spans) == pytest.approx(want)
    assert ranks.covered([(3, 4), (0, 2), (1, 2.5), (3, 3.5)]) == 3.5
    assert ranks.covered([]) == 0


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    run.write(path, "old")

    def fail(*_: object) -> None:
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(run.os, "replace", fail)
        with pytest.raises(OSError, match="full"):
            run.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "-1/2"])
def test_bad_part(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--quick", f"--part={text}"])
    assert "want I/N" in capsys.readouterr().err


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {
            "case": f"{group} {size}",
            "row": "one term and five" if group == "table" else group,
            "group": group,
            "work": "grpo",
            "contestant": name,
            "tokens": size,
            "width": 8,
            "vocabulary": size,
            "dtype": "bfloat16",
            "goal": "",
            "limit_ms": 1.0,
            "ms": size / 8,
            "of_limit": 0.9,
            "working_bytes": size << 20,
            "accumulator_bytes": 0,
        }
        for group in ("table", "tokens", "vocabulary")
        for size in (8, 16)
        for name in ("headloss", "eager")
    ]
    made = report.plots({"rows": rows}, tmp_path)
    assert sorted(p.name for p in made) == [
        "five_terms.png",
        "table.png",
        "tokens.png",
        "vocabulary.png",
    ]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in made)
