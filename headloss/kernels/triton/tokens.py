"""What product.py does one token at a time: the reference of each, and those it is far from.

n tokens, v columns of the vocabulary starting at `first`, H hidden width, z = transform(x @ w.T).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .statistics import FLOOR, block_partials, merged, row_multiplier, transformed

FAR = tl.constexpr(2.0**80)  # sum of terms beyond which the reference is too far below


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


@triton.jit
def far_row_kernel(
    x,  # [n, H]
    x_stride,
    w,  # [v, H]
    w_stride,
    held,  # [n, v]
    held_stride,
    own,  # [n], column of the reference
    v,
    h,
    inner,
    outer,
    temperature,  # [n]
    references,  # [n], as the two below
    rests,
    spreads,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    HELD: tl.constexpr,
):
    """Sets the reference's own term, 1; does a token again whose reference is far below its largest
    logit, against that one."""
    row = tl.program_id(0).to(tl.int64)
    if HELD:
        tl.store(
            held + row * held_stride + tl.load(own + row),
            tl.full((), 1.0, tl.float32).to(tl.bfloat16),
        )
    if tl.load(rests + row) < FAR:
        return
    outer = row_multiplier(outer, temperature, row, ROW_TEMPERATURE)
    peak = tl.full((), float("-inf"), tl.float32)
    rest = tl.full((), -1.0, tl.float32)
    spread = tl.full((), 0.0, tl.float32)
    for sweep in range(1 + HELD):
        for start in range(0, v, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < v
            z = tl.zeros((BLOCK,), tl.float32)
            for k in range(0, h, DEPTH):
                at = k + tl.arange(0, DEPTH)
                a = tl.load(x + row * x_stride + at, mask=at < h, other=0.0).to(tl.float32)
                b = tl.load(
                    w + columns.to(tl.int64)[:, None] * w_stride + at[None, :],
                    mask=inside[:, None] & (at < h)[None, :],
                    other=0.0,
                )
                z += tl.sum(b.to(tl.float32) * a[None, :], 1)
            z = tl.where(inside, transformed(z, inner, outer, SOFTCAP), float("-inf"))
            if sweep == 0:
                block_peak, block_rest, block_spread = block_partials(z, inside, ENTROPY)
                peak, rest, spread = merged(
                    peak, rest, spread, block_peak, block_rest, block_spread
                )
            else:
                e = tl.exp(tl.maximum(z - peak, FLOOR))
                tl.store(held + row * held_stride + columns, e.to(tl.bfloat16), mask=inside)
    tl.store(references + row, peak)
    tl.store(rests + row, rest)
    if ENTROPY:
        tl.store(spreads + row, spread)
