"""The regression benchmark `rails.py` compares two versions on tiny shapes."""

from __future__ import annotations

import json
from pathlib import Path

import against
import contestants
import pytest
import rails
import run
import works


def test_rails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The regression benchmark `rails.py` compares the package with itself: timed rows, skipped
    rows, code size and random calls.

    The benchmark fails if a random call differs or a row's speed ratio is below its bar.
    """
    root, output = Path(run.__file__).parents[1], tmp_path / "rails.json"
    asked = ["GRPO, recompute", "small, CE N=1024 H=896*", "support*", "counts", "calls"]
    asked = ["--only", *asked, "--pairs", "2", "--calls", "2", "--json", str(output)]
    rails.main(["--against", str(root), "--old", "abc", "--device", "cpu", "--quick", *asked])
    found, text = json.loads(output.read_text()), output.with_suffix(".md").read_text()
    assert capsys.readouterr().out.endswith(text + "\n")
    rows = {row["name"]: row for row in found["rows"]}
    assert len(rows) == 4 and rows["GRPO, recompute"]["bar"] == rails.LEAST
    assert rows["support of 64 ids"]["pairs"] == 2 and rows["support of 64 ids"]["ratio"] > 0
    assert "needs a GPU" in rows["small, CE N=1024 H=896, torch.compile"]["left out"]
    assert (found["calls"]["calls"], found["calls"]["differ"]) == (2, 0)
    assert all(old == new > 0 for old, new in found["counts"].values())
    assert f"| core lines | {found['counts']['core lines'][0]} |" in text and "abc" in text
    page = {"rows": [against.judged([1.0] * 4, 0.97)], "calls": found["calls"]}
    assert rails.is_well(page) and page["rows"][0]["verdict"] == "well"
    assert not rails.is_well({**page, "rows": [against.judged([0.9] * 4, 0.97)]})
    assert not rails.is_well({**page, "calls": found["calls"] | {"differ": 1}})
    assert against.judged([0.5], None)["verdict"] == "measured"


def test_rails_have_names_of_their_own() -> None:
    """All rows of the regression benchmark have different names, and their losses and
    implementations exist."""
    rows = list(rails.rails())
    assert len({rail.name for rail in rows}) == len(rows)
    for rail in rows:
        assert rail.work in works.WORKS and rail.ours in contestants.CONTESTANTS
        assert rail.theirs in {"old", "limit", *contestants.CONTESTANTS}
