"""Law 3: a reduction is a weight for each token, made from counts of tokens and segments.

T scored tokens, S segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .packing import PackedBatch, answers
from .reduction import Reduction, StandardWeight, Totals


def token_weights(
    batch: PackedBatch, totals: Totals, dtype: torch.dtype, reduction: Reduction,
    field: str | None = None
) -> tuple[Tensor | float, Tensor | None]:
    """[T] weights of a packed batch's tokens under a reduction, or one for all tokens; and [T]
    bool, which tokens a boolean field keeps (None: all). The weights of other tokens are 0.

    Args:
        totals: the global denominators.
        dtype: of the weights.
    """
    segments, counts = batch.segments, totals._counts
    standard = reduction.weigh if isinstance(reduction.weigh, StandardWeight) else None
    by_prompt = standard is not None and standard.of == "prompts"
    by_length = standard is None or standard.by_length
    reads_lengths = by_length or segments.group is not None  # then all ranks sum them here
    included: Any = None
    lengths: Any = segments.lengths if reads_lengths else None
    if field is not None:
        included, counts = getattr(batch, field), totals.kept[field]
        lengths = segments.sum(included.to(dtype)) if reads_lengths else None
    if by_prompt:  # of a token's prompt
        prompts = answers(batch)
        lengths = prompts.expand(prompts.sum(lengths))
    numbers = counts[0], counts[2 if by_prompt else 1]
    of_all: Any = [_at_least_one(n, batch.targets.device, standard is not None) for n in numbers]
    of_tokens: Any = segments.expand(lengths.to(dtype).clamp_min(1)) if by_length else None
    if standard is None:
        weights = _of_users(reduction, of_tokens, *of_all)
    else:
        weights = standard(of_tokens, *of_all)
    if isinstance(weights, Tensor):
        weights = weights.to(dtype)
    scored = batch.live if included is None else included
    if scored is not None:
        weights = torch.where(scored, weights, scored.new_zeros((), dtype=dtype))
    return weights, included


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
