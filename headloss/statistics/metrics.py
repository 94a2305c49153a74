"""Metrics that can be merged: any split of a batch, and any number of ranks, gives the same
value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from ..collectives import check_group, together


class _Joined:
    """Base class of metrics whose numbers are merged one by one, each by a sum or a maximum."""

    join: ClassVar[Callable[..., Tensor]] = torch.add
    # Factor of the numbers in `all_reduce`; -1 for `Min`, which is reduced as the maximum of
    # negated numbers.
    sign: ClassVar[int] = 1

    def merge(self, other: Self) -> Self:
        numbers = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(type(self).join(*pair) for pair in numbers))

    @property
    def value(self) -> Tensor:
        """Return the metric's single number; `Mean`, which holds two numbers, overrides this
        property."""
        (value,) = vars(self).values()
        return value

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Mean(_Joined):
    """The mean, sum / count; NaN where nothing was counted."""

    sum: Tensor
    count: Tensor

    @property
    def value(self) -> Tensor:
        return self.sum / self.count


class Perplexity(Mean):
    """The exp of the mean negative log-likelihood."""

    @property
    def value(self) -> Tensor:
        return super().value.exp()


@dataclass(frozen=True)
class Sum(_Joined):
    sum: Tensor


@dataclass(frozen=True)
class Max(_Joined):
    """The largest of a metric's values over chunks and ranks; -inf if the metric has no value."""

    max: Tensor
    join: ClassVar = torch.maximum


@dataclass(frozen=True)
class Min(_Joined):
    """The smallest of a metric's values over chunks and ranks; inf if the metric has no value."""

    min: Tensor
    join: ClassVar = torch.minimum
    sign: ClassVar = -1


Measurement = Mean | Sum | Max | Min


class Metrics(dict[str, Measurement]):
    """Metrics by name, for example "tokens", "entropy" or "grpo/ratio".

    >>> import torch, headloss as hl
    >>> one, two = (hl.Metrics(loss=hl.Mean(*torch.tensor(x))) for x in ([6.0, 2], [3.0, 1]))
    >>> one.merge(two).compute()  # a sum of 9 over a count of 3
    {'loss': 3.0}

    """

    def merge(self, other: Mapping[str, Measurement]) -> Metrics:
        """Return the metrics of two batches together: this batch's metrics merged with the metrics
        `other` of a second batch. A metric that only one of the two batches has stays unchanged."""
        joined = Metrics({**self, **other})
        for name in self.keys() & other.keys():
            joined[name] = self[name].merge(other[name])  # type: ignore[arg-type]
        return joined

    def all_reduce(self, group: distributed.ProcessGroup | None = None) -> Metrics:
        """Return the metrics merged over all ranks of `group` (the default group if None), in two
        collectives.

        Every rank must hold metrics with the same names. A minimum is computed as minus the
        all-reduced maximum of negated values.
        """
        check_group("group", group)
        joined = Metrics({name: self[name] for name in sorted(self)})
        by = distributed.ReduceOp
        for extremes, operation in ((False, by.SUM), (True, by.MAX)):
            chosen = {n: m for n, m in joined.items() if isinstance(m, Max | Min) is extremes}
            if not chosen:
                continue
            values = [v.double() * m.sign for m in chosen.values() for v in vars(m).values()]
            packed = torch.stack(values)
            together("Metrics.all_reduce", group, distributed.all_reduce, packed, operation, group)
            reduced = iter(packed.unbind())
            for name, m in chosen.items():
                joined[name] = type(m)(*(next(reduced) * m.sign for _ in vars(m)))
        return joined

    def compute(self) -> dict[str, float]:
        """Return every value as a Python float, with one read of the device."""
        if not self:
            return {}
        values = torch.stack([m.value.double() for m in self.values()]).tolist()
        return dict(zip(self, values, strict=True))


@dataclass(frozen=True)
class Observed:
    """Values that a term reports per token [T] or per segment [S], before the reduction to a
    metric.

    The engine reduces `values` to a metric of the class `kind`, over scored tokens or over segments
    with a scored token. A boolean vector `where` restricts the reduction to values at which `where`
    is True.
    """

    values: Tensor
    kind: type[Mean] | type[Perplexity] | type[Sum] | type[Max] | type[Min] = Mean
    per: Literal["token", "segment"] = "token"
    where: Tensor | None = None


def checked(name: str, observed: object, tokens: int, segments: int) -> dict[str, Observed]:
    """Return `observed`, the result of a term's or modifier's `observe`, after a check. Raise
    TypeError or ValueError, with the term's name in the text, if `observe` did not return a dict of
    `Observed`, each with one value per token or one per segment."""
    if not isinstance(observed, dict):
        got = type(observed).__name__
        raise TypeError(f"term {name}: observe: returned {got}, want a dict of headloss.Observed")
    for key, item in observed.items():
        at = f"term {name}: observe: {key!r}"
        if not isinstance(key, str) or not isinstance(item, Observed):
            raise TypeError(
                f"{at}: got {type(item).__name__}, want a name and a headloss.Observed of values "
                "per token or per segment, which are folded to one"
            )
        if not isinstance(item.kind, type) or not issubclass(item.kind, Mean | Sum | Max | Min):
            raise TypeError(f"{at}: kind: got {item.kind!r}, want Mean, Sum, Max or Min")
        if item.per not in ("token", "segment"):
            raise ValueError(f'{at}: per: got {item.per!r}, want "token" or "segment"')
        if not isinstance(item.values, Tensor) or item.values.is_complex():
            got = item.values.dtype if isinstance(item.values, Tensor) else type(item.values)
            raise TypeError(f"{at}: values: got {got}, want a tensor of real numbers")
        want = (tokens if item.per == "token" else segments,)
        for what, vector in (("values", item.values), ("where", item.where)):
            if vector is not None and tuple(vector.shape) != want:
                raise ValueError(
                    f"{at}: {what}: got shape {tuple(vector.shape)}, want {want} (one value per "
                    f'{item.per}; declare per="token" or per="segment")'
                )
    return observed


def fold_all(
    observed: Mapping[str, Observed], live: Tensor | None = None, share: float = 1.0
) -> Metrics:
    """Reduce each [N] vector to one metric, in a few operations for all vectors; rows where `live`
    is False do not count. `share` multiplies sums and counts: 1 / R for values of which R ranks
    hold equal copies."""
    # Metric vectors without a mask are reduced together, in one group for sums and one group for
    # extremes (maxima and minima). Each metric vector with a mask is reduced by operations of its
    # own.
    groups: dict[tuple[str | None, bool], dict[str, Observed]] = {}
    for name, o in observed.items():
        rows = None if o.where is None else name
        groups.setdefault((rows, issubclass(o.kind, Max | Min)), {})[name] = o
    metrics = Metrics()
    for (_, extreme), group in groups.items():
        where = next(iter(group.values())).where
        counted = where if live is None else live if where is None else where & live
        values = torch.stack([o.values * o.kind.sign for o in group.values()]).double()
        count = values.new_full((), values.shape[1]) if counted is None else counted.sum().double()
        if counted is not None:
            values = torch.where(counted, values, -math.inf if extreme else 0)
        if extreme:
            totals = pad(values, (0, 1), value=-math.inf).amax(1)
        else:
            totals = values.sum(1) * share
        for (name, o), total in zip(group.items(), totals.unbind(), strict=True):
            counted = (count * share,) if issubclass(o.kind, Mean) else ()
            metrics[name] = o.kind(total * o.kind.sign, *counted)
    return metrics
