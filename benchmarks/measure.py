"""Measurement of memory, of the times of alternating calls, and of the *limit*: the time of a
call's matrix products alone.

H hidden width, V vocabulary.
"""

from __future__ import annotations

import gc
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cases import Case
from contestants import CONTESTANTS, Contestant, Found, Run
from live_tensors import LiveTensors
from oracle import EXACT, ROUNDED, Oracle, errors, make_oracle, misses
from works import WORKS, Inputs, Setting, Work, make_sets

# ---------------------------------------------------------------------- the limit

CHUNK = 4096


def make_limit(setting: Setting, inputs: Inputs) -> Callable[[Inputs], Any]:
    """Return a function that runs the necessary matrix products, by the vendor's library in the
    inputs' dtype.

    The products are the logits (and a teacher's logits), then dX and dW (if required) from a
    realistic logit gradient, in chunks of 4096 tokens. If the benchmarked call gets logits in place
    of hidden states, the returned function only copies the logits.
    """
    if setting.given:
        copy = torch.empty_like(inputs.pristine)
        return lambda i: copy.copy_(i.pristine)
    rows = min(CHUNK, setting.tokens)
    with torch.no_grad():
        z = inputs.hidden[:rows] @ inputs.weight.t()
        gradient = torch.empty_like(z)
        for part in torch.arange(rows, device=z.device).split(512):
            p = z[part].float().softmax(-1)
            p[torch.arange(len(part), device=p.device), inputs.targets[part]] -= 1
            gradient[part] = (p / setting.tokens).to(z.dtype)
    del z, p

    @torch.no_grad()
    def run(i: Inputs):
        z = i.hidden.new_empty(rows, setting.vocabulary)
        dx = torch.empty_like(i.hidden) if "hidden" in setting.trains else None
        dw = torch.empty_like(i.weight) if "weight" in setting.trains else None
        for start in range(0, len(i.hidden), rows):
            x = i.hidden[start : start + rows]
            n = len(x)
            torch.mm(x, i.weight.t(), out=z[:n])
            if setting.teacher:
                torch.mm(i.teacher_hidden[start : start + n], i.teacher_weight.t(), out=z[:n])
            if dx is not None:
                torch.mm(gradient[:n], i.weight, out=dx[start : start + n])
            if dw is not None:
                torch.mm(gradient[:n].t(), x, out=dw)
        return dx, dw

    return run


# ---------------------------------------------------------------------- the clock


class Stretch:
    """A timer from entry to exit of a `with` block; read `ms` after a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.events = None
        if device.type == "cuda":
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __enter__(self) -> Stretch:
        if self.events:
            self.events[0].record()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.stop = time.perf_counter()
        if self.events:
            self.events[1].record()

    @property
    def ms(self) -> float:
        if self.events:
            return self.events[0].elapsed_time(self.events[1])
        return 1e3 * (self.stop - self.start)


class Alone:
    """Times of an isolated call: `ms` until the GPU is done, `host_ms` until the call returns."""

    def __init__(self, function: Callable[[Inputs], Any], inputs: Inputs, device: torch.device):
        inputs.fresh()
        synchronize(device)
        start = time.perf_counter()
        function(inputs)
        returned = time.perf_counter()
        synchronize(device)
        self.host_ms = 1e3 * (returned - start)
        self.ms = 1e3 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def footprint(run: Run, inputs: Inputs, device: torch.device) -> tuple[Found, int, float]:
    """Return a run's result, its peak bytes in excess of the inputs, and its milliseconds."""
    inputs.fresh()
    synchronize(device)
    stretch = Stretch(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with stretch:
            found = run(inputs)
        synchronize(device)
        return found, torch.cuda.max_memory_allocated(device) - before, stretch.ms
    with LiveTensors() as meter, stretch:
        found = run(inputs)
    return found, meter.peak, stretch.ms


def memory(found: Found, peak: int, inputs: Inputs) -> dict[str, int]:
    """Return the peak bytes in excess of the inputs, and its parts: the returned tensors
    (gradients, per-token values), the float32 accumulator of dW, and the remaining working memory.

    The float32 accumulator of dW and the returned dW never exist at the same time: the working
    memory is the peak minus the larger of these two tensors, minus all other returned tensors.
    """
    given = inputs.logits
    taken = set() if given is None else {given.untyped_storage().data_ptr()}
    returned = apart = 0
    for name, value in found.values.items():
        storage = value.untyped_storage()
        if storage.data_ptr() in taken:
            continue
        taken.add(storage.data_ptr())
        kept = storage.nbytes()
        returned += kept
        apart += max(kept, found.accumulator) if name == "weight" else kept
    return {
        "peak_bytes": peak,
        "returned_bytes": returned,
        "accumulator_bytes": found.accumulator,
        "working_bytes": max(0, peak - apart),
    }


# ---------------------------------------------------------------------- a case

SMALL = 3  # Small calls are repeated `SMALL` times as often as large calls.
# An implementation that needs more than `SLOW` times the matrix products' time runs only `FEW`
# times.
SLOW, FEW = 4.0, 3


@dataclass
class Entry:
    """An implementation being timed in a case, and its results."""

    work: Work
    contestant: Contestant
    run: Run | None = None
    row: dict[str, Any] = field(default_factory=dict)
    stretches: list[Any] = field(default_factory=list)  # Stretch or Alone
    limits: list[Any] = field(default_factory=list)


def run_case(
    case: Case,
    repeats: int,
    device: torch.device,
    keep: Callable[[str], bool] = lambda name: True,
    seconds: float = math.inf,
) -> list[dict]:
    """Check correctness, then time; return one row for each benchmarked loss and implementation.

    Args:
        keep: function of an implementation's name; False leaves the implementation out.
        seconds: time limit for one implementation (half as long for small calls); at least `FEW`
            calls are timed.
    """
    torch.compiler.reset()
    setting, alone = case.setting, case.group == "small"
    turns = SMALL * repeats if alone else repeats
    inputs = make_sets(setting, device, 1 + turns)
    entries = [
        Entry(WORKS[work], CONTESTANTS[name])
        for work in case.works
        for name in case.contestants
        if keep(name)
    ]
    with torch.set_grad_enabled(bool(setting.trains)):
        for _, group in itertools.groupby(entries, key=lambda e: e.work.name):
            _gate(list(group), inputs[: setting.first], setting, device)
        limit = make_limit(setting, inputs[0])
        for entry in entries:
            if entry.run is not None:
                part = 0.5 if alone else 1.0  # Small calls get half of the time limit.
                try:
                    _race(entry, limit, inputs, turns, device, alone, part * seconds)
                except Exception as failure:  # such as torch.OutOfMemoryError
                    entry.row |= {"status": "failed", "reason": one_line(failure)}
                    entry.stretches.clear()
    setting = replace(setting, tokens=statistics.median(len(i.targets) for i in inputs))
    measured = [s.ms for entry in entries for s in entry.limits]
    overall = statistics.median(measured) if measured else math.nan
    for entry in entries:
        entry.row |= {"work": entry.work.name, "contestant": entry.contestant.name}
        entry.row |= {"limit_ms": overall}
        if entry.stretches:
            base = statistics.median(s.ms for s in entry.limits)
            entry.row |= {"limit_ms": base}
            entry.row |= _times([s.ms for s in entry.stretches], base, setting)
            if isinstance(entry.stretches[0], Alone):
                entry.row |= {"host_ms": statistics.median(s.host_ms for s in entry.stretches)}
    return [about(case) | entry.row for entry in entries]


def run_once(case: Case, device: torch.device, keep: Callable[[str], bool]) -> None:
    """Run each implementation that compiles code a single time, so that it is compiled before the
    timing; ignore errors.

    Two kinds of runs are left out: cases in which the caller passes in logits, since the logits
    are large, and eager PyTorch, which compiles nothing.
    """
    if case.setting.given:
        return
    sets = make_sets(case.setting, device, case.setting.first)
    with torch.set_grad_enabled(bool(case.setting.trains)):
        for work, name in itertools.product(case.works, case.contestants):
            contestant = CONTESTANTS[name]
            if name == "eager" or not keep(name) or unserved(contestant, WORKS[work], device):
                continue
            try:
                run = contestant.make(WORKS[work], case.setting)
                for inputs in sets:
                    run(inputs)
                synchronize(device)
            # An implementation that fails in this first run fails again in the timed run, which
            # reports the error.
            except Exception as failure:
                print(f"{case.name}, {name}: {one_line(failure)}")


def about(case: Case) -> dict[str, Any]:
    """Return the fields common to all rows of a case."""
    setting = case.setting
    found = {"case": case.name, "row": case.row, "group": case.group, "goal": case.goal}
    sizes = {name: getattr(setting, name) for name in ("tokens", "width", "vocabulary")}
    return found | sizes | {"dtype": str(setting.dtype).removeprefix("torch.")}


def _times(ms: list[float], limit: float, setting: Setting) -> dict[str, Any]:
    middle = statistics.median(ms)
    found = {"ms": middle, "low": min(ms), "high": max(ms), "runs": len(ms)}
    found["of_limit"] = limit / middle
    if setting.given:
        moved = 2 * setting.tokens * setting.vocabulary * setting.dtype.itemsize
        return found | {"gb_per_s": moved / middle / 1e6}
    return found | {"tflops": setting.flops / middle / 1e9}


def _gate(
    entries: list[Entry], sets: list[Inputs], setting: Setting, device: torch.device
) -> None:
    """Measure errors and memory of the last call of each implementation, and set `entry.run` if the
    implementation is correct."""
    oracle = make_oracle(entries[0].work, sets[-1], setting)
    for entry in entries:
        contestant, work = entry.contestant, entry.work
        begin = time.perf_counter()
        reason = unserved(contestant, work, device)
        if reason:
            entry.row = {"status": "skipped", "reason": reason}
            continue
        try:
            run = contestant.make(work, setting)
        except ValueError as unfit:
            entry.row = {"status": "skipped", "reason": str(unfit)}
            continue
        except Exception as missing:  # an import of a library may raise any error
            entry.row = {"status": "skipped", "reason": one_line(missing)}
            continue
        try:
            _measure(entry, run, sets, oracle, setting, device)
        except NotImplementedError as unfit:
            entry.row = {"status": "skipped", "reason": one_line(unfit)}
        # An error of one implementation must not stop the benchmark case.
        except Exception as failure:
            entry.row = {"status": "failed", "reason": one_line(failure)}
        if device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(device)  # a persistent CUDA error ends the program here
            torch.cuda.empty_cache()
        entry.row["gate_seconds"] = time.perf_counter() - begin


def poison(device: torch.device, setting: Setting) -> None:
    """Fill free GPU memory with NaN, so that elements left unwritten by the next run are
    visible."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    outputs = setting.tokens * setting.width + 2 * setting.vocabulary * setting.width
    elements = outputs + 4096 * setting.vocabulary
    torch.full((elements,), torch.nan, device=device)


def is_ours(contestant: str) -> bool:
    return contestant.startswith("head")


def unserved(contestant: Contestant, work: Work, device: torch.device) -> str:
    if contestant.gpu and device.type != "cuda":
        return "needs a GPU"
    if contestant.works is not None and work.name not in contestant.works:
        return f"has no {work.name}"
    return ""


def _measure(
    entry: Entry,
    run: Run,
    sets: list[Inputs],
    oracle: Oracle,
    setting: Setting,
    device: torch.device,
) -> None:
    *before, inputs = sets
    for other in before:
        run(other)
    poison(device, setting)
    inputs.fresh()
    found = whole(run)(inputs)
    tolerance = ROUNDED if entry.contestant.rounded else EXACT
    measured = errors(found, oracle)
    out = misses(measured, tolerance)
    del found
    if before:  # Recompilation leaves reference cycles, which keep gradients in memory.
        gc.collect()
    found, peak, _ = footprint(whole(run), inputs, device)
    entry.row = {
        "status": "failed" if out else "ok",
        "reason": "; ".join(out),
        "tolerance": tolerance.name,
        "errors": measured,
        "how": found.how,
    } | memory(found, peak, inputs)
    if not out:
        entry.run = run


def _race(
    entry: Entry,
    limit: Callable[[Inputs], Any],
    inputs: list[Inputs],
    repeats: int,
    device: torch.device,
    alone: bool,
    seconds: float,
) -> None:
    """Time one implementation and the necessary matrix products, by alternating calls.

    A GPU at its power cap runs faster after a call with little power draw. For equal conditions,
    each call of the implementation follows a call of the matrix products, never a call of another
    implementation.
    """
    assert entry.run is not None
    run = entry.run if alone else whole(entry.run)
    for turn in range(repeats + 1):
        i = inputs[turn % len(inputs)]
        timed = Alone if alone else _timed
        entry.limits.append(timed(limit, i, device))
        entry.stretches.append(timed(run, i, device))
        synchronize(device)
        if turn == 0:
            begin = time.perf_counter()
        slow = not alone and entry.stretches[0].ms > SLOW * entry.limits[0].ms
        if turn >= FEW and (slow or time.perf_counter() - begin > seconds):
            break
    del entry.stretches[0], entry.limits[0]  # drops the warm-up


def whole(run: Run) -> Run:
    """Return a run that also reads the values that a training step does not need
    (`Found.read`)."""
    return lambda inputs: run(inputs).read()


def _timed(function: Callable[[Inputs], Any], inputs: Inputs, device: torch.device) -> Stretch:
    inputs.fresh()
    with Stretch(device) as stretch:
        function(inputs)
    return stretch


def one_line(error: BaseException) -> str:
    """Return the error text in one line, without the paths of the machine."""
    first = (str(error) or type(error).__name__).strip().splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    without = re.sub(r"/(?:[\w.+-]+/)+", "", first)
    return f"{type(error).__name__}: {without}"[:200]
