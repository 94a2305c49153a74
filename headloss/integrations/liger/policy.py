"""Liger's fused linear GRPO loss and its variants."""

# The constructor sets attributes by name from its arguments, which pyright cannot see.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ... import losses
from ...batch.batch import CURRENT, IGNORE, Batch
from ...batch.reduction import Totals, fixed_length
from ...head.head import Head
from ...head_loss import Output, head_loss
from ...head_stats import head_stats
from ...losses import Objective, Term
from ...losses.arguments import one_of
from ..shared import per, raw_cispo
from .cross_entropy import refuse

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


class LigerFusedLinearGRPOLoss(nn.Module):
    """Liger's GRPO loss; returns the loss and [the mean KL if beta is not 0, the share of clipped
    tokens]."""

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        for name, value in locals().items():
            if name not in ("self", "__class__"):
                setattr(self, name, value)
        one_of(LOSS_TYPES, loss_type=loss_type)
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise ValueError('max_completion_length: got None, want a number for "dr_grpo"')
        sequence = importance_sampling_level == "sequence"
        refuse(
            importance_sampling_level=sequence and loss_type in ("cispo", "sapo", "vespo"),
            loss_type=loss_type == "luspo" and (not sequence or beta != 0),
        )
        self.policy = self._policy()

    def forward(
        self,
        _input: Tensor,  # The hidden states [B, T, H].
        lin_weight: Tensor,  # The head's weight [V, H].
        selected_token_ids: Tensor,  # The sampled ids [B, T].
        attention_mask: Tensor,  # The scored positions [B, T].
        advantages: Tensor,  # The advantages, of shape [B].
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        scored = attention_mask.bool()
        targets = selected_token_ids.masked_fill(~scored, IGNORE)
        over, fields = self._over(scored, num_items_in_batch), {}
        policy = self.policy
        if vllm_is_ratio is not None:
            ratio = vllm_is_ratio
            refuse(vllm_is_ratio=self.loss_type == "vespo" and ratio.shape != scored.shape)
            fields["importance_sampling_ratio"] = ratio[:, 0] if ratio.shape[1:] == (1,) else ratio
            # The vespo loss already includes vLLM's importance ratio in its weight.
            if self.loss_type != "vespo":
                policy = policy.weighted("importance_sampling_ratio")
        objective = Objective.of(policy.over(over))
        # Without a reference model, the divergence and its gradient are 0.
        if self.beta and self.use_ref_model:
            if ref_per_token_logps is None:
                if ref_input is None or ref_weight is None:
                    raise ValueError(
                        "ref_per_token_logps: got None without ref_input and ref_weight, want "
                        "these, or the log-probs, or use_ref_model=False"
                    )
                head = Head(ref_weight, ref_bias, temperature=self.temperature)
                with torch.no_grad():
                    ref_per_token_logps = head_stats(ref_input, head, targets).logp
            objective += self.beta * self._kl().over(over)
            fields["ref_logps"] = ref_per_token_logps
        old = CURRENT if old_per_token_logps is None else old_per_token_logps
        batch = Batch(targets, advantages=advantages, old_logps=old, **fields)
        head = Head(lin_weight, bias, temperature=self.temperature)
        out = head_loss(_input, head, batch, objective)
        return out.loss, self._metrics(out, batch, scored)

    def _policy(self) -> Term:
        given: dict[str, Any] = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        given |= {"delta": self.delta, "importance_sampling_level": self.importance_sampling_level}
        own: dict[str, Callable[[], Term]] = {
            "cispo": lambda: raw_cispo(self.epsilon_high),
            "sapo": lambda: losses.sapo(
                temperature_pos=self.sapo_temperature_pos, temperature_neg=self.sapo_temperature_neg
            ),
            "vespo": lambda: losses.vespo(
                k_pos=self.vespo_k_pos,
                lambda_pos=self.vespo_lambda_pos,
                k_neg=self.vespo_k_neg,
                lambda_neg=self.vespo_lambda_neg,
            ),
        }
        return own.get(self.loss_type, lambda: getattr(losses, self.loss_type)(**given))()

    def _kl(self) -> Term:
        level = self.importance_sampling_level
        return losses.kl(
            estimator="k3",
            bias_corrected=self.use_bias_correction_kl,
            importance_sampling_level=level,
        )

    def _over(self, scored: Tensor, count: float | Tensor | None) -> Any:
        if self.loss_type == "dr_grpo":
            return fixed_length(self.max_completion_length)  # type: ignore[arg-type]
        if self.loss_type not in ("dapo", "cispo", "vespo"):
            return {"bnpo": "token_mean", "luspo": "sequence_sum"}.get(
                self.loss_type, "sequence_mean"
            )
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if count is None:
            tokens = Totals(scored.sum(), 0)
            return per((tokens.all_reduce() if ranks > 1 else tokens).tokens)
        share = torch.as_tensor(count / ranks, dtype=torch.float32, device=scored.device)
        return per(share.clamp(min=1))

    @torch.no_grad()
    def _metrics(self, out: Output, batch: Batch, scored: Tensor) -> list[Tensor]:
        tokens = scored.sum().clamp(min=1)
        old, found = batch.fields["old_logps"], []
        ratio = (out.logps - (out.logps if old is CURRENT else old)).where(scored, 0)  # type: ignore[operator]
        if self.importance_sampling_level == "sequence":
            ratio = ratio.sum(1, keepdim=True) / scored.sum(1, keepdim=True).clamp(min=1)
        ratio = ratio.exp()
        if self.beta:
            gap = (batch.fields.get("ref_logps", out.logps) - out.logps).where(scored, 0)  # type: ignore[operator]
            kl = gap.exp() - gap - 1
            found.append((kl * ratio if self.use_bias_correction_kl else kl).sum() / tokens)
        sign: Any = batch.fields["advantages"]
        sign = sign[:, None] if sign.dim() == 1 else sign
        low, high = ratio < 1 - self.epsilon_low, ratio > 1 + self.epsilon_high
        if self.loss_type == "cispo":
            low, high = torch.zeros_like(low), ratio > self.epsilon_high
        clipped = (low & (sign < 0)) | (high & (sign > 0))
        if self.loss_type in ("sapo", "vespo"):
            clipped = torch.zeros_like(clipped)
        return [*found, (clipped & scored).sum() / tokens]
