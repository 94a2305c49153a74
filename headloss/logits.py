"""Where logits come from and where their gradient goes: a linear head, or logits that exist.

N positions, T scored tokens in packed order, V vocabulary, H hidden width. Both sources give the
raw logits of a tile and take its gradient back; a schedule does not know which one it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import products

Rows = slice | Tensor  # of the packed tokens
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
    summed, each weight slab is written once. Otherwise it arrives in rows over all columns: hidden
    gradients are final, weight gradients are summed.
    """

    def __init__(
        self,
        source: LinearLogits,
        wants: Wants,
        accumulate_dtype: torch.dtype,
        by_slab: bool = False,
        main_grad: Tensor | None = None,
        direct: bool = False,
    ) -> None:
        self.source, self.wants, self.by_slab = source, wants, by_slab
        wide = source.dtype
        self.sums = wide if wide == torch.float64 else accumulate_dtype
        self.features = [
            self._zeros(f, wide if by_slab else f.dtype) if wanted else None
            for f, wanted in zip(source.features, wants.features, strict=True)
        ]
        self.main_grad = main_grad if wants.weights[0] else None
        self.weights: list[Tensor | None] = []
        for w, wanted in zip(source.full_weights, wants.weights, strict=True):
            if not self.weights and self.main_grad is not None and direct:
                self.weights.append(self.main_grad)
                continue
            dtype = w.dtype if by_slab else self.sums
            total = w.new_zeros(w.shape, dtype=dtype) if wanted else None
            self.weights.append(total)
        self.bias = None
        if wants.bias:
            assert source.full_bias is not None
            self.bias = torch.zeros_like(source.full_bias, dtype=wide)

    def add(self, gradient: Tensor, rows: Rows, columns: slice = ALL) -> None:
        """Take dL/draw [n, v] of some rows and columns."""
        self._add_to_features(gradient, rows, columns)
        if gradient.shape[0] == 0:
            return
        if not self.by_slab:
            for features, total in zip(self.source.features, self.weights, strict=True):
                if total is not None:
                    rest = total[: self.source.vocabulary]
                    products.add_weight_gradient_(rest, gradient, features[rows])
        if self.bias is not None:
            self.bias[: self.source.vocabulary][columns] += gradient.sum(0, dtype=self.bias.dtype)

    def _zeros(self, features: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums for the gradient of features."""
        return torch.zeros_like(features, dtype=dtype)

    def _add_to_features(self, gradient: Tensor, rows: Rows, columns: slice) -> None:
        if gradient.shape[0] == 0:
            return
        for i, total in enumerate(self.features):
            if total is None:
                continue
            part = products.input_gradient(gradient, self.source.weights[i][columns], total.dtype)
            if self.by_slab:
                total[rows] += part
            else:
                total[rows] = part

    def features_are_done(self) -> None:
        """With slabs: no more will be added to the gradients of features."""

    def complete(self) -> None:
        """Wait until the gradients of features are whole."""

    def slab(self, columns: slice) -> list[Tensor | None]:
        """Sums for the weight gradient of one slab of columns."""
        return [
            None
            if total is None
            else torch.zeros_like(total[: self.source.vocabulary][columns], dtype=self.sums)
            for total in self.weights
        ]

    def add_to_slab(self, slab: list[Tensor | None], gradient: Tensor, rows: Rows) -> None:
        for features, total in zip(self.source.features, slab, strict=True):
            if total is not None and gradient.shape[0]:
                products.add_weight_gradient_(total, gradient, features[rows])

    def write_slab(self, slab: list[Tensor | None], columns: slice, factor: Tensor | None) -> None:
        for total, part in zip(self.weights, slab, strict=True):
            if total is None or part is None:
                continue
            if factor is not None:
                part.mul_(factor)
            place = total[: self.source.vocabulary][columns]
            if total is self.main_grad:
                place.add_(part)
            else:
                place.copy_(part)

    def finish(self, factor: Tensor | None) -> list[Tensor | None]:
        """Gradients in the inputs' dtypes, times `factor`: features and weights pairwise, bias."""
        found: list[Tensor | None] = []
        for i, (features, weight) in enumerate(
            zip(self.source.features, self.source.full_weights, strict=True)
        ):
            found.append(_scaled(self.features[i], features.dtype, factor))
            total = self.weights[i]
            if total is not None and i == 0 and self.main_grad is not None:
                if total is not self.main_grad:
                    owed = _scaled(total, self.main_grad.dtype, factor)
                    assert owed is not None
                    self.main_grad.add_(owed)
                found.append(None)
            else:
                found.append(_scaled(total, weight.dtype, None if self.by_slab else factor))
        bias = self.source.full_bias
        found.append(None if bias is None else _scaled(self.bias, bias.dtype, factor))
        return found


def _scaled(value: Tensor | None, dtype: torch.dtype, factor: Tensor | None) -> Tensor | None:
    """value * factor, computed in float32 or wider and rounded to `dtype` once."""
    if value is None or factor is None:
        return None if value is None else value.to(dtype)
    if value.dtype == dtype and dtype.itemsize >= 4:
        return value.mul_(factor.to(dtype))
    # A one-element vector takes part in type promotion, where a 0-dim tensor would not: float32 it
    # is, whatever the value's own dtype.
    return torch.mul(value, factor.reshape(1).float(), out=torch.empty_like(value, dtype=dtype))


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

    def raw(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        """[n, v] logits in float32 or float64, in memory of their own."""
        tensor = self.logits if self.flat is None else self.flat
        return tensor[(*self.place(rows), columns)].to(self.dtype, copy=True)


class GivenGradients:
    """The gradient of `GivenLogits`, in a tensor of its own or in the logits' memory."""

    def __init__(self, source: GivenLogits, unscored: Tensor | None, inplace: bool) -> None:
        self.source = source
        self.total = source.logits if inplace else torch.zeros_like(source.logits)
        self.flat = _flat_view(self.total)
        if inplace and unscored is not None:
            everything = GivenLogits(self.total, unscored)
            (self.total if self.flat is None else self.flat)[everything.place(ALL)] = 0

    def add(self, gradient: Tensor, rows: Rows, columns: slice = ALL) -> None:
        """Take dL/draw [n, v] of some rows and columns."""
        target = GivenLogits(self.total, self.source.index)
        place = (*target.place(rows), columns)
        (self.total if self.flat is None else self.flat)[place] = gradient.to(self.total.dtype)

    def finish(self, factor: Tensor | None) -> list[Tensor | None]:
        if factor is not None:
            self.total.mul_(factor.reshape(1).float())  # one element: promotes, as in _scaled
        return [self.total]


def _flat_view(logits: Tensor) -> Tensor | None:
    """[N, V] in the same memory, or None where strides do not allow it."""
    try:
        return logits.view(-1, logits.shape[-1])
    except RuntimeError:
        return None
