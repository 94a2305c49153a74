"""The acts of full-distribution distillation over a tile, in plain PyTorch; see `kernels.pair`.

n tokens, v columns, K stored outcomes of a top-k teacher.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...objective.divergence import phi, tilt
from ...objective.statistics import Partials, finish, merge
from ..interface import Backward, Forward
from ..pair import Compared, Differences, Outcomes, Pair, Side
from ..transform import Transform
from .tile import blocks, log_softmax, logit_gradient_, partials, wide

IDENTITY = Transform()
NOTHING: frozenset[str] = frozenset()


def readable(tile: Tensor, dtype: torch.dtype) -> Tensor:
    return tile.to(dtype)


def _log_p(side: Side, raw: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """z and log softmax(z) of some rows."""
    part = side.rows(rows)
    z = part.transform(raw[rows].to(wide(raw.dtype)))
    return z, log_softmax(z, part.normalizer)


def divergence(
    raw: Tensor, raw_teacher: Tensor, pair: Pair, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    student, teacher, kind, beta = pair
    out = raw.new_zeros(2, raw.shape[0], dtype=wide(raw.dtype)) if onto is None else onto
    for rows in blocks(raw):
        _, log_q = _log_p(teacher, raw_teacher, rows)
        _, log_p = _log_p(student, raw, rows)
        value, pivot = phi(log_q, log_p, kind, beta)
        out[0, rows] += value
        out[1, rows] += pivot
    return out


def teacher_product(x: Tensor, w: Tensor, raw: Tensor, to: Compared) -> Differences:
    student, teacher, targets, kind = to
    nowhere, other = torch.full_like(targets, -1), x.to(wide(x.dtype)) @ w.to(wide(x.dtype)).t()
    found = partials(other, Forward(nowhere, 0, teacher, NOTHING))
    pair = Pair(student, Side(teacher, finish(found, 1, NOTHING)[1]), kind, 0.5)
    everything = slice(0, len(x))
    _, log_q = _log_p(pair.teacher, other, everything)
    _, log_p = _log_p(student, raw, everything)
    difference = log_q - log_p
    ratio = difference.gather(1, targets.unsqueeze(1))
    tile = (difference - ratio).clamp_(-6e4, 6e4).to(torch.float16)
    return Differences(tile, ratio.squeeze(1), divergence(raw, other, pair)[0])


def divergence_gradient_(
    raw: Tensor,
    raw_teacher: Tensor | Differences,
    pair: Pair,
    pivot: Tensor,
    weight: Tensor,
    extra: Tensor | None = None,
    others: Backward | None = None,
) -> Tensor:
    student, teacher, kind, beta = pair
    out = _place(raw, extra, others)
    for rows in blocks(raw):
        z, log_p = _log_p(student, raw, rows)
        if isinstance(raw_teacher, Differences):
            difference = raw_teacher.tile[rows].to(log_p.dtype)
            log_q = log_p + difference.add_(raw_teacher.ratio[rows].unsqueeze(1))
        else:
            _, log_q = _log_p(teacher, raw_teacher, rows)
        p = log_p.exp()
        if kind == "forward_kl":
            g = p.sub_(log_q.exp_())
        else:
            g = p.mul_(tilt(log_q, log_p, kind, beta).sub_(pivot[rows].unsqueeze(1)))
        w = weight[rows].unsqueeze(1)
        g = torch.where(w == 0, 0, g * w)  # such rows may hold anything
        g = student.transform.rows(rows).pull_back_(g, z)
        _put(out, raw, rows, g, extra, others)
    return _narrow(out, others)


def _place(raw: Tensor, extra: Tensor | None, others: Backward | None) -> Tensor:
    if others is not None:
        return raw
    return torch.empty_like(raw, dtype=wide(raw.dtype)) if extra is None else extra


def _put(
    out: Tensor, raw: Tensor, rows: slice, g: Tensor, extra: Tensor | None, others: Backward | None
) -> None:
    """Write g with the other parts of the gradient of some rows; g is overwritten."""
    if extra is not None:
        g += extra[rows]
    if others is not None:
        g += logit_gradient_(raw[rows].to(g.dtype), others.rows(rows))
    out[rows] = g.to(out.dtype)


def _narrow(out: Tensor, others: Backward | None) -> Tensor:
    return out if others is None or others.dtype is None else out.to(others.dtype)


def tail_partials(
    raw: Tensor, columns: Tensor, transform: Transform, onto: Partials | None = None
) -> Partials:
    found = []
    for rows in list(blocks(raw)) or [slice(0)]:
        z = transform.rows(rows)(raw[rows].to(wide(raw.dtype)))
        z = _with_stored(z, columns[rows], -math.inf)
        nowhere = columns.new_full((len(z),), -1)
        found.append(partials(z, Forward(nowhere, 0, IDENTITY, NOTHING)))
    joined = Partials(
        **{
            name: torch.cat([getattr(part, name) for part in found])
            for name in ("peak", "rest", "target")
        }
    )
    return joined if onto is None else merge(onto, joined)


def sparse_gradient_(
    raw: Tensor,
    outcomes: Outcomes,
    weight: Tensor,
    extra: Tensor | None = None,
    others: Backward | None = None,
) -> Tensor:
    columns, tail, slope_stored, slope_tail = outcomes
    out = _place(raw, extra, others)
    for rows in blocks(raw):
        side = tail.rows(rows)
        z = side.transform(raw[rows].to(wide(raw.dtype)))
        others_z = _with_stored(z, columns[rows], -math.inf)
        g = log_softmax(others_z, side.normalizer).exp_().mul_(slope_tail[rows].unsqueeze(1))
        g = _with_stored(g, columns[rows], slope_stored[rows])
        g = side.transform.pull_back_(g, z)
        w = weight[rows].unsqueeze(1)
        g = torch.where(w == 0, 0, g * w)
        _put(out, raw, rows, g, extra, others)
    return _narrow(out, others)


def _with_stored(values: Tensor, columns: Tensor, stored: Tensor | float) -> Tensor:
    """`values` [n, v] with `stored` at the columns that lie in the tile."""
    n, v = values.shape
    wider = torch.cat([values, values.new_empty(n, 1)], 1)  # a column for all that lie elsewhere
    place = torch.where((columns >= 0) & (columns < v), columns, v)
    wider.scatter_(1, place, stored)  # type: ignore[arg-type]
    return wider[:, :v]
