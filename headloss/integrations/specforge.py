"""Losses and metrics of SpecForge's draft models, computed from hidden states without logits.

`install()` replaces the losses of DFlash, D-PACE, Domino, DSpark and EAGLE-3; EAGLE-3 must train
offline with SpecForge's option `compact_teacher`. `uninstall()` restores SpecForge's losses.

The loss is reduced by SpecForge's formulas: weighted sums over the rows of each block of drafted
tokens, or means over each unrolled step of EAGLE-3. One headloss call computes the losses of all
rows, and the gradient with SpecForge's row weights.

B sequences, N blocks of K places, T positions, S unrolled steps, H hidden width.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..head.head import Head
from ..head_stats import head_stats
from ..head_topk import head_topk
from .drafts import DraftHeads, Parts, bound_arguments, padded, returning
from .seams import Seams, part

PACKAGE = "specforge"
FAMILY = "specforge.algorithms.common.dflash_family_model"
EAGLE = "specforge.algorithms.eagle3.model"
SHARE: ContextVar[float] = ContextVar("headloss_specforge_domino", default=0.0)
DECAY: ContextVar[float] = ContextVar("headloss_specforge_decay", default=0.8)


def install(ploss_decay: float = 0.8) -> None:
    """Replace SpecForge's losses by headloss's in this process, until `uninstall()`.

    Args:
        ploss_decay: decay by which the trainer sums EAGLE-3's steps. If the trainer's decay differs
            from `ploss_decay`, the backward pass raises RuntimeError.

    Raises:
        RuntimeError: a replaced class or function is missing, or has unexpected arguments.
    """
    SEAMS.install()
    DECAY.set(ploss_decay)


# ---------------------------------------------------------------------- blocks


def _once(function: Any, *tensors: Any, chunk_size: int, dim: int = 0) -> Any:
    """Return the loss sums of all blocks, from one call without chunks.

    SpecForge's chunks run inside a checkpoint, which would run each headloss pass twice.
    """
    theirs = SEAMS.theirs[FAMILY, "checkpointed_chunk_reduce"]
    return theirs(function, *tensors, chunk_size=0, dim=dim)


def _dflash(self: Any, hidden: Tensor, target_ids: Tensor, weight_mask: Tensor) -> tuple[Any, ...]:
    """Return the sum of losses, its denominator, the number of rows with a correct draft, and the
    number of all rows, for hidden states [B, N, K, H]."""
    heads = DraftHeads(self.lm_head, self.lm_head)
    targets = torch.where(weight_mask > 0, target_ids, -100)
    weights, gamma = weight_mask, self.loss_decay_gamma
    if self.loss_type != "dflash":  # D-PACE computes its weights from the losses.
        with torch.no_grad():
            ones = torch.ones_like(weight_mask)
            values = heads.losses(hidden, targets, {"ce": ones}).per_token["ce/value"]
            of_values = (-values).exp(), weight_mask, weight_mask > 0, self.loss_type
            weights = weight_mask * self._dpace_weight(*of_values)
    elif gamma is not None and gamma > 0:
        place = torch.arange(self.block_size, device=hidden.device, dtype=torch.float32)
        weights = weight_mask * torch.exp(-(place - 1).clamp(min=0) / gamma)
    out = heads.losses(hidden, targets, {"ce": weights})
    total = weights.sum() if self.loss_type == "dflash" else out.loss.new_zeros(())
    agreed = out.per_token["top1"] * (weight_mask > 0.5)
    return out.loss, total, agreed.sum(), weight_mask.sum()


def _domino_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    theirs = SEAMS.theirs[f"{FAMILY}:OnlineDominoModel", "forward"]
    before = SHARE.set(bound_arguments(theirs, (self, *args), kwargs)["lambda_base"])
    try:
        return theirs(self, *args, **kwargs)
    finally:
        SHARE.reset(before)


def _domino(
    self: Any,
    hidden: Tensor,  # Hidden states [B, N, K, H].
    prev_ids: Tensor,
    target_ids: Tensor,
    weight_mask: Tensor,
    eval_weight_mask: Tensor,
) -> tuple[Any, ...]:
    """Return the sums over drafted tokens that Domino's loss needs: the loss and the counts, with
    and without Domino's low-rank correction of the logits.

    Domino's low-rank correction of the logits becomes extra columns of the hidden states.
    """
    share, last = SHARE.get(), self.draft_model.embed_proj[-1]
    heads = DraftHeads(self.lm_head, self.lm_head, last)
    with returning({last: padded(0, 0)}):
        nothing = hidden.new_zeros(*hidden.shape[:-1], last.in_features)
        features = self._apply_domino_head(nothing, hidden, prev_ids, target_ids)
    rows = [torch.cat([hidden, columns], -1) for columns in (features, torch.zeros_like(features))]
    valid = eval_weight_mask > 0
    targets = torch.where(valid, target_ids, -100).expand(2, *target_ids.shape)
    weights = torch.stack([(1 - share) * weight_mask, share * weight_mask])
    out = heads.losses(torch.stack(rows), targets, {"ce": weights})
    sums = (out.per_token["ce/value"] * weight_mask).flatten(1).sum(1)
    final, base = Parts.apply(out.loss, (1 - share, share), "SpecForge's Domino", *sums)
    agreed = out.per_token["top1"] * (eval_weight_mask > 0.5)
    there = valid.any(-1).float()
    accepted = []
    for ids in torch.where(out.per_token["top1"] > 0, target_ids, -1):
        length = part(PACKAGE, FAMILY, "compute_accept_len")(ids, target_ids, valid)
        accepted.append(((length + 1) * there).sum())
    correct = agreed.flatten(1).sum(1)
    of_rows = weight_mask.sum(), *correct, eval_weight_mask.sum(), *accepted, there.sum()
    return final, base, *of_rows


def _dspark(
    self: Any,
    hidden: Tensor,  # Hidden states [B, N, K, H].
    prev_token_ids: Tensor,
    target_ids: Tensor,
    loss_weights: Tensor,
    eval_mask: Tensor,
    aligned_target_hidden: Tensor | None,
) -> tuple[Any, ...]:
    """Return DSpark's 14 sums of losses and counts."""
    draft, scored = self.draft_model, eval_mask.float()
    markov = None if draft.markov_head is None else draft.markov_head.markov_w2
    heads = DraftHeads(self.lm_head, self.lm_head, markov)
    states = hidden
    if markov is not None:
        with returning({markov: padded(0, 0)}):
            features = draft.apply_logits_head(
                hidden.new_zeros(*hidden.shape[:-1], markov.in_features),
                prev_token_ids=prev_token_ids,
                hidden_states=hidden,
            )
        states = torch.cat([hidden, features], -1)
    taught = aligned_target_hidden is not None
    alphas = self.dspark_ce_loss_alpha, self.dspark_l1_loss_alpha * taught
    slopes = {"ce": alphas[0] * loss_weights}
    if taught:
        # SpecForge's L1 distance is 2 x total variation.
        slopes["tv"] = 2 * alphas[1] * loss_weights
    targets = torch.where(eval_mask, target_ids, -100)
    out = heads.losses(states, targets, slopes, aligned_target_hidden, acceptance=taught)
    ce, agreed = out.per_token["ce/value"], out.per_token["top1"] * scored
    zero = out.loss.new_zeros(())
    l1 = 2 * out.per_token["tv/value"] if taught and alphas[1] > 0 else torch.zeros_like(ce)
    nums = (ce * loss_weights).sum(), (l1 * loss_weights).sum()
    ce_num, l1_num = Parts.apply(out.loss, alphas, "SpecForge's DSpark", *nums)
    acceptance = out.per_token["ce/acceptance"] if taught else None
    guess = draft.predict_confidence(hidden, prev_token_ids=prev_token_ids)
    confidence = error = zero
    if guess is not None and self.dspark_confidence_head_alpha > 0:
        if acceptance is None:
            raise ValueError("DSpark confidence loss requires target_last_hidden_states")
        bce = F.binary_cross_entropy_with_logits(guess.float(), acceptance, reduction="none")
        confidence = (bce * loss_weights).sum()
        error = ((guess.float().sigmoid() - acceptance).abs() * loss_weights).sum()
    by_place = [(value * scored).sum((0, 1)) for value in (ce, agreed, scored)]
    of_teacher = [zero] * 5
    if acceptance is not None and aligned_target_hidden is not None:
        hidden_rows, head = heads.beside(states.detach())
        mine, other = head_topk(hidden_rows, head, 1), heads.likeliest(aligned_target_hidden)
        both = [(mine.ids == other.ids).float(), other.logps.exp(), mine.logps.exp()]
        there = eval_mask.any(-1).float()
        length = (acceptance * scored).cumprod(-1).sum(-1) + 1
        of_teacher = [(value.squeeze(-1) * scored).sum() for value in both]
        of_teacher += [(length * there).sum(), there.sum()]
    return ce_num, l1_num, confidence, error, agreed.sum(), scored.sum(), *by_place, *of_teacher


# ---------------------------------------------------------------------- EAGLE-3


@dataclass
class Unrolled:
    """State of one EAGLE-3 forward: the verifier, and the arguments of each step's loss."""

    states: Tensor  # Shape [B, T, H].
    weight: Tensor  # Weight [V, H] of the verifier's whole head.
    kept: Tensor  # Bool mask [V] of the draft vocabulary.
    steps: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        head = Head(self.weight.detach())
        best = head_topk(self.states, head, 1)
        self.ids = best.ids.squeeze(-1)  # Shape [B, T].
        top = (self.states.float() * self.weight.detach()[self.ids].float()).sum(-1)
        # Log-sum-exp [B, T] over the verifier's whole vocabulary.
        self.lse = top - best.logps.squeeze(-1)
        self.head = Head(self.weight.detach()[self.kept])
        self.targets = torch.where(self.kept[self.ids], self.kept.cumsum(0)[self.ids] - 1, 0)
        of_draft = head_stats(self.states, self.head, self.targets, gradients=())
        self.entropy, self.log_mass = of_draft.entropy, of_draft.lse - self.lse


CURRENT: ContextVar[Unrolled | None] = ContextVar("headloss_specforge", default=None)


def _eagle_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    theirs = SEAMS.theirs[f"{EAGLE}:OnlineEagle3Model", "forward"]
    arguments = bound_arguments(theirs, (self, *args), kwargs)
    states = arguments["target_hidden_for_compact"]
    if states is None or self.attention_backend == "usp":
        got = "the verifier's logits" if states is None else "attention_backend 'usp'"
        raise ValueError(
            f"OnlineEagle3Model: got {got}, want its hidden states, of offline training with "
            "compact_teacher, on whole sequences; "
            "headloss.integrations.specforge.uninstall() runs others"
        )
    call = Unrolled(states, arguments["target_head_weight"], self.draft_model.t2d)
    before = CURRENT.set(call)
    try:
        with returning({self.draft_model.lm_head: padded(0, 0)}):
            theirs(self, *args, **kwargs)
    finally:
        CURRENT.reset(before)
    return _of_steps(self, call)


def _target(hidden: Tensor, lm_head_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return SpecForge's ids and mask, and zeros [B, T + S, 1] in place of the verifier's
    probabilities, which no code reads."""
    call = CURRENT.get()
    theirs = SEAMS.theirs[EAGLE, "compute_target_p_padded_from_hidden"]
    if call is None:
        return theirs(hidden, lm_head_weight, *args, **kwargs)
    arguments = bound_arguments(theirs, (hidden, lm_head_weight, *args), kwargs)
    length, mask = arguments["length"], arguments["loss_mask"]
    nothing = call.lse.new_zeros(*call.ids.shape, 1)
    padded_rows = F.pad(nothing, (0, 0, 0, length))
    position_mask = call.kept[call.ids][..., None].int() * mask
    return padded_rows, padded_rows, F.pad(call.ids, (0, length)), position_mask


def _step(self: Any, **arguments: Any) -> Any:
    call = CURRENT.get()
    if call is None:
        return SEAMS.theirs[f"{EAGLE}:OnlineEagle3Model", "_acc_and_loss"](self, **arguments)
    # Only store the arguments: one headloss call after the last step computes all EAGLE-3 steps.
    call.steps.append(arguments)
    return (call.lse.new_zeros(()),) * 7


def _of_steps(self: Any, call: Unrolled) -> tuple[list[Tensor], ...]:
    """Return the seven lists of losses and metrics that SpecForge's EAGLE-3 forward returns, each
    with one value per unrolled step.

    Token t of unrolled step i predicts what the verifier predicts at token t + i.
    """
    steps, (rows, length) = call.steps, call.ids.shape
    count = len(steps)

    def by_row(name: str) -> Tensor:
        """Return the mask `name` of all S unrolled steps, [B, T, S]. The mask of step i is shifted
        right by i tokens, since token t of step i predicts the verifier's output at token t + i."""
        parts = [s[name][:, : length - i, 0] for i, s in enumerate(steps)]
        return torch.stack([F.pad(p.float(), (i, 0)) for i, p in enumerate(parts)], 2)

    states = [F.pad(s["logits"][:, : length - i], (0, 0, i, 0)) for i, s in enumerate(steps)]
    mask, loss_mask = by_row("position_mask"), by_row("loss_mask")
    scored = (mask > 0) | (loss_mask > 0)
    total = mask.sum((0, 1)).clamp_min(1e-8)  # Shape [S].
    decay = DECAY.get() ** torch.arange(count, device=mask.device, dtype=torch.float32)
    of_kl = decay * mask / (rows * length) * (-call.log_mass).exp()[..., None]
    heads = DraftHeads(self.draft_model.lm_head, call.head)
    index = torch.arange(rows * length, device=mask.device).view(rows, length, 1)
    fields = {
        "teacher_index": index.expand_as(scored),
        "teacher_lse": call.lse[..., None].expand_as(scored),
    }
    targets = torch.where(scored, call.targets[..., None], -100)

    def losses(slopes: dict[str, Tensor]) -> Any:
        of_all = torch.stack(states, 2), targets, slopes, call.states.flatten(0, 1), True
        return heads.losses(*of_all, **fields)

    def mean(values: Tensor) -> Tensor:
        return (values * mask).sum((0, 1)) / total

    slopes = {"kl_div": of_kl}
    if self.lk_loss_type == "alpha":
        slopes = {"nla": decay * mask / total}
    # The loss type "lambda" weighs KL divergence and total variation by each step's acceptance.
    elif self.lk_loss_type == "lambda":
        with torch.no_grad():
            acceptance = mean(losses(slopes).per_token["kl_div/acceptance"])
        share = self.kl_scale * torch.exp(-self.kl_decay * acceptance)
        slopes = {"kl_div": share * of_kl, "tv": (1 - share) * decay * mask / total}
    out = losses(slopes)
    values = out.per_token
    acceptance = mean(values[f"{next(iter(slopes))}/acceptance"])
    if self.lk_loss_type == "alpha":
        per_step = mean(values["nla/value"])
    else:
        kl = values["kl_div/value"] * (-call.log_mass).exp()[..., None]
        soft = kl + (call.entropy - call.log_mass)[..., None]
        per_step = (soft * mask).sum((0, 1)) / (rows * length)
        if self.lk_loss_type == "lambda":
            per_step = share * per_step + (1 - share) * (1 - acceptance)
    whose = "SpecForge's EAGLE-3, by install(ploss_decay=..)"
    plosses = Parts.apply(out.loss, tuple(decay.tolist()), whose, *per_step)
    in_draft = call.kept[call.ids][..., None]
    correct = (values["top1"] * in_draft * loss_mask).sum((0, 1))
    denominator = torch.stack([s["loss_mask"].sum() for s in steps]).clamp_min(1e-6)
    size = per_step.new_full((count,), rows * length)
    lists = acceptance, correct / denominator, correct, denominator, per_step, size
    return list(plosses), *(list(values) for values in lists)


SEAMS = Seams(
    {
        (FAMILY, "checkpointed_chunk_reduce"): _once,
        (f"{FAMILY}:OnlineDFlashModel", "_dflash_objective_chunk_terms"): _dflash,
        (f"{FAMILY}:OnlineDominoModel", "forward"): _domino_forward,
        (f"{FAMILY}:OnlineDominoModel", "_domino_objective_chunk_terms"): _domino,
        (f"{FAMILY}:OnlineDSparkModel", "_dspark_objective_chunk_terms"): _dspark,
        (f"{EAGLE}:OnlineEagle3Model", "forward"): _eagle_forward,
        (f"{EAGLE}:OnlineEagle3Model", "_acc_and_loss"): _step,
        (EAGLE, "compute_target_p_padded_from_hidden"): _target,
    },
    PACKAGE,
)
uninstall, check = SEAMS.uninstall, SEAMS.check
