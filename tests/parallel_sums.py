"""What every rank runs for `test_parallel.test_rounded_sums`."""

from __future__ import annotations

import torch
from torch import distributed

import headloss as hl
from headloss.ranks import vocabulary
from headloss.ranks.vocabulary import Shard

WIDTH = 16


def exact(count: int) -> bool:
    """Whole numbers whose sum float32 holds: rounded once, and as many rows as there are."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    shard = Shard(distributed.group.WORLD, [1] * world)
    padded = shard.padded(count)
    generator = torch.Generator().manual_seed(count)
    every = torch.randint(-4000, 4000, (world, padded, WIDTH), generator=generator).float()
    into = torch.full((3 + padded, WIDTH), torch.nan, dtype=torch.bfloat16)
    pending = shard.start_sum(every[rank].clone(), slice(3, 3 + count), into)
    pending.wait()
    want = every.sum(0).bfloat16()
    return torch.equal(into[3:], want) and bool(into[:3].isnan().all())


def problem(count: int) -> tuple[torch.Tensor, torch.Tensor, hl.Batch]:
    """Hidden states, the whole weight, a batch of which some tokens carry no gradient."""
    torch.manual_seed(count)
    hidden, weight = torch.randn(count, WIDTH).bfloat16(), torch.randn(96, WIDTH).bfloat16()
    targets, old = torch.randint(0, 96, (count,)), -3 * torch.rand(count)
    targets[3::5] = -100
    advantages = torch.linspace(-1, 1, count)
    return hidden, weight, hl.Batch(targets, advantages=advantages, old_logps=old)


def gradients(counts: tuple[int, ...]) -> list[tuple[int, list[list[float]]]]:
    """For each number of tokens and schedule: how many sums were rounded by their ranks, and the
    gradient of the hidden states."""
    before, made = (vocabulary.ROUNDED, vocabulary.PART, vocabulary.RoundedSum), []
    vocabulary.ROUNDED, vocabulary.PART = 1, 8 * WIDTH
    vocabulary.RoundedSum = lambda *given: made.append(given) or before[2](*given)  # type: ignore
    found, rank, world = [], distributed.get_rank(), distributed.get_world_size()
    try:
        for count in counts:
            for schedule, chunk in (("one_pass", None), ("one_pass", 16), ("recompute", None)):
                hidden, weight, batch = problem(count)
                hidden.requires_grad_()
                shard = weight.tensor_split(world)[rank].clone().requires_grad_()
                head = hl.Head(shard, vocab_group=distributed.group.WORLD)
                options = hl.Options(schedule=schedule, chunk_tokens=chunk, metrics=False)
                made.clear()
                loss = hl.head_loss(hidden, head, batch, hl.grpo(), options).loss
                (gradient,) = torch.autograd.grad(loss, hidden)
                found.append((len(made), gradient.float().tolist()))
    finally:
        vocabulary.ROUNDED, vocabulary.PART, vocabulary.RoundedSum = before
    return found
