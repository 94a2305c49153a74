"""docs/losses.md is up to date, its expressions are valid objectives, and its tests exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import headloss as hl
from headloss.losses.catalogue import TERMS, also_called

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("losses_page", ROOT / "docs" / "losses.py")
assert spec is not None and spec.loader is not None
losses = importlib.util.module_from_spec(spec)
spec.loader.exec_module(losses)
ROWS = [(name, row) for name in losses.FRAMEWORKS for row in losses.framework(name)["loss"]]
EQUAL = [(name, row) for name, row in ROWS if "none" not in row]


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_page_is_current() -> None:
    assert losses.PAGE.read_text() == losses.page(), "run `python docs losses`"


@pytest.mark.parametrize("framework", losses.FRAMEWORKS)
def test_rows(framework: str) -> None:
    """For each loss of a framework, the docs give an equal headloss expression that can be built,
    and name an existing test of this equality."""
    for row in (row for name, row in EQUAL if name == framework):
        made = eval(f"({row['equal']})", {"hl": hl, **losses.NAMES})
        assert isinstance(made, hl.Term | hl.Objective) or callable(made), row["equal"]
        file, _, test = row["test"].partition("::")
        assert test in names_in(file), row["test"]


def test_rows_are_complete() -> None:
    for framework, row in ROWS:
        keys = {"name", "none"} if "none" in row else {"name", "equal", "test"}
        assert set(row) - {"note"} == keys, (framework, row)
        assert all(row.values()), (framework, row)
    for name in losses.FRAMEWORKS:
        names = [row["name"] for framework, row in ROWS if framework == name]
        assert len(set(names)) == len(names), name


def test_other_names_are_on_the_page() -> None:
    """If a term's docstring says "Also called: verl dppo_tv", the table of that framework has a
    row for this name, and the row uses the term."""
    names = {losses.framework(name)["name"]: name for name in losses.FRAMEWORKS}
    for factory in TERMS:
        for framework, name in also_called(factory):
            rows = [row for key, row in EQUAL if key == names[framework]]
            uses = [r for r in rows if re.search(rf"hl\.{factory.__name__}\(", r["equal"])]
            assert any(name in row["name"] for row in uses), (factory.__name__, framework, name)
