"""Logits of a linear head: raw = sum_i features_i @ weight_i.T + bias.

T tokens, H hidden width, V vocabulary; n tokens and v columns of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..batch.segments import Chunk
from ..head.products import GRAIN, PARTS, PLAIN, Products, sum_dtype
from ..host_copy import HostCopy
from ..kernels.interface import Backward, ExpTile, Forward, Kernels, Measured, ShiftedSums
from ..kernels.pair import Chosen
from ..kernels.transform import Transform
from ..parallel.vocabulary import WholeVocabulary
from ..statistics.softmax import CANDIDATES, PEAK, SoftmaxState
from .beside import LogitTile
from .rows import ALL, BackwardInputs, LogitGradient, Rows, SourceTile, compact_, steps

R = TypeVar("R", Forward, Backward)
DENSE_SHARE = 15 / 16  # On a GPU, leaving out less than 1/16 of the rows saves no time.


class NeedsGrad(NamedTuple):
    """Flags of a `LogitSource`'s tensors, in order: True for a tensor that needs a gradient."""

    features: tuple[bool, ...]  # One flag per feature matrix, or one flag for the caller's logits.
    weights: tuple[bool, ...] = ()
    bias: bool = False

    @property
    def any_weight(self) -> bool:
        return any(self.weights) or self.bias


class RowContext(NamedTuple):
    """Tokens, names of statistics and kernel backend for a `LogitSource`, which makes logits."""

    acts: Kernels
    targets: Tensor  # Target ids [T] in the whole vocabulary.
    transform: Transform  # The temperature is a number or [T].
    needs: frozenset[str]  # Names of statistics.
    shard: WholeVocabulary  # This rank's slice of the vocabulary.
    all_columns: bool = False  # True if this rank holds the whole vocabulary.
    # Measurements in addition to the statistics, such as divergences; see `teacher.measuring`.
    beside: tuple[Any, ...] = ()
    # Matmuls for the logits and for the hidden gradient. `FixedProducts` sum in a fixed order, so
    # that the bits of a row do not depend on other rows.
    products: Products = PLAIN

    def take(self, index: Tensor) -> RowContext:
        """Return a copy of this `RowContext` for the tokens `index` only."""
        return self._replace(
            targets=self.targets[index],
            transform=self.transform.rows(index),
            beside=tuple(part.take(index) for part in self.beside),
        )

    def forward(self, rows: Rows, columns: slice = ALL) -> Forward:
        """Return the inputs of the kernel that computes a tile's statistics, without the logits."""
        first = self.shard.first + (columns.start or 0)
        return Forward(self.targets[rows], first, self.transform.rows(rows), self.needs)

    def backward(
        self, rows: Rows, columns: slice, inputs: BackwardInputs, dtype: torch.dtype | None = None
    ) -> Backward:
        """Return the inputs, except the logits, of the kernel that computes a tile's gradient."""
        stats, normalizer = inputs.measured
        coefficients, extras, _ = inputs.coefficients
        # With `extras` (such as candidates' log-probs) no kernel reads `Backward.all_columns`.
        logits = isinstance(inputs.tile, Tensor) and not extras
        return Backward(
            self.targets[rows],
            self.shard.first + (columns.start or 0),
            self.transform.rows(rows),
            normalizer,
            coefficients,
            stats.logp,
            dtype,
            all_columns=self.all_columns and columns is ALL and logits,
        )

    def measured(self, partials: SoftmaxState | None) -> Measured:
        """Return the statistics over the whole vocabulary, from the online-softmax state of this
        rank's slice."""
        assert partials is not None
        return self.shard.measured(self.acts, partials, self.needs)


def rows_left(live: Tensor | None, *shares: HostCopy | None) -> Tensor | None:
    """Return the ascending indices [K] of rows with a gradient, from the mask `live` [n]; None if
    nearly all rows have a gradient, so that skipping rows would not save time. `shares` are the
    fractions K / n of rows with a gradient in this and the previous tile, copied to the CPU."""
    if live is None:
        return None
    most = DENSE_SHARE if live.is_cuda else 1
    if any(share and share.tolist()[0] >= most for share in shares):
        return None
    index = live.nonzero().squeeze(1)
    return None if len(index) >= most * len(live) else index


class LogitSource:
    """Statistics and gradient of float32 or float64 logits; a subclass computes the logits."""

    dtype: torch.dtype  # Dtype of statistics and of raw logits.
    # Dtype of the gradient of the raw logits; None: the dtype of the logits.
    gradient_dtype: torch.dtype | None = None
    additions: int = 1  # Number of matrix products whose sum is a block's weight gradient.
    share: HostCopy | None = None  # Fraction of the last tile's rows with a gradient, on a GPU.

    def __init__(self, context: RowContext) -> None:
        self.context = context
        self.acts = context.acts
        self.vocabulary: int = context.shard.size  # Columns of this rank's vocabulary slice.
        self.beside = context.beside

    def __len__(self) -> int:
        return self.context.targets.shape[0]

    def raw(self, rows: Rows, columns: slice = ALL) -> Tensor:
        """Return raw logits [n, v] in new memory."""
        raise NotImplementedError

    def statistics(
        self, rows: slice, tiles: Sequence[slice], keep: bool
    ) -> tuple[Measured, SourceTile]:
        """Return the statistics and all other measurements of the tokens `rows` over the whole
        vocabulary, from the logits in `tiles` (slices of this rank's columns). With `keep`, `tiles`
        must be a single tile, and the second result is the tile's logits, which the gradient
        needs."""
        partials: SoftmaxState | None = None
        raw = tile = None
        states: list[Any] = [None] * len(self.beside)
        for columns in tiles:
            raw = tile = None  # Free the tile before the next tile is computed.
            raw = self.raw(rows, columns)
            forward = self.context.forward(rows, columns)
            tile = LogitTile(raw, forward.first, self.acts)
            states = [p.add(rows, tile, s) for p, s in zip(self.beside, states, strict=True)]
            partials = self.acts.partials(raw, forward, partials)
        return self.completed(rows, self.context.measured(partials), states), raw if keep else None

    def completed(self, rows: slice, measured: Measured, states: Sequence[Any] = ()) -> Measured:
        """Add the values of `beside` (divergences, candidates and other measurements), with the
        inputs of their gradient, to `measured.stats.extras`."""
        stats, normalizer = measured
        if PEAK in self.context.needs:
            stats.extras[PEAK] = normalizer.max_logit.clone()
        for part, state in zip(self.beside, states, strict=True):
            stats.extras.update(part.value(rows, state, normalizer))
        return measured

    def logit_gradient(self, rows: slice, columns: slice, inputs: BackwardInputs) -> LogitGradient:
        """Return the gradient of the tile's logits, for rows with a gradient. The kernel for all
        rows is launched before the CPU reads how many rows have a gradient. If most rows of the
        previous tile had a gradient, the CPU does not read this tile's number of such rows."""
        raw = inputs.tile if isinstance(inputs.tile, Tensor) else self.raw(rows, columns)
        live = inputs.live
        share = None if live is None else HostCopy(live.mean(0, True, dtype=torch.float32))
        gradient = self.gradient_(raw, rows, columns, inputs)
        index = rows_left(live, self.share, share)
        self.share = share if raw.is_cuda else None
        if index is None:
            return LogitGradient(gradient, rows, columns)
        return LogitGradient(compact_(gradient, index), index + (rows.start or 0), columns)

    def gradient_(self, raw: Tensor, rows: Rows, columns: slice, inputs: BackwardInputs) -> Tensor:
        """Return the gradient of a tile's raw logits, including the gradient of the teachers'
        divergences, written over `raw`."""
        others = self.context.backward(rows, columns, inputs, self.gradient_dtype)
        extras = inputs.coefficients.extras
        parts = [part for part in self.beside if part.slopes(extras) is not None]
        if not parts:
            return self.acts.logit_gradient_(raw, others)
        gradient: Any = None
        # Every iteration of the loop reads the student's logits, so that only the last iteration
        # may write the gradient over the student's logits.
        for part in parts:
            of_part = part.vjp(rows, columns, inputs.measured, part.slopes(extras))
            last = others if part is parts[-1] else None
            gradient = self.acts.part_gradient_(raw, of_part, gradient, last)
        return gradient  # type: ignore[no-any-return]


class LinearLogits(LogitSource):
    """`LogitSource` of a linear head: the logits are a sum of matrix products, of the head and of
    each adapter, for any backend, dtype and teacher."""

    def __init__(
        self,
        tensors: Sequence[Any],  # Features and weight of each matmul in turn, then bias or None.
        context: RowContext,
        *,
        # Dtype of the matmuls (under autocast); None: the dtype of the tensors.
        compute_dtype: torch.dtype | None = None,
        # Logits are rounded to this dtype; None: no rounding.
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(context)
        self.products = context.products
        *pairs, self.full_bias = tensors
        self.features = pairs[::2]
        self.full_weights = pairs[1::2]
        self.logits_dtype, scored = logits_dtype, slice(self.vocabulary)
        # Leave out the padding rows of the weight, whose index is `vocabulary` or higher.
        self.weights = [weight[scored] for weight in self.full_weights]
        self.bias: Tensor | None = None if self.full_bias is None else self.full_bias[scored]
        if compute_dtype is not None:
            self.weights = [w.to(compute_dtype) for w in self.weights]
        x = self.features[0]
        self.dtype = sum_dtype(x.dtype)
        self.gradient_dtype = x.dtype if x.is_cuda and x.dtype.itemsize == 2 else None

    def take(self, index: Tensor) -> LinearLogits:
        """Return a copy of this `LogitSource` for the tokens `index` only."""
        some = copy(self)
        LogitSource.__init__(some, self.context.take(index))
        some.features = [features[index] for features in self.features]
        return some

    def logit_gradient(self, rows: slice, columns: slice, inputs: BackwardInputs) -> LogitGradient:
        if inputs.tile is not None or not any(part.own_logits for part in self.beside):
            return super().logit_gradient(rows, columns, inputs)
        # Only some tokens at a time have the logits of both student and teacher in memory.
        v = len(self.weights[0][columns])
        count = rows.stop - rows.start
        dtype = self.gradient_dtype
        width = v if dtype is None else 8 * -(-v // 8)  # Align rows to 16 bytes.
        gradient = self.features[0].new_empty(count, width, dtype=dtype or self.dtype)[:, :v]
        for part in steps(count, GRAIN * -(-count // (GRAIN * PARTS))):
            at = slice(rows.start + part.start, rows.start + part.stop)
            gradient[part] = self.gradient_(self.raw(at, columns), at, columns, inputs.rows(part))
        return LogitGradient(gradient, rows, columns)

    def _biased(self, arguments: R, columns: slice = ALL) -> R:
        """Return a copy of `arguments` whose field `transform` holds the bias of the vocabulary
        columns `columns`, for a kernel that computes the matmul and adds the bias."""
        if self.bias is None:
            return arguments
        return arguments._replace(transform=replace(arguments.transform, bias=self.bias[columns]))

    def raw(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        """Return raw logits. The head's matmul runs last and adds the logits of the adapters,
        because its long computation hides the time to read the adapters' logits."""
        out = None
        for features, weight in zip(reversed(self.features), reversed(self.weights), strict=True):
            out = self.products.logits(features[rows], weight[columns], out).to(self.dtype)
        assert out is not None
        if self.bias is not None:
            out += self.bias[columns]
        return out if self.logits_dtype is None else out.to(self.logits_dtype).to(self.dtype)


class ExpLogits(LinearLogits):
    """Linear head whose matmul kernel writes exp(z - shift) [n, V] in bfloat16 in place of the
    logits z; `shift` is close to each token's largest z."""

    # True: one pass over tiles of logits that never leave the chip computes the statistics and,
    # with `keep`, sums for the hidden gradient.
    on_chip = False

    def statistics(
        self, rows: slice, tiles: Sequence[slice], keep: bool
    ) -> tuple[Measured, SourceTile]:
        x = self.features[0] if rows is ALL else self.features[0][rows]
        weight = self.weights[0]
        forward = self._biased(self.context.forward(rows))
        shard = self.context.shard
        tile: ExpTile | ShiftedSums | None
        if self.on_chip:
            partials, tile = self.acts.narrow_partials(x, weight, forward, keep)
            measured = self.context.measured(partials)
        else:
            tile = ExpTile.empty(x.shape[0], weight.shape[0], weight) if keep else None
            if shard.group is None:
                measured = self.acts.product_statistics(x, weight, forward, shard.vocabulary, tile)
            else:
                partials = self.acts.product_partials(x, weight, forward, tile)
                measured = self.context.measured(partials)
        # `self.beside` holds only log-probs of candidates, not of the tail (all other columns).
        states = [
            (self.acts.chosen_logits(x, weight, part.columns(rows, ALL), forward.transform), None)
            for part in self.beside
        ]
        if states or PEAK in forward.needs:
            measured = self.completed(rows, measured, states)
        return measured, tile

    def logit_gradient(self, rows: slice, columns: slice, inputs: BackwardInputs) -> LogitGradient:
        backward = self.context.backward(rows, columns, inputs)
        if isinstance(inputs.tile, ExpTile):
            return self._of_terms(rows, inputs, inputs.tile, backward)
        # Recompute the logits by a matmul kernel that writes their gradient in place of the logits.
        x = self.features[0][rows]
        weight = self.weights[0][columns]
        gradient = self.acts.product_gradient(x, weight, self._biased(backward, columns))
        if chosen := self._chosen(rows, columns, inputs):
            self.acts.chosen_gradient_(gradient, chosen, backward)
        return LogitGradient(gradient, rows, columns)

    def _chosen(self, rows: slice, columns: slice, inputs: BackwardInputs) -> Chosen | None:
        """Return the candidates' columns, log-probs and derivatives, or None if the candidates have
        no gradient. If candidates have a gradient, `self.beside` holds only these candidates."""
        if (slopes := inputs.coefficients.extras.get(CANDIDATES)) is None:
            return None
        (part,) = self.beside
        logps = inputs.measured.stats.extras[CANDIDATES]
        return Chosen(part.columns(rows, columns), logps[:, :-1], slopes[:, :-1])

    def _of_terms(
        self, rows: slice, inputs: BackwardInputs, exp_tile: ExpTile, backward: Backward
    ) -> LogitGradient:
        """Return the gradient of the raw logits, computed from the stored exp(z - shift), where
        `shift` is close to each token's largest logit z. All kernels but the matmuls are queued
        before the CPU reads the number of rows with a gradient, so that the GPU does not wait for
        the CPU before the matmuls."""
        acts = self.acts
        x = self.features[0] if rows is ALL else self.features[0][rows]
        live = inputs.live
        order = None if live is None else acts.dense_order(live, int(DENSE_SHARE * len(live)))
        count_copy = order and HostCopy(order.count)
        chosen = self._chosen(rows, ALL, inputs)
        c = backward.coefficients
        multiple: Tensor | None = None
        features: Tensor | None = None
        # For a loss of log-probs and log-sum-exp without a soft cap, a row of the logits' gradient
        # is a multiple of the row in `exp_tile`, except in the target's column.
        if c.prob is not None and c.entropy is c.uniform is backward.transform.softcap is None:
            least = chosen and chosen.slopes.abs().amax(1)
            options = {"order": order, "least": least}
            multiple, features = acts.exp_multiple_(exp_tile, backward, x=x, **options)
        else:
            acts.exp_gradient_(exp_tile, backward, order=order)
        if chosen:
            options = {"multiples": multiple, "order": order}
            acts.chosen_gradient_(exp_tile.exp_logits, chosen, backward, **options)
        dlogits = exp_tile.exp_logits
        places = rows
        if order and count_copy and (count := count_copy.tolist()[0]) < len(x):
            dlogits = dlogits[:count]
            places = order.rows[:count] + (rows.start or 0)
            if multiple is not None and features is not None:
                multiple = multiple[:count]
                features = features[:count]
        return LogitGradient(dlogits, places, ALL, multiple, features)


class NarrowLogits(ExpLogits):
    """Logits of a head with a small hidden width H, in tiles that never leave the chip: passes over
    the vocabulary compute statistics and gradients tile by tile."""

    on_chip = True

    def logit_gradient(self, rows: slice, columns: slice, inputs: BackwardInputs) -> LogitGradient:
        """Store the logits of a block in memory, for a loss on candidates, and return their
        gradient. If `can_fuse` accepts features and weight, the matmul kernel writes the gradient
        in place of the logits."""
        fits = self.acts.can_fuse(self.features[0], self.weights[0])
        return (ExpLogits if fits else LinearLogits).logit_gradient(self, rows, columns, inputs)

    def add_to(
        self,
        sums: Any,  # A `SlabAccumulator`.
        inputs: BackwardInputs,  # Inputs of all tokens.
        # Sum of weight rows for each block of tokens, which gives the hidden gradient. If `tiles`
        # is empty, the hidden gradient needs another pass over the vocabulary.
        tiles: Sequence[SourceTile],
        blocks: Sequence[Chunk],
        skip_rows: bool,
        factor: Tensor | None,  # The weight's gradient is multiplied by `factor`.
    ) -> None:
        """Add the gradients of features, weight and bias to `sums`. With `skip_rows`, the pass that
        computes the weight's gradient leaves out tokens without a gradient."""
        x = self.features[0]
        weight = self.weights[0]
        shifted = [tile for tile in tiles if isinstance(tile, ShiftedSums)]
        for total in sums.hidden.totals.values():
            for i, block in enumerate(blocks):
                rows = block.rows
                backward = self._biased(self.context.backward(rows, ALL, inputs.rows(rows)))
                of_block = x[rows], weight, backward, *shifted[i : i + 1]
                total[rows] = self.acts.narrow_hidden(*of_block)
        index = rows_left(inputs.coefficients.live() if skip_rows else None)
        some = self
        if index is not None:
            some = self.take(index)
            inputs = inputs.rows(index)
        outs = sums.totals.get(0), sums.bias
        if len(some) and outs != (None, None):
            backward = self._biased(some.context.backward(ALL, ALL, inputs))
            self.acts.narrow_weight_(some.features[0], weight, backward, *outs, factor)
            sums.fresh.clear()
