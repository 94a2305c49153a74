"""Segments that run across ranks: the ranks compare their calls, and what a field means is settled.

A field is per token where its shape is the targets' on all ranks, else per segment: the tokens of
one rank may happen to number S.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from .agreement import Facts, agree
from .collectives import together
from .shards import of_objective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .batch import Batch
    from .losses.term import Objective
    from .options import Options
    from .packing import Packed
    from .schedules import Call

FIELDS = 62  # bits of a fact


def over_segments(
    batch: Batch, options: Options, prepare: Callable[[], tuple[Call, Objective]]
) -> Call:
    """Prepare a call; where segments run across ranks, what is wrong on one is raised on all, and
    the objective is bound at once: collectives may not wait for a rank's own tokens."""
    group = batch.segments.group if hasattr(batch, "segments") else None
    if group is None:
        return prepare()[0]

    def describe(prepared: tuple[Call, Objective]) -> Facts:
        call, objective = prepared
        # Other choices (schedule, chunks) may differ; these decide what is summed over segments.
        chosen = type(options)(metrics=options.metrics)
        same = of_objective(objective, chosen, batch.targets.device)
        gradient = call.plan.schedule != "statistics"
        same |= {"segments.count": batch.segments.count, "a gradient is wanted": gradient}
        same |= {"fields": " ".join(sorted(batch.fields))}
        return Facts(same, _fits(batch) | _values(batch))

    if getattr(options, "static", False):
        call, _ = prepare()
        packed = _voted(call.packed, batch, group)
    else:
        (call, _), agreed = agree("segments.group", group, prepare, describe)
        packed = _agreed(call.packed, batch, agreed.own)
    call.bind(packed)
    return replace(call, packed=packed)


def _fits(batch: Batch) -> dict[str, int]:
    """Which fields, by name in order, have the shape of values per token, and per segment."""
    fits = [batch._fits(name) for name in sorted(batch.fields)]
    if len(fits) > FIELDS:
        raise ValueError(f"fields: got {len(fits)}, want at most {FIELDS} across ranks")
    kinds = zip(("per token", "per segment"), zip(*fits, strict=True), strict=False)
    found = {"per token": 0, "per segment": 0}
    return found | {kind: sum(fit << i for i, fit in enumerate(all_)) for kind, all_ in kinds}


def _values(batch: Batch) -> dict[str, Any]:
    """What may be one value per segment, and then has to be the same on all ranks."""
    found = {}
    for name, value in sorted(batch.fields.items()):
        nothing = batch.targets.new_empty(0)
        fits = isinstance(value, Tensor) and batch._fits(name)[1]
        found[f"values of {name}"] = [value if fits else nothing]
    return found


def _agreed(packed: Packed, batch: Batch, own: dict[str, list[int]]) -> Packed:
    """Fields in the form that all ranks can give them; ValueError, on all, where there is none, or
    where the values of segments are not the same."""
    kinds = ("per token", "per segment")
    masks = {kind: functools.reduce(operator.and_, own[kind]) for kind in kinds}
    fields = dict(packed.batch.fields)
    for i, name in enumerate(sorted(batch.fields)):
        if masks["per token"] >> i & 1:
            continue
        if not masks["per segment"] >> i & 1:
            raise ValueError(
                f"{name}: is per token on some ranks of segments.group and per segment on others, "
                "want the same on all"
            )
        if len(set(own[f"values of {name}"])) > 1:
            raise ValueError(
                f"{name}: its values per segment differ between the ranks of segments.group, want "
                "the same on all"
            )
        fields[name] = packed.doubtful.get(name, fields[name])
    return packed.with_fields(fields)


def _voted(packed: Packed, batch: Batch, group: ProcessGroup) -> Packed:
    """The same for static shapes, where nothing may be read."""
    names = sorted(batch.fields)
    if not names:
        return packed
    one = torch.ones((), dtype=torch.int64, device=batch.targets.device)
    against = torch.stack([one * (not batch._fits(name)[0]) for name in names])
    together(
        "what fields are", group, lambda: distributed.all_reduce(against, group=group)
    )
    fields = dict(packed.batch.fields)
    for name, votes in zip(names, against.unbind(), strict=True):
        if name in packed.doubtful:
            either = packed.batch.get(name), packed.doubtful[name]()
            fields[name] = torch.where(votes == 0, *either)
    return packed.with_fields(fields)
