"""A float32 sum to the dtype of its gradient, times one number: one read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .statistics import on_device

BLOCK = 4096


@triton.jit
def cast_kernel(value, factor, out, count, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(value + at, mask=at < count, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=at < count)


def scaled(
    value: Tensor,  # contiguous, any float dtype but float64
    factor: Tensor | None,  # [] float32
    dtype: torch.dtype,
) -> Tensor:
    """value * factor, multiplied in float32 and rounded to `dtype` once; where the dtypes are the
    same, in place."""
    if value.dtype == dtype and factor is None:
        return value
    out = value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)
    count = value.numel()
    if count:
        with on_device(value):
            cast_kernel[(triton.cdiv(count, BLOCK),)](
                value,
                value if factor is None else factor,
                out,
                count,
                FACTOR=factor is not None,
                BLOCK=BLOCK,
                num_warps=8,
            )
    return out
