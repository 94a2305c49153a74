"""Act two of a whole sweep, once the coefficients of all tokens are there.

T tokens, V vocabulary, n tokens of a block, v columns of a tile.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..objective.bound import Gradient
from ..softmax.given import WalkSoftmax
from ..softmax.linear import LinearSoftmax, RawSoftmax, rows_left
from ..softmax.rows import ALL, Known
from ..softmax.sums import SlabSums
from .work import Gradients, Swept, Work, steps


def pull_back(
    work: Work, source: RawSoftmax, swept: Swept, gradient: Gradient, factor: Tensor | None
) -> Gradients:
    """Act two of a whole sweep: gradients times `factor`, the upstream gradient being in the
    coefficients."""
    plan, known = work.plan, Known(swept.whole, gradient)
    if plan.pull == "unit":
        return _scale(work, swept, gradient, factor)
    if plan.pull == "held":
        return from_held(work, source, swept, gradient).finish(factor)
    if isinstance(source, LinearSoftmax):
        return in_slabs(work, source, known, factor)
    if isinstance(source, WalkSoftmax):
        source.pull(ALL, ALL, known)
        return source.finish(factor)
    sums = work.sums(source, work.into, plan)  # of given logits, a tile at a time
    for columns in steps(source.vocabulary, plan.tile.columns):
        for rows in steps(len(source), plan.tile.rows):
            sums.add(source.pull(rows, columns, known.rows(rows)), columns)
    return sums.finish(factor)


def _scale(work: Work, swept: Swept, gradient: Gradient, factor: Tensor | None) -> Gradients:
    """A frozen head: dlogp/dhidden per token times the objective's slope, plus what the slopes of
    candidates add to it."""
    sums, source, prob = swept.sums, swept.sums.source, gradient.coefficients.prob
    sums.hidden.settle()
    if prob is None:
        row = gradient.values.new_zeros(len(work.packing), dtype=source.dtype)
    else:
        row = -prob
    if factor is not None:
        row = row * factor.to(row.dtype)
    row = row / work.unit
    multiple, sums.hidden.multiple = sums.hidden.multiple, None
    chosen = [part for part in source.beside if part.key in gradient.divergences]
    for i, total in enumerate(sums.hidden.totals):
        if total is None:
            continue
        if multiple is not None:
            source.acts.scaled_rows(total, multiple, out=total)
        sums.hidden.totals[i] = total = source.acts.scaled_rows(total, row, out=total)
        for part in chosen:
            slopes, targets = gradient.divergences[part.key], source.tokens.targets
            values, pairs = part.beside_logp(swept.whole, slopes, targets, work.vocabulary)
            if factor is not None:
                values = values * factor.to(values.dtype)
            source.acts.support_sums(values, source.weights[i], pairs, total, add=True)
    return sums.finish(None)


def from_held(work: Work, source: RawSoftmax, swept: Swept, gradient: Gradient) -> Any:
    """Act two of what was held, block by block."""
    sums, blocks = work.sums(source, work.into, work.plan), work.plan.blocks
    whole = Known(swept.whole, gradient)
    for block in blocks:
        known = whole if len(blocks) == 1 else whole.rows(block.rows)
        known = known._replace(held=swept.held.pop(0), live=work.live(known.gradient))
        sums.add(source.pull(block.rows, ALL, known))
        del known  # what it holds is used up
    return sums


def in_slabs(work: Work, source: LinearSoftmax, known: Known, factor: Tensor | None) -> Gradients:
    """In slabs of columns: each slab of the weight gradient is written once."""
    live, all_of_it = work.live(known.gradient), source
    index = rows_left(live)()
    if index is not None:  # once, and not for each slab
        source, known = source.take(index), known.rows(index)
    # Ranks send all rows, whether or not they carry a gradient: collectives never depend on data.
    dense = index is not None and work.slices.group is not None
    target = all_of_it if dense else source
    count, tile = len(source), work.plan.tile
    once = count <= tile.rows and factor is None and source.additions == 1
    sums = SlabSums(target, work.into, once)
    for columns in steps(source.vocabulary, tile.columns):
        sums.open(columns)
        for rows in steps(count, tile.rows):
            last = rows.stop == count and columns.stop == source.vocabulary
            found = source.pull(rows, columns, known.rows(rows))
            sums.add(found.at(index) if dense else found, last)  # type: ignore[arg-type]
            del found  # before the next one is made
        sums.close(factor)
    found = sums.finish(factor)
    if index is not None and not dense:
        for i in range(0, 2 * len(source.features), 2):
            part = found[i]
            if part is not None:
                full = part.new_zeros(len(work.packing), part.shape[1])
                found[i] = full.index_copy_(0, index, part)
    return found
