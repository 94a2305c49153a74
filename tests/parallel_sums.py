"""What every rank runs for `test_parallel.test_hidden_gradients_in_parts`."""

from __future__ import annotations

import torch
from torch import distributed

import headloss as hl
from headloss.ranks import vocabulary
from headloss.ranks.vocabulary import Shard

WIDTH, VOCABULARY = 16, 96
WAYS = (("one_pass", None), ("one_pass", 16), ("recompute", None), ("frozen", None))


def problem(count: int) -> tuple[torch.Tensor, torch.Tensor, hl.Batch]:
    """Hidden states, the whole weight, a batch of which some tokens carry no gradient."""
    torch.manual_seed(count)
    hidden, weight = torch.randn(count, WIDTH), torch.randn(VOCABULARY, WIDTH)
    targets, old = torch.randint(0, VOCABULARY, (count,)), -3 * torch.rand(count)
    targets[3::5] = -100
    advantages = torch.linspace(-1, 1, count)
    return (
        hidden.bfloat16(),
        weight.bfloat16(),
        hl.Batch(targets, advantages=advantages, old_logps=old),
    )


def gradients(counts: tuple[int, ...], skip: bool) -> list[tuple[list[slice], list[list[float]]]]:
    """For each number of tokens and schedule: the rows that were summed, in their order, and the
    gradient of the hidden states."""
    before, sent = (vocabulary.PART, Shard.start_sum), []
    vocabulary.PART = 7 * WIDTH
    Shard.start_sum = lambda self, dense, rows: sent.append(rows) or before[1](self, dense, rows)  # type: ignore
    found, rank, world = [], distributed.get_rank(), distributed.get_world_size()
    try:
        for count in counts:
            for schedule, chunk in WAYS:
                hidden, weight, batch = problem(count)
                shard = weight.tensor_split(world)[rank].clone()
                shard.requires_grad_(schedule != "frozen")
                head = hl.Head(shard, vocab_group=distributed.group.WORLD)
                options = hl.Options(
                    schedule=schedule, chunk_tokens=chunk, metrics=False, skip_rows=skip
                )
                sent.clear()
                hidden.requires_grad_()
                loss = hl.head_loss(hidden, head, batch, hl.grpo(), options).loss
                (gradient,) = torch.autograd.grad(loss, hidden)
                found.append((list(sent), gradient.float().tolist()))
    finally:
        vocabulary.PART, Shard.start_sum = before  # type: ignore[method-assign]
    return found
