"""The gradient of the logits once the coefficients of all tokens are there.

T tokens, V vocabulary, n tokens of a block, v columns of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.interface import Measured
from ..logits.accumulators import SlabAccumulator
from ..logits.linear import LinearLogits, LogitSource, rows_left
from ..logits.rows import ALL, BackwardInputs, steps
from ..objective.weighted import Coefficients
from .call import Call

Gradients = list[Tensor | None]


class ForwardResult(NamedTuple):
    """What the forward pass leaves behind.

    Attributes:
        measured: the statistics of all tokens.
        tiles: what each block's logits left, under a held schedule; they are used up.
        sums: the gradients but for a factor; of a frozen head dlogp/dhidden, still to be scaled by
            each token's slope. None: they are to be found, from what was read.
        values: each term's share of its reduced value, [K] in float64.
        coefficients: of all tokens, where the gradients still need them.
    """

    measured: Measured
    tiles: list[Any]
    sums: Any = None
    values: Any = None
    coefficients: Coefficients | None = None


def backward(
    call: Call, source: Any, result: ForwardResult, coefficients: Coefficients,
    factor: Tensor | None
) -> Gradients:  # fmt: skip
    """Gradients times `factor`; `source` where the logits are made again."""
    plan, inputs = call.plan, BackwardInputs(result.measured, coefficients)
    if plan.schedule == "frozen":
        return _of_frozen_head(call, result, coefficients, factor)
    if plan.schedule == "held":
        return of_tiles(call, source, result, coefficients).finish(factor)  # type: ignore[no-any-return]
    if isinstance(source, LinearLogits):
        return _in_slabs(call, source, inputs, factor)
    sums = call.accumulator(source)  # of given logits, a tile at a time
    for columns in steps(source.vocabulary, plan.tile.columns):
        for rows in steps(len(source), plan.tile.rows):
            sums.add(source.logit_gradient(rows, columns, inputs.rows(rows)), columns)
    return sums.finish(factor)  # type: ignore[no-any-return]


def _of_frozen_head(
    call: Call, result: ForwardResult, coefficients: Coefficients, factor: Tensor | None
) -> Gradients:
    """dlogp/dhidden per token times the objective's slope, plus what the slopes of candidates add
    to it."""
    sums, source, prob = result.sums, result.sums.source, coefficients.softmax.prob
    hidden, acts = sums.hidden, source.acts
    hidden.settle()
    logp = result.measured.stats.logp
    slope = torch.zeros_like(logp) if prob is None else -prob
    if factor is not None:
        slope = slope * factor.to(slope.dtype)
    slope = slope / call.unit(logp)
    sparse = [part for part in source.beside if part.key in coefficients.extras]
    for i, total in hidden.totals.items():
        acts.scaled_rows(total, slope, out=total)
        for part in sparse:
            slopes, targets = coefficients.extras[part.key], source.context.targets
            values, pairs = part.beside_logp(result.measured, slopes, targets)
            if factor is not None:
                values = values * factor.to(values.dtype)
            acts.support_sums(values, source.weights[i], pairs, total, add=True)
    return sums.finish(None)  # type: ignore[no-any-return]


def of_tiles(
    call: Call, source: LogitSource, result: ForwardResult, coefficients: Coefficients
) -> Any:
    """The sums of what was held, block by block."""
    sums, blocks = call.accumulator(source), call.plan.blocks
    inputs = BackwardInputs(result.measured, coefficients)
    for block in blocks:
        part = inputs if len(blocks) == 1 else inputs.rows(block.rows)
        live = part.coefficients.live() if call.plan.skip_rows else None
        part = part._replace(tile=result.tiles.pop(0), live=live)
        sums.add(source.logit_gradient(block.rows, ALL, part))
        del part  # its tile is used up
    return sums


def _in_slabs(
    call: Call, source: LinearLogits, inputs: BackwardInputs, factor: Tensor | None
) -> Gradients:
    """In slabs of columns: each slab of the weight gradient is written once."""
    live = inputs.coefficients.live() if call.plan.skip_rows else None
    index, every_row = rows_left(live), source
    if index is not None:  # once, and not for each slab
        source, inputs = source.take(index), inputs.rows(index)
    # Ranks send all rows, whether or not they carry a gradient: collectives never depend on data.
    dense = index is not None and call.shard.group is not None
    count, tile = len(source), call.plan.tile
    at_once = count <= tile.rows and factor is None and source.additions == 1
    sums = SlabAccumulator(every_row if dense else source, call.buffers, at_once)
    for columns in steps(source.vocabulary, tile.columns):
        sums.open(columns)
        for rows in steps(count, tile.rows):
            last = rows.stop == count and columns.stop == source.vocabulary
            gradient = source.logit_gradient(rows, columns, inputs.rows(rows))
            sums.add(gradient.at(index) if dense else gradient, last)  # type: ignore[arg-type]
            del gradient  # before the next one is made
        sums.close(factor)
    gradients = sums.finish(factor)
    if index is not None and not dense:
        for i in range(0, 2 * len(source.features), 2):
            part = gradients[i]
            if part is not None:
                full = part.new_zeros(len(call.scored), part.shape[1])
                gradients[i] = full.index_copy_(0, index, part)
    return gradients
