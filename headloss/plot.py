"""A drawing with matplotlib: the memory of a call against its tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .options import SCHEDULES, Options
from .run.pieces import equal_lengths
from .run.plan import Problem, make_plan

GIB = 1 << 30


def memory(problem: Problem, options: Options, backend: str, title: str, path: Path) -> list[str]:
    """Planned bytes against tokens, of plain logits and of every schedule, as PNG or SVG.

    Returns:
        A line for each schedule that cannot serve this objective, with the reason.

    Raises:
        ValueError: matplotlib is not installed, or does not know the suffix of `path`.
    """
    figure = _figure(path)
    axes = figure.add_subplot()
    last = max(17, (4 * problem.tokens - 1).bit_length())  # four times as many, or 2 ** 17
    tokens = sorted({problem.tokens, *(1 << n for n in range(8, 1 + last))})
    longest = max(problem.lengths or [problem.tokens])
    problems = [problem.of(tokens=n, lengths=equal_lengths(n, longest)) for n in tokens]
    curves: dict[str, list[float]] = {}
    notes = []
    for schedule in (s for s in SCHEDULES if s != "auto"):
        fixed = dataclasses.replace(options, schedule=schedule)
        try:
            plans = [make_plan(size, fixed, backend) for size in problems]
        except ValueError as error:
            notes.append(f"{schedule}: {error}")
            continue
        curves[schedule] = [plan.total_bytes / GIB for plan in plans]
        curves["plain logits"] = [plan.plain_bytes / GIB for plan in plans]
    for name, curve in curves.items():
        axes.plot(tokens, curve, "k:" if name == "plain logits" else "-", label=name)
    axes.axvline(problem.tokens, color="gray", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    label = "planned memory of loss and gradients, GiB"
    axes.set(yscale="log", xlabel="scored tokens of a call", ylabel=label)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    _save(figure, path)
    return notes


def _figure(path: Path) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot needs {error.name}: pip install 'headloss[plot]'") from None
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    known = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"--plot: got {str(path)!r}, want a file ending in .png, .svg or .pdf")
    return figure


def _save(figure: Any, path: Path) -> None:
    partial = path.with_name(f".partial-{path.name}")
    try:
        figure.savefig(partial, dpi=130)
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"--plot: cannot write {path}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
