"""dL/draw of some tokens, as kernels write it and the last two products read it.

K of a block's n tokens, v columns, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..kernels.interface import ExpTile, Kernels, Measured, ShiftedSums, Support
from ..objective.weighted import Coefficients
from ..statistics.softmax import Normalizer, Statistics

Rows = slice | Tensor  # of a source's tokens
# The part of a block's logits that a source leaves for their gradient: the logits, exp logits,
# sums of a narrow head, or those of a support (`SupportLogits`).
SourceTile = Tensor | ExpTile | ShiftedSums | tuple[object, ...] | None
Tensors = Sequence[Tensor | None]  # of a source, in the order of its gradients
Gradients = list[Tensor | None]
ALL = slice(None)  # compared by `is`: a cut by this would be an operation


class BackwardInputs(NamedTuple):
    """The inputs of the gradient of some tokens' logits, beside these."""

    measured: Measured
    coefficients: Coefficients
    tile: SourceTile = None  # used up by the gradient
    live: Tensor | None = None  # [n] bool, where those without gradient may be left out

    def rows(self, rows: Rows) -> BackwardInputs:
        """The inputs of some of the tokens, without a tile."""
        return BackwardInputs(self.measured.rows(rows), self.coefficients.rows(rows))


class PairGradient(NamedTuple):
    """dL/draw of pairs of a token and a column, for products over pairs."""

    dlogits: Tensor  # [P]
    support: Support
    by_column: tuple[Tensor, Support]  # [P] their order, and the tokens of each column
    rows: Rows  # the tokens
    acts: Kernels

    def add_to_hidden(self, total: Tensor, weight: Tensor) -> None:
        """total [T, H] += dlogits @ weight, of these tokens."""
        if isinstance(self.rows, slice):
            self.into_hidden(total[self.rows], weight, add=True)
        else:
            part = total.new_empty(len(self.rows), total.shape[1])
            self.into_hidden(part, weight)
            total.index_add_(0, self.rows, part)  # no row twice

    def into_hidden(self, total: Tensor, weight: Tensor, add: bool = False) -> None:
        """total [n, H] = dlogits @ weight, or added to it."""
        self.acts.support_sums(self.dlogits, weight, self.support, total, add)

    def into_weight(self, total: Tensor, features: Tensor, add: bool) -> None:
        """total [v, k] = dlogits.T @ features of all tokens, or added to it."""
        order, columns = self.by_column
        x = features[self.rows]
        self.acts.support_sums(self.dlogits[order], x, columns, total, add, uneven=True)

    def add_to_bias(self, total: Tensor) -> None:
        """total [v] += the sum of dlogits."""
        one = self.dlogits.new_ones(self.by_column[1].size, 1)
        self._replace(rows=ALL).into_weight(total.unsqueeze(1), one, add=True)


class LogitGradient(NamedTuple):
    """dL/draw of some rows and columns, for the products."""

    dlogits: Tensor  # [K, v]
    rows: Rows
    columns: slice = ALL
    multiple: Tensor | None = None  # [K] of dlogits, that is still missing
    features: Tensor | None = None  # [K, H] rows of hidden states, times `multiple` already
    pairs: PairGradient | None = None  # other rows' gradients, in a few columns each

    def at(self, index: Tensor) -> LogitGradient:
        """The same rows where token i is token index[i]."""
        pairs = self.pairs and self.pairs._replace(rows=index[self.pairs.rows])
        return self._replace(rows=index[self.rows], pairs=pairs)


class GradientSums(Protocol):
    """The gradients of a source's tensors, complete but for a factor."""

    def finish(self, factor: Tensor | None) -> Gradients:
        """The gradients times `factor`, in the tensors' dtypes and order."""
        ...


class Accumulator(GradientSums, Protocol):
    """The sums of a source's gradient, a tile at a time."""

    def add(self, gradient: LogitGradient) -> None:
        """Take dL/draw of the next rows or columns."""


def of_several(make: Callable[[Any], Tensor], several: Sequence[Measured]) -> Measured:
    """Measurements of several blocks as one, each vector by `make` of the blocks' vectors."""
    stats = [m.stats for m in several]
    named = {name: make([getattr(s, name) for s in stats]) for name in stats[0].tensors()}
    beside = {key: make([s.extras[key] for s in stats]) for key in stats[0].extras}
    return Measured(
        Statistics(**named, extras=beside),  # type: ignore[arg-type]
        Normalizer(*map(make, zip(*[m.normalizer for m in several], strict=True))),
    )


def steps(total: int, step: int) -> list[slice]:
    """Consecutive slices of at most `step`."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def compact_(raw: Tensor, index: Tensor) -> Tensor:
    """Move rows to the front of the same memory; `index` ascends."""
    block = max(1, (1 << 22) // max(1, raw.shape[1]))
    for start in range(0, len(index), block):
        rows = index[start : start + block]
        raw[start : start + len(rows)] = raw[rows]  # read in full before it is written
    return raw[: len(index)]
