"""The acts of full-distribution distillation over a tile, in plain PyTorch.

n tokens, v columns, K stored outcomes of a top-k teacher. q is the teacher's distribution, p the
student's, both at the term's temperature; a divergence is a plain sum over the vocabulary of
phi(log q, log p), so tiles, sweeps and ranks add up.

    forward_kl   sum q (log q - log p)               d/dz_j = p_j - q_j
    reverse_kl   sum p (log p - log q)               d/dz_j = p_j (log p_j/q_j - pivot)
    js           b KL(q || m) + (1-b) KL(p || m),    d/dz_j = (1-b) p_j (log p_j/m_j - pivot)
                 m = b q + (1-b) p

with pivot = KL(p || q) for reverse_kl and KL(p || m) for js (Lin 1991; Agarwal et al. 2024,
arXiv:2306.13649).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..stats import FLOOR, Normalizer, Partials, merge
from .reference import _blocks, partials
from .transform import Transform

IDENTITY = Transform()
NOTHING: frozenset[str] = frozenset()


class Side(NamedTuple):
    """One side's logits: how raw ones become z, and the normalizer of its softmax [n]."""

    transform: Transform
    normalizer: Normalizer

    def log_p(self, raw: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """z and log softmax(z) of some rows."""
        z = self.transform.rows(rows)(raw[rows])
        log_p = z - self.normalizer.peak[rows].unsqueeze(1)
        return z, log_p.sub_(self.normalizer.log_sum[rows].unsqueeze(1)).clamp_min_(FLOOR)


def _against_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """log p/m, without cancellation where p is near q: exact zeros where they agree."""
    d = log_p - log_q
    near = torch.where(d > 0, -d, d).expm1_()  # abs has slope 0 at 0
    return torch.where(d > 0, -(beta * near).log1p_(), d - ((1 - beta) * near).log1p_())


def phi(log_q: Tensor, log_p: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Sums over the last dimension: the divergence, and the pivot of its gradient."""
    q, p = log_q.exp(), log_p.exp()
    if kind == "forward_kl":
        value = (q * (log_q - log_p)).sum(-1)
        return value, torch.zeros_like(value)
    if kind == "reverse_kl":
        value = (p * (log_p - log_q)).sum(-1)
        return value, value
    p_to_m = _against_mixture(log_q, log_p, beta)
    q_to_m = p_to_m - (log_p - log_q)
    pivot = (p * p_to_m).sum(-1)
    return beta * (q * q_to_m).sum(-1) + (1 - beta) * pivot, pivot


def divergence(
    raw: Tensor,  # [n, v]
    raw_teacher: Tensor,  # [n, v]
    student: Side,
    teacher: Side,
    kind: str,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """A tile's share of the divergence and of its pivot, [n] each."""
    n = raw.shape[0]
    value, pivot = raw.new_empty(n), raw.new_empty(n)
    for rows in _blocks(raw):
        _, log_q = teacher.log_p(raw_teacher, rows)
        _, log_p = student.log_p(raw, rows)
        value[rows], pivot[rows] = phi(log_q, log_p, kind, beta)
    return value, pivot


def divergence_gradient_(
    raw: Tensor,  # [n, v]
    raw_teacher: Tensor,  # [n, v], overwritten
    student: Side,
    teacher: Side,
    kind: str,
    beta: float,
    pivot: Tensor,  # [n]
    weight: Tensor,  # [n]
) -> Tensor:
    """weight * d divergence / d raw, in the teacher tile's memory."""
    for rows in _blocks(raw):
        _, log_q = teacher.log_p(raw_teacher, rows)
        z, log_p = student.log_p(raw, rows)
        p = log_p.exp()
        if kind == "forward_kl":
            g = p.sub_(log_q.exp_())
        else:
            if kind == "reverse_kl":
                ratio = log_p.sub_(log_q)
            else:
                ratio = _against_mixture(log_q, log_p, beta)
                p.mul_(1 - beta)
            g = p.mul_(ratio.sub_(pivot[rows].unsqueeze(1)))
        w = weight[rows].unsqueeze(1)
        g = torch.where(w == 0, 0, g * w)  # such rows may hold anything
        raw_teacher[rows] = student.transform.rows(rows).pull_back_(g, z)
    return raw_teacher


def tail_partials(
    raw: Tensor,  # [n, v]
    columns: Tensor,  # [n, K] columns of this tile, any value outside [0, v) is not in it
    transform: Transform,
    onto: Partials | None = None,
) -> Partials:
    """Partials of all tokens but the stored ones: the rest keeps digits that 1 - sum would lose."""
    found = []
    for rows in _blocks(raw):
        z = _with_stored(transform.rows(rows)(raw[rows]), columns[rows], -math.inf)
        nowhere = columns.new_full((len(z),), -1)
        found.append(partials(z, nowhere, 0, IDENTITY, NOTHING))
    joined = Partials(
        **{
            name: torch.cat([getattr(part, name) for part in found])
            for name in ("peak", "rest", "target")
        }
    )
    return joined if onto is None else merge(onto, joined)


def sparse_gradient(
    raw: Tensor,  # [n, v]
    columns: Tensor,  # [n, K] columns of this tile, any value outside [0, v) is not in it
    tail: Side,  # the softmax over all tokens but the stored ones
    slope_stored: Tensor,  # [n, K] d/dz of the stored ones
    slope_tail: Tensor,  # [n] d/d log-sum-exp of the others
    used: Tensor,  # [n] bool; the slopes of other rows may hold anything
) -> Tensor:
    """d/draw of a function of (z of the stored tokens, lse of the rest), as a new tensor [n, v]."""
    out = torch.empty_like(raw)
    for rows in _blocks(raw):
        z, log_p = tail.log_p(raw, rows)
        g = log_p.clamp_max_(0).exp_().mul_(slope_tail[rows].unsqueeze(1))
        g = _with_stored(g, columns[rows], slope_stored[rows])
        g = tail.transform.rows(rows).pull_back_(g, z)
        out[rows] = torch.where(used[rows].unsqueeze(1), g, 0)
    return out


def _with_stored(values: Tensor, columns: Tensor, stored: Tensor | float) -> Tensor:
    """`values` [n, v] with `stored` at the columns that lie in the tile."""
    n, v = values.shape
    wider = torch.cat([values, values.new_empty(n, 1)], 1)  # a column for all that lie elsewhere
    place = torch.where((columns >= 0) & (columns < v), columns, v)
    wider.scatter_(1, place, stored)  # type: ignore[arg-type]
    return wider[:, :v]
