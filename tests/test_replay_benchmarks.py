"""The replay benchmarks and the top-p demo run on tiny models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="the runs are of its trainers")
import replay
import step_cases
from blank_plots import blank_plots  # noqa: F401

CPU = torch.device("cpu")
SMALL = (
    "tiny.hidden_size=16", "tiny.intermediate_size=32", "tiny.num_hidden_layers=1",
    "tiny.num_attention_heads=2", "train_problems=64", "held_out=8",
    "trainer.per_device_train_batch_size=16",
)  # fmt: skip


def test_sets_are_distinct_and_hold_the_label() -> None:
    labels = torch.randint(2048, (3, 17))
    for mean, ragged in ((8, True), (64, True), (5, False)):
        ids, offsets = replay.make_sets(labels, 2048, mean, ragged)
        counts = offsets.diff()
        assert float(counts.double().mean()) == pytest.approx(mean, rel=0.4)
        assert ragged or (counts == mean).all()
        for at, label in enumerate(labels.flatten().tolist()):
            own = ids[offsets[at] : offsets[at + 1]].tolist()
            assert len(set(own)) == len(own) and label in own and max(own) < 2048
        mask = replay.inside((ids, offsets), 2048, slice(4, 9))
        assert mask.sum(1).tolist() == counts[4:9].tolist()


def test_quick(tmp_path: Path) -> None:
    """The replay benchmark runs with all parts, and its losses over kept ids agree with masked
    logits."""
    output = tmp_path / "replay.json"
    assert replay.main(["--quick", "--device", "cpu", "--json", str(output)]) == 0
    results = json.loads(output.read_text())
    rows = {(row["mean"], row["contestant"]): row for row in results["step"]}
    assert {mean for mean, _ in rows} == {8, 64}
    for (_, name), row in rows.items():
        assert row["status"] == "ok" and row["low"] <= row["ms"] <= row["high"]
        assert row["peak_bytes"] > 0 and row["tokens"] == 92
        if name in ("headloss, the sets", "masked logits"):
            assert row["gradient_error"] < 1e-4 and row["loss_error"] < 1e-5
    small, large = (rows[8, name]["peak_bytes"] for name in ("headloss, the sets", "masked logits"))
    assert small < 0.5 * large
    assert [row["kept"] > 1 for row in results["generation"]] == [True, True]
    assert all(row["on_ms_a_token"] > 0 for row in results["generation"])
    assert results["crossing"]["whole_ms"] > 0 and results["crossing"]["points"]


def test_a_contestant_with_wrong_results_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = step_cases.make_model(step_cases.QUICK["Qwen2.5-0.5B"], CPU)
    batch = step_cases.make_batch(model, 2, 16, CPU)
    whole = lambda pairs: replay.over_all  # noqa: E731
    monkeypatch.setattr(replay, "over_sets", whole)
    rows = replay.step_rows(model, batch, 8, CPU)
    (row,) = [row for row in rows if row["contestant"] == "headloss, the sets"]
    assert row["status"] == "failed" and "ms" not in row


def test_the_k_with_the_full_softmaxs_time_is_interpolated() -> None:
    points = [{"k": k, "ms": ms} for k, ms in ((8, 1.0), (16, 2.0), (32, 4.0))]
    assert replay.level(points, 3.0) == pytest.approx(16 * 2**0.5)
    assert replay.level(points, 2.0) == pytest.approx(16) and replay.level(points, 5.0) is None


def test_demo_reports_its_mismatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    steps = ("trainer.max_steps=2", "trainer.save_steps=2", "held_out=8")
    assert demo.main(tmp_path, (*SMALL, *steps)) == 0
    report = (tmp_path / "report.md").read_text()
    assert "GSPO drew by top-p from " in report
    assert "ratios to the sampler's lie between 1.0000" in report or "between 0.99999" in report
