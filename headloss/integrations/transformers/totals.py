"""`transformers.Trainer` with every term divided by the totals of the optimizer step."""

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
    """Mixin for a `Trainer` whose model has had headloss's `apply(model)`. List the mixin before
    `Trainer`:

        class MyTrainer(TotalsMixin, transformers.Trainer): ...

    A `Trainer` with `TotalsMixin` computes the same loss, gradient and logged loss for every split
    of an optimizer step's batch into micro-batches and ranks, for every reduction and with
    `.where`, as if the whole batch were in one micro-batch on one rank. Before the step's first
    forward, the mixin counts the tokens and segments of the whole step, and the tokens and segments
    where each boolean field named by a `.where` is True.

    A user's own denominators (a `headloss.Reduction` with a constant, `totals` among a call's
    fields) are kept. Losses that a model adds, such as a router's loss, are averaged over
    micro-batches and ranks. With `average_tokens_across_devices=False` each rank has its own
    denominators, and the ranks' losses are averaged.

    Under context parallelism (accelerate's torch backend), labels, documents and fields per token
    are shifted over whole rows and then sharded like the tokens. Terms over segments are summed
    over the context-parallel group.

    Raises:
        ValueError: in the first step, for a model to which `apply` was not applied; for
            `label_smoothing_factor` and `compute_loss_func`, which need logits; and for sequence
            parallelism (DeepSpeed), whose data loader shards rows before they are counted.
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
        try:
            # With `num_items_in_batch`, `Trainer` would multiply the loss by the number of ranks.
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
        group_of(self)  # Unsupported parallelism is refused before the first step.
        return applied_to(self.model)


class Trainer(TotalsMixin, transformers.Trainer):
    """`transformers.Trainer` with `TotalsMixin`."""
