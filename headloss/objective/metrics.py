"""Measurements that merge, so that any cut of a batch, or any number of ranks, gives one value."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..ranks.collectives import together

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Mean:
    """sum / count; NaN where nothing was counted."""

    sum: Tensor
    count: Tensor

    @property
    def value(self) -> Tensor:
        return self.sum / self.count

    def merge(self, other: Mean) -> Mean:
        return type(self)(self.sum + other.sum, self.count + other.count)

    def __float__(self) -> float:
        return float(self.value)


class Perplexity(Mean):
    """exp of the mean negative log-likelihood."""

    @property
    def value(self) -> Tensor:
        return (self.sum / self.count).exp()


@dataclass(frozen=True)
class Sum:
    sum: Tensor

    @property
    def value(self) -> Tensor:
        return self.sum

    def merge(self, other: Sum) -> Sum:
        return Sum(self.sum + other.sum)

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Max:
    """The largest value; -inf where there was none."""

    max: Tensor

    @property
    def value(self) -> Tensor:
        return self.max

    def merge(self, other: Max) -> Max:
        return Max(torch.maximum(self.max, other.max))

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Min:
    """The smallest value; inf where there was none."""

    min: Tensor

    @property
    def value(self) -> Tensor:
        return self.min

    def merge(self, other: Min) -> Min:
        return Min(torch.minimum(self.min, other.min))

    def __float__(self) -> float:
        return float(self.value)


Measurement = Mean | Sum | Max | Min


class Metrics(dict[str, Measurement]):
    """Measurements by name: "tokens", "entropy", "grpo/ratio"...

    >>> import torch, headloss as hl
    >>> one, two = (hl.Metrics(loss=hl.Mean(*torch.tensor(x))) for x in ([6.0, 2], [3.0, 1]))
    >>> one.merge(two).compute()  # a sum of 9 over a count of 3
    {'loss': 3.0}
    """

    def merge(self, other: Mapping[str, Measurement]) -> Metrics:
        """Join with the metrics of another cut; a name that only one side has is kept as it is."""
        joined = Metrics({**self, **other})
        for name in self.keys() & other.keys():
            joined[name] = self[name].merge(other[name])  # type: ignore[arg-type]
        return joined

    def all_reduce(self, group: ProcessGroup | None = None) -> Metrics:
        """Join over the ranks of `group` (the default group if None), in two collectives.

        Every rank must hold the same names; `Min` travels as a negated `Max`.
        """
        from torch import distributed

        names = sorted(self)
        sums: list[Tensor] = []
        peaks: list[Tensor] = []
        for name in names:
            match self[name]:
                case Mean(total, count):
                    sums += [total, count]
                case Sum(total):
                    sums.append(total)
                case Max(value):
                    peaks.append(value)
                case Min(value):
                    peaks.append(-value)
        for values, operation in (
            (sums, distributed.ReduceOp.SUM),
            (peaks, distributed.ReduceOp.MAX),
        ):
            if values:
                packed = torch.stack([v.double() for v in values])
                add = functools.partial(distributed.all_reduce, packed, operation, group)
                together("Metrics.all_reduce", group, add)
                values[:] = packed.unbind()
        joined = Metrics()
        for name in names:
            match self[name]:
                case Mean():
                    joined[name] = type(self[name])(sums.pop(0), sums.pop(0))  # type: ignore[call-arg]
                case Sum():
                    joined[name] = Sum(sums.pop(0))
                case Max():
                    joined[name] = Max(peaks.pop(0))
                case Min():
                    joined[name] = Min(-peaks.pop(0))
        return joined

    def compute(self) -> dict[str, float]:
        """Every value as a Python float, with one read of the device."""
        if not self:
            return {}
        values = torch.stack([m.value.double() for m in self.values()]).tolist()
        return dict(zip(self, values, strict=True))


@dataclass(frozen=True)
class Observed:
    """What a term reports before it is folded: per-token [T] or per-segment [S] values.

    The engine folds the values of scored tokens, or of segments that have one, by `kind`; of these
    only the ones where the boolean vector `where` holds, if it is given.
    """

    values: Tensor
    kind: type[Mean] | type[Perplexity] | type[Sum] | type[Max] | type[Min] = Mean
    per: Literal["token", "segment"] = "token"
    where: Tensor | None = None


def checked(name: str, found: object, tokens: int, segments: int) -> dict[str, Observed]:
    """What a term or modifier observes, if it is a dict of `Observed` of T or S values.

    Raises:
        TypeError, ValueError: naming the term, what it returned and what is wanted.
    """
    if not isinstance(found, dict):
        got = type(found).__name__
        raise TypeError(f"term {name}: observe: returned {got}, want a dict of headloss.Observed")
    for key, seen in found.items():
        at = f"term {name}: observe: {key!r}"
        if not isinstance(key, str) or not isinstance(seen, Observed):
            raise TypeError(
                f"{at}: got {type(seen).__name__}, want a name and a headloss.Observed of values "
                "per token or per segment, which are folded to one"
            )
        if not isinstance(seen.kind, type) or not issubclass(seen.kind, Mean | Sum | Max | Min):
            raise TypeError(f"{at}: kind: got {seen.kind!r}, want Mean, Sum, Max or Min")
        if seen.per not in ("token", "segment"):
            raise ValueError(f'{at}: per: got {seen.per!r}, want "token" or "segment"')
        if not isinstance(seen.values, Tensor) or seen.values.is_complex():
            got = seen.values.dtype if isinstance(seen.values, Tensor) else type(seen.values)
            raise TypeError(f"{at}: values: got {got}, want a tensor of real numbers")
        want = (tokens if seen.per == "token" else segments,)
        for what, vector in (("values", seen.values), ("where", seen.where)):
            if vector is not None and tuple(vector.shape) != want:
                raise ValueError(
                    f"{at}: {what}: got shape {tuple(vector.shape)}, want {want} (one value per "
                    f'{seen.per}; declare per="token" or per="segment")'
                )
    return found


def fold(observed: Observed, live: Tensor | None = None, share: float = 1.0) -> Measurement:
    """Fold [N] values to one measurement; rows where `live` is False do not count.

    `share` is this rank's part of values that several ranks report alike.
    """
    return fold_all({"": observed}, live, share)[""]


def fold_all(
    observed: Mapping[str, Observed], live: Tensor | None = None, share: float = 1.0
) -> Metrics:
    """Fold many [N] vectors with the same live rows, in a few operations."""
    found = Metrics()
    for name, o in observed.items():
        if o.where is not None:
            kept = o.where if live is None else o.where & live
            found |= fold_all({name: replace(o, where=None)}, kept, share)
    observed = {name: o for name, o in observed.items() if o.where is None}
    sums = {name: o.values for name, o in observed.items() if not issubclass(o.kind, Max | Min)}
    peaks = {
        name: o.values if o.kind is Max else -o.values
        for name, o in observed.items()
        if issubclass(o.kind, Max | Min)
    }
    if sums:
        rows = torch.stack(list(sums.values())).double()
        rows = rows if live is None else torch.where(live, rows, 0)
        count = rows.new_full((), rows.shape[1]) if live is None else live.sum().double()
        for name, total in zip(sums, (rows.sum(1) * share).unbind(), strict=True):
            kind = observed[name].kind
            found[name] = Sum(total) if kind is Sum else kind(total, count * share)  # type: ignore[call-arg]
    if peaks:
        rows = torch.stack(list(peaks.values())).double()
        rows = rows if live is None else torch.where(live, rows, -math.inf)
        rows = torch.cat([rows, rows.new_full((len(peaks), 1), -math.inf)], 1)
        for name, peak in zip(peaks, rows.amax(1).unbind(), strict=True):
            found[name] = Max(peak) if observed[name].kind is Max else Min(-peak)
    return found
