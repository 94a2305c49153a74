"""A plot of each figure that a run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from . import files

Entries = list[dict[str, Any]]

FIGURES: dict[str, tuple[str, tuple[str, ...]]] = {  # file: label, the first of these that is there
    "reward": ("reward", ("reward",)),
    "loss": ("loss", ("loss",)),
    "entropy": ("entropy, nats", ("entropy",)),
    "clip_fraction": ("clipped share", ("clip_ratio/region_mean", "cispo_clip_ratio")),
    "kl": ("KL from the reference", ("kl",)),
    "kl_old": ("KL from the sampling policy (k3)", ("*/kl_old_k3",)),
    "step_time": ("seconds per step", ("step_time",)),
    "peak_memory": ("peak memory, MiB", ("peak_memory_mib",)),
}


def draw(entries: Entries, folder: Path) -> list[Path]:
    """A PNG for each figure that was measured; the paths."""
    paths = []
    for name, (label, keys) in FIGURES.items():
        key = next(filter(None, (_match(entries, key) for key in keys)), None)
        if key is None:
            continue
        measured = [entry for entry in entries if entry.get(key) is not None]
        points = [(entry["step"], entry[key]) for entry in measured]
        path = folder / f"{name}.png"
        with files.replacing(path) as partial:
            _draw(points, label, partial)
        paths.append(path)
    return paths


def _match(entries: Entries, key: str) -> str | None:
    """The first name that has a value somewhere."""
    names = dict.fromkeys(k for entry in entries for k, value in entry.items() if value is not None)
    if not key.startswith("*"):
        return key if key in names else None
    return next((name for name in names if name.endswith(key[1:])), None)


def _draw(points: list[tuple[int, float]], label: str, path: Path) -> None:
    steps, values = zip(*points, strict=True)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    many = len(values) >= 20
    axes.plot(steps, values, color="tab:blue", alpha=0.3 if many else 1, linewidth=1)
    if many:
        axes.plot(steps, _smooth(values), color="tab:blue", linewidth=1.8)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)


def _smooth(values: tuple[float, ...]) -> list[float]:
    """An exponential mean over a tenth of the run, without a bias to the first value."""
    decay, total, weight, found = 1 - 10 / max(len(values), 20), 0.0, 0.0, []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        found.append(total / weight)
    return found
