"""Test of benchmarks/pairs.py, which times small training steps with and without headloss in turn,
at sizes for a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the models of the pairs are its")


def test_rows_have_both_sides_and_their_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pairs

    monkeypatch.setattr(pairs, "PAIRS", 2)
    monkeypatch.setattr(pairs, "WARM_UP", 1)
    path = tmp_path / "pairs.json"
    only = ["--only", "host*", "apply: Q*"]
    assert pairs.main(["--quick", "--device", "cpu", "--json", str(path), *only]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["rows"] for row in rows if row["work"] == "apply"] == [1, 2, 4]
    assert {row["work"] for row in rows} >= {"apply", "host, eager", "host, cross-entropy"}
    for row in rows:
        assert row["ms"] > 0 and row["stock_ms"] > 0
        assert row["ratio"] == pytest.approx(row["ms"] / row["stock_ms"], rel=2), row
