"""Chosen columns of each token in Triton: their logits, and their gradient over a tile's. One is
chosen by a product itself: the one whose logit is the token's shift.

n tokens, v columns of the vocabulary starting at `first`, H hidden width, K chosen columns of a
token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Backward, Order
from ..pair import Chosen
from ..transform import Transform
from .formulas import (
    coefficient,
    coefficients,
    dots,
    gradient_from_logp,
    per_row,
    transformed,
    under_cap,
    under_cap_at,
)
from .launch import Launcher, cdiv
from .records import GradientInputs, Matrix, check_tile, gradient_inputs, matrix_of, scaling

ROWS = 128  # of a program that sets targets
COLUMNS = 8
TOKENS = 8  # chosen columns of one token, or tokens, of a program


@triton.jit(do_not_specialize=["first", "n"], do_not_specialize_on_alignment=["targets"])
def shifts_kernel(
    x,
    w,
    held,
    targets,
    of,
    first,
    n,
    v,
    h,
    vocabulary,
    PROGRAMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The column whose logit is a token's shift, its target or a stand-in, and that logit, for
    `merge.ProductStatistics`."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    real = row < n
    target = tl.load(targets + row, mask=real, other=0) - first
    inside = (target >= 0) & (target < v)
    column = tl.where(inside, target, tl.abs(target % v)).to(tl.int64)
    at_row = x + tl.where(real, row, 0) * of.x_stride
    raw = dots(at_row, w + column * of.w_stride, column, real, of.z, h, TOKENS)
    logit = transformed(raw, of.z, per_row(of.z.outer, of.z, row, real))
    to = of.epilogue.more + row
    tl.store(of.epilogue.shift + row, logit, mask=real)
    tl.store(to, tl.where(inside, logit, float("-inf")), mask=real)
    tl.store(to + of.epilogue.pitch, column.to(tl.int32).to(tl.float32, bitcast=True), mask=real)


@triton.jit
def shift_column(to, rows, inside):
    """The column's number in this slice, -1 beyond the last token."""
    bits = tl.load(to.more + to.pitch + rows, mask=inside, other=0.0)
    return tl.where(inside, bits.to(tl.int32, bitcast=True), -1)


@triton.jit
def logits_kernel(
    x,
    w,
    columns,  # Matrix [n, H], [v, H] and [n, K]
    z,  # LogitScaling
    out,  # [n, K]
    v,
    h,
    count,  # K
    COLUMNS: tl.constexpr,
):
    blocks = tl.cdiv(count, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    k = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.load(columns.data + row * columns.stride + k, mask=k < count, other=-1)
    here = (column >= 0) & (column < v)
    at_row = x.data + row * x.stride + tl.zeros((1,), tl.int64)
    at_column = w.data + tl.where(here, column, 0) * w.stride
    raw = dots(at_row, at_column, column, here, z, h, COLUMNS)
    logit = transformed(raw, z, per_row(z.outer, z, row))
    tl.store(out + row * count + k, tl.where(here, logit, 0.0), mask=k < count)


class Put(NamedTuple):
    """What `gradient_kernel` takes."""

    to: Matrix  # [n, v]
    a: GradientInputs
    columns: Matrix  # [n, K], as the next two
    logps: Matrix
    slopes: Matrix | None  # beside the targets' coefficients
    multiples: Tensor | None = None  # [n], of the rows of `to`
    order: Order | None = None
    raw: Tensor | None = None  # [n] logits, where one column is chosen


@triton.jit(do_not_specialize=["from_column", "first", "n"])
def gradient_kernel(
    of,  # Put
    from_column,  # the number of the first column
    first,
    n,
    v,
    count,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    a = of.a
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if of.order is not None:
        n = tl.load(of.order.count)
    row = tl.where(place < n, place, 0)
    if of.order is not None:
        row = tl.load(of.order.rows + row)
    k = tl.arange(0, BLOCK)[None, :]
    inside = (place < n)[:, None] & (k < count)
    at = row[:, None]
    column = tl.load(of.columns.data + at * of.columns.stride + k, mask=inside, other=-1)
    column -= from_column
    here = inside & (column >= 0) & (column < v)
    log_p = tl.load(of.logps.data + at * of.logps.stride + k, mask=here, other=0.0)
    slope = coefficient(a.c.target, at)
    if of.slopes is not None:
        chosen_slope = tl.load(of.slopes.data + at * of.slopes.stride + k, mask=here, other=0.0)
        slope = chosen_slope + tl.where(column == tl.load(a.targets + at) - first, slope, 0.0)
    g = gradient_from_logp(log_p, slope, coefficients(a.c, at), a.c)
    if a.z.inner is not None:
        if of.raw is not None:
            g = under_cap(g, tl.load(of.raw + at, mask=here, other=0.0), a.z)
        else:
            z = tl.load(a.normalizer.max_logit + at) + (log_p + tl.load(a.normalizer.log_sum + at))
            g = under_cap_at(g, z, per_row(a.z.outer, a.z, at))
    g *= per_row(a.z.factor, a.z, at)
    if of.multiples is not None:
        multiple = tl.load(of.multiples + place, mask=place < n, other=0.0)[:, None]
        g = tl.where(multiple == 0, 0.0, g / tl.where(multiple == 0, 1.0, multiple))
    out = of.to.data + place[:, None] * of.to.stride + column
    tl.store(out, g.to(of.to.data.dtype.element_ty), mask=here)


launch_logits = Launcher(logits_kernel, num_warps=4)
launch_gradient = Launcher(gradient_kernel, num_warps=1)
launch_targets = Launcher(gradient_kernel)


def chosen_logits(x: Tensor, w: Tensor, columns: Tensor, transform: Transform) -> Tensor:
    operands = check_tile("x", x), check_tile("w", w)
    n, count = columns.shape
    v, h = w.shape
    out = x.new_empty(n, count, dtype=torch.float32)
    if n:
        arguments = *operands, matrix_of(columns), scaling(transform), out
        launch_logits(n * cdiv(count, COLUMNS), *arguments, v, h, count, COLUMNS=COLUMNS)
    return out


def chosen_gradient_(
    tile: Tensor,
    chosen: Chosen,
    backward: Backward,
    *,
    multiples: Tensor | None = None,
    order: Order | None = None,
) -> None:
    to = check_tile("tile", tile)
    n, count = chosen.columns.shape
    v = tile.shape[1]
    if n:
        of = Put(to, gradient_inputs(backward), *map(matrix_of, chosen), multiples, order)
        block = triton.next_power_of_2(count)
        launch_gradient(n, of, 0, backward.first, n, v, count, ROWS=1, BLOCK=block)


def target_gradient_(tile: Tensor, x: Tensor, w: Tensor, backward: Backward) -> None:
    """The targets' own gradient, to the digits of their log-probs; of a tile of x @ w.T."""
    n, v = tile.shape
    a = gradient_inputs(backward)
    first = backward.first
    raw = None
    if a.z.inner is not None:  # a log-prob does not tell how far a soft cap is saturated
        plain = Transform(bias=backward.transform.bias)
        raw = chosen_logits(x, w, (a.targets - first).unsqueeze(1), plain)
    of = Put(matrix_of(tile), a, Matrix(a.targets, 1), Matrix(a.logps, 1), None, raw=raw)
    launch_targets(cdiv(n, ROWS), of, first, first, n, v, 1, ROWS=ROWS, BLOCK=1)
