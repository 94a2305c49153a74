"""Generate docs/losses.md, every loss of the frameworks in headloss: `python docs losses`.

The folder docs/frameworks has the rows of the page, one file for each framework:

    name = "verl"                    # the heading on the page
    version = "0.9.1"                # of the framework, in the tests
    source = "https://..."

    [[loss]]
    name = 'loss_mode="dppo_tv"'     # as users of the framework write it
    equal = "hl.dppo(...)"           # the headloss expression; several lines are a sum
    test = "tests/....py::test_name" # a test of the equality
    note = "..."                     # optional: differences, with both numbers
    none = "..."                     # instead of equal and test: why no equal exists

docs/frameworks/reductions.toml and metrics.toml hold two tables of names. In an expression, `hl` is
headloss and the names in `NAMES` are numbers; tests/test_losses_page.py evaluates each expression.
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

`python docs losses` generates this page from [docs/frameworks](frameworks). Each row names a loss
of a framework, the headloss expression with equal value and gradient, and the test that compares
the two in float64; `hl` is `import headloss as hl`. Replace a number in a headloss expression, such
as a clip bound, by the value of the framework's option. Tests under `tests/frameworks` call the
frameworks' own functions and run by `make test-frameworks`; all other tests run in `make test`.
"""
REDUCTIONS = """\
## Reductions

A reduction gives each token a weight, and `hl.Totals` holds the denominators of the weights. By
default a loss is divided by the token or sequence count of the micro-batch; `hl.Batch(...,
totals=...)` sets the counts of the whole optimizer step. `.over(...)` changes the reduction of a
term.
"""
METRICS = """\
## Metrics

A term reports metrics under the term's name: `out.metrics["grpo/ratio"]`. For each metric of
headloss, the table lists the name under which each framework logs an equal value; *none* means that
the framework does not log the value.
"""


def framework(name: str) -> dict[str, Any]:
    """Return the name, version, source and rows of a framework."""
    return {"loss": [], **_read(name)}


def page() -> str:
    """Return the whole text of docs/losses.md."""
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
    """Return a table whose columns are the keys of the rows in docs/frameworks/NAME.toml."""
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
