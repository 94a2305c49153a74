"""SkyRL's log-probs computed by headloss from hidden states, under Megatron's vocabulary
parallelism.

`install()` replaces the log-prob function used under `fused_lm_head_logprob`; SkyRL still computes
the losses. `uninstall()` restores SkyRL's function.

B rows of L positions, H hidden width, V vocabulary, R ranks of tensor parallelism. SkyRL's code for
context parallelism and packing, which calls the replaced log-prob function, is unchanged.
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
    """Replace SkyRL's log-prob function in this process, until `uninstall()`.

    Raises:
        RuntimeError: SkyRL's log-prob function is missing, or has unexpected arguments.
    """
    SEAMS.install()


def logprobs(
    backend: str,
    hidden: Tensor,  # Hidden states [B, L, H], equal on all ranks.
    weight: Tensor,  # A vocabulary shard [V / R, H] for R ranks, divided by the temperature.
    target: Tensor,  # Shape [B, L], shifted.
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: ProcessGroup,
    inference_only: bool,
) -> Tensor:
    """Return log-probs [B, L] float32 for every `backend`, in place of
    `_fused_lm_head_logprob_apply`."""
    ranks = tp_group.size()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        hidden = hidden.to(weight.dtype)
        if ranks > 1 and hidden.requires_grad:
            # SkyRL sums the gradients of all ranks, but headloss's gradient is already the sum on
            # each rank.
            hidden = hidden.view_as(hidden)
            hidden.register_hook(lambda gradient: gradient / ranks)
        head = Head(weight, vocab_group=tp_group if ranks > 1 else None)
        return head_stats(hidden, head, target, gradients=("logp",)).logp


HOME = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
SEAMS = Seams({(HOME, "_fused_lm_head_logprob_apply"): logprobs}, "skyrl")
uninstall, check = SEAMS.uninstall, SEAMS.check
