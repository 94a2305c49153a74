"""Law 3: a reduction is a weight per token, loss = sum_t w_t l_t.

Weights come from the segments and from *global* totals, never from statistics, so the same tokens
give the same loss and gradient however they are cut up: padded, packed, accumulated, sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from ..arguments import IGNORE, INT64, check_dense, check_number
from ..ranks.collectives import check_group, device_of, summed
from .segments import count_in

Number = float | Tensor


@dataclass(frozen=True)
class Totals:
    """Global denominators: scored tokens and segments, over micro-batches and ranks.

    `tokens` and `segments` are finite numbers >= 0, or 0-dim tensors, whose values are not read.
    `kept` holds the same pair for each boolean field of the batch, for terms that are restricted
    with `.where(field)`.

    >>> first, second = Totals(300, 4), Totals(212, 4)
    >>> first + second
    Totals(tokens=512, segments=8, kept={})
    """

    tokens: Number
    segments: Number
    kept: dict[str, tuple[Number, Number]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_total("tokens", self.tokens)
        _check_total("segments", self.segments)
        if not isinstance(self.kept, Mapping):
            raise TypeError(f"kept: got {type(self.kept).__name__}, want a dict of pairs by field")
        for name, pair in self.kept.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(f"kept[{name!r}]: got {pair!r}, want (tokens, segments)")
            for count in pair:
                _check_total(f"kept[{name!r}]", count)

    @classmethod
    def of(cls, batch: Any) -> Totals:
        """The totals of one `Batch` (over the ranks of its segments' group).

        A boolean field is per token where its shape is that on all these ranks, else per segment.
        """
        if not hasattr(batch, "targets"):
            raise TypeError(f"batch: got {type(batch).__name__}, want headloss.Batch")
        segments, scored = batch.segments, batch.targets.reshape(-1) != IGNORE
        masks = {n: v for n, v in batch.fields.items() if getattr(v, "dtype", None) == torch.bool}
        rank = batch.targets.dim()  # a field with more values at each token keeps or drops none
        masks = {n: v for n, v in masks.items() if v.dim() <= rank}
        if not masks and segments.group is None and segments.count:
            return cls(scored.sum(), segments.count)
        ids = segments.ids.reshape(-1).clamp(0, max(segments.count - 1, 0))
        rows, against, nothing = [scored], [], torch.zeros_like(scored)
        for name, mask in masks.items():
            as_token, as_segment = batch._fits(name)
            rows.append(scored & mask.reshape(-1) if as_token else nothing)
            rows.append(scored & mask[ids] if as_segment else nothing)
            against.append(ids.new_full((1,), not as_token))
        # [1 + 2 masks, S] kept tokens per segment, joined over the ranks that share the segments.
        counts = torch.stack([count_in(ids, segments.count, row) for row in rows])
        if segments.group is not None:
            joined = torch.cat([counts.reshape(-1), *against])
            summed("the count of tokens in segments", joined, segments.group)
            counts, votes = joined.split([counts.numel(), len(masks)])
            counts, against = counts.view(len(rows), segments.count), list(votes)
        kept, forms = {}, zip(masks.items(), counts[1::2], counts[2::2], against, strict=True)
        for (name, mask), by_token, by_segment, vote in forms:
            as_token = vote.view(()) == 0
            tokens = torch.where(as_token, by_token.sum(), by_segment.sum())
            kept[name] = tokens, torch.where(as_token, (by_token > 0).sum(), mask.sum())
        return cls(counts[0].sum(), segments.count, kept)

    def __add__(self, other: Totals) -> Totals:
        if not isinstance(other, Totals):
            return NotImplemented
        if self.kept.keys() != other.kept.keys():
            raise ValueError(
                f"totals: got boolean fields {sorted(self.kept)} and {sorted(other.kept)}, want "
                "the same in every micro-batch"
            )
        more = other.kept
        kept = {n: (a + more[n][0], b + more[n][1]) for n, (a, b) in self.kept.items()}
        return Totals(self.tokens + other.tokens, self.segments + other.segments, kept)

    def __radd__(self, other: object) -> Totals:
        """So that `sum(Totals.of(b) for b in batches)` works."""
        return self if other == 0 else NotImplemented

    def all_reduce(
        self, group: distributed.ProcessGroup | None = None,
        gradients: Literal["mean", "sum"] = "mean"
    ) -> Totals:
        """Add the totals of all data-parallel ranks of `group` (the default group if None).

        DDP and FSDP2 average gradients over ranks: with gradients="mean" the world size is folded
        into the weights, so that the averaged gradient is the exact one. "sum" is for callers that
        add.
        """
        if not (isinstance(gradients, str) and gradients in ("mean", "sum")):
            raise ValueError(f'gradients: got {gradients!r}, want "mean" or "sum"')
        check_group("group", group)
        numbers = self._numbers
        devices = [n.device for n in numbers if isinstance(n, Tensor)]
        device = devices[0] if devices else device_of(group)
        wide = [torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers]
        packed = torch.stack(wide)
        summed("Totals.all_reduce", packed, group)
        if gradients == "mean":
            packed = packed / distributed.get_world_size(group)
        tokens, segments, *rest = packed.unbind()
        pairs = zip(rest[::2], rest[1::2], strict=True)
        return Totals(tokens, segments, dict(zip(sorted(self.kept), pairs, strict=True)))

    @property
    def _numbers(self) -> list[Number]:
        """All of them, in the order of the fields' names."""
        pairs = [self.kept[name] for name in sorted(self.kept)]
        return [self.tokens, self.segments, *(number for pair in pairs for number in pair)]


def _check_total(name: str, value: object) -> None:
    if type(value) is int and 0 <= value < INT64:
        return
    kind = "a number or a 0-dim tensor"
    if isinstance(value, Tensor):
        check_dense(name, value)
        if value.dim() or value.is_complex() or value.dtype == torch.bool:
            got = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
            raise TypeError(f"{name}: got {got}, want {kind}")
        return
    check_number(name, value, kind, "a finite number >= 0", lambda x: x >= 0)


Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Reduction:
    """A rule for w_t, from (length of each token's segment [T], tokens [], segments [])."""

    name: str
    weigh: Weigh = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name: got {type(self.name).__name__}, want a string")
        if not callable(self.weigh):
            raise TypeError(f"weigh: got {type(self.weigh).__name__}, want a function")

    @property
    def key(self) -> Weigh | None:
        """What decides the weights; None where they may depend on more than the arguments."""
        return self.weigh if getattr(self.weigh, "__module__", None) == __name__ else None


# The library's own take totals that are numbers, too.
def _for_all(weight: Any, lengths: Tensor | None) -> Any:
    return weight if lengths is None else weight.expand_as(lengths)


def _token_mean(lengths: Any, tokens: Any, segments: Any) -> Any:
    return _for_all(1 / tokens, lengths)


def _sequence_mean(lengths: Any, tokens: Any, segments: Any) -> Any:
    return (lengths * segments).reciprocal()


def _sequence_sum(lengths: Any, tokens: Any, segments: Any) -> Any:
    return _for_all(1 / segments, lengths)


token_mean = Reduction("token_mean", _token_mean)
sequence_mean = Reduction("sequence_mean", _sequence_mean)
sequence_sum = Reduction("sequence_sum", _sequence_sum)


@dataclass(frozen=True)
class _FixedLength:
    length: float

    def __call__(self, lengths: Any, tokens: Any, segments: Any) -> Any:
        return _for_all(1 / (segments * self.length), lengths)


def fixed_length(length: float) -> Reduction:
    """Sum over tokens divided by (segments * length), as in Dr. GRPO (Liu et al. 2025)."""
    check_number("length", length, "a number > 0", "> 0", lambda x: x > 0)
    return Reduction(f"fixed_length({length})", _FixedLength(length))


REDUCTIONS = {r.name: r for r in (token_mean, sequence_mean, sequence_sum)}


def as_reduction(value: Reduction | str) -> Reduction:
    """A reduction by name or as given."""
    if isinstance(value, Reduction):
        return value
    if isinstance(value, str) and value in REDUCTIONS:
        return REDUCTIONS[value]
    raise ValueError(
        f"reduction: got {value!r}, want one of {sorted(REDUCTIONS)}, headloss.fixed_length(n) or "
        "a headloss.Reduction"
    )
