"""Triton kernels for chosen columns of each token: their logits, and their elements in the gradient
of a tile. The matmul kernels also read the logit of one chosen column per token, the shift in exp(z
- shift).

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
from .records import LogitScaling, Matrix, check_tile, gradient_inputs, matrix_of, scaling

ROWS = 128  # Number of tokens per program of the kernel that writes gradients at targets.
COLUMNS = 8
# Number of tokens per program of `shifts_kernel`; `logits_kernel` has COLUMNS columns per program.
TOKENS = 8


class Shifts(NamedTuple):
    """Operands of the kernel that computes each token's shift, the logit that the epilogue of the
    matmul subtracts in exp(z - shift)."""

    x: Matrix  # Shape [n, H].
    w: Matrix  # Shape [v, H].
    z: LogitScaling
    shift: Tensor  # Output [n].
    # Output [2, pitch], where `pitch` is the number of tokens rounded up to a multiple of 16. Row 0
    # receives each token's target logit; row 1 receives the index of the vocabulary column whose
    # logit is the token's `shift`.
    more: Tensor
    pitch: int  # The number n of tokens, rounded up to a multiple of 16.


@triton.jit(do_not_specialize=["first", "n"], do_not_specialize_on_alignment=["targets"])
def shifts_kernel(of, targets, first, n, v, h, TOKENS: tl.constexpr):
    """Store each token's shift (the logit of one column, which exp(z - shift) subtracts) and the
    index of this column. The shift is the target's logit or, if this slice of the vocabulary lacks
    the token's target, the logit of an arbitrary column."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    real = row < n
    target = tl.load(targets + row, mask=real, other=0) - first
    inside = (target >= 0) & (target < v)
    column = tl.where(inside, target, tl.abs(target % v)).to(tl.int64)
    at_row = of.x.data + tl.where(real, row, 0) * of.x.stride
    raw = dots(at_row, of.w.data + column * of.w.stride, column, real, of.z, h, TOKENS)
    logit = transformed(raw, of.z, per_row(of.z.outer, of.z, row, real))
    to = of.more + row
    tl.store(of.shift + row, logit, mask=real)
    tl.store(to, tl.where(inside, logit, float("-inf")), mask=real)
    tl.store(to + of.pitch, column.to(tl.int32).to(tl.float32, bitcast=True), mask=real)


@triton.jit
def shift_column(to, rows, inside):
    """Return the index, in this vocabulary slice, of the column whose logit is subtracted as the
    shift in exp(z - shift); -1 for a row beyond the last token."""
    bits = tl.load(to.more + to.pitch + rows, mask=inside, other=0.0)
    return tl.where(inside, bits.to(tl.int32, bitcast=True), -1)


@triton.jit
def logits_kernel(
    x,
    w,
    columns,  # `x` [n, H], `w` [v, H] and `columns` [n, K] are a `Matrix` each.
    z,  # A `LogitScaling`.
    out,  # Logits [n, K].
    v,
    h,
    count,  # The number K of chosen vocabulary columns per token.
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


@triton.jit(do_not_specialize=["from_column", "first", "n"])
def gradient_kernel(
    a,  # A `GradientInputs` record.
    from_column,  # Offset that is subtracted from every column index in `a.columns`.
    first,
    n,
    v,
    count,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if a.order is not None:
        n = tl.load(a.order.count)
    row = tl.where(place < n, place, 0)
    if a.order is not None:
        row = tl.load(a.order.rows + row)
    k = tl.arange(0, BLOCK)[None, :]
    inside = (place < n)[:, None] & (k < count)
    at = row[:, None]
    column = tl.load(a.columns.data + at * a.columns.stride + k, mask=inside, other=-1)
    column -= from_column
    here = inside & (column >= 0) & (column < v)
    log_p = tl.load(a.column_logps.data + at * a.column_logps.stride + k, mask=here, other=0.0)
    slope = coefficient(a.c.target, at)
    if a.column_slopes is not None:
        chosen_slope = tl.load(
            a.column_slopes.data + at * a.column_slopes.stride + k, mask=here, other=0.0
        )
        slope = chosen_slope + tl.where(column == tl.load(a.targets + at) - first, slope, 0.0)
    g = gradient_from_logp(log_p, slope, coefficients(a.c, at), a.c)
    if a.z.inner is not None:
        if a.column_raw is not None:
            g = under_cap(g, tl.load(a.column_raw + at, mask=here, other=0.0), a.z)
        else:
            z = tl.load(a.normalizer.max_logit + at) + (log_p + tl.load(a.normalizer.log_sum + at))
            g = under_cap_at(g, z, per_row(a.z.outer, a.z, at))
    g *= per_row(a.z.factor, a.z, at)
    if a.multiples is not None:
        multiple = tl.load(a.multiples + place, mask=place < n, other=0.0)[:, None]
        g = tl.where(multiple == 0, 0.0, g / tl.where(multiple == 0, 1.0, multiple))
    out = a.to.data + place[:, None] * a.to.stride + column
    tl.store(out, g.to(a.to.data.dtype.element_ty), mask=here)


launch_shifts = Launcher(shifts_kernel, TOKENS=TOKENS)
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
        columns, logps, slopes = map(matrix_of, chosen)
        a = gradient_inputs(backward)._replace(to=to, order=order, multiples=multiples)
        a = a._replace(columns=columns, column_logps=logps, column_slopes=slopes)
        block = triton.next_power_of_2(count)
        launch_gradient(n, a, 0, backward.first, n, v, count, ROWS=1, BLOCK=block)


def target_gradient_(
    tile: Tensor, x: Tensor, w: Tensor, backward: Backward, columns: Tensor | None = None
) -> None:
    """Compute the gradient of each token's target logit from the target's log-prob, so that 1 - p
    keeps its digits for a probability p near 1, and write the gradient into `tile`. By default, the
    target id determines the target's column in the tile; with `columns` [n], the target of token t
    is in column columns[t]."""
    n, v = tile.shape
    a = gradient_inputs(backward)
    first = backward.first
    raw = None
    # The derivative of the soft cap needs the raw logit, which the log-prob does not determine.
    if a.z.inner is not None:
        plain = Transform(bias=backward.transform.bias)
        raw = chosen_logits(x, w, (a.targets - first).unsqueeze(1), plain)
    places, from_column = (a.targets, first) if columns is None else (columns, 0)
    logps = Matrix(a.logps, 1)
    a = a._replace(
        to=matrix_of(tile), columns=Matrix(places, 1), column_logps=logps, column_raw=raw
    )
    launch_targets(cdiv(n, ROWS), a, from_column, first, n, v, 1, ROWS=ROWS, BLOCK=1)
