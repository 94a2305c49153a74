"""Gradient dL/draw of some tokens, as kernels write it and as the products with weights and
features read it.

n tokens of a block, K of these tokens with a gradient, v columns, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..kernels.interface import ExpTile, Kernels, Measured, ShiftedSums, Support
from ..objective.weighted import Coefficients
from ..statistics.softmax import Normalizer, Statistics

Rows = slice | Tensor  # Rows of a source's tokens.
# The part of a block's logits that a source keeps for the gradient: the logits, exp logits, sums of
# a narrow head, or the logits of a support (`SupportLogits`).
SourceTile = Tensor | ExpTile | ShiftedSums | tuple[object, ...] | None
Tensors = Sequence[Tensor | None]  # Tensors of a source, in the order of its gradients.
Gradients = list[Tensor | None]
# Compare with `is` and skip the indexing: indexing by ALL would still run an operation.
ALL = slice(None)


class BackwardInputs(NamedTuple):
    """Inputs of the gradient of some tokens' logits, without the logits."""

    measured: Measured
    coefficients: Coefficients
    tile: SourceTile = None  # The gradient may overwrite the tile.
    live: Tensor | None = None  # Mask [n] of rows with a gradient; None: leave no rows out.

    def rows(self, rows: Rows) -> BackwardInputs:
        """Return the inputs of some of the tokens, without a tile."""
        return BackwardInputs(self.measured.rows(rows), self.coefficients.rows(rows))


class PairGradient(NamedTuple):
    """Gradient dL/draw of pairs of a token and a column, for products over pairs."""

    dlogits: Tensor  # Shape [P].
    support: Support
    # Order [P] of pairs by column, and the tokens of each column.
    by_column: tuple[Tensor, Support]
    rows: Rows  # The tokens' rows in [T, H] tensors.
    acts: Kernels

    def add_to_hidden(self, total: Tensor, weight: Tensor) -> None:
        """Add dlogits @ weight of these tokens to total [T, H]."""
        if isinstance(self.rows, slice):
            self.into_hidden(total[self.rows], weight, add=True)
        else:
            part = total.new_empty(len(self.rows), total.shape[1])
            self.into_hidden(part, weight)
            total.index_add_(0, self.rows, part)  # No row occurs twice.

    def into_hidden(self, total: Tensor, weight: Tensor, add: bool = False) -> None:
        """Write dlogits @ weight to total [n, H] or, with `add`, add the product to total."""
        self.acts.support_sums(self.dlogits, weight, self.support, total, add)

    def into_weight(self, total: Tensor, features: Tensor, add: bool) -> None:
        """Write dlogits.T @ features of all tokens to total [v, k] or, with `add`, add the product
        to total."""
        order, columns = self.by_column
        x = features[self.rows]
        self.acts.support_sums(self.dlogits[order], x, columns, total, add, uneven=True)

    def add_to_bias(self, total: Tensor) -> None:
        """Add the sum of dlogits over tokens to total [v]."""
        one = self.dlogits.new_ones(self.by_column[1].size, 1)
        self._replace(rows=ALL).into_weight(total.unsqueeze(1), one, add=True)


class LogitGradient(NamedTuple):
    """Gradient dL/draw of some rows and columns, for the products."""

    dlogits: Tensor  # Shape [K, v].
    rows: Rows
    columns: slice = ALL
    # Factors [K] by which the rows of `dlogits` must still be multiplied.
    multiple: Tensor | None = None
    features: Tensor | None = None  # Hidden states [K, H], already multiplied by `multiple`.
    pairs: PairGradient | None = None  # Gradients of further rows, in a few columns each.

    def at(self, index: Tensor) -> LogitGradient:
        """Return the gradient for tokens renumbered from i to index[i]."""
        pairs = self.pairs and self.pairs._replace(rows=index[self.pairs.rows])
        return self._replace(rows=index[self.rows], pairs=pairs)


class GradientSums(Protocol):
    """Gradients of a source's tensors, complete but for a factor."""

    def finish(self, factor: Tensor | None) -> Gradients:
        """Return the gradients times `factor`, in the tensors' dtypes and order."""
        ...


class Accumulator(GradientSums, Protocol):
    """Sums of a source's gradient, a tile at a time."""

    def add(self, gradient: LogitGradient) -> None:
        """Add dL/draw of the next rows or columns."""


def of_several(make: Callable[[Any], Tensor], several: Sequence[Measured]) -> Measured:
    """Return measurements of several blocks as one record: `make` combines a list of vectors, one
    vector per block, to a vector."""
    stats = [m.stats for m in several]
    named = {name: make([getattr(s, name) for s in stats]) for name in stats[0].tensors()}
    beside = {key: make([s.extras[key] for s in stats]) for key in stats[0].extras}
    return Measured(
        Statistics(**named, extras=beside),  # type: ignore[arg-type]
        Normalizer(*map(make, zip(*[m.normalizer for m in several], strict=True))),
    )


def steps(total: int, step: int) -> list[slice]:
    """Return consecutive slices of at most `step` numbers that cover `total`."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def compact_(raw: Tensor, index: Tensor) -> Tensor:
    """Return rows of `raw`, moved to the front of the same memory; `index` ascends."""
    block = max(1, (1 << 22) // max(1, raw.shape[1]))
    for start in range(0, len(index), block):
        rows = index[start : start + block]
        raw[start : start + len(rows)] = raw[rows]  # PyTorch reads the rows in full before writing.
    return raw[: len(index)]
