"""verl's on-policy distillation from a teacher's top k ids, computed in the same pass over the head
as the policy's log-probs.

B sequences of at most R response tokens, T scored tokens of this rank, K teacher ids per token.
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
    """Distillation losses, and the student's and the teacher's mass of the top k, each [..] in the
    labels' shape, 0 at unscored positions. Only the distillation losses have a gradient."""

    distillation_losses: Tensor
    student_mass: Any = None  # A `ModelOutput` dataclass allows one field without a default.
    teacher_mass: Any = None


class Teacher:
    """The distillation loss of verl's `compute_forward_kl_topk`, for the scored tokens:

        sum over the teacher's k likeliest of p (log p - log q)

    log p is the teacher's log-prob and log q the student's over the whole vocabulary, both clamped
    from below. The student's mass and the teacher's mass are the sums of the unclamped
    probabilities q and p over the teacher's k likeliest ids.

    A `Teacher` must not become a dataclass or a container: FSDP would cast the fields.

    Args:
        data: with `teacher_ids` and `teacher_logprobs`, nested [B, L, K].
        floor: verl's `log_prob_min_clamp`; None: no clamp.
        alone: whether no code reads the tokens' log-probs (verl's `distillation_only`).
    """

    def __init__(self, scored: Scored, data: Any, floor: float | None, alone: bool) -> None:
        self.at, self.floor, self.alone = scored.at, floor, alone
        names = "teacher_ids", "teacher_logprobs"
        self.ids, logps = (no_padding_2_padding(data[name], data)[scored.here] for name in names)
        self.logps = logps.float()  # Shape [T, K], the shape of `self.ids`.
        self.topk: TopK | None = None

    def run(
        self, hidden: Tensor, head: hl.Head, labels: Tensor, options: hl.Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs, entropies and distillation losses in the labels' shape."""
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
        """Return the model's output with `fused_linear_aux`, the attribute that verl reads losses
        from.

        FSDP's hooks visit only the dataclass fields of an output, so the losses become such a
        field.
        """
        return _with_losses(type(output))(**output, fused_linear_aux=self.topk)


def spread(values: Tensor, at: Tensor, labels: Tensor) -> Tensor:
    """Return values [T] placed at positions `at` of the labels' shape [..], with 0 elsewhere."""
    flat = values.new_zeros(labels.numel()).index_copy(0, at, values)
    # Clone: FSDP2 puts a hook on each output tensor, and warns if the tensor is a view.
    return flat.view(labels.shape).clone()


@functools.cache
def _with_losses(kind: type) -> type:
    return make_dataclass(kind.__name__, [("fused_linear_aux", Any, None)], bases=(kind,))


def distillation_of(loss_function: Any) -> Any:
    """Return verl's distillation settings if the loss is `distillation_ppo_loss`, else None.

    Raises:
        ValueError: the loss combines distillation with a policy loss of headloss (`loss_mode`).
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
