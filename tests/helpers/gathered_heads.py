"""The gradient of an FSDP2-sharded head (a DTensor), on ranks with different data."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial

import headloss as hl

H, V = 4, 9


class Model(nn.Module):
    """A model with only a head; the forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(H, V, bias=False, dtype=torch.float64)

    def forward(self, hidden: Tensor, batch: hl.Batch) -> Tensor:
        return loss_of(self.head.weight, hidden, batch)


def loss_of(weight: Tensor, hidden: Tensor, batch: hl.Batch) -> Tensor:
    return hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy() + hl.z_loss()).loss


def data(rank: int) -> tuple[Tensor, Tensor]:
    """Return hidden states [T, H] and targets [T], with a different T on every rank."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(5 + 3 * rank, H, generator=generator, dtype=torch.float64)
    return hidden, torch.randint(V, (len(hidden),), generator=generator)


def batch_of(targets: Tensor, gradients: Any) -> hl.Batch:
    batch = hl.Batch(targets)
    batch.totals = hl.Totals.of(batch).all_reduce(gradients=gradients)
    return batch


def advised(message: str) -> dict[str, Any]:
    """Return the `full_tensor` arguments recommended by an error message."""
    found = re.search(r"full_tensor\(grad_placements=(\[.*?\]) \* device_mesh.ndim\)", message)
    assert found is not None, message
    return {"grad_placements": eval(found[1], {"Partial": Partial})}  # for a one-dimensional mesh


def right_and_wrong() -> None:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    hidden, targets = data(rank)
    exact, alone = Model(), Model()
    every = [data(r) for r in range(world)]
    one = hl.Batch(torch.cat([y for _, y in every]))
    exact(torch.cat([x for x, _ in every]), one).backward()
    want = exact.head.weight.grad
    alone(hidden, batch_of(targets, "mean")).backward()

    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (world,)))
    weight: Any = model.head.weight

    def gradient(gradients: str, run: Any) -> Any:
        weight.grad = None
        run(batch_of(targets, gradients)).backward()
        model.reshard()
        return weight.grad

    def gathered(**options: Any) -> Any:
        return lambda batch: loss_of(weight.full_tensor(**options), hidden, batch)

    inside = gradient("mean", lambda batch: model(hidden, batch))
    torch.testing.assert_close(inside.full_tensor(), want)
    for call in (
        lambda: loss_of(weight, hidden, hl.Batch(targets)),
        lambda: hl.Head(weight).logits(hidden),
        lambda: hl.Head(alone.head.weight, weight[:, 0]).logits(hidden),
    ):
        with pytest.raises(TypeError, match="got a DTensor placed") as raised:
            call()
        options = advised(str(raised.value))
        assert "plain full_tensor() drops" in str(raised.value)
        torch.testing.assert_close(gradient("mean", gathered(**options)).full_tensor(), want)
    summed = gradient("sum", gathered(grad_placements=[Partial("sum")]))
    torch.testing.assert_close(summed.full_tensor(), want)

    # A `full_tensor` call without `grad_placements` drops gradient contributions: each rank keeps
    # its shard of its local gradient, without a sum over ranks.
    dropped = gradient("mean", gathered())
    torch.testing.assert_close(dropped.to_local(), alone.head.weight.grad.chunk(world)[rank])
    off = (dropped.full_tensor() - want).norm() / want.norm()
    assert off > 0.2, off
