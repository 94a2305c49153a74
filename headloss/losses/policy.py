"""Policy terms of clipped surrogate objectives (PPO, GRPO, GSPO and variants), each under the name
of its paper.

T scored tokens, S segments, A advantages, d_t = logp_t - old_t; r is the ratio at the level that
`importance_sampling_level` names (see `importance`): [T] per token, or [S] per sequence.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..batch.reduction import Reduction, fixed_length, sequence_mean, sequence_sum, token_mean
from ..statistics.softmax import Slope, Statistics
from .arguments import non_negative, number, positive
from .factory import factory
from .importance import (
    MAX_LOG_RATIO,
    Level,
    advantages_at,
    importance_ratio,
    observe,
    scope_and_per,
)
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

# ---------------------------------------------------------------------- the clipped surrogate


def clipped_surrogate(
    stats: Statistics,
    batch: PackedBatch,
    *,
    level: str,
    clip: tuple[float, float],
    delta: float | None,
    dual_clip: float | None,
) -> Tensor:  # [T], or [S] for a policy ratio per sequence
    ratio = importance_ratio(stats, batch, level)
    advantages = advantages_at(batch, level)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    surrogate = torch.minimum(bounded * advantages, ratio.clamp(*clip) * advantages)
    if dual_clip is not None:
        bound = torch.maximum(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bound, surrogate)
    return -surrogate


def _clipped_slopes(
    batch: PackedBatch,
    *,
    clip: tuple[float, float],
    delta: float | None,
    dual_clip: float | None,
) -> tuple[Slope, ...]:
    """Return the derivative of the token-level loss with respect to logp: -A r where the surrogate
    is not clipped, else 0."""
    low, high = clip
    rising, falling = min(high, delta or math.inf), max(high, delta or math.inf)
    advantages, old = batch.advantages, batch.old_logps
    most = _log(min(falling, dual_clip or math.inf))
    gains = advantages > 0
    return (
        Slope(
            -advantages,
            anchor=old,
            low=torch.where(gains, old - MAX_LOG_RATIO, old + _log(low)),
            high=torch.where(gains, old + _log(rising), old + most),
        ),
    )


def _log(ratio: float) -> float:
    """Return log(ratio), clamped to the range [-20, 20] of log-ratios."""
    bounds = math.exp(-MAX_LOG_RATIO), math.exp(MAX_LOG_RATIO)
    return math.log(min(max(ratio, bounds[0]), bounds[1]))


def _clipped(
    reduction: Reduction | None,
    epsilon_low: float,
    epsilon_high: float,
    *,
    level: str = "token",
    delta: float | None = None,
    dual_clip: float | None = None,
    missing_reduction: str = "",
) -> Term:
    non_negative(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    if delta is not None:
        positive(delta=delta)
    if dual_clip is not None:
        number("> 1", lambda x: x > 1, dual_clip=dual_clip)
    clip = (1 - epsilon_low, 1 + epsilon_high)
    scope, per = scope_and_per(level)
    return Term(
        name="",
        function=functools.partial(
            clipped_surrogate, level=level, clip=clip, delta=delta, dual_clip=dual_clip
        ),
        scope=scope,
        per=per,
        reduction=reduction,
        missing_reduction=missing_reduction,
        observe=functools.partial(observe, level=level, clip=clip),
        slopes=functools.partial(_clipped_slopes, clip=clip, delta=delta, dual_clip=dual_clip)
        if level == "token"
        else None,
    )


@factory
def grpo(
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    importance_sampling_level: Level = "token",
) -> Term:
    """Group relative policy optimization: the clipped surrogate, averaged within each sequence.

        -min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)

    Shao et al. 2024, arXiv:2402.03300. `delta`: Prime Intellect 2025 (INTELLECT-2),
    arXiv:2505.07291. The log of the policy ratio, per token or per sequence, is clamped to [-20,
    20].

    Args:
        epsilon_low, epsilon_high: distance of the lower and upper clip bound from 1, each >= 0.
        delta: upper bound of the ratio for either sign of the advantage; None for no bound.
        importance_sampling_level: "token", "sequence" or "sequence_token"; see `importance`.

    Inputs: advantages, old_logps. Default reduction: sequence_mean.
    Also called: TRL grpo, Liger grpo, AgileRL GRPO.
    """
    level = importance_sampling_level
    return _clipped(sequence_mean, epsilon_low, epsilon_high, level=level, delta=delta)


@factory
def gspo(*, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Term:
    """Group sequence policy optimization: one ratio, one clip and one loss per sequence.

        -min(s_i A_i, clip(s_i, 1 - epsilon_low, 1 + epsilon_high) A_i), advantage A_i of sequence i, ratio s_i = exp(mean_t d_t), log-ratio d_t = logp_t - old_t

    Zheng et al. 2025, arXiv:2507.18071. Advantages per token are averaged over the sequence.
    The mean log-ratio of a sequence, mean_t (logp_t - old_t), is clamped to [-20, 20].

    Args:
        epsilon_low, epsilon_high: distance of the lower and upper clip bound from 1, each >= 0.

    Inputs: advantages, old_logps. Default reduction: sequence_mean.
    Also called: TRL GSPO, OpenRLHF gspo, NeMo-RL sequence_level_importance_ratios, AgileRL
    trajectory.
    """  # noqa: E501 (an equation is one line)
    return _clipped(sequence_mean, epsilon_low, epsilon_high, level="sequence")


@factory
def gspo_token(*, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Term:
    """GSPO with advantages and clip per token; equal to GSPO if a sequence has one advantage.

        -min(s_it A_t, clip(s_it, 1 - epsilon_low, 1 + epsilon_high) A_t), s_it = sg(s_i) exp(logp_t - sg(logp_t)), sequence ratio s_i = exp(mean_t (logp_t - old_t)), advantage A_t of token t; sg stops the gradient

    Zheng et al. 2025, arXiv:2507.18071, section 4.3. The sequence's mean log-ratio mean_t (logp_t -
    old_t) is clamped to [-20, 20].

    Args:
        epsilon_low, epsilon_high: distance of the lower and upper clip bound from 1, each >= 0.

    Inputs: advantages, old_logps. Default reduction: sequence_mean.
    Also called: verl gspo.
    """  # noqa: E501 (an equation is one line)
    return _clipped(sequence_mean, epsilon_low, epsilon_high, level="sequence_token")


@factory
def dapo(
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    delta: float | None = None,
    importance_sampling_level: Level = "token",
) -> Term:
    """Clipped surrogate with a larger upper clip bound, averaged over all tokens of the step.

        -min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)

    Yu et al. 2025, arXiv:2503.14476. The log of the policy ratio, per token or per sequence, is
    clamped to [-20, 20].

    Args: as in `grpo`.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    Also called: TRL dapo.
    """
    level = importance_sampling_level
    return _clipped(token_mean, epsilon_low, epsilon_high, level=level, delta=delta)


@factory
def bnpo(
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    importance_sampling_level: Level = "token",
) -> Term:
    """Clipped surrogate averaged over tokens, with a symmetric clip.

        -min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)

    `hl.bnpo` is named after beta normalization policy optimization (Xiao et al. 2025,
    arXiv:2506.02864), which normalizes rewards. The log of the policy ratio, per token or per
    sequence, is clamped to [-20, 20].

    Args: as in `grpo`.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    Also called: TRL bnpo.
    """
    level = importance_sampling_level
    return _clipped(token_mean, epsilon_low, epsilon_high, level=level, delta=delta)


@factory
def dr_grpo(
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    importance_sampling_level: Level = "token",
    max_completion_length: float | None = None,
) -> Term:
    """Clipped surrogate divided by a constant length, which removes the bias to short answers.

        -min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)

    Liu et al. 2025, arXiv:2503.20783. The log of the policy ratio, per token or per sequence, is
    clamped to [-20, 20].

    Args:
        max_completion_length: constant divisor; None requires a reduction by `.over(...)`.
        epsilon_low, epsilon_high, delta, importance_sampling_level: as in `grpo`.

    Inputs: advantages, old_logps. Default reduction: fixed_length(max_completion_length).
    Also called: TRL dr_grpo.
    """
    if max_completion_length is not None:
        positive(max_completion_length=max_completion_length)
    return _clipped(
        None if max_completion_length is None else fixed_length(max_completion_length),
        epsilon_low,
        epsilon_high,
        level=importance_sampling_level,
        delta=delta,
        missing_reduction="term dr_grpo: got max_completion_length=None, want a length, or another "
        "reduction by .over(...)",
    )


@factory
def luspo(
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    importance_sampling_level: Level = "sequence",
) -> Term:
    """Length-unbiased sequence policy optimization: each sequence's loss times its length.

        -|o_i| min(min(s_i, delta) A_i, clip(s_i, 1 - epsilon_low, 1 + epsilon_high) A_i), answer i of |o_i| tokens, sequence ratio s_i

    Liu et al. 2026, arXiv:2602.05261. The factor |o_i|, the number of tokens of answer i, comes
    from the default reduction sequence_sum, a sum over the tokens of each answer. The log of the
    policy ratio is clamped to [-20, 20].

    Args: as in `grpo`.

    Inputs: advantages, old_logps. Default reduction: sequence_sum.
    Also called: TRL luspo.
    """  # noqa: E501 (an equation is one line)
    level = importance_sampling_level
    return _clipped(sequence_sum, epsilon_low, epsilon_high, level=level, delta=delta)


@factory
def ppo(
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, dual_clip: float | None = None
) -> Term:
    """Proximal policy optimization: clipped surrogate per token, with an optional dual clip.

        -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A); where A < 0: -max(min(..), dual_clip A)

    Schulman et al. 2017, arXiv:1707.06347. Dual clip: Ye et al. 2020, arXiv:1912.09729.
    The log of the policy ratio r is clamped to [-20, 20].

    Args:
        epsilon_low, epsilon_high: distance of the lower and upper clip bound from 1, each >= 0.
        dual_clip: bound of the ratio where the advantage is negative; > 1, or None for no bound.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    Also called: verl vanilla, OpenRLHF ppo, NeMo-RL ClippedPGLossFn.
    """  # noqa: E501 (an equation is one line)
    return _clipped(token_mean, epsilon_low, epsilon_high, dual_clip=dual_clip)
