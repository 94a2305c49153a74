"""verl 0.9 with headloss at the head: log-probs, entropies, and policy losses in one pass.

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=headloss

verl imports this module by itself where headloss is installed (entry point `verl.plugins`), or by
the variable VERL_USE_EXTERNAL_MODULES=headloss.integrations.verl. The module calls `install()` only
when a model's configuration names headloss: verl hides errors raised while a plugin is imported,
and importing the engines takes seconds.

`fused.py` replaces verl's `FusedLinearForPPO` under FSDP. `engine.py` extends verl's FSDP engine by
a temperature per sample, and by losses computed in the same pass as the log-probs. `megatron.py`
lets models of verl's Megatron engine return hidden states in place of logits. `losses.py` registers
headloss's policy losses in verl by name, such as `loss_mode=headloss_gspo`. `scored.py` finds the
scored positions of a micro-batch, and the ids that the sampler kept. `teacher.py` computes
distillation from a teacher's top k ids. `whole.py` computes distillation over the whole vocabulary,
such as `loss_mode=headloss_reverse_kl`. `seams.py` replaces verl's functions by headloss's.
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
    """Register headloss in verl as the backend `impl_backend: headloss` of this process, until
    `uninstall()`. Models whose `impl_backend` is not headloss keep verl's code.

    Raises:
        RuntimeError: a replaced function of verl is missing, or has unexpected arguments.
    """
    from . import seams

    seams.install()


def uninstall() -> None:
    """Undo `install()`. Models built before `uninstall()` keep headloss's forward."""
    from . import seams

    seams.uninstall()


def check() -> str:
    """Return a text that names the checked functions of verl. RuntimeError as from `install()`."""
    from . import seams

    return seams.check()


def register(name: str, factory: Callable[[Any], Term | Objective]) -> None:
    """Register an objective in verl as the policy loss `loss_mode=name`, computed in one pass.

    Args:
        factory: maps verl's `ActorConfig` to a term or objective. The term's reductions are over
            verl's global batch; headloss adds the configuration's entropy and KL terms. Fields of
            the batch: old_logps, advantages, and where verl has them ref_logps and
            rollout_is_weights.
    """
    from . import losses

    losses.register(name, factory)


def register_teacher(factory: Callable[[torch.device], Head]) -> None:
    """Set the teacher's head that `distillation_loss.loss_mode=headloss_reverse_kl` (or another
    kind of `distillation`) compares the student with. A second call of `distill_from` replaces the
    teacher's head.

    Args:
        factory: function of a device that returns the teacher's head on the device, with a weight
            [V, H'] for the batch's `teacher_hidden` [.., H']. The teacher's head is made once, in
            the first micro-batch.
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
    """Register headloss's divergences before verl validates `loss_mode`.

    verl looks `loss_mode` up when it reads the setting, even in processes without an engine.
    """
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
