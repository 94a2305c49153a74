"""Report of a run in Markdown, and the summary line that ends the terminal output."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .callbacks import SHOWN
from .folder import checkpoints
from .schema import Recipe
from .schema import write as recipe_text

if TYPE_CHECKING:
    from .plots import HeldOut
    from .result import Result

DECODING = (
    "Greedy decoding takes the likeliest token each time, sampling draws at the temperature of "
    "training."
)
ERROR = "± is the standard error of a share."


def score(found: dict[str, Any]) -> str:
    """Return one line about the result of `evaluate.held_out`."""
    return (
        f"{found['accuracy']:.1%} of {found['problems']} problems solved by greedy decoding, "
        f"{found['sampled_accuracy']:.1%} by sampling"
    )


def ending(result: Result) -> str:
    if result.finished:
        return f"{len(result.plots)} plots, metrics, the model, {result.report} and {result.page}"
    kept = checkpoints(result.output)
    if not kept:
        return f"stopped after {result.steps} steps, without a checkpoint; the same begins anew"
    return f"stopped after {result.steps} steps; the same with resume=true continues"


def title(recipe: Recipe) -> str:
    return f"{recipe.algorithm}: {recipe.task}"


def state(recipe: Recipe, result: Result, parameters: int) -> str:
    return (
        f"{'finished' if result.finished else 'stopped'} after {result.steps} steps, "
        f"{result.seconds / 60:.1f} minutes; {recipe.model}, {parameters / 1e6:.2f} M parameters."
    )


def legend(result: Result) -> str:
    """Return the sentences that explain the table of scores on held-out problems."""
    return f"{result.split} {DECODING} {ERROR}"


def of_run(recipe: Recipe, result: Result, parameters: int) -> str:
    parts = [f"# {title(recipe)}", state(recipe, result, parameters)]
    if result.before is not None:
        samples = [[_cell(cell) for cell in row] for row in sample_rows(result)]
        samples[0] = sample_rows(result)[0]
        parts += ["## Held-out problems", legend(result)]
        parts += [table(solved_rows(result.held_out, result.steps))]
        parts += [table(samples)]
    if result.metrics:
        parts += ["## Metrics", table(metric_rows(result.metrics))]
    parts += [f"![{path.stem}](plots/{path.name})" for path in result.plots]
    parts += ["## Recipe", f"```yaml\n{recipe_text(recipe).strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def solved_rows(held_out: HeldOut, last: int) -> list[list[str]]:
    """Return a table row per evaluation up to step `last`, with the shares of problems solved and
    standard errors."""
    rows = [["", "problems", "solved, greedy", "solved, sampled", "mean score, greedy"]]
    for step, found in held_out:
        name = {0: "before", last: "after"}.get(step, f"step {step}")
        keys = ("accuracy", "sampled_accuracy")
        shares = (_share(found[key], found["problems"]) for key in keys)
        rows.append([name, str(found["problems"]), *shares, f"{found['score']:.3f}"])
    return rows


def _share(share: float, count: int) -> str:
    return f"{share:.1%} ± {math.sqrt(share * (1 - share) / count):.1%}"


def sample_rows(result: Result) -> list[list[str]]:
    """Return table rows of problem, answer, and the greedy completions before and after."""
    rows = [["problem", "answer", "before", "after"]]
    assert result.before is not None
    after = (result.after or result.before)["samples"]
    for a, b in zip(result.before["samples"][:5], after[:5], strict=True):
        last = _text(b["completion"]) if result.after else ""
        rows.append([_text(a["prompt"]), a["answer"], _text(a["completion"]), last])
    return rows


def metric_rows(entries: list[dict[str, Any]]) -> list[list[str]]:
    """Return table rows of each metric's mean over the first and the last tenth of a run."""
    rows = [["", "first tenth", "last tenth"]]
    tenth = -(-len(entries) // 10)
    for key, name in {**SHOWN, "peak_memory_mib": "peak memory, MiB"}.items():
        values = [entry[key] for entry in entries if entry.get(key) is not None]
        if values:
            ends = (values[:tenth], values[-tenth:])
            rows.append([name, *(f"{sum(part) / len(part):.4g}" for part in ends)])
    return rows


def table(rows: list[list[str]]) -> str:
    rule = ["---"] * len(rows[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


def _text(turns: Any) -> str:
    return turns if isinstance(turns, str) else str(turns[-1]["content"])


def _cell(text: str) -> str:
    """Return a text as inline code that fits one line of a Markdown table."""
    short = text if len(text) <= 80 else f"{text[:38]} ... {text[-38:]}"
    return f"`{' '.join(short.split()).replace('|', '¦').replace('`', chr(39))}`" if text else ""
