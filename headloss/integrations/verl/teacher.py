"""verl's on-policy distillation from a teacher's top k, with the log-probs of the same products.

B sequences of at most R response tokens, T scored tokens of this rank, K ids of each.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from dataclasses import dataclass, make_dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

import headloss as hl

from . import losses
from .scored import Scored


@dataclass
class TopK(ModelOutput):
    """[..] in the labels' shape, 0 where nothing is scored; the losses carry a gradient."""

    distillation_losses: Tensor
    student_mass: Any = None  # a class of its kind has one field without a default
    teacher_mass: Any = None


class Teacher:
    """The loss that verl's `compute_forward_kl_topk` makes of logits, for the scored tokens:

        sum over the teacher's k likeliest of p (log p - log q)

    with log p as the teacher says it and log q over the student's whole vocabulary, both clamped
    from below; masses are sums of p and of q before the clamp.

    It must not become a dataclass or a container: FSDP would cast the fields.

    Args:
        data: with `teacher_ids` and `teacher_logprobs`, nested [B, L, K].
        floor: verl's `log_prob_min_clamp`; None: no clamp.
        alone: the log-probs of the tokens are not read (verl's `distillation_only`).
    """

    def __init__(self, scored: Scored, data: Any, floor: float | None, alone: bool) -> None:
        self.at, self.floor, self.alone = scored.at, floor, alone
        names = "teacher_ids", "teacher_logprobs"
        self.ids, logps = (no_padding_2_padding(data[name], data)[scored.here] for name in names)
        self.logps = logps.float()  # [T, K], as the ids
        self.topk: TopK | None = None

    def run(
        self, hidden: Tensor, head: hl.Head, labels: Tensor, options: hl.Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and entropies in the labels' shape, and the losses."""
        ids = self.ids.new_full((labels.numel(), self.ids.shape[1]), -1)
        ids = ids.index_copy_(0, self.at, self.ids).view(*labels.shape, -1)
        targets, gradients = labels.to(torch.int64), ("logp", "entropy", "candidate_logps")
        if self.alone:
            flat = targets.reshape(-1)
            targets = torch.full_like(flat, -100).index_copy_(0, self.at, flat[self.at])
            targets, gradients = targets.view(labels.shape), gradients[-1:]
        batch = hl.Batch(targets, candidate_ids=ids)
        stats = hl.head_stats(hidden, head, batch, options, gradients)
        assert stats.candidate_logps is not None
        log_q, log_p = stats.candidate_logps.reshape(labels.numel(), -1)[self.at], self.logps
        masses = log_q.detach().exp().sum(1), log_p.exp().sum(1)
        if self.floor is not None:
            log_q, log_p = log_q.clamp_min(self.floor), log_p.clamp_min(self.floor)
        kl = spread((log_p.exp() * (log_p - log_q)).sum(1), self.at, labels)
        self.topk = TopK(kl, *(spread(mass, self.at, labels) for mass in masses))
        return stats.logp, stats.entropy, kl

    def put(self, output: Any) -> Any:
        """The model's output with `fused_linear_aux`, where verl looks for the losses: as a field,
        since FSDP's hooks see fields alone."""
        return _with_losses(type(output))(**output, fused_linear_aux=self.topk)


def spread(values: Tensor, at: Tensor, labels: Tensor) -> Tensor:
    """[..] in the labels' shape of [T] at some of their positions, 0 elsewhere."""
    flat = values.new_zeros(labels.numel()).index_copy(0, at, values)
    return flat.view(labels.shape).clone()  # FSDP2 hooks it, and warns of views


@functools.cache
def _with_losses(kind: type) -> type:
    return make_dataclass(kind.__name__, [("fused_linear_aux", Any, None)], bases=(kind,))


def distillation_of(loss_function: Any) -> Any:
    """verl's `DistillationLossConfig`, None where the loss is not verl's own of distillation.

    Raises:
        ValueError: a policy loss of headloss beside it.
    """
    if getattr(loss_function, "func", None) is not distillation_ppo_loss:
        return None
    mode = loss_function.keywords["config"].policy_loss.loss_mode
    settings = loss_function.keywords["distillation_config"].distillation_loss
    if (settings.use_task_rewards or settings.use_policy_gradient) and losses.known(mode):
        raise ValueError(
            f"loss_mode: got {mode!r} beside distillation, want one of verl's own, whose log-probs "
            "are headloss's too"
        )
    return settings
