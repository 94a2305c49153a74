"""Gradient accumulators of a linear head. An accumulator multiplies the gradient of the logits by
the weight (for the gradient of the features) and by the features (for the gradient of the weight),
and sums the products.

T tokens, n tokens of a block, H hidden width, V vocabulary. If the gradient of the logits arrives
by blocks of tokens, each block gives the finished hidden gradient of the block's tokens, while the
weight gradient is a sum over all blocks. If the gradient of the logits arrives by blocks of
vocabulary rows (*slabs* of the weight), each block gives the finished weight gradient of the
block's rows, while the hidden gradient is a sum over all blocks. Sums of gradients are in float32,
and are scaled once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..batch.segments import Chunk
from ..collectives import summed, together
from ..head import products
from ..kernels.interface import Sum
from .linear import LinearLogits, NeedsGrad
from .rows import Gradients, LogitGradient

# List with a single block of tokens, for a call whose gradient comes by slabs (blocks of vocabulary
# rows).
ONE_BLOCK = [Chunk(0, 0, 0, 0)]
SHARED = "a sum of hidden gradients"
# Length of a pause in GPU clock cycles (about 11 microseconds), in which an all-reduce kernel can
# start on the GPU.
GIVE_WAY = 20_000


class GradientBuffers(NamedTuple):
    """Settings of the gradient accumulators: the tensors that need a gradient, the dtype of the
    weight gradient's sum, and the tensor to which the sum is added."""

    needs_grad: NeedsGrad
    # Dtype of the weight gradient's sum over blocks; float64 logits use float64.
    accumulate_dtype: torch.dtype
    # Float32 [V, H] that receives the weight gradient, which is then not returned.
    main_grad: Tensor | None
    # If `direct` is True, add each block's weight gradient to `main_grad`. If `direct` is False,
    # sum the weight gradients of all blocks first, then add the sum, times the upstream gradient,
    # to `main_grad`.
    direct: bool


class BlockAccumulator:
    """Sums of gradients that arrive by blocks of tokens, in all vocabulary columns. With
    `single_block`, the only block's weight gradient is the whole weight gradient, so that the sum
    has the weight's dtype; without `single_block`, the sum over blocks has the dtype
    `Options.accumulate_dtype`.

    `weights` maps the index of a pair (features, weight) to the gradient of the pair's weight, if
    the weight requires a gradient. `totals[i]` is the view of `weights[i]` to which each block's
    product, dlogits^T @ features, is added. While the set `fresh` contains i, `totals[i]` is
    uninitialized memory, and the next product overwrites `totals[i]` instead of being added.
    """

    by_factor = True  # True if `finish` multiplies the sums in `weights` by its argument `factor`.

    def __init__(
        self,
        source: LinearLogits,
        buffers: GradientBuffers,
        blocks: Sequence[Chunk],
        single_block: bool,
    ) -> None:
        needs_grad = buffers.needs_grad
        self.source = source
        self.hidden = HiddenGradient(source, needs_grad.features, blocks)
        self.main_grad = buffers.main_grad if needs_grad.weights[0] else None
        self.sum_dtype = buffers.accumulate_dtype
        if source.dtype == torch.float64:
            self.sum_dtype = torch.float64
        self.bias: Tensor | None = None
        if needs_grad.bias and source.full_bias is not None:
            self.bias = torch.zeros_like(source.full_bias, dtype=source.dtype)
        self.weights: dict[int, Tensor] = {}
        for i, weight in enumerate(source.full_weights):
            if i == 0 and self.main_grad is not None and buffers.direct:
                self.weights[i] = self.main_grad
            elif needs_grad.weights[i]:
                dtype = weight.dtype if single_block else self.sum_dtype
                self.weights[i] = weight.new_empty(weight.shape, dtype=dtype)
                if weight.shape[0] > source.vocabulary:  # Rows of padding.
                    self.weights[i][source.vocabulary :] = 0
        self.totals = {i: w[: source.vocabulary] for i, w in self.weights.items()}
        self.fresh = {i for i, w in self.weights.items() if w is not self.main_grad}

    def add(self, gradient: LogitGradient) -> None:
        """Add one token block's products to the sums of the hidden and weight gradients."""
        # The all-reduce over ranks runs while the weight gradient is computed.
        if self.hidden.group is not None:
            self.hidden.add(gradient)
            self._add_to_weights(gradient)
        else:
            # Compute the weight gradient first: it reads the features multiplied by each row's
            # factor, and the hidden gradient may be written over these features.
            self._add_to_weights(gradient)
            self.hidden.add(gradient)

    def _add_to_weights(self, gradient: LogitGradient) -> None:
        dlogits, rows, columns, multiple, scaled, pairs = gradient
        filled = dlogits.shape[0]
        if pairs is None and not filled:
            return
        for i, total in self.totals.items():
            features = self.source.features[i]
            fresh = i in self.fresh
            if filled:
                x = features[rows] if scaled is None else scaled
                products.add_weight_gradient_(total, dlogits, x, fresh)
                fresh = False
            if pairs is not None:
                pairs.into_weight(total, features, not fresh)
        self.fresh.clear()
        if self.bias is None:
            return
        place = self.bias[: self.source.vocabulary][columns]
        if multiple is None:
            place += dlogits.sum(0, dtype=self.bias.dtype)
        else:
            products.add_weight_gradient_(place.unsqueeze(1), dlogits, multiple.unsqueeze(1))
        if pairs is not None:
            pairs.add_to_bias(place)

    def finish(self, factor: Tensor | None) -> Gradients:
        """Return gradients times `factor` in the inputs' dtypes: features and weights pairwise,
        then bias."""
        source = self.source
        hidden = self.hidden
        gradients: Gradients = [None] * (2 * len(source.features) + 1)
        sums: dict[int, Sum] = {}
        hidden.settle()
        for i, total in hidden.totals.items():
            sums[2 * i] = Sum(total, source.features[i].dtype, hidden.factors.get(i))
        for i, total in self.weights.items():
            if total is self.main_grad:
                continue
            if i in self.fresh:  # No token had a gradient, and nothing was written to `total`.
                total.zero_()
            if self.by_factor:
                into = source.full_weights[i] if i or self.main_grad is None else self.main_grad
                sums[2 * i + 1] = Sum(total, into.dtype)
            else:
                gradients[2 * i + 1] = total
        if self.bias is not None and source.full_bias is not None:
            sums[len(gradients) - 1] = Sum(self.bias, source.full_bias.dtype)
        for i, gradient in zip(sums, source.acts.scaled([*sums.values()], factor), strict=True):
            gradients[i] = gradient
        if self.main_grad is not None and gradients[1] is not None:
            self.main_grad.add_(gradients[1])
            gradients[1] = None
        return gradients


class SlabAccumulator(BlockAccumulator):
    """Sums of gradients over all tokens, of one slab (block of vocabulary rows) after another. For
    each slab (block of vocabulary rows), call `open`, then `add` for some tokens at a time, then
    `close`.

    The weight gradient of a block of vocabulary rows is summed in a separate tensor, which `close`
    rounds and writes to these rows of the weight gradient. With `at_once`, `add` is called once for
    each block of vocabulary rows, with the gradient of all tokens' logits, and the matmul writes
    these rows of the weight gradient directly. The hidden gradient is summed in `source.dtype` over
    all blocks of vocabulary rows, and at the end over the ranks that shard the vocabulary.
    """

    by_factor = False

    def __init__(self, source: LinearLogits, buffers: GradientBuffers, at_once: bool) -> None:
        super().__init__(source, buffers._replace(direct=True), ONE_BLOCK, single_block=True)
        self.at_once, self.places = at_once and self.main_grad is None, self.totals
        for i in self.hidden.wanted:
            features = source.features[i]
            self.hidden.totals[i] = features.new_zeros(features.shape, dtype=source.dtype)

    def open(self, columns: slice) -> None:
        """Start the next slab."""
        self.fresh = set(self.places)
        self.totals = {i: place[columns] for i, place in self.places.items()}
        if not self.at_once:
            for i, place in self.totals.items():
                self.totals[i] = torch.empty_like(place, dtype=self.sum_dtype)

    def add(self, gradient: LogitGradient) -> None:
        """Add the gradient of some tokens' logits, in one block of vocabulary columns, to the sums
        of weight and hidden gradients."""
        self._add_to_weights(gradient)
        dlogits, rows, columns, *_ = gradient
        for i, total in self.hidden.totals.items():
            weight = self.source.weights[i][columns]
            if gradient.pairs is not None:
                gradient.pairs.add_to_hidden(total, weight)
            if not len(dlogits):
                continue
            if isinstance(rows, slice):
                self.source.products.add_input_gradient_(total[rows], dlogits, weight)
            else:  # No row occurs twice.
                part = self.source.products.input_gradient(dlogits, weight, total.dtype)
                total.index_add_(0, rows, part)

    def close(self, columns: slice, factor: Tensor | None) -> None:
        """Multiply the weight gradient of a block of vocabulary rows by `factor`, and write the
        product to these rows of the whole weight gradient (or add the product to `main_grad`)."""
        for i in self.fresh:
            self.totals[i].zero_()
        self.fresh.clear()
        for i, total in self.totals.items() if not self.at_once else ():
            place = self.places[i][columns]
            if factor is not None:
                total.mul_(factor)
            if self.weights[i] is self.main_grad:
                place.add_(total)
            else:
                place.copy_(total)

    def finish(self, factor: Tensor | None) -> Gradients:
        for total in self.hidden.totals.values() if self.hidden.group is not None else ():
            summed(SHARED, total, self.hidden.group)
        return super().finish(factor)


class HiddenGradient:
    """Gradients of the head's input features, block by block. `totals[i]` is the gradient of
    `source.features[i]`, for each i whose features require a gradient.

    If a group of ranks shards the vocabulary, each block's hidden gradient is summed over the ranks
    in float32. The all-reduce of a token block's hidden gradient runs while the block's weight
    gradient is computed, and ends before the all-reduce for the next token block starts. In an
    all-reduce, each rank sends the hidden gradient of all tokens of the block, including tokens
    without a gradient, because different ranks may find different tokens without a gradient.
    """

    def __init__(
        self, source: LinearLogits, needs_grad: Sequence[bool], blocks: Sequence[Chunk]
    ) -> None:
        self.source = source
        self.group = source.context.shard.group
        self.wanted = [i for i, needs in enumerate(needs_grad) if needs]
        self.blocks = iter(blocks)
        self.totals = dict[int, Tensor]()
        # Factors by which `finish` must still multiply the rows of `totals`.
        self.factors = dict[int, Tensor]()
        # In a call with a single block of tokens, `totals` stays empty, because `add` keeps the
        # gradient of the block.
        for i in self.wanted if len(blocks) != 1 else ():
            features = source.features[i]
            # Allocate contiguous rows, even if the features are not contiguous.
            self.totals[i] = features.new_empty(features.shape)
        # Unfinished all-reduces as tuples (i, work handle, buffer of the sum, rows): the finished
        # sum is copied to `totals[i][rows]`.
        self.pending: list[tuple[int, Any, Tensor, slice]] = []

    def add(self, gradient: LogitGradient) -> None:
        """Add one token block's product dlogits @ weight to the hidden gradient."""
        self.settle()
        source = self.source
        block = next(self.blocks).rows
        dlogits, rows, _, multiple, memory, pairs = gradient
        places = rows - block.start if isinstance(rows, Tensor) else None
        # If a `group` of ranks shards the vocabulary, do not write the hidden gradient into
        # `memory`: this buffer holds the head's inputs times row factors, from which the weight
        # gradient is computed later.
        if self.group is not None:
            memory = None
        # Write the hidden gradient of all rows of the block of tokens, with 0 in rows without a
        # gradient.
        for i in self.wanted:
            weight = source.weights[i]
            dtype = source.features[i].dtype if self.group is None else source.dtype
            part = source.products.input_gradient(dlogits, weight, dtype, memory)
            if self.group is None and i in self.totals:
                total = self.totals[i][block]
            elif places is None and pairs is None:
                total = part
            else:
                total = part.new_empty(block.stop - block.start, part.shape[1])
            if pairs is not None:
                pairs.into_hidden(total, weight)
            elif places is not None:
                total.zero_()
            if multiple is not None and total is part and self.group is None:
                self.factors[i] = multiple
            elif multiple is not None:
                source.acts.scaled_rows(part, multiple, out=total, places=places)
            elif places is not None:
                total.index_copy_(0, places, part)
            elif pairs is None and total is not part:
                total.copy_(part)
            if self.group is None:
                self.totals.setdefault(i, total)
                continue
            options = {"group": self.group, "async_op": True}
            work = together(SHARED, self.group, distributed.all_reduce, total, **options)
            self.pending.append((i, work, total, block))
            if total.is_cuda:
                # Pause the GPU's compute stream, so that the all-reduce can start: without a pause,
                # the weight gradient's matmul would fill the GPU and delay the all-reduce until the
                # matmul's end.
                torch.cuda._sleep(GIVE_WAY)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Wait for the all-reduces under way, and write their sums to `totals`."""
        for i, work, value, rows in self.pending:
            together(SHARED, self.group, work.wait)
            if i in self.totals:
                self.totals[i][rows].copy_(value)
            else:  # Keep the sum over ranks in float32; `finish` scales and rounds the sum.
                self.totals[i] = value
        self.pending = []
