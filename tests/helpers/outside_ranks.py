"""The head's gradient if `head_loss` is called outside of the forward of a model wrapped by DDP or
FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import headloss as hl

H, V = 6, 11


class Model(nn.Module):
    """A model with a body and a head; the forward calls or skips the head."""

    def __init__(self, calls_head: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(H, H, dtype=torch.float64)
        self.lm_head = nn.Linear(H, V, bias=False, dtype=torch.float64)
        self.calls_head = calls_head

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        return (hidden, self.lm_head(hidden)) if self.calls_head else hidden


def data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(5 + 3 * rank, H, generator=generator, dtype=torch.float64)
    return x, torch.randint(V, (len(x),), generator=generator)


def loss_of(hidden: Any, weight: Tensor, targets: Tensor) -> Tensor:
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    batch = hl.Batch(targets)
    batch.totals = hl.Totals.of(batch).all_reduce()
    return hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy()).loss


def exact() -> dict[str, Tensor]:
    """Return the gradients of one large batch, by plain PyTorch."""
    model = Model()
    x, targets = (torch.cat(parts) for parts in zip(*map(data, range(2)), strict=True))
    nn.functional.cross_entropy(model.lm_head(model(x)), targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors(model: nn.Module) -> dict[str, float]:
    """Return the relative error of each gradient."""
    want, found = exact(), {}
    for name, p in model.named_parameters():
        name = name.removeprefix("module.")
        grad: Any = p.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name] = float((grad - want[name]).norm() / want[name].norm())
    return found


def ddp(through: bool, **options: Any) -> dict[str, float]:
    """Return gradient errors under DDP if the head is called outside of the model, with hidden
    states from DDP's forward or from the inner module."""
    calls_head = options.pop("calls_head", False)
    model = DistributedDataParallel(Model(calls_head), **options)
    x, targets = data(distributed.get_rank())
    hidden = model(x) if through else model.module(x)
    loss_of(hidden, model.module.lm_head.weight, targets).backward()
    return errors(model)


def ddp_of_the_body() -> dict[str, float]:
    model = Model()
    body = DistributedDataParallel(model.body)
    x, targets = data(distributed.get_rank())
    loss_of(body(x).tanh(), model.lm_head.weight, targets).backward()
    return {n.removeprefix("body."): e for n, e in errors(model).items()}


def fsdp2(through: bool, apart: bool = False, reshard: bool | None = None) -> dict[str, float]:
    """Return gradient errors under FSDP2 if the head is called after the model's forward; with
    `apart` the head is an FSDP group of its own."""
    model = Model()
    if apart:
        fully_shard(model.lm_head)
    fully_shard(model, **({} if reshard is None else {"reshard_after_forward": reshard}))
    x, targets = data(distributed.get_rank())
    hidden = model(x) if through else model.body(x).tanh()
    loss_of(hidden, model.lm_head.weight, targets).backward()
    return errors(model)


def outside() -> None:
    """Check each row of the table in docs/across-devices.md."""
    for options in ({}, {"static_graph": True}, {"calls_head": True}):
        assert max(ddp(through=True, **options).values()) < 1e-12, options
    used = ddp(through=True, find_unused_parameters=True, calls_head=True)
    assert max(used.values()) < 1e-12
    with pytest.raises(RuntimeError, match="mark a variable ready only once"):
        ddp(through=True, find_unused_parameters=True)
    assert min(ddp(through=False).values()) > 0.1
    apart = ddp_of_the_body()
    assert apart.pop("lm_head.weight") > 0.1 and max(apart.values()) < 1e-12

    assert max(fsdp2(through=True).values()) < 1e-12
    for options in ({"apart": True}, {"reshard": True}):
        with pytest.raises(TypeError, match="call inside the forward of the module that FSDP2"):
            fsdp2(through=True, **options)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        fsdp2(through=False)
