"""Triton kernel that computes, on the GPU, a permutation of rows that puts kept rows first, so that
the CPU launches later kernels without waiting for the number of kept rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Order
from .launch import Launcher

BLOCK = 2048  # Number of rows that the kernel handles at once.


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
    # A barrier is needed between the stores to `gaps` and the loads, because a thread loads entries
    # that other threads have stored.
    tl.debug_barrier()
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
