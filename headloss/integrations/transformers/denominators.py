"""What a call's terms are divided by, where it is a part of an optimizer step."""

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
    """An optimizer step of several calls.

    Attributes:
        totals: the denominators of all its calls, on all ranks.
        ranks: that will average their gradients.
        parts: the calls of a rank, whose losses will be averaged.
        batch: of this call, where a rank holds some of the tokens of its rows.
    """

    totals: Totals
    ranks: int = 1
    parts: int = 1
    batch: Batch | None = None


def over_step(
    objective: Objective, batch: Batch, step: Step | None, count: float | Tensor | None
) -> Objective:
    """`objective` with the denominators of a step, some of which `batch` gets.

    Without a `Step` they are `count` tokens, or the batch's own where there is none.

    Raises:
        ValueError: a reduction that `count` cannot serve.
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
    """NaN where nothing is scored, as Transformers' own loss has it: `Trainer` leaves that out of
    the mean of an evaluation."""
    if batch.totals is not None:
        count = batch.totals.tokens
    elif count is None:
        count = (batch.targets != IGNORE).sum()
    return loss.masked_fill(torch.as_tensor(count, device=loss.device) == 0, torch.nan)
