"""Inputs of full-distribution distillation, in every backend.

n tokens, v columns. q is the teacher's distribution and p the student's, both at the term's
temperature. A divergence is a sum of phi(log q, log p) over the vocabulary, so that tiles and ranks
contribute summands. Log-acceptances are merged by log-sum-exp.

    forward_kl        sum q (log q - log p)              d/dz_j = p_j - q_j
    reverse_kl        sum p (log p - log q)              s_j = log p_j/q_j
    js                b KL(q || m) + (1-b) KL(p || m)    s_j = (1-b) log p_j/m_j
    skew_forward_kl   KL(q || m)                         s_j = -(1-b) q_j/m_j
    skew_reverse_kl   KL(p || m)                         s_j = log p_j/m_j - (1-b) p_j/m_j
    total_variation   sum |p - q| / 2                    s_j = sign(p_j - q_j) / 2

    log_acceptance    log a, a = sum min(p, q)           s_j = [p_j < q_j], 1/2 where equal

Here m = b q + (1-b) p. For all measures but forward_kl and log_acceptance, d/dz_j = p_j (s_j -
sum_k p_k s_k). A constant added to s does not change d/dz; sum_k p_k s_k is the mean slope (Lin
1991; Agarwal et al. 2024, arXiv:2306.13649; Ko et al. 2024, arXiv:2402.03898; Wen et al. 2023,
arXiv:2307.15190).

The acceptance a of speculative sampling (Leviathan et al. 2023, arXiv:2211.17192) is a sum of
minima and not 1 - total variation, which keeps no digit of a small a. The gradient of log a is r_j
s_j - p_j R with r = min(p, q) / a and the mean slope R = sum r s, bounded however small a is.

q may have a mass m below 1, as the draft's part of a larger vocabulary. A mass m leaves the sums
unchanged; the total variation grows by (1 - m) / 2, and d forward_kl / dz_j = m p_j - q_j with a
mean slope of m - 1.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..statistics.divergence import Measure
from ..statistics.softmax import Normalizer
from .transform import Transform


class Distribution(NamedTuple):
    """Softmax of a student or a teacher: the transform of raw logits to z, and the normalizer
    [n]."""

    transform: Transform  # In a divergence, the temperature is a number.
    normalizer: Normalizer

    def rows(self, rows: slice | Tensor) -> Distribution:
        """Return the transform and normalizer of a subset of the tokens."""
        return Distribution(self.transform.rows(rows), self.normalizer.rows(rows))


class Pair(NamedTuple):
    """Logits of a student and a teacher. Both transforms have the temperature of the term."""

    student: Distribution
    teacher: Distribution  # The teacher's normalizer has an element per student row.
    measures: tuple[Measure, ...]  # K measures.
    rows: Tensor | None = None  # Teacher's row of each student row, [n] int64; None: equal rows.


class Divergence(NamedTuple):
    """A part of an objective: K divergences of one teacher, each times a weight."""

    teacher: Tensor  # Raw logits [n, v], or [M, v] where `pair.rows` is given.
    pair: Pair
    mean_slope: Tensor  # Shape [n, K].
    # Shape [n, K]. Where all weights are 0, the teacher's row and mean_slope may hold any values.
    weight: Tensor
    log_acceptance: Tensor | None = None  # Shape [n]; None without the log-acceptance.


class StoredTopk(NamedTuple):
    """A part of an objective that depends on the logits z of K stored tokens and on the log-sum-exp
    of all tokens that are not stored."""

    columns: Tensor  # Columns [n, K]; values outside of [0, v) are not in the tile.
    tail: Distribution  # Softmax over the tokens that are not stored.
    slope_stored: Tensor  # Derivative by the stored tokens' z, [n, K].
    slope_tail: Tensor  # Derivative by the log-sum-exp of tokens that are not stored, [n].


class Chosen(NamedTuple):
    """K columns of each token, with a gradient dL/dlogp beyond the four coefficients; [n, K] each,
    of unit stride."""

    columns: Tensor  # Distinct int64 columns; values outside of [0, v) are not in the tile.
    logps: Tensor
    slopes: Tensor  # Slopes dL/dlogp in addition to the coefficients; 0 without a column.
