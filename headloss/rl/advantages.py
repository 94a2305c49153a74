"""Advantage estimators on padded rows of tokens.

B rows, C columns; `mask` [B, C] is True at tokens that count. Masked tokens get 0 and are skipped:
the successor of a token is the next token that counts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rewards_at_tokens(
    scores: Tensor,  # The scores of the rows, [B].
    mask: Tensor,  # The mask [B, C], boolean.
    kl: Tensor | None = None,  # The KL estimates [B, C].
    beta: float = 0.0,
) -> Tensor:
    """Return [B, C] rewards: -beta kl_t at each token, plus the score at the row's last token.

    The KL divergence from the reference as part of the reward: Ziegler et al. 2019,
    arXiv:1909.08593.
    """
    (scores,) = _checked(mask, scores=scores)
    # number of unmasked tokens from each column to the row's end
    after = mask.flip(1).long().cumsum(1).flip(1)
    rewards = torch.where(mask & (after == 1), scores[:, None], 0.0)
    if kl is not None:
        (kl,) = _checked(mask, kl=kl)
        rewards = rewards - beta * torch.where(mask, kl, 0.0)
    return rewards


def generalised(
    rewards: Tensor,  # The rewards [B, C].
    values: Tensor,  # The values [B, C].
    mask: Tensor,  # The mask [B, C], boolean.
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of generalised advantage estimation, each [B, C].

        A_t = sum_k (gamma lam)^k (r_(t+k) + gamma V_(t+k+1) - V_(t+k)), return_t = A_t + V_t

    Schulman et al. 2016, arXiv:1506.02438. V_t is `values[:, t]`, and 0 after the last unmasked
    token.
    """
    rewards, values = _checked(mask, rewards=rewards, values=values)
    advantages = torch.zeros_like(values)
    # advantage A and value V of the next unmasked token
    ahead = following = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        step = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * ahead
        ahead = torch.where(mask[:, t], step, ahead)
        following = torch.where(mask[:, t], values[:, t], following)
        advantages[:, t] = torch.where(mask[:, t], step, 0.0)
    return advantages, advantages + torch.where(mask, values, 0.0)


def discounted(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the discounted rewards sum_k gamma^k r_(t+k) at each token, [B, C]."""
    return generalised(rewards, torch.zeros_like(rewards), mask, gamma)[0]


def normalised(values: Tensor, mask: Tensor, distributed: bool = False) -> Tensor:
    """Scale to mean 0 and standard deviation 1 over all tokens, of all ranks if `distributed`."""
    (values,) = _checked(mask, values=values)
    kept = torch.where(mask, values, 0.0).double()
    sums = torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])
    if distributed:
        torch.distributed.all_reduce(sums)
    count = sums[0].clamp(min=1)
    mean = sums[1] / count
    deviation = (sums[2] / count - mean.square()).clamp(min=0).sqrt()
    return torch.where(mask, (values - mean) / (deviation + 1e-8), 0.0).to(values.dtype)


def leave_one_out(rewards: Tensor, group: int) -> Tensor:
    """Return the factor [N] that turns group-mean advantages into leave-one-out advantages.

    Each `group` consecutive rewards form a group. All rewards of a group get the factor
    n / (n - 1), where n is the number of the group's rewards that are not NaN. Kool et al. 2019;
    Ahmadian et al. 2024, arXiv:2402.14740.
    """
    if group < 1 or len(rewards) % group:
        raise ValueError(f"group: got {group} of {len(rewards)} rewards, want rows of whole groups")
    counted = (~rewards.isnan()).view(-1, group).sum(1).to(rewards.dtype)
    return (counted / (counted - 1).clamp(min=1)).repeat_interleave(group)


def _checked(mask: Tensor, **given: Tensor) -> list[Tensor]:
    """Return `scores` (per row) or per-token tensors as floating tensors, after a shape check.

    TypeError for integer tensors, since integer arithmetic would round results.
    """
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise TypeError(f"mask: got {mask.dtype} {tuple(mask.shape)}, want torch.bool [B, C]")
    for name, value in given.items():
        if value.shape != (want := mask.shape[:1] if name == "scores" else mask.shape):
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, want {tuple(want)}")
    return [value if value.is_floating_point() else value.float() for value in given.values()]
