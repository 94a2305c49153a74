"""Triton kernel for the likeliest column of each row and the row's softmax, in one read of a
tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...statistics.softmax import SoftmaxState
from ..transform import Transform
from . import records
from .formulas import block_partials, merged, per_row, store_partials, transformed
from .launch import Launcher
from .records import WARPS


@triton.jit
def best_kernel(raw, z, to, place, v, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = raw.data + row * raw.stride
    outer = per_row(z.outer, z, row)
    max_logit, sumexp_m1, nothing = float("-inf"), -1.0, 0.0
    best = tl.full((), 0, tl.int64)
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        value = transformed(tl.load(x + columns, mask=inside, other=0.0), z, outer)
        value = tl.where(inside, value, float("-inf"))
        block = block_partials(value, inside, False)
        first = tl.min(tl.where((value == block[0]) & inside, columns, v - 1), 0)
        best = tl.where(block[0] > max_logit, first.to(tl.int64), best)
        max_logit, sumexp_m1, nothing = merged((max_logit, sumexp_m1, nothing), block)
    tl.store(place + row, best)
    store_partials(to, row, (max_logit, sumexp_m1, nothing, nothing))


launch = Launcher(best_kernel, num_warps=WARPS)


def best(raw: Tensor, transform: Transform) -> tuple[SoftmaxState, Tensor]:
    tile = records.check_tile("raw", raw)
    n, v = raw.shape
    to = records.empty_partials(raw, n, frozenset())
    to.target.fill_(-torch.inf)
    place = torch.empty(n, dtype=torch.int64, device=raw.device)
    if n:
        launch(n, tile, records.scaling(transform), to, place, v, BLOCK=records.block_width(v))
    return to, place
