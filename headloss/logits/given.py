"""Logits that are an input of the call (not computed from hidden states), and the destination of
their gradient.

N positions, T tokens, V vocabulary; n tokens and v columns of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch.packing import Packing
from ..head import products
from ..kernels.interface import Kernels, LogitRows, Measured, Sum, Walk
from ..objective.weighted import Coefficients
from ..statistics.softmax import Normalizer, SoftmaxState
from .linear import LogitSource, RowContext
from .rows import ALL, Gradients, LogitGradient, Rows, Tensors


class View:
    """Access to the caller's logits [.., V], in any float dtype and layout, by the index of a
    packed token. `index` [T] is each token's position; None: all N positions in order."""

    def __init__(self, logits: Tensor, index: Tensor | None) -> None:
        self.logits = logits
        self.index = index
        try:
            self.tensor = logits.view(-1, logits.shape[-1])
        except RuntimeError:  # The logits' strides allow no view as a matrix.
            self.tensor = logits

    def take(self, index: Tensor) -> View:
        """Return a view restricted to the tokens `index`."""
        return View(self.logits, index if self.index is None else self.index[index])

    def place(self, rows: Rows) -> tuple[Tensor | slice, ...]:
        """Return an index into `tensor` that selects the tokens `rows`: a slice if the tokens' rows
        are consecutive, else one index vector per dimension."""
        if self.index is None and self.tensor.dim() == 2:
            return (rows,)
        return self.coordinates(rows)

    def coordinates(self, rows: Rows = ALL) -> tuple[Tensor, ...]:
        """Return index vectors, one per leading dimension of `tensor`, that select the tokens
        `rows`."""
        positions = self.index
        inner = list[Tensor]()
        if positions is None:
            positions = torch.arange(self.tensor.shape[:-1].numel(), device=self.logits.device)
        positions = positions[rows]
        for size in reversed(self.tensor.shape[1:-1]):
            inner.insert(0, positions % size)
            positions = positions // size
        return positions, *inner

    def read(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        """Return logits [n, v] as the caller passed them in, without a copy where rows are
        consecutive."""
        return self.tensor[(*self.place(rows), columns)]

    def write(self, rows: Rows, columns: slice, values: Tensor | float) -> None:
        """Write `values` [n, v] to the logits of the tokens `rows` in `columns`."""
        self.tensor[(*self.place(rows), columns)] = values

    def rows(self) -> LogitRows:
        """Return the logits and the offset of each token's row, as a kernel needs them."""
        strides = self.tensor.stride()[:-1]
        offsets: Any = sum(at * s for at, s in zip(self.coordinates(), strides, strict=True))
        return LogitRows(self.logits.detach(), offsets, all(s % 16 == 0 for s in strides))


class GivenLogits(LogitSource):
    """`LogitSource` for logits that the caller passed in: copies the logits tile by tile, for any
    backend and teacher. The gradient of the logits is written to a new tensor or, with
    `overwrites`, over the caller's logits. `order`, a `Packing`, is the order of tokens."""

    def __init__(
        self, tensors: Tensors, context: RowContext, *, order: Packing, overwrites: bool
    ) -> None:
        super().__init__(context)
        (logits,) = tensors  # Shape [.., V].
        assert logits is not None
        self.view = View(logits, order.index)
        self.order = order
        self.overwrites = overwrites
        self.dtype = products.sum_dtype(logits.dtype)

    def raw(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        return self.view.read(rows, columns).to(self.dtype, copy=True)

    def room(self) -> View:
        """Return the tensor that receives the gradient of the logits, filled with 0 at unscored
        positions."""
        total = self.view.logits if self.overwrites else torch.empty_like(self.view.logits)
        if self.order.unscored is not None:
            View(total, self.order.unscored).write(ALL, ALL, 0)
        return View(total, self.view.index)


class GivenAccumulator:
    """Accumulator of the gradient of the call's input logits, tile by tile."""

    def __init__(self, source: GivenLogits) -> None:
        self.view = source.room()
        self.live = source.order.live
        self.acts = source.acts

    def add(self, gradient: LogitGradient) -> None:
        dlogits = gradient.dlogits.to(self.view.logits.dtype)
        if self.live is not None:
            dlogits = dlogits.masked_fill(~self.live[gradient.rows].unsqueeze(1), 0)
        self.view.write(gradient.rows, gradient.columns, dlogits)

    def finish(self, factor: Tensor | None) -> Gradients:
        total = self.view.logits
        if factor is None:
            return [total]
        (scaled,) = self.acts.scaled([Sum(total.contiguous(), total.dtype)], factor)
        return [total if scaled is total else total.copy_(scaled)]


class WrittenGradient(NamedTuple):
    """Gradient of the call's input logits, written by a kernel."""

    out: LogitRows
    acts: Kernels

    def finish(self, factor: Tensor | None) -> Gradients:
        if factor is not None:
            self.acts.scale_rows_(self.out, factor)
        return [self.out.tensor]


class InPlaceLogits(GivenLogits):
    """Logits passed in by the caller, which kernels read in place. `measure` reads all logits once
    for the statistics, and `gradient` reads all logits once more and writes their gradient."""

    def measure(self) -> Measured:
        """Return the statistics of all tokens."""
        return self.completed(ALL, self.context.measured(self._walk(self.context.needs)))

    def gradient(self, coefficients: Coefficients, normalizer: Normalizer) -> WrittenGradient:
        """Return the gradient of the logits for the given `coefficients`, by one kernel launch over
        all logits."""
        out = self._out()
        self._walk(None, out, coefficients, None, normalizer)
        return WrittenGradient(out, self.acts)

    def both(
        self, coefficients: Coefficients, slopes: Tensor | None
    ) -> tuple[Measured, WrittenGradient]:
        """Return statistics and gradient from one launch. The argument `coefficients` holds
        gradient coefficients computed as if each token's entropy were 0; the kernel adds the part
        that depends on the entropy. `slopes` [P, 5, T] holds P closed-form derivatives of the loss
        at each of T tokens; the five numbers of a derivative are the fields of a `Slope`."""
        out = self._out()
        partials = self._walk(self.context.needs, out, coefficients, slopes)
        return self.context.measured(partials), WrittenGradient(out, self.acts)

    def _out(self) -> LogitRows:
        """Return the tensor that receives the gradient, with the offsets of its rows, for a
        kernel."""
        view = self.room()
        if self.overwrites:
            # Autograd does not see a kernel's writes.
            torch.autograd.graph.increment_version(view.logits)
        return view.rows()

    def _walk(
        self,
        needs: frozenset[str] | None,
        out: LogitRows | None = None,
        coefficients: Coefficients | None = None,
        slopes: Tensor | None = None,
        normalizer: Normalizer | None = None,
    ) -> SoftmaxState | None:
        """Launch one kernel over all logits. The kernel computes statistics if `needs` is not None,
        and writes the gradient of the logits to `out` if `out` is not None."""
        tokens = self.context.targets, self.context.shard.first, self.context.transform, needs
        softmax = None if coefficients is None else coefficients.softmax
        walk = (self.view.rows(), out, self.order.live, *tokens, softmax, slopes, normalizer)
        return self.acts.given_rows(Walk(*walk))
