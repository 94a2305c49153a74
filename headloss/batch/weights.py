"""Law 3: a reduction is a weight for each token, made from counts of tokens and segments.

T scored tokens, S segments.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .packing import PackedBatch, answers
from .reduction import Number, Reduction, StandardWeight, Totals


def token_weights(
    batch: PackedBatch,
    totals: Totals,
    dtype: torch.dtype,
    reduction: Reduction,
    field: str | None = None,
) -> Tensor | float:
    """[T] weights of a packed batch's tokens under a reduction, or one for all tokens; 0 for those
    that a boolean field leaves out.

    Args:
        totals: the global denominators.
        dtype: of the weights.
    """
    segments = batch.segments
    counts = totals._counts
    scored = batch.live
    standard = reduction.weigh if isinstance(reduction.weigh, StandardWeight) else None
    lengths = segments.lengths
    if field is not None:
        scored = getattr(batch, field)
        counts = totals.kept[field]
        lengths = segments.sum(scored.to(dtype))
    tokens, groups = counts[:2]
    if standard is not None and standard.of == "prompts":
        prompts = answers(batch)
        groups = counts[2]
        lengths = prompts.expand(prompts.sum(lengths))  # of a token's prompt
    of_all = [_at_least_one(n, batch.targets.device) for n in (tokens, groups)]
    of_tokens: Any = None
    if standard is None or standard.by_length:
        lengths = lengths.to(dtype)
        if standard is None or scored is not None:  # else each token is one of its segment
            lengths = lengths.clamp_min(1)
        of_tokens = segments.expand(lengths)
    weigh = partial(_of_users, reduction) if standard is None else standard
    weights = weigh(of_tokens, *of_all)
    if isinstance(weights, Tensor):
        weights = weights.to(batch.targets.device, dtype)
    if scored is not None:
        weights = torch.where(scored, weights, scored.new_zeros((), dtype=dtype))
    return weights


@torch.enable_grad()
def _of_users(reduction: Reduction, lengths: Tensor, *totals: Number) -> Tensor:
    """The weights of a reduction that is not the library's, checked; it is given tensors."""
    zero = lengths.new_zeros((), dtype=torch.float64)
    weights: object = reduction.weigh(lengths, *(zero + total for total in totals))
    want = f"want one weight per token, {tuple(lengths.shape)}, without a gradient"
    if not isinstance(weights, Tensor):
        raise TypeError(f"reduction {reduction.name}: returned {weights!r}, {want}")
    if weights.shape != lengths.shape or weights.is_complex() or weights.requires_grad:
        got = f"shape {tuple(weights.shape)}, {weights.dtype}, gradient {weights.requires_grad}"
        raise ValueError(f"reduction {reduction.name}: returned {got}, {want}")
    return weights


def _at_least_one(count: Number, device: torch.device) -> Number:
    """A total, of a tensor in float64; zero acts as one."""
    if not isinstance(count, Tensor):
        return float(count) or 1.0
    count = count.to(device, torch.float64)
    return count.masked_fill(count == 0, 1.0)
