"""Triton kernels that multiply rows by one factor, or by a factor per row. The kernel for gradient
sums multiplies the sums by one factor and rounds the products to the gradients' dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import LogitRows, Sum
from .launch import Launcher, cdiv
from .records import Matrix, matrix_of, programs_on

BLOCK = 2048  # Columns of a row that are scaled at once.
PROGRAMS = 8  # Number of GPU programs per multiprocessor that scale rows.
WIDEST = 4096  # Number of elements of a tensor that one GPU program scales at once.
# Largest number of GPU programs in a launch that scales rows. The number of programs is small, so
# that a launch ends quickly if the scale factor (known only on the GPU) is 1 and nothing has to be
# scaled.
MOST_PROGRAMS = 132 * 8


class Moves(NamedTuple):
    """Operands of a kernel that multiplies rows of x by a factor per row, or by one common factor,
    and writes the products to rows of out. `source` and `places` are the rows to read and to write;
    None means the first n rows."""

    x: Matrix
    out: Matrix
    scale: Tensor | None  # Shape [n].
    factor: Tensor | None  # Scalar [] that multiplies all rows; if it is 1, no row changes.
    source: Tensor | None
    places: Tensor | None


@triton.jit(do_not_specialize=["n"])
def rows_kernel(of, n, h, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    factor = 1.0
    if of.factor is not None:
        factor = tl.load(of.factor).to(tl.float32)
        n = tl.where(factor == 1, 0, n)
    for row in range(tl.program_id(0).to(tl.int64), n, tl.num_programs(0)):
        read = row
        write = row
        if of.source is not None:
            read = tl.multiple_of(tl.load(of.source + row), ALIGNED)
        if of.places is not None:
            write = tl.multiple_of(tl.load(of.places + row), ALIGNED)
        if of.scale is not None:
            factor = tl.load(of.scale + row)
        x = of.x.data + read * of.x.stride
        out = of.out.data + write * of.out.stride
        for start in range(0, h, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < h, other=0.0).to(tl.float32) * factor
            tl.store(out + at, value.to(out.dtype.element_ty), mask=at < h)


launch_rows = Launcher(rows_kernel, num_warps=8)


def scale_rows_(rows: LogitRows, factor: Tensor) -> None:
    # The CPU does not know whether `factor` is 1. If `factor` is 1, the GPU programs of
    # `scale_rows_` read no row, and end quickly because they are few.
    x = Matrix(rows.tensor, 1)
    n = len(rows.offsets)
    aligned = 16 if rows.aligned else 1
    if n:
        of = Moves(x, x, None, factor, rows.offsets, rows.offsets)
        programs = min(n, PROGRAMS * programs_on(x.data.device))
        launch_rows(programs, of, n, rows.tensor.shape[-1], ALIGNED=aligned, BLOCK=WIDEST)


def scaled_rows(
    x: Tensor, scale: Tensor, *, out: Tensor | None = None, places: Tensor | None = None
) -> Tensor:
    n = len(scale)
    out = x.new_empty(n, x.shape[1]) if out is None else out
    read = matrix_of(x)
    write = matrix_of(out)
    if n and x.shape[1]:
        of = Moves(read, write, scale, None, None, places)
        launch_rows(n, of, n, x.shape[1], ALIGNED=1, BLOCK=BLOCK)
    return out


class Scaled(NamedTuple):
    """A gradient sum and the tensor for the scaled gradient; the two are one tensor if they have
    the same dtype."""

    value: Tensor
    out: Tensor
    size: int  # Number of elements of `value`; of one row of `value` if the field `rows` is given.
    rows: Tensor | None  # Factors of rows, [n].


@triton.jit(do_not_specialize=["n"])
def scaled_kernel(
    sums,  # A tuple of `Scaled`.
    factor,  # Scalar [], or None.
    n,
    COUNT: tl.constexpr,  # Number of sums.
    BLOCK: tl.constexpr,
):
    number = 1.0
    if factor is not None:
        number = tl.load(factor).to(tl.float32)
    for i in tl.static_range(COUNT):
        of = sums[i]
        in_row = tl.cdiv(of.size, BLOCK)
        blocks = n * in_row
        if of.rows is None:
            blocks = in_row
            # Skip a gradient sum that is scaled in place by a factor of 1.
            if of.value.dtype == of.out.dtype:
                blocks = tl.where(number == 1, 0, in_row)
        for block in range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0)):
            row = block // in_row
            by = number
            if of.rows is not None:
                by *= tl.load(of.rows + row)
            at = block % in_row * BLOCK + tl.arange(0, BLOCK)
            place = row * of.size + at
            x = tl.load(of.value + place, mask=at < of.size, other=0.0).to(tl.float32) * by
            tl.store(of.out + place, x.to(of.out.dtype.element_ty), mask=at < of.size)


launch_scaled = Launcher(scaled_kernel, num_warps=8)


def scaled(sums: Sequence[Sum], factor: Tensor | None) -> list[Tensor]:
    outs = []
    parts = []
    n = 0
    for value, dtype, rows in sums:
        same = value.dtype == dtype
        outs.append(value if same else torch.empty_like(value, dtype=dtype))
        if value.numel() and not (same and factor is rows is None):
            size = value.numel()
            if rows is not None:
                n, size = value.shape
            parts.append(Scaled(value, outs[-1], size, rows))
    if parts:
        programs = min(MOST_PROGRAMS, cdiv(sum(p.value.numel() for p in parts), WIDEST))
        launch_scaled(programs, tuple(parts), factor, n, COUNT=len(parts), BLOCK=WIDEST)
    return outs
