"""The autograd functions of a call: the packed rows, and the loss, or statistics for one elsewhere.

N positions, T of them scored, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch.packing import Packing
from ..objective.bound import without_constants
from ..objective.elsewhere import READ, gradient_of
from ..objective.statistics import BESIDE, CANDIDATES
from ..ranks.collectives import inside
from ..softmax.linear import RawSoftmax
from ..softmax.rows import ALL
from .loop import Outcome, Work, forward, pull_back, stored, sweep

Open = Callable[[Sequence[Tensor | None]], RawSoftmax]


def refuse_second_derivatives(of: str) -> None:
    """RuntimeError in a backward pass with `create_graph=True`: its result has no graph, so that a
    penalty on the gradient would be dropped without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"headloss: got a backward pass through {of} with create_graph=True, but its second "
            "derivatives are not there; compute them from the logits, head.logits(hidden)"
        )


class HeadLoss(torch.autograd.Function):
    """The scalar loss. Its backward runs act two of the loop, and may be called once.

    `tensors` are those that the source is made of, in the order of its gradients; `open_source`
    makes the source from them.
    """

    @staticmethod
    def forward(ctx, work: Work, open_source: Open, outcome: list[Outcome], *tensors):
        source = open_source(tensors)
        measured, ctx.pull = forward(work, source)
        outcome.append(measured)
        ctx.open_source, ctx.used, ctx.groups = open_source, False, work.groups
        ctx.count, aside = 0, []
        if work.plan.pull in ("slabs", "blocks"):  # autograd sees to it that none of these changes
            aside = [*tensors, *source.constants()]
            ctx.count = len(tensors)
        ctx.save_for_backward(*aside)
        return work.bind().total(measured.values).to(source.dtype)

    @staticmethod
    def backward(ctx, upstream: Tensor):  # type: ignore[override]
        refuse_second_derivatives("out.loss")
        if ctx.used:
            raise RuntimeError(
                "headloss: backward through out.loss a second time; its gradient is given once "
                "per call, call head_loss again"
            )
        ctx.used = True
        saved = ctx.saved_tensors[: ctx.count]  # read once: checkpointing recomputes them
        source = ctx.open_source(saved) if saved else None
        pull, ctx.pull = ctx.pull, None
        with inside(upstream.device.type, *ctx.groups):
            gradients = pull(upstream, source)
        return None, None, None, *gradients


class HeadStatistics(torch.autograd.Function):
    """logp, lse and entropy of all positions, and [.., K + 1] of candidates where there are any;
    its backward runs act two with the slopes that the loss outside sends.

    `gradients` names the statistics that carry a gradient; `tensors` and `open_source` are as in
    `HeadLoss`. What a held schedule keeps is saved with autograd, so that checkpointing drops it
    and makes it again.
    """

    @staticmethod
    def forward(ctx, work: Work, open_source: Open, packing: Packing, gradients, *tensors):
        source = open_source(tensors)
        swept = sweep(work, source)
        stats = swept.whole.stats
        given = {n: getattr(stats, n) for n in READ}
        if CANDIDATES in stats.divergences:
            given[CANDIDATES] = stats.divergences[CANDIDATES]
        found = {n: packing.scatter(t, alone=True) for n, t in given.items()}
        carry = {BESIDE.get(name, name) for name in gradients}
        ctx.mark_non_differentiable(*(t for n, t in found.items() if n not in carry))
        ctx.set_materialize_grads(False)
        ctx.given, ctx.swept = (work, open_source, packing), swept._replace(held=[])
        ctx.used, ctx.count, aside = False, 0, []
        if work.plan.pull in ("held", "slabs", "blocks"):
            aside = [*tensors, *source.constants()]
            ctx.count = len(tensors)
        ctx.rescaled, ctx.rest, tiles = source.gradient_dtype == torch.float16, len(aside), []
        ctx.again = [stored(held, tiles) for held in swept.held]
        ctx.save_for_backward(*aside, *tiles)
        return tuple(found.values())

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):  # type: ignore[override]
        refuse_second_derivatives("head_stats")
        (work, open_source, packing), swept = ctx.given, ctx.swept
        if ctx.used and work.plan.pull in ("held", "unit"):
            raise RuntimeError(
                f"headloss: backward through head_stats a second time, but its schedule, "
                f'{work.plan.schedule}, has used up what it kept; add the losses first, or ask for '
                'Options(schedule="recompute")'
            )
        ctx.used = True
        saved = ctx.saved_tensors  # read once: checkpointing recomputes them
        source: Any = open_source(saved[: ctx.count]) if ctx.count else None
        tiles = iter(saved[ctx.rest :])
        swept = swept._replace(held=[again(tiles) for again in ctx.again])
        names = (*READ, CANDIDATES)[: len(upstream)]
        pairs = zip(names, upstream, strict=True)
        given = {n: packing.gather(g) for n, g in pairs if g is not None}
        stats, width = swept.whole.stats, work.vocabulary
        if CANDIDATES in given:
            given[CANDIDATES] = without_constants(given[CANDIDATES], stats, work.batch)
        gradient, scale = gradient_of(given, stats, width, ctx.rescaled)
        if work.tolerance is not None:
            gradient = work.tolerance(gradient, stats, ALL, scale)
        with inside(packing.targets.device.type, *work.groups):
            factor = None if scale is None else 1 / scale
            found = pull_back(work, source, swept, gradient, factor)
        return None, None, None, None, *found


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
