"""What product.py does one token at a time: the reference of each.

n tokens, v columns of the vocabulary starting at `first`, H hidden width, z = transform(x @ w.T).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import Launcher
from .statistics import row_multiplier, transformed


@triton.jit(do_not_specialize=["first"])
def reference_kernel(
    x,  # [n, H]
    x_stride,
    w,  # [v, H]
    w_stride,
    targets,  # [n]
    first,
    v,
    h,
    inner,
    outer,
    temperature,  # [n]
    columns,  # [n]
    references,  # [n]
    target_logits,  # [n]
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
):
    """The column that a token refers to, its target or a stand-in, and that column's logit."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row) - first
    inside = (target >= 0) & (target < v)
    column = tl.where(inside, target, tl.abs(target) % v).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, h, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + row * x_stride + at, mask=at < h, other=0.0).to(tl.float32)
        b = tl.load(w + column * w_stride + at, mask=at < h, other=0.0).to(tl.float32)
        total += a * b
    factor = row_multiplier(outer, temperature, row, ROW_TEMPERATURE)
    z = transformed(tl.sum(total, 0), inner, factor, SOFTCAP)
    tl.store(columns + row, column)
    tl.store(references + row, z)
    tl.store(target_logits + row, tl.where(inside, z, float("-inf")))


launch_reference = Launcher(reference_kernel)
