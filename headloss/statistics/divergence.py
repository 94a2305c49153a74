"""Divergences of two distributions from their log-probs; see `kernels.pair` for the formulas."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOG_ACCEPTANCE = "log_acceptance"
MIXED = ("js", "skew_forward_kl", "skew_reverse_kl")  # Kinds that compare with a mixture.


class Measure(NamedTuple):
    """A kind of divergence, or `LOG_ACCEPTANCE`, which merges by log-sum-exp and not by a sum."""

    kind: str
    beta: float = 0.0  # Teacher's weight in the mixture, 0 for kinds without a mixture.


ACCEPTANCE = Measure(LOG_ACCEPTANCE)


def against_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """Return log p/m, without cancellation where p is near q: exactly 0 where p and q agree."""
    d = log_p - log_q
    near = torch.where(d > 0, -d, d).expm1_()  # Not -abs(d), whose slope at 0 is 0.
    return torch.where(d > 0, -(beta * near).log1p_(), d - ((1 - beta) * near).log1p_())


def slope_in_p(log_q: Tensor, log_p: Tensor, measure: Measure) -> Tensor:
    """Return the slope s of any divergence but the forward KL, without cancellation where p is near
    q."""
    d = log_p - log_q
    kind, beta = measure
    if kind == "reverse_kl":
        return d
    if kind == "total_variation":
        return d.sign().div_(2)
    p_to_m = against_mixture(log_q, log_p, beta)
    if kind == "js":
        return p_to_m.mul_(1 - beta)
    if kind == "skew_forward_kl":
        return (beta - 1) * p_to_m.sub_(d).expm1_()
    return p_to_m.sub_(p_to_m.expm1(), alpha=1 - beta)


def accepted(log_q: Tensor, log_p: Tensor, log_acceptance: Tensor) -> Tensor:
    """Return min(p, q) / sum min(p, q) where p is less than q, half of that share where p and q are
    equal, else 0."""
    share = (torch.minimum(log_p, log_q) - log_acceptance.unsqueeze(-1)).exp_()
    return share.mul_((log_q - log_p).sign_().add_(1).div_(2))


def gradient_of(
    log_q: Tensor,
    log_p: Tensor,
    measure: Measure,
    mean_slope: Tensor,
    log_acceptance: Tensor | None = None,
) -> Tensor:
    """Return d measure / dz [.., v] from the mean slope [..] and, for `LOG_ACCEPTANCE`, the
    value."""
    p = log_p.exp()
    pivot = mean_slope.unsqueeze(-1)
    if measure.kind == "forward_kl":
        return p.mul_(1 + pivot).sub_(log_q.exp())
    if measure.kind == LOG_ACCEPTANCE:
        assert log_acceptance is not None
        return accepted(log_q, log_p, log_acceptance).sub_(p.mul_(pivot))
    return p.mul_(slope_in_p(log_q, log_p, measure).sub_(pivot))


def phi(log_q: Tensor, log_p: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """Return two sums over the last dimension: the divergence, and the mean of its slopes under
    p."""
    kind, beta = measure
    if kind == LOG_ACCEPTANCE:
        value = torch.minimum(log_p, log_q).logsumexp(-1)
        return value, accepted(log_q, log_p, value.detach()).sum(-1)
    q = log_q.exp()
    p = log_p.exp()
    if kind == "forward_kl":
        value = (q * (log_q - log_p)).sum(-1)
        return value, torch.zeros_like(value)
    mean_slope = (p * slope_in_p(log_q, log_p, measure)).sum(-1)
    if kind == "reverse_kl":
        return mean_slope, mean_slope
    if kind == "total_variation":
        return (p - q).abs().sum(-1) / 2, mean_slope
    p_to_m = against_mixture(log_q, log_p, beta)
    if kind == "skew_reverse_kl":
        return (p * p_to_m).sum(-1), mean_slope
    q_to_m = (q * (p_to_m - (log_p - log_q))).sum(-1)
    return (beta * q_to_m + mean_slope if kind == "js" else q_to_m), mean_slope


def merge_shares(slices: Tensor, measures: tuple[Measure, ...]) -> Tensor:
    """Return values and mean slopes [n, K, 2], from slices of the vocabulary [W, n, K, 2]."""
    if len(slices) == 1:
        return slices[0]
    total = slices.sum(0)
    for k, measure in enumerate(measures):
        if measure.kind == LOG_ACCEPTANCE:
            values, slopes = slices[:, :, k].unbind(-1)
            value = values.logsumexp(0)
            total[:, k, 0] = value
            total[:, k, 1] = (slopes * (values - value).exp_()).sum(0)
    return total
