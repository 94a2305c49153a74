"""What the acts of full-distribution distillation take, in every backend.

n tokens, v columns. q is the teacher's distribution, p the student's, both at the term's
temperature; a divergence is a plain sum over the vocabulary of phi(log q, log p), so tiles, sweeps
and ranks add up.

    forward_kl        sum q (log q - log p)              d/dz_j = p_j - q_j
    reverse_kl        sum p (log p - log q)              s_j = log p_j/q_j
    js                b KL(q || m) + (1-b) KL(p || m)    s_j = (1-b) log p_j/m_j
    skew_forward_kl   KL(q || m)                         s_j = -(1-b) q_j/m_j
    skew_reverse_kl   KL(p || m)                         s_j = log p_j/m_j - (1-b) p_j/m_j
    total_variation   sum |p - q| / 2                    s_j = sign(p_j - q_j) / 2

with m = b q + (1-b) p, and d/dz_j = p_j (s_j - sum_k p_k s_k) but for the first; a constant added
to s changes nothing, and the sum is the pivot (Lin 1991; Agarwal et al. 2024, arXiv:2306.13649; Ko
et al. 2024, arXiv:2402.03898; Wen et al. 2023, arXiv:2307.15190).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..objective.statistics import Normalizer
from .transform import Transform


class Side(NamedTuple):
    """One side's logits: how raw ones become z, and the normalizer of its softmax [n]."""

    transform: Transform  # its temperature is a number
    normalizer: Normalizer

    def rows(self, rows: slice) -> Side:
        """Of some of the tokens."""
        return Side(self.transform.rows(rows), self.normalizer.rows(rows))


class Pair(NamedTuple):
    """A student's logits beside a teacher's. The transforms' temperature is the term's."""

    student: Side
    teacher: Side
    kind: str
    beta: float


class Outcomes(NamedTuple):
    """Stored outcomes of a top-k teacher, and the slopes of a function of them."""

    columns: Tensor  # [n, K] of the tile; any value outside [0, v) is not in it
    tail: Side  # the softmax over all tokens but the stored ones
    slope_stored: Tensor  # [n, K] d/dz of the stored ones
    slope_tail: Tensor  # [n] d/d log-sum-exp of the others


def against_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """log p/m, without cancellation where p is near q: exact zeros where they agree."""
    d = log_p - log_q
    near = torch.where(d > 0, -d, d).expm1_()  # abs has slope 0 at 0
    return torch.where(d > 0, -(beta * near).log1p_(), d - ((1 - beta) * near).log1p_())


def tilt(log_q: Tensor, log_p: Tensor, kind: str, beta: float) -> Tensor:
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
    """Sums over the last dimension: the divergence, and the pivot of its gradient."""
    q, p = log_q.exp(), log_p.exp()
    if kind == "forward_kl":
        value = (q * (log_q - log_p)).sum(-1)
        return value, torch.zeros_like(value)
    pivot = (p * tilt(log_q, log_p, kind, beta)).sum(-1)
    if kind == "reverse_kl":
        return pivot, pivot
    if kind == "total_variation":
        return (p - q).abs().sum(-1) / 2, pivot
    p_to_m = against_mixture(log_q, log_p, beta)
    if kind == "skew_reverse_kl":
        return (p * p_to_m).sum(-1), pivot
    q_to_m = (q * (p_to_m - (log_p - log_q))).sum(-1)
    return (beta * q_to_m + pivot if kind == "js" else q_to_m), pivot
