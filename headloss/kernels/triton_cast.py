"""A float32 sum to the dtype of its gradient, times one number: one read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_partials import on_device

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


@triton.jit
def rows_kernel(x, x_stride, scale, out, h, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row)
    for start in range(0, h, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + at, mask=at < h, other=0.0).to(tl.float32) * factor
        tl.store(out + row * h + at, value.to(out.dtype.element_ty), mask=at < h)


def scaled_rows(
    x: Tensor,  # [n, H], any row stride
    scale: Tensor,  # [n] float32
) -> Tensor:
    """x * scale of each row, multiplied in float32 and rounded to x's dtype; a new tensor."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with on_device(x):
            rows_kernel[(len(x),)](x, x.stride(0), scale, out, x.shape[1], BLOCK=2048, num_warps=8)
    return out
