"""AgileRL's log-probs of language models from headloss: GRPO, GSPO, CISPO, PPO and REINFORCE.

    install()       with `use_liger_loss=False`; the losses stay AgileRL's
    uninstall()     AgileRL is as it was

B rows of T positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..head.head import Head
from ..head_stats import head_stats
from .seams import Seams
from .sharding import gathered

BASE = "agilerl.algorithms.core.base"
HOME = "agilerl.algorithms.core.llm_ops.fused_logprobs"


def install() -> None:
    """Put headloss in place of AgileRL's two functions, in this process, until `uninstall()`.

    Raises:
        RuntimeError: AgileRL has no such function, or one that takes other arguments.
    """
    SEAMS.install()


def uninstall() -> None:
    """Undo `install()`."""
    SEAMS.uninstall()


class LogProbs:
    """In place of `FusedLinearLogProbsFunction`."""

    @staticmethod
    def apply(
        hidden: Tensor,  # [B, T, H]
        head_w: Tensor,  # [V, H], whole or sharded by FSDP2
        head_b: Tensor | None,
        target_ids: Tensor,  # [B, T]
        temperature: float,
        cast_to_fp32: bool,
        chunk_rows: int,
    ) -> Tensor:
        """[B, T] float32 whatever `cast_to_fp32`: not rounded to the hidden states' dtype."""
        weight, bias = gathered(head_w), gathered(head_b)
        if weight.dtype != hidden.dtype:  # as where AgileRL multiplies in the wider of the two
            wide = torch.promote_types(weight.dtype, hidden.dtype)
            hidden, weight = hidden.to(wide), weight.to(wide)
        head = Head(weight, bias, temperature)
        return head_stats(hidden, head, target_ids.long(), gradients=("logp",)).logp


def logprobs_chunked(
    hidden: Tensor,
    head_w: Tensor,
    head_b: Tensor | None,
    target_ids: Tensor,
    temperature: float = 1.0,
    cast_to_fp32: bool = True,
    *,
    chunk_rows: int,
) -> Tensor:
    """In place of `fused_linear_logprobs_chunked`, which has no gradient."""
    with torch.no_grad():
        return LogProbs.apply(
            hidden, head_w, head_b, target_ids, temperature, cast_to_fp32, chunk_rows
        )


OURS: dict[str, Any] = {
    "FusedLinearLogProbsFunction": LogProbs,
    "fused_linear_logprobs_chunked": logprobs_chunked,
}
SEAMS = Seams(
    {(owner, name): ours for owner in (HOME, BASE) for name, ours in OURS.items()}, "agilerl"
)
check = SEAMS.check
