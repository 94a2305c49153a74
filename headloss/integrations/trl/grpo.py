"""TRL's GRPO trainer, with every log-prob and the loss from headloss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer

from ...losses import Objective, Term
from ...options import Options
from .common import mode, record, refuse_common
from .forward import Measured, Request, Switches, Unrounded, installed, require
from .grpo_objective import check_settings, make_batch, make_objective, policy_term
from .sharding import in_step


class GRPOTrainer(grpo_trainer.GRPOTrainer):
    """`trl.GRPOTrainer` with one pass from hidden states to loss and gradients.

    Arguments, configuration, losses, gradients and metrics are TRL's. Beyond them:

    - `importance_sampling_level="sequence_token"` (GSPO-token; advantages may be [B, C]);
    - LoRA on the head;
    - headloss's own metrics, as "headloss/...".

    Override `objective` to add terms, and set `options` for memory and schedule.

    Raises:
        ValueError: a configuration that is not supported, by the option's name.
    """

    options: Options = Options()
    switches: Switches = Switches(use_fused_loss=True)
    kl_in_reward = False  # the reference shapes the advantages, not the loss

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        passes = "_get_per_token_logps_and_entropies"
        require(grpo_trainer.GRPOTrainer, "_compute_loss", "_generate_single_turn", passes)
        with installed(grpo_trainer, self.switches):
            super().__init__(*args, **kwargs)
        check_settings(self)
        refuse_common(self, "trl.GRPOTrainer")
        if self.importance_sampling_level == "sequence_token":
            self.importance_sampling_level = "sequence"  # where TRL measures; the value is the same

    def policy_term(self) -> Term:
        """The policy's term of the objective; its reduction is set by the loss type."""
        return policy_term(self)

    def objective(self, inputs: dict[str, Any]) -> Objective:
        """The loss on one micro-batch; override it to add to what the configuration says."""
        return make_objective(self, inputs)

    def further_loss(self, found: Any, inputs: dict[str, Any]) -> Tensor | float:
        """What is added to the loss and is no function of log-probs; scaled for accumulation."""
        if not self.aux_loss_enabled:
            return 0.0
        training = mode(self) == "train"
        steps = self.current_gradient_accumulation_steps if training else 1.0
        return self.router_aux_loss_coef * found.aux_loss / steps

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        request = Request(
            batch=make_batch(self, inputs), objective=self.objective(inputs), options=self.options
        )
        router = {"output_router_logits": True} if self.aux_loss_enabled else {}
        with self.accelerator.autocast():
            found: Any = request.of(
                model,
                input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                **router,
            )
        loss = found.loss + self.further_loss(found, inputs)
        # TRL's own method, on the log-probs of this pass, keeps its metrics and its entropy
        # controller; the loss that it returns is not used.
        with torch.no_grad():
            super()._compute_loss(Measured(found), inputs)
        record(self, request.metrics)
        return loss

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with in_step(self.accelerator.unwrap_model(self.model)):
            return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's passes over the model; the one that it measures has been made."""
        model = model if isinstance(model, Measured) else Unrounded(model)
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
