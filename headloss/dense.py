"""What every tensor of a call has to be."""

from __future__ import annotations

import torch
from torch import Tensor


def check_dense(name: str, value: Tensor) -> None:
    """TypeError for a tensor without strides (sparse, mkldnn, nested), which no kernel can read."""
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise TypeError(f"{name}: got a tensor of layout {kind}, want a dense one, torch.strided")
