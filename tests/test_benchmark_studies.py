"""Benchmark studies of gradients, `support_ids`, candidates and tolerances run on tiny shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import candidates
import gradient_truth
import measure
import pytest
import support
import tolerance
import torch
import works

CPU = torch.device("cpu")


# ---------------------------------------------------------------------- the true gradient


def test_gradients_against_float64(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """headloss's gradients have smaller errors than those of plain bf16 logits, at every size and
    for every loss."""
    pytest.importorskip("transformers", reason="the backbone is one of its models")
    output, tables = tmp_path / "truth.json", tmp_path / "truth.md"
    arguments = ["--quick", "--device", "cpu", "--output", str(output), "--markdown", str(tables)]
    names = ["--contestants", "eager", "headloss", "QuACK", "--plot", str(tmp_path / "truth.png")]
    assert gradient_truth.main([*arguments, *names]) == 0
    found = json.loads(output.read_text())
    rows = {(r["work"], r["size"], r["contestant"]): r for r in found["rows"]}
    sizes = gradient_truth.QUICK.logits
    assert len(rows) == len(sizes) * (3 + 2 * 4)
    for (work, size, name), row in rows.items():
        assert row["largest"] == pytest.approx(size, rel=0.02)
        if name == "QuACK":
            assert (row["status"], row["reason"]) == ("skipped", "needs a GPU")
        if name != "headloss":
            continue
        plain = rows[work, size, "eager"]
        assert row["error"] < 5e-3 and row["error"] < plain["error"] / 3, (work, size, row, plain)
        assert row["logp_error"] < 1e-4
        if work != "ce":
            assert plain["logp_error"] > 1e-3
            assert row["wrong_side"] == 0
            # GSPO has one ratio per sequence, so possibly none is clipped
            if not work.startswith("gspo"):
                assert row["clipped"] > 0.01
    # With rounded logits, some ratios lie on the wrong side of the clip bound.
    large = rows["grpo", sizes[-1], "eager"]
    assert large["wrong_side"] > 0 and large["error"] > 0.02
    text = tables.read_text()
    assert text.count("| plain bf16 logits |") == 5 and text.count("### GSPO") == 2
    assert "| QuACK | skipped: needs a GPU |" in text
    assert (tmp_path / "truth.png").read_bytes()[:4] == b"\x89PNG"
    capsys.readouterr()


def test_the_truth_is_autograd_in_float64() -> None:
    shape = gradient_truth.Shape(sizes=gradient_truth.QUICK.sizes, sequences=4, length=8, logits=())
    bench = gradient_truth.Bench(shape, CPU)
    inputs, _ = bench.inputs(20.0)
    for name in ("ce", "grpo", "gspo"):
        sample = gradient_truth.take(bench, name, inputs)
        x, w = (t.detach().double().requires_grad_() for t in (inputs.hidden, inputs.weight))
        logp = (x @ w.t()).log_softmax(-1).gather(1, inputs.targets[:, None]).squeeze(1)
        loss = works.WORKS[name].loss(works.Values(logp), sample.inputs)
        into_x, into_w = torch.autograd.grad(loss, (x, w))
        torch.testing.assert_close(sample.truth.hidden, into_x)
        torch.testing.assert_close(sample.truth.weight, into_w)
        torch.testing.assert_close(sample.truth.logp, logp.detach())


def test_support(tmp_path: Path) -> None:
    """The study of `support_ids` checks and times small sets of ids of every kind, and a call over
    the whole vocabulary."""
    output = tmp_path / "support.json"
    assert support.main(["--quick", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    for kind in ("uniform", "skewed", "ragged", "half"):
        row = found[kind]
        assert row["errors"]["logp"] < 1e-6 and row["errors"]["hidden"] < 1e-6
        assert row["times faster"] == pytest.approx(found["dense"]["ms"] / row["ms"], abs=0.006)
        assert ("kernels" in row) == (kind != "half")


def test_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates study checks and times GRPO with and without candidates; incorrect calls get
    no time."""
    output = tmp_path / "candidates.json"
    assert candidates.main(["--quick", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    rows = [row for row in found.values() if "errors" in row]
    assert len(rows) == 4 and all(max(row["errors"].values()) < 1e-5 for row in rows)
    monkeypatch.setattr(candidates, "WORST", -1.0)
    with pytest.raises(ValueError, match="wrong by"):
        candidates.main(["--quick"])


def test_a_wrong_support_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "WORST", -1.0)
    with pytest.raises(ValueError, match="wrong by"):
        support.main(["--quick"])


def test_tolerance_takes_time_and_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tolerance study measures time and error with 60 % nearly certain tokens."""
    output = tmp_path / "time.json"
    arguments = ["time", "--quick", "--device", "cpu", "--output", str(output)]
    assert tolerance.main(arguments) == 0
    found = json.loads(output.read_text())
    assert 0.6 < found["certain"] < 0.8 and found["without_advantage"] == 0.5
    exact, some, more = found["rows"]
    assert exact["hidden_error"] == exact["weight_error"] == exact["skipped_rows"] == 0
    assert 100 < some["skipped_rows"] < more["skipped_rows"]
    for row in (some, more):
        assert 0.9 * row["tolerance"] < row["skipped_mass"] <= row["tolerance"]
        for name in ("hidden", "weight"):
            assert 0 < row[f"{name}_error"] <= row[f"{name}_bound"]
    assert capsys.readouterr().out.count("\n| 0") == 3


@pytest.mark.slow
def test_tolerance_draws_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "curves.json", tmp_path / "curves.png"
    assert tolerance.main(["curves", "--quick", "--output", str(output), "--plot", str(plot)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["tolerance"] for row in rows] == [0.0, 0.001, 0.004]
    assert rows[0]["loss"][0] == rows[2]["loss"][0] and len(rows[0]["held_out"]) == 4
    assert plot.read_bytes()[:4] == b"\x89PNG"
    capsys.readouterr()


@pytest.mark.slow
def test_invariant_rows_never_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "invariance.json"
    script = Path(measure.__file__).parent / "studies" / "invariance.py"
    command = [sys.executable, str(script), "--quick", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 5
    for row in rows:
        assert not any(row["differ"][1].values())
