"""Logits of a linear head: raw = sum_i features_i @ weight_i.T + bias.

T tokens, H hidden width, V vocabulary; n tokens and v columns of a tile. `LinearSoftmax` holds raw
logits between its two acts and serves every backend, dtype, adapter and teacher. `ExpSoftmax` holds
softmax terms in 16 bits, which the product writes in place of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.held import is_multiple
from ..kernels.interface import Backward, Forward, Held, Kernels, Measured
from ..kernels.pair import Chosen
from ..kernels.transform import Transform
from ..objective.bound import Gradient
from ..objective.statistics import PEAK, Coefficients, Normalizer, Partials
from . import products
from .rows import ALL, RowGradient, Rows, compact_

MOST = 15 / 16  # rows of a GPU: to leave out fewer costs more than it saves


class Wants(NamedTuple):
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


class Tokens(NamedTuple):
    """What a softmax needs to know of its tokens, in addition to their logits."""

    targets: Tensor  # [T] columns of the whole vocabulary
    transform: Transform  # its temperature is a number or [T]
    needs: frozenset[str]  # statistics

    def rows(self, rows: Rows) -> Tokens:
        """Of some of the tokens."""
        return Tokens(self.targets[rows], self.transform.rows(rows), self.needs)

    def forward(self, rows: Rows, first: int) -> Forward:
        """Arguments of act one beside the logits of a tile that starts at column `first`."""
        return Forward(self._targets(rows), first, self.transform.rows(rows), self.needs)

    def backward(
        self, rows: Rows, first: int, measured: Measured, gradient: Gradient
    ) -> Backward:
        """Arguments of act two, in addition to the logits of a tile."""
        given = self._targets(rows), first, self.transform.rows(rows), measured.normalizer
        return Backward(*given, gradient.coefficients, measured.stats.logp)

    def _targets(self, rows: Rows) -> Tensor:
        return self.targets if rows is ALL else self.targets[rows]


def rows_left(live: Tensor) -> Tensor | None:
    """[K] the rows that carry a gradient, ascending, from [n] bool; None where it does not pay to
    leave the others out (their coefficients are 0). Reads the device."""
    index = live.nonzero().squeeze(1)
    most = MOST if live.is_cuda else 1
    return None if len(index) >= most * len(live) else index


class RawSoftmax:
    """Both acts over raw logits in float32 or float64; a subclass says where these come from.

    Attributes:
        acts: the backend's.
        first: column of the whole vocabulary at which this slice starts.
        vocabulary: columns of this slice.
        dtype: of statistics and of raw logits.
        teachers: whose divergences are measured beside the student's logits.
        beside: what else is measured of the tiles (`beside.Candidates`, `beside.Collision`).
    """

    acts: Kernels
    tokens: Tokens
    first: int = 0
    vocabulary: int
    dtype: torch.dtype
    gradient_dtype: torch.dtype | None = None  # of dL/draw on a GPU; None: as the logits
    teachers: tuple[Any, ...] = ()
    beside: tuple[Any, ...] = ()
    additions: int = 1  # in which the weight gradient of a block of tokens comes

    def __len__(self) -> int:
        return self.tokens.targets.shape[0]

    def raw(self, rows: Rows, columns: slice = ALL) -> Tensor:
        """[n, v] raw logits in memory of their own."""
        raise NotImplementedError

    def partials(
        self, rows: slice, columns: slice = ALL, onto: Partials | None = None, keep: bool = False
    ) -> tuple[Partials, Tensor | None]:
        """Act one on a tile: its partial statistics, merged with those of the tiles before it; and,
        with `keep`, what act two will find of its logits."""
        raw = self.raw(rows, columns)
        forward = self.tokens.forward(rows, self.first + (columns.start or 0))
        for other in self.beside:
            other.add(rows, columns, raw)
        return self.acts.partials(raw, forward, onto), raw if keep else None

    def statistics(
        self, rows: slice, tiles: Sequence[slice], slices: Any, vocabulary: int, keep: bool
    ) -> tuple[Measured, Any]:
        """Act one over the whole vocabulary: what it says of some tokens; and, with `keep`, what
        act two will find of their logits, which are then one tile.

        Args:
            slices: of the vocabulary on the ranks of a group.
            vocabulary: of the whole model.
        """
        partials = held = None
        for columns in tiles:
            partials, held = self.partials(rows, columns, partials, keep)
        needs = self.tokens.needs
        measured: Measured = slices.measured(self.acts, partials, needs, vocabulary)
        self.measure_beside(rows, measured)
        if self.teachers:
            found = self.divergences(rows, tiles, measured.normalizer, held)
            measured.stats.divergences.update(found)
        return measured, held

    def measure_beside(self, rows: slice, measured: Measured) -> None:
        """Finish what was measured in addition to the statistics."""
        if PEAK in self.tokens.needs:
            measured.stats.divergences[PEAK] = measured.normalizer.peak.clone()
        for part in self.beside:
            measured.stats.divergences[part.key] = part.found(rows, measured.normalizer)

    def divergences(
        self, rows: slice, tiles: Sequence[slice], normalizer: Normalizer, held: Any = None
    ) -> dict[object, Tensor]:
        """[n] the divergence of each teacher, once the normalizer of the whole vocabulary is known.
        `held`: what act one kept, and the next gradient will be that of the same tokens."""
        keep = held is not None
        make = (lambda columns: held) if keep else partial(self.raw, rows)
        pairs = [(columns, partial(make, columns)) for columns in tiles]
        return {t.key: t.measure(rows, pairs, normalizer, hold=keep) for t in self.teachers}

    def pull(
        self,
        rows: slice,
        columns: slice,
        measured: Measured,  # of these rows, as the gradient
        gradient: Gradient,
        held: Any = None,
        live: Tensor | None = None,  # [n] bool
    ) -> RowGradient:
        """Act two on a tile: dL/draw of the rows that carry a gradient. What is held is used up."""
        raw = self.raw(rows, columns) if held is None else held
        index = None if live is None else rows_left(live)
        places: Rows = rows
        if index is not None:
            raw, places = compact_(raw, index), index + (rows.start or 0)
            measured, gradient = measured.rows(index), gradient.rows(index)
        return RowGradient(self.gradient_(raw, places, columns, measured, gradient), places)

    def gradient_(
        self, raw: Tensor, rows: Rows, columns: slice, measured: Measured, gradient: Gradient
    ) -> Tensor:
        """dL/draw of a tile, teachers' part included, in the tile's memory or in 16 bits."""
        first = self.first + (columns.start or 0)
        others = self.tokens.backward(rows, first, measured, gradient)
        if raw.is_cuda:  # the products take 16 bits
            others = others._replace(dtype=self.gradient_dtype)
        given, slopes = (rows, columns, measured), gradient.divergences
        parts = [part for part in (*self.teachers, *self.beside) if part.key in slopes]
        if not parts:
            return self.acts.logit_gradient_(raw, others)
        extra = None  # all but the last need the student's logits unchanged
        for part in parts[:-1]:
            extra = part.gradient(raw, *given, slopes[part.key], extra)
        last = parts[-1]
        return last.gradient(raw, *given, slopes[last.key], extra, others)


class LinearSoftmax(RawSoftmax):
    """Raw logits from products: the head's own, then one pair per adapter.

    Args:
        features: each [T, H_i].
        weights: each [V', H_i] with V' >= V; rows beyond V are padding and never scored.
        bias: [V'] or None.
        vocabulary: V.
        compute_dtype: what products run in where it is not the tensors' own (autocast).
        logits_dtype: what logits are rounded to, if anything.
        fixed: the product for logits and dX where a row's bits may not depend on other rows.
    """

    def __init__(
        self,
        features: Sequence[Tensor],
        weights: Sequence[Tensor],
        bias: Tensor | None,
        vocabulary: int,
        acts: Kernels,
        tokens: Tokens,
        *,
        first: int = 0,
        teachers: tuple[Any, ...] = (),
        beside: tuple[Any, ...] = (),
        compute_dtype: torch.dtype | None = None,
        logits_dtype: torch.dtype | None = None,
        fixed: products.Fixed | None = None,
    ) -> None:
        self.features, self.full_weights, self.full_bias = list(features), list(weights), bias
        self.vocabulary, self.acts, self.tokens = vocabulary, acts, tokens
        self.first, self.logits_dtype, self.fixed = first, logits_dtype, fixed
        self.teachers, self.beside = teachers, beside
        self.weights = [w if w.shape[0] == vocabulary else w[:vocabulary] for w in weights]
        self.bias = None if bias is None else bias[:vocabulary]
        if compute_dtype is not None:
            self.weights = [w.to(compute_dtype) for w in self.weights]
        dtype = self.features[0].dtype
        self.dtype = products.sum_dtype(dtype)
        self.gradient_dtype = dtype if dtype.itemsize == 2 else None

    @classmethod
    def of(
        cls, tensors: Sequence[Any], vocabulary: int, acts: Kernels, tokens: Tokens,
        rows: Callable[[Sequence[Tensor]], Sequence[Any]] | None = None, **given: Any,
    ) -> LinearSoftmax:  # fmt: skip
        """From features and weights pairwise, and the bias; `rows` makes what can be indexed by
        tokens of features that are spread over ranks."""
        features = tensors[:-1:2] if rows is None else rows(tensors[:-1:2])
        return cls(features, tensors[1:-1:2], tensors[-1], vocabulary, acts, tokens, **given)

    def take(self, index: Tensor) -> LinearSoftmax:
        """The same head on some of the tokens, gathered."""
        found = copy(self)
        found.features = [features[index] for features in self.features]
        found.tokens = self.tokens.rows(index)
        found.teachers = tuple(teacher.take(index) for teacher in self.teachers)
        found.beside = tuple(part.take(index) for part in self.beside)
        return found

    def raw(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        """[n, v] raw logits in float32 or float64, in memory of their own."""
        out = None
        for features, weight in zip(self.features, self.weights, strict=True):
            x = features if rows is ALL else features[rows]
            w = weight if columns is ALL else weight[columns]
            out = products.logits(x, w, out, self.fixed)
        assert out is not None
        if self.bias is not None:
            out += self.bias[columns]
        return out if self.logits_dtype is None else out.to(self.logits_dtype).to(self.dtype)


class ExpSoftmax(LinearSoftmax):
    """exp(z - reference) [n, V] in bfloat16, written by the product in place of logits."""

    def statistics(
        self, rows: slice, tiles: Sequence[slice], slices: Any, vocabulary: int, keep: bool
    ) -> tuple[Measured, Any]:
        x, weight = self._x(rows), self.weights[0]
        held = Held.room(x.shape[0], weight.shape[0], x.dtype, x.device) if keep else None
        forward = self._biased(self.tokens.forward(rows, self.first))
        if slices.size is None:
            found = self.acts.product_statistics(x, weight, forward, vocabulary, held)
        else:
            partials = self.acts.product_partials(x, weight, forward, held)
            found = slices.measured(self.acts, partials, forward.needs, vocabulary)
        for other in self.beside:
            other.add_product(rows, x, weight, self.bias)
        if self.beside or PEAK in forward.needs:
            self.measure_beside(rows, found)
        return found, held

    def _biased(self, given: Any, columns: slice = ALL) -> Any:
        """Arguments of an act whose product has to add the bias of these columns."""
        if self.bias is None:
            return given
        transform = replace(given.transform, bias=self.bias[columns])
        return given._replace(transform=transform)

    def pull(
        self,
        rows: slice,
        columns: slice,
        measured: Measured,
        gradient: Gradient,
        held: Any = None,
        live: Tensor | None = None,
    ) -> RowGradient:
        if held is None:
            return RowGradient(self._slab(rows, columns, measured, gradient), rows)
        return self._of_terms(rows, measured, gradient, held, live)

    def _slab(self, rows: slice, columns: slice, measured: Measured, gradient: Gradient) -> Tensor:
        """The product that would make the logits again makes their gradient."""
        first = self.first + (columns.start or 0)
        backward = self.tokens.backward(rows, first, measured, gradient)
        x, weight = self.features[0][rows], self.weights[0][columns]
        found = self.acts.product_gradient(x, weight, self._biased(backward, columns))
        for chosen in self._chosen(rows, columns, measured, gradient):
            self.acts.chosen_gradient_(found, chosen, backward)
        return found

    def _x(self, rows: slice) -> Tensor:
        return self.features[0] if rows is ALL else self.features[0][rows]

    def _chosen(
        self, rows: slice, columns: slice, measured: Measured, gradient: Gradient
    ) -> list[Chosen]:
        """The candidates' columns, where they carry a gradient: at most one of them."""
        slopes = gradient.divergences
        parts = [part for part in self.beside if part.key in slopes]
        return [part.chosen(rows, columns, measured, slopes[part.key]) for part in parts]

    def _of_terms(
        self,
        rows: slice,
        measured: Measured,
        gradient: Gradient,
        held: Held,
        live: Tensor | None,
    ) -> RowGradient:
        """Everything but the products is queued before the device is read, so that the products
        start at once."""
        acts = self.acts
        x, backward = self._x(rows), self.tokens.backward(rows, self.first, measured, gradient)
        order = None if live is None else acts.dense_order(live, int(MOST * len(live)))
        multiple = features = None
        chosen = self.beside and self._chosen(rows, ALL, measured, gradient)
        if is_multiple(backward.transform, backward.coefficients):
            least = chosen[0].slopes.abs().amax(1) if chosen else None
            options = {"x": x, "order": order, "least": least}
            multiple, features = acts.held_multiple_(held, backward, **options)
        else:
            acts.held_gradient_(held, backward, order=order)
        for sparse in chosen:
            options = {"multiples": multiple, "order": order}
            acts.chosen_gradient_(held.terms, sparse, backward, **options)
        found = RowGradient(held.terms, rows, multiple, features, acts.scaled_rows)
        if order is None:
            return found
        places = order.rows + (rows.start or 0)
        count = int(order.count)  # the read
        return found if count == len(held.terms) else found.first(count, places)


def unit_gradient(normalizer: Normalizer) -> Gradient:
    """The coefficients of dlogp."""
    one = torch.ones_like(normalizer.peak)
    return Gradient(Coefficients(target=one, prob=-one), {}, one)
