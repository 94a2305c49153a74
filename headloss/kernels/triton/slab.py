"""The logits product with act two in its epilogue: once the softmax's normalizer is known, a slab
of columns comes out of its product as the gradient, and no logits are written at all.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..interface import Backward
from ..rounding import lost
from .chosen import target_gradient_
from .formulas import LOG2E, act_two, transformed
from .launch import Launcher, cdiv
from .product import check_operands, in_gluon
from .records import act, over_tiles, scaling
from .tiles import BM, BN, OPTIONS, READ, WRITE, biased, each_tile, halves
from .versions import overlaps


@triton.jit
def of_rows(pointer, rows, inside, factor):
    """[BM, 1] of a vector of coefficients, times dz/draw."""
    values = tl.zeros(rows.shape, tl.float32)
    if pointer is not None:
        values = tl.load(pointer + rows, mask=inside, other=0.0).to(tl.float32) * factor
    return values[:, None]


@triton.jit
def gradient_of(z, lse, at, cap, a):
    """dL/draw of a block of logits but for the targets' own."""
    log_p = z - lse
    g = act_two(tl.exp2(log_p * LOG2E), log_p, at, a.c)
    if a.z.inner is not None:
        bend = z / cap
        g *= 1 - bend * bend
    return g


@triton.jit
def gradient_tile(z, m, block, out, a, n, v):
    """The epilogue: the gradient of a tile."""
    rows = m * BM + tl.arange(0, BM)
    inside = rows < n
    cap, factor = a.z.outer, a.z.factor
    if a.z.temperature is not None:
        own = tl.load(a.z.temperature + rows, mask=inside, other=1.0)
        cap, factor = a.z.outer / own[:, None], a.z.factor / own
    z = transformed(biased(z, a.z, block, v), a.z, cap)
    lse = tl.load(a.normalizer.peak + rows, mask=inside, other=0.0)
    lse += tl.load(a.normalizer.log_sum + rows, mask=inside, other=0.0)
    at = (
        of_rows(a.c.prob, rows, inside, factor), of_rows(a.c.entropy, rows, inside, factor),
        of_rows(a.c.uniform, rows, inside, factor)
    )
    left, right = halves(z)
    g = gradient_of(left, lse[:, None], at, cap, a)
    out.store([m * BM, block * BN], g.to(out.dtype))
    g = gradient_of(right, lse[:, None], at, cap, a)
    out.store([m * BM, block * BN + BN // 2], g.to(out.dtype))


@triton.jit
def slab_kernel(x, w, out, a, n, v, h, PROGRAMS: tl.constexpr):
    each_tile(x, w, out, a, n, v, h, PROGRAMS, gradient_tile)


launch_slab = Launcher(slab_kernel, tiles=READ | {"out": WRITE}, **OPTIONS)


def product_gradient(x: Tensor, w: Tensor, backward: Backward) -> Tensor:
    check_operands(x, w)
    n, v = len(x), len(w)
    out, a = x.new_empty(n, 8 * cdiv(v, 8))[:, :v], act(backward)  # rows of whole 16 bytes
    if n:
        of = a._replace(z=scaling(backward.transform, lost(x.device, x.shape[1])))
        run = launch_slab
        if overlaps(x.device):
            run = in_gluon().launch_slab
        over_tiles(run, x, w, out, of)
        target_gradient_(out, a, backward.first)
    return out
