"""Test cases of `matrix.py`, split over a grid of ranks and run on every rank of a test world.

A grid of ranks has `data` rows and `vocabulary` columns. Each row of the grid holds different
tokens of common segments; each column holds a different slice of the head's vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import matrix
import torch
from torch import Tensor, distributed

import headloss as hl
from headloss.testing import parameters


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a call is split over data x vocabulary ranks; `spread` turns on sequence parallelism."""

    data: int = 1
    vocabulary: int = 1
    spread: bool = False
    seed: int = 0

    @property
    def world(self) -> int:
        return self.data * self.vocabulary


@functools.cache
def groups(data: int, vocabulary: int) -> tuple[Any, Any]:
    """Return this rank's data group and vocabulary group."""
    ranks = torch.arange(data * vocabulary).view(data, vocabulary)
    me = distributed.get_rank()
    mine = []
    for lines in (ranks.t().tolist(), ranks.tolist()):
        made = [(line, distributed.new_group(line)) for line in lines]
        mine.append(next(group for line, group in made if me in line))
    return mine[0], mine[1]


def sizes(total: int, parts: int, generator: torch.Generator, least: int) -> list[int]:
    """Draw random sizes with the sum `total`."""
    free = total - least * parts
    at = torch.randint(free + 1, (parts - 1,), generator=generator).sort().values.tolist()
    return [least + b - a for a, b in zip([0, *at], [*at, free], strict=True)]


@dataclass(frozen=True, kw_only=True)
class Mine:
    """One rank's inputs of a test case that is split over ranks."""

    hidden: Tensor
    head: hl.Head
    batch: hl.Batch
    positions: Tensor  # Rows of the whole batch's hidden states that this rank holds.
    tokens: Tensor  # Tokens of the whole batch that this rank holds.


def part_of(inputs: matrix.Inputs, cut: Cut, rank: int, data: Any, vocab: Any) -> Mine:
    """Return this rank's inputs of a random split, which all ranks draw from the same seed."""
    row, column = divmod(rank, cut.vocabulary)
    generator = torch.Generator().manual_seed(cut.seed)
    batch, head, total = inputs.batch, inputs.head, inputs.batch.targets.numel()
    # Rank 0 has few or no tokens for any seed; tokens of a segment lie on any rank.
    owner = torch.randint(cut.data, (total,), generator=generator)
    if cut.data > 1 and cut.seed % 2:
        owner = owner.clamp_min(1)
    count = batch.segments.count
    if cut.data > 1 and inputs.hidden.dtype == torch.float64 and count <= total // 2:
        # Rank 0 has as many tokens as segments, so that an [S] field looks like a per-token field.
        owner.clamp_min_(1)[torch.randperm(total, generator=generator)[:count]] = 0
    tokens = (owner == row).nonzero().squeeze(1)
    spread = sizes(len(tokens), cut.vocabulary, generator, 0) if cut.spread else [len(tokens)]
    at = sum(spread[:column]) if cut.spread else 0
    positions = tokens[at : at + spread[column if cut.spread else 0]]

    rows = sizes(head.weight.shape[0], cut.vocabulary, generator, 8)
    scored = min(sum(rows[:column]), head.vocabulary), min(sum(rows[: column + 1]), head.vocabulary)
    own = slice(sum(rows[:column]), sum(rows[: column + 1]))

    def leaf(tensor: Tensor | None, index: Any = slice(None)) -> Any:
        if tensor is None:
            return None
        return tensor.detach()[index].clone().requires_grad_(tensor.requires_grad)

    temperature = head.temperature
    if isinstance(temperature, Tensor) and cut.data > 1:
        temperature = temperature.reshape(-1)[tokens]
    grouped = cut.vocabulary > 1
    mine = replace(
        head,
        weight=leaf(head.weight, own),
        bias=leaf(head.bias, own),
        temperature=temperature,
        lora=tuple(replace(x, a=leaf(x.a), b=leaf(x.b, own)) for x in head.lora),
        vocab_group=vocab if grouped else None,
    )
    if cut.data == 1:
        fields = {n: t.detach() if isinstance(t, Tensor) else t for n, t in batch.fields.items()}
        segments, targets = batch.segments, batch.targets
    else:
        fields = {
            n: t.reshape(total, *t.shape[batch.targets.dim() :])[tokens]
            if isinstance(t, Tensor) and batch.per_token(n)
            else t
            for n, t in batch.fields.items()
        }
        ids = batch.segments.ids.reshape(-1)[tokens]
        segments = hl.Segments.from_ids(ids, count=batch.segments.count, group=data)
        targets = batch.targets.reshape(-1)[tokens]
    if batch.support is not None:
        ids = batch.support_ids
        fields["support_ids"] = ids if cut.data == 1 else ids.reshape(total, -1)[tokens]
    if grouped and "teacher_logits" in fields:
        fields["teacher_logits"] = fields["teacher_logits"][..., slice(*scored)]
    hidden = inputs.hidden
    if cut.data > 1 or cut.spread:
        hidden = hidden.reshape(total, -1)
        hidden = leaf(hidden, positions)
    else:
        hidden = leaf(hidden)
    return Mine(
        hidden=hidden,
        head=mine,
        batch=hl.Batch(targets, segments, **fields),
        positions=positions,
        tokens=tokens,
    )


def run(row: matrix.Row, cut: Cut, **changes: Any) -> dict[str, Any]:
    """Return this rank's outputs and gradients of a test case (one value of each axis), as
    arrays."""
    schedule = dict(zip(matrix.AXES, row, strict=True))["schedule"]
    return run_inputs(matrix.make_inputs(row), matrix.SCHEDULES[schedule], cut, **changes)


def run_inputs(
    inputs: matrix.Inputs, options: hl.Options, cut: Cut, **changes: Any
) -> dict[str, Any]:
    """Return this rank's outputs and gradients, as arrays."""
    data, vocab = groups(cut.data, cut.vocabulary)
    mine = part_of(inputs, cut, distributed.get_rank(), data, vocab)
    options = replace(options, sequence_parallel=cut.spread, **changes)
    # Before a static call, plan an equal non-static call: ranks compare their arguments only in the
    # non-static call, and the static call uses the result of the comparison.
    if options.static:
        plain = replace(options, static=False)
        hl.plan(mine.hidden, mine.head, mine.batch, inputs.objective, plain)
    out = hl.head_loss(mine.hidden, mine.head, mine.batch, inputs.objective, options)
    leaves = {n: t for n, t in parameters(mine.hidden, mine.head).items() if t.requires_grad}
    found = torch.autograd.grad(out.loss, list(leaves.values()))
    metrics = out.metrics.all_reduce(data) if cut.data > 1 else out.metrics
    arrays = {
        "loss": out.loss.detach(),
        "logps": out.logps.reshape(-1),
        **{f"term {n}": t for n, t in out.terms.items()},
        **{f"metric {n}": m.value for n, m in metrics.items()},
        **{f"gradient {n}": g for n, g in zip(leaves, found, strict=True)},
    }
    if out.entropies is not None:
        arrays["entropies"] = out.entropies.reshape(-1)
    places = {"positions": mine.positions, "tokens": mine.tokens}
    return {
        n: t.double().numpy() if t.is_floating_point() else t.numpy()
        for n, t in {**arrays, **places}.items()
    }


def run_all(rows: list[tuple[matrix.Row, Cut]]) -> list[dict[str, Any]]:
    return [run(row, cut) for row, cut in rows]
