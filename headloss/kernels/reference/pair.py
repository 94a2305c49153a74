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
from ..pair import DEEPEST, Compared, Differences, Outcomes, Pair, Side
from ..transform import Transform
from .tile import blocks, log_softmax, logit_gradient_, partials, wide

IDENTITY = Transform()
NOTHING: frozenset[str] = frozenset()
ALL = slice(None)


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
    student, teacher, targets, kind, own = to
    nowhere, other = torch.full_like(targets, -1), x.to(wide(x.dtype)) @ w.to(wide(x.dtype)).t()
    found = partials(other, Forward(nowhere, 0, teacher, NOTHING))
    pair = Pair(student, Side(teacher, finish(found, 1, NOTHING)[1]), kind, 0.5)
    value = divergence(raw, other, pair)[0]
    _, log_q = _log_p(pair.teacher, other, ALL)
    _, log_p = _log_p(student, raw, ALL)
    ratio = (log_q - log_p).gather(1, (targets % w.shape[0]).unsqueeze(1))
    side, one = own or student, torch.ones_like(ratio)
    warmth = (student.transform(one) / side.transform(one)).clamp_min(1)
    p = torch.maximum(_log_p(side, raw, ALL)[1], -DEEPEST / warmth)
    _, log_p = _log_p(student, _again(side, p), ALL)
    halves = p.exp().to(torch.bfloat16), (log_q - log_p - ratio).to(torch.float16)
    low, high = (half.view(torch.int16).to(torch.int32) for half in halves)
    raw.view(torch.int32).copy_(high << 16 | low & 0xFFFF)
    return Differences(ratio.squeeze(1), value, own)


def _again(side: Side, log_p: Tensor) -> Tensor:
    """Raw logits from log p, without a soft cap."""
    z = log_p + (side.normalizer.peak + side.normalizer.log_sum).unsqueeze(1)
    return z / side.transform(torch.ones_like(z[:, :1]))


def _parted(words: Tensor, side: Side) -> tuple[Tensor, Tensor]:
    """Raw logits and differences: see `Differences`."""
    words = words.view(torch.int32)
    p = (words << 16).view(torch.float32)
    return _again(side, p.log()), (words >> 16).to(torch.int16).view(torch.float16).float()


def divergence_gradient_(
    raw: Tensor, raw_teacher: Tensor | Differences, pair: Pair, pivot: Tensor, weight: Tensor,
    extra: Tensor | None = None, others: Backward | None = None
) -> Tensor:
    student, teacher, kind, beta = pair
    out = _place(raw, extra, others)
    for rows in blocks(raw):
        if isinstance(raw_teacher, Differences):
            own = (raw_teacher.own or student).rows(rows)
            tile, difference = _parted(raw[rows], own)
            z, log_p = _log_p(student.rows(rows), tile, ALL)
            log_q = log_p + difference + raw_teacher.ratio[rows].unsqueeze(1)
        else:
            tile, (z, log_p) = raw[rows], _log_p(student, raw, rows)
            _, log_q = _log_p(teacher, raw_teacher, rows)
        p = log_p.exp()
        if kind == "forward_kl":
            g = p.sub_(log_q.exp_())
        else:
            g = p.mul_(tilt(log_q, log_p, kind, beta).sub_(pivot[rows].unsqueeze(1)))
        w = weight[rows].unsqueeze(1)
        g = torch.where(w == 0, 0, g * w)  # such rows may hold anything
        g = student.transform.rows(rows).pull_back_(g, z)
        _put(out, tile, rows, g, extra, others)
    return _narrow(out, others)


def _place(raw: Tensor, extra: Tensor | None, others: Backward | None) -> Tensor:
    if others is not None:
        return raw
    return torch.empty_like(raw, dtype=wide(raw.dtype)) if extra is None else extra


def _put(
    out: Tensor, tile: Tensor, rows: slice, g: Tensor, extra: Tensor | None, others: Backward | None
) -> None:
    """Write g with the other parts of the gradient of a tile of rows; g is overwritten."""
    if extra is not None:
        g += extra[rows]
    if others is not None:
        g += logit_gradient_(tile.to(g.dtype), others.rows(rows))
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
    raw: Tensor, outcomes: Outcomes, weight: Tensor, extra: Tensor | None = None,
    others: Backward | None = None
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
        _put(out, raw[rows], rows, g, extra, others)
    return _narrow(out, others)


def _with_stored(values: Tensor, columns: Tensor, stored: Tensor | float) -> Tensor:
    """`values` [n, v] with `stored` at the columns that lie in the tile."""
    n, v = values.shape
    wider = torch.cat([values, values.new_empty(n, 1)], 1)  # a column for all that lie elsewhere
    place = torch.where((columns >= 0) & (columns < v), columns, v)
    wider.scatter_(1, place, stored)  # type: ignore[arg-type]
    return wider[:, :v]
