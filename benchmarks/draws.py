"""Random inputs of benchmarks: chosen columns, hidden states of nearly certain tokens, and
advantages of groups of answers.

T tokens, H hidden width, V vocabulary, K columns, S segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

import headloss as hl


def columns_of(targets: Tensor, vocabulary: int, k: int, generator: torch.Generator) -> Tensor:
    """Return [T, K] distinct columns for each token, the target first."""
    steps = torch.randperm(vocabulary - 1, generator=generator, device=targets.device)[: k - 1] + 1
    return (targets.unsqueeze(1) + torch.cat([steps.new_zeros(1), steps])) % vocabulary


TAILS = (1e-6, 1e-2)  # The range of 1 - p(y), for a nearly certain target y.
ANSWERS = 8  # Answers for each question.
# Number of right answers among the `ANSWERS` answers to each of 8 questions.
RIGHT = (0, 2, 4, 8, 3, 1, 6, 5)


@torch.no_grad()
def nearly_certain(
    hidden: Tensor, weight: Tensor, targets: Tensor, share: float, generator: torch.Generator
) -> Tensor:
    """Return hidden states in which a fraction `share` of the tokens has a target probability p(y)
    near 1: 1 - p(y) is drawn log-uniformly from the range `TAILS`."""
    draw = torch.rand(2, len(targets), generator=generator, device=targets.device)
    low, high = TAILS
    tail = low * (high / low) ** draw[1].double()
    wanted = (-tail).log1p() - tail.log()  # The log-odds log(p / (1 - p)) of the target.
    own, some = weight[targets].float(), draw[0] < share
    for _ in range(4):  # Adding the target's weight row raises the target's logit.
        logp = hl.head_stats(hidden, hl.Head(weight), targets).logp.double()
        step = wanted - (logp - (-logp.expm1()).clamp_min(1e-12).log())
        moved = hidden.float() + step.float()[:, None] * own / own.square().sum(1, keepdim=True)
        hidden = torch.where(some[:, None], moved, hidden.float()).to(hidden.dtype)
    return hidden


def group_advantages(count: int) -> Tensor:
    """Return [S] advantages: rewards of 0 or 1, standardised in each group of answers.

    Groups of only right or only wrong answers have advantages of 0.
    """
    found = []
    for group in range(-(-count // ANSWERS)):
        right = torch.arange(ANSWERS) < RIGHT[group % len(RIGHT)]
        rewards = right.double()
        found.append((rewards - rewards.mean()) / (rewards.std() + 1e-4))
    return torch.cat(found)[:count].float()
