"""Rows without a gradient leave: which row goes where is found, and the rows are moved, on the
device, so that all of it is queued before the host reads how many there are.

n rows, of which `count` are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Order
from .launch import Launcher
from .records import Matrix, matrix_of

BLOCK = 2048  # rows that are ranked at once


@triton.jit
def order_kernel(keep, rows, gaps, count, n, most, BLOCK: tl.constexpr):
    total = 0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(keep + at, mask=at < n, other=0).to(tl.int32), 0)
    if total > most:
        total = n
    tl.store(count, total)
    found = 0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        tl.store(rows + at, at.to(tl.int64), mask=inside)
        gap = inside & (at < total) & (tl.load(keep + at, mask=inside, other=1) == 0)
        rank = found + tl.cumsum(gap.to(tl.int32), 0) - 1
        tl.store(gaps + rank, at, mask=gap)
        found += tl.sum(gap.to(tl.int32), 0)
    tl.debug_barrier()  # the gaps are read by other threads than wrote them
    found = 0
    for start in range(total, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mover = tl.load(keep + at, mask=at < n, other=0) != 0
        rank = found + tl.cumsum(mover.to(tl.int32), 0) - 1
        place = tl.load(gaps + rank, mask=mover, other=0)
        tl.store(rows + place, at.to(tl.int64), mask=mover)
        found += tl.sum(mover.to(tl.int32), 0)


launch_order = Launcher(order_kernel, num_warps=8)


def dense_order(keep: Tensor, most: int) -> Order:
    n = len(keep)
    rows = torch.empty(n, dtype=torch.int64, device=keep.device)
    gaps = torch.empty(n, dtype=torch.int32, device=keep.device)
    count = torch.empty(1, dtype=torch.int64, device=keep.device)
    launch_order(1, keep, rows, gaps, count, n, most, BLOCK=BLOCK)
    return Order(rows, count)


@triton.jit
def move_rows_kernel(tile, order, v, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(order.rows + place)
    if (row != place) & (place < tl.load(order.count)):
        for start in range(0, v, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < v
            value = tl.load(tile.data + row * tile.stride + columns, mask=inside)
            tl.store(tile.data + place * tile.stride + columns, value, mask=inside)


launch_move = Launcher(move_rows_kernel, num_warps=8)


def move_rows_(tile: Tensor, order: Order) -> None:
    if len(tile):
        launch_move(len(tile), matrix_of(tile), order, tile.shape[1], BLOCK=4096)


class Moves(NamedTuple):
    """Rows of x, times their scale, to rows of out; the first n where nothing is said."""

    x: Matrix
    out: Matrix
    scale: Tensor  # [n]
    source: Tensor | None
    places: Tensor | None


@triton.jit
def rows_kernel(of, h, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(of.scale + row)
    read, write = row, row
    if of.source is not None:
        read = tl.load(of.source + row)
    if of.places is not None:
        write = tl.load(of.places + row)
    x, out = of.x.data + read * of.x.stride, of.out.data + write * of.out.stride
    for start in range(0, h, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < h, other=0.0).to(tl.float32) * factor
        tl.store(out + at, value.to(out.dtype.element_ty), mask=at < h)


launch_rows = Launcher(rows_kernel, num_warps=8)


def scaled_rows(
    x: Tensor,
    scale: Tensor,
    *,
    source: Tensor | None = None,
    out: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    n, h = scale.shape[0], x.shape[1]
    out = x.new_empty(n, h) if out is None else out
    if n and h:
        read, write = Matrix(x, x.stride(0)), Matrix(out, out.stride(0))
        launch_rows(n, Moves(read, write, scale, source, places), h, BLOCK=2048)
    return out
