"""Hidden states of the scored tokens, and the way back."""

from __future__ import annotations

import torch
from torch import Tensor


class GatherRows(torch.autograd.Function):
    """Rows of [N, H] by unique index; the adjoint writes them back and leaves exact zeros."""

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, live: Tensor | None):
        ctx.save_for_backward(index, live)
        ctx.count = len(rows)
        picked = rows[index]
        return picked if live is None else picked.masked_fill_(~live.unsqueeze(1), 0)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        index, live = ctx.saved_tensors
        if live is not None:
            gradient = gradient.masked_fill(~live.unsqueeze(1), 0)
        full = gradient.new_zeros(ctx.count, *gradient.shape[1:])
        return full.index_copy_(0, index, gradient), None, None
