"""Full-distribution distillation over a tile, in plain PyTorch; see `kernels.pair` for the
formulas.

n tokens, v columns, K stored tokens of a top-k teacher.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...statistics.divergence import gradient_of, phi
from ..interface import Backward
from ..pair import Distribution, Divergence, Pair, StoredTopk
from ..transform import Transform
from .tile import blocks, log_softmax, logit_gradient_, wide, widened, with_columns


def _log_p(side: Distribution, raw: Tensor, rows: slice) -> Tensor:
    """Return log softmax(z) of some rows of raw logits."""
    part = side.rows(rows)
    return log_softmax(part.transform(widened(raw[rows])), part.normalizer)


def _log_q(pair: Pair, raw: Tensor, rows: slice) -> Tensor:
    """Return the teacher's log softmax(z) for the student's rows `rows`, from the raw logits of the
    teacher."""
    side = pair.teacher.rows(rows)
    tile = raw[rows] if pair.rows is None else raw[pair.rows[rows]]
    return log_softmax(side.transform(widened(tile)), side.normalizer)


def divergence(raw: Tensor, raw_teacher: Tensor, pair: Pair) -> Tensor:
    out = raw.new_empty(raw.shape[0], len(pair.measures), 2, dtype=wide(raw.dtype))
    for rows in blocks(*raw.shape):
        log_q = _log_q(pair, raw_teacher, rows)
        log_p = _log_p(pair.student, raw, rows)
        for k, measure in enumerate(pair.measures):
            out[rows, k, 0], out[rows, k, 1] = phi(log_q, log_p, measure)
    return out


def part_gradient_(
    raw: Tensor,
    part: Divergence | StoredTopk,
    extra: Tensor | None = None,
    others: Backward | None = None,
) -> Tensor:
    out = raw if others is not None else extra
    out = torch.empty_like(raw, dtype=wide(raw.dtype)) if out is None else out
    of_rows = _of_stored_topk if isinstance(part, StoredTopk) else _of_divergence
    for rows in blocks(*raw.shape):
        tile, transform, g = of_rows(raw, part, rows)  # type: ignore[arg-type]
        g = transform.vjp_(g, tile)
        if extra is not None:
            g += extra[rows]
        if others is not None:
            g += logit_gradient_(tile.to(g.dtype), others.rows(rows))
        out[rows] = g.to(out.dtype)
    return out if others is None or others.dtype is None else out.to(others.dtype)


def _of_divergence(raw: Tensor, part: Divergence, rows: slice) -> tuple[Tensor, Transform, Tensor]:
    """Return three values for the tokens `rows`: the raw logits, the transform from raw logits to
    logits z, and the gradient of the weighted sum of divergences with respect to z."""
    student = part.pair.student
    weight = part.weight[rows]
    log_p = _log_p(student, raw, rows)
    log_q = _log_q(part.pair, part.teacher, rows)
    log_a = None if part.log_acceptance is None else part.log_acceptance[rows]
    total: Tensor | None = None
    for k, measure in enumerate(part.pair.measures):
        g = gradient_of(log_q, log_p, measure, part.mean_slope[rows, k], log_a)
        g *= weight[:, k : k + 1]
        total = g if total is None else total.add_(g)
    assert total is not None
    dead = (weight == 0).all(1, keepdim=True)
    return raw[rows], student.transform.rows(rows), total.masked_fill_(dead, 0)


def _of_stored_topk(raw: Tensor, part: StoredTopk, rows: slice) -> tuple[Tensor, Transform, Tensor]:
    """Return three values for the tokens `rows`: the raw logits, the transform from raw logits to
    logits z, and the gradient with respect to z of the loss against a stored top-k teacher."""
    columns = part.columns[rows]
    side = part.tail.rows(rows)
    tile = raw[rows]
    z = side.transform(widened(tile))
    log_p = log_softmax(with_columns(z, columns, -math.inf), side.normalizer)
    g = log_p.exp_().mul_(part.slope_tail[rows].unsqueeze(1))
    return tile, side.transform, with_columns(g, columns, part.slope_stored[rows])
