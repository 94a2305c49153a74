"""Act one in Triton: a tile of logits to its partial statistics, one program per token.

A program walks along its row block by block: the peak of a block, the terms e = exp(z - peak) and
their sums, joined to what the row has so far by the rule of `stats.merge`. With `onto`, that is
what earlier tiles left.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...objective.statistics import Partials
from ..interface import Forward
from .formulas import block_partials, merged, per_row, transformed
from .launch import Launcher
from .records import (
    WARPS,
    Apart,
    LogitScaling,
    Matrix,
    apart,
    block_width,
    check_tile,
    empty_partials,
    matrix_of,
    scaling,
)

NARROW = 2048  # columns that a program works on at once, at most, where it has to look for some


@triton.jit
def begun(to, row, ONTO: tl.constexpr):
    """(peak, rest, spread, target, total) of no column, or what earlier tiles left."""
    peak = tl.full((), float("-inf"), tl.float32)
    rest = tl.full((), -1.0, tl.float32)
    spread = tl.full((), 0.0, tl.float32)
    target = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if ONTO:
        peak, rest = tl.load(to.peak + row), tl.load(to.rest + row)
        target = tl.load(to.target + row)
        if to.spread is not None:
            spread = tl.load(to.spread + row)
        if to.total is not None:
            total = tl.load(to.total + row)
    return peak, rest, spread, target, total


@triton.jit
def with_block(sums, z, inside, to):
    """With a block's columns, but for its target."""
    peak, rest, spread, target, total = sums
    if to.total is not None:
        total += tl.sum(tl.where(inside, z, 0.0), 0)
    z = tl.where(inside, z, float("-inf"))
    block = block_partials(z, inside, to.spread is not None)
    peak, rest, spread = merged((peak, rest, spread), block)
    return peak, rest, spread, target, total


@triton.jit
def store_partials(to, row, sums):
    tl.store(to.peak + row, sums[0])
    tl.store(to.rest + row, sums[1])
    tl.store(to.target + row, sums[3])
    if to.spread is not None:
        tl.store(to.spread + row, sums[2])
    if to.total is not None:
        tl.store(to.total + row, sums[4])


class Tile(NamedTuple):
    """What the kernel takes."""

    raw: Matrix
    to: Partials
    targets: Tensor | None  # [n]
    without: Apart | None
    z: LogitScaling


@triton.jit(do_not_specialize=["first"])
def partials_kernel(
    of,  # Tile
    first, v, BLOCK: tl.constexpr, ONTO: tl.constexpr,
):
    row, to, z = tl.program_id(0).to(tl.int64), of.to, of.z
    x = of.raw.data + row * of.raw.stride
    outer = per_row(z.outer, z, row)
    peak, rest, spread, target, total = begun(to, row, ONTO)
    if of.targets is not None:
        column = tl.load(of.targets + row) - first
        if (column >= 0) & (column < v):
            target = transformed(tl.load(x + column), z, outer)
    WITHOUT: tl.constexpr = of.without is not None  # Triton 3.6 cannot ask behind a loop
    if WITHOUT:
        places = of.without.places + row * of.without.count
        bounds = of.without.bounds + row * of.without.stride
    sums = peak, rest, spread, target, total
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        value = transformed(tl.load(x + columns, mask=inside, other=0.0), z, outer)
        if WITHOUT:
            bound = bounds + start // BLOCK
            for k in range(tl.load(bound), tl.load(bound + 1)):
                value = tl.where(columns == tl.load(places + k), float("-inf"), value)
        sums = with_block(sums, value, inside, to)
    store_partials(to, row, sums)


launch = Launcher(partials_kernel, num_warps=WARPS)


def partials(
    raw: Tensor, forward: Forward, onto: Partials | None = None, without: Tensor | None = None
) -> Partials:
    check_tile("raw", raw)
    targets, first, transform, needs, _ = forward
    n, v = raw.shape
    to = empty_partials(raw, n, needs) if onto is None else onto
    if n:
        block = block_width(v, None if without is None else NARROW)
        left_out = None if without is None else apart(without, v, block)[0]
        of = Tile(matrix_of(raw), to, targets, left_out, scaling(transform))
        launch(n, of, first, v, BLOCK=block, ONTO=onto is not None)
    return to
