"""What a run came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to.

    Attributes:
        output: the folder.
        finished: False where Ctrl-C or SIGTERM ended it; there is a checkpoint of its last step,
            unless that came before the first step, in an evaluation, or twice.
        steps: optimizer steps in all.
        before, after: of the problems kept aside, "accuracy", "score", "problems", "samples";
            None without such problems, and `after` where the run has not finished.
        split: sentences on those problems: who was trained on them.
        held_out: (step, what was found) of these problems: before, in between and after.
        metrics: the lines of metrics.jsonl.
        plots: paths of PNG files.
        seconds: of this call.
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
        """The report as one file of HTML, plots inside."""
        return self.output / "report.html"

    @property
    def model(self) -> Path:
        return self.output / "model"
