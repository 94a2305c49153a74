"""Sums and rows that are scaled, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..interface import Scaling
from .tile import wide


def scaled(values: Sequence[Scaling], factor: Tensor | None) -> list[Tensor]:
    results = []
    for value, dtype, multiplied in values:
        if factor is not None and multiplied:
            # A one-element vector takes part in type promotion, where a 0-dim tensor would not: a
            # 16-bit value is multiplied in float32.
            number = factor.reshape(1).to(wide(value.dtype))
            out = value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)
            value = torch.mul(value, number, out=out)
        results.append(value if value.dtype == dtype else value.to(dtype))
    return results


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
