"""What product.py does one token at a time: the reference of each.

n tokens, v columns of the vocabulary starting at `first`, H hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .formulas import folded, per_row, transformed
from .launch import Launcher


class Reference(NamedTuple):
    """The column that a token's terms are taken against; [n] each."""

    own: Tensor  # its number, in this slice
    logit: Tensor
    target: Tensor  # z_y, -inf where it lies in another slice


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["targets"])
def reference_kernel(
    x,  # Matrix [n, H]
    w,  # Matrix [v, H]
    targets,  # [n]
    z,  # LogitScaling
    to,  # Reference
    first,
    v,
    h,
    HALVES: tl.constexpr,
):
    """The column that a token refers to, its target or a stand-in, and that column's logit, which
    is summed in one order whatever the layout."""
    BLOCK: tl.constexpr = 1 << HALVES
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row) - first
    inside = (target >= 0) & (target < v)
    column = tl.where(inside, target, tl.abs(target) % v).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, h, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x.data + row * x.stride + at, mask=at < h, other=0.0).to(tl.float32)
        b = tl.load(w.data + column * w.stride + at, mask=at < h, other=0.0).to(tl.float32)
        total += a * b
    own = tl.sum(folded(tl.reshape(total, (BLOCK, 1)), 1, HALVES), 0)
    logit = transformed(own, z, per_row(z.outer, z, row))
    tl.store(to.own + row, column)
    tl.store(to.logit + row, logit)
    tl.store(to.target + row, tl.where(inside, logit, float("-inf")))


launch_reference = Launcher(reference_kernel)
