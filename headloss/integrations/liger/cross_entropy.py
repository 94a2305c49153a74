"""Liger's fused linear cross-entropy losses."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import losses
from ...batch.batch import Batch
from ...batch.reduction import token_mean
from ...head.head import Head
from ...head_loss import head_loss
from ...head_stats import head_stats
from ...losses.arguments import one_of
from .. import shared
from ..shared import per

refuse = partial(shared.refuse, "liger_kernel itself")


class CrossEntropyOutput(NamedTuple):
    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def liger_fused_linear_cross_entropy(
    input: Tensor,  # The hidden states [N, H].
    weight: Tensor,  # The head's weight [V, H].
    target: Tensor,  # The class ids [N].
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """Return the cross-entropy plus `lse_square_scale` times the squared log-sum-exp; with
    `use_token_scaling`, each token's loss is multiplied by the token's detached probability.

    Weight gradients accumulate in float32; `accum_dtype` is ignored. Class weights and
    `return_predicted_tokens` are refused with ValueError.
    """
    one_of(("mean", "sum", "none"), reduction=reduction)
    refuse(ce_weight=ce_weight is not None, return_predicted_tokens=return_predicted_tokens)
    head = Head(weight, bias, softcap=softcap)
    batch = Batch(target, ignore_index=ignore_index)
    if reduction == "none":
        refuse(use_token_scaling=use_token_scaling, label_smoothing=label_smoothing != 0)
        refuse(return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy)
        stats = head_stats(input, head, batch)
        loss = lse_square_scale * stats.lse**2 - stats.logp if lse_square_scale else -stats.logp
        return loss.to(input.dtype)
    kind = losses.cross_entropy(label_smoothing=label_smoothing)
    if use_token_scaling:
        refuse(label_smoothing=label_smoothing != 0, lse_square_scale=lse_square_scale != 0)
        kind = losses.dft()
    over = {"mean": token_mean, "sum": per(1)}[reduction]
    objective = kind.over(over) + lse_square_scale * losses.z_loss().over(over)
    out = head_loss(input, head, batch, objective)
    if not (return_z_loss or return_token_accuracy):
        return out.loss
    z_loss = lse_square_scale * out.terms["z_loss"] if return_z_loss else None
    if not return_token_accuracy:
        return CrossEntropyOutput(out.loss, z_loss)
    return CrossEntropyOutput(out.loss, z_loss, out.metrics[f"{kind.name}/top1"].value.float())


class LigerFusedLinearCrossEntropyFunction:
    """Liger's autograd function; `apply` returns loss, z-loss, accuracy and None."""

    supports_inner_impl_dispatch = False

    @staticmethod
    def apply(*args: Any, **kwargs: Any) -> CrossEntropyOutput:
        found = liger_fused_linear_cross_entropy(*args, **kwargs)
        return found if isinstance(found, CrossEntropyOutput) else CrossEntropyOutput(found)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.given)


class LigerFusedLinearScaledCrossEntropyFunction:
    """Negative log-likelihood of each token at a temperature, and the token's entropy on
    request."""

    @staticmethod
    def apply(
        _input: Tensor,  # The hidden states [N, H].
        weight: Tensor,  # The head's weight [V, H].
        target: Tensor,  # The class ids [N].
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        refuse(selected_token_ids=selected_token_ids is not None)
        batch = Batch(target, ignore_index=ignore_index)
        stats = head_stats(_input, Head(weight, temperature=temperature), batch)
        return (-stats.logp, stats.entropy) if return_entropy else -stats.logp
