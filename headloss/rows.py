"""dL/draw of some tokens, on its way from a kernel to the products.

K of a chunk's n tokens, v columns, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

Rows = slice | Tensor  # of the packed tokens


@dataclass(frozen=True)
class RowGradient:
    """dL/draw of some rows, as the products take it: `values`, times `multiple` if it is given.

    Attributes:
        count: [1] on the device: how many of the rows carry a gradient; these come first. None once
            it was read (`settled`), or where all do.
        chunk: all of the rows, should `count` be all of them.
        features: the rows of hidden states, times `multiple` already.
        scaled_rows: the backend's.
    """

    values: Tensor  # [K, v]
    rows: Rows
    multiple: Tensor | None = None  # [K]
    features: Tensor | None = None  # [K, H]
    scaled_rows: Callable[..., Tensor] | None = None
    count: Tensor | None = None
    chunk: slice | None = None

    def part(self, start: int, stop: int | None) -> RowGradient:
        """Some of the rows."""
        cut = slice(*slice(start, stop).indices(len(self.values)))
        rows: Any = self.rows
        if isinstance(rows, slice):
            rows = slice(rows.start + cut.start, rows.start + cut.stop)
        else:
            rows = rows[cut]
        multiple, features = (None if t is None else t[cut] for t in (self.multiple, self.features))
        return replace(
            self, values=self.values[cut], rows=rows, multiple=multiple, features=features
        )

    def settled(self) -> RowGradient:
        """The rows that carry a gradient: reads the device."""
        if self.count is None:
            return self
        count = int(self.count)
        if count == len(self.values) and self.chunk is not None:
            return replace(self, rows=self.chunk, count=None)
        return replace(self.part(0, count), count=None)

    def put_(self, total: Tensor, part: Tensor, add: bool = False) -> None:
        """Write [K, H] `part`, times `multiple`, to this gradient's rows of `total`, or add it."""
        if self.multiple is None:
            _put(total, self.rows, part, add)
            return
        assert self.scaled_rows is not None and not add
        if isinstance(self.rows, slice):
            self.scaled_rows(part, self.multiple, out=total[self.rows])
        else:
            self.scaled_rows(part, self.multiple, out=total, places=self.rows, count=self.count)


def _put(total: Tensor, rows: Rows, part: Tensor, add: bool) -> None:
    """Write rows of a matrix, or add to them; an index has no row twice."""
    if isinstance(rows, Tensor):
        (total.index_add_ if add else total.index_copy_)(0, rows, part)
    elif add:
        total[rows] += part
    else:
        total[rows] = part
