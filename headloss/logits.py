"""Where logits come from and where their gradient goes: a linear head, or logits that exist.

N positions, T scored tokens in packed order, V vocabulary, H hidden width. Both sources give the
raw logits of a tile and take its gradient back; a schedule does not know which one it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from . import products
from .kernels.interface import Scaling
from .rows import RowGradient, Rows

Scaled = Callable[[Sequence[Scaling], Tensor | None], list[Tensor]]  # a backend's `scaled`
ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Wants:
    """Which of a source's tensors need a gradient, in the source's own order."""

    features: tuple[bool, ...] = ()
    weights: tuple[bool, ...] = ()
    bias: bool = False
    logits: bool = False

    @property
    def any_weight(self) -> bool:
        return any(self.weights) or self.bias

    @property
    def any(self) -> bool:
        return any(self.features) or self.any_weight or self.logits


NO_GRADIENT = Wants()


class LinearLogits:
    """Raw logits = sum_i features_i @ weight_i.T + bias: the head, then one pair per adapter.

    Args:
        features: each [T, H_i].
        weights: each [V', H_i] with V' >= V; rows beyond V are padding and never scored.
        bias: [V'] or None.
        vocabulary: V.
        compute_dtype: what products run in where it is not the tensors' own (autocast).
        logits_dtype: what logits are rounded to, if anything.
    """

    def __init__(
        self,
        features: Sequence[Tensor],
        weights: Sequence[Tensor],
        bias: Tensor | None,
        vocabulary: int,
        compute_dtype: torch.dtype | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        self.logits_dtype = logits_dtype
        self.features = list(features)
        self.full_weights = list(weights)
        self.full_bias = bias
        self.vocabulary = vocabulary
        self.weights = [w[:vocabulary] for w in weights]
        self.bias = None if bias is None else bias[:vocabulary]
        if compute_dtype is not None:
            self.weights = [w.to(compute_dtype) for w in self.weights]
        self.dtype = products.sum_dtype(self.features[0].dtype)

    def rows(self, index: Tensor) -> LinearLogits:
        """The same head on some of the tokens, gathered."""
        found = copy(self)
        found.features = [features[index] for features in self.features]
        return found

    def raw(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        """[n, v] raw logits in float32 or float64, in memory of their own."""
        out = None
        for features, weight in zip(self.features, self.weights, strict=True):
            out = products.logits(features[rows], weight[columns], out)
        assert out is not None
        if self.bias is not None:
            out += self.bias[columns]
        return out if self.logits_dtype is None else out.to(self.logits_dtype).to(self.dtype)


class LinearGradients:
    """Gradients of a `LinearLogits`: summed in float32, and scaled once at the end.

    With `by_slab` the gradient arrives in slabs of columns over all tokens: hidden gradients are
    summed, each weight slab is written once. Otherwise it arrives in rows over all columns, one of
    `chunks` after another: hidden gradients are final, weight gradients are summed.
    """

    def __init__(
        self,
        chunks: Iterable[slice],
        source: LinearLogits,
        wants: Wants,
        accumulate_dtype: torch.dtype,
        by_slab: bool = False,
        main_grad: Tensor | None = None,
        direct: bool = False,
    ) -> None:
        self.chunks = iter(chunks)
        self.source, self.wants, self.by_slab = source, wants, by_slab
        wide = source.dtype
        self.sums = wide if wide == torch.float64 else accumulate_dtype
        self.features = [
            self._room(f, wide if by_slab else f.dtype) if wanted else None
            for f, wanted in zip(source.features, wants.features, strict=True)
        ]
        self.main_grad = main_grad if wants.weights[0] else None
        self.weights: list[Tensor | None] = []
        for w, wanted in zip(source.full_weights, wants.weights, strict=True):
            if not self.weights and self.main_grad is not None and direct:
                self.weights.append(self.main_grad)
                continue
            total = None
            if wanted:
                total = w.new_empty(w.shape, dtype=w.dtype if by_slab else self.sums)
                if source.vocabulary < len(w):
                    total[source.vocabulary :] = 0
            self.weights.append(total)
        self.fresh = True  # nothing was written yet
        self.bias = None
        if wants.bias:
            assert source.full_bias is not None
            self.bias = torch.zeros_like(source.full_bias, dtype=wide)

    def add(self, gradient: RowGradient, columns: slice = ALL) -> None:
        """Take dL/draw of some rows and columns."""
        self._add_to_features(gradient, columns)
        values = gradient.values
        if len(values) == 0:
            return
        if not self.by_slab:
            places = [
                None if total is None else total[: self.source.vocabulary] for total in self.weights
            ]
            self.add_weights(places, gradient, self.fresh)
            self.fresh = False
        if self.bias is not None:
            assert gradient.multiple is None
            self.bias[: self.source.vocabulary][columns] += values.sum(0, dtype=self.bias.dtype)

    def _room(self, features: Tensor, dtype: torch.dtype) -> Tensor:
        """For the gradient of features: sums of slabs begin at 0, chunks write every row."""
        made = features.new_zeros if self.by_slab else features.new_empty
        return made(features.shape, dtype=dtype)  # in rows, whatever the layout of features

    def _add_to_features(self, gradient: RowGradient, columns: slice) -> None:
        values, rows = gradient.values, gradient.rows
        chunk = None if self.by_slab else next(self.chunks)
        for total in self.features:
            if total is not None and chunk is not None and isinstance(rows, Tensor):
                total[chunk] = 0  # of rows that carry no gradient
        if len(values) == 0:
            return
        for weight, total in zip(self.source.weights, self.features, strict=True):
            if total is None:
                continue
            if self.by_slab and isinstance(rows, slice):
                products.add_input_gradient_(total[rows], values, weight[columns])
                continue
            part = products.input_gradient(values, weight[columns], total.dtype)
            gradient.put_(total, part, add=self.by_slab)

    def features_are_done(self) -> None:
        """With slabs: no more will be added to the gradients of features."""

    def complete(self) -> None:
        """Wait until the gradients of features are whole."""

    def add_weights(
        self, totals: Sequence[Tensor | None], gradient: RowGradient, fresh: bool
    ) -> None:
        for features, total in zip(self.source.features, totals, strict=True):
            if total is not None:
                x = gradient.features
                x = features[gradient.rows] if x is None else x
                first = fresh and total.data_ptr() != _pointer(self.main_grad)
                products.add_weight_gradient_(total, gradient.values, x, first)

    def slab(self, columns: slice, at_once: bool) -> Slab:
        """Sums for the weight gradient of one slab of columns; see `Slab`."""
        return Slab(self, columns, at_once and self.main_grad is None)

    def finish(self, factor: Tensor | None, scaled: Scaled) -> list[Tensor | None]:
        """Gradients in the inputs' dtypes, times `factor`: features and weights pairwise, bias."""
        sums: list[Scaling | None] = []
        by_factor = not self.by_slab  # a slab's weight gradient has it already
        for i, (features, weight) in enumerate(
            zip(self.source.features, self.source.full_weights, strict=True)
        ):
            into, total = self.features[i], self.weights[i]
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
        wanted = bias is not None and self.bias is not None
        sums.append(Scaling(self.bias, bias.dtype) if wanted else None)  # type: ignore[arg-type, union-attr]
        made = iter(scaled([s for s in sums if s is not None], factor))
        return [None if s is None else next(made) for s in sums]


class Slab:
    """The weight gradient of a slab of columns: summed apart, and rounded when it is written; or,
    where all its tokens come `at_once`, a product straight into its place."""

    def __init__(self, gradients: LinearGradients, columns: slice, at_once: bool) -> None:
        self.gradients, self.at_once = gradients, at_once
        vocabulary = gradients.source.vocabulary
        self.places = [
            None if total is None else total[:vocabulary][columns] for total in gradients.weights
        ]
        self.sums = self.places
        if not at_once:
            self.sums = [
                None if place is None else torch.zeros_like(place, dtype=gradients.sums)
                for place in self.places
            ]
        self.empty = at_once

    def add(self, gradient: RowGradient) -> None:
        if len(gradient.values):
            self.gradients.add_weights(self.sums, gradient, fresh=self.empty)
            self.empty = False

    def write(self, factor: Tensor | None) -> None:
        """Put the sums, times `factor`, into their place."""
        self.gradients.fresh = False
        for place, total in zip(self.places, self.sums, strict=True):
            if place is None or total is None:
                continue
            if self.at_once:
                if self.empty:
                    place.zero_()
                continue
            if factor is not None:
                total.mul_(factor)
            if self.gradients.main_grad is not None and place is self.places[0]:
                place.add_(total)
            else:
                place.copy_(total)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class GivenLogits:
    """Raw logits that exist already, [.., V] in any float dtype and layout.

    Args:
        logits: [.., V].
        index: [T] position of each packed token, None for all N positions in order.
    """

    def __init__(self, logits: Tensor, index: Tensor | None) -> None:
        self.logits = logits
        self.vocabulary = logits.shape[-1]
        self.index = index
        self.dtype = products.sum_dtype(logits.dtype)
        self.flat = _flat_view(logits)

    def place(self, rows: Rows) -> tuple[Tensor | slice, ...]:
        """The index of packed rows in the logits (or in their flat view, where there is one)."""
        if self.index is None and self.flat is not None:
            return (rows,)
        positions = self.index
        if positions is None:
            positions = torch.arange(self.logits.shape[:-1].numel(), device=self.logits.device)
        positions = positions[rows]
        if self.flat is not None:
            return (positions,)
        return torch.unravel_index(positions, self.logits.shape[:-1])

    def view(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        """[n, v] logits as they are, in their own memory where rows are consecutive."""
        tensor = self.logits if self.flat is None else self.flat
        return tensor[(*self.place(rows), columns)]

    def offsets(self, of: Tensor) -> tuple[Tensor, bool]:
        """[T] elements from the first to the row of each packed token in a tensor of the logits'
        shape, and whether all are multiples of 16."""
        flat = _flat_view(of)
        tensor = of if flat is None else flat
        sizes, strides = tensor.shape[:-1], tensor.stride()[:-1]
        aligned = all(s % 16 == 0 for s in strides)
        first, positions = strides[0], self.index
        if positions is None and flat is not None and first > 0:  # one launch
            return torch.arange(0, sizes[0] * first, first, device=of.device), aligned
        if positions is None:
            positions = torch.arange(sizes.numel(), device=of.device)
        inner = []
        for size, stride in zip(reversed(sizes[1:]), reversed(strides[1:]), strict=True):
            inner.append(positions % size * stride)
            positions = positions.div(size, rounding_mode="floor")
        return sum(inner, positions * first), aligned

    def raw(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        """[n, v] logits in float32 or float64, in memory of their own."""
        return self.view(rows, columns).to(self.dtype, copy=True)


class GivenGradients:
    """The gradient of `GivenLogits`, in a tensor of its own or in the logits' memory.

    `live` [T] bool marks the scored tokens where static shapes keep the others, which get 0.
    """

    def __init__(
        self,
        source: GivenLogits,
        unscored: Tensor | None,
        inplace: bool,
        live: Tensor | None = None,
    ) -> None:
        self.source, self.live = source, live
        self.total = source.logits if inplace else torch.empty_like(source.logits)
        self.flat = _flat_view(self.total)
        if unscored is not None:
            everything = GivenLogits(self.total, unscored)
            (self.total if self.flat is None else self.flat)[everything.place(ALL)] = 0

    def add(self, gradient: RowGradient, columns: slice = ALL) -> None:
        """Take dL/draw of some rows and columns."""
        target = GivenLogits(self.total, self.source.index)
        place = (*target.place(gradient.rows), columns)
        values = gradient.values.to(self.total.dtype)
        if self.live is not None:
            values = values.masked_fill(~self.live[gradient.rows].unsqueeze(1), 0)
        (self.total if self.flat is None else self.flat)[place] = values

    def finish(self, factor: Tensor | None, scaled: Scaled) -> list[Tensor | None]:
        """The gradient, times `factor`."""
        return list(scaled([Scaling(self.total, self.total.dtype)], factor))


def _flat_view(logits: Tensor) -> Tensor | None:
    """[N, V] in the same memory, or None where strides do not allow it."""
    try:
        return logits.view(-1, logits.shape[-1])
    except RuntimeError:
        return None
