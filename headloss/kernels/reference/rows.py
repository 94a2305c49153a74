"""Multiplication of gradient sums and of matrix rows by factors, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..interface import Sum
from .tile import wide


def scaled(sums: Sequence[Sum], factor: Tensor | None) -> list[Tensor]:
    outs = []
    for value, dtype, rows in sums:
        # A one-element vector takes part in type promotion, unlike a 0-dim tensor, so that a 16-bit
        # value is multiplied in float32.
        by = None if factor is None else factor.reshape(1).to(wide(value.dtype))
        if rows is not None:
            by = rows.unsqueeze(1) * (1 if by is None else by)
        out = value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)
        outs.append(value.to(dtype) if by is None else torch.mul(value, by, out=out))
    return outs


def scaled_rows(
    x: Tensor, scale: Tensor, *, out: Tensor | None = None, places: Tensor | None = None
) -> Tensor:
    n = len(scale)
    out = x.new_empty(n, x.shape[1]) if out is None else out
    if places is None:
        torch.mul(x[:n], scale.unsqueeze(1), out=out[:n])
    else:
        out[places] = (x[:n] * scale.unsqueeze(1)).to(out.dtype)
    return out
