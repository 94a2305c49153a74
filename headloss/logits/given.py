"""Logits that exist already, and the place of their gradient.

N positions, T tokens, V vocabulary; n tokens and v columns of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..head import products
from ..kernels.interface import LogitRows, Measured, Walk
from .linear import LogitSource, RowContext
from .rows import ALL, BackwardInputs, LogitGradient, Rows


class View:
    """[.., V] logits in any float dtype and layout, by packed token; `index` [T] is the position of
    each, None: all N in order."""

    def __init__(self, logits: Tensor, index: Tensor | None) -> None:
        self.logits, self.index = logits, index
        try:
            self.tensor = logits.view(-1, logits.shape[-1])
        except RuntimeError:  # for strides that allow no flat view
            self.tensor = logits

    def take(self, index: Tensor) -> View:
        """Some of the tokens."""
        return View(self.logits, index if self.index is None else self.index[index])

    def place(self, rows: Rows) -> tuple[Tensor | slice, ...]:
        """The index of tokens in `tensor`; consecutive rows of a flat view stay a slice."""
        if self.index is None and self.tensor.dim() == 2:
            return (rows,)
        return self.coordinates(rows)

    def coordinates(self, rows: Rows = ALL) -> tuple[Tensor, ...]:
        """The index of tokens in `tensor`, a vector for each dimension."""
        positions, inner = self.index, list[Tensor]()
        if positions is None:
            positions = torch.arange(self.tensor.shape[:-1].numel(), device=self.logits.device)
        positions = positions[rows]
        for size in reversed(self.tensor.shape[1:-1]):
            inner.insert(0, positions % size)
            positions = positions // size
        return positions, *inner

    def read(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        """[n, v] logits as they are, in their own memory where rows are consecutive."""
        return self.tensor[(*self.place(rows), columns)]

    def write(self, rows: Rows, columns: slice, values: Tensor | float) -> None:
        """Write [n, v] to some rows and columns."""
        self.tensor[(*self.place(rows), columns)] = values

    def rows(self) -> LogitRows:
        """Where the row of each token begins, for kernels."""
        strides = self.tensor.stride()[:-1]
        offsets: Any = sum(at * s for at, s in zip(self.coordinates(), strides, strict=True))
        return LogitRows(self.logits.detach(), offsets, all(s % 16 == 0 for s in strides))


class GivenLogits(LogitSource):
    """Copies of given logits, a tile at a time, for any backend and teacher. Their gradient goes to
    a tensor of its own, or `overwrites` the logits; `order` is that of tokens, a `Packing`."""

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
        scaled = self.acts.scaled(total.contiguous(), total.dtype, factor)
        return [total if scaled is total else total.copy_(scaled)]


class InPlaceLogits(GivenLogits):
    """Given logits that a kernel reads where they lie: all rows and columns for the statistics, and
    once more for the gradient, which it writes: they are their own accumulator."""

    @cached_property
    def out(self) -> LogitRows:
        """The gradient's rows, those of `room`."""
        view = self.room()
        if self.overwrites:
            torch.autograd.graph.increment_version(view.logits)  # autograd misses kernels
        return view.rows()

    def walk(
        self, needs: frozenset[str] | None, gradient=None, slopes=None, normalizer=None
    ) -> Any:
        """One launch: the statistics in `needs`, the gradient of coefficients (where `normalizer`
        is known), or both: coefficients are then those at an entropy of 0, beside `slopes`
        [P, 5, T] in closed form."""
        out = coefficients = None
        if gradient is not None:
            out, coefficients = self.out, gradient.softmax
        tokens = self.context.targets, self.context.shard.first, self.context.transform, needs
        walk = (self.view.rows(), out, self.order.live, *tokens, coefficients, slopes, normalizer)
        if gradient is not None:
            del self.view  # the gradient outlives the logits
        return self.acts.given_rows(Walk(*walk))

    def statistics(self, rows: slice, tiles: Sequence[slice], keep: bool) -> tuple[Measured, Any]:
        measured = self.context.measured(self.walk(self.context.needs))
        return self.completed(rows, measured), None

    def logit_gradient(self, rows: slice, columns: slice, inputs: BackwardInputs) -> LogitGradient:
        self.walk(None, inputs.coefficients, None, inputs.measured.normalizer)
        return LogitGradient(self.out.tensor, rows)

    def add(self, gradient: LogitGradient, columns: slice = ALL) -> None:
        """Nothing to do: the walk has written it already."""

    def finish(self, factor: Tensor | None) -> list[Tensor | None]:
        """The gradient that was written, times `factor`."""
        if factor is not None:
            self.acts.scale_rows_(self.out, factor)
        return [self.out.tensor]
