"""Options of terms as the ranks of a test world compare them: what each rank runs."""

from __future__ import annotations

import torch
from parallel_cases import groups
from torch import distributed

import headloss as hl

T, H, V = 6, 4, 10
LONG = 3000  # more numbers than a tensor's text shows


@hl.term
def of_table(stats, batch, table=None, nested=None):
    factor = table.mean() if nested is None else nested["tables"][0].mean()
    return stats.logp * factor


def run(over: str, form: str, spoil: str) -> tuple[str, str]:
    """The loss, or the error, of a call whose option differs on the last rank where `spoil`."""
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
        return "loss", str(float(hl.head_loss(hidden, head, batch, term + hl.entropy()).loss))
    except (ValueError, TypeError) as error:
        return type(error).__name__, str(error)
