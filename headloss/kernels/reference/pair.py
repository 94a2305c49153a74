"""The acts of full-distribution distillation over a tile, in plain PyTorch; see `kernels.pair`.

n tokens, v columns, K stored tokens of a top-k teacher.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...statistics.divergence import phi, slope_in_p
from ..interface import Backward
from ..pair import Distribution, Divergence, Pair, StoredTopk
from .tile import blocks, log_softmax, logit_gradient_, wide, widened, with_columns


def _log_p(side: Distribution, raw: Tensor, rows: slice) -> Tensor:
    """log softmax(z) of some rows."""
    part = side.rows(rows)
    return log_softmax(part.transform(widened(raw[rows])), part.normalizer)


def divergence(raw: Tensor, raw_teacher: Tensor, pair: Pair) -> Tensor:
    student, teacher, kind, beta = pair
    out = raw.new_empty(2, raw.shape[0], dtype=wide(raw.dtype))
    for rows in blocks(*raw.shape):
        log_q = _log_p(teacher, raw_teacher, rows)
        log_p = _log_p(student, raw, rows)
        out[0, rows], out[1, rows] = phi(log_q, log_p, kind, beta)
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


def _of_divergence(raw: Tensor, part: Divergence, rows: slice) -> tuple[Any, ...]:
    """Raw logits of some rows, their transform, and d part / dz."""
    student, teacher, kind, beta = part.pair
    log_p, log_q = _log_p(student, raw, rows), _log_p(teacher, part.teacher, rows)
    p = log_p.exp()
    if kind == "forward_kl":
        g = p.sub_(log_q.exp_())
    else:
        g = p.mul_(slope_in_p(log_q, log_p, kind, beta).sub_(part.mean_slope[rows].unsqueeze(1)))
    w = part.weight[rows].unsqueeze(1)
    return raw[rows], student.transform.rows(rows), torch.where(w == 0, 0, g * w)


def _of_stored_topk(raw: Tensor, part: StoredTopk, rows: slice) -> tuple[Any, ...]:
    """As `_of_divergence`."""
    columns, side, tile = part.columns[rows], part.tail.rows(rows), raw[rows]
    z = side.transform(widened(tile))
    log_p = log_softmax(with_columns(z, columns, -math.inf), side.normalizer)
    g = log_p.exp_().mul_(part.slope_tail[rows].unsqueeze(1))
    return tile, side.transform, with_columns(g, columns, part.slope_stored[rows])
