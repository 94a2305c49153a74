"""Softmax over a few allowed ids of each token (`support_ids`): K dot products per token in place
of V.

T tokens, P pairs of a token and a column, n tokens of a block, H hidden width. A token without
allowed ids has a softmax over the whole vocabulary, by an ordinary `LinearLogits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ..batch.support import SupportPairs
from ..kernels.interface import Measured, Support
from ..statistics.softmax import finish
from .beside import Pairs
from .linear import LinearLogits
from .rows import ALL, BackwardInputs, LogitGradient, PairGradient, Rows, SourceTile, of_several


class SupportTile(NamedTuple):
    """Tensors that `SupportLogits` keeps of a block of tokens for the gradient."""

    raw: Tensor  # Shape [P].
    full: LinearLogits | None = None  # Logits of the tokens that allow the whole vocabulary.
    of_full: SourceTile = None


class SupportLogits(LinearLogits):
    """`LogitSource` for a softmax over each token's allowed ids alone, from the raw logits of P
    pairs (token, allowed id). The argument `full` is a `LogitSource` that computes the logits in
    all columns, for tokens without `support_ids`."""

    def __init__(self, full: LinearLogits, support: SupportPairs) -> None:
        vars(self).update(vars(full))
        self.full = full
        self.support = support
        self.additions = 1 if support.free is None else 2

    def take(self, index: Tensor) -> SupportLogits:
        return SupportLogits(self.full.take(index), self.support.take(index))

    def raw(self, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
        """Return a raw logit [P] for each pair of a token in `rows` and one of its allowed ids in
        `columns`."""
        assert isinstance(rows, slice)
        support = self._window(rows, columns)
        out = None
        for features, weight in zip(self.features, self.weights, strict=True):
            out = self.acts.support_logits(features[rows], weight[columns], support, out)
        assert out is not None
        if self.bias is not None:
            places = (support.ids - support.first).clamp(0, support.size - 1)
            out += self.bias[columns][places].to(out.dtype)
        return out if self.logits_dtype is None else out.to(self.logits_dtype).to(self.dtype)

    def statistics(
        self, rows: slice, tiles: Sequence[slice], keep: bool
    ) -> tuple[Measured, SourceTile]:
        raw = self.raw(rows)
        support = self._window(rows, ALL)
        partials = self.acts.support_partials(raw, support, self.context.forward(rows))
        pairs = Pairs(raw, support, self.acts)
        states = [part.add(rows, pairs, None) for part in self.beside]
        stats, normalizer = finish(self.context.shard.merge(partials), 1, self.context.needs)
        if stats.mean_logit is not None:
            stats = replace(stats, mean_logit=stats.mean_logit / self.support.counts[rows])
        measured = self.completed(rows, Measured(stats, normalizer), states)
        tile = SupportTile(raw)
        index = self.support.unrestricted(rows)
        if index is not None:
            full = self.full.take(index + (rows.start or 0))
            others, of_full = full.statistics(slice(0, len(index)), tiles, keep)
            tile = SupportTile(raw, full, of_full)
            both = [measured, others]
            measured = of_several(lambda pair: pair[0].index_copy(0, index, pair[1]), both)
        return measured, tile if keep else None

    def logit_gradient(self, rows: slice, columns: slice, inputs: BackwardInputs) -> LogitGradient:
        tile = inputs.tile
        if not isinstance(tile, SupportTile):
            tile = SupportTile(self.raw(rows, columns))
        pairs = self._pairs(tile.raw, rows, columns, inputs)
        index = self.support.unrestricted(rows)
        if index is None:
            nothing = tile.raw.new_empty(0, pairs.support.size)
            return LogitGradient(nothing, slice(0, 0), columns, pairs=pairs)
        places = index + (rows.start or 0)
        full = self.full.take(places) if tile.full is None else tile.full
        live = None if inputs.live is None else inputs.live[index]
        of_others = inputs.rows(index)._replace(tile=tile.of_full, live=live)
        gradient = full.logit_gradient(slice(0, len(index)), columns, of_others).at(places)
        return gradient._replace(pairs=pairs)

    def _pairs(
        self, raw: Tensor, rows: slice, columns: slice, inputs: BackwardInputs
    ) -> PairGradient:
        """Return the gradient of the raw logit of each pair (token, allowed id). The mean logit is
        the mean over the token's allowed ids, not over the whole vocabulary."""
        backward = self.context.backward(rows, columns, inputs)
        slopes = inputs.coefficients.extras
        support = self._window(rows, columns)
        c = backward.coefficients
        if c.uniform is not None:
            size = self.context.shard.vocabulary
            c = c._replace(uniform=c.uniform * size / self.support.counts[rows].clamp_min(1))
        values = self.acts.support_gradient(raw, support, backward._replace(coefficients=c))
        for part in self.beside:
            if part.key in slopes:
                logits = Pairs(raw, support, self.acts)
                part.add_to_pairs_(values, rows, logits, inputs.measured, slopes[part.key])
        by_column = self.support.by_column(rows, support.first, support.size)
        return PairGradient(values, support, by_column, rows, self.acts)

    def _window(self, rows: slice, columns: slice) -> Support:
        size = len(range(self.vocabulary)[columns])
        return self.support.window(rows, self.context.shard.first + (columns.start or 0), size)
