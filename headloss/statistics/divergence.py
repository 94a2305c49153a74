"""Divergences of a student's distribution p and a teacher's distribution q, computed from their
log-probs; see `kernels.pair` for the formulas."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOG_ACCEPTANCE = "log_acceptance"
# Divergences from p or q to the mixture m = beta q + (1 - beta) p.
MIXED = ("js", "skew_forward_kl", "skew_reverse_kl")


class Measure(NamedTuple):
    """A kind of divergence, whose values on vocabulary slices are added, or `LOG_ACCEPTANCE`, whose
    values on slices are merged by log-sum-exp."""

    kind: str
    # Teacher's weight in the mixture of student and teacher; 0 for a divergence without a mixture.
    beta: float = 0.0


ACCEPTANCE = Measure(LOG_ACCEPTANCE)


def against_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """Return log(p / m), where m = beta q + (1 - beta) p, without cancellation where p is near q:
    exactly 0 where p and q agree."""
    d = log_p - log_q
    # Compute -abs(d) by `torch.where`, because autograd sets the derivative of `torch.abs` at 0 to
    # 0, so that the gradient of log(p / m) would be wrong where p equals q.
    near = torch.where(d > 0, -d, d).expm1_()
    return torch.where(d > 0, -(beta * near).log1p_(), d - ((1 - beta) * near).log1p_())


def slope_in_p(log_q: Tensor, log_p: Tensor, measure: Measure) -> Tensor:
    """Return the derivative of a divergence with respect to the student's probability p, computed
    without cancellation where p is near the teacher's q. The forward KL is not supported."""
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
    """Return min(p, q) / a where p < q, half of min(p, q) / a where p = q, and 0 where p > q; a =
    sum min(p, q) is the acceptance."""
    share = (torch.minimum(log_p, log_q) - log_acceptance.unsqueeze(-1)).exp_()
    return share.mul_((log_q - log_p).sign_().add_(1).div_(2))


def gradient_of(
    log_q: Tensor,
    log_p: Tensor,
    measure: Measure,
    mean_slope: Tensor,
    log_acceptance: Tensor | None = None,
) -> Tensor:
    """Return the gradient [.., v] of a divergence with respect to the student's logits z.
    `mean_slope` [..] is the sum of p_k s_k over the vocabulary, where s_k is the derivative of the
    divergence with respect to p_k. `log_acceptance` is the value of the log-acceptance, and is
    needed only if `measure` is the log-acceptance."""
    p = log_p.exp()
    pivot = mean_slope.unsqueeze(-1)
    if measure.kind == "forward_kl":
        return p.mul_(1 + pivot).sub_(log_q.exp())
    if measure.kind == LOG_ACCEPTANCE:
        assert log_acceptance is not None
        return accepted(log_q, log_p, log_acceptance).sub_(p.mul_(pivot))
    return p.mul_(slope_in_p(log_q, log_p, measure).sub_(pivot))


def phi(log_q: Tensor, log_p: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """Return two sums over the last dimension: the divergence, and the sum of p times the
    divergence's derivative in p."""
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
    """Return two numbers for each of K divergences over the whole vocabulary, [n, K, 2], from those
    of W vocabulary slices, [W, n, K, 2]: the value, and the sum of p times the derivative in p."""
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
