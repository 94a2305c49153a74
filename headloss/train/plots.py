"""Plots of a run's metrics, overlays of several runs, and planned memory."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from . import files

Entries = list[dict[str, Any]]
Points = list[tuple[int, float]]
# pairs (step, result of `evaluate.held_out`) of a run
HeldOut = Sequence[tuple[int, dict[str, Any]]]

# For each figure file: the axis label, and candidate log keys; the figure shows the first key that
# the log has.
FIGURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "reward": ("mean reward of a step", ("reward",)),
    "loss": ("loss, nats per token", ("loss",)),
    "entropy": ("entropy, nats per token", ("entropy",)),
    "clip_fraction": ("share that is clipped", ("clip_ratio/region_mean", "cispo_clip_ratio")),
    "kl": ("KL from the reference, nats per token", ("kl",)),
    "kl_old": ("KL from the sampler, nats per token", ("*/kl_old_k3",)),
    "step_time": ("time of a step, seconds", ("step_time",)),
    "tokens_per_second": ("tokens per second", ("tokens_per_second",)),
    "peak_memory": ("peak memory, MiB", ("peak_memory_mib",)),
}
POLICY_LOSS = "loss (its gradient counts, not its value)"
SOLVED = "share of held-out problems solved"
SMOOTHED = 20  # A curve of at least 20 points is smoothed.
# Widths of axis labels and of legends, in characters per line.
LABEL_WIDTH, NAME_WIDTH = 36, 44
WINDOW = 10  # Tokens per second are averaged over the last 10 log entries.


def draw(entries: Entries, folder: Path, held_out: HeldOut = ()) -> list[Path]:
    """Draw a PNG for each metric that was logged, with held-out scores first; return the paths."""
    shown = _solved(held_out)
    paths = [_one(folder / "held_out.png", SOLVED, {}, shown)] if shown else []
    scores = _scores(held_out)
    for name, (label, points) in measured(entries).items():
        marks = scores if name == "reward" else {}
        paths.append(_one(folder / f"{name}.png", label, {"": points}, marks))
    return paths


def overlay(runs: Mapping[str, tuple[Entries, HeldOut]], folder: Path) -> list[Path]:
    """Draw a PNG per metric with one smoothed curve for each run; return the paths."""
    shown = {
        f"{run}, {label}": points
        for run, (_, held_out) in runs.items()
        for label, points in _solved(held_out).items()
    }
    paths = [_one(folder / "held_out.png", SOLVED, {}, shown)] if shown else []
    figures = {run: measured(entries) for run, (entries, _) in runs.items()}
    for name in FIGURES:
        having = {run: found[name] for run, found in figures.items() if name in found}
        if having:
            label = " / ".join(dict.fromkeys(label for label, _ in having.values()))
            curves = {run: points for run, (_, points) in having.items()}
            paths.append(_one(folder / f"{name}.png", label, curves, {}))
    return paths


def measured(entries: Entries) -> dict[str, tuple[str, Points]]:
    """Return label and (step, value) points of each metric that was logged."""
    rates = [rate(entries[: i + 1]) for i in range(len(entries))]
    entries = [{**e, "tokens_per_second": r} for e, r in zip(entries, rates, strict=True)]
    found: dict[str, tuple[str, Points]] = {}
    for name, (label, keys) in FIGURES.items():
        key = next(filter(None, (_match(entries, key) for key in keys)), None)
        if key is None:
            continue
        if name == "loss" and "reward" in found:
            label = POLICY_LOSS
        found[name] = (label, [(e["step"], e[key]) for e in entries if e.get(key) is not None])
    return found


def rate(entries: Entries) -> float | None:
    """Return tokens per second over the last WINDOW log entries, prompts included; None if no entry
    counts tokens."""
    counted = [entry for entry in entries if entry.get("num_tokens") is not None]
    last = counted[-WINDOW:]
    if not last or any(entry.get("step_time") is None for entry in last):
        return None
    before = counted[-WINDOW - 1] if len(counted) > WINDOW else {"num_tokens": 0, "step": 0}
    steps = [entry["step"] for entry in (before, *last)]
    seconds = sum(
        (step - previous) * entry["step_time"]
        for previous, step, entry in zip(steps, steps[1:], last, strict=False)
    )
    return (last[-1]["num_tokens"] - before["num_tokens"]) / seconds if seconds > 0 else None


def _match(entries: Entries, key: str) -> str | None:
    """Return the first logged name that equals `key` or, for a `key` "*END", ends with END."""
    names = dict.fromkeys(k for entry in entries for k, value in entry.items() if value is not None)
    if not key.startswith("*"):
        return key if key in names else None
    return next((name for name in names if name.endswith(key[1:])), None)


def _solved(held_out: HeldOut) -> dict[str, Points]:
    """Return the share of problems solved at each step, by greedy decoding and by sampling."""
    ways = {"greedy": "accuracy", "sampled": "sampled_accuracy"}
    found = {way: [(step, row[key]) for step, row in held_out] for way, key in ways.items()}
    return {way: points for way, points in found.items() if points}


def _scores(held_out: HeldOut) -> dict[str, Points]:
    """Return the mean held-out score of sampled completions, to compare with the mean reward."""
    points = [(step, row["sampled_score"]) for step, row in held_out if "sampled_score" in row]
    return {"held-out problems, sampled": points} if points else {}


def _one(path: Path, label: str, curves: dict[str, Points], marks: dict[str, Points]) -> Path:
    """Draw smoothed `curves` and dashed lines with points (`marks`) against optimizer steps."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, (name, points) in enumerate(curves.items()):
        steps, values = zip(*points, strict=True)
        color = f"C{i}"
        if len(values) < SMOOTHED:
            axes.plot(steps, values, color=color, linewidth=1, label=name or None)
            continue
        each = None if name else "as logged"
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1, label=each)
        axes.plot(steps, _smooth(values), color=color, linewidth=1.8, label=name or "smoothed")
    for i, (name, points) in enumerate(marks.items(), len(curves)):
        axes.plot(*zip(*points, strict=True), "o--", color=f"C{i}", linewidth=1, label=name)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(textwrap.fill(label, LABEL_WIDTH))
    axes.grid(alpha=0.3)
    handles, names = axes.get_legend_handles_labels()
    if names:
        axes.legend(handles, [textwrap.fill(n, NAME_WIDTH) for n in names], fontsize=8)
    with files.replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return path


def memory(
    path: Path, title: str, tokens: list[int], curves: Mapping[str, list[float]], mark: int
) -> None:
    """Draw planned memory in GiB against tokens, dotted for "plain logits", with a vertical line at
    `mark` tokens.

    Raise ValueError if matplotlib does not support the suffix of `path`.
    """
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    if path.suffix.removeprefix(".") not in FigureCanvasAgg(figure).get_supported_filetypes():
        raise ValueError(f"--plot: got {str(path)!r}, want a file ending in .png, .svg or .pdf")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot(tokens, curve, "k:" if name == "plain logits" else "-", label=name)
    axes.axvline(mark, color="gray", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    label = "planned memory beyond inputs\nand returned gradients, GiB"
    axes.set(yscale="log", xlabel="scored tokens of a call", ylabel=label)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    path.parent.stat()  # raises OSError for a missing folder, which a plot does not create
    with files.replacing(path) as partial:
        figure.savefig(partial, format=path.suffix.removeprefix("."), dpi=130)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return exponential moving averages over a tenth of the run, corrected for initial bias."""
    decay, total, weight, found = 1 - 10 / max(len(values), 20), 0.0, 0.0, []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        found.append(total / weight)
    return found
