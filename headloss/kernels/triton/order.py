"""Rows without a gradient leave: which row goes where is found on the device, so that all that
follows is queued before the host reads how many there are. Rows times a number of their own, or of
all of them.

Sums become gradients: several of them in one launch, times one number, rounded to their dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Order, Rows, Scaling
from .launch import Launcher, cdiv
from .records import Matrix, programs_on

BLOCK = 2048  # rows that are ranked at once, and columns of a row that is scaled
PROGRAMS = 8  # of a multiprocessor, that scale rows
WIDEST = 4096  # numbers that a program scales at once
AT_ONCE = 3  # tensors that a launch scales
MOST = 132 * 8  # programs: where nothing is to be done, few of them find that out


@triton.jit
def order_kernel(keep, rows, gaps, count, n, most, BLOCK: tl.constexpr):
    total = 0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(keep + at, mask=at < n, other=0).to(tl.int32), 0)
    if total > most:
        total = n
    tl.store(count, total)
    placed = 0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        tl.store(rows + at, at.to(tl.int64), mask=inside)
        gap = inside & (at < total) & (tl.load(keep + at, mask=inside, other=1) == 0)
        rank = placed + tl.cumsum(gap.to(tl.int32), 0) - 1
        tl.store(gaps + rank, at, mask=gap)
        placed += tl.sum(gap.to(tl.int32), 0)
    tl.debug_barrier()  # the gaps are read by other threads than wrote them
    placed = 0
    for start in range(total, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mover = tl.load(keep + at, mask=at < n, other=0) != 0
        rank = placed + tl.cumsum(mover.to(tl.int32), 0) - 1
        place = tl.load(gaps + rank, mask=mover, other=0)
        tl.store(rows + place, at.to(tl.int64), mask=mover)
        placed += tl.sum(mover.to(tl.int32), 0)


launch_order = Launcher(order_kernel, num_warps=8)


def dense_order(keep: Tensor, most: int) -> Order:
    n = len(keep)
    rows = torch.empty(n, dtype=torch.int64, device=keep.device)
    gaps = torch.empty(n, dtype=torch.int32, device=keep.device)
    count = torch.empty(1, dtype=torch.int64, device=keep.device)
    launch_order(1, keep, rows, gaps, count, n, most, BLOCK=BLOCK)
    return Order(rows, count)


class Moves(NamedTuple):
    """Rows of x, times a number of their own or one for all, to rows of out; the first n where
    nothing is said."""

    x: Matrix
    out: Matrix
    scale: Tensor | None  # [n]
    factor: Tensor | None  # []; where it is 1 nothing is done
    source: Tensor | None
    places: Tensor | None


@triton.jit(do_not_specialize=["n"])
def rows_kernel(of, n, h, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    factor = 1.0
    if of.factor is not None:
        factor = tl.load(of.factor).to(tl.float32)
        n = tl.where(factor == 1, 0, n)
    for row in range(tl.program_id(0).to(tl.int64), n, tl.num_programs(0)):
        read, write = row, row
        if of.source is not None:
            read = tl.multiple_of(tl.load(of.source + row), ALIGNED)
        if of.places is not None:
            write = tl.multiple_of(tl.load(of.places + row), ALIGNED)
        if of.scale is not None:
            factor = tl.load(of.scale + row)
        x, out = of.x.data + read * of.x.stride, of.out.data + write * of.out.stride
        for start in range(0, h, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < h, other=0.0).to(tl.float32) * factor
            tl.store(out + at, value.to(out.dtype.element_ty), mask=at < h)


launch_rows = Launcher(rows_kernel, num_warps=8)


def scale_rows_(rows: Rows, factor: Tensor) -> None:
    # Whether it is 1, where nothing is read, the device alone knows: then few programs find it out.
    x, n, aligned = Matrix(rows.tensor, 1), len(rows.offsets), 16 if rows.aligned else 1
    if n:
        of = Moves(x, x, None, factor, rows.offsets, rows.offsets)
        programs = min(n, PROGRAMS * programs_on(x.data.device))
        launch_rows(programs, of, n, rows.tensor.shape[-1], ALIGNED=aligned, BLOCK=WIDEST)


def scaled_rows(
    x: Tensor, scale: Tensor, *, out: Tensor | None = None, places: Tensor | None = None
) -> Tensor:
    n = len(scale)
    out = x.new_empty(n, x.shape[1]) if out is None else out
    read, write = Matrix(x, x.stride(0)), Matrix(out, out.stride(0))
    if n and x.shape[1]:
        of = Moves(read, write, scale, None, None, places)
        launch_rows(n, of, n, x.shape[1], ALIGNED=1, BLOCK=BLOCK)
    return out


class Cast(NamedTuple):
    """A sum on its way to a gradient."""

    value: Tensor
    out: Tensor
    n: int  # 1; 0: nothing is to be done
    width: int
    times: tl.constexpr  # it is multiplied by the factor
    in_place: tl.constexpr


@triton.jit
def scaled_blocks(of, factor, BLOCK: tl.constexpr):
    """Every `programs`-th block of a tensor; nothing where nothing changes."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    n, number = of.n, 1.0
    if of.times:
        number = tl.load(factor).to(tl.float32)
    if of.in_place:
        n = tl.where(number == 1, 0, n)
    blocks = tl.cdiv(of.width, BLOCK)
    for block in range(program, n * blocks, programs):
        row = block // blocks
        at = (block - row * blocks) * BLOCK + tl.arange(0, BLOCK)
        place = row * of.width + at
        x = tl.load(of.value + place, mask=at < of.width, other=0.0).to(tl.float32)
        tl.store(of.out + place, (x * number).to(of.out.dtype.element_ty), mask=at < of.width)


@triton.jit
def scaled_kernel(
    factor,  # []
    a,  # Cast, as the next two
    b, c, BLOCK: tl.constexpr,
):
    scaled_blocks(a, factor, BLOCK)
    scaled_blocks(b, factor, BLOCK)
    scaled_blocks(c, factor, BLOCK)


launch_scaled = Launcher(scaled_kernel, num_warps=8)


def scaled(values: Sequence[Scaling], factor: Tensor | None) -> list[Tensor]:
    results, work, programs = [], [], 1
    for value, dtype, multiply in values:
        multiply, size = multiply and factor is not None, value.numel()
        changes = value.dtype != dtype
        out = torch.empty_like(value, dtype=dtype) if changes else value
        results.append(out)
        if size and (changes or multiply):
            work.append(Cast(value, out, 1, size, *map(tl.constexpr, (multiply, not changes))))
            programs = min(MOST, max(programs, cdiv(size, WIDEST)))
    for start in range(0, len(work), AT_ONCE):
        some = work[start : start + AT_ONCE]
        value, out, _, *others = some[0]
        some += [Cast(value, out, 0, *others)] * (AT_ONCE - len(some))
        launch_scaled(programs, some[0].value if factor is None else factor, *some, BLOCK=WIDEST)
    return results
