"""TRL's supervised trainer, with its loss from headloss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer import sft_trainer

from ...batch.batch import Batch
from ...losses import Objective, cross_entropy
from ...options import Options
from ..shared import over_count
from .common import Probe, record, refuse, refuse_common, require
from .forward import Measured, Request, installed


class SFTTrainer(sft_trainer.SFTTrainer):
    """`trl.SFTTrainer` with one pass from hidden states to loss and gradients.

    Arguments, configuration, losses, gradients and metrics are TRL's: `loss_type="nll"` on all
    tokens or on completions, padded or packed. Beyond them: LoRA on the head, and headloss's own
    metrics as "headloss/...".

    Override `objective` to add terms, and set `options` for memory and schedule.

    Raises:
        ValueError: a configuration that is not supported, by the option's name.
    """

    options: Options = Options()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require(sft_trainer.SFTTrainer, "compute_loss", ours=SFTTrainer)
        with installed(sft_trainer):
            super().__init__(*args, **kwargs)
        settings: Any = self.args
        stock = "use trl.SFTTrainer"
        refuse_common(self, "trl.SFTTrainer")
        refuse(
            self,
            loss_type=(settings.loss_type != "nll", f'want "nll", or {stock}'),
            label_smoothing_factor=(
                self.args.label_smoothing_factor > 0,
                "override objective to return headloss.cross_entropy(label_smoothing=...)",
            ),
            compute_loss_func=(self.compute_loss_func is not None, "override objective"),
        )

    def objective(self, inputs: dict[str, Any]) -> Objective:
        """The loss per scored token; terms over the mean of tokens take TRL's denominator."""
        return Objective.of(cross_entropy())

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        targets, probe = inputs["labels"][:, 1:], Probe("top1")
        objective = self.objective(inputs)
        if num_items_in_batch is not None:
            objective = self._over_the_step(objective, num_items_in_batch)
        forward = {name: value for name, value in inputs.items() if name != "labels"}
        if self.aux_loss_enabled:
            forward["output_router_logits"] = True
        request = Request(
            batch=Batch(targets), objective=objective + probe.term, options=self.options
        )
        found: Any = request.of(model, **forward)
        loss = found.loss
        if self.aux_loss_enabled:
            counted = num_items_in_batch is not None
            steps = self.current_gradient_accumulation_steps if counted else 1
            loss = loss + self.router_aux_loss_coef * found.aux_loss / steps
        found.is_top1 = probe.scatter("top1", targets.shape)
        with torch.no_grad():  # TRL's own method keeps its metrics; its loss is not used
            measured: Any = Measured(found)
            super().compute_loss(measured, inputs, num_items_in_batch=num_items_in_batch)
            record(self, request.metrics)
            return (loss, model(**forward)) if return_outputs else loss

    def _over_the_step(self, objective: Objective, count: int | Tensor) -> Objective:
        """`count` is of all tokens of the optimizer step, over all ranks if TRL counts them so."""
        ranks = 1
        if self.args.average_tokens_across_devices:
            ranks = self.accelerator.num_processes // self.get_tp_size()
        return over_count(objective, count / ranks)
