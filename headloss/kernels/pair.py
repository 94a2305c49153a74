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

from torch import Tensor

from ..objective.statistics import Normalizer
from .transform import Transform

DEEPEST = 86.0  # exp(-DEEPEST) is a normal number
ROOT = 8  # of a smaller probability, this root is stored, with a minus before it


class Side(NamedTuple):
    """One side's logits: how raw ones become z, and the normalizer of its softmax [n]."""

    transform: Transform  # of a divergence, its temperature is a number
    normalizer: Normalizer

    def rows(self, rows: slice | Tensor) -> Side:
        """Of some of the tokens."""
        return Side(self.transform.rows(rows), self.normalizer.rows(rows))


class Pair(NamedTuple):
    """A student's logits beside a teacher's. The transforms' temperature is the term's."""

    student: Side
    teacher: Side
    kind: str
    beta: float


class Compared(NamedTuple):
    """What a teacher's product is compared with, over the whole vocabulary."""

    student: Side
    teacher: Transform
    targets: Tensor  # [n] int64, columns near whose difference the others are taken to be
    kind: str  # forward_kl or reverse_kl
    own: Side | None = None  # the student's at its head's temperature, if that is another
    keep: bool = True  # the logits give way to what the gradient needs, else to anything


class Differences(NamedTuple):
    """Where a student's logits gave way to what the gradient needs: p in bfloat16 at the head's own
    temperature, and d in float16, of each 32 bits the low and the high half; log q - log p =
    d + ratio at the term's temperature. p is kept at exp(-DEEPEST) or more at both temperatures.
    Where the term's is the higher one, that holds at the term's alone; at the head's own p may be
    as small as exp(-ROOT * DEEPEST)."""

    ratio: Tensor  # [n]
    value: Tensor  # [n] the divergence, of the reverse KL its pivot, too
    teacher: Normalizer  # [n]
    own: Side | None = None  # as in `Compared`

    def rows(self, rows: Tensor) -> Differences:
        """Of some of the tokens."""
        own = self.own and self.own.rows(rows)
        return Differences(self.ratio[rows], self.value[rows], self.teacher.rows(rows), own)


class Divergence(NamedTuple):
    """A part of an objective: a divergence, times a weight."""

    teacher: Tensor | Differences  # [n, v] raw logits, or what is in the memory of the student's
    pair: Pair
    pivot: Tensor  # [n]
    weight: Tensor  # [n]; where it is 0 the teacher's row and the pivot may hold anything


class Outcomes(NamedTuple):
    """A part of an objective: a function of some tokens' z and of the others' log-sum-exp."""

    columns: Tensor  # [n, K] of the tile; any value outside [0, v) is not in it
    tail: Side  # the softmax over all tokens but the stored ones
    slope_stored: Tensor  # [n, K] d/dz of the stored ones
    slope_tail: Tensor  # [n] d/d log-sum-exp of the others


class Chosen(NamedTuple):
    """Columns of each token whose gradient has a part of its own; [n, K] each, of unit stride."""

    columns: Tensor  # int64 of this tile, distinct; any value outside [0, v) is not in it
    logps: Tensor
    slopes: Tensor  # dL/dlogp of each, beside the coefficients; 0 where nothing is chosen
