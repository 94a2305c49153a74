"""A top-k teacher in Triton: the softmax of all tokens but the stored ones, and its gradient.

n tokens, v columns, K stored outcomes. The stored columns of a row are sorted first, so that each
block of it meets its own.
"""

from __future__ import annotations

from torch import Tensor

from ...objective.statistics import Partials
from ..interface import Backward
from ..pair import Outcomes
from ..transform import Transform
from .pair import NO_SIDE, Part, block_width, launch, softmax, stored_in
from .records import check_tile, empty_partials, matrix_of, scaling
from .statistics import launch_tail


def tail_partials(
    raw: Tensor, columns: Tensor, transform: Transform, onto: Partials | None = None
) -> Partials:
    check_tile("raw", raw)
    n, v = raw.shape
    result = empty_partials(raw, n, frozenset()) if onto is None else onto
    if n:
        stored = stored_in(columns, v)
        given = (matrix_of(raw), result, None, stored, scaling(transform), 0, v)
        options = {"BLOCK": block_width(v), "ONTO": onto is not None, "STORED": True}
        launch_tail(n, *given, **options)
    return result


def sparse_gradient_(
    raw: Tensor, outcomes: Outcomes, weight: Tensor, extra: Tensor | None = None,
    others: Backward | None = None
) -> Tensor:
    columns, tail, slope_stored, slope_tail = outcomes
    stored = stored_in(columns, raw.shape[1], slope_stored)
    extras = None if extra is None else matrix_of(extra)
    part = Part(softmax(tail), None, None, None, NO_SIDE, stored, slope_tail, weight, 0.0, extras)
    return launch(raw, part, "stored", extra, others)
