"""What packing has to know of a batch, in plain PyTorch.

N positions, T of them scored, S segments.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ..interface import Compacted, Surveyed


def survey(
    targets: Tensor, ids: Tensor | None, count: int, ignore: int, *,
    id_fields: Sequence[Tensor] = (), host: Tensor | None = None
) -> Surveyed:  # fmt: skip
    targets, ids = targets.reshape(-1), None if ids is None else ids.reshape(-1)
    if ignore < 0 < len(targets) and targets.is_cpu and not id_fields:
        least, most = map(int, targets.aminmax())
        ids_fit = ids is None or (ids[0] >= 0 and ids[-1] < count and (ids[1:] >= ids[:-1]).all())
        if least >= 0 and ids_fit:  # no more has to be found out
            counts = [len(targets)] if ids is None else ids.bincount(minlength=count).tolist()
            facts = torch.frombuffer(array("q", (0, 0, most, 0, *counts, 0, 0)), dtype=torch.int64)
            return Surveyed(_told(facts, host), targets)
    ids = torch.zeros_like(targets, dtype=torch.int64) if ids is None else ids
    values = [targets, *(field.amax(1) for field in id_fields)]
    if not len(targets):
        return Surveyed(_told(ids.new_zeros(2 + len(values) + count + 3), host), targets)
    dead = targets == ignore
    real = [value.masked_fill(dead, 0) for value in values]
    bins = ids.clamp(-1, count).add_(1)
    facts = [(bins.diff() < 0).sum(), real[0].amin().clamp_max_(0)]
    facts += [value.amax().clamp_min_(0) for value in real]
    bins.masked_fill_(dead, count + 2)
    counts = ids.new_zeros(count + 3).scatter_(0, bins, 1, reduce="add")
    return Surveyed(_told(torch.cat([torch.stack(facts), counts]), host), targets)


def _told(facts: Tensor, host: Tensor | None) -> Tensor:
    if host is not None:
        host[: len(facts)].copy_(facts, non_blocking=True)
    return facts


def compact(targets: Tensor, ids: Tensor, ignore: int, scored: Tensor, count: int) -> Compacted:
    targets = targets.reshape(-1)
    index, unscored = (x.nonzero().squeeze(1) for x in (targets != ignore, targets == ignore))
    return Compacted(index, ids.reshape(-1)[index], targets[index], unscored)
