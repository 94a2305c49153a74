"""Values of terms and metrics over the steps between two entries of a log.

A call of the loss adds its numbers to one vector on the device, which is read where a log is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..statistics.metrics import Max, Mean, Measurement, Metrics, Min, Sum

PROBE = "probe"  # a term of an adapter's own, which is worth nothing
Kinds = tuple[tuple[str, type[Measurement]], ...]  # of the numbers in a vector


class Logged:
    """Sums since the last `take`.

    A term's value is its sum over the micro-batches of a step, averaged over steps and ranks, as
    `Trainer` has it of the loss: terms times their coefficients add up to the logged loss. Metrics
    are those of the calls that brought some (`in_log`): a mean is over all their tokens, a sum is
    averaged over their steps.
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
        """Add a call. Nothing is read from the device.

        Args:
            terms: [] each; a metric of the same name is left out.
            metrics: of the same call; none where it was not measured.
            parts: the micro-batches of a step.
            ranks: those whose shares of a term add up to its value; None: `take` knows.
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
        """The values by name, in one read of the device, less those of nothing; begins anew.

        All `processes` of the default group take part. `steps` and `ranks` stand in for those that
        the calls have told.
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
    """Tell by `Trainer`'s arguments whether it logs the optimizer step under way: metrics of
    other steps are not measured. By epochs any step may be the last."""
    step = state.global_step + 1
    if args.logging_strategy == "steps":
        return bool(step % state.logging_steps == 0 or (step == 1 and args.logging_first_step))
    return bool(args.logging_strategy == "epoch")


def _numbers(measured: Mapping[str, Measurement], ends: bool) -> Iterator[Tensor]:
    """The numbers of extremes, those of minima negated, or of all else."""
    for m in measured.values():
        if isinstance(m, Max | Min) is ends:
            yield from (x if m.sign > 0 else -x for x in vars(m).values())


def _vector(numbers: list[Tensor]) -> Tensor:
    return torch.stack(numbers).double() if numbers else torch.zeros(0, device="cpu")


def _measured(kinds: Kinds, sums: Tensor, extremes: Tensor) -> Metrics:
    """The measurements whose numbers are in two vectors."""
    vectors, metrics = (iter(sums.unbind()), iter(extremes.unbind())), Metrics()
    for name, kind in kinds:
        numbers = vectors[issubclass(kind, Max | Min)]
        count = 2 if issubclass(kind, Mean) else 1
        metrics[name] = kind(*(next(numbers) * kind.sign for _ in range(count)))
    return metrics
