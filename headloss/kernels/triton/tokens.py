"""What product.py does before the product: the reference of each token.

n tokens, v columns of the vocabulary starting at `first`, H hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .formulas import folded, transformed
from .launch import Launcher


class Reference(NamedTuple):
    """The column that a token's terms are taken against; [n] each."""

    own: Tensor  # its number, in this slice
    logit: Tensor
    target: Tensor  # z_y, -inf where it lies in another slice


ROWS = 8  # of a program


@triton.jit(do_not_specialize=["first", "n"], do_not_specialize_on_alignment=["targets"])
def reference_kernel(
    x,  # Matrix [n, H]
    w,  # Matrix [v, H]
    targets,  # [n]
    z,  # LogitScaling
    to,  # Reference
    first, n, v, h, ROWS: tl.constexpr, HALVES: tl.constexpr,
):
    """The column that a token refers to, its target or a stand-in, and that column's logit: exact
    to float32, summed in one order whatever the layout."""
    DEPTH: tl.constexpr = 1 << HALVES
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < n
    target = tl.load(targets + row, mask=real, other=0) - first
    inside = (target >= 0) & (target < v)
    column = tl.where(inside, target, tl.abs(target % v)).to(tl.int64)
    total = tl.zeros((DEPTH, ROWS), tl.float32)
    for start in range(0, h, DEPTH):
        at = start + tl.arange(0, DEPTH)
        mask = (at < h)[:, None] & real[None, :]
        a = tl.load(x.data + row[None, :] * x.stride + at[:, None], mask=mask, other=0.0)
        b = tl.load(w.data + column[None, :] * w.stride + at[:, None], mask=mask, other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)
    outer = z.outer
    if z.temperature is not None:
        outer = outer / tl.load(z.temperature + row, mask=real, other=1.0)
    logit = folded(total, ROWS, HALVES)
    if z.bias is not None:
        logit += tl.load(z.bias + column, mask=real, other=0.0).to(tl.float32)
    logit = transformed(logit, z, outer)
    tl.store(to.own + row, column, mask=real)
    tl.store(to.logit + row, logit, mask=real)
    tl.store(to.target + row, tl.where(inside, logit, float("-inf")), mask=real)


launch_reference = Launcher(reference_kernel)
