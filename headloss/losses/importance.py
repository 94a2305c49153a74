"""Policy ratios of new to old policy, per token or per sequence, and the metrics of policy terms.

T scored tokens, S segments; d_t = logp_t - old_t; sg stops the gradient.

    "token":             r_t = exp(d_t), [T], d_t = logp_t - old_t;
    "sequence":          s_i = exp(mean_t d_t), [S], with the advantages averaged over t;
    "sequence_token":    s_it = sg(s_i) exp(logp_t - sg(logp_t)), [T], s_i at each token;
    "sequence_product":  exp(sum_t d_t), [S], with the advantages averaged over t.

The exponent (the log-ratio d_t, or its mean or sum over a sequence) is clamped to [-20, 20], so
that every ratio and every gradient is finite; the log-ratios d_t inside a sequence's mean or sum
are not clamped. An empty segment has ratio 1 and advantage 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..statistics.metrics import Max, Min, Observed
from ..statistics.softmax import Statistics
from .arguments import one_of
from .scope import Per, Scope

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

Level = Literal["token", "sequence", "sequence_token", "sequence_product"]
LEVELS: dict[str, tuple[Scope, Per]] = {
    "token": ("token", "token"),
    "sequence": ("segment", "segment"),
    "sequence_token": ("segment", "token"),
    "sequence_product": ("segment", "segment"),
}
MAX_LOG_RATIO = 20.0
FAR = 1e30  # finite value in place of an infinite log-ratio, so that no sum of log-ratios is NaN


def scope_and_per(level: str) -> tuple[Scope, Per]:
    """Return the term scope that a policy ratio at `level` needs, and whether the ratio has one
    value per token or per segment."""
    one_of(tuple(LEVELS), importance_sampling_level=level)
    return LEVELS[level]


# ---------------------------------------------------------------------- policy ratio


def log_ratio(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Return the log-ratio d_t = logp_t - old_t, [T]."""
    return stats.logp - batch.old_logps


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio clamped to [-20, 20]; beyond the clamp the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded(weight: Tensor, minimum: float, maximum: float, mask: bool) -> Tensor:
    """Return the weight clamped to [minimum, maximum]; if `mask` is True, return 0 for a weight
    outside the bounds."""
    if mask:
        return weight.masked_fill((weight < minimum) | (weight > maximum), 0.0)
    return weight.clamp(minimum, maximum)


def importance_ratio(stats: Statistics, batch: PackedBatch, level: str) -> Tensor:
    """Return the ratio of new to old policy, [T] per token or [S] per sequence, as `level` says."""
    d = log_ratio(stats, batch)
    if level == "token":
        return bounded_exp(d)
    pool = batch.segments.sum if level == "sequence_product" else batch.segments.mean
    ratio = bounded_exp(pool(d))
    if level != "sequence_token":
        return ratio
    # clamp: for logp = -inf, logp - logp.detach() would be NaN
    logp = stats.logp.clamp_min(torch.finfo(stats.logp.dtype).min)
    return batch.segments.expand(ratio.detach()) * (logp - logp.detach()).exp()


def advantages_at(batch: PackedBatch, level: str) -> Tensor:
    """Return the advantages in the policy ratio's shape: [T], or averaged over segments [S]."""
    per_segment = LEVELS[level][1] == "segment"
    return batch.segments.mean(batch.advantages) if per_segment else batch.advantages


def ratio_per_token(stats: Statistics, batch: PackedBatch, level: str) -> Tensor:
    """Return the ratio of new to old policy at each token, [T]; a sequence's ratio is repeated at
    each token of the sequence."""
    ratio = importance_ratio(stats, batch, level)
    return batch.segments.expand(ratio) if LEVELS[level][1] == "segment" else ratio


def estimate(d: Tensor, estimator: str) -> Tensor:
    """Return the KL estimate [T] from d, a compared policy's log-prob minus the trained policy's
    log-prob."""
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return d.abs() if estimator == "abs" else d.expm1() - d


# ---------------------------------------------------------------------- metrics


def advantage_figures(stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
    """Return the metrics of a policy term that need no old policy."""
    return {
        "logps": Observed(stats.logp),
        "advantage": Observed(batch.advantages),
        "advantage_min": Observed(batch.advantages, Min),
        "advantage_max": Observed(batch.advantages, Max),
    }


def ratio_figures(
    stats: Statistics, batch: PackedBatch, ratio: Tensor, per: Per
) -> dict[str, Observed]:
    """Return the metrics of a policy term by name, from its `ratio` [T] or [S] of new to old
    policy."""
    d = log_ratio(stats, batch)
    exponent = d.clamp(max=MAX_LOG_RATIO)
    return {
        **advantage_figures(stats, batch),
        "old_logps": Observed(batch.old_logps),
        "ratio": Observed(ratio, per=per),
        "ratio_min": Observed(ratio, Min, per=per),
        "ratio_max": Observed(ratio, Max, per=per),
        "ratio_squared": Observed(ratio.square(), per=per),
        "kl_old_k1": Observed(-d),
        "kl_old_k3": Observed(exponent.expm1() - exponent),
    }


def clip_figures(
    ratio: Tensor, advantages: Tensor, clip: tuple[float, float], per: Per
) -> dict[str, Observed]:
    """Return the fractions of importance ratios below and above `clip` without a gradient."""
    low, high = clip
    clip_low = (ratio < low) & (advantages < 0)
    clip_high = (ratio > high) & (advantages > 0)
    found = {"clip_low": clip_low, "clip_high": clip_high, "clip_region": clip_low | clip_high}
    return {name: Observed(x.to(ratio.dtype), per=per) for name, x in found.items()}


def observe(
    stats: Statistics, batch: PackedBatch, *, level: str, clip: tuple[float, float] | None = None
) -> dict[str, Observed]:
    """Return all metrics of a policy term whose policy ratio is per token or per sequence, as
    `level` says; with `clip`, also the fractions of clipped ratios."""
    per = LEVELS[level][1]
    ratio = importance_ratio(stats, batch, level)
    found = ratio_figures(stats, batch, ratio, per)
    if clip is not None:
        found |= clip_figures(ratio, advantages_at(batch, level), clip, per)
    return found
