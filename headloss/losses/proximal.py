"""Terms that keep the policy near the old policy, by a trust region or a quadratic penalty.

T scored tokens, S segments, A advantages, d_t = logp_t - old_t, r = exp(d) with d clamped to
[-20, 20]; p = exp(logp) and q = exp(old) are the target's probabilities; sg stops the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..batch.reduction import token_mean
from ..statistics.metrics import Observed
from ..statistics.softmax import Statistics
from .arguments import flags, number, one_of, positive
from .factory import factory
from .importance import MAX_LOG_RATIO, estimate, importance_ratio, log_ratio, ratio_figures
from .reinforce import SURROGATES, Surrogate, weighted
from .scope import Scope
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

DIVERGENCES = ("tv", "kl")
Inside = Callable[[Statistics, "PackedBatch"], Tensor]  # [T] bool: True at tokens with a gradient


def _ratio_inside(
    stats: Statistics, batch: PackedBatch, *, inside: Inside, ratio_max: float | None = None
) -> Tensor:
    ratio = importance_ratio(stats, batch, "token")
    ratio = ratio if ratio_max is None else ratio.clamp(max=ratio_max)
    return torch.where(inside(stats, batch), ratio, 0)


def _observe(stats: Statistics, batch: PackedBatch, *, inside: Inside) -> dict[str, Observed]:
    """Return the metrics of a policy ratio, and the fractions of tokens without a gradient."""
    ratio = importance_ratio(stats, batch, "token")
    dropped, a = ~inside(stats, batch), batch.advantages
    shares = {
        "clip_low": dropped & (a < 0),
        "clip_high": dropped & (a > 0),
        "clip_region": dropped,
    }
    figures = {name: Observed(share.to(ratio.dtype)) for name, share in shares.items()}
    return ratio_figures(stats, batch, ratio, "token") | figures


def _term(
    inside: Inside,
    surrogate: str,
    ratio_max: float | None = None,
    scope: Scope = "token",
) -> Term:
    one_of(SURROGATES, surrogate=surrogate)
    if ratio_max is not None:
        positive(ratio_max=ratio_max)
    weight = functools.partial(_ratio_inside, inside=inside, ratio_max=ratio_max)
    return Term(
        name="",
        function=functools.partial(weighted, weight=weight, surrogate=surrogate),
        scope=scope,
        reduction=token_mean,
        observe=functools.partial(_observe, inside=inside),
    )


# ---------------------------------------------------------------------- trust regions


def _near(
    stats: Statistics,
    batch: PackedBatch,
    *,
    divergence: str,
    low: float,
    high: float,
    one_sided: bool,
) -> Tensor:
    logp, old = stats.logp.detach(), batch.old_logps
    moved = logp.exp() - old.exp()
    if divergence == "kl":
        # expm1 gives 1 - p without cancellation; the summand 1e-8 keeps 1 - p above 0 at p = 1.
        rest, old_rest = 1e-8 - logp.expm1(), 1e-8 - old.expm1()
        kl = old.exp() * (old - logp) - old.expm1() * (old_rest / rest).log()
        moved = torch.where(moved > 0, kl, -kl)
    below, above = moved >= -low, moved <= high
    return torch.where(batch.advantages > 0, above, below) if one_sided else below & above


@factory
def dppo(
    *,
    divergence: Literal["tv", "kl"] = "tv",
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    ratio_max: float | None = 20.0,
    one_sided: bool = True,
    surrogate: Surrogate = "log_prob",
) -> Term:
    """Divergence proximal policy optimization: drop tokens whose probability moved too far.

        -sg(min(r, ratio_max)) A log p_y where D <= delta_high (A > 0) or D >= -delta_low (A <= 0), else 0; ratio r of new to old policy, advantage A, change D of the target's probability, options ratio_max, delta_low and delta_high

    With p the target's probability under the new policy and q under the old policy, D is p - q
    ("tv"), or KL((q, 1 - q), (p, 1 - p)) with a minus sign where p < q ("kl"). Qi et al. 2026,
    arXiv:2602.04879. The log of the policy ratio r is clamped to [-20, 20].

    Args:
        divergence: "tv" (total variation) or "kl" between the old and the new policy, as
            distributions over two outcomes: the target, and any other token.
        delta_low, delta_high: largest fall and rise of the target's probability, measured by the
            chosen divergence, each >= 0; Qi et al. use 0.2 with "tv" and 0.05 with "kl".
        ratio_max: upper bound of the policy ratio in the weight w, > 0; None for no bound.
        one_sided: drop a token only if its advantage pushes the probability further away; False:
            drop a token beyond either bound, whatever its advantage.
        surrogate: "log_prob" for the loss -sg(w) A log p_y with the weight w, or "ratio" for the
            same gradient with the value -w A.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    Also called: verl dppo_tv, verl dppo_kl, prime-rl default, prime-rl ipo.
    """  # noqa: E501 (an equation is one line)
    one_of(DIVERGENCES, divergence=divergence)
    number(">= 0", lambda x: x >= 0, delta_low=delta_low, delta_high=delta_high)
    flags(one_sided=one_sided)
    inside = functools.partial(
        _near, divergence=divergence, low=delta_low, high=delta_high, one_sided=one_sided
    )
    return _term(inside, surrogate, ratio_max)


def _between(stats: Statistics, batch: PackedBatch, *, low: float, high: float) -> Tensor:
    ratio = importance_ratio(stats, batch, "token").detach()
    return (ratio >= low) & (ratio <= high)


@factory
def icepop(*, alpha: float = 0.5, beta: float = 5.0, surrogate: Surrogate = "log_prob") -> Term:
    """IcePop on the current policy's ratio: the weight is the ratio within two bounds, else 0.

        -sg(r) A log p_y where alpha <= r <= beta, else 0; ratio r of new to old policy, advantage A

    Ling Team 2025, arXiv:2510.18855. The paper on IcePop divides the trainer's probability by the
    sampler's: to get the paper's loss, pass the sampler's log-probs as old_logps, or mask another
    policy term by `.corrected("token_mask", min=0.5, max=5.0)`. The log of the policy ratio r is
    clamped to [-20, 20].

    Args:
        alpha, beta: lower and upper bound of the ratio, 0 <= alpha <= beta.
        surrogate: as in `dppo`.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    Also called: verl bypass_mode.
    """
    number(">= 0", lambda x: x >= 0, alpha=alpha)
    number(">= alpha", lambda x: x >= alpha, beta=beta)
    return _term(functools.partial(_between, low=alpha, high=beta), surrogate)


def _aligned(stats: Statistics, batch: PackedBatch, *, delta: float) -> Tensor:
    # The sign of r - 1 is taken from expm1(log r), because r - 1 could round to 0.
    d = log_ratio(stats, batch).detach()
    gap = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1()
    near = batch.segments.expand(batch.segments.mean(gap.abs())) <= delta
    return near | (gap * batch.advantages <= 0)


@factory
def vaco(*, delta: float = 0.2, surrogate: Surrogate = "ratio") -> Term:
    """Total-variation-based advantage-aligned constrained policy optimization.

        -r A, or 0 where mean_t |r_t - 1| > delta in the token's sequence and (r - 1) A > 0; ratio r of new to old policy, advantage A

    Honari et al. 2026, arXiv:2603.01365, with the total variation measured per sequence. The log of
    the policy ratio r is clamped to [-20, 20].

    Args:
        delta: bound, >= 0, on the mean of |r - 1| over the tokens of a sequence. The mean estimates
            twice the total variation distance of the new policy from the old policy.
        surrogate: "ratio" for the loss -r A of a token with policy ratio r and advantage A, or
            "log_prob" for the loss -sg(r) A log p with the same gradient.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    """  # noqa: E501 (an equation is one line)
    number(">= 0", lambda x: x >= 0, delta=delta)
    return _term(functools.partial(_aligned, delta=delta), surrogate, scope="segment")


# ---------------------------------------------------------------------- quadratic penalty


def _one(stats: Statistics, batch: PackedBatch) -> Tensor:
    return torch.ones_like(batch.advantages)


def _quadratic(stats: Statistics, batch: PackedBatch, *, beta: float) -> Tensor:
    return weighted(stats, batch, weight=_one) + beta * estimate(log_ratio(stats, batch), "k2")


def _observe_dro(stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
    return ratio_figures(stats, batch, importance_ratio(stats, batch, "token"), "token")


@factory
def dro(*, beta: float = 0.1) -> Term:
    """Direct reward optimization: policy gradient with a quadratic penalty on the log-ratio.

        -(A log p_y - beta / 2 (log p_y - log q_y)^2), advantage A, target's probability p_y under the new and q_y under the old policy

    Richemond et al. 2024, arXiv:2405.19107. The log-ratio log p_y - log q_y is not clamped in the
    loss, and is clamped to at most 20 before the exponential in the metrics.

    Args:
        beta: strength of the pull to the old policy, > 0.

    Inputs: advantages, old_logps. Default reduction: token_mean.
    Also called: verl dro.
    """  # noqa: E501 (an equation is one line)
    positive(beta=beta)
    return Term(
        name="",
        function=functools.partial(_quadratic, beta=beta),
        reduction=token_mean,
        observe=_observe_dro,
    )
