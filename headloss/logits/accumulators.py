"""Where the gradient of a linear head's logits goes: the last two products, and their sums.

T tokens, n of a block, H hidden width, V vocabulary. `BlockAccumulator` takes blocks of tokens
over all columns: a block's hidden gradient is final, the weight gradient is summed.
`SlabAccumulator` takes slabs of columns over all tokens: the hidden gradient is summed, each slab
of the weight gradient is written once. `HiddenGradient` takes the features' part of both, on one
rank or summed over the ranks of a group. Sums are in float32 and scaled once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..collectives import together
from ..head import products
from ..kernels.interface import Scaling
from .linear import LinearLogits, NeedsGrad
from .rows import ALL, LogitGradient

SUM = "a sum of hidden gradients"
GIVE_WAY = 20_000  # clocks, about 11 microseconds, in which a collective gets its multiprocessors


class GradientBuffers(NamedTuple):
    """How and where to add gradients up."""

    needs_grad: NeedsGrad
    accumulate_dtype: torch.dtype  # of the weight gradient over blocks, beside logits in float32
    main_grad: Tensor | None  # float32 [V, H] that the weight gradient is added to, not returned
    # Blocks are added to it as they come; else their sum at the end, times the factor. (Slabs
    # always are.)
    direct: bool


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
        of_features = HiddenGradient if source.context.shard.group is None else SharedHiddenGradient
        self.hidden = of_features(source, needs_grad.features, blocks)
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
        if gradient.later is not None:
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
                products.add_weight_gradient_(total, values, x, fresh)
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
            products.add_weight_gradient_(place.unsqueeze(1), values, multiple.unsqueeze(1))
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
            sums.append(None if total is None else Scaling(total, features.dtype, row_scale=rows))
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


# ---------------------------------------------------------------------- gradients of features


class HiddenGradient:
    """The gradients of features that are all on this rank.

    Args:
        needs_grad: of each pair's features.
        blocks: of tokens, in their order; None: slabs of columns come.

    Attributes:
        totals: what is returned, where a gradient is wanted.
        multiple: [T] what rows of it are still to be multiplied by.
        comes_first: before the weight gradient's product, which hides what ranks do about it.
    """

    comes_first = False

    def __init__(
        self, source: LinearLogits, needs_grad: Sequence[bool], blocks: Sequence[Any] | None
    ) -> None:
        self.source, self.needs_grad = source, needs_grad
        self.by_slab, self.blocks = blocks is None, iter(blocks or ())
        self.single_block = blocks is not None and len(blocks) == 1
        self.totals: list[Tensor | None] = [None] * len(needs_grad)
        self.multiple: Tensor | None = None

    def add(self, gradient: LogitGradient, columns: slice, last: bool = False) -> None:
        """Take dL/draw of the next block; or of some rows of a slab, `last` of the last slab."""
        block = None if self.by_slab else next(self.blocks).rows
        for i, weight in enumerate(self.source.weights):
            if not self.needs_grad[i]:
                continue
            if block is None:
                self._add_to_slab(i, weight[columns], gradient)
            else:
                self._write_block(i, weight, gradient, block)

    def _write_block(
        self, i: int, weight: Tensor, gradient: LogitGradient, block: slice
    ) -> None:  # fmt: skip
        features, fixed = self.source.features[i], self.source.fixed
        values, pairs, memory = gradient.values, gradient.pairs, gradient.features
        if self.single_block and pairs is None and len(values) == len(features):
            dtype = features.dtype
            self.totals[i] = products.input_gradient(values, weight, dtype, fixed, memory)
            self.multiple = gradient.multiple
            return
        total = self._total(i)
        if pairs is not None:
            pairs.into_hidden(total[block], weight)
        elif isinstance(gradient.rows, Tensor):
            total[block] = 0  # of rows that carry no gradient
        if len(values):
            part = products.input_gradient(values, weight, total.dtype, fixed, memory)
            gradient.put_(total, part)

    def _add_to_slab(self, i: int, weight: Tensor, gradient: LogitGradient) -> None:
        total, fixed = self._total(i), self.source.fixed
        values, rows = gradient.values, gradient.rows
        if gradient.pairs is not None:
            gradient.pairs.add_to_hidden(total, weight)
        if not len(values):
            return
        if isinstance(rows, slice):
            products.add_input_gradient_(total[rows], values, weight, fixed)
        else:  # no row twice
            total.index_add_(0, rows, products.input_gradient(values, weight, total.dtype, fixed))

    def _total(self, i: int) -> Tensor:
        """Sums of slabs begin at 0, blocks write every row; in rows, whatever the features'
        layout."""
        total, features = self.totals[i], self.source.features[i]
        if total is None:
            dtype = self.source.dtype if self.by_slab else features.dtype
            make = features.new_zeros if self.by_slab else features.new_empty
            total = self.totals[i] = make(features.shape, dtype=dtype)
        return total

    def settle(self) -> None:
        """Wait until the gradients are whole."""
        for i, needs_grad in enumerate(self.needs_grad):
            if needs_grad:
                self._total(i)  # there was no block at all


class SharedHiddenGradient(HiddenGradient):
    """Gradients of features that are summed over the ranks of a vocabulary's group, in float32.

    A block's sum is under way while its weight gradient is computed, and ends before the next one
    begins. Rows are sent whether or not they carry a gradient: skipping is local.
    """

    comes_first = True

    def __init__(
        self, source: LinearLogits, needs_grad: Sequence[bool], blocks: Sequence[Any] | None
    ) -> None:
        super().__init__(source, needs_grad, blocks)
        self.group = source.context.shard.group
        # Sums that are under way: of which feature, the work, its buffer, and where that goes.
        self.pending: list[tuple[int, Any, Tensor, slice]] = []

    def add(self, gradient: LogitGradient, columns: slice, last: bool = False) -> None:
        if self.by_slab:
            super().add(gradient, columns)
            for i, total in enumerate(self.totals if last else ()):
                if total is not None:
                    self._start(i, total, slice(0, len(total)))
            return
        self._arrive()
        block = next(self.blocks).rows
        for i, weight in enumerate(self.source.weights):
            if self.needs_grad[i]:
                values, source = gradient.values, self.source
                part = products.input_gradient(values, weight, source.dtype, source.fixed)
                self._start(i, gradient.dense(part, block, weight), block)

    def _start(self, i: int, dense: Tensor, rows: slice) -> None:
        options = {"group": self.group, "async_op": True}
        work = together(SUM, self.group, distributed.all_reduce, dense, **options)
        self.pending.append((i, work, dense, rows))
        if dense.is_cuda:
            # A product that followed at once would take every multiprocessor until it ends.
            torch.cuda._sleep(GIVE_WAY)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        self._arrive()
        super().settle()

    def _arrive(self) -> None:
        for i, work, value, rows in self.pending:
            together(SUM, self.group, work.wait)
            if len(value) == len(self.source.features[i]):  # not rounded before they are scaled
                self.totals[i] = value
            else:
                self._total(i)[rows].copy_(value)
        self.pending = []
