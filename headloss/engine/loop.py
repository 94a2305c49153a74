"""The loop of every call: laws 1 and 4.

    for block of tokens:
        statistics of its logits, merged over tiles and ranks
        coefficients of the objective -> gradient of the logits -> sums       (now or later)

T tokens, V vocabulary, n tokens of a block. A source of logits owns the statistics and the gradient
of its logits. The schedules differ in which blocks and columns the loop visits, and in when the
gradient is computed (`Plan.backward`; `engine.backward` has what comes later).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.interface import Measured
from ..logits.given import InPlaceLogits
from ..logits.linear import LogitSource
from ..logits.rows import ALL, BackwardInputs, of_several, steps
from ..objective.weighted import Coefficients
from ..statistics.softmax import PEAK, SoftmaxCoefficients, SoftmaxState, Statistics, finish
from .backward import ForwardResult, Gradients, backward, of_tiles
from .call import Call, GivenCall, Tensors

# Statistics [T], and first each term's share of its reduced value [>= K] in float64.
Outcome = tuple[Statistics, Tensor]
# Takes the factor that is owed and, where its logits are made again, the source.
Backward = Callable[[Tensor | None, Any], Gradients]


def forward(call: Call, tensors: Tensors) -> tuple[Outcome, Backward | None]:
    """What the schedule does before the upstream gradient is known; and what it does then."""
    mode = call.plan.backward
    if mode == "now":
        if isinstance(call, GivenCall) and call.in_one_launch:
            return in_one_launch(call, tensors)
        return in_one_pass(call, tensors)
    source = call.open(tensors)
    result = sweep(call, source)
    stats, weighted = result.measured.stats, call.weighted
    coefficients = weighted.coefficients(stats, call.packed, None, mode != "never")
    outcome = stats, coefficients.values
    if mode == "never":
        return outcome, None
    if call.tolerance is not None:
        coefficients = call.tolerance(coefficients, stats, ALL, weighted.scale)
    if mode == "held":  # no later: the tiles take more than the gradients do
        sums = of_tiles(call, source, result, coefficients)
        return outcome, lambda factor, _: sums.finish(factor)

    def later(factor: Tensor | None, reopened: Any) -> Gradients:
        if factor is None or weighted.scale is not None:
            return backward(call, reopened, result, coefficients, factor)
        owed = coefficients.map(lambda t: t * factor.to(t.dtype))
        return backward(call, reopened, result, owed, None)

    return outcome, later


def in_one_pass(call: Call, tensors: Tensors) -> tuple[Outcome, Backward]:
    """Statistics and gradient block by block."""
    source, plan, tolerance = call.open(tensors), call.plan, call.tolerance
    parts: list[Measured] = []
    sums: Any = None
    values: Tensor | None = None
    several = len(plan.chunks) > 1
    for block in plan.chunks:
        rows = block.rows if several or plan.support else ALL
        measured, tile = source.statistics(rows, [ALL], keep=True)
        parts.append(measured)
        chunk = block if several else None
        coefficients = call.weighted.coefficients(measured.stats, call.packed, chunk, True)
        if tolerance is not None:
            coefficients = tolerance(coefficients, measured.stats, rows, call.weighted.scale)
        share = coefficients.values
        values = share if values is None else values + share
        live = coefficients.live() if plan.skip_rows else None
        inputs = BackwardInputs(measured, coefficients, tile, live)
        gradient = source.logit_gradient(rows, ALL, inputs)
        sums = sums or call.accumulator(source)  # after the first product is queued
        sums.add(gradient)
        del tile, inputs, gradient  # they are used up
    sums = sums or call.accumulator(source)
    stats = parts[0].stats if len(parts) == 1 else joined(call, source, parts).stats
    if values is None:
        count = len(call.weighted.named)
        values = stats.logp.new_zeros(count, dtype=torch.float64)
    return (stats, values), lambda factor, _: sums.finish(factor)


def in_one_launch(call: GivenCall, tensors: Tensors) -> tuple[Outcome, Backward]:
    """Statistics and gradient at once, where the gradient is known before the statistics."""
    source = call.open(tensors)
    assert isinstance(source, InPlaceLogits)
    needs, weighted, packed = call.requirements.needs, call.weighted, call.packed
    state = source.walk(needs, *weighted.beforehand(packed, needs))  # type: ignore[union-attr]
    stats = source.tokens.measured(state).stats
    values = weighted.coefficients(stats, packed, None, needed=False).values
    return (stats, values), lambda factor, _: source.finish(factor)


def sweep(call: Call, source: LogitSource) -> ForwardResult:
    """The statistics of all tokens; for a frozen head also dlogp/dhidden."""
    plan, mode = call.plan, call.plan.backward
    parts, tiles = list[Measured](), list[Any]()
    sums: Any = None
    for block in plan.blocks:
        measured, tile = _measure(call, source, block.rows, keep=mode in ("unit", "held"))
        parts.append(measured)
        if mode == "held":
            tiles.append(tile)
        elif mode == "unit":
            sums = sums or call.accumulator(source)
            inputs = BackwardInputs(measured, _unit(call, measured, block.rows), tile)
            sums.add(source.logit_gradient(block.rows, ALL, inputs))
            del inputs
        del tile  # before the next one is made
    if mode == "unit":
        sums = sums or call.accumulator(source)
    measured = parts[0] if len(parts) == 1 else joined(call, source, parts)
    return ForwardResult(measured, tiles, sums)


def _unit(call: Call, measured: Measured, rows: slice) -> Coefficients:
    """Those of logp alone, times `call.unit`."""
    one = call.unit[rows]
    if call.requirements.inputs.rescaled:  # near p(y) = 1 dlogp/dz is small
        one /= (-measured.stats.logp.expm1()).clamp_min(2**-24).log2().floor().exp2()
    return Coefficients(SoftmaxCoefficients(target=one, prob=-one), {}, one)


def _measure(call: Call, source: LogitSource, rows: slice, keep: bool) -> tuple[Measured, Any]:
    """Statistics of some tokens over the whole vocabulary; with `keep`, their logits are one tile,
    which is returned."""
    columns = source.vocabulary if keep or call.plan.sweep_rows else call.plan.tile.columns
    tiles = [ALL] if columns >= source.vocabulary else steps(source.vocabulary, columns)
    return source.statistics(rows, tiles, keep)


def joined(call: Call, source: LogitSource, parts: list[Measured]) -> Measured:
    """[T] vectors from those of consecutive blocks."""
    if parts:
        return of_several(torch.cat, parts)
    needs = call.requirements.needs
    empty = torch.empty(0, dtype=source.dtype, device=call.scored.targets.device)
    measured = Measured(*finish(SoftmaxState(*[empty] * 5), call.vocabulary, needs))
    extras = measured.stats.extras
    extras |= {key: empty.clone() for key in needs & {PEAK}}
    extras |= {teacher.key: empty.clone() for teacher in source.teachers}
    extras |= {part.key: empty.new_empty(0, *part.more) for part in source.beside}
    return measured
