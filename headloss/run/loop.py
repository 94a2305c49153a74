"""The loop of every call: laws 1 and 4.

    for block of tokens:
        partials of its tiles -> merge over ranks -> statistics        act one
        coefficients of the objective -> dL/draw -> sums               act two, now or later

N positions, T tokens, V vocabulary, n tokens of a block, v columns of a tile. A source owns both
acts on its logits; the schedules differ in which blocks and columns the loop visits and when act
two runs (`Plan.pull`). Autograd sees one function: the loss, or statistics for a loss elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.interface import Held, Measured
from ..objective.bound import Gradient, power_of_two, without_constants
from ..objective.elsewhere import READ, gradient_of
from ..objective.statistics import BESIDE, CANDIDATES, Coefficients, Statistics
from ..ranks.collectives import inside
from ..softmax.given import WalkSoftmax
from ..softmax.linear import RawSoftmax
from ..softmax.rows import ALL, Known
from .pull_back import from_held, pull_back
from .work import NOT_YET, Gradients, Swept, Work, join, measure, slope_of

# What a forward pass measured: statistics [T], first each term's value [>= K] in float64, the loss
# where it is there already.
Outcome = tuple[Statistics, Tensor, Tensor | None]
# With the factor that is owed and, where it is made again, the source.
PullBack = Callable[[Tensor | None, Any], Gradients]


class HeadLoss(torch.autograd.Function):
    """The scalar loss, and its `Outcome`. The backward runs act two of the loop, and may be called
    once.

    `tensors` are the source's own, in the order of its gradients.
    """

    @staticmethod
    def forward(ctx, work: Work, *tensors):
        measured, ctx.pull = forward(work, tensors)
        ctx.work, ctx.used, ctx.count, ctx.read_again = work, False, 0, []
        if work.plan.pull == "slabs":  # autograd sees to it that none of these changes
            ctx.count, ctx.read_again = len(tensors), work.read_again
            ctx.save_for_backward(*tensors, *work.constants)
        stats, values, loss = measured
        if loss is None:
            loss = work.bound.total(values, stats).to(work.prepared.wide)
        return loss, measured

    @staticmethod
    def backward(ctx, upstream: Tensor, _):  # type: ignore[override]
        refuse_second_derivatives("out.loss")
        if ctx.used:
            raise RuntimeError(
                "headloss: backward through out.loss a second time; its gradient is given once "
                "per call, call head_loss again"
            )
        ctx.used, work, pull = True, ctx.work, ctx.pull
        refuse_changes(ctx.read_again)
        ctx.work = ctx.pull = ctx.read_again = None  # who keeps the loss keeps no batch
        saved = ctx.saved_tensors[: ctx.count]  # read once: checkpointing recomputes them
        with inside(upstream.device.type, *work.groups):
            gradients = pull(owed(work, upstream), work.open(saved) if saved else None)
        return None, *gradients


class HeadStatistics(torch.autograd.Function):
    """logp, lse and entropy of all positions, and [.., K + 1] of candidates where there are any;
    its backward runs act two with the slopes that the loss outside sends.

    `gradients` names those that carry one; `tensors` are as in `HeadLoss`. What a
    held schedule keeps is saved with autograd, so that checkpointing drops it and makes it again.
    """

    @staticmethod
    def forward(ctx, work: Work, gradients, *tensors):
        swept, scatter = sweep(work, work.open(tensors)), work.packing.scatter
        stats = swept.whole.stats
        given = {n: getattr(stats, n) for n in READ}
        if CANDIDATES in stats.divergences:
            given[CANDIDATES] = stats.divergences[CANDIDATES]
        found = {n: scatter(t, alone=True) for n, t in given.items()}
        carry = {BESIDE.get(name, name) for name in gradients}
        ctx.mark_non_differentiable(*(t for n, t in found.items() if n not in carry))
        ctx.set_materialize_grads(False)
        ctx.work, ctx.swept = work, swept._replace(held=[])
        ctx.used, ctx.count, aside, ctx.read_again = False, 0, [], work.read_again
        if work.plan.pull in ("held", "slabs"):
            aside, ctx.count = [*tensors, *work.constants], len(tensors)
        ctx.rest, tiles = len(aside), []
        ctx.again = [stored(held, tiles) for held in swept.held]
        ctx.save_for_backward(*aside, *tiles)
        return tuple(found.values())

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):  # type: ignore[override]
        refuse_second_derivatives("head_stats")
        work, swept = ctx.work, ctx.swept
        if ctx.used and work.plan.pull in ("held", "unit"):
            raise RuntimeError(
                f"headloss: backward through head_stats a second time, but its schedule, "
                f'{work.plan.schedule}, has used up what it kept; add the losses first, or ask for '
                'Options(schedule="recompute")'
            )
        ctx.used = True
        refuse_changes(ctx.read_again)
        saved = ctx.saved_tensors  # read once: checkpointing recomputes them
        source: Any = work.open(saved[: ctx.count]) if ctx.count else None
        tiles = iter(saved[ctx.rest :])
        swept = swept._replace(held=[again(tiles) for again in ctx.again])
        found = pull_slopes(work, source, swept, upstream)
        return None, None, *found


def pull_slopes(
    work: Work, source: Any, swept: Swept, upstream: Sequence[Tensor | None]
) -> Gradients:
    """Act two with the slopes that a loss outside sends: of each of `READ` and of candidates, in
    the caller's shape."""
    pairs = zip((*READ, CANDIDATES), upstream, strict=False)
    given = {n: work.packing.gather(g) for n, g in pairs if g is not None}
    stats, width = swept.whole.stats, work.vocabulary
    if CANDIDATES in given:
        given[CANDIDATES] = without_constants(given[CANDIDATES], stats, work.batch)
    gradient, factor = gradient_of(given, stats, width), None
    if work.tolerance is not None:
        gradient = work.tolerance(gradient, stats, ALL, None)
    if work.prepared.problem.rescaled and not work.options.batch_invariant:
        # Its weights are not known here: the largest slope, of any row, stands for them.
        scale = power_of_two([g.t() * slope_of(work.transform) for g in given.values()])
        gradient, factor = gradient.map(lambda t: t * scale), 1 / scale
    with inside(work.packing.targets.device.type, *work.groups):
        return pull_back(work, source, swept, gradient, factor)


def refuse_second_derivatives(of: str) -> None:
    """RuntimeError in a backward pass with `create_graph=True`: its result has no graph, so that a
    penalty on the gradient would be dropped without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"headloss: got a backward pass through {of} with create_graph=True, but its second "
            "derivatives are not there; compute them from the logits, head.logits(hidden)"
        )


def refuse_changes(read_again: Sequence[tuple[str, Tensor, int]]) -> None:
    """RuntimeError where a field that the backward pass reads again is no longer what it was."""
    for name, tensor, version in read_again:
        if tensor._version != version:
            raise RuntimeError(
                f"batch.{name}: it, or a tensor whose memory it shares, was changed in place "
                "before the backward pass, which reads it again; give the batch a clone of it"
            )


def owed(work: Work, upstream: Tensor) -> Tensor | None:
    """The factor between gradients of a bound objective's coefficients and those that are owed,
    None where it is one, as far as the host may know."""
    declared, scale, seen = work.bound.declared, work.bound.scale, work.packing.live is None
    if declared is None:
        if seen and scale is None and upstream.is_cpu and upstream.equal(torch.ones_like(upstream)):
            return None
        factor = upstream if upstream.dtype == torch.float64 else upstream.float()
        return factor if scale is None else factor / scale
    same = (upstream - declared).abs() <= 1e-6 * abs(declared)
    message = f"out.loss: its upstream gradient differs from {declared}, as declared"
    torch._assert_async(same, message)  # type: ignore[attr-defined]
    return None if scale is None else 1 / scale


class GatherRows(torch.autograd.Function):
    """Rows of [N, H] by unique index; the adjoint writes them back and leaves exact zeros."""

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, live: Tensor | None):
        ctx.save_for_backward(index, live)
        ctx.count = len(rows)
        picked = rows[index]
        return picked if live is None else picked.masked_fill_(~live.unsqueeze(1), 0)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        index, live = ctx.saved_tensors
        if live is not None:
            gradient = gradient.masked_fill(~live.unsqueeze(1), 0)
        full = gradient.new_zeros(ctx.count, *gradient.shape[1:])
        return full.index_copy_(0, index, gradient), None, None


# ---------------------------------------------------------------------- forward


def forward(work: Work, tensors: Sequence[Any]) -> tuple[Outcome, PullBack | None]:
    """What the schedule does before the upstream gradient is known; and what it does then, with
    what is `owed`."""
    pull = work.plan.pull
    if pull == "now":
        return _walk_at_once(work, tensors) if work.at_once else _in_one_pass(work, tensors)
    source = work.open(tensors)
    swept = sweep(work, source)
    stats = swept.whole.stats
    gradient = work.bound.gradient(stats, work.batch, None, pull != "never")
    if pull == "never":
        return (stats, gradient.values, gradient.loss), None
    if work.tolerance is not None:
        gradient = work.tolerance(gradient, stats, ALL, work.bound.scale)
    outcome = stats, gradient.values, gradient.loss
    if pull == "held":  # no later: what is held takes more than the gradients do
        sums = from_held(work, source, swept, gradient)
        return outcome, lambda factor, _: sums.finish(factor)

    def back(factor: Tensor | None, again: Any) -> Gradients:
        found, scale = gradient, work.bound.scale
        if factor is not None and scale is None:
            found = found.map(lambda t: t * factor.to(t.dtype))
        return pull_back(work, again, swept, found, None if scale is None else factor)

    return outcome, back


def _in_one_pass(work: Work, tensors: Sequence[Any]) -> tuple[Outcome, PullBack]:
    """Both acts block by block."""
    source = work.open(tensors)
    found = list[Measured]()
    sums = values = loss = NOT_YET
    blocks = work.plan.chunks
    uncut = len(blocks) == 1 and not work.plan.support
    for block in blocks:
        rows = ALL if uncut else block.rows
        measured, held = source.statistics(rows, [ALL], keep=True)
        found.append(measured)
        chunk = block if len(blocks) > 1 else None
        gradient = work.bound.gradient(measured.stats, work.batch, chunk, True)
        if work.tolerance is not None:
            gradient = work.tolerance(gradient, measured.stats, rows, work.bound.scale)
        values = gradient.values if values is None else values + gradient.values
        loss, live = gradient.loss, gradient.live() if work.plan.skip_rows else None
        pulled = source.pull(rows, ALL, Known(measured, gradient, held, live))
        sums = sums or work.sums(source, work.into, work.plan)  # after the first product is queued
        sums.add(pulled)
        del held, pulled  # they are used up
    sums = sums or work.sums(source, work.into, work.plan)
    whole = found[0] if len(found) == 1 else join(work, source, found)
    if values is None:
        values = whole.normalizer.peak.new_zeros(len(work.bound.named), dtype=torch.float64)
    return (whole.stats, values, loss), lambda factor, _: sums.finish(factor)


def sweep(work: Work, source: RawSoftmax) -> Swept:
    """Act one on all tokens; for a frozen head also act two, with coefficients of 1."""
    pull, found = work.plan.pull, []
    kept, sums = list[Any](), NOT_YET
    for block in work.plan.blocks:
        measured, held = measure(work, source, block.rows, keep=pull in ("unit", "held"))
        if pull == "unit":
            sums = sums or work.sums(source, work.into, work.plan)
            one = work.unit[block.rows]
            if work.prepared.problem.rescaled:  # near p(y) = 1 dlogp/dz is small
                one /= (-measured.stats.logp.expm1()).clamp_min(2**-24).log2().floor().exp2()
            unit = Gradient(Coefficients(target=one, prob=-one), {}, one)
            sums.add(source.pull(block.rows, ALL, Known(measured, unit, held)))
        elif pull == "held":
            kept.append(held)
        found.append(measured)
        del held  # before the next one is made
    if pull == "unit":
        sums = sums or work.sums(source, work.into, work.plan)
    return Swept(join(work, source, found), kept, sums)


def _walk_at_once(work: Work, tensors: Sequence[Any]) -> tuple[Outcome, PullBack]:
    """Both acts in one launch, where the gradient is known before the statistics."""
    source = work.open(tensors)
    assert isinstance(source, WalkSoftmax)
    needs, bound = work.prepared.needs, work.bound
    partials = source.walk(needs, *bound.beforehand(work.batch, needs))
    stats = source.tokens.measured(partials).stats
    found = bound.gradient(stats, work.batch, None, needed=False)
    return (stats, found.values, found.loss), lambda factor, _: source.finish(factor)


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
