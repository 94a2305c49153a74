"""Clipped surrogate weighted by the policy's change on the tokens that follow each token.

T scored tokens, A advantages, d_t = logp_t - old_t, r = exp(d) with d clamped to [-20, 20]; sg
stops the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..batch.reduction import token_mean
from ..batch.segments import Segments
from ..statistics.metrics import Observed
from ..statistics.softmax import Statistics
from .arguments import flags, non_negative, positive
from .factory import factory
from .importance import FAR, MAX_LOG_RATIO, importance_ratio, log_ratio, observe
from .policy import clipped_surrogate
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

# Bounds of FIPO's influence weight (exp of a token's discounted future log-ratios) at tokens with a
# negative advantage and a policy ratio above the option `safety`.
SAFE = (0.8, 1.0)


def discounted(values: Tensor, segments: Segments, half_life: float) -> Tensor:
    """Return each token's discounted sum over itself and all later tokens of its segment, [T]
    float64: a value d tokens later is multiplied by 2^(-d / half_life).

    A parallel scan: after n loop iterations, the sum at token t covers the 2^n tokens from t on.
    """
    total, ids, reach = values.double(), segments.ids, 1
    while reach < len(total) and (decay := 2 ** (-reach / half_life)) > 0:
        later = torch.where(ids[reach:] == ids[:-reach], total[reach:], 0)
        total, reach = total + decay * pad(later, (0, reach)), 2 * reach
    return total


@dataclass(frozen=True, kw_only=True)
class _Fipo:
    clip: tuple[float, float]
    delta: float | None
    half_life: float
    bounds: tuple[float, float] | None
    safety: float | None

    def __call__(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        value = clipped_surrogate(
            stats, batch, level="token", clip=self.clip, delta=self.delta, dual_clip=None
        )
        return self._influence(stats, batch, self._future(stats, batch)) * value

    def _future(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        """Return the discounted log-ratios F of the tokens from t on, [T]."""
        if batch.segments.group is not None:
            raise ValueError(
                "term fipo: segments.group: got segments that run across ranks, want them whole: "
                "the tokens that follow one may be on another rank"
            )
        moved = log_ratio(stats, batch).detach().clamp(-FAR, FAR)
        if self.delta is not None:
            ratio = importance_ratio(stats, batch, "token").detach()
            moved = moved.masked_fill(ratio > self.delta, 0)
        future = discounted(moved, batch.segments, self.half_life)
        return future.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).to(moved.dtype)

    def _influence(self, stats: Statistics, batch: PackedBatch, future: Tensor) -> Tensor:
        """Return each token's influence weight, [T]: the exponential of its discounted future KL,
        clipped to the term's bounds."""
        weight = future.exp()
        if self.bounds is not None:
            weight = weight.clamp(*self.bounds)
        return torch.where(self._safe(stats, batch), weight, weight.clamp(*SAFE))

    def _safe(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        """Return [T] bool: False for tokens with a negative advantage and a policy ratio above the
        option `safety`; True for all other tokens."""
        advantages = batch.advantages
        if self.safety is None:
            return torch.ones_like(advantages, dtype=torch.bool)
        ratio = importance_ratio(stats, batch, "token").detach()
        return (advantages >= 0) | (ratio <= self.safety)

    def observe(self, stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
        future = self._future(stats, batch)
        return observe(stats, batch, level="token", clip=self.clip) | {
            "future_kl": Observed(future),
            "influence_weight": Observed(self._influence(stats, batch, future)),
            "safe": Observed(self._safe(stats, batch).to(future.dtype)),
        }


@factory
def fipo(
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    half_life: float = 32.0,
    weight_clip: float | None = 0.2,
    high_only: bool = True,
    safety: float | None = 4.0,
) -> Term:
    """Future-KL influenced policy optimization: weigh a token by the policy change after it.

        -sg(f_t) min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A); weight f_t = clip(exp(F_t), lo, 1 + weight_clip); future KL F_t = sum_{k >= t} 2^(-(k - t) / half_life) m_k d_k; log-ratio d_k = logp_k - old_k; m_k = 0 where r_k > delta, else 1; lo = 1 if high_only, else 1 - weight_clip

    At a token with a negative advantage and a policy ratio above the option `safety`, the factor
    f_t of the token's loss is also clipped to [0.8, 1]. Ma et al. 2026, arXiv:2603.19835, in the
    version of ms-swift. The distance k - t between two tokens counts the scored tokens of a
    segment; other frameworks count all positions, unscored ones included. The future KL F_t, a
    discounted sum of the log-ratios of new to old policy from token t on, is clamped to [-20, 20];
    the log-ratios in the sum are not clamped. With old_logps=CURRENT (old and new policy are equal)
    every log-ratio of new to old policy is 0, and the factor f_t of every token's loss is 1.

    Args:
        epsilon_low, epsilon_high: distance of the lower and upper clip bound from 1, each >= 0.
        delta: upper bound of the policy ratio for either sign of the advantage, > 0; None for no
            bound.
        half_life: distance in tokens, > 0, at which the log-ratio of a following token has the
            factor 1/2 in the future KL (the authors' code calls the half-life a decay rate).
        weight_clip: largest distance of the influence weight f from 1, >= 0; None or 0: no clip, f
            = exp(F) for the future KL F.
        high_only: clip the weight f to values of at least 1.
        safety: policy ratio above which the weight f of a token of negative advantage is clipped to
            [0.8, 1], > 0; None: no such clip.

    Inputs: advantages, old_logps; segments that run across ranks are refused. Default reduction:
    token_mean. Metrics: future_kl (the future KL F), influence_weight (the weight f) and safe (the
    fraction of tokens to which the clip by the option `safety` does not apply).
    Also called: ms-swift fipo.
    """  # noqa: E501 (an equation is one line)
    non_negative(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    positive(half_life=half_life)
    flags(high_only=high_only)
    positive(**{n: x for n, x in (("delta", delta), ("safety", safety)) if x is not None})
    if weight_clip is not None:
        non_negative(weight_clip=weight_clip)
    bounds = (1.0 if high_only else 1 - weight_clip, 1 + weight_clip) if weight_clip else None
    made = _Fipo(
        clip=(1 - epsilon_low, 1 + epsilon_high),
        delta=delta,
        half_life=half_life,
        bounds=bounds,
        safety=safety,
    )
    return Term(name="", function=made, scope="segment", reduction=token_mean, observe=made.observe)
