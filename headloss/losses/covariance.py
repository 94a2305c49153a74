"""Policy terms that clip or penalize the tokens with the highest covariance of log-prob and
advantage.

T scored tokens, A advantages, d_t = logp_t - old_t, r = exp(d) with d clamped to [-20, 20]. The
covariance of a token is c_t = (A_t - mean A) (logp_t - mean logp). The mean advantage and the mean
log-prob are taken over all scored tokens of the call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..batch.reduction import token_mean
from ..statistics.metrics import Observed
from ..statistics.softmax import Statistics
from .arguments import non_negative, number
from .factory import factory
from .importance import estimate, importance_ratio, log_ratio, observe, ratio_figures
from .policy import clipped_surrogate
from .reinforce import weighted
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch


def _count(batch: PackedBatch, like: Tensor) -> Tensor:
    """Return the number of scored tokens, a [] float64 tensor."""
    if batch.live is None:
        return like.new_full((), len(batch), dtype=torch.float64)
    return batch.live.sum(dtype=torch.float64)


def _covariance(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Return the covariance c = (A - mean A) (logp - mean logp) of each token, [T]; with static
    shapes, an unscored token gets -inf."""
    logp, count = stats.logp.detach(), _count(batch, stats.logp).clamp_min(1)

    def centred(values: Tensor) -> Tensor:
        live = values if batch.live is None else values.where(batch.live, 0)
        return values - (live.sum(dtype=torch.float64) / count).to(values.dtype)

    c = centred(batch.advantages) * centred(logp)
    return c if batch.live is None else c.where(batch.live, -torch.inf)


def _first(order: Tensor, share: float, count: Tensor) -> Tensor:
    """Return [T] bool, True at the tokens with the smallest values of `order`: the fraction `share`
    of all tokens, and at least one token.

    No shape depends on values, so that the CPU does not wait for the GPU.
    """
    rank = order.argsort(stable=True).argsort()
    return rank < (share * count).floor().clamp_min(1)


def _share(share: float) -> None:
    number("0 < share <= 1", lambda x: 0 < x <= 1, share=share)


# ---------------------------------------------------------------------- clip-cov


@dataclass(frozen=True, kw_only=True)
class _ClipCov:
    clip: tuple[float, float]
    share: float
    low: float
    high: float

    def __call__(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        value = clipped_surrogate(
            stats, batch, level="token", clip=self.clip, delta=None, dual_clip=None
        )
        return value.masked_fill(self._dropped(stats, batch), 0)

    def _dropped(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        c = _covariance(stats, batch)
        ratio, a = importance_ratio(stats, batch, "token").detach(), batch.advantages
        clipped = ratio * a > ratio.clamp(*self.clip) * a
        able = (c > self.low) & (c < self.high) & ~clipped
        draws = batch.draws.where(able, torch.inf)
        return able & _first(draws, self.share, _count(batch, c))

    def observe(self, stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
        found = observe(stats, batch, level="token", clip=self.clip)
        dropped = self._dropped(stats, batch).to(batch.advantages.dtype)
        return found | {"dropped": Observed(dropped)}


@factory
def clip_cov(
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Term:
    """Clipped surrogate without a few random tokens whose advantage and log-prob covary strongly.

        -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A), or 0 for a token that is dropped at random

    Training on tokens whose advantage and log-prob have a high covariance lowers the entropy of the
    policy. A token can be dropped (its loss set to 0) if the clip does not remove the token's
    gradient and the token's covariance c = (A - mean A) (logp - mean logp) of advantage A and
    log-prob is between the options low and high. Of all T tokens, at most max(1, share * T) tokens
    are dropped: the tokens with the smallest values of the field `draws` among all tokens that can
    be dropped. Cui et al. 2025, arXiv:2505.22617. The log of the policy ratio r is clamped to [-20,
    20].

    Args:
        epsilon_low, epsilon_high: distance of the lower and upper clip bound from 1, each >= 0.
        share: largest fraction of all tokens that is dropped, in (0, 1].
        low, high: a token can be dropped if its covariance c of advantage and log-prob is above low
            and below high; low < high.

    Inputs: advantages, old_logps, draws (random numbers, new in every step). Default reduction:
    token_mean.
    Also called: verl clip_cov.
    """  # noqa: E501 (an equation is one line)
    non_negative(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    _share(share)
    number("a number", lambda x: True, low=low)
    number("> low", lambda x: x > low, high=high)
    clip = (1 - epsilon_low, 1 + epsilon_high)
    made = _ClipCov(clip=clip, share=share, low=low, high=high)
    return Term(name="", function=made, scope="batch", reduction=token_mean, observe=made.observe)


# ---------------------------------------------------------------------- kl-cov


def _top(stats: Statistics, batch: PackedBatch, share: float) -> Tensor:
    c = _covariance(stats, batch)
    return _first(-c, share, _count(batch, c))


def _ratio(stats: Statistics, batch: PackedBatch) -> Tensor:
    return importance_ratio(stats, batch, "token")


def _kl_cov(stats: Statistics, batch: PackedBatch, *, share: float, coefficient: float) -> Tensor:
    held = coefficient * estimate(log_ratio(stats, batch), "abs")
    value = weighted(stats, batch, weight=_ratio, surrogate="ratio")
    return value + torch.where(_top(stats, batch, share), held, 0)


def _observe_kl(stats: Statistics, batch: PackedBatch, *, share: float) -> dict[str, Observed]:
    found = ratio_figures(stats, batch, _ratio(stats, batch), "token")
    held = _top(stats, batch, share).to(batch.advantages.dtype)
    return found | {
        "held": Observed(held),
        "kl_old_abs": Observed(estimate(log_ratio(stats, batch), "abs")),
    }


@factory
def kl_cov(*, share: float = 2e-4, coefficient: float = 1.0) -> Term:
    """Unclipped surrogate with a penalty on the log-ratio of the tokens of highest covariance.

        -r A + coefficient |logp - old| at the max(1, share T) tokens of largest covariance c = (A - mean A) (logp - mean logp), -r A at all other tokens; ratio r = exp(logp - old) of new to old policy, advantage A, T tokens in all

    Cui et al. 2025, arXiv:2505.22617. The log of the policy ratio r is clamped to [-20, 20].

    Args:
        share: fraction of all tokens whose loss includes the penalty |logp - old|, in (0, 1].
        coefficient: weight of the penalty |logp - old|, >= 0.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    Also called: verl kl_cov.
    """  # noqa: E501 (an equation is one line)
    _share(share)
    non_negative(coefficient=coefficient)
    return Term(
        name="",
        function=functools.partial(_kl_cov, share=share, coefficient=coefficient),
        scope="batch",
        reduction=token_mean,
        observe=functools.partial(_observe_kl, share=share),
    )
