"""docs/losses.md: every loss of the frameworks, in headloss. `python docs losses` rewrites it.

The rows stand in docs/frameworks, one file for each framework:

    name = "verl"                    # shown
    version = "0.9.1"                # that the tests compare with
    source = "https://..."

    [[loss]]
    name = 'loss_mode="dppo_tv"'     # as its users ask for it
    equal = "hl.dppo(...)"           # the headloss expression that equals it; several lines: a sum
    test = "tests/....py::test_name" # what shows that it does
    note = "..."                     # optional: where the two differ, with both numbers
    none = "..."                     # instead of equal and test: why there is no equal

docs/frameworks/reductions.toml and metrics.toml hold two tables of names. In an expression, `hl` is
headloss and the names in `NAMES` are numbers; tests/test_losses_page.py evaluates each.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from headloss.losses.catalogue import markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "losses.md"
DATA = ROOT / "docs" / "frameworks"
FRAMEWORKS = (
    *("trl", "verl", "liger", "openrlhf", "agilerl", "prime_rl", "nemo_rl", "ms_swift", "skyrl"),
    *("areal", "roll", "miles", "tinker", "axolotl", "llama_factory", "speculators", "specforge"),
    *("nemo_automodel", "other_drafts"),
)
NAMES = {
    **{"head": None, "teacher_head": None},
    **{"n": 1024, "beta": 0.1, "alpha": 0.5, "gamma": 0.5, "delta": 0.2, "tau": 1.0},
    **{"low": 0.5, "high": 2.0, "epsilon": 0.2, "weight": 0.1},
}

HEAD = """\
# The losses of the frameworks, in headloss

Made by `python docs losses` from [docs/frameworks](frameworks). A row names a loss of a
framework, the headloss expression that has its value and its gradient, and the test that compares
the two in float64; `hl` is `import headloss as hl`. Numbers in an expression stand for the
framework's own options. Tests under `tests/frameworks` call the framework's own functions and run
by `make test-frameworks`; the others run in `make test`.
"""
REDUCTIONS = """\
## Reductions

A reduction is a weight per token, and its denominators are those of `hl.Totals`: those of a
micro-batch unless the batch is given the step's (`hl.Batch(..., totals=...)`). `.over(...)` gives a
term another one.
"""
METRICS = """\
## Metrics

A term reports under its own name: `out.metrics["grpo/ratio"]`. The table gives the name that a
framework logs the same number by; *none* where it logs no such number.
"""


def framework(name: str) -> dict[str, Any]:
    """A framework's name, version, source and rows."""
    return {"loss": [], **_read(name)}


def page() -> str:
    """The whole text of docs/losses.md."""
    parts = [HEAD]
    parts += [_section(framework(name)) for name in FRAMEWORKS]
    parts += [_named(REDUCTIONS, "reductions"), _named(METRICS, "metrics")]
    return "\n".join(parts)


def _section(found: dict[str, Any]) -> str:
    rows = [(f"`{row['name']}`", _equal(row), _shown(row)) for row in found["loss"]]
    table = markdown(("loss", "in headloss", "shown by"), rows)
    return f"## {found['name']}\n\n{found['version']}, {found['source']}\n\n{table}\n"


def _equal(row: dict[str, str]) -> str:
    if "none" in row:
        return f"none: {row['none']}"
    lines = "<br>".join(f"`{line}`" for line in row["equal"].strip().splitlines())
    return f"{lines}<br>{row['note']}" if "note" in row else lines


def _shown(row: dict[str, str]) -> str:
    if "none" in row:
        return ""
    file, _, test = row["test"].partition("::")
    return f"[{test}](../{file})"


def _named(text: str, name: str) -> str:
    """A table whose columns are the keys of its rows."""
    found = _read(name)
    columns = found["columns"]
    rows = [tuple(row.get(column, "") for column in columns) for row in found.get("row", [])]
    return f"{text}\n{markdown(tuple(columns), rows)}\n"


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text())


def main() -> int:
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
