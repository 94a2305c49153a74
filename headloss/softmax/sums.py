"""Where the gradient of a linear head's logits goes: the last two products, and their sums.

T tokens, n of a block, H hidden width, V vocabulary. `RowSums` takes blocks of tokens over all
columns: a block's hidden gradient is final, the weight gradient is summed. `SlabSums` takes slabs
of columns over all tokens: the hidden gradient is summed, each slab of the weight gradient is
written once. Sums are in float32 and scaled once, at the end.

Each addition keeps one order: the hidden gradient's product, what the ranks of a group do about it
(`Hidden`), the weight gradient's product, which hides that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.interface import Scaling
from . import products
from .linear import LinearSoftmax, Wants
from .rows import ALL, RowGradient


class Into(NamedTuple):
    """How and where to sum.

    Attributes:
        wants: which tensors need a gradient.
        accumulate_dtype: of the weight gradient over blocks.
        main_grad: float32 [V, H] that the weight gradient is added to, in place of returning it.
        direct: blocks are added to it as they come; else their sum at the end, times the factor.
            (Slabs always are.)
        once: one block holds all tokens: its product is rounded to the weight's dtype at once.
        hidden: makes what takes the gradients of features: `Hidden`, or the ranks' own.
    """

    wants: Wants
    accumulate_dtype: torch.dtype = torch.float32
    main_grad: Tensor | None = None
    direct: bool = False
    once: bool = False
    hidden: Any = None


class Hidden:
    """The gradients of features that are all on this rank: rows are final when they are added."""

    takes_products = True  # as they are, where one block is all there is

    def __init__(self, source: LinearSoftmax, wants: Wants, blocks: Sequence[slice] | None) -> None:
        self.source, self.wanted = source, wants.features
        self.blocks = None if blocks is None else iter(blocks)
        self.totals: list[Tensor | None] = [None] * len(self.wanted)
        if not self.takes_products or blocks is None or len(blocks) != 1:
            self.totals = [
                self.room(f, source.dtype if blocks is None else f.dtype) if wanted else None
                for f, wanted in zip(source.features, self.wanted, strict=True)
            ]

    def room(self, features: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums of slabs begin at 0, blocks write every row; in rows, whatever the features'
        layout."""
        made = features.new_zeros if self.blocks is None else features.new_empty
        return made(features.shape, dtype=dtype)

    def add(self, gradient: RowGradient, columns: slice) -> None:
        values, rows, multiple, room, scaled_rows, pairs, _ = gradient
        block, fixed = None if self.blocks is None else next(self.blocks), self.source.fixed
        for i, weight in enumerate(self.source.weights):
            if not self.wanted[i]:
                continue
            total, weight = self.totals[i], weight if columns is ALL else weight[columns]
            if total is None:
                features = self.source.features[i]
                if pairs is None and len(values) == len(features):
                    made = products.input_gradient(values, weight, features.dtype, fixed, room)
                    self.totals[i] = made
                    if multiple is not None:
                        scaled_rows(made, multiple, out=made)  # type: ignore[misc]
                    continue
                total = self.totals[i] = self.room(features, features.dtype)
            if pairs is not None and block is not None:
                pairs.into_hidden(total[block], weight)
            elif pairs is not None:
                pairs.add_to_hidden(total, weight)
            elif block is not None and isinstance(rows, Tensor):
                total[block] = 0  # of rows that carry no gradient
            if values.shape[0] == 0:
                continue
            if block is not None:
                made = products.input_gradient(values, weight, total.dtype, fixed, room)
                gradient.put_(total, made)
            elif isinstance(rows, slice):
                products.add_input_gradient_(total[rows], values, weight, fixed)
            else:
                made = products.input_gradient(values, weight, total.dtype, fixed)
                gradient.add_(total, made)

    def last(self) -> None:
        """Say that nothing more will be added."""

    def settle(self) -> None:
        """Wait until the gradients are whole."""
        for i, features in enumerate(self.source.features):
            if self.wanted[i] and self.totals[i] is None:  # no block had a gradient
                self.totals[i] = self.room(features, features.dtype)


class _Sums:
    """What both orders share: the weights' own totals and the end."""

    def __init__(
        self, source: LinearSoftmax, into: Into, blocks: Sequence[slice] | None
    ) -> None:
        self.source, self.into = source, into
        self.hidden: Hidden = (into.hidden or Hidden)(source, into.wants, blocks)
        wide = source.dtype
        self.sum_dtype = wide if wide == torch.float64 else into.accumulate_dtype
        self.main_grad = into.main_grad if into.wants.weights[0] else None
        self.fresh = True  # nothing was written yet
        self.bias = None
        if into.wants.bias:
            assert source.full_bias is not None
            self.bias = torch.zeros_like(source.full_bias, dtype=wide)

    def _rooms(self, dtype: torch.dtype | None, direct: bool) -> list[Tensor | None]:
        """Where weight gradients go, in a dtype (None: each one's own); with `direct`, the first
        into `main_grad` as they come."""
        found: list[Tensor | None] = []
        for weight, wanted in zip(self.source.full_weights, self.into.wants.weights, strict=True):
            if not found and self.main_grad is not None and direct:
                found.append(self.main_grad)
                continue
            total = None
            if wanted:
                total = weight.new_empty(weight.shape, dtype=dtype or weight.dtype)
                if self.source.vocabulary < weight.shape[0]:
                    total[self.source.vocabulary :] = 0
            found.append(total)
        return found

    def _add(
        self,
        gradient: RowGradient,
        columns: slice,
        totals: Sequence[Tensor | None],
        fresh: bool,
        last: bool = False,
    ) -> bool:
        """Take dL/draw of some rows and columns: dX, what the ranks do about it, then dW, which
        hides that. Alone, dX comes after dW, in the memory of scaled features. Whether there was
        any."""
        if gradient.later is not None:
            gradient = gradient.counted()
        late = self.hidden.takes_products and gradient.features is not None
        if not late:
            self.hidden.add(gradient, columns)
        if last:
            self.hidden.last()
        found = self._into_weights(gradient, columns, totals, fresh)
        if late:
            self.hidden.add(gradient, columns)
        return found

    def _into_weights(
        self, gradient: RowGradient, columns: slice, totals: Sequence[Tensor | None], fresh: bool
    ) -> bool:
        """dW and the bias's gradient of some rows and columns; whether there was any."""
        values, rows, multiple, given, _, pairs, _ = gradient
        if pairs is None and not values.shape[0]:
            return False
        own = None if self.main_grad is None else self.main_grad.data_ptr()
        for features, total in zip(self.source.features, totals, strict=True):
            if total is None:
                continue
            first = fresh and total.data_ptr() != own
            if values.shape[0]:
                x = given
                if x is None:
                    x = features if rows is ALL else features[rows]
                products.add_weight_gradient_(total, values, x, first)
                first = False
            if pairs is not None:
                pairs.into_weight(total, features, not first)
        if self.bias is not None:
            place = self.bias[: self.source.vocabulary][columns]
            if multiple is None:
                place += values.sum(0, dtype=self.bias.dtype)
            else:
                column = place.unsqueeze(1)
                products.add_weight_gradient_(column, values, multiple.unsqueeze(1))
            if pairs is not None:
                pairs.add_to_bias(place)
        return True

    def _finished(
        self, weights: list[Tensor | None], factor: Tensor | None, by_slab: bool
    ) -> list[Tensor | None]:
        """Gradients in the inputs' dtypes: features and weights pairwise, bias."""
        self.hidden.settle()
        scaled, sums = self.source.acts.scaled, []
        by_factor = not by_slab  # a slab's weight gradient has it already
        pairs = zip(self.source.features, self.source.full_weights, strict=True)
        for i, (features, weight) in enumerate(pairs):
            into, total = self.hidden.totals[i], weights[i]
            sums.append(None if into is None else Scaling(into, features.dtype))
            if total is not None and self.fresh and total is not self.main_grad:
                total.zero_()
            if total is None or total is self.main_grad:
                sums.append(None)
            elif i == 0 and self.main_grad is not None:
                own = Scaling(total, self.main_grad.dtype, by_factor)
                self.main_grad.add_(scaled([own], factor)[0])
                sums.append(None)
            else:
                sums.append(Scaling(total, weight.dtype, by_factor))
        bias = self.source.full_bias
        ours = bias is not None and self.bias is not None
        sums.append(Scaling(self.bias, bias.dtype) if ours else None)  # type: ignore[arg-type, union-attr]
        made = iter(scaled([s for s in sums if s is not None], factor))
        return [None if s is None else next(made) for s in sums]


class RowSums(_Sums):
    """Gradients that arrive in rows, one block of tokens after another, over all columns."""

    def __init__(self, source: LinearSoftmax, into: Into, blocks: Sequence[slice]) -> None:
        super().__init__(source, into, blocks)
        self.weights = self._rooms(None if into.once else self.sum_dtype, into.direct)

    def add(self, gradient: RowGradient) -> None:
        """Take dL/draw of the next block."""
        places: list[Tensor | None] = self.weights
        if any(w.shape[0] > self.source.vocabulary for w in self.source.full_weights):
            columns = slice(self.source.vocabulary)
            places = [None if total is None else total[columns] for total in self.weights]
        if self._add(gradient, ALL, places, self.fresh):
            self.fresh = False

    def finish(self, factor: Tensor | None) -> list[Tensor | None]:
        """Gradients times `factor`."""
        return self._finished(self.weights, factor, by_slab=False)


class SlabSums(_Sums):
    """Gradients that arrive in slabs of columns over all tokens: `open` a slab, `add` its rows,
    `close` it.

    The weight gradient of a slab is summed apart and rounded when it is closed; or, where one
    addition brings all its tokens (`once`), a product straight into its place.
    """

    def __init__(self, source: LinearSoftmax, into: Into, once: bool) -> None:
        super().__init__(source, into, None)
        self.weights = self._rooms(None, direct=True)
        self.at_once = once and self.main_grad is None

    def open(self, columns: slice) -> None:
        self.columns, self.empty = columns, True
        vocabulary = self.source.vocabulary
        self.places = [
            None if total is None else total[:vocabulary][columns] for total in self.weights
        ]
        self.sums: list[Any] = self.places
        if not self.at_once:
            self.sums = [
                None if place is None else torch.zeros_like(place, dtype=self.sum_dtype)
                for place in self.places
            ]

    def add(self, gradient: RowGradient, last: bool) -> None:
        """Take dL/draw of some rows of the slab; `last`: of the last slab, the last rows."""
        fresh = self.at_once and self.empty
        if self._add(gradient, self.columns, self.sums, fresh, last):
            self.empty = False

    def close(self, factor: Tensor | None) -> None:
        """Put the slab's sums, times `factor`, into their place."""
        self.fresh = False
        for place, total in zip(self.places, self.sums, strict=True):
            if place is None:
                continue
            if self.at_once:
                if self.empty:
                    place.zero_()
                continue
            if factor is not None:
                total.mul_(factor)
            if self.main_grad is not None and place is self.places[0]:
                place.add_(total)
            else:
                place.copy_(total)

    def finish(self, factor: Tensor | None) -> list[Tensor | None]:
        """Gradients; those that were summed over slabs times `factor`."""
        return self._finished(self.weights, factor, by_slab=True)

