"""Comparison of the `narrow` schedule on several ranks, in Triton's interpreter, with a float64
head on one rank."""

from __future__ import annotations

import os

import torch
from torch import Tensor, distributed

import headloss as hl
from headloss.testing import error, plain, trained_looking

T, H, V = 20, 12, 150
PADDED = 6  # rows of padding at the end of the last rank's vocabulary slice
OBJECTIVES = {
    "sums": hl.cross_entropy() + 1e-2 * hl.z_loss(),
    "a third sweep": hl.cross_entropy() - 0.1 * hl.entropy(),
}


def interpret() -> None:
    """Turn on Triton's interpreter before a rank imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"


def whole(softcap: float | None) -> tuple[Tensor, hl.Head, hl.Batch]:
    """Return the inputs of a call, identical on all ranks, with a target in the last column and an
    unscored position."""
    hidden, weight, targets = trained_looking(T, H, V, torch.float32)
    bias = torch.randn(V, generator=torch.Generator().manual_seed(0))
    targets[3], targets[7] = -100, V - 1
    head = hl.Head(weight.requires_grad_(), bias=bias.requires_grad_(), softcap=softcap)
    return hidden.requires_grad_(), head, hl.Batch(targets)


def against_one_head(name: str, softcap: float | None) -> Tensor:
    """Check loss and gradients of this rank's vocabulary slice; return log-probs and hidden
    gradient, so that the ranks' bits can be compared."""
    hidden, head, batch = whole(softcap)
    oracle = plain(hidden, head, batch, OBJECTIVES[name], "float64")
    rank = distributed.get_rank()
    rows = slice(0, 90) if rank == 0 else slice(90, V)  # ragged slices of tiles
    padding = [(0, 0), (0, PADDED)][rank]
    weight, bias = (t.detach()[rows].clone() for t in (head.weight, head.bias))
    weight = torch.nn.functional.pad(weight, (0, 0, *padding), value=torch.nan).requires_grad_()
    bias = torch.nn.functional.pad(bias, padding, value=torch.nan).requires_grad_()
    group = distributed.group.WORLD
    mine = hl.Head(weight, bias=bias, softcap=softcap, vocab_size=V, vocab_group=group)
    x = hidden.detach().clone().requires_grad_()
    options = hl.Options(schedule="narrow", backend="triton")
    out = hl.head_loss(x, mine, batch, OBJECTIVES[name], options)
    assert out.plan.schedule == "narrow" and out.plan.keeps_sums is (name == "sums")
    out.loss.backward()
    assert abs(out.loss.double() - oracle.loss) <= 1e-6 * abs(oracle.loss)
    size = rows.stop - rows.start
    assert not (weight.grad[size:].any() or bias.grad[size:].any())
    assert error(x.grad, oracle.gradients["hidden"]) <= 1e-5
    assert error(weight.grad[:size], oracle.gradients["weight"][rows]) <= 1e-5
    assert error(bias.grad[:size], oracle.gradients["bias"][rows]) <= 1e-5
    return torch.cat([out.logps, x.grad.flatten()])
