"""NeMo-RL's log-probs computed by headloss from hidden states, under Megatron's vocabulary
parallelism.

`install()` replaces the log-prob function that NeMo-RL uses if the option
`megatron_cfg.use_linear_ce_fusion_loss` (in releases after 0.7, `use_fused_linear_logprobs`) is
set. NeMo-RL still computes the losses. `uninstall()` restores NeMo-RL's function.

B rows of L positions, H hidden width, V vocabulary, R ranks of tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..head.head import Head
from ..head_stats import head_stats
from ..options import Options
from .seams import Seams
from .shared import refuse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def install() -> None:
    """Replace NeMo-RL's log-prob function by headloss's in this process, until `uninstall()`.

    Raises:
        RuntimeError: NeMo-RL's log-prob function is missing, or has unexpected arguments.
    """
    SEAMS.install()


def logprobs(
    tensor_parallel_hidden_states: Tensor,  # A shard [L / R, B, H] under sequence parallelism.
    output_weight_layer: Tensor,  # A vocabulary shard [V / R, H].
    runtime_gather_output: bool,
    target: Tensor,  # Token ids [B, L], not yet shifted to the next token.
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    # Weight of tied embeddings; NeMo-RL 0.6 also passes `output_weight_layer`.
    output_weight: Tensor | None = None,
) -> Tensor:
    """Return log-probs [B, L - 1] float32, in place of
    `from_parallel_hidden_states_to_logprobs`."""
    weight = output_weight_layer if output_weight is None else output_weight
    refuse("logits", context_parallel=cp_group is not None and cp_group.size() > 1)
    spread = tp_group.size() > 1
    targets = target.roll(-1, dims=-1).t().contiguous()  # [L, B], like hidden states [L, B, H].
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        stats = head_stats(
            tensor_parallel_hidden_states,
            Head(weight, vocab_group=tp_group if spread else None),
            targets,
            Options(sequence_parallel=spread),
            gradients=("logp",),
        )
    return stats.logp.t()[:, :-1]


HOME = "nemo_rl.distributed.model_utils"
SEAMS = Seams({(HOME, "from_parallel_hidden_states_to_logprobs"): logprobs}, "nemo-rl")
uninstall, check = SEAMS.uninstall, SEAMS.check
