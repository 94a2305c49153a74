"""Invalid calls on 2 x 2 ranks (two vocabulary slices times two groups of tokens), which raise on
every rank."""

from __future__ import annotations

from typing import Any

import torch
from parallel_agreement import gathers
from parallel_cases import groups
from parallel_errors import H, T, V
from torch import Tensor, distributed

import headloss as hl


def of_grid(rows: tuple[int, int] = (V, V), forms: int = 0) -> dict[str, Any]:
    """Return a call on a grid of 2 x 2 ranks: two vocabulary slices (columns of the grid) times
    two sets of tokens of common segments (rows of the grid).

    The ranks of the grid's second row hold as many tokens as there are segments, so that the shape
    [S] of `advantages` could also mean one value per token. If `forms` is 0, every rank passes
    `advantages` with one value per segment; if `forms` is 1, every rank passes one value per token.
    """
    data, vocab = groups(2, 2)
    row, column = divmod(distributed.get_rank(), 2)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(T + 2, H, generator=generator).double()
    weight = torch.randn(sum(rows), H, generator=generator).double()
    ids = torch.tensor([0, 1] * (T // 2) + [1, 0])
    own = slice(0, T) if row == 0 else slice(T, T + 2)
    slices = slice(0, rows[0]) if column == 0 else slice(rows[0], sum(rows))
    advantages = torch.tensor([1.0, -2.0])
    if forms:
        advantages = advantages[ids[own]]
    return {
        "hidden": hidden[own].clone().requires_grad_(),
        "weight": weight[slices].clone().requires_grad_(),
        "targets": (torch.arange(T + 2) * 3 % sum(rows))[own],
        "ids": ids[own],
        "groups": (data, vocab),
        "fields": {"advantages": advantages, "old_logps": torch.full((len(ids[own]),), -2.0)},
        "whole": (hidden, weight, ids, own, slices),
    }


def run_grid(p: dict[str, Any]) -> tuple[Tensor, ...]:
    segments = hl.Segments.from_ids(p["ids"], count=2, group=p["groups"][0])
    batch = hl.Batch(p["targets"], segments, **p["fields"])
    head = hl.Head(p["weight"], vocab_group=p["groups"][1], **p.get("head", {}))
    objective = p.get("objective", hl.gspo())
    options = p.get("options", hl.Options(metrics=False))
    loss = hl.head_loss(p["hidden"], head, batch, objective, options).loss
    gradients = torch.autograd.grad(loss, (p["hidden"], p["weight"]))
    loss = loss.detach().clone()
    distributed.all_reduce(loss, group=p["groups"][0])
    return loss, *gradients


def right_on_a_grid(**changes: Any) -> None:
    """Check that a call on 2 x 2 ranks (`of_grid`) gives the loss and gradients of the same call
    on one rank."""
    p = of_grid(**changes)
    hidden, weight, ids, own, slices = p["whole"]
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    targets = torch.arange(T + 2) * 3 % len(weight)
    order = ids.argsort(stable=True)
    batch = hl.Batch(
        targets[order],
        hl.Segments.from_ids(ids[order]),
        advantages=torch.tensor([1.0, -2.0]),
        old_logps=torch.full((T + 2,), -2.0),
    )
    want = hl.head_loss(leaves[0][order], hl.Head(leaves[1]), batch, hl.gspo()).loss
    of_hidden, of_weight = torch.autograd.grad(want, leaves)
    loss, *found = run_grid(p)
    distributed.all_reduce(found[1], group=p["groups"][0])
    for got, true in zip((loss, *found), (want, of_hidden[own], of_weight[slices]), strict=True):
        assert (got - true).abs().max() < 1e-12


def _targets(p: dict[str, Any], rank: int) -> None:
    if rank == 3:
        p["targets"] = p["targets"].flip(0)


def _shape(p: dict[str, Any], rank: int) -> None:
    if rank == 1:
        p["weight"] = p["weight"][:, :-1]


def _objective(p: dict[str, Any], rank: int) -> None:
    if rank >= 2:
        p["objective"] = hl.gspo(epsilon_low=0.1)


def _values(p: dict[str, Any], rank: int) -> None:
    if rank < 2:
        p["fields"]["advantages"] = torch.tensor([1.0, 2.0])


def _columns(p: dict[str, Any], rank: int) -> None:
    if rank in (0, 2):
        p["head"] = {"softcap": 3.0}


GRID_ERRORS = {
    "targets: differs": _targets,
    "for a weight of shape (10, 3)": _shape,
    "objective: differs": _objective,
    "its values per segment differ": _values,
    "softcap, temperature: differs": _columns,
}


def on_a_grid() -> list[str]:
    """Run a sequence of valid and invalid calls on 2 x 2 ranks. In some valid calls the ranks
    differ in the size of their vocabulary slice or in the shape of `advantages`; in invalid calls
    some ranks pass wrong arguments."""
    rank, found = distributed.get_rank(), []
    other = {"rows": (V, V + 2)}
    for changes in ({}, {}, other, {}, {"forms": 1}, other, {}):
        right_on_a_grid(**changes)
    for spoil in GRID_ERRORS.values():
        p = of_grid()
        p["options"] = hl.Options(metrics=False, check_ranks=True)
        spoil(p, rank)
        try:
            run_grid(p)
        except (ValueError, TypeError) as error:
            found.append(str(error))
        else:
            found.append("nothing was raised")
        right_on_a_grid()
    return found


def records_on_a_grid() -> list[str]:
    """Run a call on 2 x 2 ranks, whose process groups have already compared an equal call, and
    return the order of this rank's argument comparisons ("record") and logit matmuls
    ("product")."""
    with gathers() as seen:
        run_grid(of_grid())
    return seen
