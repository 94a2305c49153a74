"""Argument types of the kernels for full-distribution distillation (divergences between student and
teacher over the whole vocabulary), for every backend.

n tokens, v columns. q is the teacher's distribution and p the student's, both at the term's
temperature. Every divergence is a sum over the vocabulary: each tile of logits and each rank adds
the summands of its own columns. The log-acceptance log sum min(p, q) over the whole vocabulary is
the log-sum-exp of the log-acceptances of the tiles or ranks.

The table has the name of each divergence; the divergence's value, where m = b q + (1-b) p is a
mixture of q and p with a number b; and s_j, the value's derivative with respect to p_j (for
forward_kl, the gradient d/dz_j with respect to the student's logit z_j):
    forward_kl        sum q (log q - log p)              d/dz_j = p_j - q_j
    reverse_kl        sum p (log p - log q)              s_j = log p_j/q_j
    js                b KL(q || m) + (1-b) KL(p || m)    s_j = (1-b) log p_j/m_j
    skew_forward_kl   KL(q || m)                         s_j = -(1-b) q_j/m_j
    skew_reverse_kl   KL(p || m)                         s_j = log p_j/m_j - (1-b) p_j/m_j
    total_variation   sum |p - q| / 2                    s_j = sign(p_j - q_j) / 2
    log_acceptance    log a, a = sum min(p, q)           s_j = [p_j < q_j], 1/2 where equal

For each divergence of the table except forward_kl and log_acceptance, the gradient with respect to
the student's logit z_j is p_j (s_j - sum_k p_k s_k), where s_k is the divergence's derivative with
respect to the student's probability p_k. The mean slope of a token is the mean of the divergence's
derivatives s_k, weighted by the student's probabilities p_k. Adding one constant to all derivatives
s_k does not change the gradient of the logits (Lin 1991; Agarwal et al. 2024, arXiv:2306.13649; Ko
et al. 2024, arXiv:2402.03898; Wen et al. 2023, arXiv:2307.15190).

The acceptance a of speculative sampling (Leviathan et al. 2023, arXiv:2211.17192) is computed as
sum min(p, q). The formula 1 - total variation is not used, because a small acceptance a computed by
subtraction from 1 would have no correct digit. The gradient of the log-acceptance log a = log sum
min(p, q) with respect to the student's logit z_j is r_j s_j - p_j R, where r_k = min(p_k, q_k) / a,
s_k is 1 where the student's p_k is below the teacher's q_k (1/2 where equal, else 0), and the mean
slope R is the sum over k of r_k s_k. The gradient of the log-acceptance log a is bounded, however
small the acceptance a is.

The teacher's probabilities q may sum to a mass w below 1, if the student (a draft model) has only a
part of the teacher's vocabulary. If the teacher's probabilities sum to w < 1, the total variation
grows by (1 - w) / 2, and the gradient of forward_kl with respect to the student's logit z_j is w
p_j - q_j. For forward_kl, the kernels store w - 1 (w is the sum of the teacher's probabilities)
where other divergences store the mean slope, the sum over k of p_k times the divergence's
derivative in p_k.
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

    # In a divergence, `transform.temperature` is one number for all tokens, not a tensor.
    transform: Transform
    normalizer: Normalizer

    def rows(self, rows: slice | Tensor) -> Distribution:
        """Return the softmax (transform and normalizer) of the tokens `rows` alone."""
        return Distribution(self.transform.rows(rows), self.normalizer.rows(rows))


class Pair(NamedTuple):
    """Softmax transforms and normalizers of a student and a teacher, with the K divergences to
    measure between the two. Student's and teacher's logits are both divided by the temperature of
    the loss term."""

    student: Distribution
    teacher: Distribution  # The teacher's `normalizer` has one element per student row.
    measures: tuple[Measure, ...]  # K measures.
    # Teacher row of each student row, [n] int64; None: row i of the student has row i of the
    # teacher.
    rows: Tensor | None = None


class Divergence(NamedTuple):
    """A part of a loss: K divergences from one teacher, each times a weight."""

    # Raw logits of the teacher, [n, v]; [M, v] if students' rows share teacher rows (`pair.rows`).
    teacher: Tensor
    pair: Pair
    mean_slope: Tensor  # Shape [n, K].
    # Shape [n, K]. For a token with only zero weights, the token's `teacher` and `mean_slope` may
    # hold any values.
    weight: Tensor
    # Values [n] of log sum min(p, q), the log-acceptance; None if `pair.measures` lacks the
    # log-acceptance.
    log_acceptance: Tensor | None = None


class StoredTopk(NamedTuple):
    """A part of a loss that depends on the logits z of K stored vocabulary columns and on the
    log-sum-exp over all columns that are not stored."""

    # Vocabulary columns [n, K], relative to the tile; a number outside of [0, v) is a column that
    # the tile lacks.
    columns: Tensor
    tail: Distribution  # Softmax over all vocabulary columns except the K stored columns.
    # Derivative of the loss with respect to the logits z of the K stored columns, [n, K].
    slope_stored: Tensor
    # Derivative of the loss with respect to the log-sum-exp over all vocabulary columns except the
    # K columns in `columns`, [n].
    slope_tail: Tensor


class Chosen(NamedTuple):
    """K vocabulary columns of each token whose log-probs enter the loss, in addition to the
    target's log-prob. Every field is a tensor [n, K] of unit stride."""

    # Distinct columns, relative to the tile; a number outside of [0, v) is a column that the tile
    # lacks.
    columns: Tensor
    logps: Tensor
    # Derivatives of the loss with respect to the log-probs `logps`; 0 at unused entries of the
    # batch's `candidate_ids`.
    slopes: Tensor
