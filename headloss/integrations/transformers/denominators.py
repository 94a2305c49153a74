"""Denominators of an objective's terms, counted over all model calls of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...batch.batch import IGNORE, Batch
from ...batch.reduction import Totals
from ...losses import Objective
from ..shared import over_count


@dataclass(frozen=True)
class Step:
    """Denominators and rank counts of an optimizer step that makes several calls of the model.

    Attributes:
        totals: denominators over all calls of the step, on all ranks.
        ranks: number of ranks whose gradients will be averaged.
        parts: number of a rank's calls, whose losses will be averaged.
        batch: this call's batch, if a rank holds only some tokens of its rows.
    """

    totals: Totals
    ranks: int = 1
    parts: int = 1
    batch: Batch | None = None


def over_step(
    objective: Objective, batch: Batch, step: Step | None, count: float | Tensor | None
) -> Objective:
    """Return `objective` with the step's denominators; totals are stored in `batch`.

    If `step` is None, the denominator is `count` tokens, or the batch's own totals if `count` is
    None.

    Raises:
        ValueError: a term's reduction cannot use `count`.
    """
    if step is not None:
        batch.totals = step.totals if batch.totals is None else batch.totals
        return objective if step.ranks == 1 else step.ranks * objective
    if count is None:
        return objective
    return over_count(
        objective,
        count,
        batch,
        name="num_items_in_batch",
        instead="train with headloss.integrations.transformers.Trainer, or a Trainer of your own "
        "behind its TotalsMixin, which count the totals of the step",
    )


def nan_where_nothing(loss: Tensor, batch: Batch, count: float | Tensor | None) -> Tensor:
    """Return the loss, or NaN if no token is scored, like Transformers' own loss.

    `Trainer` leaves NaN losses out of the mean of an evaluation.
    """
    if batch.totals is not None:
        count = batch.totals.tokens
    elif count is None:
        count = (batch.targets != IGNORE).sum()
    return loss.masked_fill(torch.as_tensor(count, device=loss.device) == 0, torch.nan)
