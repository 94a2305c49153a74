"""Reductions as weights: loss = sum_t w_t l_t with a weight w_t per token.

Weights depend on segments and *global* totals, never on statistics, so that the loss and the
gradient do not depend on how tokens are padded, packed, accumulated over micro-batches or sharded
over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from ..arguments import IGNORE, check_dense, check_number
from ..collectives import check_group, device_of, summed
from .segments import count_in, numbered

Number = float | Tensor


@dataclass(frozen=True)
class Totals:
    """Global denominators: numbers of scored tokens, segments and prompts over micro-batches and
    ranks.

    The numbers `tokens`, `segments` and `prompts` are finite and >= 0, or are 0-dim tensors, whose
    value is not checked. The total `prompts` is None if no batch has the field `prompts`. A prompt
    with segments in several micro-batches or on several ranks is counted in each micro-batch and on
    each rank. The dict `kept` holds (tokens, segments[, prompts]) for each boolean field of the
    batch, for terms restricted with `.where(field)`; `kept` may also be given as the third
    positional argument.

    >>> first, second = Totals(300, 4, 2), Totals(212, 4, 1)
    >>> first + second
    Totals(tokens=512, segments=8, prompts=3, kept={})
    """

    tokens: Number
    segments: Number
    prompts: Number | None = None
    kept: dict[str, tuple[Number, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.prompts, Mapping):
            object.__setattr__(self, "kept", self.prompts)
            object.__setattr__(self, "prompts", None)
        _check_total("tokens", self.tokens)
        _check_total("segments", self.segments)
        if self.prompts is not None:
            _check_total("prompts (or kept)", self.prompts)
        if not isinstance(self.kept, Mapping):
            raise TypeError(f"kept: got {type(self.kept).__name__}, want a dict of pairs by field")
        for name, counts in self.kept.items():
            if not isinstance(counts, tuple | list) or len(counts) != len(self._counts):
                more = "" if self.prompts is None else ", prompts"
                raise TypeError(f"kept[{name!r}]: got {counts!r}, want (tokens, segments{more})")
            for count in counts:
                _check_total(f"kept[{name!r}]", count)

    @classmethod
    def of(cls, batch: Any) -> Totals:
        """Return the totals of one `Batch`, over the ranks of `segments.group`; count prompts if
        the batch has the field `prompts`.

        A boolean field is per token if the field's shape is the targets' shape on all ranks, else
        per segment.
        """
        if not hasattr(batch, "targets"):
            raise TypeError(f"batch: got {type(batch).__name__}, want headloss.Batch")
        segments = batch.segments
        scored = batch.targets.reshape(-1) != IGNORE
        bools = {n: v for n, v in batch.fields.items() if getattr(v, "dtype", None) == torch.bool}
        # A field with several values per token is no mask.
        masks = {n: v for n, v in bools.items() if v.dim() <= batch.targets.dim()}
        prompts = None
        groups = batch.fields.get("prompts")
        if groups is not None:
            groups, prompts = numbered(groups)
        ids = segments.ids.reshape(-1).long().clamp(0, max(segments.count - 1, 0))

        def kept_of(mask: Tensor) -> Tensor:
            """[S] scored tokens of each segment that a mask keeps."""
            return count_in(ids, segments.count, scored & mask)

        rows = [kept_of(scored)]
        kept = {}
        for name, mask in masks.items():
            as_token, as_segment = batch._fits(name)
            rows.append(kept_of(mask.reshape(-1) if as_token else ~scored))
            rows.append(kept_of(mask[ids] if as_segment else ~scored))
            # 1 on a rank whose mask is per segment and not per token.
            rows.append(torch.full_like(rows[0], not as_token))
        counts = torch.stack(rows)  # Sum over the ranks that share the segments.
        if segments.group is not None:
            summed("the count of tokens in segments", counts, segments.group)
        for i, (name, mask) in enumerate(masks.items()):
            by_token, by_segment, votes = counts[3 * i + 1 : 3 * i + 4]
            as_token = votes == 0
            of_segments = mask if mask.shape == by_token.shape else by_token > 0
            of_segments = torch.where(as_token, by_token > 0, of_segments)
            kept[name] = torch.where(as_token, by_token, by_segment).sum(), of_segments.sum()
            if groups is not None:
                kept[name] += ((count_in(groups, segments.count, of_segments) > 0).sum(),)
        return cls(counts[0].sum(), segments.count, prompts, kept)

    def __add__(self, other: Totals) -> Totals:
        if not isinstance(other, Totals):
            return NotImplemented
        if self.kept.keys() != other.kept.keys():
            raise ValueError(
                f"totals: got boolean fields {sorted(self.kept)} and {sorted(other.kept)}, want "
                "the same in every micro-batch"
            )
        if (self.prompts is None) != (other.prompts is None):
            raise ValueError(
                f"totals: got prompts {self.prompts} and {other.prompts}, want a number in every "
                "micro-batch: give each the field prompts"
            )
        pairs = zip(self._numbers, other._numbers, strict=True)
        return self._with([a + b for a, b in pairs])

    def __radd__(self, other: object) -> Totals:
        """Support `sum(Totals.of(b) for b in batches)`, which starts from 0."""
        return self if other == 0 else NotImplemented

    def all_reduce(
        self,
        group: distributed.ProcessGroup | None = None,
        gradients: Literal["mean", "sum"] = "mean",
    ) -> Totals:
        """Return the numbers of tokens, segments and prompts, summed over all data-parallel ranks
        of `group` (the default group if None).

        DDP and FSDP2 average gradients over ranks. With gradients="mean", the returned numbers are
        divided by the number of ranks, so that the averaged gradient equals the gradient of the
        whole batch. Set gradients="sum" if the training framework sums gradients over ranks.
        """
        if not (isinstance(gradients, str) and gradients in ("mean", "sum")):
            raise ValueError(f'gradients: got {gradients!r}, want "mean" or "sum"')
        check_group("group", group)
        numbers = self._numbers
        devices = [n.device for n in numbers if isinstance(n, Tensor)] or [device_of(group)]
        wide = [torch.as_tensor(n, dtype=torch.float64, device=devices[0]) for n in numbers]
        packed = summed("Totals.all_reduce", torch.stack(wide), group)
        if gradients == "mean":
            packed = packed / distributed.get_world_size(group)
        return self._with(list(packed.unbind()))

    @property
    def _counts(self) -> list[Number]:
        """The list of the totals `tokens`, `segments` and `prompts`, without a total that is
        None."""
        return [n for n in (self.tokens, self.segments, self.prompts) if n is not None]

    @property
    def _numbers(self) -> list[Number]:
        """All totals in one list: the totals over all tokens, then the totals over the tokens of
        each boolean field, in the order of the fields' names."""
        return [*self._counts, *(n for name in sorted(self.kept) for n in self.kept[name])]

    def _with(self, numbers: Sequence[Number]) -> Totals:
        """Return `Totals` with the same names and new numbers, which are given in the order of the
        property `_numbers`."""
        size = len(self._counts)
        names = ["", *sorted(self.kept)]
        counts = {name: tuple(numbers[i * size : (i + 1) * size]) for i, name in enumerate(names)}
        return Totals(*counts.pop(""), kept=counts)


def _check_total(name: str, value: object) -> None:
    want = "a number or a 0-dim tensor"
    if isinstance(value, Tensor):
        check_dense(name, value)
        if value.dim() or value.is_complex() or value.dtype == torch.bool:
            got = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
            raise TypeError(f"{name}: got {got}, want {want}")
        return
    if type(value) is not int or value < 0:
        check_number(name, value, want, "a finite number >= 0", lambda x: x >= 0)


Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Reduction:
    """A rule for the weights w_t, as a function of (length of each token's segment [T], total
    tokens [], total segments []).

    The reduction `prompt_mean` counts prompts in place of segments, and gets (number of tokens of
    each token's prompt [T], total tokens [], total prompts []).
    """

    name: str
    weigh: Weigh = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name: got {type(self.name).__name__}, want a string")
        if not callable(self.weigh):
            raise TypeError(f"weigh: got {type(self.weigh).__name__}, want a function")


@dataclass(frozen=True)
class StandardWeight:
    """The function by which the library's own reductions (such as a mean over tokens) compute each
    token's weight in the loss. Without `by_length`, a token's weight is 1 / (n * length), where n
    is the total number of tokens, of segments or of prompts. With `by_length`, a token's
    weight is 1 / (n m), where n is the number of tokens in its segment or prompt, and m the number
    of segments or prompts. The total numbers of tokens and segments may be Python numbers. The
    argument `lengths` may be None without `by_length`."""

    # Name of the total by which each token's weight is divided; with "none", each token's weight is
    # the constant 1 / `length`.
    of: Literal["tokens", "segments", "prompts", "none"]
    by_length: bool = False  # Divide the weight by the length of the token's segment or prompt.
    length: Number = 1  # A constant by which each token's weight is divided.

    def __call__(self, lengths: Any, tokens: Any, segments: Any) -> Any:
        if self.by_length:
            return (lengths * segments).reciprocal()
        totals = {"tokens": tokens, "none": self.length}
        weight = 1 / totals.get(self.of, segments * self.length)
        if lengths is None:
            return weight
        return torch.as_tensor(weight, device=lengths.device).expand_as(lengths)


token_mean = Reduction("token_mean", StandardWeight("tokens"))
sequence_mean = Reduction("sequence_mean", StandardWeight("segments", by_length=True))
sequence_sum = Reduction("sequence_sum", StandardWeight("segments"))
prompt_mean = Reduction("prompt_mean", StandardWeight("prompts", by_length=True))


def fixed_length(length: float) -> Reduction:
    """Return the reduction "sum over tokens divided by (segments * length)" (Liu et al. 2025,
    arXiv:2503.20783)."""
    check_number("length", length, "a number > 0", "> 0", lambda x: x > 0)
    return Reduction(f"fixed_length({length})", StandardWeight("segments", length=length))


REDUCTIONS = {r.name: r for r in (token_mean, sequence_mean, sequence_sum, prompt_mean)}


def as_reduction(value: Reduction | str) -> Reduction:
    """Return a reduction from its name or from a `Reduction`; ValueError for anything else."""
    reduction = REDUCTIONS.get(value) if isinstance(value, str) else value
    if isinstance(reduction, Reduction):
        return reduction
    raise ValueError(
        f"reduction: got {value!r}, want one of {sorted(REDUCTIONS)}, headloss.fixed_length(n) or "
        "a headloss.Reduction"
    )
