"""TRL's supervised trainer with its loss from headloss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer import sft_trainer

from ...batch.batch import IGNORE, Batch
from ...batch.labels import next_in_row
from ...batch.reduction import Totals
from ...batch.segments import Segments
from ...losses import Objective, Term, cross_entropy
from ...options import Options
from ..documents import documents_of
from ..shared import needs_segments, over_count
from ..steps import CountsSteps
from .common import Logs, of_probe, probe, record, refuse, refuse_common, require
from .forward import Measured, Request, installed


class SFTTrainer(Logs, CountsSteps, sft_trainer.SFTTrainer):
    """`trl.SFTTrainer` that computes loss and gradients from hidden states in one pass.

    Arguments, configuration, losses, gradients and metrics are TRL's: `loss_type="nll"` on all
    tokens or on completions, padded or packed. headloss adds LoRA on the head, and its own metrics
    as "headloss/...".

    Override `objective` to add terms, and set `options` for memory and schedule. The denominator of
    a term, such as the number of tokens, is counted over the whole optimizer step and all ranks.
    Each document of a packed row counts as one sequence in a denominator. Context parallelism is
    TRL's: accelerate's torch backend, without packing.

    Raises:
        ValueError: an unsupported configuration; the message names the option.
    """

    options: Options = Options()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require(sft_trainer.SFTTrainer, "compute_loss", ours=SFTTrainer)
        with installed(sft_trainer):
            super().__init__(*args, **kwargs)
        settings: Any = self.args
        stock = "use trl.SFTTrainer"
        refuse_common(self, "trl.SFTTrainer", context=True)
        refuse(
            self,
            loss_type=(settings.loss_type != "nll", f'want "nll", or {stock}'),
            label_smoothing_factor=(
                self.args.label_smoothing_factor > 0,
                "override objective to return headloss.cross_entropy(label_smoothing=...)",
            ),
            compute_loss_func=(self.compute_loss_func is not None, "override objective"),
        )

    def objective(self, inputs: dict[str, Any]) -> Term | Objective:
        """Return the supervised loss on one micro-batch."""
        return Objective.of(cross_entropy())

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        objective = Objective.of(self.objective(inputs))
        if self.shards is None:
            totals = self.step_totals if self.model.training else None
            batch = self._batch(inputs, objective)
        else:
            batch, totals = self.of_call(inputs)
        divides = self.divides(num_items_in_batch)
        objective = self._over_the_step(objective, batch, num_items_in_batch, totals)
        labels = ("labels", "shift_labels")
        forward = {name: value for name, value in inputs.items() if name not in labels}
        if self.aux_loss_enabled:
            forward["output_router_logits"] = True
        measured = objective + probe(names=("top1",))
        request = Request(batch=batch, objective=measured, options=self.options)
        found: Any = request.of(model, **forward)
        loss = found.loss
        if divides and batch.totals is not None:
            loss = loss * self.parts
        if self.aux_loss_enabled:
            parts = 1 if divides else self.parts
            loss = loss + self.router_aux_loss_coef * found.aux_loss / parts
        found.is_top1 = of_probe(request.result, "top1")
        with torch.no_grad():  # TRL's `compute_loss` records metrics; the returned loss is unused.
            model_of: Any = Measured(found)
            super().compute_loss(model_of, inputs, num_items_in_batch=num_items_in_batch)
            ranks = self.ranks if batch.totals is not None else 1
            record(self, request, self.parts, ranks)
            return (loss, model(**forward)) if return_outputs else loss

    def batch_of(self, inputs: dict[str, Any], device: torch.device) -> Batch:
        tensors = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}
        return self._batch(tensors, Objective.of(self.objective(tensors)))

    def _batch(self, inputs: dict[str, Any], objective: Objective) -> Batch:
        """Return a batch [B, L - 1], or [B, L] to be sharded under context parallelism.

        Documents of packed rows are segments if a term needs segments.
        """
        labels, segments = inputs["labels"], None
        targets = next_in_row(labels, dim=1, fill=IGNORE)
        if needs_segments(objective):
            segments = documents_of(inputs, targets)
        if self.get_cp_size() > 1:
            return Batch(targets, segments)
        if segments is not None:
            segments = Segments.from_ids(segments.ids[:, :-1], segments.count)
        return Batch(labels[:, 1:], segments)

    def _over_the_step(
        self, objective: Objective, batch: Batch, count: int | Tensor | None, totals: Totals | None
    ) -> Objective:
        """Return the objective with the totals of the optimizer step as denominators. In an
        evaluation each batch of a rank is averaged over its own tokens, as in TRL."""
        in_step = self.over_the_step(objective, batch, totals)
        if in_step is not None or count is None:
            return objective if in_step is None else in_step
        return over_count(
            objective,
            count / self.ranks,
            batch,
            name="num_items_in_batch",
            instead="let get_batch_samples of headloss's SFTTrainer count the step",
        )
