"""`transformers.Trainer` with the totals of the optimizer step for every term."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from ...batch.batch import Batch
from ..context import group_of
from ..steps import CountsSteps
from .apply import Applied, applied_to
from .denominators import Step


class TotalsMixin(CountsSteps):
    """Goes before a `Trainer` of a model that `apply` was called on:

        class MyTrainer(TotalsMixin, transformers.Trainer): ...

    Loss, gradient and logged loss are then those of one large batch, in every reduction and with
    `.where`, however the batch is cut into micro-batches and ranks: the tokens and segments of a
    step, and what boolean fields keep of them, are counted before its first forward. Denominators
    of one's own (a `headloss.Reduction` with a constant, `totals` among the fields of a call) stay
    as they are. What a model adds to the loss, as a routers' loss, is averaged over micro-batches
    and ranks. With `average_tokens_across_devices=False` each rank counts for itself, and the
    ranks' losses are averaged.

    Under context parallelism (accelerate's torch backend) labels, documents and the fields of each
    token are shifted over whole rows and then sharded as the tokens are; terms of segments take
    sums over the group.

    Raises:
        ValueError: in the first step: a model that `apply` was not called on,
            `label_smoothing_factor` and `compute_loss_func`, which take the loss from logits, and
            sequence parallelism (DeepSpeed), whose data loader shards rows before they are counted.
    """

    def batch_of(self, inputs: dict[str, Any], device: torch.device) -> Batch | None:
        applied = self._applied()
        return None if inputs.get("labels") is None else applied.batch_of(inputs, device)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        applied, stock = self._applied(), super().compute_loss  # type: ignore[misc]
        batch, totals = self.of_call(inputs)
        if totals is None:
            return stock(model, inputs, return_outputs, num_items_in_batch)
        applied.step = Step(totals, self.ranks, self.parts, batch)
        try:  # without a count, for which Trainer would multiply by the ranks
            loss, outputs = stock(model, inputs, return_outputs=True)
        finally:
            applied.step = None
        if not self.divides(num_items_in_batch):
            loss = loss / self.parts
        return (loss, outputs) if return_outputs else loss

    def _applied(self) -> Applied:
        trainer: Any = self
        if trainer.label_smoother is not None or trainer.compute_loss_func is not None:
            raise ValueError(
                "label_smoothing_factor and compute_loss_func: take the loss from logits; pass "
                "terms to apply() in their place"
            )
        group_of(self)  # refused before the first step
        return applied_to(self.model)


class Trainer(TotalsMixin, transformers.Trainer):
    """`transformers.Trainer` behind `TotalsMixin`."""
