"""Policy losses that bound the policy ratio: by clipped log-ratios averaged per sequence, by a
smooth gate, or by a clip that keeps a gradient.

T scored tokens, S segments, A advantages, d_t = logp_t - old_t; r is the ratio at the level that
`importance_sampling_level` names (see `importance`): [T] per token, or [S] per sequence.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..batch.reduction import sequence_mean, token_mean
from ..statistics.metrics import Observed
from ..statistics.softmax import Statistics
from .arguments import non_negative, number, positive
from .factory import factory
from .importance import (
    Level,
    advantages_at,
    bounded_exp,
    clip_figures,
    importance_ratio,
    log_ratio,
    observe,
    ratio_figures,
    scope_and_per,
)
from .reinforce import weighted
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch


def _gmpo_advantages(batch: PackedBatch) -> Tensor:
    return batch.segments.expand(batch.segments.mean(batch.advantages))


def _geometric_mean(
    stats: Statistics, batch: PackedBatch, *, epsilon_low: float, epsilon_high: float
) -> Tensor:  # [S]
    d = log_ratio(stats, batch)
    rising = _gmpo_advantages(batch) > 0
    clipped = torch.where(rising, d.clamp(max=epsilon_high), d.clamp(min=-epsilon_low))
    return -bounded_exp(batch.segments.mean(clipped)) * batch.segments.mean(batch.advantages)


def _observe_gmpo(
    stats: Statistics, batch: PackedBatch, *, clip: tuple[float, float]
) -> dict[str, Observed]:
    ratio = importance_ratio(stats, batch, "token")
    clipped = clip_figures(ratio, _gmpo_advantages(batch), clip, "token")
    return ratio_figures(stats, batch, ratio, "token") | clipped


@factory
def gmpo(*, epsilon_low: float = 0.4, epsilon_high: float = 0.4) -> Term:
    """Geometric-mean policy optimization: clip token log-ratios, then average them per sequence.

        -exp(mean_t clip(d_t)) A_i; log-ratio d_t = logp_t - old_t, advantage A_i of sequence i; clip(d) = min(d, epsilon_high) where A_i > 0, else max(d, -epsilon_low)

    Zhao et al. 2025, arXiv:2507.20673. The metrics of the policy ratio and of the clip are measured
    per token. The mean over a sequence's clipped log-ratios is clamped to [-20, 20].

    Args:
        epsilon_low, epsilon_high: bounds of a token's log-ratio, each >= 0.

    Inputs: advantages, old_logps. Default reduction: sequence_mean.
    Also called: TRL GMPOTrainer, verl geo_mean.
    """  # noqa: E501 (an equation is one line)
    non_negative(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    clip = (math.exp(-epsilon_low), math.exp(min(epsilon_high, 700)))  # exp(710) overflows
    ends = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high}
    return Term(
        name="",
        function=functools.partial(_geometric_mean, **ends),
        scope="segment",
        per="segment",
        reduction=sequence_mean,
        observe=functools.partial(_observe_gmpo, clip=clip),
    )


def _soft_gate(
    stats: Statistics,
    batch: PackedBatch,
    *,
    level: str,
    temperature_pos: float,
    temperature_neg: float,
) -> Tensor:  # [T], or [S] for a policy ratio per sequence
    advantages = advantages_at(batch, level)
    tau = torch.full_like(advantages, temperature_neg).masked_fill(advantages > 0, temperature_pos)
    gate = (tau * (importance_ratio(stats, batch, level) - 1)).sigmoid() * 4 / tau
    return -gate * advantages


@factory
def sapo(
    *,
    temperature_pos: float = 1.0,
    temperature_neg: float = 1.05,
    importance_sampling_level: Level = "token",
) -> Term:
    """Soft adaptive policy optimization: a smooth gate on the ratio instead of a clip.

        -(4 / tau) sigmoid(tau (r - 1)) A, tau = temperature_pos where A > 0, else temperature_neg

    Gao et al. 2025, arXiv:2511.20347. The log of the policy ratio, per token or per sequence, is
    clamped to [-20, 20].

    Args:
        temperature_pos, temperature_neg: steepness of the sigmoid of the policy ratio where the
            advantage is > 0, and elsewhere, each > 0.
        importance_sampling_level: level of the policy ratio, as in `grpo`.

    Inputs: advantages, old_logps. Default reduction: sequence_mean.
    Also called: TRL sapo, verl sapo.
    """
    positive(temperature_pos=temperature_pos, temperature_neg=temperature_neg)
    level = importance_sampling_level
    scope, per = scope_and_per(level)
    return Term(
        name="",
        function=functools.partial(
            _soft_gate,
            level=level,
            temperature_pos=temperature_pos,
            temperature_neg=temperature_neg,
        ),
        scope=scope,
        per=per,
        reduction=sequence_mean,
        observe=functools.partial(observe, level=level),
    )


# ---------------------------------------------------------------------- gradients of clipped tokens


def _preserving(
    stats: Statistics,
    batch: PackedBatch,
    *,
    clip: tuple[float, float],
    beta_low: float,
    beta_high: float,
) -> Tensor:
    ratio, a = importance_ratio(stats, batch, "token"), batch.advantages
    low, high = clip
    weight = torch.where((ratio < low) & (a < 0), beta_low * low, ratio)
    return torch.where((ratio > high) & (a > 0), beta_high * high, weight)


@factory
def ce_gppo(
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    beta_low: float = 0.5,
    beta_high: float = 1.0,
) -> Term:
    """Gradient-preserving clipping: a clipped token keeps a bounded gradient.

        -sg(w) A p_y / sg(p_y), advantage A; the weight w is the ratio of new to old policy, or beta_low (1 - epsilon_low) for a token clipped below, or beta_high (1 + epsilon_high) for a token clipped above

    Su et al. 2025 (CE-GPPO), arXiv:2509.20712. With beta_low = beta_high = 1 the loss is GPPO
    (Klear-Reasoner), arXiv:2508.07629. The log of the policy ratio r is clamped to [-20, 20].

    Args:
        epsilon_low, epsilon_high: distance of the lower and upper clip bound from 1, each >= 0.
        beta_low, beta_high: factor of the gradient of a token whose ratio is below the lower or
            above the upper clip bound, relative to the gradient at the bound, each >= 0.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    """  # noqa: E501 (an equation is one line)
    non_negative(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    non_negative(beta_low=beta_low, beta_high=beta_high)
    clip = (1 - epsilon_low, 1 + epsilon_high)
    weight = functools.partial(_preserving, clip=clip, beta_low=beta_low, beta_high=beta_high)
    return Term(
        name="",
        function=functools.partial(weighted, weight=weight, surrogate="ratio"),
        reduction=token_mean,
        observe=functools.partial(observe, level="token", clip=clip),
    )


def _flipped(
    stats: Statistics, batch: PackedBatch, *, clip: tuple[float, float], dual_clip: float | None
) -> Tensor:
    ratio, a = importance_ratio(stats, batch, "token"), batch.advantages
    low, high = clip
    bounded = torch.where(a > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    fixed = bounded.detach()
    weight = torch.where(a > 0, fixed.reciprocal(), fixed)
    if dual_clip is not None:
        weight = weight.clamp(max=dual_clip)
    return -a * weight * (bounded / fixed)


@factory
def aspo(
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, dual_clip: float | None = 3.0
) -> Term:
    """Asymmetric importance sampling: positive advantages are weighted by the inverse ratio.

        -sg(w) b / sg(b) A, w = min(1 / b, dual_clip) where A > 0, else min(b, dual_clip); b is the policy ratio r, clipped to at most 1 + epsilon_high where A > 0, else to at least 1 - epsilon_low

    Wang et al. 2025, arXiv:2510.06062. A token whose policy ratio r is clipped has no gradient; a
    token whose weight w is limited by dual_clip still has a gradient. The log of the policy ratio r
    is clamped to [-20, 20].

    Args:
        epsilon_low: distance of the lower ratio bound from 1 where A <= 0, in [0, 1).
        epsilon_high: distance of the upper ratio bound from 1 where A > 0, >= 0.
        dual_clip: upper bound of the weight, > 1; None for no bound.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    """  # noqa: E501 (an equation is one line)
    number("0 <= epsilon_low < 1", lambda x: 0 <= x < 1, epsilon_low=epsilon_low)
    non_negative(epsilon_high=epsilon_high)
    if dual_clip is not None:
        number("> 1", lambda x: x > 1, dual_clip=dual_clip)
    clip = (1 - epsilon_low, 1 + epsilon_high)
    return Term(
        name="",
        function=functools.partial(_flipped, clip=clip, dual_clip=dual_clip),
        reduction=token_mean,
        observe=functools.partial(observe, level="token", clip=clip),
    )
