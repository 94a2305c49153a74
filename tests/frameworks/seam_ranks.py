"""Comparison of NeMo-RL's and SkyRL's vocabulary-parallel functions with headloss's, on every
rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.nn  # used by NeMo-RL's functions
from parity import extracted, file_of
from torch import Tensor, distributed

B, L, H, V = 3, 8, 16, 32


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random hidden states [B, L, H], a head weight [V, H], ids [B, L] and upstream
    gradients [B, L]."""
    torch.manual_seed(0)
    ids = torch.randint(V, (B, L))
    return torch.randn(B, L, H), torch.randn(V, H), ids, torch.randn(B, L)


def nemo_rl(tree: str = "nemo_rl") -> Any:
    file = file_of(tree, "nemo_rl/distributed/model_utils.py")
    newer = "_compute_distributed_log_softmax_with_grad"
    functions = extracted(
        file,
        *([newer] if f"def {newer}(" in file.read_text() else []),
        "_compute_distributed_log_softmax",
        "ChunkedDistributedHiddenStatesToLogprobs",
        "from_parallel_hidden_states_to_logprobs",
    )
    return functions.from_parallel_hidden_states_to_logprobs


def skyrl() -> Any:
    path = "backends/skyrl_train/distributed/megatron/model_utils.py"
    functions = extracted(
        file_of("skyrl", path),
        "_compute_distributed_log_softmax",
        "FusedLinearChunkedDistributedLogprob",
        "_fused_lm_head_logprob_apply",
    )
    return functions._fused_lm_head_logprob_apply


def ranks() -> tuple[Any, int, int]:
    """Return (group, rank, size) of all ranks, or of a single rank without a world."""
    group = distributed.group.WORLD
    return group, distributed.get_rank(), distributed.get_world_size()


def compared(act: Callable[[Callable[..., Tensor]], list[Tensor]], pair: Any) -> dict[str, float]:
    got, want = (act(function) for function in pair)
    return {f"{i}": off(a, b) for i, (a, b) in enumerate(zip(got, want, strict=True))}


def compare_nemo_rl(tree: str) -> dict[str, float]:
    """Compare log-probs and this rank's gradients of its slices of hidden states and W.

    NeMo-RL 0.6 passes the head weight twice.
    """
    from headloss.integrations.nemo_rl import logprobs
    from headloss.integrations.seams import called, fitted

    stock = nemo_rl(tree)
    twice = "output_weight" in called(stock)
    group, rank, size = ranks()
    hidden, weight, ids, up = inputs()
    rows = slice(rank * V // size, (rank + 1) * V // size)

    def act(function: Callable[..., Tensor]) -> list[Tensor]:
        mine = hidden.transpose(0, 1).chunk(size)[rank].clone().requires_grad_()
        part = weight[rows].clone().requires_grad_()
        weights = (part, part) if twice else (part,)
        found = function(
            *(mine, *weights, False, ids),
            vocab_start_index=rows.start,
            vocab_end_index=rows.stop,
            inference_only=False,
            tp_group=group,
            cp_group=None,
            chunk_size=3,
        )
        assert found.shape == (B, L - 1)
        found.backward(up[:, :-1])
        return [found.detach(), mine.grad, part.grad]  # type: ignore[list-item]

    return compared(act, (fitted(stock, logprobs, "nemo_rl"), stock))


def compare_skyrl() -> dict[str, float]:
    """Compare headloss's log-prob function with SkyRL's as SkyRL uses it: the caller sums hidden
    gradients over tensor-parallel ranks."""
    from headloss.integrations.skyrl import logprobs

    group, rank, size = ranks()
    hidden, weight, ids, up = inputs()
    rows = slice(rank * V // size, (rank + 1) * V // size)

    def act(function: Callable[..., Tensor]) -> list[Tensor]:
        leaf, part = hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()
        found = function("torch", leaf, part, ids, rows.start, rows.stop, 3, group, False)
        found.backward(up)
        summed = leaf.grad.clone()  # type: ignore[union-attr]
        distributed.all_reduce(summed, group=group)
        return [found.detach(), summed, part.grad]  # type: ignore[list-item]

    return compared(act, (logprobs, skyrl()))
