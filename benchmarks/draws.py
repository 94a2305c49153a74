"""Draws of what inputs are made of: columns, nearly certain tokens, advantages of a group.

T tokens, H hidden width, V vocabulary, K columns, S segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

import headloss as hl


def columns_of(targets: Tensor, vocabulary: int, k: int, generator: torch.Generator) -> Tensor:
    """[T, K] distinct columns of each token, the target first."""
    steps = torch.randperm(vocabulary - 1, generator=generator, device=targets.device)[: k - 1] + 1
    return (targets.unsqueeze(1) + torch.cat([steps.new_zeros(1), steps])) % vocabulary


TAILS = (1e-6, 1e-2)  # where 1 - p(y) of nearly certain tokens lies
ANSWERS = 8  # to each question
RIGHT = (0, 2, 4, 8, 3, 1, 6, 5)  # of the answers to one question after the other


@torch.no_grad()
def nearly_certain(
    hidden: Tensor, weight: Tensor, targets: Tensor, share: float, generator: torch.Generator
) -> Tensor:
    """Hidden states of which a share has a 1 - p(y) that is log-uniform in `TAILS`."""
    draw = torch.rand(2, len(targets), generator=generator, device=targets.device)
    low, high = TAILS
    tail = low * (high / low) ** draw[1].double()
    wanted = (-tail).log1p() - tail.log()  # log p / (1 - p)
    own, some = weight[targets].float(), draw[0] < share
    for _ in range(4):  # a step along the target's own row moves its logit by about as much
        logp = hl.head_stats(hidden, hl.Head(weight), targets).logp.double()
        step = wanted - (logp - (-logp.expm1()).clamp_min(1e-12).log())
        moved = hidden.float() + step.float()[:, None] * own / own.square().sum(1, keepdim=True)
        hidden = torch.where(some[:, None], moved, hidden.float()).to(hidden.dtype)
    return hidden


def group_advantages(count: int) -> Tensor:
    """[S] of right and wrong answers, less their group's mean and over its deviation: all 0 where
    all of a group are right or all wrong."""
    found = []
    for group in range(-(-count // ANSWERS)):
        right = torch.arange(ANSWERS) < RIGHT[group % len(RIGHT)]
        rewards = right.double()
        found.append((rewards - rewards.mean()) / (rewards.std() + 1e-4))
    return torch.cat(found)[:count].float()
