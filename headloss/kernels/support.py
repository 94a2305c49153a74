"""The records of a support: pairs of a token and a column of its own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Support(NamedTuple):
    """The columns that the softmax of each of n tokens runs over: P pairs of a token and a column,
    of which those in a window of the vocabulary count here."""

    ids: Tensor  # [P] int64 columns of the whole vocabulary; below 0: an empty slot
    offsets: Tensor  # [n + 1] int64: token t has ids[offsets[t]:offsets[t + 1]]; the first is 0
    first: int  # the window is columns [first, first + size)
    size: int


class ByColumn(NamedTuple):
    """The pairs of a support by column, those of one column by token."""

    order: Tensor  # [P] int64 pairs
    tokens: Tensor  # [P] int64 their tokens
    starts: Tensor  # [v + 1] int64: column j of the window has order[starts[j]:starts[j + 1]]
