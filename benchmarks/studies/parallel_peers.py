"""Cross-entropies of other libraries over vocabulary slices, with the inputs of `parallel.py`.

Imported by parallel.py. Page: docs/across-devices.md.

T tokens, H hidden width, V vocabulary; each rank has all hidden states and V / ranks rows of the
weight. Each implementation returns the mean loss, with gradients of hidden states and weight slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

import headloss as hl

Contestant = Callable[[Tensor, Tensor, Tensor, Any], Tensor]  # hidden, shard, targets, group


def ours(hidden: Tensor, shard: Tensor, targets: Tensor, group: Any) -> Tensor:
    head = hl.Head(shard, vocab_group=group)
    options = hl.Options(metrics=False)
    return hl.head_loss(hidden, head, hl.Batch(targets), hl.cross_entropy(), options).loss


class _Plain(torch.autograd.Function):
    """Cross-entropy from float32 logits of a rank's vocabulary slice, with three all-reduces of
    one number per token and one all-reduce of dX."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, shard: Tensor, targets: Tensor, group: Any
    ) -> Tensor:
        rows = len(shard)
        local = targets - distributed.get_rank(group) * rows
        owned = (local >= 0) & (local < rows)
        local = local.clamp(0, rows - 1)
        logits = (hidden @ shard.t()).float()
        peak = logits.amax(1)
        distributed.all_reduce(peak, distributed.ReduceOp.MAX, group)
        target = logits.gather(1, local[:, None]).squeeze(1).where(owned, 0)
        weights = logits.sub_(peak[:, None]).exp_()
        total = weights.sum(1)
        distributed.all_reduce(target, group=group)
        distributed.all_reduce(total, group=group)
        ctx.save_for_backward(hidden, shard, weights.div_(total[:, None]), local, owned)
        ctx.group = group
        return (total.log() + peak - target).mean()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # type: ignore[override]
        hidden, shard, gradient, local, owned = ctx.saved_tensors
        gradient[torch.arange(len(local), device=local.device), local] -= owned.float()
        gradient = (gradient * (upstream / len(local))).to(hidden.dtype)
        of_hidden, of_shard = gradient @ shard, gradient.t() @ hidden
        distributed.all_reduce(of_hidden, group=ctx.group)
        return of_hidden, of_shard, None, None


def plain(hidden: Tensor, shard: Tensor, targets: Tensor, group: Any) -> Tensor:
    return _Plain.apply(hidden, shard, targets, group)  # type: ignore[no-any-return]


def liger(hidden: Tensor, shard: Tensor, targets: Tensor, group: Any) -> Tensor:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyTPFunction as Function,
    )

    return Function.apply(hidden, shard, targets, group).mean()  # type: ignore[no-any-return]


def contestants(on_gpu: bool) -> dict[str, Contestant]:
    """Return the implementations by their name in the table; Liger's is left out without a GPU or
    without Liger."""
    found: dict[str, Contestant] = {"vocabulary": ours, "vocabulary, plain PyTorch": plain}
    if on_gpu:
        try:
            from liger_kernel.ops import fused_linear_scaled_cross_entropy as module
        except ImportError:
            return found
        native = module._load_native_tp_function
        try:
            way = "native" if native() is not None else "in chunks of 512"
        except ImportError:
            way = "in chunks of 512"
        found[f"vocabulary, Liger {way}"] = liger
    return found


def agree(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Return True if loss and gradients agree with headloss's; 16-bit logits err by a few
    percent."""
    pairs = zip(found, wanted, strict=True)
    return all((a - b).float().norm() < 5e-2 * b.float().norm() for a, b in pairs)
