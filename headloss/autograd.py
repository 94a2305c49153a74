"""The two autograd functions of a call: the packed rows, and the loss.

N positions, T of them scored, H hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import given
from .collectives import attended
from .schedules import Call, Outcome, frozen, one_pass
from .sweeps import recompute, statistics

SCHEDULES = {
    "one_pass": one_pass,
    "frozen": frozen,
    "recompute": recompute,
    "statistics": statistics,
}


def refuse_second_derivatives(of: str) -> None:
    """RuntimeError in a backward pass whose result is to be differentiated: it has no graph, so
    that a penalty on the gradient would be dropped without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"headloss: got a backward pass through {of} with create_graph=True, but its second "
            "derivatives are not there; compute them from the logits, head.logits(hidden)"
        )


class HeadLoss(torch.autograd.Function):
    """The scalar loss; its backward is the schedule's pull-back, once.

    `tensors` are the source's own, in the order of its gradients; `open_source` makes the source
    of them.
    """

    @staticmethod
    def forward(ctx, call: Call, open_source, outcome: list[Outcome], *tensors: Tensor | None):
        source = open_source(tensors)
        schedules = given.SCHEDULES if call.plan.rows else SCHEDULES
        measured, ctx.pull = schedules[call.plan.schedule](call, source)
        outcome.append(measured)
        ctx.open_source, ctx.used, ctx.groups = open_source, False, call.groups
        ctx.count, aside = 0, []
        if call.plan.schedule == "recompute":  # autograd sees to it that none of these has changed
            given_too = (call.packed.batch.targets, call.transform.temperature)
            aside = [*tensors, *(t for t in given_too if isinstance(t, Tensor))]
            ctx.count = len(tensors)
        ctx.save_for_backward(*aside)
        return call.bound.total(measured.values).to(source.dtype)

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
        with torch.autocast(upstream.device.type, enabled=False), attended(*ctx.groups):
            gradients = pull(upstream, source)
        return None, None, None, *gradients


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
