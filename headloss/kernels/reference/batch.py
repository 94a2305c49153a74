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
    targets, ids = targets.flatten(), None if ids is None else ids.flatten()  # no view of vectors
    total, counts, most = targets.numel(), None, 0
    if ignore < 0 < total and targets.is_cpu and not id_fields:
        least, most = map(int, targets.aminmax())
        first, last = (0, 0) if ids is None else (int(ids[0]), int(ids[-1]))
        fit = ids is None or (first >= 0 and last < count and bool((ids[1:] >= ids[:-1]).all()))
        if least >= 0 and fit:  # no more has to be found out
            counts = [total] if ids is None else ids.bincount(minlength=count).tolist()
    if counts is not None:
        facts = torch.frombuffer(array("q", (0, 0, most, 0, *counts, 0, 0)), dtype=torch.int64)
    elif not total:
        facts = targets.new_zeros(3 + len(id_fields) + count + 3, dtype=torch.int64)
    else:
        ids = torch.zeros_like(targets, dtype=torch.int64) if ids is None else ids
        dead, bins = targets == ignore, ids.clamp(-1, count).add_(1)
        values = [targets, *(field.amax(1) for field in id_fields)]
        real = [value.masked_fill(dead, 0) for value in values]
        found = [(bins.diff() < 0).sum(), real[0].amin().clamp_max_(0)]
        found += [value.amax().clamp_min_(0) for value in real]
        bins.masked_fill_(dead, count + 2)
        of_bins = ids.new_zeros(count + 3).scatter_(0, bins, 1, reduce="add")
        facts = torch.cat([torch.stack(found), of_bins])
    if host is not None:
        host[: len(facts)].copy_(facts, non_blocking=True)
    return Surveyed(facts, targets)


def compact(targets: Tensor, ids: Tensor, ignore: int, scored: Tensor, count: int) -> Compacted:
    targets = targets.reshape(-1)
    index, unscored = (x.nonzero().squeeze(1) for x in (targets != ignore, targets == ignore))
    return Compacted(index, ids.reshape(-1)[index], targets[index], unscored)
