"""Losses and metrics of NeMo Automodel's DSpark and DFlash drafts from hidden states.

`install()` replaces the losses of DSparkTrainerModule and DFlashTrainerModule. `uninstall()`
restores Automodel's losses.

During a training forward the heads of the draft model return their inputs in place of logits.
Automodel still computes sums, denominators over ranks, and metrics. One headloss call computes the
losses of each row and the gradient.

B sequences, N blocks of K places, H hidden width, r rank of a Markov head.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..head.head import Head
from .drafts import DraftHeads, Parts
from .seams import Seams, part

PACKAGE = "nemo-automodel"
HOME = "nemo_automodel.components"
DSPARK = f"{HOME}.speculative.dspark"
DFLASH = f"{HOME}.speculative.dflash.core"
DECAY_LOSS = f"{HOME}.loss.dllm_loss:DFlashDecayLoss"
EAGLE = f"{HOME}.speculative.eagle.core:Eagle3TrainerModule"


def install() -> None:
    """Replace Automodel's losses of drafts by headloss's in this process, until `uninstall()`.

    Raises:
        RuntimeError: a replaced class or function is missing, or has unexpected arguments.
    """
    SEAMS.install()


def _whole(module: nn.Module, name: str) -> nn.Module:
    weight: Any = module.weight
    if isinstance(weight, DTensor):
        want = "a weight that a rank holds whole (DDP, or a module outside of the sharded ones)"
        raise ValueError(f"{name}: got a sharded weight, want {want}")
    return module


# ---------------------------------------------------------------------- DSpark

DRAFT: ContextVar[DraftHeads | None] = ContextVar("headloss_automodel_dspark", default=None)
ALPHAS: ContextVar[tuple[float, float]] = ContextVar("headloss_automodel_alphas")


def _dspark_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    theirs = SEAMS.theirs[f"{DSPARK}.core:DSparkTrainerModule", "forward"]
    draft = getattr(self.draft_model, "module", self.draft_model)  # Inside of DDP's wrapper.
    head = _whole(draft.lm_head, "draft_model.lm_head")
    markov = None if draft.markov_head is None else draft.markov_head.markov_w2
    heads = DraftHeads(head, head, markov)
    with heads.returning_states():
        _plain(draft, heads)
        before = DRAFT.set(heads)
        try:
            return theirs(self, *args, **kwargs)
        finally:
            DRAFT.reset(before)


@torch.no_grad()
def _plain(draft: Any, heads: DraftHeads) -> None:
    """Raise ValueError if the draft model changes the output of `lm_head`, for example by a soft
    cap."""
    weight = draft.lm_head.weight
    probe = torch.linspace(-40, 40, heads.width, dtype=weight.dtype, device=weight.device)
    if not torch.equal(draft.compute_logits(probe[None])[0, : heads.width], probe):
        name = f"{type(draft).__name__}.compute_logits"
        raise ValueError(f"{name}: got a soft cap or a scale, want the product of lm_head alone")


def _compute_dspark_loss(**arguments: Any) -> Any:
    theirs = SEAMS.theirs[f"{DSPARK}.core", "compute_dspark_loss"]
    alphas = float(arguments["ce_loss_alpha"]), float(arguments["l1_loss_alpha"])
    before = ALPHAS.set(alphas)
    try:
        return theirs(**arguments)
    finally:
        ALPHAS.reset(before)


def _collect_local_terms(
    *, outputs: Any, loss_decay_gamma: float | None, l1_loss_alpha: float
) -> tuple[dict[str, Tensor], bool]:
    """Return Automodel's loss sums of this rank. In place of logits, `outputs.draft_logits` holds
    the draft's hidden states (width H) followed by the Markov head's inputs (width r), [B, N, K, H
    + r]."""
    heads = DRAFT.get()
    if heads is None:
        theirs = SEAMS.theirs[f"{DSPARK}.loss", "_collect_local_terms"]
        of_all = {"loss_decay_gamma": loss_decay_gamma, "l1_loss_alpha": l1_loss_alpha}
        return theirs(outputs=outputs, **of_all)  # type: ignore[no-any-return]
    states, guess = outputs.draft_logits, outputs.confidence_pred
    weights = part(PACKAGE, f"{DSPARK}.loss", "_build_loss_weight_mask")(
        eval_mask=outputs.eval_mask,
        block_size=states.shape[2],
        device=states.device,
        loss_decay_gamma=loss_decay_gamma,
    )
    taught = l1_loss_alpha > 0 or guess is not None
    verifier = outputs.aligned_target_logits if taught else None
    if taught and verifier is None:
        raise ValueError(
            "target_last_hidden_states: got None, want the verifier's states [B, T, H]"
        )
    ce_alpha, l1_alpha = ALPHAS.get()
    l1_alpha = max(l1_alpha, 0.0)
    slopes = {"ce": ce_alpha * weights}
    if verifier is not None:
        slopes["tv"] = 2 * l1_alpha * weights  # Automodel's l1 is twice the total variation.
        verifier = verifier.detach()[..., : heads.width]
    targets = torch.where(outputs.eval_mask, outputs.target_ids, -100)
    out = heads.losses(states, targets, slopes, verifier, acceptance=taught)
    ce = out.per_token["ce/value"]
    l1 = 2 * out.per_token["tv/value"] if taught and l1_alpha > 0 else torch.zeros_like(ce)
    sums = (ce * weights).sum(), (l1 * weights).sum()
    ce_num, l1_num = Parts.apply(out.loss, (ce_alpha, l1_alpha), "Automodel's DSpark", *sums)
    total, zero = weights.sum(), ce_num.new_zeros(())
    acceptance = out.per_token["ce/acceptance"] if taught else None
    confidence = zero
    if guess is not None and acceptance is not None:
        bce = F.binary_cross_entropy_with_logits(guess.float(), acceptance, reduction="none")
        confidence = (bce * weights).sum()
    terms = {
        "ce_loss_num": ce_num,
        "ce_loss_den": total,
        "l1_loss_num": l1_num,
        "l1_loss_den": total if l1_alpha > 0 else zero,
        "confidence_loss_num": confidence,
        "confidence_loss_den": total if guess is not None else zero,
    }
    diagnostics = part(PACKAGE, f"{DSPARK}.loss", "_collect_acceptance_diagnostics")
    with torch.no_grad():
        terms |= diagnostics(
            outputs=outputs,
            accept_rate_3d=acceptance,
            loss_weight_mask=weights,
            has_confidence=guess is not None,
        )
    return terms, guess is not None


# ---------------------------------------------------------------------- DFlash


class Blocks:
    """State of one DFlash forward: the head, and for each row whether the draft is right."""

    def __init__(self, trainer: Any) -> None:
        head = Head.of(_whole(trainer.lm_head, "target_lm_head"))
        draft = trainer.draft_model
        self.draft = getattr(draft, "module", draft)
        scale, cap = self.draft.output_multiplier, self.draft.final_logit_softcapping
        head = Head(head.weight, head.bias, logit_scale=scale, softcap=cap)
        self.heads = DraftHeads(head, head)
        # True where the likeliest token is the target: N blocks of K - 1 drafted tokens, flattened.
        self.agreed: Tensor | None = None


BLOCKS: ContextVar[Blocks | None] = ContextVar("headloss_automodel_dflash", default=None)


def _dflash_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    theirs = SEAMS.theirs[f"{DFLASH}:DFlashTrainerModule", "forward"]
    if self.loss_type != "dflash":
        raise ValueError(
            f"DFlashTrainerModule: got loss_type={self.loss_type!r}, want 'dflash'; "
            "headloss.integrations.nemo_automodel_drafts.uninstall() runs others"
        )
    call = Blocks(self)
    before = BLOCKS.set(call)
    call.draft.compute_logits = lambda hidden, output_head: hidden
    try:
        return theirs(self, *args, **kwargs)
    finally:
        vars(call.draft).pop("compute_logits", None)
        BLOCKS.reset(before)


def _decay_loss(
    self: Any,
    logits: Tensor,  # Hidden states of the N blocks' K - 1 drafted tokens, [B, N (K - 1), H].
    target_ids: Tensor,
    block_mask: Tensor,
    num_tokens: int | None = None,
    block_size: int | None = None,
) -> Any:
    theirs = SEAMS.theirs[DECAY_LOSS, "forward"]
    call = BLOCKS.get()
    if call is None:
        return theirs(self, logits, target_ids, block_mask, num_tokens, block_size)
    rows = block_mask, num_tokens, block_size
    with torch.enable_grad():
        leaf = torch.zeros_like(block_mask, dtype=torch.float32, requires_grad=True)
        (slopes,) = torch.autograd.grad(self._reduce(leaf, *rows).total_loss, leaf)
    targets = torch.where(block_mask > 0, target_ids, -100)
    out = call.heads.losses(logits, targets, {"ce": slopes})
    call.agreed = out.per_token["top1"] > 0
    counts = self._draft_acc_per_pos(call.agreed, block_mask, block_size)
    result = self._reduce(out.per_token["ce/value"], *rows, *counts)
    return result._replace(total_loss=result.total_loss + (out.loss - out.loss.detach()))


def _acceptance_stats(pred_ids_4d: Tensor, target_ids_4d: Tensor, valid_mask_4d: Tensor) -> Any:
    call = BLOCKS.get()
    theirs = SEAMS.theirs[DFLASH, "compute_acceptance_stats"]
    # Automodel computed `pred_ids_4d` by argmax, but of hidden states in place of logits: replace
    # the ids by the target where the draft's likeliest token is the target, else by -1.
    if call is not None and call.agreed is not None:
        pred_ids_4d = torch.where(call.agreed.view_as(target_ids_4d), target_ids_4d, -1)
    return theirs(pred_ids_4d, target_ids_4d, valid_mask_4d)


# ---------------------------------------------------------------------- EAGLE-3


def _eagle_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        "Eagle3TrainerModule: got the verifier's logits or probabilities, want its last hidden "
        "states, which Eagle3TargetBatch does not have; "
        "headloss.integrations.nemo_automodel_drafts.uninstall() runs Automodel's own"
    )


SEAMS = Seams(
    {
        (f"{DSPARK}.core:DSparkTrainerModule", "forward"): _dspark_forward,
        (f"{DSPARK}.core", "compute_dspark_loss"): _compute_dspark_loss,
        (f"{DSPARK}.loss", "_collect_local_terms"): _collect_local_terms,
        (f"{DFLASH}:DFlashTrainerModule", "forward"): _dflash_forward,
        (DECAY_LOSS, "forward"): _decay_loss,
        (DFLASH, "compute_acceptance_stats"): _acceptance_stats,
        (EAGLE, "forward"): _eagle_forward,
    },
    PACKAGE,
)
uninstall, check = SEAMS.uninstall, SEAMS.check
