"""verl 0.9 with headloss at the head: log-probs, entropies, and policy losses in one pass.

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=headloss

verl imports this module by itself where headloss is installed (entry point `verl.plugins`), or by
VERL_USE_EXTERNAL_MODULES=headloss.integrations.verl. It calls `install()` when a model's
configuration says so: verl hides what a plugin raises while it is imported, and the engines take
seconds to import.

    fused      in place of `FusedLinearForPPO`, and of the processor under Megatron
    engine     the FSDP engine: a temperature per sample, and losses in one pass
    losses     policy losses by name: `loss_mode=headloss_gspo`
    teacher    distillation from a teacher's top k
    whole      distillation over the whole vocabulary: `loss_mode=headloss_reverse_kl`
    seams      where these go in
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from verl.workers.config import DistillationLossConfig, HFModelConfig

from ...head.head import Head
from ...losses import Objective, Term
from .asked import DIVERGENCE, asks

__all__ = ["install", "register", "register_teacher", "uninstall"]


def install() -> None:
    """Let `impl_backend: headloss` be known to verl in this process, until `uninstall()`; other
    backends stay verl's.

    Raises:
        RuntimeError: what is replaced in verl is not there, or takes other arguments.
    """
    from . import seams

    seams.install()


def uninstall() -> None:
    """Undo `install()`. Models that have been built keep what they have."""
    from . import seams

    seams.uninstall()


def check() -> str:
    """Name the check that holds. RuntimeError where `install` raises it."""
    from . import seams

    return seams.check()


def register(name: str, factory: Callable[[Any], Term | Objective]) -> None:
    """Make an objective known to verl as `loss_mode=name`, in one pass.

    Args:
        factory: from verl's `ActorConfig` to a term or objective. It keeps its own reductions, over
            the totals of verl's global batch; entropy and KL of the configuration are added. Fields
            of the batch: old_logps, advantages, and where verl has them ref_logps and
            rollout_is_weights.
    """
    from . import losses

    losses.register(name, factory)


def register_teacher(factory: Callable[[torch.device], Head]) -> None:
    """Let `distillation_loss.loss_mode=headloss_reverse_kl` (or another kind of `distillation`)
    measure the student beside this head, in place of an earlier one.

    Args:
        factory: from a device to the teacher's head there, whose weight [V, H'] reads the batch's
            `teacher_hidden`. It is called once, when the first micro-batch is.
    """
    from . import whole

    whole.FACTORIES[:] = [factory]


def _watch() -> None:
    _watch_distillation()
    original = HFModelConfig.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        if asks(self):
            install()

    HFModelConfig.__post_init__ = post_init


def _watch_distillation() -> None:
    """verl looks a `loss_mode` up when the setting is read, also where no engine is."""
    original = DistillationLossConfig.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        ours = str(self.loss_mode).startswith(DIVERGENCE)
        if ours:
            from . import whole

            whole.add()
        original(self)
        if ours:
            whole.check_settings(self)

    DistillationLossConfig.__post_init__ = post_init


_watch()
