"""Rows without a gradient leave: which row goes where is found, and the rows are moved, on the
device, so that all of it is queued before the host reads how many there are.

n rows, of which `count` are kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Order
from .launch import Launcher

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


def dense_order(
    keep: Tensor,  # [n] bool
    most: int,
) -> Order:
    """Which row goes to which place, so that kept rows come first.

    A kept row below their number stays where it is, the others fill the gaps: no row is read after
    it is written, in whatever order the rows are worked on. Where more than `most` are kept,
    moving is not worth it: all stay, and all count.
    """
    n = len(keep)
    rows = torch.empty(n, dtype=torch.int64, device=keep.device)
    gaps = torch.empty(n, dtype=torch.int32, device=keep.device)
    count = torch.empty(1, dtype=torch.int64, device=keep.device)
    launch_order(1, keep, rows, gaps, count, n, most, BLOCK=BLOCK)
    return Order(rows, count)


@triton.jit
def move_rows_kernel(tile, stride, rows, count, v, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    if (row != place) & (place < tl.load(count)):
        for start in range(0, v, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < v
            value = tl.load(tile + row * stride + columns, mask=inside)
            tl.store(tile + place * stride + columns, value, mask=inside)


launch_move = Launcher(move_rows_kernel, num_warps=8)


def move_rows_(tile: Tensor, order: Order) -> None:
    """Put the rows of [n, v] in order, in the same memory."""
    if len(tile):
        n, v = tile.shape
        launch_move(n, tile, tile.stride(0), order.rows, order.count, v, BLOCK=4096)


@triton.jit
def rows_kernel(
    x,
    x_stride,
    scale,
    source,
    out,
    out_stride,
    places,
    h,
    SOURCE: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row)
    read, write = row, row
    if SOURCE:
        read = tl.load(source + row)
    if PLACES:
        write = tl.load(places + row)
    for start in range(0, h, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + read * x_stride + at, mask=at < h, other=0.0).to(tl.float32) * factor
        tl.store(out + write * out_stride + at, value.to(out.dtype.element_ty), mask=at < h)


launch_rows = Launcher(rows_kernel, num_warps=8)


def scaled_rows(
    x: Tensor,  # [.., H], any row stride
    scale: Tensor,  # [n] float32
    *,
    source: Tensor | None = None,  # [n] rows of x, default: the first n
    out: Tensor | None = None,  # [.., H], any row stride; default: new, of x's dtype
    places: Tensor | None = None,  # [n] rows of out, no row twice; default: the first n
) -> Tensor:
    """out[places] = x[source] * scale of each row, multiplied in float32 and rounded once."""
    n, h = len(scale), x.shape[1]
    out = x.new_empty(n, h) if out is None else out
    if n and h:
        launch_rows(
            n,
            *(x, x.stride(0), scale, scale if source is None else source),
            *(out, out.stride(0), scale if places is None else places, h),
            SOURCE=source is not None,
            PLACES=places is not None,
            BLOCK=2048,
        )
    return out
