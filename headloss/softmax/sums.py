"""Where the gradient of a linear head's logits goes: the last two products, and their sums.

T tokens, n of a block, H hidden width, V vocabulary. `RowSums` takes blocks of tokens over all
columns: a block's hidden gradient is final, the weight gradient is summed. `SlabSums` takes slabs
of columns over all tokens: the hidden gradient is summed, each slab of the weight gradient is
written once. Sums are in float32 and scaled once, at the end.

Each addition keeps one order: the hidden gradient's product, what the ranks of a group do about it
(`Hidden`), the weight gradient's product, which hides that. On one rank the last comes first where
it was given scaled features, whose memory the hidden gradient then takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.interface import Scaling
from . import products
from .linear import LinearSoftmax, Wants
from .rows import ALL, RowGradient


class Into(NamedTuple):
    """How and where to sum."""

    wants: Wants  # which tensors need a gradient
    accumulate_dtype: torch.dtype  # of the weight gradient over blocks, beside logits in float32
    main_grad: Tensor | None  # float32 [V, H] that the weight gradient is added to, not returned
    # Blocks are added to it as they come; else their sum at the end, times the factor. (Slabs
    # always are.)
    direct: bool
    hidden: Callable[..., Any]  # makes what takes those of features: `Hidden`, or the ranks' own


class Hidden:
    """The gradients of features that are all on this rank: rows are final when they are added.
    `blocks` are the plan's, of tokens; None: slabs of columns come."""

    def __init__(self, source: LinearSoftmax, wants: Wants, blocks: Sequence[Any] | None) -> None:
        self.source, self.wanted = source, wants.features
        self.blocks = None if blocks is None else iter(blocks)
        self.at_once = blocks is not None and len(blocks) == 1  # a product may be all of it
        self.totals: list[Tensor | None] = [None] * len(self.wanted)
        self.multiple: Tensor | None = None  # [T] what rows are still to be multiplied by

    def room(self, features: Any) -> Tensor:
        """Sums of slabs begin at 0, blocks write every row; in rows, whatever the features'
        layout."""
        if self.blocks is None:
            return features.new_zeros(features.shape, dtype=self.source.dtype)
        return features.new_empty(features.shape)  # type: ignore[no-any-return]

    def add(
        self, gradient: RowGradient, columns: slice, last: bool, weights: Callable[[], bool]
    ) -> bool:
        """Take dL/draw of some rows and columns, the `last` that come or not. `weights` takes it
        too: first where it leaves the memory of scaled features behind, else last, since it hides
        what ranks do about dX. Returns what it does."""
        values, rows, multiple, room, _, pairs, _ = gradient
        found, fixed = None if room is None else weights(), self.source.fixed
        block = None if self.blocks is None else next(self.blocks).rows
        for i, weight in enumerate(self.source.weights):
            if not self.wanted[i]:
                continue
            total, weight = self.totals[i], weight if columns is ALL else weight[columns]
            if total is None:
                features = self.source.features[i]
                if self.at_once and pairs is None and values.shape[0] == features.shape[0]:
                    made = products.input_gradient(values, weight, features.dtype, fixed, room)
                    self.totals[i], self.multiple = made, multiple
                    continue
                total = self.totals[i] = self.room(features)
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
                total.index_add_(0, rows, made)  # no row twice
        if last:
            self.end()
        return weights() if found is None else found

    def end(self) -> None:
        """Nothing more will be added."""

    def settle(self) -> None:
        """Wait until the gradients are whole."""
        for i, features in enumerate(self.source.features):
            if self.wanted[i] and self.totals[i] is None:  # no block had a gradient
                self.totals[i] = self.room(features)


class RowSums:
    """Gradients that arrive in rows, one block of tokens after another, over all columns. Without a
    plan: what slabs share with these."""

    def __init__(self, source: LinearSoftmax, into: Into, plan: Any = None) -> None:
        self.source, self.by_slab = source, plan is None
        blocks, once = (None, False) if plan is None else (plan.chunks, plan.once)
        self.hidden: Hidden = into.hidden(source, into.wants, blocks)
        rounded = self.by_slab or once  # totals take what is final: a slab's sum, or all in one
        direct = self.by_slab or into.direct  # into `main_grad`, as they come
        wide = source.dtype == torch.float64
        self.sum_dtype = torch.float64 if wide else into.accumulate_dtype
        self.main_grad = into.main_grad if into.wants.weights[0] else None
        self.fresh = True  # nothing was written yet, of a slab or at all
        self.bias = None
        if into.wants.bias:
            assert source.full_bias is not None
            self.bias = torch.zeros_like(source.full_bias, dtype=source.dtype)
        self.weights: list[Tensor | None] = []
        for weight, wanted in zip(source.full_weights, into.wants.weights, strict=True):
            if not self.weights and self.main_grad is not None and direct:
                self.weights.append(self.main_grad)
                continue
            dtype = weight.dtype if rounded else self.sum_dtype
            total = weight.new_empty(weight.shape, dtype=dtype) if wanted else None
            if total is not None and source.vocabulary < total.shape[0]:
                total[source.vocabulary :] = 0
            self.weights.append(total)
        self.places = [
            w if w is None or w.shape[0] == source.vocabulary else w[: source.vocabulary]
            for w in self.weights
        ]
        # Of what comes next: its columns, where their dW goes, and whether a first product may be
        # all that is there.
        self.columns, self.totals, self.at_once = ALL, self.places, True

    def add(self, gradient: RowGradient, last: bool = False) -> None:
        """Take dL/draw of the next block; or of some rows of a slab, `last` of the last slab."""
        if gradient.later is not None:
            gradient = gradient.counted()
        weights = partial(self._into_weights, gradient)
        if self.hidden.add(gradient, self.columns, last, weights):
            self.fresh = False

    def _into_weights(self, gradient: RowGradient) -> bool:
        """dW and the bias's gradient of some rows and columns; whether there was any."""
        values, rows, multiple, given, _, pairs, _ = gradient
        if pairs is None and not values.shape[0]:
            return False
        own = None if self.main_grad is None else self.main_grad.data_ptr()
        fresh = self.fresh and self.at_once
        for features, total in zip(self.source.features, self.totals, strict=True):
            if total is None:
                continue
            first = fresh and total.data_ptr() != own
            if values.shape[0]:
                x = (features if rows is ALL else features[rows]) if given is None else given
                products.add_weight_gradient_(total, values, x, first)
                first = False
            if pairs is not None:
                pairs.into_weight(total, features, not first)
        if self.bias is not None:
            place = self.bias[: self.source.vocabulary][self.columns]
            if multiple is None:
                place += values.sum(0, dtype=self.bias.dtype)
            else:
                column = place.unsqueeze(1)
                products.add_weight_gradient_(column, values, multiple.unsqueeze(1))
            if pairs is not None:
                pairs.add_to_bias(place)
        return True

    def finish(self, factor: Tensor | None) -> list[Tensor | None]:
        """Gradients times `factor` in the inputs' dtypes: features and weights pairwise, bias."""
        self.hidden.settle()
        source, scaled, multiple = self.source, self.source.acts.scaled, self.hidden.multiple
        sums: list[Scaling | None] = []
        pairs = zip(source.features, source.full_weights, self.weights, strict=True)
        for i, (features, weight, total) in enumerate(pairs):
            into = self.hidden.totals[i]
            sums.append(None if into is None else Scaling(into, features.dtype, True, multiple))
            own = None
            if total is not None and total is not self.main_grad:
                if self.fresh:
                    total.zero_()
                # A slab's weight gradient was multiplied when it was closed.
                own = Scaling(total, weight.dtype, not self.by_slab)
            if own is not None and i == 0 and self.main_grad is not None:
                self.main_grad.add_(scaled([own._replace(dtype=self.main_grad.dtype)], factor)[0])
                own = None
            sums.append(own)
        bias = None if self.bias is None else Scaling(self.bias, source.full_bias.dtype)  # type: ignore[union-attr]
        sums.append(bias)
        made = iter(scaled([s for s in sums if s is not None], factor))
        return [None if s is None else next(made) for s in sums]


class SlabSums(RowSums):
    """Gradients that arrive in slabs of columns over all tokens: `open` a slab, `add` its rows,
    `close` it.

    The weight gradient of a slab is summed apart and rounded when it is closed; or, where one
    addition brings all its tokens (`once`), a product straight into its place.
    """

    def __init__(self, source: LinearSoftmax, into: Into, once: bool) -> None:
        super().__init__(source, into)
        self.at_once = once and self.main_grad is None

    def open(self, columns: slice) -> None:
        self.columns, self.fresh = columns, True
        self.totals = self.slabs = [p if p is None else p[columns] for p in self.places]
        if not self.at_once:
            self.totals = [
                None if slab is None else torch.zeros_like(slab, dtype=self.sum_dtype)
                for slab in self.slabs
            ]

    def close(self, factor: Tensor | None) -> None:
        """Put the slab's sums, times `factor`, into their place."""
        for slab, total in zip(self.slabs, self.totals, strict=True):
            if slab is None or total is None:
                continue
            if self.at_once:
                if self.fresh:
                    slab.zero_()
                continue
            if factor is not None:
                total.mul_(factor)
            if self.main_grad is not None and slab is self.slabs[0]:
                slab.add_(total)
            else:
                slab.copy_(total)
        self.fresh = False
