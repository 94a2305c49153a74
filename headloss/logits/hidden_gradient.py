"""Gradients of a linear head's features, from the gradient of its logits.

T tokens, n of a block, H hidden width. Blocks of tokens come one after another over all columns,
and each one's rows are final; or slabs of columns come over all tokens, whose parts are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from ..collectives import together
from ..head.products import add_input_gradient_, input_gradient
from ..parallel.vocabulary import VocabShard
from .linear import LinearLogits
from .rows import LogitGradient

SUM = "a sum of hidden gradients"
GIVE_WAY = 20_000  # clocks, about 11 microseconds, in which a collective gets its multiprocessors


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
            self.totals[i] = input_gradient(values, weight, dtype, fixed, memory)
            self.multiple = gradient.multiple
            return
        total = self._total(i)
        if pairs is not None:
            pairs.into_hidden(total[block], weight)
        elif isinstance(gradient.rows, Tensor):
            total[block] = 0  # of rows that carry no gradient
        if len(values):
            gradient.put_(total, input_gradient(values, weight, total.dtype, fixed, memory))

    def _add_to_slab(self, i: int, weight: Tensor, gradient: LogitGradient) -> None:
        total, fixed = self._total(i), self.source.fixed
        values, rows = gradient.values, gradient.rows
        if gradient.pairs is not None:
            gradient.pairs.add_to_hidden(total, weight)
        if not len(values):
            return
        if isinstance(rows, slice):
            add_input_gradient_(total[rows], values, weight, fixed)
        else:  # no row twice
            total.index_add_(0, rows, input_gradient(values, weight, total.dtype, fixed))

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
        self, shard: VocabShard, source: LinearLogits, needs_grad: Sequence[bool],
        blocks: Sequence[Any] | None
    ) -> None:
        super().__init__(source, needs_grad, blocks)
        self.group = shard.group
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
                part = input_gradient(gradient.values, weight, self.source.dtype, self.source.fixed)
                self._start(i, gradient.whole(part, block, weight), block)

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
