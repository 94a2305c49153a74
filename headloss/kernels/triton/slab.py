"""The logits product with act two in its epilogue: once the softmax's normalizer is known, a slab
of columns comes out of its product as the gradient, and no logits are written at all.

    dL/dz_j = c_target [j = y] + p_j (c_prob + c_entropy log p_j) + c_uniform

n tokens, v columns of the vocabulary starting at `first`, H hidden width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..interface import Backward, Held
from .gradient import coefficient
from .product import (
    DEPTH,
    GROUP,
    LOG2E,
    ROWS,
    STAGES,
    WARPS,
    WIDTH,
    check_operands,
    place_of,
    programs_on,
)
from .statistics import FLOOR, multipliers, on_device, transformed


@triton.jit
def row_values(pointer, rows, inside, factor, PRESENT: tl.constexpr):
    """[BM, 1] of a vector of coefficients."""
    values = tl.zeros(rows.shape, tl.float32)
    if PRESENT:
        values = tl.load(pointer + rows, mask=inside, other=0.0).to(tl.float32) * factor
    return values[:, None]


@triton.jit
def gradient_of(
    z, lse, c, cap, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, UNIFORM: tl.constexpr
):
    """dL/draw of a block of logits but for the targets' own."""
    at_prob, at_entropy, at_uniform = c
    log_p = z - lse
    p = tl.exp2(log_p * LOG2E)
    if ENTROPY:
        g = p * (at_prob + at_entropy * log_p)
    else:
        g = p * at_prob
    if UNIFORM:
        g += at_uniform
    if SOFTCAP:
        bend = z / cap
        g *= 1 - bend * bend
    return g


@triton.jit
def slab_kernel(
    x,  # descriptor [n, H]
    w,  # descriptor [v, H]
    out,  # descriptor [n, v]
    n,
    v,
    h,
    inner,
    outer,
    scale,
    temperature,  # [n], as all below
    peaks,
    log_sums,
    c_prob,
    c_entropy,
    c_uniform,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    PROB: tl.constexpr,
    ENTROPY: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    tiles_m = tl.cdiv(n, BM)
    blocks = tl.cdiv(v, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * blocks, PROGRAMS):
        m, block = place_of(tile, tiles_m, blocks, GROUP)
        z = tl.zeros((BM, BN), tl.float32)
        for k in range(0, h, BK):
            z = tl.dot(x.load([m * BM, k]), w.load([block * BN, k]).T, z)

        rows = m * BM + tl.arange(0, BM)
        inside = rows < n
        cap, factor = outer, scale
        if ROW_TEMPERATURE:
            own = tl.load(temperature + rows, mask=inside, other=1.0)
            cap, factor = outer / own[:, None], scale / own
        if SCALED:
            z = transformed(z, inner, cap, SOFTCAP)
        lse = tl.load(peaks + rows, mask=inside, other=0.0)
        lse += tl.load(log_sums + rows, mask=inside, other=0.0)
        c = (
            row_values(c_prob, rows, inside, factor, PROB),
            row_values(c_entropy, rows, inside, factor, ENTROPY),
            row_values(c_uniform, rows, inside, factor, UNIFORM),
        )
        # In halves, which take half the shared memory on their way out.
        left, right = tl.split(tl.permute(tl.reshape(z, (BM, 2, BN // 2)), (0, 2, 1)))
        g = gradient_of(left, lse[:, None], c, cap, SOFTCAP, ENTROPY, UNIFORM)
        out.store([m * BM, block * BN], g.to(out.dtype))
        g = gradient_of(right, lse[:, None], c, cap, SOFTCAP, ENTROPY, UNIFORM)
        out.store([m * BM, block * BN + BN // 2], g.to(out.dtype))


@triton.jit(do_not_specialize=["first"])
def target_kernel(
    out,  # [n, v]
    stride,
    targets,  # [n], as all vectors
    logps,
    first,
    n,
    v,
    outer,
    scale,
    temperature,
    peaks,
    log_sums,
    c_target,
    c_prob,
    c_entropy,
    c_uniform,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    TARGET: tl.constexpr,
    PROB: tl.constexpr,
    ENTROPY: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """The targets' own gradient, to the digits of their log-probs."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(targets + row, mask=row < n, other=-1) - first
    here = (row < n) & (column >= 0) & (column < v)
    row = tl.where(here, row, 0)
    log_p = tl.maximum(tl.load(logps + row), FLOOR)
    g = coefficient(c_prob, row, PROB) + coefficient(c_entropy, row, ENTROPY) * log_p
    g = coefficient(c_target, row, TARGET) + tl.exp(log_p) * g
    g += coefficient(c_uniform, row, UNIFORM)
    if ROW_TEMPERATURE:
        own = tl.load(temperature + row)
        outer, scale = outer / own, scale / own
    if SOFTCAP:
        bend = (log_p + tl.load(peaks + row) + tl.load(log_sums + row)) / outer
        g *= 1 - bend * bend
    tl.store(out + row * stride + column, (g * scale).to(out.dtype.element_ty), mask=here)


def product_gradient(
    x: Tensor,  # [n, H], bf16
    w: Tensor,  # [v, H]
    backward: Backward,
    logps: Tensor,  # [n], of the targets
) -> Tensor:
    """dL/draw of raw = x @ w.T, [n, v] in x's dtype.

    Raises:
        ValueError: the operands do not suit the hardware (`can_fuse`).
    """
    check_operands(x, w)
    n, v = len(x), len(w)
    targets, first, transform, (peak, log_sum), c, _ = backward
    out = Held.empty(x, v, x.dtype).terms
    if n == 0:
        return out
    inner, outer, temperature = multipliers(transform, peak)
    by_row = isinstance(transform.temperature, Tensor)
    scale = transform.scale if by_row else transform.scale / transform.temperature
    vectors = (temperature, peak, log_sum)
    softmax = [peak if t is None else t for t in (c.prob, c.entropy, c.uniform)]
    flags = {
        "SOFTCAP": transform.softcap is not None,
        "ROW_TEMPERATURE": by_row,
        "PROB": c.prob is not None,
        "ENTROPY": c.entropy is not None,
        "UNIFORM": c.uniform is not None,
    }
    programs = programs_on(x.device)
    with on_device(x):
        slab_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
            TensorDescriptor.from_tensor(w, [WIDTH, DEPTH]),
            TensorDescriptor.from_tensor(out, [ROWS, WIDTH // 2]),
            n,
            v,
            x.shape[1],
            inner,
            outer,
            scale,
            *vectors,
            *softmax,
            PROGRAMS=programs,
            BM=ROWS,
            BN=WIDTH,
            BK=DEPTH,
            GROUP=GROUP,
            SCALED=flags["SOFTCAP"] or by_row or outer != 1.0,
            num_warps=WARPS,
            num_stages=STAGES,
            **flags,
        )
        target_kernel[(triton.cdiv(n, ROWS),)](
            out,
            out.stride(0),
            targets,
            logps,
            first,
            n,
            v,
            outer,
            scale,
            *vectors,
            peak if c.target is None else c.target,
            *softmax,
            BLOCK=ROWS,
            TARGET=c.target is not None,
            **flags,
        )
    return out
