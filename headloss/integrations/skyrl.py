"""SkyRL's log-probs of hidden states from headloss, under Megatron's vocabulary parallelism.

    install()       with `fused_lm_head_logprob`; the losses stay SkyRL's
    uninstall()     SkyRL is as it was

B rows of L positions, H hidden width, V vocabulary, R ranks of tensor parallelism. SkyRL's context
parallelism and packing lie around the function, and stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..head.head import Head
from ..head_stats import head_stats
from .seams import Seams

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def install() -> None:
    """Put headloss in place of SkyRL's function, in this process, until `uninstall()`.

    Raises:
        RuntimeError: SkyRL has no such function, or one that takes other arguments.
    """
    SEAMS.install()


def uninstall() -> None:
    """Undo `install()`."""
    SEAMS.uninstall()


def logprobs(
    backend: str,
    hidden: Tensor,  # [B, L, H], the same on all ranks
    weight: Tensor,  # [V / R, H], divided by the temperature
    target: Tensor,  # [B, L], shifted
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: ProcessGroup,
    inference_only: bool,
) -> Tensor:
    """[B, L] float32, in place of `_fused_lm_head_logprob_apply`, whatever the backend."""
    ranks = tp_group.size()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        hidden = hidden.to(weight.dtype)
        if ranks > 1 and hidden.requires_grad:
            hidden = hidden.view_as(hidden)  # SkyRL adds up the ranks' gradients; ours are whole
            hidden.register_hook(lambda gradient: gradient / ranks)
        head = Head(weight, vocab_group=tp_group if ranks > 1 else None)
        return head_stats(hidden, head, target, gradients=("logp",)).logp


HOME = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
SEAMS = Seams({(HOME, "_fused_lm_head_logprob_apply"): logprobs}, "skyrl")
check = SEAMS.check
