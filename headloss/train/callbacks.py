"""Callbacks of a run: metrics.jsonl, a progress bar, held-out evaluations, Ctrl-C and SIGTERM."""

from __future__ import annotations

import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from . import files, folder, plots

MIB = 1 << 20
SHOWN = {  # metrics shown on the terminal, by their names in TRL's log
    "loss": "loss",
    "reward": "reward",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clipped",
    "kl": "kl",
    "mean_token_accuracy": "tokens right",
    "step_time": "s/step",
    "tokens_per_second": "tokens/s",
}


class Measure(TrainerCallback):
    """Writes each log entry to metrics.jsonl, with step time and peak memory."""

    def __init__(self, lines: files.Lines) -> None:
        self.lines = lines
        self.entries: list[dict[str, Any]] = []
        self._times: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start a resumed run with the log lines of its checkpoint."""
        self.entries = [_line(logged) for logged in state.log_history if "loss" in logged]
        if not state.is_world_process_zero:
            return
        damaged = self.lines.keep(self.entries)
        if damaged is not None and state.global_step:
            what = f"{self.lines.path}, line {damaged}"
            folder.warn(f"{what}: is missing or damaged, and is taken from the checkpoint")

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._times.append(time.perf_counter() - self._begun)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in logs or not self._times:
            return
        logged = state.log_history[-1]  # `Trainer` stores `log_history` in its checkpoints
        logged["step_time"] = sum(self._times) / len(self._times)
        logged["peak_memory_mib"] = peak_memory() / MIB
        self._times = []
        entry = _line(logged)
        self.entries.append(entry)
        if state.is_world_process_zero:
            self.lines.add(entry)


def _line(logged: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the trainer's log as a line of metrics.jsonl."""
    return {"step": logged["step"], **{name: files.finite(v) for name, v in logged.items()}}


def peak_memory() -> int:
    """Return peak memory in bytes: of the GPU's tensors, or of the process without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Bar(TrainerCallback):
    """Progress bar with metrics and time left on a terminal; about 20 printed lines elsewhere."""

    def __init__(self, name: str, measure: Measure) -> None:
        self.name, self.measure = name, measure
        self.console = Console(soft_wrap=True, highlight=False)
        self._shown = 0
        self.bar: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._shown = state.global_step
        self._begun, self._begun_at = time.perf_counter(), state.global_step
        columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"))
        self.bar = Progress(
            TextColumn(self.name),
            *columns,
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            disable=not (state.is_world_process_zero and self.console.is_terminal),
        )
        self.task = self.bar.add_task(
            "", total=state.max_steps, completed=state.global_step, figures=""
        )
        self.bar.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the latest metrics; runs after `Measure.on_log`."""
        if "loss" not in logs or not state.is_world_process_zero or self.bar is None:
            return
        line = figures(latest(self.measure.entries))
        self.bar.update(self.task, completed=state.global_step, figures=line)
        last = state.global_step >= state.max_steps
        if not self.console.is_terminal and (
            last or state.global_step - self._shown >= state.max_steps / 20
        ):
            self._shown = state.global_step
            left = "" if last else f"  {self._left(state)} left"
            print(f"{self.name} {state.global_step}/{state.max_steps}  {line}{left}", flush=True)

    def _left(self, state: Any) -> str:
        """Return the time left at the average pace of the run so far, as h:mm:ss."""
        done = state.global_step - self._begun_at
        pace = (time.perf_counter() - self._begun) / max(done, 1)
        return str(timedelta(seconds=round(pace * (state.max_steps - state.global_step))))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the progress bar from the terminal."""
        if self.bar is not None:
            self.bar.stop()


def latest(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last value of each metric.

    A second step on the same samples logs no reward; the first step has logged the samples' reward.
    """
    found: dict[str, Any] = {"tokens_per_second": plots.rate(entries)}
    for entry in entries[-plots.WINDOW :]:
        found |= {name: value for name, value in entry.items() if value is not None}
    return found


def figures(entry: dict[str, Any]) -> str:
    """Return a log entry's main metrics (the keys of `SHOWN`) as one line of text."""
    shown = {k: f"{entry[k]:.3g}" for k in SHOWN if entry.get(k) is not None}
    if "tokens_per_second" in shown:
        shown["tokens_per_second"] = f"{entry['tokens_per_second']:.0f}"
    return "  ".join(f"{SHOWN[k]} {text}" for k, text in shown.items())


class HeldOut(TrainerCallback):
    """Scores the held-out problems every few steps, and writes the scores to held_out.jsonl."""

    def __init__(self, lines: files.Lines, every: int, score: Callable[[], dict[str, Any]]) -> None:
        self.lines, self.every, self.score = lines, every, score
        self.found: list[tuple[int, dict[str, Any]]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop evaluations after the checkpoint that a run resumes from."""
        last = state.global_step
        kept = [line for line in self.lines.read() if line.get("step", math.inf) <= last]
        self.found = [(line["step"], line) for line in kept]
        if state.is_world_process_zero and self.lines.path.exists():
            self.lines.keep(kept)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.every or state.global_step % self.every or state.global_step >= state.max_steps:
            return
        found = {name: value for name, value in self.score().items() if name != "samples"}
        line = {"step": state.global_step, **found}
        self.found.append((state.global_step, line))
        if state.is_world_process_zero:
            self.lines.add(line)


class Interrupt(TrainerCallback):
    """Context manager that handles Ctrl-C and SIGTERM in its `with` block.

    During training, the first signal makes training continue to the next optimizer step that allows
    a resume, save a checkpoint there and stop; a second signal raises KeyboardInterrupt at once.
    Outside training, Ctrl-C and SIGTERM raise KeyboardInterrupt.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    # Seconds in which repeated signals count once, because launchers forward a signal to ranks.
    ONE_PRESS = 1.0

    def __init__(self) -> None:
        self.trainer: Any = None
        self.asked = self.stopped = False
        self._training = False
        self._last = -self.ONE_PRESS
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(self, *args: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._training = True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._training = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last < self.ONE_PRESS:
            return
        self._last = now
        if self.asked or not self._training:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this step; once more stops at once", file=sys.stderr, flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        last = state.global_step >= state.max_steps
        if self._asked_on_any() and (last or self.trainer.can_resume_here):
            control.should_save = control.should_log = control.should_training_stop = True
            self.stopped = True

    def _asked_on_any(self) -> bool:
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return self.asked
        asked = torch.tensor([float(self.asked)], device=accelerator.device)
        return bool(accelerator.reduce(asked, "sum").item() > 0)
