"""Tests of a module that returns headloss outputs inside wrappers with hooks on output tensors.

On every rank, the trained parameters equal those without a wrapper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import headloss as hl

T, H, V = 6, 8, 31
STEPS = 3
# Forms in which a model's forward returns results, each with a function that computes the loss from
# it.
RETURNS: dict[str, Callable[[Any], Tensor]] = {
    "output": lambda out: out.loss,
    "in a dict": lambda out: out["out"].loss,
    "log-probs": lambda stats: -stats.logp.mean(),
    "unpacked": lambda stats: (lambda logp, lse, entropy: (lse - logp - entropy).mean())(*stats),
    "candidates": lambda stats: -stats.candidate_logps.mean(),
}


class Policy(nn.Module):
    def __init__(self, returns: str, checkpointed: bool = False) -> None:
        super().__init__()
        self.returns, self.checkpointed = returns, checkpointed
        self.trunk, self.head = nn.Linear(H, H), nn.Linear(H, V, bias=False)
        self.spare = nn.Linear(H, H)  # read by no loss

    def forward(self, *call: Any) -> Any:
        if self.checkpointed:
            return checkpoint(self.outputs, *call, use_reentrant=False)
        return self.outputs(*call)

    def outputs(self, hidden: Tensor, batch: hl.Batch) -> Any:
        states, head = self.trunk(hidden).tanh(), hl.Head.of(self.head)
        if self.returns in ("output", "in a dict"):
            out = hl.head_loss(states, head, batch, hl.cross_entropy())
            return out if self.returns == "output" else {"out": out}
        names = ("candidate_logps",) if self.returns == "candidates" else ("logp", "lse", "entropy")
        return hl.head_stats(states, head, batch, gradients=names)


def made(returns: str, checkpointed: bool = False) -> Policy:
    torch.manual_seed(0)
    return Policy(returns, checkpointed).double()


def batch_of(rank: int) -> tuple[Tensor, hl.Batch]:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (T,), generator=generator)
    return hidden, hl.Batch(targets, candidate_ids=(targets[:, None] + torch.arange(2)) % V)


def steps(model: nn.Module, call: Callable[[], Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    losses = []
    for _ in range(STEPS):
        loss = call()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alone(returns: str) -> tuple[Policy, list[float]]:
    """Train one model without a wrapper, on the mean loss of all ranks' batches, as DDP averages
    it."""
    model, value = made(returns), RETURNS[returns]
    batches = [batch_of(rank) for rank in range(distributed.get_world_size())]

    def mean() -> Tensor:
        return torch.stack([value(model(*batch)) for batch in batches]).mean()

    return model, steps(model, mean)


@contextlib.contextmanager
def nodes_alone() -> Iterator[None]:
    """Make FSDP2 find tensors as in torch 2.10 and 2.11: in pytree nodes, not in dataclasses."""
    from torch.distributed.fsdp._fully_shard import _fsdp_state as state

    def leaves(output: Any) -> list[Any]:
        found = pytree.tree_leaves(output)
        return [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]

    newer = getattr(state, "collect_grad_tensors", None)
    if newer is None:  # torch 2.10 or 2.11
        yield
        return
    state.collect_grad_tensors = leaves
    try:
        yield
    finally:
        state.collect_grad_tensors = newer


def wrapped(kind: str, returns: str) -> Callable[..., Any]:
    model = made(returns, "checkpoint" in kind)
    if kind == "ddp, static":
        return DistributedDataParallel(model, static_graph=True)
    if kind.startswith("ddp"):
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    if "units" in kind:
        fully_shard(model.trunk, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trains(kind: str, returns: str) -> None:
    model, value = wrapped(kind, returns), RETURNS[returns]
    batch = batch_of(distributed.get_rank())
    nodes = nodes_alone() if "nodes" in kind else contextlib.nullcontext()
    with nodes:
        losses = steps(model, lambda: value(model(*batch)))
    reference, wanted = alone(returns)
    mean = torch.tensor(losses, dtype=torch.float64)
    distributed.all_reduce(mean)
    torch.testing.assert_close(
        mean / distributed.get_world_size(), torch.tensor(wanted, dtype=torch.float64)
    )
    assert wanted[-1] < 0.9 * wanted[0], wanted
    first = dict(made(returns).named_parameters())
    inner = model.module if kind.startswith("ddp") else model
    for (name, want), got in zip(reference.named_parameters(), inner.parameters(), strict=True):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(whole, want, rtol=1e-9, atol=1e-11)
        assert torch.equal(whole, first[name]) == name.startswith("spare"), name
