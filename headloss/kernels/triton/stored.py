"""A top-k teacher in Triton: the softmax of all tokens but the stored ones, and its gradient.

n tokens, v columns, K stored outcomes. The stored columns of a row are sorted first, so that each
block of it meets its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...objective.statistics import Partials
from ..interface import Backward
from ..pair import Outcomes
from ..transform import Transform
from .formulas import per_row, transformed
from .launch import Launcher
from .pair import Part, block_width, launch, softmax, stored_in
from .records import WARPS, check_tile, empty_partials, found, matrix_of, scaling
from .statistics import begun, store_partials, with_block


@triton.jit
def tail_partials_kernel(
    raw,  # Matrix
    z,  # LogitScaling
    stored,  # Stored
    to,  # Found
    v,
    BLOCK: tl.constexpr,
    ONTO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x = raw.data + row * raw.stride
    places = stored.places + row * stored.count
    bounds = stored.bounds + row * stored.stride
    outer = per_row(z.outer, z, row)
    sums = begun(to, row, ONTO)
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        value = transformed(tl.load(x + columns, mask=inside, other=0.0), z, outer)
        bound = bounds + start // BLOCK
        for k in range(tl.load(bound), tl.load(bound + 1)):
            value = tl.where(columns == tl.load(places + k), float("-inf"), value)
        sums = with_block(sums, value, inside, to)
    store_partials(to, row, sums)


launch_tail = Launcher(tail_partials_kernel, num_warps=WARPS)


def tail_partials(
    raw: Tensor, columns: Tensor, transform: Transform, onto: Partials | None = None
) -> Partials:
    check_tile("raw", raw)
    n, v = raw.shape
    result = empty_partials(raw, n, frozenset()) if onto is None else onto
    if n:
        given = (matrix_of(raw), scaling(transform), stored_in(columns, v), found(result), v)
        options = {"BLOCK": block_width(v), "ONTO": onto is not None}
        launch_tail(n, *given, **options)
    return result


def sparse_gradient_(
    raw: Tensor,
    outcomes: Outcomes,
    weight: Tensor,
    extra: Tensor | None = None,
    others: Backward | None = None,
) -> Tensor:
    columns, tail, slope_stored, slope_tail = outcomes
    stored = stored_in(columns, raw.shape[1], slope_stored)
    extras = None if extra is None else matrix_of(extra)
    part = Part(softmax(tail), None, None, None, stored, slope_tail, weight, 0.0, extras)
    return launch(raw, part, "stored", extra, others)
