"""Segments that run across ranks: the ranks compare their calls, and what a field means is settled.

A field is per token where its shape is the targets' on all ranks, else per segment: the tokens of
one rank may happen to number S.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed

from ..batch.batch import Batch
from ..batch.packing import PackedBatch, Packing
from ..options import Options
from .agreement import WORDS, Own, agree_early, settle
from .collectives import summed
from .place import of_objective

FIELDS = (WORDS - 3) // 2  # two words of a record each


def over_segments(
    batch: Batch, options: Options, prepare: Callable[[], Any],
    behind: distributed.ProcessGroup | None = None, wait: bool = False
) -> Any:
    """Prepare a call whose segments run across ranks, a `Work`: what is wrong on one is raised on
    all.

    Args:
        behind: the group of the vocabulary, whose ranks agree in `prepare`.
        wait: for what the ranks say, also in a call like one that is known.
    """
    group: Any = batch.segments.group

    def same(work: Any) -> dict[str, Any]:
        # Other choices (schedule, chunks) may differ; these decide what is summed over segments.
        chosen = type(options)(metrics=options.metrics)
        found = of_objective(work.objective, chosen, batch.targets.device)
        gradient = work.plan.schedule != "statistics"
        found |= {"segments.count": batch.segments.count, "a gradient is wanted": gradient}
        return found | {"fields": " ".join(sorted(batch.fields))}

    if getattr(options, "static", False):
        return prepare()  # see `voted`
    given = "segments.group", group, prepare, lambda _: _forms(batch), same, wait, True
    work, per_segment = agree_early(*given, behind=behind, digest=partial(_agreed, batch))
    work.per_segment, work.confirm = per_segment, partial(settle, group)
    return work


def _forms(batch: Batch) -> dict[str, Any]:
    """Of each field, what may be one value per segment, which then has to be the same on all ranks;
    and whether it has the shape of values per token (1) and per segment (2)."""
    if len(batch.fields) > FIELDS:
        raise ValueError(f"fields: got {len(batch.fields)}, want at most {FIELDS} across ranks")
    values, forms = {}, {}
    for name, value in sorted(batch.fields.items()):
        per_token, per_segment = batch._fits(name)
        forms[name] = per_token + 2 * per_segment
        values[f"values of {name}"] = [value] if per_segment else []
    return values | forms


def _agreed(batch: Batch, own: Own) -> frozenset[str]:
    """The fields that are per segment; ValueError, on all, where there is no form for all ranks, or
    where the values of segments are not the same."""
    found = frozenset(n for n in sorted(batch.fields) if not all(form & 1 for form in own[n]))
    for name in sorted(found):
        if not all(form & 2 for form in own[name]):
            raise ValueError(
                f"{name}: is per token on some ranks of segments.group and per segment on others, "
                "want the same on all"
            )
        if len(set(own[f"values of {name}"])) > 1:
            raise ValueError(
                f"{name}: its values per segment differ between the ranks of segments.group, want "
                "the same on all"
            )
    return found


def voted(
    packing: Packing, batch: Batch, wide: torch.dtype, group: distributed.ProcessGroup
) -> PackedBatch:
    """The batch as terms see it with static shapes, where nothing may be read: a field that may
    mean either takes its form on the device."""
    names = sorted(batch.fields)
    fits = {name: batch._fits(name) for name in names}
    view = packing.view(batch, wide)
    if not names:
        return view
    one = torch.ones((), dtype=torch.int64, device=batch.targets.device)
    against = torch.stack([one * (not fits[name][0]) for name in names])
    against = summed("what fields are", against, group)
    other = packing.view(batch, wide, frozenset(n for n in names if fits[n][1]))
    fields = {
        name: torch.where(votes == 0, getattr(view, name), getattr(other, name))
        for name, votes in zip(names, against.unbind(), strict=True)
        if all(fits[name])
    }
    return view.replacing(fields)
