"""What a run came to, in Markdown and in a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .callbacks import SHOWN
from .folder import checkpoints
from .schema import Recipe
from .schema import write as recipe_text

if TYPE_CHECKING:
    from .result import Result

LEGEND = "None of these problems is among those trained on."


def score(found: dict[str, Any]) -> str:
    """One line about `evaluate.held_out`."""
    return (
        f"{found['accuracy']:.1%} of {found['problems']} problems solved by greedy decoding, "
        f"{found['sampled_accuracy']:.1%} by sampling"
    )


def ending(result: Result) -> str:
    if result.finished:
        return f"{len(result.plots)} plots, metrics, the model and {result.report}"
    kept = checkpoints(result.output)
    if not kept:
        return f"stopped after {result.steps} steps, without a checkpoint; the same begins anew"
    return f"stopped after {result.steps} steps; the same with resume=true continues"


def of_run(recipe: Recipe, result: Result, parameters: int) -> str:
    state = "finished" if result.finished else "stopped"
    parts = [
        f"# {recipe.algorithm}: {recipe.task}",
        f"{state} after {result.steps} steps, {result.seconds / 60:.1f} minutes; {recipe.model}, "
        f"{parameters / 1e6:.2f} M parameters.",
    ]
    if result.before is not None:
        parts += ["## Held-out problems", LEGEND, _accuracy(result), _samples(result)]
    if result.metrics:
        parts += ["## Metrics", _metrics(result.metrics)]
    parts += [f"![{path.stem}](plots/{path.name})" for path in result.plots]
    parts += ["## Recipe", f"```yaml\n{recipe_text(recipe).strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _accuracy(result: Result) -> str:
    rows = [["", "problems", "solved, greedy", "solved, sampled", "mean score, greedy"]]
    for name in ("before", "after"):
        if (found := getattr(result, name)) is not None:
            shares = (f"{found[key]:.1%}" for key in ("accuracy", "sampled_accuracy"))
            rows.append([name, str(found["problems"]), *shares, f"{found['score']:.3f}"])
    return table(rows)


def _samples(result: Result) -> str:
    rows = [["problem", "answer", "before", "after"]]
    assert result.before is not None
    after = (result.after or result.before)["samples"]
    for a, b in zip(result.before["samples"][:5], after[:5], strict=True):
        last = _text(b["completion"]) if result.after else ""
        rows.append([_text(a["prompt"]), a["answer"], _text(a["completion"]), last])
    return table([[_cell(cell) for cell in row] for row in rows])


def _metrics(entries: list[dict[str, Any]]) -> str:
    rows = [["", "first tenth", "last tenth"]]
    tenth = -(-len(entries) // 10)
    for key, name in {**SHOWN, "peak_memory_mib": "peak memory, MiB"}.items():
        values = [entry[key] for entry in entries if entry.get(key) is not None]
        if values:
            ends = (values[:tenth], values[-tenth:])
            rows.append([name, *(f"{sum(part) / len(part):.4g}" for part in ends)])
    return table(rows)


def table(rows: list[list[str]]) -> str:
    rule = ["---"] * len(rows[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


def _text(turns: Any) -> str:
    return turns if isinstance(turns, str) else str(turns[-1]["content"])


def _cell(text: str) -> str:
    """A text as code, on one line of a table."""
    short = text if len(text) <= 80 else f"{text[:38]} ... {text[-38:]}"
    return f"`{' '.join(short.split()).replace('|', '¦').replace('`', chr(39))}`" if text else ""
