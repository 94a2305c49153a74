"""Checks on several ranks: options of terms are compared between ranks, totals are summed over
ranks, and communicated tensors and rows without a gradient are as expected."""

from __future__ import annotations

from typing import Any, Literal

import torch
from parallel_cases import groups
from torch import distributed

import headloss as hl
from headloss.testing import trained_looking

T, H, V = 6, 4, 10
LONG = 3000  # more values than PyTorch prints of a tensor


@hl.term
def of_table(stats, batch, table=None, nested=None):
    factor = table.mean() if nested is None else nested["tables"][0].mean()
    return stats.logp * factor


def run(over: str, form: str, spoil: str) -> tuple[str, str]:
    """Return the loss or error of a call; `spoil` names the option with a different value on the
    last rank."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    _, group = groups(1, world)
    table = torch.linspace(0.0, 1.0, LONG)
    if spoil == "middle" and rank == world - 1:
        table[LONG // 2] += 0.25
    elif spoil == "shape" and rank == world - 1:
        table = table[:-1]
    elif spoil == "dtype" and rank == world - 1:
        table = table.double()
    term = of_table(table=table) if form == "plain" else of_table(nested={"tables": [table]})
    ids = torch.tensor([0, 0, 0, 0, 1, 1])
    segments = hl.Segments.from_ids(ids, count=2, group=group if over == "segments" else None)
    weight = torch.ones(V, H)
    head = hl.Head(weight, vocab_group=group) if over == "vocabulary" else hl.Head(weight)
    batch = hl.Batch(torch.arange(T) % V, segments)
    hidden = torch.ones(T, H).requires_grad_()
    try:
        options = hl.Options(check_ranks=True)
        out = hl.head_loss(hidden, head, batch, term + hl.entropy(), options)
        return "loss", str(float(out.loss))
    except (ValueError, TypeError) as error:
        return type(error).__name__, str(error)


def restricted_totals(gradients: Literal["mean", "sum"]) -> tuple[float, float, dict]:
    """Return totals that are summed over ranks, for batches whose boolean fields have different
    counts on each rank."""
    rank = distributed.get_rank()
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    keep = {
        "zeta": torch.tensor([1, 1, 1, 1, 0, 0]).bool(),
        "alpha": torch.tensor([0, 0, 0, 0, 0, 1 - rank]).bool(),
        "middle": torch.tensor([True, rank == 0, rank == 1]),  # per segment
    }
    batch = hl.Batch(torch.arange(T) % V, hl.Segments.from_ids(ids, count=3), **keep)
    totals = hl.Totals.of(batch).all_reduce(gradients=gradients)
    kept = {name: tuple(map(float, pair)) for name, pair in totals.kept.items()}
    return float(totals.tokens), float(totals.segments), kept


def sent(schedule: str, sparse: bool) -> list[tuple[int, ...]]:
    """Return the shapes of all all-reduced tensors of a call with vocabulary slices; with `sparse`
    every second token has weight 0."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    _, group = groups(1, world)
    hidden, weight, targets = trained_looking(64, 8, 2 * V, torch.float64)
    weights = torch.ones(64)
    weights[::2] = 0 if sparse else 1
    head = hl.Head(weight.chunk(world)[rank].requires_grad_(), vocab_group=group)
    batch, term = hl.Batch(targets, share=weights), hl.cross_entropy().weighted("share")
    loss = hl.head_loss(
        hidden.requires_grad_(), head, batch, term, hl.Options(schedule=schedule)
    ).loss
    shapes, plain = [], distributed.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        shapes.append(tuple(tensor.shape))
        return plain(tensor, *args, **options)

    distributed.all_reduce = noted
    try:
        loss.backward()
    finally:
        distributed.all_reduce = plain
    assert bool((hidden.grad[::2] == 0).all()) is sparse
    return shapes


def left_out(schedule: str) -> list[tuple[list, float, float]]:
    """Return for `gradient_tolerance` 0.1 which rows have a gradient, and the metrics of skipped
    rows; once with the whole head, once with vocabulary slices."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    _, group = groups(1, world)
    hidden, weight, targets = trained_looking(64, 8, 2 * V, torch.float64)
    own = weight.chunk(world)[rank]
    heads = hl.Head(weight.requires_grad_()), hl.Head(own.requires_grad_(), vocab_group=group)
    found = []
    for head in heads:
        leaf = hidden.clone().requires_grad_()
        options = hl.Options(schedule=schedule, gradient_tolerance=0.1)
        out = hl.head_loss(leaf, head, hl.Batch(targets), hl.cross_entropy(), options)
        out.loss.backward()
        rows = (leaf.grad != 0).any(1).tolist()
        skipped = out.metrics["skipped_rows"], out.metrics["skipped_mass"]
        found.append((rows, *map(float, skipped)))
    return found
