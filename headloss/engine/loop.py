"""The loop that computes a loss from blocks of tokens:

    for block in blocks of tokens:
        compute statistics of the block's logits, merged over tiles of columns and over ranks;
        compute the objective's gradient coefficients and the gradient of the logits, and multiply
        this gradient by the weight and by the hidden states.

T tokens, V vocabulary, n tokens of a block. Schedules differ in the number of tokens and vocabulary
columns of a step, and in computing the gradient at once or in the backward pass (see
`engine.autograd`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.interface import Measured
from ..logits.given import InPlaceLogits
from ..logits.linear import LogitSource
from ..logits.rows import (
    ALL,
    Accumulator,
    BackwardInputs,
    GradientSums,
    SourceTile,
    Tensors,
    of_several,
    steps,
)
from ..objective.external import ExternalLoss
from ..objective.weighted import Coefficients, WeightedObjective
from ..statistics.softmax import SoftmaxCoefficients
from .call import Call


class ForwardResult(NamedTuple):
    """The result of the forward pass."""

    measured: Measured  # Statistics of all tokens.
    # The logits of each block under the `held` schedule; computing the gradient overwrites them.
    tiles: list[SourceTile]
    # Gradients before multiplication by a common factor; with the `frozen` schedule, dlogp/dhidden
    # of each token. The field `sums` is None if all gradients are computed in the backward pass.
    sums: GradientSums | None = None
    # The loss terms with their weights, or the external loss; None until the loss is computed.
    weighted: WeightedObjective | ExternalLoss | None = None
    shares: Tensor | None = None  # Contributions to each term's reduced value, [K] float64.
    # Gradient coefficients (`c_target`, `c_prob` ..) of all tokens, if used in the backward pass.
    coefficients: Coefficients | None = None


def forward(call: Call, tensors: Tensors) -> ForwardResult:
    """Run the part of a call's schedule that does not need the upstream gradient."""
    if call.plan.in_place:
        return in_place(call, tensors)
    result = sweep(call, tensors)
    if result.shares is not None:
        return result
    schedule = call.plan.schedule
    stats = result.measured.stats
    weighted = call.weighted()
    coefficients = weighted.coefficients(stats, call.packed, None, schedule != "statistics")
    result = result._replace(weighted=weighted, shares=coefficients.shares)
    if call.tolerance is not None:
        coefficients = call.tolerance(coefficients, stats, ALL, weighted.scale)
    # The `held` schedule computes the gradients in the forward pass, because the logits of all
    # tokens, kept until the backward pass, would need more memory than the gradients.
    if schedule == "held":
        return result._replace(sums=of_tiles(call, call.open(tensors), result, coefficients))
    return result._replace(coefficients=coefficients)


def in_place(call: Call, tensors: Tensors) -> ForwardResult:
    """Return the statistics of logits that are an input of the call, without a copy of the logits.
    If the gradient may overwrite the logits, the function `in_place` also returns the gradient of
    the logits. A single launch computes statistics and gradient if the gradient of the loss has a
    closed form."""
    source = call.open(tensors)
    packed = call.packed
    schedule = call.plan.schedule
    assert isinstance(source, InPlaceLogits)
    sums: GradientSums | None = None
    if call.in_one_launch:
        weighted = call.weighted()
        assert isinstance(weighted, WeightedObjective)
        measured, sums = source.both(*weighted.beforehand(packed, call.requirements.needs))
    else:
        measured = source.measure()
        weighted = call.weighted()
    needed = sums is None and schedule != "statistics"
    coefficients = weighted.coefficients(measured.stats, packed, None, needed)
    result = ForwardResult(measured, [], sums, weighted, coefficients.shares)
    if needed and schedule == "one_pass":
        return result._replace(sums=source.gradient(coefficients, measured.normalizer))
    return result._replace(coefficients=coefficients) if sums is None else result


def sweep(call: Call, tensors: Tensors) -> ForwardResult:
    """Return the statistics of all tokens, block by block. The `one_pass` schedule also computes
    the gradient, and the `frozen` schedule computes dlogp/dhidden."""
    source = call.open(tensors)
    plan = call.plan
    schedule = plan.schedule
    slabs = [ALL]
    if not (plan.keeps_tiles or plan.sweep_rows or plan.tile.columns >= source.vocabulary):
        slabs = steps(source.vocabulary, plan.tile.columns)
    parts = list[Measured]()
    tiles = list[SourceTile]()
    sums: Accumulator | None = None
    shares: Tensor | None = None
    weighted: WeightedObjective | ExternalLoss | None = None
    blocks = plan.blocks
    several = len(blocks) > 1
    for block in blocks:
        rows = block.rows if several or call.scored.support is not None else ALL
        measured, tile = source.statistics(rows, slabs, plan.keeps_tiles or plan.keeps_sums)
        parts.append(measured)
        if schedule == "held" or plan.keeps_sums:
            tiles.append(tile)
        elif plan.keeps_tiles:
            if schedule == "frozen":
                unit = call.unit(measured.stats.logp, rows)
                coefficients = Coefficients(SoftmaxCoefficients(target=unit, prob=-unit), {})
            else:
                # Compute the tokens' weights while the device runs the first matmul.
                weighted = weighted or call.weighted()
                stats = measured.stats
                of_block = block if several else None
                coefficients = weighted.coefficients(stats, call.packed, of_block)
                if call.tolerance is not None:
                    coefficients = call.tolerance(coefficients, stats, rows, weighted.scale)
                share = coefficients.shares
                shares = share if shares is None else shares + share
            live = coefficients.live() if plan.skip_rows else None
            inputs = BackwardInputs(measured, coefficients, tile, live)
            gradient = source.logit_gradient(rows, ALL, inputs)
            # Allocate the accumulator after the first matmul is queued, while the device is busy.
            sums = sums or call.accumulator(source)
            sums.add(gradient)
            del inputs, gradient  # Free the gradient before the next block's logits are made.
        del tile  # Free the tile of logits before the next block's logits are made.
    measured = parts[0] if len(parts) == 1 else of_several(torch.cat, parts)
    return ForwardResult(measured, tiles, sums, weighted, shares)


def of_tiles(
    call: Call, source: LogitSource, result: ForwardResult, coefficients: Coefficients
) -> Accumulator:
    """Return the gradient sums of the `held` schedule, block by block."""
    sums = call.accumulator(source)
    blocks = call.plan.blocks
    inputs = BackwardInputs(result.measured, coefficients)
    for block in blocks:
        part = inputs if len(blocks) == 1 else inputs.rows(block.rows)
        live = part.coefficients.live() if call.plan.skip_rows else None
        part = part._replace(tile=result.tiles.pop(0), live=live)
        sums.add(source.logit_gradient(block.rows, ALL, part))
        del part  # Free the logits kept for this block of tokens.
    return sums
