"""The two autograd functions of a call: the packed rows, and the loss.

N positions, T of them scored, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..ranks.collectives import inside
from ..softmax.linear import RawSoftmax
from .loop import Outcome, Work, forward

Open = Callable[[Sequence[Tensor | None]], RawSoftmax]


def refuse_second_derivatives(of: str) -> None:
    """RuntimeError in a backward pass whose result is to be differentiated: it has no graph, so
    that a penalty on the gradient would be dropped without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"headloss: got a backward pass through {of} with create_graph=True, but its second "
            "derivatives are not there; compute them from the logits, head.logits(hidden)"
        )


class HeadLoss(torch.autograd.Function):
    """The scalar loss; its backward is the loop's pull-back, once.

    `tensors` are the source's own, in the order of its gradients; `open_source` makes the source
    of them.
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
