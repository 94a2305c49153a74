"""Two versions of headloss in one process, in turn: is the new one slower?

A card at its power cap is several percent apart from run to run, so calls alternate and each pair
gives one ratio. The new one counts as not slower where the lower confidence bound of the median
ratio old / new is at least LEAST.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import contestants
import measure
import torch
import works
from cases import Case
from contestants import CONTESTANTS, Run

NAME = "headloss_before"
LEAST = 0.98
SURE = 1.96  # standard deviations of a count: 95 %


def load(folder: Path) -> ModuleType:
    """The package in a checkout, under another name: what it says of itself is renamed too."""
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
    """Works and contestants of this module call another version."""
    before = works.hl
    try:
        works.hl = contestants.hl = package
        yield
    finally:
        works.hl = contestants.hl = before


def lower_bound(ratios: list[float]) -> float:
    """Of the median: the order statistic that lies below it in 97.5 % of all samples."""
    n = len(ratios)
    return sorted(ratios)[max(0, math.floor(n / 2 - SURE * math.sqrt(n) / 2))]


def main(cases: list[Case], folder: Path, device: torch.device, pairs: int) -> int:
    """A line for each case and contestant of headloss; 1 where one has become slower."""
    before, slower = load(folder), 0
    for case in cases:
        inputs = works.make_sets(case.setting, device, pairs + 1)
        for work in case.works:
            for name in filter(measure.is_ours, case.contestants):
                ratios = race(works.WORKS[work], name, case, inputs, before, device, pairs)
                least = lower_bound(ratios)
                slower += least < LEAST
                mark = "" if least >= LEAST else "  SLOWER"
                print(
                    f"{case.name}: {work}, {name}: old / new {statistics.median(ratios):.3f}, "
                    f"at least {least:.3f}{mark}",
                    flush=True,
                )
    return 1 if slower else 0


def race(
    work: works.Work,
    name: str,
    case: Case,
    inputs: list[works.Inputs],
    before: ModuleType,
    device: torch.device,
    pairs: int,
) -> list[float]:
    """Ratios of times, old / new, of neighbouring calls; which goes first alternates."""
    alone = case.group == "small"
    timed = measure.Alone if alone else measure._timed
    packages = {"old": before, "new": works.hl}
    runs: dict[str, Run] = {}
    for version, package in packages.items():
        with using(package):
            run = CONTESTANTS[name].make(work, case.setting)
        runs[version] = run if alone else measure.whole(run)
    ratios = []
    with torch.set_grad_enabled(bool(case.setting.trains)):
        for turn in range(pairs + 1):
            ms = {}
            for version in list(packages)[:: 1 - 2 * (turn % 2)]:
                with using(packages[version]):
                    ms[version] = timed(runs[version], inputs[turn % len(inputs)], device)
            measure.synchronize(device)
            ratios.append(ms["old"].ms / ms["new"].ms)
    return ratios[1:]
