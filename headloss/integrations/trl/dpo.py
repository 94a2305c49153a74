"""TRL's preference trainer with log-probs and losses from headloss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer import dpo_trainer

from ... import losses
from ...batch.batch import IGNORE, Batch
from ...batch.segments import Segments
from ...losses import Objective, Term
from ...losses.preference_pairs import Pairwise
from ...options import Options
from ..sharding import is_fsdp2
from ..steps import CountsSteps
from .common import Logs, of_probe, probe, record, refuse, refuse_common, require
from .forward import Measured, Request, Unrounded, installed

TERMS = {"sigmoid": losses.dpo, "ipo": losses.ipo}
NOT_MODEL_INPUTS = ("completion_mask", "ref_chosen_logps", "ref_rejected_logps")


class DPOTrainer(Logs, CountsSteps, dpo_trainer.DPOTrainer):
    """`trl.DPOTrainer` that computes loss and gradients from hidden states in one pass.

    Arguments, configuration, losses, gradients and metrics are TRL's: the loss types "sigmoid" and
    "ipo" and their weighted sums, with a reference model, an adapter, or precomputed log-probs.
    headloss adds LoRA on the head, and its own metrics as "headloss/...".

    Override `objective` to add terms, and set `options` for memory and schedule. Terms are divided
    by the totals of the optimizer step over all ranks: pairs have equal weight even if
    micro-batches differ in size. A pair without tokens has the loss that a margin of 0 gives, as in
    TRL.

    Raises:
        ValueError: an unsupported configuration; the message names the option.
    """

    options: Options = Options()
    _begun = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seams = "_compute_loss", "compute_ref_log_probs"
        require(dpo_trainer.DPOTrainer, *seams, ours=DPOTrainer)
        with installed(dpo_trainer):
            super().__init__(*args, **kwargs)
        stock = "use trl.DPOTrainer"
        unknown = [name for name in self.loss_types if name not in TERMS]
        refuse_common(self, "trl.DPOTrainer")
        refuse(
            self,
            loss_type=(bool(unknown), f"got {unknown}, want {tuple(TERMS)}, or {stock}"),
            f_divergence_type=(self.f_divergence_type != "reverse_kl", stock),
            ld_alpha=(self.ld_alpha is not None, stock),
            use_weighting=(self.use_weighting, stock),
        )

    def objective(self, inputs: dict[str, Any]) -> Term | Objective:
        """Return the loss on one micro-batch of pairs."""
        weighted = zip(self.loss_types, self.loss_weights, strict=True)
        return sum(  # type: ignore[return-value]
            (weight * TERMS[name](beta=self.beta) for name, weight in weighted), Objective(())
        )

    def _compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False
    ) -> Any:
        if not self.precompute_ref_logps:
            self._begin(model, inputs)
            reference = self.model if self.ref_model is None else self.ref_model
            chosen, rejected = self.compute_ref_log_probs(reference, inputs)
            inputs = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        batch = preference_batch(inputs)
        forward = {name: x for name, x in inputs.items() if name not in NOT_MODEL_INPUTS}
        if self.aux_loss_enabled:
            forward["output_router_logits"] = True
        objective = Objective.of(self.objective(inputs))
        totals = self.step_totals if self.model.training else None
        in_step = self.over_the_step(objective, batch, totals)
        objective = objective if in_step is None else in_step
        measured = objective + probe(names=("top1", "mean_logit"))
        request = Request(batch=batch, objective=measured, options=self.options)
        found: Any = request.of(model, **forward)
        loss = found.loss + of_empty_pairs(objective, batch).to(found.loss.dtype)
        if batch.totals is not None and self.divides(None):
            loss = loss * self.parts
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * found.aux_loss
        found.is_top1 = of_probe(request.result, "top1").bool()
        found.mean_logits = of_probe(request.result, "mean_logit")
        with torch.no_grad():
            self._measure(Measured(found), inputs)
            record(self, request, self.parts, 1 if in_step is None else self.ranks)
            return (loss, model(**forward)) if return_outputs else loss

    def batch_of(self, inputs: dict[str, Any], device: torch.device) -> Batch:
        names = "input_ids", "completion_mask"
        return Batch(*answers({name: inputs[name].to(device) for name in names}))

    def _begin(self, model: Any, inputs: dict[str, Any]) -> None:
        """Run one token through an FSDP2 model before the reference model's log-probs are computed.

        FSDP2 fixes the dtypes of gradients at its first forward, from the parameters trainable in
        that forward. Reference log-probs are computed with frozen adapters, so that a forward with
        trainable adapters must run before the forward for reference log-probs.
        """
        if not self._begun and is_fsdp2(model):
            with torch.no_grad():
                model(input_ids=inputs["input_ids"][:1, :1])
        self._begun = True

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        return super().compute_ref_log_probs(Unrounded(model), inputs)

    def _measure(self, measured: Measured, inputs: dict[str, Any]) -> None:
        """Let TRL's `_compute_loss` record TRL's metrics from the log-probs that headloss computed;
        the loss that `_compute_loss` returns is not used."""
        before, self.precompute_ref_logps = self.precompute_ref_logps, True
        try:
            super()._compute_loss(measured, inputs, False)
        finally:
            self.precompute_ref_logps = before


def answers(inputs: dict[str, Any]) -> tuple[Tensor, Segments]:
    """Return the targets [2 B, L] of chosen, then rejected answers, and the answers as pairs of
    segments."""
    ids, mask = inputs["input_ids"][:, 1:], inputs["completion_mask"][:, 1:]
    pairs = torch.arange(len(ids) // 2, device=ids.device)
    answer = torch.cat([2 * pairs, 2 * pairs + 1])
    segments = Segments.from_ids(answer[:, None].expand_as(ids), len(ids))
    return ids.masked_fill(mask == 0, IGNORE), segments


def preference_batch(inputs: dict[str, Any]) -> Batch:
    """Return the `Batch` of answer pairs, chosen answers first.

    TRL gives one reference log-prob per answer, so each token of the answer gets an equal part.
    """
    targets, segments = answers(inputs)
    reference: Tensor = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
    share = reference / (targets != IGNORE).sum(1).clamp(min=1)
    return Batch(targets, segments, ref_logps=share[:, None].expand(targets.shape))


def of_empty_pairs(objective: Objective, batch: Batch) -> Tensor:
    """Return the loss [] of the preference pairs whose two answers have no scored token, so that
    both answers' scores are 0.

    TRL's loss includes pairs without tokens, but a headloss term has a value only at tokens.
    """
    scored = (batch.targets != IGNORE).any(1)
    empty = ~scored.view(2, -1).any(0)
    segments = len(scored) if batch.totals is None else batch.totals.segments
    zero, value = torch.zeros((), dtype=torch.float64, device="cpu"), 0.0
    for coefficient, term in objective.parts:
        how = getattr(term.function, "keywords", {}).get("how")
        if isinstance(how, Pairwise):
            value += coefficient * how(zero, zero).item()
    return value * empty.sum() * 2 / segments
