"""Adapters of a head. V vocabulary rows, H hidden width, r the rank; T tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..softmax.products import Fixed, WideLinear
from .checks import check_matrix, check_number

Dropout = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Lora:
    """A low-rank adapter on the head: raw += scaling * dropout(hidden) @ a.T @ b.T.

    Hu et al. 2021, https://arxiv.org/abs/2106.09685. Gradients reach `a` and `b`; the merged weight
    is never built.

    Attributes:
        a: [r, H], the down projection; what it gives is not rounded to its dtype.
        b: [V, r], the up projection.
        scaling: alpha / r, or alpha / sqrt(r) for rank-stabilised adapters.
        dropout: probability in [0, 1) of dropping an input feature. It is applied in every call:
            `Head.of` sets it to 0 for a module in eval mode.
    """

    a: Tensor
    b: Tensor
    scaling: float
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_matrix("lora.a", self.a, "[r, H]")
        check_matrix("lora.b", self.b, "[V, r]")
        if self.b.shape[1] != self.a.shape[0]:
            raise ValueError(
                f"lora.b: got shape {tuple(self.b.shape)}, want [V, {self.a.shape[0]}] for a of "
                f"shape {tuple(self.a.shape)}"
            )
        if self.b.dtype != self.a.dtype:
            raise ValueError(f"lora.b: got {self.b.dtype}, want the dtype of a, {self.a.dtype}")
        check_number("lora.scaling", self.scaling)
        if not 0 <= check_number("lora.dropout", self.dropout) < 1:
            raise ValueError(f"lora.dropout: got {self.dropout}, want 0 <= dropout < 1")

    def features(
        self, hidden: Tensor, dropout: Dropout = F.dropout, fixed: Fixed | None = None
    ) -> Tensor:
        """[T, H] to [T, r]: scaling * dropout(hidden) @ a.T, in float32 or float64."""
        if self.dropout:
            hidden = dropout(hidden, self.dropout)
        return self.scaling * WideLinear.apply(hidden, self.a, fixed)
