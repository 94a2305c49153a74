"""What the acts of full-distribution distillation take, in every backend.

n tokens, v columns. q is the teacher's distribution, p the student's, both at the term's
temperature; a divergence is a plain sum over the vocabulary of phi(log q, log p), so tiles, sweeps
and ranks add up; of the log-acceptance they merge by log-sum-exp.

    forward_kl        sum q (log q - log p)              d/dz_j = p_j - q_j
    reverse_kl        sum p (log p - log q)              s_j = log p_j/q_j
    js                b KL(q || m) + (1-b) KL(p || m)    s_j = (1-b) log p_j/m_j
    skew_forward_kl   KL(q || m)                         s_j = -(1-b) q_j/m_j
    skew_reverse_kl   KL(p || m)                         s_j = log p_j/m_j - (1-b) p_j/m_j
    total_variation   sum |p - q| / 2                    s_j = sign(p_j - q_j) / 2

    log_acceptance    log a, a = sum min(p, q)           s_j = [p_j < q_j], 1/2 where equal

with m = b q + (1-b) p, and d/dz_j = p_j (s_j - sum_k p_k s_k) but for the first and the last; a
constant added to s changes nothing, and the sum is the mean slope (Lin 1991; Agarwal et al. 2024,
arXiv:2306.13649; Ko et al. 2024, arXiv:2402.03898; Wen et al. 2023, arXiv:2307.15190).

The acceptance of speculative sampling (Leviathan et al. 2023, arXiv:2211.17192) is a sum of minima
and not 1 - total variation, which keeps no digit of a small a; its logarithm has the gradient
r_j s_j - p_j R with r = min(p, q) / a, bounded however small a is, and the mean slope R = sum r s.

q may have a mass m below 1, the draft's part of a larger vocabulary: sums stay, the total variation
gets (1 - m) / 2 more, and d forward_kl / dz_j = m p_j - q_j, whose mean slope is given as m - 1.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..statistics.divergence import Measure
from ..statistics.softmax import Normalizer
from .transform import Transform


class Distribution(NamedTuple):
    """One side's logits: how raw ones become z, and the normalizer of its softmax [n]."""

    transform: Transform  # of a divergence, its temperature is a number
    normalizer: Normalizer

    def rows(self, rows: slice | Tensor) -> Distribution:
        """Of some of the tokens."""
        return Distribution(self.transform.rows(rows), self.normalizer.rows(rows))


class Pair(NamedTuple):
    """A student's logits beside a teacher's. The transforms' temperature is the term's."""

    student: Distribution
    teacher: Distribution  # its normalizer is by the student's row
    measures: tuple[Measure, ...]  # K of them
    rows: Tensor | None = None  # [n] int64: the teacher's row of each; None: its own


class Divergence(NamedTuple):
    """A part of an objective: K divergences of one teacher, times a weight each."""

    teacher: Tensor  # [n, v] raw logits, or [M, v] where the pair has rows
    pair: Pair
    mean_slope: Tensor  # [n, K]
    weight: Tensor  # [n, K]; where all are 0 the teacher's row and mean_slope may hold anything
    log_acceptance: Tensor | None = None  # [n] where it is among the measures


class StoredTopk(NamedTuple):
    """A part of an objective: a function of some tokens' z and of the others' log-sum-exp."""

    columns: Tensor  # [n, K] of the tile; any value outside [0, v) is not in it
    tail: Distribution  # the softmax over all tokens but the stored ones
    slope_stored: Tensor  # [n, K] d/dz of the stored ones
    slope_tail: Tensor  # [n] d/d log-sum-exp of the others


class Chosen(NamedTuple):
    """Columns of each token whose gradient has a part of its own; [n, K] each, of unit stride."""

    columns: Tensor  # int64 of this tile, distinct; any value outside [0, v) is not in it
    logps: Tensor
    slopes: Tensor  # dL/dlogp of each, beside the coefficients; 0 where nothing is chosen
