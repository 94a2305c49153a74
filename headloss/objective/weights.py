"""The numbers that a reduction makes the weights of tokens from (law 3).

T scored tokens, S segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batch.packing import PackedBatch, answers
from ..batch.reduction import Reduction, Totals


@torch.enable_grad()
def of_others(reduction: Reduction, lengths: Tensor, *totals: Tensor) -> Tensor:
    """The weights of a reduction that is not the library's own, checked."""
    weights: object = reduction.weigh(lengths, *totals)
    want = f"want one weight per token, {tuple(lengths.shape)}, without a gradient"
    if not isinstance(weights, Tensor):
        raise TypeError(f"reduction {reduction.name}: returned {weights!r}, {want}")
    if weights.shape != lengths.shape or weights.is_complex() or weights.requires_grad:
        got = f"shape {tuple(weights.shape)}, {weights.dtype}, gradient {weights.requires_grad}"
        raise ValueError(f"reduction {reduction.name}: returned {got}, {want}")
    return weights


def count(
    batch: PackedBatch, totals: Totals, field: str | None, own: bool, flat: bool, by_prompt: bool,
    dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    """What a reduction needs: of all tokens, or of those that a field keeps, [T] bool, lengths of
    their segments [T], and the totals of tokens and segments, [] float64 or, for the library's
    `own`, as they are. A reduction that reads no length (`flat`) gets none; one `by_prompt` gets
    the tokens of a token's prompt and the number of prompts."""
    kept, of_batch, counts = None, batch.segments, totals._counts
    read = not flat or of_batch.group is not None  # over a group all ranks take part in it here
    lengths: Any = of_batch.lengths if read else None
    if field is not None:
        kept, counts = getattr(batch, field), totals.kept[field]
        lengths = of_batch.sum(kept.to(dtype)) if read else None
    if by_prompt:
        prompts = answers(batch)
        lengths = prompts.expand(prompts.sum(lengths))
    chosen = counts[0], counts[2 if by_prompt else 1]
    tokens, segments = [_at_least_one(count, batch.targets.device, own) for count in chosen]
    lengths = None if flat else of_batch.expand(lengths.to(dtype).clamp_min(1))
    return kept, lengths, tokens, segments


def _at_least_one(count: float | Tensor, device: torch.device, own: bool) -> float | Tensor:
    """A total as a float64 scalar; a zero total acts as one."""
    if not isinstance(count, Tensor):
        number = float(count) or 1.0
        return number if own else torch.full((), number, dtype=torch.float64, device=device)
    count = count.to(device, torch.float64)
    return count.masked_fill(count == 0, 1.0)
