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
    id_fields: Sequence[Tensor] = (), host: Tensor | None = None
) -> Surveyed:  # fmt: skip
    targets = targets.reshape(-1)
    ids = torch.zeros_like(targets, dtype=torch.int64) if ids is None else ids.reshape(-1)
    values = [targets, *(field.amax(1) for field in id_fields)]
    dead = targets == ignore
    scored = ~dead
    if not len(targets):
        return Surveyed(_told(ids.new_zeros(2 + len(values) + count + 3), host), scored)
    real = [value.masked_fill(dead, 0) for value in values]
    bins = ids.clamp(-1, count).add_(1)
    facts = [(bins.diff() < 0).sum(), real[0].amin().clamp_max_(0)]
    facts += [value.amax().clamp_min_(0) for value in real]
    bins.masked_fill_(dead, count + 2)
    counts = ids.new_zeros(count + 3).scatter_(0, bins, 1, reduce="add")
    return Surveyed(_told(torch.cat([torch.stack(facts), counts]), host), scored)


def _told(facts: Tensor, host: Tensor | None) -> Tensor:
    if host is not None:
        host.copy_(facts, non_blocking=True)
    return facts


def compact(targets: Tensor, ids: Tensor, ignore: int, scored: Tensor, count: int) -> Compacted:
    index, unscored = (kept.nonzero().squeeze(1) for kept in (scored, ~scored))
    return Compacted(index, ids.reshape(-1)[index], targets.reshape(-1)[index], unscored)
