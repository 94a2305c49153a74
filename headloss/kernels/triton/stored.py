"""A top-k teacher in Triton: the softmax of all tokens but the stored ones, and its gradient.

n tokens, v columns, K stored outcomes. The stored columns of a row are sorted first, so that each
block of it meets its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...stats import Partials
from ..interface import Backward
from ..pair import Outcomes
from ..transform import Transform
from .pair import Stored, block_width, launch
from .statistics import (
    WARPS,
    block_partials,
    check_tile,
    merged,
    multipliers,
    on_device,
    transformed,
)


@triton.jit
def tail_partials_kernel(
    raw,  # [n, v]
    raw_stride,
    v,
    inner,
    outer,
    places,  # [n, K]
    stored_count,
    bounds,  # [n, blocks + 1]
    blocks,
    peaks,  # [n]
    rests,  # [n]
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ONTO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    raw += row * raw_stride
    places += row * stored_count
    bounds += row * (blocks + 1)
    peak = tl.full((), float("-inf"), tl.float32)
    rest = tl.full((), -1.0, tl.float32)
    if ONTO:
        peak, rest = tl.load(peaks + row), tl.load(rests + row)
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        z = transformed(tl.load(raw + columns, mask=inside, other=0.0), inner, outer, SOFTCAP)
        z = tl.where(inside, z, float("-inf"))
        bound = bounds + start // BLOCK
        for k in range(tl.load(bound), tl.load(bound + 1)):
            z = tl.where(columns == tl.load(places + k), float("-inf"), z)
        block_peak, block_rest, _ = block_partials(z, inside, False)
        peak, rest, _ = merged(peak, rest, 0.0, block_peak, block_rest, 0.0)
    tl.store(peaks + row, peak)
    tl.store(rests + row, rest)


def tail_partials(
    raw: Tensor,  # [n, v], fp32, bf16 or fp16; any row stride
    columns: Tensor,  # [n, K] columns of this tile, any value outside [0, v) is not in it
    transform: Transform,  # its temperature is a number
    onto: Partials | None = None,  # updated in place
) -> Partials:
    """Partials of all tokens but the stored ones: the rest keeps digits that 1 - sum would lose."""
    check_tile("raw", raw)
    n, v = raw.shape
    result = onto
    if result is None:
        peak, rest, target = raw.new_empty(3, n, dtype=torch.float32)
        result = Partials(peak=peak, rest=rest, target=target.fill_(float("-inf")))
    if n == 0:
        return result
    block = block_width(v)
    stored = Stored.of(columns, v, block)
    inner, outer, _ = multipliers(transform, result.peak)
    with on_device(raw):
        tail_partials_kernel[(n,)](
            raw,
            raw.stride(0),
            v,
            inner,
            outer,
            stored.places,
            columns.shape[1],
            stored.bounds,
            stored.bounds.shape[1] - 1,
            result.peak,
            result.rest,
            BLOCK=block,
            SOFTCAP=transform.softcap is not None,
            ONTO=onto is not None,
            num_warps=WARPS,
        )
    return result


def sparse_gradient_(
    raw: Tensor,  # [n, v]
    outcomes: Outcomes,
    weight: Tensor,  # [n] of both; where it is 0 they may hold anything
    extra: Tensor | None = None,  # [n, v] float32, another part of d/draw
    others: Backward | None = None,
) -> Tensor:
    columns, tail, slope_stored, slope_tail = outcomes
    stored = Stored.of(columns, raw.shape[1], block_width(raw.shape[1]))
    slopes = slope_stored.gather(1, stored.order)
    return launch(
        raw,
        None,
        tail,
        tail,
        "stored",
        0.0,
        slope_tail,
        weight,
        extra,
        others,
        (stored, slopes),
    )
