"""The acts of full-distribution distillation over a tile, in plain PyTorch; see `kernels.pair`.

n tokens, v columns, K stored outcomes of a top-k teacher.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...objective.divergence import phi, tilt
from ...objective.statistics import finish
from ..interface import Backward, Forward
from ..pair import DEEPEST, ROOT, Compared, Differences, Divergence, Outcomes, Pair, Side
from .tile import ALL, blocks, log_softmax, logit_gradient_, partials, wide, widened, with_columns

NOTHING: frozenset[str] = frozenset()


def readable(tile: Tensor, dtype: torch.dtype) -> Tensor:
    return tile.to(dtype)


def _log_p(side: Side, raw: Tensor, rows: slice) -> Tensor:
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


def teacher_product(x: Tensor, w: Tensor, raw: Tensor, to: Compared) -> Differences:
    student, teacher, targets, kind, own, _ = to
    other = widened(x) @ widened(w).t()
    found = partials(other, Forward(None, 0, teacher, NOTHING))
    pair = Pair(student, Side(teacher, finish(found, 1, NOTHING)[1]), kind, 0.5)
    value = divergence(raw, other, pair)[0]
    log_q, log_p = _log_p(pair.teacher, other, ALL), _log_p(student, raw, ALL)
    ratio = (log_q - log_p).gather(1, (targets % w.shape[0]).unsqueeze(1))
    side, one = own or student, torch.ones_like(ratio)
    warmth = student.transform(one) / side.transform(one)
    depth = (DEEPEST / warmth).clamp_max(ROOT * DEEPEST)
    p = torch.maximum(_log_p(side, raw, ALL), -depth)
    log_p = _log_p(student, _again(side, p), ALL)
    kept = torch.where(p < -DEEPEST, -(p / ROOT).exp(), p.exp())
    halves = kept.to(torch.bfloat16), (log_q - log_p - ratio).to(torch.float16)
    low, high = (half.view(torch.int16).to(torch.int32) for half in halves)
    raw.view(torch.int32).copy_(high << 16 | low & 0xFFFF)
    return Differences(ratio.squeeze(1), value, pair.teacher.normalizer, own)


def _again(side: Side, log_p: Tensor) -> Tensor:
    """Raw logits from log p, without a soft cap."""
    z = log_p + (side.normalizer.peak + side.normalizer.log_sum).unsqueeze(1)
    return z / side.transform(torch.ones_like(z[:, :1]))


def _parted(words: Tensor, side: Side) -> tuple[Tensor, Tensor]:
    """Raw logits and differences: see `Differences`."""
    words = words.view(torch.int32)
    p = (words << 16).view(torch.float32)
    log_p = torch.where(p < 0, ROOT * p.abs().log(), p.log())
    return _again(side, log_p), (words >> 16).to(torch.int16).view(torch.float16).float()


def part_gradient_(
    raw: Tensor, part: Divergence | Outcomes, extra: Tensor | None = None,
    others: Backward | None = None
) -> Tensor:
    out = raw if others is not None else extra
    out = torch.empty_like(raw, dtype=wide(raw.dtype)) if out is None else out
    of_rows = _of_outcomes if isinstance(part, Outcomes) else _of_divergence
    for rows in blocks(*raw.shape):
        tile, transform, g = of_rows(raw, part, rows)  # type: ignore[arg-type]
        g = transform.pull_back_(g, tile)
        if extra is not None:
            g += extra[rows]
        if others is not None:
            g += logit_gradient_(tile.to(g.dtype), others.rows(rows))
        out[rows] = g.to(out.dtype)
    return out if others is None or others.dtype is None else out.to(others.dtype)


def _of_divergence(raw: Tensor, part: Divergence, rows: slice) -> tuple[Any, ...]:
    """Raw logits of some rows, their transform, and d part / dz."""
    student, teacher, kind, beta = part.pair
    if isinstance(part.teacher, Differences):
        tile, difference = _parted(raw[rows], (part.teacher.own or student).rows(rows))
        log_p = _log_p(student.rows(rows), tile, ALL)
        log_q = log_p + difference + part.teacher.ratio[rows].unsqueeze(1)
    else:
        tile, log_p = raw[rows], _log_p(student, raw, rows)
        log_q = _log_p(teacher, part.teacher, rows)
    p = log_p.exp()
    if kind == "forward_kl":
        g = p.sub_(log_q.exp_())
    else:
        g = p.mul_(tilt(log_q, log_p, kind, beta).sub_(part.pivot[rows].unsqueeze(1)))
    w = part.weight[rows].unsqueeze(1)
    return tile, student.transform.rows(rows), torch.where(w == 0, 0, g * w)


def _of_outcomes(raw: Tensor, part: Outcomes, rows: slice) -> tuple[Any, ...]:
    """As `_of_divergence`."""
    columns, side, tile = part.columns[rows], part.tail.rows(rows), raw[rows]
    z = side.transform(widened(tile))
    log_p = log_softmax(with_columns(z, columns, -math.inf), side.normalizer)
    g = log_p.exp_().mul_(part.slope_tail[rows].unsqueeze(1))
    return tile, side.transform, with_columns(g, columns, part.slope_stored[rows])
