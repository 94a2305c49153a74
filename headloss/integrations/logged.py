"""Values of terms and metrics, accumulated between two entries of a log.

Each call of the loss adds the values of terms and metrics to a vector on the device. The CPU reads
the vector of accumulated values once per log entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..statistics.metrics import Max, Mean, Measurement, Metrics, Min, Sum

PROBE = "probe"  # A term of value 0 that an adapter added; left out of the log.
# Names and types of the logged values, in the order of the values in a packed device tensor.
Kinds = tuple[tuple[str, type[Measurement]], ...]


class Logged:
    """Sums of terms and metrics since the last `take`.

    A term's value is its sum over the micro-batches of a step, averaged over steps and ranks, as
    `Trainer` averages the loss: terms times their coefficients add up to the logged loss. Metrics
    come only from calls that measured them (see `in_log`): a mean is over all tokens of these
    calls, and a sum is averaged over their steps.
    """

    def __init__(self) -> None:
        self._packed: dict[Kinds, tuple[Tensor, Tensor]] = {}
        self._terms: set[str] = set()
        self._steps = self._measured = 0.0
        self.ranks: int | None = 1

    def add(
        self,
        terms: Mapping[str, Tensor],
        metrics: Mapping[str, Measurement],
        parts: int = 1,
        ranks: int | None = 1,
    ) -> None:
        """Add the terms and metrics of one call, without reading from the device.

        Args:
            terms: each a [] tensor; a metric with the name of a term is left out.
            metrics: metrics of the call; empty if nothing was measured.
            parts: number of micro-batches in a step.
            ranks: number of ranks whose values of a term add up to the term's value; with None, the
                caller passes `ranks` to the method `take`.
        """
        values = {name: Sum(v.detach()) for name, v in terms.items() if name != PROBE}
        measured = {**metrics, **values}
        kinds = tuple((name, type(m)) for name, m in measured.items())
        sums, extremes = (_vector(list(_numbers(measured, ends))) for ends in (False, True))
        if kinds in self._packed:
            before, ends = self._packed[kinds]
            sums, extremes = before + sums, torch.maximum(ends, extremes)
        self._packed[kinds] = sums, extremes
        self._terms |= values.keys()
        self._steps += 1 / parts
        self._measured += 1 / parts if metrics else 0
        self.ranks = ranks

    def take(
        self, processes: int = 1, steps: float | None = None, ranks: int | None = None
    ) -> dict[str, float]:
        """Return the finite values by name, in one read of the device, and reset all sums.

        If `processes` is above 1, every process of torch.distributed's default group must call
        `take`. The arguments `steps` and `ranks` of `take`, if not None, replace the numbers of
        steps and ranks that calls of `add` have counted.
        """
        metrics = Metrics()
        for kinds, packed in self._packed.items():
            metrics = metrics.merge(_measured(kinds, *packed))
        if processes > 1 and metrics:
            metrics = metrics.all_reduce()
        found = metrics.compute()
        steps = self._steps if steps is None else steps
        share = processes / (ranks or self.ranks or 1)
        measured = steps * self._measured / self._steps if self._steps else 0.0
        for name, measurement in metrics.items():
            if isinstance(measurement, Sum):
                found[name] /= steps * share if name in self._terms else measured
        self.__init__()
        return {name: value for name, value in found.items() if math.isfinite(value)}


def in_log(args: Any, state: Any) -> bool:
    """Return whether `Trainer`, with the arguments `args`, writes a log in the current optimizer
    step.

    Metrics are measured only in steps that `Trainer` logs. With logging per epoch, metrics are
    measured in every step, since any step may end the epoch. Outside of `train()` metrics are
    measured in every call, since the caller may read the metrics at once.
    """
    if not state.max_steps:  # `train()` sets the number of steps.
        return True
    step = state.global_step + 1
    if args.logging_strategy == "steps":
        return bool(step % state.logging_steps == 0 or (step == 1 and args.logging_first_step))
    return bool(args.logging_strategy == "epoch")


def _numbers(measured: Mapping[str, Measurement], ends: bool) -> Iterator[Tensor]:
    """Yield the numbers to merge by maximum if `ends` is set (maxima, and minima with a minus
    sign), else the numbers to merge by addition (sums and means)."""
    for m in measured.values():
        if isinstance(m, Max | Min) is ends:
            yield from (x if m.sign > 0 else -x for x in vars(m).values())


def _vector(numbers: list[Tensor]) -> Tensor:
    return torch.stack(numbers).double() if numbers else torch.zeros(0, device="cpu")


def _measured(kinds: Kinds, sums: Tensor, extremes: Tensor) -> Metrics:
    """Return `Metrics` read from `sums` (all sums and means) and `extremes` (all minima and
    maxima)."""
    vectors, metrics = (iter(sums.unbind()), iter(extremes.unbind())), Metrics()
    for name, kind in kinds:
        numbers = vectors[issubclass(kind, Max | Min)]
        count = 2 if issubclass(kind, Mean) else 1
        metrics[name] = kind(*(next(numbers) * kind.sign for _ in range(count)))
    return metrics
