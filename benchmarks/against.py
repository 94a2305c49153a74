"""Test if a new version of headloss is slower than an old version, by alternating calls.

The time of a GPU at its power cap varies by several percent from run to run. Calls of the old and
the new version alternate, so that slow changes of the GPU's speed cancel in the ratio of the two
times of a pair of calls. The new version counts as slower if the lower confidence bound of the
median of old time / new time is below the constant `LEAST`. Runs without a named memory budget get
the budget `MEMORY`, since the default budgets of the old and the new version may differ.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import contestants
import measure
import torch
import works
from cases import Case
from contestants import CONTESTANTS, Found

NAME = "headloss_before"
MEMORY = 5 << 30  # Bytes.
LEAST = 0.97
SURE = 1.96  # Standard deviations in a 95 % confidence interval.
# `ROWS` rows of each result are compared. The allowed relative difference `AGREE` is large, because
# some implementations round logits.
ROWS, AGREE = 64, 0.5


def load(folder: Path) -> ModuleType:
    """Import the package of a checkout under the name `NAME`, with its internal imports renamed."""
    target = Path(tempfile.mkdtemp(prefix="headloss-")) / NAME
    shutil.copytree(folder / "headloss", target, ignore=shutil.ignore_patterns("__pycache__"))
    for path in target.rglob("*.py"):
        text = path.read_text()
        for old in ("headloss::", "import headloss", "from headloss"):
            text = text.replace(old, old.replace("headloss", NAME))
        path.write_text(text)
    sys.path.insert(0, str(target.parent))
    return importlib.import_module(NAME)


@contextlib.contextmanager
def using(package: ModuleType) -> Iterator[None]:
    """Return a context in which the benchmark modules `works` and `contestants` call the headloss
    version `package`. A run that sets no memory budget gets the budget `MEMORY`."""
    before = works.hl, contestants.MEMORY
    try:
        works.hl = contestants.hl = package
        contestants.MEMORY = MEMORY
        yield
    finally:
        works.hl, contestants.MEMORY = before
        contestants.hl = works.hl


def lower_bound(ratios: list[float]) -> float:
    """Return the lower 97.5 % confidence bound of the median of `ratios`, computed as an order
    statistic of `ratios`."""
    n = len(ratios)
    return sorted(ratios)[max(0, math.floor(n / 2 - SURE * math.sqrt(n) / 2))]


def judged(ratios: list[float], bar: float | None) -> dict[str, Any]:
    """Return the median of `ratios`, the lower bound of the median's confidence interval, and the
    verdict "well" if this bound is at least `bar`, else "SLOWER"; without a `bar`, the verdict is
    "measured"."""
    bound = lower_bound(ratios)
    word = "measured" if bar is None else "well" if bound >= bar else "SLOWER"
    return {"ratio": statistics.median(ratios), "bound": bound, "verdict": word}


def main(cases: list[Case], folder: Path, device: torch.device, pairs: int) -> int:
    """Print a line for each case and headloss configuration; return 1 if any is slower in the new
    version, else 0."""
    before, slower = load(folder), 0
    for case in cases:
        inputs = works.make_sets(case.setting, device, pairs + 1)
        for work, name in itertools.product(case.works, filter(measure.is_ours, case.contestants)):
            what = f"{case.name}: {work}, {name}"
            try:
                sides = [Side.of(p, name, work, case, inputs[0]) for p in (before, works.hl)]
                ratios = race(*sides, case, inputs, device, pairs)
            # A benchmark fails, for example, if an old version of headloss lacks the benchmarked
            # loss.
            except Exception as failure:
                print(f"{what}: left out: {measure.one_line(failure)}", flush=True)
                continue
            row = judged(ratios, LEAST)
            slower += row["verdict"] == "SLOWER"
            numbers = f"old / new {row['ratio']:.3f}, at least {row['bound']:.3f}"
            print(f"{what}: {numbers}, {row['verdict']}", flush=True)
    return 1 if slower else 0


class Side(NamedTuple):
    """One version of headloss (the module `package`), and the benchmark run that calls it."""

    package: ModuleType
    run: Callable[[works.Inputs], Any]

    @classmethod
    def of(
        cls, package: ModuleType, name: str, work: str, case: Case, inputs: works.Inputs
    ) -> Side:
        """Make the run of the implementation `name`; "limit" stands for the matrix products that
        the benchmarked loss `work` needs.

        Raises:
            ValueError: the implementation cannot compute the loss `work`.
            Exception: any error of the implementation while its run is prepared.
        """
        if name == "limit":
            return cls(package, measure.make_limit(case.setting, inputs))
        contestant, what = CONTESTANTS[name], works.WORKS[work]
        if reason := measure.unserved(contestant, what, inputs.targets.device):
            raise ValueError(f"{name}: {reason}")
        with using(package):
            run = contestant.make(what, case.setting)
        return cls(package, run if case.group == "small" else measure.whole(run))


def race(
    first: Side,
    second: Side,
    case: Case,
    inputs: list[works.Inputs],
    device: torch.device,
    pairs: int,
) -> list[float]:
    """Return time ratios first / second of adjacent calls; the order in a pair alternates.

    Raises:
        ValueError: the results of `first` and `second` differ.
    """
    timed = measure.Alone if case.group == "small" else measure._timed
    ratios = []
    with torch.set_grad_enabled(bool(case.setting.trains)):
        agree(first, second, inputs[0])
        for turn in range(pairs + 1):
            ms = {}
            for side in (first, second)[:: 1 - 2 * (turn % 2)]:
                with using(side.package):
                    ms[side] = timed(side.run, inputs[turn % len(inputs)], device)
            measure.synchronize(device)
            ratios.append(ms[first].ms / ms[second].ms)
    return ratios[1:]


def agree(first: Side, second: Side, inputs: works.Inputs) -> None:
    """Raise ValueError if the results of the runs `first` and `second` differ by more than
    `AGREE`."""
    values: list[dict[str, torch.Tensor]] = []
    for side in (first, second):
        inputs.fresh()
        with using(side.package):
            found = side.run(inputs)
        if isinstance(found, Found):
            scaled = {n: v * found.factor if n in works.LEAVES else v for n, v in _some(found)}
            values.append(scaled)
    for name in values[0].keys() & values[-1].keys():
        a, b = values[0][name], values[-1][name]
        off = float((a - b).norm() / b.norm().clamp_min(1e-2 if name == "loss" else 1e-30))
        if not off <= AGREE:
            raise ValueError(f"{name}: the two are {off:.1e} apart, want {AGREE} at most")


def _some(found: Found) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the first `ROWS` rows of each value; the next call overwrites values."""
    for name, value in found.values.items():
        yield name, (value[:ROWS] if value.dim() else value).detach().double()
