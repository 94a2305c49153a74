"""Weights of a reduction: a weight for each token, computed from counts of tokens and segments.

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
    """Return the [T] weights of a packed batch's tokens under a reduction, or a single weight for
    all tokens. Tokens that the boolean field `field` excludes have weight 0.

    Args:
        totals: the global denominators.
        dtype: dtype of the weights.
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
        lengths = prompts.expand(prompts.sum(lengths))  # Number of tokens of each token's prompt.
    of_all = [_at_least_one(n, batch.targets.device) for n in (tokens, groups)]
    of_tokens: Any = None
    if standard is None or standard.by_length:
        lengths = lengths.to(dtype)
        # If no token is masked, each token's segment has at least one token.
        if standard is None or scored is not None:
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
    """Call a user-defined reduction with tensors, and return its weights after checks of type,
    shape and gradient."""
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
    """Return a total as a float or a float64 tensor, with 0 replaced by 1 to avoid a division by
    zero."""
    if not isinstance(count, Tensor):
        return float(count) or 1.0
    count = count.to(device, torch.float64)
    return count.masked_fill(count == 0, 1.0)
