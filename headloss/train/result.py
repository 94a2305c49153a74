"""Result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a run.

    Attributes:
        output: the output folder.
        finished: False if Ctrl-C or SIGTERM stopped the run. A stopped run has a checkpoint of its
            last step, unless the signal came before the first step, in an evaluation, or twice.
        steps: number of optimizer steps, including those before a resume.
        before, after: held-out results "accuracy", "score", "problems" and "samples"; None without
            held-out problems, and `after` is None for a stopped run.
        split: sentences on the runs that trained on the held-out problems.
        held_out: (step, result) of each evaluation: before, during and after training.
        metrics: the lines of metrics.jsonl.
        plots: paths of the PNG files.
        seconds: duration of this call.
    """

    output: Path
    finished: bool
    steps: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    split: str
    held_out: list[tuple[int, dict[str, Any]]]
    metrics: list[dict[str, Any]]
    plots: list[Path]
    seconds: float

    @property
    def report(self) -> Path:
        return self.output / "report.md"

    @property
    def page(self) -> Path:
        """Path of the report as one HTML file with embedded plots."""
        return self.output / "report.html"

    @property
    def model(self) -> Path:
        return self.output / "model"
