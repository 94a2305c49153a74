"""The loop of every call: laws 1 and 4.

    for block of tokens:
        partials of its tiles -> merge over ranks -> statistics        act one
        coefficients of the objective -> dL/draw -> sums               act two, now or later

T tokens, V vocabulary, n tokens of a block, v columns of a tile. A source owns both acts on its
logits; the schedules differ in which blocks and columns the loop visits and when act two runs
(`Plan.pull`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch.packing import PackedBatch
from ..kernels.interface import Held, Measured
from ..objective.bound import Bound, Gradient
from ..objective.statistics import STATISTICS, Normalizer, Statistics
from ..objective.taped import Taped
from ..objective.tolerance import Tolerance
from ..softmax.given import GivenSums, WalkSoftmax
from ..softmax.linear import LinearSoftmax, RawSoftmax, rows_left, unit_gradient
from ..softmax.rows import ALL
from ..softmax.sums import Into, RowSums, SlabSums
from .plan import Chunk, Plan

Gradients = list[Tensor | None]


class Outcome(NamedTuple):
    """What a forward pass measured: statistics [T], each term's value [K] in float64."""

    stats: Statistics
    values: Tensor


PullBack = Callable[[Tensor, Any], Gradients]


class Swept(NamedTuple):
    """What act one of all tokens leaves behind: statistics, and what act two of the schedule needs
    beside coefficients.

    Attributes:
        held: what act one kept of each block's logits; used up by act two.
        sums: dlogp/dhidden of a frozen head, still to be scaled by each token's slope.
    """

    whole: Measured
    held: list[Any]
    sums: Any = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the loop is to do with a source.

    Attributes:
        bind: the objective bound to `batch`; made once, while the first product runs.
        slices: of the vocabulary on the ranks of a group.
        vocabulary: of the whole model.
        sums: where the gradients of a linear source go.
        at_once: the objective's gradient is known before the statistics are.
        tolerance: which rows are left out in addition to those without gradient.
        unscored, inplace: of given logits, see `GivenSums`.
    """

    plan: Plan
    batch: PackedBatch
    bind: Callable[[], Bound | Taped]
    slices: Any
    vocabulary: int
    needs: frozenset[str]
    sums: Into
    at_once: bool = False
    tolerance: Tolerance | None = None
    unscored: Tensor | None = None
    inplace: bool = False

    def gradient(
        self, stats: Statistics, block: Chunk | None = None, needed: bool = True
    ) -> Gradient:
        """The objective's coefficients on some tokens; on all of them without a block."""
        bound = self.bind()
        if block is None:
            found = bound.gradient(stats, self.batch, ALL, needed)
        else:
            found = bound.of_piece(stats, self.batch, block)
        if self.tolerance is None or not needed:
            return found
        rows = ALL if block is None else block.rows
        return self.tolerance(found, stats, rows, bound.scale)

    @property
    def groups(self) -> tuple[Any, ...]:
        """Of the vocabulary's slices, and of segments that run across ranks."""
        return self.slices.group, self.batch.segments.group

    def row_sums(self, source: RawSoftmax) -> Any:
        if isinstance(source, WalkSoftmax):
            return source
        if not isinstance(source, LinearSoftmax):
            return GivenSums(source, self.unscored, self.inplace, self.batch.live)  # type: ignore[arg-type]
        blocks = [block.rows for block in self.plan.chunks]
        return RowSums(source, self.sums, self.slices.hidden(source, self.sums.wants, blocks))


# ---------------------------------------------------------------------- forward


def forward(work: Work, source: RawSoftmax) -> tuple[Outcome, PullBack | None]:
    """What the schedule does before the upstream gradient is known, and a function for the rest."""
    if work.at_once:
        assert isinstance(source, WalkSoftmax)
        return _walk_at_once(work, source)
    pull = work.plan.pull
    if pull == "now":
        return _in_one_pass(work, source)
    swept = sweep(work, source)
    stats = swept.whole.stats
    gradient = work.gradient(stats, needed=pull != "never")
    outcome = Outcome(stats, gradient.values)
    if pull == "never":
        return outcome, None
    if pull == "held":  # no later: what is held takes more than the gradients do
        sums = _from_held(work, source, swept, gradient)
        return outcome, lambda upstream, _: sums.finish(work.bind().owed(upstream))

    def back(upstream: Tensor, again: Any) -> Gradients:
        bound, found = work.bind(), gradient
        factor = bound.owed(upstream)
        if factor is not None and bound.scale is None:
            found = found.map(lambda t: t * factor.to(t.dtype))
        return pull_back(work, again, swept, found, None if bound.scale is None else factor)

    return outcome, back


def _in_one_pass(work: Work, source: RawSoftmax) -> tuple[Outcome, PullBack]:
    """Both acts block by block."""
    found: list[Measured] = []
    sums: Any = None
    values: Tensor | None = None
    blocks = work.plan.blocks
    for block in blocks:
        measured, held = measure(work, source, block.rows, keep=True)
        sums = sums or work.row_sums(source)  # after the first product is queued
        gradient = work.gradient(measured.stats, block if len(blocks) > 1 else None)
        values = gradient.values if values is None else values + gradient.values
        live = _live(work, gradient)
        sums.add(source.pull(block.rows, ALL, measured, gradient, held, live))
        found.append(measured)
        del held  # it is used up
    whole = join(work, source, found)
    sums = sums or work.row_sums(source)
    if values is None:
        values = whole.normalizer.peak.new_zeros(len(work.bind().named), dtype=torch.float64)
    return Outcome(whole.stats, values), lambda upstream, _: sums.finish(
        work.bind().owed(upstream)
    )


def sweep(work: Work, source: RawSoftmax) -> Swept:
    """Act one on all tokens; for a frozen head also act two, with coefficients of 1."""
    pull, found = work.plan.pull, []
    kept: list[Any] = []
    sums: Any = None
    for block in work.plan.blocks:
        measured, held = measure(work, source, block.rows, keep=pull in ("unit", "held"))
        if pull == "unit":
            sums = sums or work.row_sums(source)
            unit = unit_gradient(measured.normalizer)
            sums.add(source.pull(block.rows, ALL, measured, unit, held))
        elif pull == "held":
            kept.append(held)
        found.append(measured)
        del held  # before the next one is made
    if pull == "unit":
        sums = sums or work.row_sums(source)
    return Swept(join(work, source, found), kept, sums)


def stored(held: Any, tensors: list[Tensor]) -> Callable[[Iterator[Tensor]], Any]:
    """Add the tensors that a source kept of one block to a list; return a function that builds what
    was kept from these tensors. (What the source can compute again is left out.)"""
    if held is None:
        return lambda again: None
    if isinstance(held, Held):
        tensors += [held.terms, held.reference]
        return lambda again: Held(terms=next(again), reference=next(again))
    if isinstance(held, tuple):
        raw, _, kept = held
        tensors.append(raw)
        inner = stored(kept, tensors)
        return lambda again: (next(again), None, inner(again))
    tensors.append(held)
    return next


def measure(
    work: Work, source: RawSoftmax, rows: slice, keep: bool = False
) -> tuple[Measured, Any]:
    """Act one on some tokens over the whole vocabulary; with `keep`, their logits are one tile and
    held."""
    columns = source.vocabulary if keep or work.plan.terms else work.plan.tile.columns
    tiles = [ALL] if columns >= source.vocabulary else steps(source.vocabulary, columns)
    return source.statistics(rows, tiles, work.slices, work.vocabulary, keep)


def join(work: Work, source: RawSoftmax, found: list[Measured]) -> Measured:
    """[T] vectors from those of consecutive blocks."""
    if len(found) == 1:
        return found[0]
    if not found:
        empty = torch.empty(0, dtype=source.dtype, device=work.batch.targets.device)
        stats = Statistics(
            **{name: empty.clone() for name in work.needs if name in STATISTICS},  # type: ignore[arg-type]
            divergences={t.key: empty.clone() for t in source.teachers}
            | {part.key: empty.new_empty(0, *part.more) for part in source.beside},
        )
        return Measured(stats, Normalizer(empty, empty))
    all_stats = [m.stats for m in found]
    names, keys = all_stats[0].tensors(), all_stats[0].divergences
    stats = Statistics(
        **{name: torch.cat([getattr(s, name) for s in all_stats]) for name in names},  # type: ignore[arg-type]
        divergences={key: torch.cat([s.divergences[key] for s in all_stats]) for key in keys},
    )
    normalizer = Normalizer(
        torch.cat([m.normalizer.peak for m in found]),
        torch.cat([m.normalizer.log_sum for m in found]),
    )
    return Measured(stats, normalizer)


def steps(total: int, step: int) -> list[slice]:
    """Consecutive slices of at most `step`."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _live(work: Work, gradient: Gradient) -> Tensor | None:
    """[n] bool, the rows that carry a gradient, if the others are to be left out (law 5)."""
    return gradient.live() if work.plan.skip_rows else None


def _walk_at_once(work: Work, source: WalkSoftmax) -> tuple[Outcome, PullBack]:
    """Both acts in one launch, where the gradient is known before the statistics."""
    bound = work.bind()
    declared = 1.0 if bound.declared is None else bound.declared
    known = bound.beforehand(work.batch, work.needs, declared)
    partials = source.partials_and_pull(known)
    stats = work.slices.measured(source.acts, partials, work.needs, work.vocabulary).stats
    values = bound.gradient(stats, work.batch, ALL, needed=False).values
    return Outcome(stats, values), lambda upstream, _: source.finish(bound.owed(upstream))


# ---------------------------------------------------------------------- backward


def pull_back(
    work: Work, source: RawSoftmax, swept: Swept, gradient: Gradient, factor: Tensor | None
) -> Gradients:
    """Act two of a whole sweep: gradients times `factor`, the upstream gradient being in the
    coefficients."""
    whole, pull = swept.whole, work.plan.pull
    if pull == "unit":
        return _scale(work, swept, gradient, factor)
    if pull == "held":
        return _from_held(work, source, swept, gradient).finish(factor)
    if isinstance(source, WalkSoftmax):
        source.pull(ALL, ALL, whole, gradient)
        return source.finish(factor)
    if pull == "blocks":
        return _in_blocks(work, source, gradient, factor)
    if not isinstance(source, LinearSoftmax):
        return _given_slabs(work, source, whole, gradient, factor)
    return in_slabs(work, source, whole, gradient, factor)


def _scale(work: Work, swept: Swept, gradient: Gradient, factor: Tensor | None) -> Gradients:
    """A frozen head: dlogp/dhidden per token times the objective's slope, plus what the slopes of
    candidates add to it."""
    sums, source, prob = swept.sums, swept.sums.source, gradient.coefficients.prob
    sums.hidden.settle()
    row = gradient.values.new_zeros(len(work.batch), dtype=source.dtype) if prob is None else -prob
    if factor is not None:
        row = row * factor.to(row.dtype)
    row = work.slices.own(row)
    chosen = [part for part in source.beside if part.key in gradient.divergences]
    for i, total in enumerate(sums.hidden.totals):
        if total is None:
            continue
        sums.hidden.totals[i] = total = source.acts.scaled_rows(total, row, out=total)
        for part in chosen:
            slopes, targets = gradient.divergences[part.key], source.tokens.targets
            values, pairs = part.beside_logp(swept.whole, slopes, targets, work.vocabulary)
            if factor is not None:
                values = values * factor.to(values.dtype)
            weight = source.weights[i]
            source.acts.support_input_gradient(values, weight, pairs, total, add=True)
    return sums.finish(None)


def _from_held(work: Work, source: RawSoftmax, swept: Swept, gradient: Gradient) -> RowSums:
    """Act two of what was held, block by block."""
    whole, sums, blocks = swept.whole, work.row_sums(source), work.plan.blocks
    for block in blocks:
        rows, measured, part = block.rows, whole, gradient
        if len(blocks) > 1:
            measured, part = whole.rows(rows), gradient.rows(rows)
        if work.slices.is_spread:  # they come in a collective, whatever is live
            _ = [features[rows] for features in source.features]  # type: ignore[attr-defined]
        held = swept.held.pop(0)
        sums.add(source.pull(rows, ALL, measured, part, held, _live(work, part)))
        del held  # it is used up
    return sums


def _in_blocks(
    work: Work, source: RawSoftmax, gradient: Gradient, factor: Tensor | None
) -> Gradients:
    """In blocks of tokens, whose logits are computed again. Their statistics are merged again too:
    where p is near 1, 1 - p needs the very logits that p comes from."""
    sums = work.row_sums(source)
    for block in work.plan.chunks:
        part = gradient.rows(block.rows)
        measured, held = measure(work, source, block.rows, keep=True)
        sums.add(source.pull(block.rows, ALL, measured, part, held, _live(work, part)))
        del held  # before the next one is made
    return sums.finish(factor)


def _given_slabs(
    work: Work, source: RawSoftmax, whole: Measured, gradient: Gradient, factor: Tensor | None
) -> Gradients:
    """The gradient of given logits, a tile at a time."""
    sums = work.row_sums(source)
    for columns in steps(source.vocabulary, work.plan.tile.columns):
        for rows in steps(len(source), work.plan.tile.rows):
            found = source.pull(rows, columns, whole.rows(rows), gradient.rows(rows))
            sums.add(found, columns)
    return sums.finish(factor)


def in_slabs(
    work: Work, source: LinearSoftmax, whole: Measured, gradient: Gradient, factor: Tensor | None
) -> Gradients:
    """In slabs of columns: each slab of the weight gradient is written once."""
    live, all_of_it = _live(work, gradient), source
    index = None if live is None else rows_left(live)
    if index is not None:  # once, and not for each slab
        source, whole, gradient = source.take(index), whole.rows(index), gradient.rows(index)
    # Ranks send all rows, whether or not they carry a gradient: collectives never depend on data.
    dense = index is not None and bool(work.slices.name)
    target = all_of_it if dense else source
    count, tile = len(source), work.plan.tile
    once = count <= tile.rows and factor is None and source.additions == 1
    into = work.sums._replace(once=once)
    sums = SlabSums(target, into, work.slices.hidden(target, into.wants, None))
    for columns in steps(source.vocabulary, tile.columns):
        sums.open(columns)
        for rows in steps(count, tile.rows):
            last = rows.stop == count and columns.stop == source.vocabulary
            found = source.pull(rows, columns, whole.rows(rows), gradient.rows(rows))
            sums.add(found.at(index) if dense else found, last)  # type: ignore[arg-type]
            del found  # before the next one is made
        sums.close(factor)
    found = sums.finish(factor)
    if index is not None and not dense:
        for i in range(0, 2 * len(source.features), 2):
            part = found[i]
            if part is not None:
                full = part.new_zeros(len(work.batch), part.shape[1])
                found[i] = full.index_copy_(0, index, part)
    return found
