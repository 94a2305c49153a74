"""Policy terms of the form -sg(w) A log p: log-probs weighted by advantages and by a factor w
without gradient.

T scored tokens, A advantages, d_t = logp_t - old_t; sg stops the gradient. Exponents are clamped to
[-20, 20]; log-ratios that are summed into an exponent are not clamped. Every term of this module
returns one loss per token, [T].
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..batch.reduction import sequence_sum, token_mean
from ..statistics.metrics import Observed
from ..statistics.softmax import Slope, Statistics
from .arguments import non_negative, one_of, positive
from .factory import factory
from .importance import (
    MAX_LOG_RATIO,
    Level,
    advantage_figures,
    log_ratio,
    observe,
    ratio_figures,
    ratio_per_token,
    scope_and_per,
)
from .term import Term, term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

MIN_LOG_WEIGHT = math.log(1e-8)  # lower bound of the log of VESPO's sequence weight


def _reinforce_slopes(batch: PackedBatch) -> tuple[Slope, ...]:
    return (Slope(-batch.advantages, sign=0),)


@factory
@term(observe=advantage_figures, slopes=_reinforce_slopes)
def reinforce(stats: Statistics, batch: PackedBatch) -> Tensor:
    """REINFORCE: the plain policy gradient, for data sampled from the current policy.

        -A log p_y

    Williams 1992, doi:10.1007/BF00992696.

    Inputs: advantages. Default reduction: token_mean.
    Also called: verl gpg, NeMo-RL disable_ppo_ratio.
    """
    return -batch.advantages * stats.logp


Weight = Callable[[Statistics, "PackedBatch"], Tensor]  # [T], weight of a token's gradient
Surrogate = Literal["log_prob", "ratio"]
SURROGATES = ("log_prob", "ratio")


def weighted(
    stats: Statistics, batch: PackedBatch, *, weight: Weight, surrogate: str = "log_prob"
) -> Tensor:
    """Return -sg(w) A log p for advantages A and the weight w; the surrogate "ratio" has the same
    gradient and the value -w A."""
    pulls = batch.advantages * weight(stats, batch).detach()
    if surrogate == "log_prob":
        return -pulls * stats.logp
    # clamp: for logp = -inf, logp - logp.detach() would be NaN
    logp = stats.logp.clamp_min(torch.finfo(stats.logp.dtype).min)
    return -pulls * (logp - logp.detach()).exp()


def _capped(stats: Statistics, batch: PackedBatch, *, level: str, clip: tuple[float, float]):
    return ratio_per_token(stats, batch, level).clamp(*clip)


@factory
def cispo(
    *,
    epsilon_high: float = 0.28,
    epsilon_low: float | None = None,
    importance_sampling_level: Level = "token",
) -> Term:
    """Clipped importance-sampling policy optimization: cap the weight, keep every gradient.

        -sg(clip(r, 1 - epsilon_low, 1 + epsilon_high)) A log p_y

    MiniMax 2025 (MiniMax-M1), arXiv:2506.13585. The option epsilon_high of TRL and of
    headloss.rl.CISPOConfig is the cap itself: epsilon_high = 1.28 in TRL is epsilon_high = 0.28 in
    `hl.cispo`. The log of the policy ratio, per token or per sequence, is clamped to [-20, 20].

    Args:
        epsilon_high: distance from 1 of the upper bound of the policy ratio, >= 0. An epsilon_high
            above 1 and up to 1.5 gets a warning, because the caller has probably passed the cap 1 +
            epsilon_high.
        epsilon_low: distance from 1 of the lower bound of the policy ratio, >= 0; None for no lower
            bound.
        importance_sampling_level: "token", "sequence" or "sequence_token"; see `importance`.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    Also called: TRL cispo, verl cispo, Liger cispo, NeMo-RL use_cispo, AgileRL CISPO.
    """
    non_negative(epsilon_high=epsilon_high)
    if 1 < epsilon_high <= 1.5:
        warnings.warn(
            f"cispo: epsilon_high: got {epsilon_high}, a cap of {1 + epsilon_high:g}: it is the "
            f"distance from 1; TRL's {epsilon_high} is {epsilon_high - 1:.4g} here",
            stacklevel=4,
        )
    if epsilon_low is not None:
        non_negative(epsilon_low=epsilon_low)
    scope, _ = scope_and_per(importance_sampling_level)
    # A lower bound of -inf means no lower bound.
    clip = (-math.inf if epsilon_low is None else 1 - epsilon_low, 1 + epsilon_high)
    level = importance_sampling_level
    return Term(
        name="",
        function=functools.partial(
            weighted, weight=functools.partial(_capped, level=level, clip=clip)
        ),
        scope=scope,
        reduction=token_mean,
        observe=functools.partial(observe, level=level, clip=clip),
    )


def _log_sequence_weight(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Return the log of each sequence's weight, [S]: the clamped sum of log-ratios of the new
    policy to the sampler, or of the new to the old policy if the batch has no log-probs of the
    sampler."""
    change = log_ratio(stats, batch).detach()
    if "importance_sampling_ratio" in batch:
        change = change + batch.importance_sampling_ratio.log().clamp_min(MIN_LOG_WEIGHT)
    elif "sampling_logps" in batch:
        change = change + (batch.old_logps - batch.sampling_logps).nan_to_num(nan=0.0)
    return batch.segments.sum(change).clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)


def _gamma(
    stats: Statistics,
    batch: PackedBatch,
    *,
    k: tuple[float, float],
    rate: tuple[float, float],
) -> Tensor:
    """Return VESPO's factor w^k exp(lambda (1 - w)) of each token, [T], for the weight w of the
    token's sequence. In the factor w^k exp(lambda (1 - w)), tokens with advantage >= 0 have the
    exponent `k[0]` and lambda = `rate[0]`, and tokens with advantage < 0 have the exponent `k[1]`
    and lambda = `rate[1]`.
    """
    log_weight = batch.segments.expand(_log_sequence_weight(stats, batch))
    weight = log_weight.exp()
    phi = [(r + power * log_weight - r * weight).exp() for power, r in zip(k, rate, strict=True)]
    return torch.where(batch.advantages >= 0, *phi)


def _observe_vespo(stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
    weight = _log_sequence_weight(stats, batch).exp()
    return ratio_figures(stats, batch, weight, "segment")


@factory
def vespo(
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Term:
    """Variational sequence-level soft policy optimization (VESPO): reshape the sequence's weight.

        -sg(phi(w_i)) A log p_y; phi(w) = w^k exp(lambda (1 - w)), where k = k_pos and lambda = lambda_pos if A >= 0, else k = k_neg and lambda = lambda_neg; w_i = exp(sum_t d_t), d_t = logp_t - old_t

    Shen et al. 2026, arXiv:2602.10693. The log of the sequence weight w_i is clamped to [log 1e-8,
    20]. If the batch has the field sampling_logps (log-probs of the sampler), the sum over the
    sequence of old_logps - sampling_logps is added to the log of the sequence's weight before the
    clamp. Do not use the modifier `.corrected` with `hl.vespo` on a batch with sampling_logps,
    because the ratio of old policy to sampler would be applied twice. If the batch has the field
    importance_sampling_ratio (ratio of old policy to sampler per token, truncated or masked by the
    caller), the sum over the sequence of log importance_sampling_ratio replaces the sum of
    old_logps - sampling_logps in the log of the sequence's weight. An element of
    importance_sampling_ratio below 1e-8, such as the 0 of a masked token, counts as 1e-8.

    Args:
        k_pos, lambda_pos: k and lambda in phi(w) = w^k exp(lambda (1 - w)) where A >= 0, each > 0.
        k_neg, lambda_neg: k and lambda where A < 0, each > 0.

    Inputs: advantages, old_logps, optionally sampling_logps. Default reduction: token_mean.
    Also called: TRL vespo.
    """  # noqa: E501 (an equation is one line)
    positive(k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg)
    k, rate = (k_pos, k_neg), (lambda_pos, lambda_neg)
    return Term(
        name="",
        function=functools.partial(weighted, weight=functools.partial(_gamma, k=k, rate=rate)),
        scope="segment",
        reduction=token_mean,
        observe=_observe_vespo,
    )


TAPERS = ("sequence_product", "sequence", "token")


def _tapered(
    stats: Statistics, batch: PackedBatch, *, level: str, weight_pos: float, weight_neg: float
) -> Tensor:
    ratio = ratio_per_token(stats, batch, level).clamp(max=1)
    return torch.where(batch.advantages >= 0, weight_pos, weight_neg * ratio)


def _observe_topr(stats: Statistics, batch: PackedBatch, *, level: str) -> dict[str, Observed]:
    capped = (ratio_per_token(stats, batch, level) > 1).to(batch.advantages.dtype)
    shares = {"capped": Observed(capped, where=batch.advantages < 0)}
    return observe(stats, batch, level=level) | shares


@factory
def topr(
    *,
    importance_sampling_level: Literal[
        "sequence_product", "sequence", "token"
    ] = "sequence_product",
    weight_pos: float = 1.0,
    weight_neg: float = 1.0,
) -> Term:
    """Tapered off-policy REINFORCE: weight min(policy ratio, 1) where the advantage is negative.

        -weight_pos A log p_y where A >= 0, else -weight_neg sg(min(w, 1)) A log p_y; the weight w is exp(sum_t d_t), exp(mean_t d_t) or exp(d_t), with d_t = logp_t - old_t

    Le Roux et al. 2025, arXiv:2503.14286, eq. 8, has the weight w = exp(sum_t (logp_t - old_t)) of
    a whole sequence. ROLL has the weight w = exp(logp_t - old_t) of a single token, and tests the
    sign of the episode's score, where `hl.topr` tests the sign of the advantage. The log of the
    weight w (the ratio of new to old policy) is clamped to [-20, 20].

    Args:
        importance_sampling_level: level of the policy ratio w: "sequence_product" (exp of the sum
            of a sequence's log-ratios), "sequence" (exp of the mean of a sequence's log-ratios) or
            "token" (exp of a token's log-ratio).
        weight_pos, weight_neg: weight of tokens with A >= 0 and with A < 0, each >= 0.

    Inputs: advantages; old_logps of the sampling policy. Default reduction: sequence_sum.
    Metrics: capped, the fraction of tokens with weight w > 1 among those with advantage A < 0.
    Also called: ROLL topr.
    """  # noqa: E501 (an equation is one line)
    level = importance_sampling_level
    one_of(TAPERS, importance_sampling_level=level)
    non_negative(weight_pos=weight_pos, weight_neg=weight_neg)
    weight = functools.partial(_tapered, level=level, weight_pos=weight_pos, weight_neg=weight_neg)
    return Term(
        name="",
        function=functools.partial(weighted, weight=weight),
        scope=scope_and_per(level)[0],
        reduction=sequence_sum,
        observe=functools.partial(_observe_topr, level=level),
    )
