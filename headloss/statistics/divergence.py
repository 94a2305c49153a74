"""Divergences of two distributions from their log-probs; see `kernels.pair` for the formulas."""

from __future__ import annotations

import torch
from torch import Tensor


def against_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """log p/m, without cancellation where p is near q: exact zeros where they agree."""
    d = log_p - log_q
    near = torch.where(d > 0, -d, d).expm1_()  # abs has slope 0 at 0
    return torch.where(d > 0, -(beta * near).log1p_(), d - ((1 - beta) * near).log1p_())


def slope_in_p(log_q: Tensor, log_p: Tensor, kind: str, beta: float) -> Tensor:
    """s of a divergence but the forward KL, without cancellation where p is near q."""
    d = log_p - log_q
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


def phi(log_q: Tensor, log_p: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Sums over the last dimension: the divergence, and the mean of its slopes under p."""
    q, p = log_q.exp(), log_p.exp()
    if kind == "forward_kl":
        value = (q * (log_q - log_p)).sum(-1)
        return value, torch.zeros_like(value)
    mean_slope = (p * slope_in_p(log_q, log_p, kind, beta)).sum(-1)
    if kind == "reverse_kl":
        return mean_slope, mean_slope
    if kind == "total_variation":
        return (p - q).abs().sum(-1) / 2, mean_slope
    p_to_m = against_mixture(log_q, log_p, beta)
    if kind == "skew_reverse_kl":
        return (p * p_to_m).sum(-1), mean_slope
    q_to_m = (q * (p_to_m - (log_p - log_q))).sum(-1)
    return (beta * q_to_m + mean_slope if kind == "js" else q_to_m), mean_slope
