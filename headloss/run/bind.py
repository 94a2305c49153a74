"""An objective on one batch: bound to its totals once, while the first product runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.packing import PackedBatch, Packing
from ..batch.reduction import Totals
from ..losses.term import Objective
from ..objective.bound import Bound, bind
from ..objective.tape import Tape, Tokens
from ..objective.taped import Taped
from ..options import Options
from .prepare import Prepared


def binder(
    prepared: Prepared,
    objective: Objective,
    batch: Batch,
    packing: Packing,
    view: PackedBatch,
    vocabulary: int,
    options: Options,
) -> Callable[[], Bound | Taped]:
    """What binds the objective to its totals when it is first called."""
    made: list[Bound | Taped] = []
    rescaled, declared = prepared.problem.rescaled, options.upstream

    def bind_once() -> Bound | Taped:
        if made:
            return made[0]
        totals = batch.totals or _counted(batch, packing) or Totals.of(batch)

        def by_autograd() -> Bound:
            found = bind(objective, view, totals, vocabulary, prepared.wide)
            found = replace(found, declared=declared)
            return found.scaled() if rescaled else found

        def find(observe: bool, gradients: bool) -> Tape | None:
            return prepared.tape(objective, observe, gradients)

        if not prepared.taped or find(options.metrics, True) is None:
            made.append(by_autograd())
            return made[0]
        found = Taped(
            objective,
            Tokens(packing, batch),
            totals,
            vocabulary,
            find,
            observe=options.metrics,
            by_autograd=by_autograd,
            rescaled=rescaled,
            declared=declared,
        )
        made.append(found)
        return made[0]

    return bind_once


def _counted(batch: Batch, packing: Packing) -> Totals | None:
    """The totals of the batch, if packing has read them; else None."""
    masks = any(isinstance(f, Tensor) and f.dtype == torch.bool for f in batch.fields.values())
    if packing.lengths is None or masks or batch.segments.group is not None:
        return None
    return Totals(sum(packing.lengths), packing.count)
