"""Law 3: a reduction is a weight for each token, made from counts of tokens and segments.

T scored tokens, S segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .packing import PackedBatch, answers
from .reduction import Reduction, Totals, prompt_mean, sequence_mean


class TokenWeights:
    """Weights of a packed batch's tokens under any reduction; what several reductions need is
    counted once.

    Args:
        totals: the global denominators.
        dtype: of the weights.
    """

    def __init__(self, batch: PackedBatch, totals: Totals, dtype: torch.dtype) -> None:
        self.batch, self.totals, self.dtype = batch, totals, dtype
        self._counted: dict[Any, tuple[Any, ...]] = {}

    def under(
        self, reduction: Reduction, field: str | None = None
    ) -> tuple[Tensor | float, Tensor | None]:
        """[T] weights, or one for all tokens; and [T] bool, which tokens `field` keeps (None: all).
        The weights of other tokens are 0."""
        rule = reduction.key
        by_length = rule in (None, sequence_mean.weigh, prompt_mean.weigh)
        key = field, rule is not None, by_length, rule is prompt_mean.weigh
        if key not in self._counted:
            self._counted[key] = self._count(*key)
        kept, *counts = self._counted[key]
        weights = _of_users(reduction, *counts) if rule is None else reduction.weigh(*counts)
        if isinstance(weights, Tensor):
            weights = weights.to(self.dtype)
        scored = self.batch.live if kept is None else kept
        if scored is not None:
            weights = torch.where(scored, weights, scored.new_zeros((), dtype=self.dtype))
        return weights, kept

    def _count(
        self, field: str | None, is_library: bool, by_length: bool, by_prompt: bool
    ) -> tuple[Any, ...]:
        """What a reduction needs of all tokens, or of those that a field keeps: [T] bool, lengths
        of their segments [T], and the totals of tokens and segments, [] float64 or, for the
        library's reductions, as they are. A reduction that reads no length gets None; one
        `by_prompt` gets the tokens of a token's prompt and the number of prompts."""
        batch, segments, counts = self.batch, self.batch.segments, self.totals._counts
        kept: Any = None
        reads_lengths = by_length or segments.group is not None  # then all ranks sum them here
        lengths: Any = segments.lengths if reads_lengths else None
        if field is not None:
            kept, counts = getattr(batch, field), self.totals.kept[field]
            lengths = segments.sum(kept.to(self.dtype)) if reads_lengths else None
        if by_prompt:
            prompts = answers(batch)
            lengths = prompts.expand(prompts.sum(lengths))
        totals = [
            _at_least_one(count, batch.targets.device, is_library)
            for count in (counts[0], counts[2 if by_prompt else 1])
        ]
        if not by_length:
            return kept, None, *totals
        return kept, segments.expand(lengths.to(self.dtype).clamp_min(1)), *totals


@torch.enable_grad()
def _of_users(reduction: Reduction, lengths: Tensor, *totals: Tensor) -> Tensor:
    """The weights of a reduction that is not the library's, checked."""
    weights: object = reduction.weigh(lengths, *totals)
    want = f"want one weight per token, {tuple(lengths.shape)}, without a gradient"
    if not isinstance(weights, Tensor):
        raise TypeError(f"reduction {reduction.name}: returned {weights!r}, {want}")
    if weights.shape != lengths.shape or weights.is_complex() or weights.requires_grad:
        got = f"shape {tuple(weights.shape)}, {weights.dtype}, gradient {weights.requires_grad}"
        raise ValueError(f"reduction {reduction.name}: returned {got}, {want}")
    return weights


def _at_least_one(
    count: float | Tensor, device: torch.device, as_number: bool
) -> float | Tensor:  # fmt: skip
    """A total as a float64 scalar, or a number `as_number`; a zero total acts as one."""
    if not isinstance(count, Tensor):
        number = float(count) or 1.0
        return number if as_number else torch.full((), number, dtype=torch.float64, device=device)
    count = count.to(device, torch.float64)
    return count.masked_fill(count == 0, 1.0)
