"""Autograd functions of a call, from hidden states and weights to the loss or to statistics, and
the backward passes of all schedules.

N positions, T scored positions, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..collectives import inside
from ..logits.accumulators import BlockAccumulator, SlabAccumulator
from ..logits.given import InPlaceLogits
from ..logits.linear import LinearLogits, LogitSource, NarrowLogits, rows_left
from ..logits.rows import ALL, BackwardInputs, Gradients, steps
from ..losses.trial import name_of
from ..objective.external import HEAD_STATISTICS
from ..objective.weighted import Coefficients, power_of_two, without_constants
from ..statistics.softmax import CANDIDATES, ByStatistic, vjp
from .call import Call, slope_of
from .loop import ForwardResult, forward, of_tiles, sweep


class HeadLoss(torch.autograd.Function):
    """The scalar loss as an autograd function. `HeadLoss` also returns the statistics [T], the part
    of each term's value that this call contributes, and the weighted objective. The tensor
    arguments are in the order in which the class `LogitSource`, which computes tiles of logits,
    returns the gradients of these tensors."""

    @staticmethod
    def forward(ctx, call: Call, *tensors):
        ctx.call = call
        ctx.used = False
        ctx.rebuild = []
        ctx.read_again = []
        ctx.result = result = forward(call, tensors)
        if result.sums is None:  # Saved tensors let autograd detect changes in place.
            ctx.save_for_backward(*call.constants, *tensors)
        if result.coefficients is not None:
            ctx.read_again = call.read_again
        stats = result.measured.stats
        shares = result.shares
        weighted = result.weighted
        assert weighted is not None and shares is not None
        # Copy the loss into new memory, because autograd attaches a graph to the tensor that
        # `forward` returns.
        loss = weighted.total(shares.unbind(), stats).to(call.requirements.wide, copy=True)
        return loss, (stats, shares, weighted)

    @staticmethod
    def backward(ctx, upstream: Tensor, _):  # type: ignore[override]
        refuse_second_derivatives("out.loss")
        if ctx.used:
            raise RuntimeError(
                "headloss: backward through out.loss a second time; its gradient is given once "
                "per call, call head_loss again"
            )
        call, source, result = take_up(ctx)
        # Allow the batch to be freed while the loss is still alive.
        ctx.call = ctx.result = ctx.read_again = None
        assert result.weighted is not None
        scale = result.weighted.scale
        coefficients = result.coefficients
        factor = missing_factor(call.options.upstream, scale, upstream)
        with inside(upstream.device.type, *call.groups):
            if coefficients is None:
                assert result.sums is not None
                return None, *result.sums.finish(factor)
            if factor is not None and scale is None:
                coefficients = coefficients.map(lambda t, f=factor: t * f.to(t.dtype))
                factor = None
            return None, *backward(call, source, result, coefficients, factor)


class HeadStatistics(torch.autograd.Function):
    """Autograd function that returns logp, lse and entropy of all positions, the log-probs [.., K +
    1] of candidates, and the divergences from a teacher. Outputs that are named in
    `Requirements.gradients` are differentiable, and all other outputs are not. With
    schedule="held", `ctx.save_for_backward` stores the tiles of logits, so that activation
    checkpointing drops and recomputes the tiles."""

    @staticmethod
    def forward(ctx, call: Call, *tensors):
        result = sweep(call, tensors)
        stats = result.measured.stats
        named: ByStatistic = {**stats.tensors(), **stats.extras}
        required = call.requirements
        measures = ((teacher, measure) for teacher, of in required.teachers for measure in of)
        names = [name for name in (*HEAD_STATISTICS, CANDIDATES, *measures) if name in named]
        outputs = {name: call.scored.scatter(named[name]) for name in names}
        dead = (t for name, t in outputs.items() if name_of(name) not in required.gradients)
        ctx.mark_non_differentiable(*dead)
        ctx.names = names
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.result = result._replace(tiles=[])
        ctx.used = False
        ctx.read_again = call.read_again
        tiles = list[Tensor]()
        ctx.rebuild = [save_tile(tile, tiles) for tile in result.tiles]
        again = (*call.constants, *tensors) if result.sums is None else ()
        ctx.save_for_backward(*tiles, *again)
        return (*outputs.values(),)

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):  # type: ignore[override]
        refuse_second_derivatives("head_stats")
        plan = ctx.call.plan
        if ctx.used and plan.keeps_tiles:
            raise RuntimeError(
                f"headloss: backward through head_stats a second time, but its schedule, "
                f"{plan.schedule}, has used up what it kept; add the losses first, or ask for "
                'Options(schedule="recompute")'
            )
        return None, *backward_of_slopes(*take_up(ctx), dict(zip(ctx.names, upstream, strict=True)))


def take_up(ctx: Any) -> tuple[Call, LogitSource | None, ForwardResult]:
    """Return the `Call`, the `LogitSource` that recomputes logits, and the result of the forward
    pass; RuntimeError if a field that the backward pass reads was changed in place."""
    ctx.used = True
    for name, tensor, version in ctx.read_again:
        if tensor._version != version:
            raise RuntimeError(
                f"batch.{name}: it, or a tensor whose memory it shares, was changed in place "
                "before the backward pass, which reads it again; give the batch a clone of it"
            )
    call = ctx.call
    # Read saved tensors once, because activation checkpointing recomputes saved tensors at each
    # read.
    saved = iter(ctx.saved_tensors)
    tiles = [rebuild(saved) for rebuild in ctx.rebuild]
    result = ctx.result
    result = result._replace(tiles=tiles or result.tiles)
    tensors = list(saved)[len(call.constants) :]
    return call, call.open(tensors) if tensors else None, result


def backward_of_slopes(
    call: Call,
    source: LogitSource | None,
    result: ForwardResult,
    upstream: Mapping[Any, Tensor | None],
) -> Gradients:
    """Return the gradients of hidden states and weights (or of the caller's logits) from
    `upstream`, the derivatives of an external loss with respect to statistics, each in the caller's
    shape. The keys of `upstream` are names in `HEAD_STATISTICS`, `CANDIDATES` and divergences from
    a teacher."""
    slopes = {n: call.scored.gather(g) for n, g in upstream.items() if g is not None}
    stats = result.measured.stats
    factor = None
    if CANDIDATES in slopes:
        slopes[CANDIDATES] = without_constants(slopes[CANDIDATES], stats, call.packed)
    beside: ByStatistic = {n: g for n, g in slopes.items() if n not in HEAD_STATISTICS}
    coefficients = Coefficients(vjp(slopes, stats, call.shard.vocabulary), beside)
    if call.tolerance is not None:
        coefficients = call.tolerance(coefficients, stats, ALL, None)
    if call.requirements.rescaled and not call.options.batch_invariant:
        # Scale the gradient coefficients by the largest derivative of any row, since the token
        # weights of an external loss are unknown.
        scale = power_of_two([g.t() * slope_of(call.context.transform) for g in slopes.values()])
        coefficients = coefficients.map(lambda t: t * scale)
        factor = 1 / scale
    with inside(call.packed.targets.device.type, *call.groups):
        return backward(call, source, result, coefficients, factor)


def refuse_second_derivatives(of: str) -> None:
    """RuntimeError with `create_graph=True`: a penalty on the gradient would have no gradient."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"headloss: got a backward pass through {of} with create_graph=True, but its second "
            "derivatives are not there; compute them from the logits, head.logits(hidden)"
        )


def missing_factor(stated: float | None, scale: Tensor | None, upstream: Tensor) -> Tensor | None:
    """Return the factor that turns the computed gradients into gradients of the loss; None for a
    factor of one. The computed gradients already include the factor `scale`, unless `scale` is
    None. If the caller has declared the upstream gradient in advance, `stated` is the declared
    number, by which the computed gradients are already multiplied."""
    if stated is None:
        factor = upstream if upstream.dtype == torch.float64 else upstream.float()
        return factor if scale is None else factor / scale
    torch._assert_async(  # type: ignore[attr-defined]
        (upstream - stated).abs() <= 1e-6 * abs(stated),
        f"out.loss: its upstream gradient differs from {stated}, as declared",
    )
    return None if scale is None else 1 / scale


def save_tile(tile: object, tensors: list[Tensor]) -> Callable[[Iterator[Tensor]], object]:
    """Append to `tensors` the tensors of a tile of logits; return a function that rebuilds the tile
    from saved tensors. A tensor that the `LogitSource` can recompute is not saved."""
    if isinstance(tile, Tensor):
        tensors.append(tile)
        return next
    if not isinstance(tile, tuple):
        return lambda saved: None
    parts = [save_tile(part, tensors) for part in tile]
    make = getattr(tile, "_make", tuple)
    return lambda saved: make(rebuild(saved) for rebuild in parts)


def backward(
    call: Call,
    source: LogitSource | None,
    result: ForwardResult,
    coefficients: Coefficients,
    factor: Tensor | None,
) -> Gradients:
    """Return the gradients times `factor`; the `LogitSource` `source` recomputes logits."""
    plan = call.plan
    inputs = BackwardInputs(result.measured, coefficients)
    if plan.schedule == "frozen":
        return _of_frozen_head(call, result, coefficients, factor)
    assert source is not None
    if plan.schedule == "held":
        return of_tiles(call, source, result, coefficients).finish(factor)
    if isinstance(source, InPlaceLogits):
        return source.gradient(coefficients, result.measured.normalizer).finish(factor)
    if isinstance(source, NarrowLogits) and plan.schedule == "narrow":
        sums = SlabAccumulator(source, call.buffers, at_once=True)
        source.add_to(sums, inputs, result.tiles, plan.blocks, plan.skip_rows, factor)
        return sums.finish(factor)
    if isinstance(source, LinearLogits):
        return _in_slabs(call, source, inputs, factor)
    # The logits are an input of the call: compute the gradient of one tile at a time.
    sums = call.accumulator(source)
    for columns in steps(source.vocabulary, plan.tile.columns):
        for rows in steps(len(source), plan.tile.rows):
            sums.add(source.logit_gradient(rows, columns, inputs.rows(rows)))
    return sums.finish(factor)


def _of_frozen_head(
    call: Call, result: ForwardResult, coefficients: Coefficients, factor: Tensor | None
) -> Gradients:
    """Return the gradients for a head without trainable weights. Each token's hidden gradient is
    (dL/dlogp) * dlogp/dhidden for the target's log-prob logp, plus the gradient that flows through
    the log-probs of `candidate_ids`."""
    sums = result.sums
    prob = coefficients.softmax.prob
    assert isinstance(sums, BlockAccumulator)
    source = sums.source
    sums.hidden.settle()
    logp = result.measured.stats.logp
    slope = torch.zeros_like(logp) if prob is None else -prob
    if factor is not None:
        slope = slope * factor.to(slope.dtype)
    slope = slope / call.unit(logp)
    for i, total in sums.hidden.totals.items():
        missing = sums.hidden.factors.pop(i, None)
        by = slope if missing is None else slope * missing
        source.acts.scaled_rows(total, by, out=total)
        for part in source.beside:
            if (slopes := coefficients.extras.get(part.key)) is None:
                continue
            values, pairs = part.beside_logp(result.measured, slopes, source.context.targets)
            if factor is not None:
                values = values * factor.to(values.dtype)
            source.acts.support_sums(values, source.weights[i], pairs, total, add=True)
    return sums.finish(None)


def _in_slabs(
    call: Call, source: LinearLogits, inputs: BackwardInputs, factor: Tensor | None
) -> Gradients:
    """Return the gradients, computed in blocks of vocabulary columns; each block of the
    weight gradient is written once."""
    index = rows_left(inputs.coefficients.live() if call.plan.skip_rows else None)
    every_row = source
    # Gather the tokens that have a gradient once, and not again for each block of vocabulary
    # columns.
    if index is not None:
        source = source.take(index)
        inputs = inputs.rows(index)
    # Ranks exchange all rows, with or without a gradient, because the shape of a collective must
    # not depend on data.
    dense = index is not None and call.shard.group is not None
    count = len(source)
    tile = call.plan.tile
    at_once = count <= tile.rows and factor is None and source.additions == 1
    sums = SlabAccumulator(every_row if dense else source, call.buffers, at_once)
    for columns in steps(source.vocabulary, tile.columns):
        sums.open(columns)
        for rows in steps(count, tile.rows):
            gradient = source.logit_gradient(rows, columns, inputs.rows(rows))
            sums.add(gradient.at(index) if dense else gradient)  # type: ignore[arg-type]
            del gradient  # Free memory for the gradient of the next block of columns.
        sums.close(columns, factor)
    gradients = sums.finish(factor)
    if index is not None and not dense:
        for i, part in enumerate(gradients[:-1:2]):
            if part is not None:
                full = part.new_zeros(len(call.scored), part.shape[1])
                gradients[2 * i] = full.index_copy_(0, index, part)
    return gradients
