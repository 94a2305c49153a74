"""Types for the gradient of the raw logits, dL/draw: kernels write this gradient, and the matmuls
with the weight and with the features read it.

A block has n tokens, of which K have a gradient; v vocabulary columns, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..kernels.interface import ExpTile, Kernels, Measured, ShiftedSums, Support
from ..objective.weighted import Coefficients
from ..statistics.softmax import Normalizer, Statistics

Rows = slice | Tensor  # Selection of tokens: a slice or an index vector.
# Tensors of a block that a `LogitSource` keeps for the gradient: the logits, exponentials exp(z -
# shift) (`ExpTile`), sums over the vocabulary (`ShiftedSums`), or logits of the tokens' allowed ids
# (`SupportTile`).
SourceTile = Tensor | ExpTile | ShiftedSums | tuple[object, ...] | None
# Input tensors of a `LogitSource`, in the order of the gradients.
Tensors = Sequence[Tensor | None]
Gradients = list[Tensor | None]
# `ALL` is an index that selects all rows or all columns. Code tests `rows is ALL` and then skips
# the indexing, because indexing by `slice(None)` would still cost a PyTorch operation.
ALL = slice(None)


class BackwardInputs(NamedTuple):
    """Inputs from which the gradient with respect to the raw logits of some tokens is computed."""

    measured: Measured
    coefficients: Coefficients
    # Kept logits (or their exponentials), over which the gradient may be written.
    tile: SourceTile = None
    # Mask [n] of rows with a gradient; None: all rows may have a gradient.
    live: Tensor | None = None

    def rows(self, rows: Rows) -> BackwardInputs:
        """Return the `BackwardInputs` of the tokens `rows` only, with the default None for the
        fields `tile` and `live`."""
        return BackwardInputs(self.measured.rows(rows), self.coefficients.rows(rows))


class PairGradient(NamedTuple):
    """Gradient of the raw logits in a few columns per token, as P pairs (token, column)."""

    dlogits: Tensor  # Shape [P].
    support: Support
    # Permutation [P] that sorts the P pairs by column, and a `Support` that lists, for each column,
    # the tokens with a pair in the column.
    by_column: tuple[Tensor, Support]
    rows: Rows  # The block's tokens, as rows of a tensor [T, H].
    acts: Kernels

    def add_to_hidden(self, total: Tensor, weight: Tensor) -> None:
        """Add dlogits @ weight, the hidden gradient of the tokens, to `total` [T, H]."""
        if isinstance(self.rows, slice):
            self.into_hidden(total[self.rows], weight, add=True)
        else:
            part = total.new_empty(len(self.rows), total.shape[1])
            self.into_hidden(part, weight)
            total.index_add_(0, self.rows, part)  # No row occurs twice.

    def into_hidden(self, total: Tensor, weight: Tensor, add: bool = False) -> None:
        """Write dlogits @ weight to `total` [n, H]; with `add`, add dlogits @ weight to `total`."""
        self.acts.support_sums(self.dlogits, weight, self.support, total, add)

    def into_weight(self, total: Tensor, features: Tensor, add: bool) -> None:
        """Write dlogits.T @ features of all tokens to `total` [v, k]; with `add`, add dlogits.T @
        features to `total`."""
        order, columns = self.by_column
        x = features[self.rows]
        self.acts.support_sums(self.dlogits[order], x, columns, total, add, uneven=True)

    def add_to_bias(self, total: Tensor) -> None:
        """Add each column's sum of `dlogits` over the tokens to `total` [v]."""
        one = self.dlogits.new_ones(self.by_column[1].size, 1)
        self._replace(rows=ALL).into_weight(total.unsqueeze(1), one, add=True)


class LogitGradient(NamedTuple):
    """Gradient of the raw logits in some rows and columns, an operand of the matmuls with weight
    and features."""

    dlogits: Tensor  # Shape [K, v].
    rows: Rows
    columns: slice = ALL
    # Factors [K], one for each row of `dlogits`: row k of the logits' gradient is multiple[k] *
    # dlogits[k], or dlogits[k] if `multiple` is None.
    multiple: Tensor | None = None
    # Hidden states [K, H] of the rows, each multiplied by its entry of `multiple`.
    features: Tensor | None = None
    # Gradient of the logits of tokens with `support_ids`: nonzero only in the columns of the
    # allowed ids.
    pairs: PairGradient | None = None

    def at(self, index: Tensor) -> LogitGradient:
        """Return a copy of this `LogitGradient` in which each token number i is replaced by
        index[i]."""
        pairs = self.pairs and self.pairs._replace(rows=index[self.pairs.rows])
        return self._replace(rows=index[self.rows], pairs=pairs)


class GradientSums(Protocol):
    """Gradients of a `LogitSource`'s input tensors, before the multiplication by the upstream
    factor."""

    def finish(self, factor: Tensor | None) -> Gradients:
        """Return the gradients times `factor`, in the tensors' dtypes and order."""
        ...


class Accumulator(GradientSums, Protocol):
    """Accumulator of the gradients of a `LogitSource`'s input tensors; each `add` brings the
    gradient of one tile of logits."""

    def add(self, gradient: LogitGradient) -> None:
        """Add the gradient of one tile of raw logits to the accumulated gradients of the input
        tensors."""


def of_several(make: Callable[[Any], Tensor], several: Sequence[Measured]) -> Measured:
    """Return the measurements of several blocks as one `Measured`: `make` combines a list of
    vectors, one vector per block, to one vector."""
    stats = [m.stats for m in several]
    named = {name: make([getattr(s, name) for s in stats]) for name in stats[0].tensors()}
    beside = {key: make([s.extras[key] for s in stats]) for key in stats[0].extras}
    return Measured(
        Statistics(**named, extras=beside),  # type: ignore[arg-type]
        Normalizer(*map(make, zip(*[m.normalizer for m in several], strict=True))),
    )


def steps(total: int, step: int) -> list[slice]:
    """Return consecutive slices of length `step` (the last one may be shorter) that cover
    range(total)."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def compact_(raw: Tensor, index: Tensor) -> Tensor:
    """Move the rows `index` of `raw`, in ascending order, to the front of the memory of `raw`, and
    return these rows."""
    block = max(1, (1 << 22) // max(1, raw.shape[1]))
    for start in range(0, len(index), block):
        rows = index[start : start + block]
        # PyTorch copies raw[rows] before the assignment overwrites rows of `raw`.
        raw[start : start + len(rows)] = raw[rows]
    return raw[: len(index)]
