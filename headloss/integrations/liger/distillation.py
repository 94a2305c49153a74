"""Liger's fused linear distillation loss."""

# The constructor sets attributes by name from its arguments, which pyright cannot see.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from torch import Tensor, nn

from ... import losses
from ...batch.batch import Batch
from ...head.head import Head
from ...head_loss import head_loss


class LigerFusedLinearJSDLoss(nn.Module):
    """Divergence from a teacher at a temperature, without a factor T^2, plus the labels'
    cross-entropy."""

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        self.hard, self.soft, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature = ignore_index, temperature
        self.return_soft_hard_loss = return_soft_hard_loss

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        kind = {0: "forward_kl", 1: "reverse_kl"}.get(self.beta, "js")
        soft = losses.distillation(
            divergence=kind,
            beta=self.beta if kind == "js" else 0.5,
            temperature=self.temperature,
            teacher_head=Head(teacher_weight.detach(), teacher_bias),
        )
        fields = {"teacher_hidden": teacher_input.detach()}
        batch = Batch(true_labels, ignore_index=self.ignore_index, **fields)
        objective = self.hard * losses.cross_entropy() + self.soft * soft
        out = head_loss(student_input, Head(student_weight, student_bias), batch, objective)
        if not self.return_soft_hard_loss:
            return out.loss
        return out.loss, out.terms["distillation"], out.terms["cross_entropy"]
