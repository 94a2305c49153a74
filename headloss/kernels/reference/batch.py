"""What packing has to know of a batch, in plain PyTorch.

N positions, T of them scored, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..interface import Compacted, Surveyed


def survey(
    targets: Tensor, ids: Tensor | None, count: int, ignore: int, *,
    id_fields: Sequence[Tensor] = (), positive: Tensor | None = None
) -> Surveyed:  # fmt: skip
    targets = targets.reshape(-1)
    ids = torch.zeros_like(targets, dtype=torch.int64) if ids is None else ids.reshape(-1)
    values = [targets, *(field.amax(1) for field in id_fields)]
    dead = targets == ignore
    scored = ~dead
    if not len(targets):
        size = 2 + len(values) + (positive is not None) + count + 3
        return Surveyed(ids.new_zeros(size), scored)
    real = [value.masked_fill(dead, 0) for value in values]
    bins = ids.clamp(-1, count).add_(1)
    facts = [(bins.diff() < 0).sum(), real[0].amin().clamp_max_(0)]
    facts += [value.amax().clamp_min_(0) for value in real]
    if positive is not None:
        p = positive.reshape(-1)
        facts.append((scored & ~((p > 0) & p.isfinite())).sum())
    bins.masked_fill_(dead, count + 2)
    counts = ids.new_zeros(count + 3).scatter_(0, bins, 1, reduce="add")
    return Surveyed(torch.cat([torch.stack(facts), counts]), scored)


def compact(targets: Tensor, ids: Tensor, ignore: int, scored: Tensor, count: int) -> Compacted:
    index, unscored = (kept.nonzero().squeeze(1) for kept in (scored, ~scored))
    return Compacted(index, ids.reshape(-1)[index], targets.reshape(-1)[index], unscored)
