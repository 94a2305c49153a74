"""TRL's GRPO trainer, with every log-prob and the loss from headloss."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer

from ...losses import Objective, Term
from ...options import Options
from ..sharding import in_step
from .common import mode, record, refuse, refuse_common, require
from .forward import Measured, Request, Switches, Unrounded, installed
from .grpo_objective import check_settings, make_batch, make_objective, policy_term
from .support import Kept, padded, recorded


class GRPOTrainer(grpo_trainer.GRPOTrainer):
    """`trl.GRPOTrainer` with one pass from hidden states to loss and gradients.

    Arguments, configuration, losses, gradients and metrics are TRL's. Beyond them:

    - `importance_sampling_level="sequence_token"` (GSPO-token; advantages may be [B, C]);
    - LoRA on the head;
    - with `sampling_support`, log-probs and entropies are those of the softmax over the ids that
      top-k, top-p or min-p sampling left, in all passes; a `rollout_func` says them itself, as
      "support_ids" beside its "completion_ids": for each completion [C, K] integers with -1 in
      empty slots, or a list with the ids of each token (none: the whole vocabulary);
    - headloss's own metrics, as "headloss/...".

    Override `objective` to add terms, and set `options` for memory and schedule.

    Raises:
        ValueError: a configuration that is not supported, by the option's name.
    """

    options: Options = Options()
    switches: Switches = Switches(use_fused_loss=True)
    kl_in_reward = False  # the reference shapes the advantages, not the loss
    sampling_support = False  # of tokens that transformers generates here
    _kept: Kept | None = None  # of the generation that is under way

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        passes = "_get_per_token_logps_and_entropies"
        generation = "_generate_single_turn", "_generate", "_generate_and_score_completions"
        seams = "_compute_loss", *generation, passes
        require(grpo_trainer.GRPOTrainer, *seams, ours=GRPOTrainer)
        with installed(grpo_trainer, self.switches):
            super().__init__(*args, **kwargs)
        check_settings(self)
        refuse_common(self, "trl.GRPOTrainer")
        if self.sampling_support:
            own = "beside sampling_support: let a rollout_func return support_ids"
            batching = "use_transformers_continuous_batching"
            for name in ("use_vllm", batching, "tools", "rollout_func"):
                refuse(self, **{name: (bool(getattr(self, name)), own)})
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

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._kept = None
        found = super()._generate_and_score_completions(inputs)
        if self._kept is not None:
            found["support_ids"] = self._support(*found["completion_ids"].shape)
        self._kept = None
        return found

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._generate(*args, **kwargs)
        kept = found[5].pop("support_ids", None)  # of what a rollout_func has returned
        self._kept = self._kept if kept is None else kept
        return found

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(in_step(model))
            recorder = stack.enter_context(recorded(model)) if self.sampling_support else None
            found = super()._generate_single_turn(*args, **kwargs)
        self._kept = None if recorder is None else recorder.rows()
        return found

    def _support(self, completions: int, columns: int) -> Tensor | None:
        """[B, C, K] of the generation that is under way."""
        if self._kept is None:
            return None
        return padded(self._kept, completions, columns, self.accelerator.device)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """TRL's passes over the model; the one that it measures has been made."""
        if not isinstance(model, Measured):
            model = Unrounded(model, self._support(len(input_ids), logits_to_keep))
        given = (model, input_ids, attention_mask, logits_to_keep, *args)
        return super()._get_per_token_logps_and_entropies(*given, **kwargs)
