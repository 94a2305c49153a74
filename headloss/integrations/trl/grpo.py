"""TRL's GRPO trainer with log-probs and the loss from headloss."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer

from ...losses import Objective, Term
from ...options import Options
from ..sharding import in_step
from ..transformers.recorder import SupportRecorder
from .common import Logs, mode, record, refuse_common, require
from .forward import Asked, Measured, Paths, Request, Switches, Unrounded, installed
from .grpo_objective import (
    check_settings,
    completion_mask,
    make_batch,
    make_objective,
    policy_term,
)
from .replay import Obstacle, engine_with_sets, settle, wanted, wanted_of_processors
from .support import Row, drawn_logps, rows_drawn, rows_given, sampling_metrics, sets_of_outputs


class GRPOTrainer(Logs, grpo_trainer.GRPOTrainer):
    """`trl.GRPOTrainer` that computes loss and gradients from hidden states in one pass.

    Arguments, configuration, losses, gradients and metrics are TRL's. headloss adds:

    - `importance_sampling_level="sequence_token"` (GSPO-token; advantages may be [B, C]);
    - LoRA on the head;
    - headloss's own metrics, as "headloss/...";
    - `sampling_support`: log-probs and entropies of all passes over the ids that top-k, top-p or
      min-p sampling kept. `sampling_support=True`: the ids that the sampler kept are used, and an
      option that prevents this raises ValueError. `sampling_support=False`: log-probs are over the
      whole vocabulary, as in TRL. `sampling_support=None`, the default: if the sampler removes ids,
      log-probs are over the ids that the sampler kept; if the kept ids cannot be recorded, TRL's
      log-probs are used, with a warning. A `rollout_func` returns the ids that its sampler kept as
      "support_ids" next to its "completion_ids": for each completion [C, K] integers with -1 in
      unused entries, or a list with each token's ids (an empty list means the whole vocabulary).

    Override `objective` to add terms, and set `options` for memory and schedule.

    Raises:
        ValueError: an unsupported configuration; the message names the option.
    """

    options: Options = Options()
    switches: Switches = Switches(use_fused_loss=True)
    # True if the reference's KL shapes the advantages and is not a term of the loss.
    kl_in_reward = False
    sampling_support: bool | None = None
    # The reason for which the generation engine does not return the ids that its sampler kept.
    without_sets: str | None = None
    _rows: list[Row] | None = None  # Ids that the sampler kept in the current generation.
    # Whether the ids that the sampler kept are known; None: this trainer did not draw the tokens.
    _replayed: bool | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        passes = "_get_per_token_logps_and_entropies"
        generation = "_generate_single_turn", "_generate", "_generate_and_score_completions"
        seams = "_compute_loss", *generation, passes
        require(grpo_trainer.GRPOTrainer, *seams, ours=GRPOTrainer)
        self.warned_of: set[str] = set()  # Options of which the user was already warned.
        # For each model, the settings by which headloss computes log-probs.
        self.paths: list[Paths] = []
        with installed(grpo_trainer, self.switches, self.paths), engine_with_sets(self):
            super().__init__(*args, **kwargs)
        check_settings(self)
        refuse_common(self, "trl.GRPOTrainer")
        wanted(self)
        if self.importance_sampling_level == "sequence_token":
            # TRL's metrics of the importance ratio are computed at level "sequence", where the
            # ratio has the same values as at "sequence_token".
            self.importance_sampling_level = "sequence"

    def policy_term(self) -> Term:
        """Return the policy's term of the objective; the loss type sets the term's reduction."""
        return policy_term(self)

    def objective(self, inputs: dict[str, Any]) -> Term | Objective:
        """Return the configured objective of one micro-batch; subclasses may override it to add
        terms."""
        return make_objective(self, inputs)

    def further_loss(self, found: Any, inputs: dict[str, Any]) -> Tensor | float:
        """Return an additional loss that does not depend on log-probs, scaled for gradient
        accumulation."""
        if not self.aux_loss_enabled:
            return 0.0
        training = mode(self) == "train"
        steps = self.current_gradient_accumulation_steps if training else 1.0
        return self.router_aux_loss_coef * found.aux_loss / steps

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        request = Request(
            batch=make_batch(self, inputs),
            objective=Objective.of(self.objective(inputs)),
            options=self.options,
        )
        # TRL's loss method prepares the model's inputs, and updates TRL's metrics and entropy
        # controller from headloss's log-probs. The loss returned by TRL's `_compute_loss` is not
        # used.
        asked = Asked(model, request)
        with torch.no_grad():
            super()._compute_loss(asked, inputs)
        found = asked.output
        assert found.loss is not None
        loss = found.loss + self.further_loss(found, inputs)
        assert found.log_probs is not None
        scored = completion_mask(inputs).bool()
        further = functools.partial(sampling_metrics, found.log_probs, scored, inputs)
        training = mode(self) == "train"
        parts = self.current_gradient_accumulation_steps if training else 1
        record(self, request, parts, further=further)
        return loss

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._rows = None
        found = super()._generate_and_score_completions(inputs)
        if self._rows is not None:
            found["support_ids"] = self._rows
        self._rows = None
        return found

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        self._rows = self._replayed = None
        found = super()._generate(*args, **kwargs)
        completion_ids, tool_mask, logprobs, more = found[1], found[2], found[4], found[5]
        device = self.accelerator.device
        if self.rollout_func is not None and self.sampling_support is not False:
            given = more.pop("support_ids", None)
            self._rows = None if given is None else rows_given(given, completion_ids, device)
        elif self._replayed:
            assert logprobs is not None
            self._rows = rows_drawn(logprobs, tool_mask, device)
        if self._rows is None and self._replayed is None and wanted(self):
            name = "_generate_single_turn" if self.rollout_func is None else "rollout_func"
            settle(self, [Obstacle(name, "it gives no ids that the sampler kept")])
        return found

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(in_step(model))
            if self.use_vllm:
                self._replayed = wanted(self)
                if self._replayed:
                    stack.enter_context(sets_of_outputs())
                return super()._generate_single_turn(*args, **kwargs)
            recorder = SupportRecorder(functools.partial(wanted_of_processors, self))
            if self.sampling_support is not False and not self.use_transformers_continuous_batching:
                stack.enter_context(recorder.attached(model))
            completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        self._replayed = recorder.sets is not None
        if recorder.sets is not None:
            logprobs = drawn_logps(recorder.sets, recorder.drawn_logps, completion_ids)
        return completion_ids, logprobs

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return log-probs and entropies by TRL's passes over `model`; a `Measured` object in place
        of `model` gives known results without a pass."""
        if not isinstance(model, Measured):
            model = Unrounded(model, self._rows, logits_to_keep)
        given = (model, input_ids, attention_mask, logits_to_keep, *args)
        return super()._get_per_token_logps_and_entropies(*given, **kwargs)
