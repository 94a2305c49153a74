"""What the acts on logits that exist already take.

n tokens, V vocabulary, P parts of a gradient in closed form.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..objective.statistics import Coefficients, Normalizer
from .transform import Transform


class Rows(NamedTuple):
    """The packed tokens' rows in a tensor of any layout with unit stride along the vocabulary."""

    tensor: Tensor  # [.., V]
    offsets: Tensor  # [n] int64, elements from the first
    aligned: bool  # every offset is a multiple of 16


class Walk(NamedTuple):
    """One pass over rows of logits that exist already: statistics, a gradient, or both."""

    logits: Rows
    out: Rows | None  # of the logits' dtype; may be the logits. None: no gradient
    live: Tensor | None  # [n] bool: other rows are not read, and have coefficients of 0
    targets: Tensor  # [n] int64
    first: int
    transform: Transform
    needs: frozenset[str] | None  # statistics; None: not taken, `normalizer` has them
    coefficients: Coefficients | None = None  # [n]; with `needs`: at an entropy of 0
    slopes: Tensor | None = None  # [P, 5, n], with `needs`: more of dL/dlogp, see stats.Slope
    normalizer: Normalizer | None = None  # [n]
