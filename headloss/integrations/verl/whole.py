"""verl's on-policy distillation over the whole vocabulary, from a teacher's hidden states.

    distillation.distillation_loss.loss_mode=headloss_reverse_kl   # or headloss_forward_kl, ..

T scored tokens of this rank, B sequences of L tokens, H' width of the teacher's hidden states.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from verl.trainer.distillation.losses import (
    DISTILLATION_LOSS_REGISTRY,
    DistillationLossSettings,
    register_distillation_loss,
)
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

import headloss as hl

from ...losses.teacher import KINDS
from .asked import DIVERGENCE
from .scored import Scored
from .teacher import Teacher, TopK, spread

HIDDEN = "teacher_hidden"  # Batch field with the teacher's hidden states.
# The `loss_mode` of each forward that headloss's engine is now running, the innermost forward last.
RUNNING: list[str] = []
# The registered factory of the teacher's head; empty before registration.
FACTORIES: list[Callable[[torch.device], hl.Head]] = []


def add() -> None:
    """Register each divergence in verl as a `loss_mode`.

    headloss computes the divergence of each token; verl clamps it (`loss_max_clamp`), reduces it to
    a loss, and computes the policy gradient and the metrics.
    """
    for name in map(f"{DIVERGENCE}{{}}".format, KINDS):
        if name not in DISTILLATION_LOSS_REGISTRY:
            settings = DistillationLossSettings(names=[name], use_topk=True)
            register_distillation_loss(settings)(functools.partial(_losses, name))


def _losses(
    name: str, config: Any, distillation_config: Any, model_output: Any, data: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return the distillation losses [B, R] of the response tokens, which headloss's FSDP engine
    has already stored in `model_output`."""
    if name not in RUNNING:
        raise RuntimeError(
            f"loss_mode: {name} is computed with the log-probs, by the FSDP engine under "
            "use_fused_kernels=True and fused_kernel_options.impl_backend=headloss"
        )
    return no_padding_2_padding(model_output["distillation_losses"], data), {}


def check_settings(settings: Any) -> None:
    """Raise ValueError if the settings clamp log-probs, which whole-vocabulary divergences do not
    do."""
    if settings.log_prob_min_clamp is not None:
        raise ValueError(
            f"log_prob_min_clamp: got {settings.log_prob_min_clamp} with {settings.loss_mode}, "
            "whose divergence is over all log-probs as they are, want null"
        )


@functools.cache
def _head(factory: Callable[[torch.device], hl.Head], device: torch.device) -> hl.Head:
    head = factory(device)
    if not isinstance(head, hl.Head):
        raise TypeError(f"register_teacher: got a {type(head).__name__}, want an hl.Head")
    return head


class WholeVocabulary(Teacher):
    """A divergence of the scored tokens from the teacher given by `teacher_hidden`.

    One temperature divides the logits of student and teacher. Log-probs and entropies of unscored
    positions are 0.

    Args:
        scored: scored positions of the micro-batch.
        data: with `teacher_hidden`, nested [B, L, H'] or a list of B tensors [L, H'].
        kind: name of the divergence.
        alone: whether no code reads the tokens' log-probs (verl's `distillation_only`).
    """

    def __init__(self, scored: Scored, data: Any, kind: str, alone: bool) -> None:
        self.at, self.kind, self.alone = scored.at, kind, alone
        self.topk: TopK | None = None
        if not FACTORIES:
            raise ValueError(
                f"loss_mode: got {DIVERGENCE}{kind} without a teacher's head, want "
                "register_teacher(factory) in a module of model.external_lib"
            )
        if (hidden := tu.get(data, HIDDEN)) is None:
            raise ValueError(
                f"{HIDDEN}: is not in the batch, want [tokens, width] of each sequence; verl's own "
                "teachers are servers that return log-probs alone"
            )
        if not isinstance(hidden, Tensor):
            hidden = torch.nested.as_nested_tensor(list(hidden), layout=torch.jagged)
        self.hidden = no_padding_2_padding(hidden, data)[scored.here]  # [T, H']

    def run(
        self, hidden: Tensor, head: hl.Head, labels: Tensor, options: hl.Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs, entropies and divergences in the labels' shape."""
        if isinstance(head.temperature, Tensor):
            raise ValueError(
                f"temperature: got one per sample with {DIVERGENCE}{self.kind}, want one of all"
            )
        of_teacher = _head(FACTORIES[0], hidden.device)
        rows = self.hidden.to(hidden.device, of_teacher.weight.dtype)
        batch = hl.Batch(labels.reshape(-1)[self.at].to(torch.int64), teacher_hidden=rows)
        stats = hl.head_stats(
            hidden.reshape(labels.numel(), -1)[self.at],
            head,
            batch,
            options,
            gradients=(self.kind,) if self.alone else ("logp", "entropy", self.kind),
            teacher=hl.teacher(of_teacher, head.temperature),
            divergences=(self.kind,),
        )
        losses = stats.divergences[self.kind]
        # verl also reads the probability mass of the teacher's top-k ids; headloss's divergence is
        # over the whole vocabulary, so the mass is 1.
        mass = spread(torch.ones_like(losses), self.at, labels)
        self.topk = TopK(spread(losses, self.at, labels), mass, mass.clone())
        logp, entropy = (spread(x, self.at, labels) for x in (stats.logp, stats.entropy))
        return logp, entropy, self.topk.distillation_losses
