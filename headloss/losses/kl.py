"""KL divergence from another policy, estimated at the sampled tokens.

T scored tokens; d_t = ref_t - logp_t, r the ratio of new to old policy (see `importance`); sg stops
the gradient. Every term of this module returns one loss per token, [T].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..batch.reduction import token_mean
from ..statistics.metrics import Observed
from ..statistics.softmax import Slope, Statistics
from .arguments import flags, one_of, positive
from .factory import factory
from .importance import Level, estimate, ratio_per_token, scope_and_per
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

ESTIMATORS = ("k1", "k2", "k3", "abs")
POLICIES = ("ref_logps", "old_logps", "sampling_logps")


@dataclass(frozen=True, kw_only=True)
class _Estimate:
    estimator: str
    level: str | None  # level of the policy ratio ("token" ..); None: no policy ratio
    straight_through: bool
    against: str
    clamp_difference: float | None
    clamp: float | None
    zero_above: float | None
    ratio_max: float | None

    def __call__(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        d = getattr(batch, self.against) - stats.logp
        near = d if self.clamp_difference is None else _within(d, self.clamp_difference)
        value = estimate(near, self.estimator)
        if self.zero_above is not None:
            value = value.masked_fill((d > 0) & (value > self.zero_above), 0)
        ratio = None if self.level is None else self._ratio(stats, batch)
        if self.straight_through:
            value = value if self.clamp is None else _within(value, self.clamp)
            pulls = estimate(d, "k2") if ratio is None else ratio.detach() * estimate(d, "k2")
            return value.detach() + (pulls - pulls.detach())
        if ratio is not None:
            # A token whose log-prob difference to the reference is clamped gets no gradient, not
            # even through the policy ratio.
            value = value * torch.where(near == d, ratio, ratio.detach())
        return value if self.clamp is None else _within(value, self.clamp)

    def _ratio(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        assert self.level is not None
        ratio = ratio_per_token(stats, batch, self.level)
        return ratio if self.ratio_max is None else ratio.clamp(max=self.ratio_max)

    def observe(self, stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
        d = getattr(batch, self.against) - stats.logp
        return {name: Observed(estimate(d, name)) for name in ("k1", "k3")}


def _within(x: Tensor, bound: float) -> Tensor:
    return x.clamp(-bound, bound)


def _k1_slopes(batch: PackedBatch) -> tuple[Slope, ...]:
    return (Slope(1.0, sign=0),)


@factory
def kl(
    *,
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1",
    bias_corrected: bool = False,
    importance_sampling_level: Level = "token",
    straight_through: bool = False,
    against: Literal["ref_logps", "old_logps", "sampling_logps"] = "ref_logps",
    clamp_difference: float | None = None,
    clamp: float | None = None,
    zero_above: float | None = None,
    ratio_max: float | None = None,
) -> Term:
    """KL divergence from the reference policy, estimated at the sampled tokens.

        k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1, abs = |d|, d = ref - logp; times the policy ratio r when bias_corrected

    Schulman 2020, http://joschu.net/blog/kl-approx.html. `bias_corrected`: DeepSeek-AI 2025
    (DeepSeek-V3.2), arXiv:2512.02556: the estimate of the KL divergence is multiplied by the policy
    ratio r, and the gradient flows through the estimate and through r. Tang and Munos 2025,
    arXiv:2506.09477, derive which estimators of the KL divergence (k1, k2, k3) have an unbiased
    gradient. The log of the policy ratio, per token or per sequence, is clamped to [-20, 20]; the
    log-prob difference d = ref - logp is clamped only by the option clamp_difference.

    Args:
        estimator: "k1", "k2", "k3" (which GRPO adds to its loss) or "abs". A loss that consists of
            the estimator k1 alone has an expected gradient of 0, unless bias_corrected or
            straight_through is set.
        bias_corrected: multiply the estimate of the KL divergence by the unclipped ratio of new to
            old policy. With old_logps=CURRENT the ratio of new to old policy is 1, and the ratio's
            gradient is the score-function (REINFORCE) gradient.
        importance_sampling_level: level of the policy ratio ("token", "sequence", "sequence_token"
            or "sequence_product", see `importance`) that multiplies the estimate of the KL
            divergence if bias_corrected is set.
        straight_through: take the value of the chosen estimator, but the gradient of the estimator
            k2, -d grad log p, whose expectation is the gradient of the divergence; with
            bias_corrected, the policy ratio multiplies the gradient, but not the value.
        against: the batch field with the other policy's log-probs.
        clamp_difference: bound, > 0, of the log-prob difference |ref - logp|; a token beyond the
            bound has no gradient unless straight_through is set.
        clamp: bound of a token's absolute loss, > 0; a token beyond the bound has no gradient
            unless straight_through is set.
        zero_above: bound, > 0, of the estimated divergence at a token to which the reference gives
            the higher log-prob; a token above the bound has loss 0.
        ratio_max: upper bound, > 0, of the policy ratio if bias_corrected is set.

    Inputs: ref_logps; with bias_corrected also old_logps. Default reduction: token_mean. Metrics:
    k1 and k3, not multiplied by the policy ratio.
    Also called: verl low_var_kl, OpenRLHF compute_approx_kl, NeMo-RL reference_policy_kl_type.
    """  # noqa: E501 (an equation is one line)
    one_of(ESTIMATORS, estimator=estimator)
    one_of(POLICIES, against=against)
    flags(bias_corrected=bias_corrected, straight_through=straight_through)
    bounds = {
        "clamp_difference": clamp_difference,
        "clamp": clamp,
        "zero_above": zero_above,
        "ratio_max": ratio_max,
    }
    positive(**{name: bound for name, bound in bounds.items() if bound is not None})
    scope, _ = scope_and_per(importance_sampling_level)
    level = importance_sampling_level if bias_corrected else None
    made = _Estimate(
        estimator=estimator,
        level=level,
        straight_through=straight_through,
        against=against,
        **bounds,
    )
    plain = estimator == "k1" and not (bias_corrected or straight_through or any(bounds.values()))
    return Term(
        name="",
        function=made,
        scope=scope if bias_corrected else "token",
        reduction=token_mean,
        observe=made.observe,
        slopes=_k1_slopes if plain else None,
    )
