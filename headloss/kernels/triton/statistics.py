"""Triton kernel from a tile of logits to its `SoftmaxState`, one program per token.

A GPU program walks along its row of logits in blocks. The largest logit and the sums of each block
are merged into the row's state, as by `softmax.merge`. With `onto`, a row starts from the
online-softmax state of the earlier tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...statistics.softmax import SoftmaxState
from ..interface import Forward, Support
from . import records
from .formulas import block_partials, merged, per_row, store_partials, transformed
from .launch import Launcher
from .records import WARPS, BlockedColumns, LogitScaling, Matrix

BLOCK = 2048  # Largest number of columns that a program handles at once.


class PartialsInputs(NamedTuple):
    """Operands of `partials_kernel`."""

    # Raw logits [n, v]; with `support`, the raw logits [P] of the pairs (token, allowed id).
    raw: Matrix
    to: SoftmaxState
    targets: Tensor | None  # Shape [n].
    without: BlockedColumns | None
    z: LogitScaling
    support: Support | None = None


@triton.jit
def columns_at(support, at, end):
    """Return the column of each pair (token, column), counted from the start of a window of
    vocabulary columns, and a mask that is False for a pair outside of the window."""
    inside = at < end
    column = tl.load(support.ids + at, mask=inside, other=-1) - support.first
    present = inside & (column >= 0) & (column < support.size)
    return tl.where(present, column, 0), present


@triton.jit(do_not_specialize=["first"])
def partials_kernel(of, first, v, BLOCK: tl.constexpr, ONTO: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    to = of.to
    z = of.z
    x = of.raw.data + row * of.raw.stride
    outer = per_row(z.outer, z, row)
    max_logit = float("-inf")
    sumexp_m1 = -1.0
    entropy_sum = 0.0
    logit_sum = 0.0
    target = float("-inf")
    if ONTO:
        max_logit = tl.load(to.max_logit + row)
        sumexp_m1 = tl.load(to.sumexp_m1 + row)
        target = tl.load(to.target + row)
        if to.entropy_sum is not None:
            entropy_sum = tl.load(to.entropy_sum + row)
        if to.logit_sum is not None:
            logit_sum = tl.load(to.logit_sum + row)
    # Compare fields with None before the loop: Triton 3.6 cannot compare a named tuple's field with
    # None after a loop.
    WITHOUT: tl.constexpr = of.without is not None
    SUPPORT: tl.constexpr = of.support is not None
    begin = 0
    end = v
    if SUPPORT:
        x = of.raw.data
        column = tl.load(of.targets + row) - first
        end = tl.load(of.support.offsets + row + 1)
        begin = tl.load(of.support.offsets + row)
    elif of.targets is not None:
        column = tl.load(of.targets + row) - first
        if (column >= 0) & (column < v):
            target = transformed(tl.load(x + column), z, outer)
    if WITHOUT:
        places = of.without.places.data + row * of.without.places.stride
        bounds = of.without.bounds.data + row * of.without.bounds.stride
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        columns = at
        inside = at < end
        if SUPPORT:
            columns, inside = columns_at(of.support, at, end)
        value = transformed(tl.load(x + at, mask=inside, other=0.0), z, outer)
        if SUPPORT:
            at_target = tl.where(inside & (columns == column), value, float("-inf"))
            target = tl.maximum(target, tl.max(at_target, 0))
        if WITHOUT:
            bound = bounds + start // BLOCK
            for k in range(tl.load(bound), tl.load(bound + 1)):
                value = tl.where(columns == tl.load(places + k), float("-inf"), value)
        if to.logit_sum is not None:
            logit_sum += tl.sum(tl.where(inside, value, 0.0), 0)
        value = tl.where(inside, value, float("-inf"))
        block = block_partials(value, inside, to.entropy_sum is not None)
        max_logit, sumexp_m1, entropy_sum = merged((max_logit, sumexp_m1, entropy_sum), block)
    tl.store(to.target + row, target)
    store_partials(to, row, (max_logit, sumexp_m1, entropy_sum, logit_sum))


launch = Launcher(partials_kernel, num_warps=WARPS)


def partials(
    raw: Tensor, forward: Forward, onto: SoftmaxState | None = None, without: Tensor | None = None
) -> SoftmaxState:
    tile = records.check_tile("raw", raw)
    targets, first, transform, needs = forward
    n, v = raw.shape
    to = records.empty_partials(raw, n, needs) if onto is None else onto
    if n:
        block = records.block_width(v, BLOCK)
        left_out = None if without is None else records.blocked_columns(without, v, block)[0]
        of = PartialsInputs(tile, to, targets, left_out, records.scaling(transform))
        launch(n, of, first, v, BLOCK=block, ONTO=onto is not None)
    return to
