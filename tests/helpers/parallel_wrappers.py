"""Tests of DDP, FSDP2 and merged metrics on every rank of a test world, compared with one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from parallel_verbs import H, Problem, V, close
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import headloss as hl

# ---------------------------------------------------------------------- wrappers


class Model(nn.Module):
    """A model with an embedding, a layer and a head; the forward returns the loss."""

    def __init__(self, tied: bool, trained: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(V, H, dtype=torch.float64)
        self.layer = nn.Linear(H, H, dtype=torch.float64)
        self.head = nn.Linear(H, V, bias=not tied, dtype=torch.float64)
        if tied:
            self.head.weight = self.embedding.weight
        elif not trained:
            self.head.requires_grad_(False)

    def forward(self, ids: Tensor, batch: hl.Batch, options: hl.Options) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(ids)))
        objective = hl.gspo() + 0.1 * hl.cross_entropy() - 0.01 * hl.entropy()
        return hl.head_loss(hidden, hl.Head.of(self.head), batch, objective, options).loss


def micro_batches(rank: int | None) -> list[tuple[Tensor, hl.Batch]]:
    """Return the two micro-batches of rank `rank`. If `rank` is None, return one batch, which joins
    the micro-batches of all ranks."""
    generator = torch.Generator().manual_seed(5)
    pieces = []
    for number in range(2 * distributed.get_world_size()):
        shape = (2, 3 + number)  # every micro-batch has a different length
        ids = torch.randint(V, shape, generator=generator)
        targets = torch.randint(V, shape, generator=generator)
        targets[0, : 1 + number % 3] = -100
        old = -4 * torch.rand(shape, generator=generator, dtype=torch.float64)
        advantages = torch.randn(2, generator=generator, dtype=torch.float64)
        pieces.append((ids, targets, old, advantages))
    if rank is None:
        width = max(ids.shape[1] for ids, *_ in pieces)

        def stack(column: int, fill: float) -> Tensor:
            return torch.cat(
                [F.pad(p[column], (0, width - p[column].shape[1]), value=fill) for p in pieces]
            )

        batch = hl.Batch(
            stack(1, -100), advantages=torch.cat([p[3] for p in pieces]), old_logps=stack(2, 0)
        )
        return [(stack(0, 0), batch)]
    return [
        (ids, hl.Batch(targets, advantages=advantages, old_logps=old))
        for ids, targets, old, advantages in pieces[2 * rank : 2 * rank + 2]
    ]


def wrapped(kind: str, tied: bool, trained: bool, schedule: str) -> None:
    """Check that gradients averaged over ranks and micro-batches equal those of one rank and one
    batch."""
    options = hl.Options(schedule=schedule)
    alone = Model(tied, trained)
    ((ids, batch),) = micro_batches(None)
    alone(ids, batch, hl.Options(schedule="recompute")).backward()
    model: Any = Model(tied, trained)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        if not tied:
            fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    mine = micro_batches(distributed.get_rank())
    totals = sum((hl.Totals.of(b) for _, b in mine), start=hl.Totals(0, 0))
    totals = totals.all_reduce(gradients="mean")
    for number, (ids, batch) in enumerate(mine):
        last = number == len(mine) - 1
        batch.totals = totals
        if kind == "ddp" and not last:
            with model.no_sync():
                model(ids, batch, options).backward()
            continue
        if kind == "fsdp":
            model.set_requires_gradient_sync(last)
        model(ids, batch, options).backward()
    inner = model.module if kind == "ddp" else model
    for (name, want), got in zip(alone.named_parameters(), inner.parameters(), strict=True):
        found = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
        assert (found is None) == (want.grad is None), name
        if want.grad is not None:
            close(found, want.grad)


def ddp() -> None:
    for tied, trained in ((True, True), (False, True), (False, False)):
        for schedule in ("auto", "recompute"):
            wrapped("ddp", tied, trained, schedule)


def fsdp() -> None:
    for tied, trained in ((True, True), (False, True), (False, False)):
        for schedule in ("auto", "recompute"):
            wrapped("fsdp", tied, trained, schedule)


def metrics_merge() -> None:
    """Check that metrics over ranks with different documents equal those of one batch."""
    p = Problem()
    whole = Model(tied=True)
    ((ids, batch),) = micro_batches(None)
    objective = hl.grpo() + hl.cross_entropy()

    def measured(ids: Tensor, batch: hl.Batch) -> hl.Metrics:
        hidden = whole.embedding(ids)
        return hl.head_loss(hidden, hl.Head.of(whole.head), batch, objective).metrics

    want = measured(ids, batch).compute()
    first, second = (measured(*piece) for piece in micro_batches(p.rank))
    got = first.merge(second).all_reduce(p.group).compute()
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert abs(got[name] - value) <= 1e-9 * max(1, abs(value)), (name, got[name], value)
