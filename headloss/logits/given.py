"""Logits that exist already, and the place of their gradient.

N positions, T tokens, V vocabulary; n tokens and v columns of a tile. `GivenLogits` copies a tile
at a time, for any backend and teacher. `InPlaceLogits` copies none: a kernel walks along each row
for its statistics, and once more for its gradient, which it writes into the logits' memory or a
new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..head import products
from ..kernels import interface as kernels
from .linear import LogitSource, RowContext
from .rows import ALL, BackwardInputs, LogitGradient, Rows


class View:
    """[.., V] logits in any float dtype and layout, by packed token; `index` [T] is the position of
    each, None: all N in order."""

    def __init__(self, logits: Tensor, index: Tensor | None) -> None:
        self.logits, self.index, self.is_flat = logits, index, True
        try:
            self.tensor = logits.view(-1, logits.shape[-1])
        except RuntimeError:  # for strides that allow no flat view
            self.tensor, self.is_flat = logits, False

    def take(self, index: Tensor) -> View:
        """Some of the tokens."""
        return View(self.logits, index if self.index is None else self.index[index])

    def place(self, rows: Rows) -> tuple[Tensor | slice, ...]:
        """The index of tokens in the logits (or in their flat view, where there is one)."""
        if self.index is None and self.is_flat:
            return (rows,)
        positions = self.index
        if positions is None:
            positions = torch.arange(self.logits.shape[:-1].numel(), device=self.logits.device)
        positions = positions[rows]
        if self.is_flat:
            return (positions,)
        return torch.unravel_index(positions, self.logits.shape[:-1])

    def read(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        """[n, v] logits as they are, in their own memory where rows are consecutive."""
        return self.tensor[(*self.place(rows), columns)]

    def write(self, rows: Rows, columns: slice, values: Tensor | float) -> None:
        """Write [n, v] to some rows and columns."""
        self.tensor[(*self.place(rows), columns)] = values

    def offsets(self) -> tuple[Tensor, bool]:
        """[T] elements from the first logit to the row of each token, and whether all are multiples
        of 16."""
        sizes, strides = self.tensor.shape[:-1], self.tensor.stride()[:-1]
        aligned = all(s % 16 == 0 for s in strides)
        first, positions, device = strides[0], self.index, self.tensor.device
        if positions is None and self.is_flat and first > 0:  # one launch
            return torch.arange(0, sizes[0] * first, first, device=device), aligned
        if positions is None:
            positions = torch.arange(sizes.numel(), device=device)
        inner = []
        for size, stride in zip(reversed(sizes[1:]), reversed(strides[1:]), strict=True):
            inner.append(positions % size * stride)
            positions = positions.div(size, rounding_mode="floor")
        return sum(inner, positions * first), aligned


class GivenLogits(LogitSource):
    """Copies of given logits, a tile at a time.

    Args:
        order: of the tokens (`batch.survey`).
        overwrites: the gradient goes to the logits' memory, in place of a tensor of its own.
    """

    def __init__(
        self, tensors: Sequence[Any], context: RowContext, *, order: Any, overwrites: bool
    ) -> None:
        super().__init__(context)
        (logits,) = tensors  # [.., V]
        self.view, self.order, self.overwrites = View(logits, order.index), order, overwrites
        self.dtype = products.sum_dtype(logits.dtype)

    def raw(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        return self.view.read(rows, columns).to(self.dtype, copy=True)

    def room(self) -> View:
        """Where the gradient goes, with zeros where nothing is scored."""
        total = self.view.logits if self.overwrites else torch.empty_like(self.view.logits)
        if self.order.unscored is not None:
            View(total, self.order.unscored).write(ALL, ALL, 0)
        return View(total, self.view.index)


class GivenAccumulator:
    """The gradient of given logits, a tile at a time."""

    def __init__(self, source: GivenLogits) -> None:
        self.view, self.live, self.acts = source.room(), source.order.live, source.acts

    def add(self, gradient: LogitGradient, columns: slice = ALL) -> None:
        """Take dL/draw of some rows and columns."""
        values = gradient.values.to(self.view.logits.dtype)
        if self.live is not None:
            values = values.masked_fill(~self.live[gradient.rows].unsqueeze(1), 0)
        self.view.write(gradient.rows, columns, values)

    def finish(self, factor: Tensor | None) -> list[Tensor | None]:
        """The gradient, times `factor`."""
        total = self.view.logits
        if factor is None:
            return [total]
        scaling = kernels.Scaling(total.contiguous(), total.dtype)
        (scaled,) = self.acts.scaled([scaling], factor)
        return [total if scaled is total else total.copy_(scaled)]


class InPlaceLogits(GivenLogits):
    """Given logits that a kernel reads in place; all rows and columns at once."""

    def __init__(self, tensors: Sequence[Any], context: RowContext, **options: Any) -> None:
        super().__init__(tensors, context, **options)
        self.rows = _rows(self.view)
        self.out: Any = None

    def destination(self) -> kernels.Rows:
        """The rows of `room`."""
        view = self.room()
        if not self.overwrites:
            return _rows(view)
        torch.autograd.graph.increment_version(view.logits)  # autograd misses kernels
        return self.rows

    def walk(
        self, needs: frozenset[str] | None, gradient=None, slopes=None, normalizer=None
    ) -> Any:
        """One launch: both acts, where a gradient is known before the statistics, or one.

        Args:
            needs: statistics; None: none, `normalizer` is known.
            gradient: coefficients; with statistics, at an entropy of 0.
            slopes: [P, 5, T] in closed form.
        """
        out = coefficients = None
        if gradient is not None:
            out = self.out = self.destination()
            coefficients = gradient.softmax
        tokens = self.context.targets, self.context.shard.first, self.context.transform, needs
        walk = (self.rows, out, self.order.live, *tokens, coefficients, slopes, normalizer)
        return self.acts.given_rows(kernels.Walk(*walk))

    def partials(self, rows: slice, tiles: Sequence[slice] = (ALL,)) -> tuple[Any, None]:
        return self.walk(self.context.needs), None

    def logit_gradient(self, rows: slice, columns: slice, inputs: BackwardInputs) -> LogitGradient:
        self.walk(None, inputs.coefficients, None, inputs.measured.normalizer)
        return LogitGradient(self.out.tensor, rows)

    def add(self, gradient: LogitGradient, columns: slice = ALL) -> None:
        """Nothing to do: the walk has written it already."""

    def finish(self, factor: Tensor | None) -> list[Tensor | None]:
        """The gradient that was written, times `factor`."""
        if self.out is None:  # of no token at all
            self.out = self.destination()
        if factor is not None:
            self.acts.scale_rows_(self.out, factor)
        return [self.out.tensor]


def _rows(view: View) -> kernels.Rows:
    return kernels.Rows(view.logits.detach(), *view.offsets())
