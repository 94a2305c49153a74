"""Where the gradient of a linear head's logits goes: the last two products, and their sums.

T tokens, n of a block, H hidden width, V vocabulary. `BlockAccumulator` takes blocks of tokens
over all columns: a block's hidden gradient is final, the weight gradient is summed.
`SlabAccumulator` takes slabs of columns over all tokens: the hidden gradient is summed, each slab
of the weight gradient is written once. Sums are in float32 and scaled once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..head.products import add_weight_gradient_
from ..kernels.interface import Scaling
from .hidden_gradient import HiddenGradient
from .linear import LinearLogits, NeedsGrad
from .rows import ALL, LogitGradient


class GradientBuffers(NamedTuple):
    """How and where to add gradients up."""

    needs_grad: NeedsGrad
    accumulate_dtype: torch.dtype  # of the weight gradient over blocks, beside logits in float32
    main_grad: Tensor | None  # float32 [V, H] that the weight gradient is added to, not returned
    # Blocks are added to it as they come; else their sum at the end, times the factor. (Slabs
    # always are.)
    direct: bool
    hidden: Callable[..., HiddenGradient]  # makes what takes those of features


class _Accumulator:
    """What both ways share: the order of the two products, and the bias.

    `totals` take the weight gradients of `columns`; where nothing was added to them yet they hold
    nothing (`fresh`), but for the caller's `main_grad`.
    """

    def __init__(
        self, source: LinearLogits, buffers: GradientBuffers, blocks: Sequence[Any] | None,
        dtype: torch.dtype | None
    ) -> None:
        """dtype: of sums of weight gradients; None: the weights' own, which take what is final."""
        needs_grad = buffers.needs_grad
        self.source = source
        self.hidden = buffers.hidden(source, needs_grad.features, blocks)
        self.main_grad = buffers.main_grad if needs_grad.weights[0] else None
        direct = buffers.direct or blocks is None
        self.bias: Tensor | None = None
        if needs_grad.bias:
            assert source.full_bias is not None
            self.bias = torch.zeros_like(source.full_bias, dtype=source.dtype)
        self.weights: list[Tensor | None] = []
        for weight, wanted in zip(source.full_weights, needs_grad.weights, strict=True):
            if not self.weights and self.main_grad is not None and direct:
                self.weights.append(self.main_grad)
                continue
            total = weight.new_empty(weight.shape, dtype=dtype or weight.dtype) if wanted else None
            if total is not None and source.vocabulary < total.shape[0]:
                total[source.vocabulary :] = 0
            self.weights.append(total)
        self.places = [w if w is None else w[: source.vocabulary] for w in self.weights]
        self.columns, self.totals, self.fresh = ALL, self.places, True

    def add(self, gradient: LogitGradient, last: bool = False) -> None:
        """Take dL/draw of the next block; or of some rows of a slab, `last` of the last slab."""
        gradient = gradient.counted()
        if self.hidden.comes_first:
            self.hidden.add(gradient, self.columns, last)
            self._add_to_weights(gradient)
        else:  # it may take the memory of scaled features, which the weight gradient has read
            self._add_to_weights(gradient)
            self.hidden.add(gradient, self.columns, last)

    def _add_to_weights(self, gradient: LogitGradient) -> None:
        values, rows, multiple, scaled, _, pairs, _ = gradient
        if pairs is None and not len(values):
            return
        for features, total in zip(self.source.features, self.totals, strict=True):
            if total is None:
                continue
            fresh = self.fresh and not self._is_main_grad(total)
            if len(values):
                x = (features if rows is ALL else features[rows]) if scaled is None else scaled
                add_weight_gradient_(total, values, x, fresh)
                fresh = False
            if pairs is not None:
                pairs.into_weight(total, features, not fresh)
        self.fresh = False
        if self.bias is None:
            return
        place = self.bias[: self.source.vocabulary][self.columns]
        if multiple is None:
            place += values.sum(0, dtype=self.bias.dtype)
        else:
            add_weight_gradient_(place.unsqueeze(1), values, multiple.unsqueeze(1))
        if pairs is not None:
            pairs.add_to_bias(place)

    def _is_main_grad(self, total: Tensor) -> bool:
        return self.main_grad is not None and total.data_ptr() == self.main_grad.data_ptr()

    def _finished(
        self, factor: Tensor | None, weights: Sequence[Scaling | None]
    ) -> list[Tensor | None]:
        """Gradients times `factor` in the inputs' dtypes: features and weights pairwise, bias."""
        self.hidden.settle()
        sums: list[Scaling | None] = []
        pairs = zip(self.source.features, self.hidden.totals, weights, strict=True)
        for features, total, weight in pairs:
            rows = self.hidden.multiple
            sums.append(None if total is None else Scaling(total, features.dtype, rows=rows))
            sums.append(weight)
        bias = self.source.full_bias
        sums.append(None if self.bias is None else Scaling(self.bias, bias.dtype))  # type: ignore[union-attr]
        present = [s for s in sums if s is not None]
        gradients = iter(self.source.acts.scaled(present, factor))
        return [None if s is None else next(gradients) for s in sums]


class BlockAccumulator(_Accumulator):
    """Gradients that arrive in rows, one block of tokens after another, over all columns. A
    `single_block` is the whole gradient, so that no wider sum is needed."""

    def __init__(
        self, source: LinearLogits, buffers: GradientBuffers, blocks: Sequence[Any],
        single_block: bool
    ) -> None:
        dtype = torch.float64 if source.dtype == torch.float64 else buffers.accumulate_dtype
        super().__init__(source, buffers, blocks, None if single_block else dtype)

    def finish(self, factor: Tensor | None) -> list[Tensor | None]:
        """Gradients times `factor` in the inputs' dtypes: features and weights pairwise, bias."""
        sums: list[Scaling | None] = []
        for weight, total in zip(self.source.full_weights, self.weights, strict=True):
            is_sum = total is not None and total is not self.main_grad
            if is_sum and self.fresh:  # no block had a gradient
                total.zero_()  # type: ignore[union-attr]
            sums.append(Scaling(total, weight.dtype) if is_sum else None)  # type: ignore[arg-type]
        if sums[0] is not None and self.main_grad is not None:
            final = sums[0]._replace(dtype=self.main_grad.dtype)
            self.main_grad.add_(self.source.acts.scaled([final], factor)[0])
            sums[0] = None
        return self._finished(factor, sums)


class SlabAccumulator(_Accumulator):
    """Gradients that arrive in slabs of columns over all tokens: `open` a slab, `add` its rows,
    `close` it.

    The weight gradient of a slab is summed apart and rounded when it is closed; or, where one
    addition brings all its tokens (`at_once`), a product straight into its place.
    """

    def __init__(self, source: LinearLogits, buffers: GradientBuffers, at_once: bool) -> None:
        super().__init__(source, buffers, None, None)
        wide = source.dtype == torch.float64
        self.sum_dtype = torch.float64 if wide else buffers.accumulate_dtype
        self.at_once = at_once and self.main_grad is None

    def open(self, columns: slice) -> None:
        """The next slab."""
        self.columns, self.fresh = columns, True
        slabs = [p if p is None else p[columns] for p in self.places]
        self.totals = self.slabs = slabs
        if not self.at_once:
            self.totals = [
                None if slab is None else torch.empty_like(slab, dtype=self.sum_dtype)
                for slab in slabs
            ]

    def close(self, factor: Tensor | None) -> None:
        """Put the slab's sums, times `factor`, into their place."""
        for slab, total in zip(self.slabs, self.totals, strict=True):
            if slab is None or total is None:
                continue
            if self.fresh:
                total.zero_()
            if total is slab:
                continue
            if factor is not None:
                total.mul_(factor)
            if self.main_grad is not None and slab is self.slabs[0]:
                slab.add_(total)
            else:
                slab.copy_(total)

    def finish(self, factor: Tensor | None) -> list[Tensor | None]:
        """The gradients; those of weights have been multiplied by `factor` slab by slab."""
        pairs = zip(self.source.full_weights, self.weights, strict=True)
        sums = [
            None if t is None or t is self.main_grad else Scaling(t, w.dtype, multiplied=False)
            for w, t in pairs
        ]
        return self._finished(factor, sums)
