"""dL/draw of some tokens, on its way from a kernel to the products.

K of a chunk's n tokens, v columns, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Rows = slice | Tensor  # of the packed tokens


class RowGradient(NamedTuple):
    """dL/draw of some rows, as the products take it: `values`, times `multiple` if it is given.

    `features` are the rows of hidden states, times `multiple` already; `scaled_rows` is the
    backend's.
    """

    values: Tensor  # [K, v]
    rows: Rows
    multiple: Tensor | None = None  # [K]
    features: Tensor | None = None  # [K, H]
    scaled_rows: Callable[..., Tensor] | None = None

    def first(self, count: int, rows: Tensor) -> RowGradient:
        """The first `count` of these rows, which are rows[:count] of the packed tokens."""
        multiple, features = (
            None if t is None else t[:count] for t in (self.multiple, self.features)
        )
        return RowGradient(self.values[:count], rows[:count], multiple, features, self.scaled_rows)

    def whole(self, part: Tensor, chunk: slice) -> Tensor:
        """[n, H] of all rows of a chunk from [K, H] `part`, times `multiple`; 0 where there is no
        gradient. `part` may be overwritten."""
        if isinstance(self.rows, slice):
            if self.multiple is not None:
                self._replace(rows=slice(None)).put_(part, part)
            return part
        total = part.new_zeros(chunk.stop - chunk.start, part.shape[1])
        self._replace(rows=self.rows - chunk.start).put_(total, part)
        return total

    def put_(self, total: Tensor, part: Tensor, add: bool = False) -> None:
        """Write [K, H] `part`, times `multiple`, to this gradient's rows of `total`, or add it."""
        if self.multiple is None:
            _put(total, self.rows, part, add)
            return
        assert self.scaled_rows is not None and not add
        if isinstance(self.rows, slice):
            self.scaled_rows(part, self.multiple, out=total[self.rows])
        else:
            self.scaled_rows(part, self.multiple, out=total, places=self.rows)


def _put(total: Tensor, rows: Rows, part: Tensor, add: bool) -> None:
    """Write rows of a matrix, or add to them; an index has no row twice."""
    if isinstance(rows, Tensor):
        (total.index_add_ if add else total.index_copy_)(0, rows, part)
    elif add:
        total[rows] += part
    else:
        total[rows] = part
