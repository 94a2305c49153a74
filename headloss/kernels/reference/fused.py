"""Products that end in an act, acts on held softmax terms, and chosen columns of each token: their
logits, and their gradient over a tile's; in plain PyTorch.

n tokens, v columns, H hidden width, K chosen columns of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...objective import statistics as stats
from ...objective.statistics import FLOOR, Partials, merge_all
from ..interface import Backward, Forward, Held, Measured, Order, partials_of
from ..pair import Chosen
from ..transform import Transform
from .rows import scaled_rows
from .tile import blocks, logit_gradient_, own_gradient, partials, put_, wide, z_gradient

SMALLEST = 2.0**-90  # of |c_target|, for a multiple: what else is in the row weighs nothing


def can_fuse(x: Tensor, w: Tensor) -> bool:
    return True


def _product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    raw = x.to(wide(x.dtype)) @ w.to(wide(x.dtype)).t()
    return raw if bias is None else raw.add_(bias)


def fixed_product(
    a: Tensor, b: Tensor, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    found = a.to(wide(a.dtype)) @ b.to(wide(a.dtype))
    return found.to(dtype) if out is None else out.add_(found)


def product_partials(x: Tensor, w: Tensor, forward: Forward, held: Held | None = None) -> Partials:
    raw = _product(x, w, forward.transform.bias)
    found = partials(raw, forward)
    if held is not None:
        held.reference.copy_(found.peak)
        for rows in blocks(*raw.shape):
            z = forward.transform.rows(rows)(raw[rows])
            held.terms[rows] = z.sub_(found.peak[rows].unsqueeze(1)).exp_().to(held.terms.dtype)
    return found


def product_statistics(
    x: Tensor, w: Tensor, forward: Forward, vocabulary: int, held: Held | None = None,
    raw: Tensor | None = None,
) -> Measured:  # fmt: skip
    found = product_partials(x, w, forward, held)
    if raw is not None:
        raw.copy_(_product(x, w, forward.transform.bias))
    return Measured(*stats.finish(found, vocabulary, forward.needs))


def finish(slices: Tensor, needs: frozenset[str], vocabulary: int) -> Measured:
    found = merge_all(partials_of(slices.unbind(1), needs))
    return Measured(*stats.finish(found, vocabulary, needs))


def product_gradient(x: Tensor, w: Tensor, backward: Backward) -> Tensor:
    raw = _product(x, w, backward.transform.bias)
    return logit_gradient_(raw, backward._replace(dtype=None)).to(x.dtype)


def held_gradient_(held: Held, backward: Backward, *, order: Order | None = None) -> Tensor:
    held.check(backward)
    terms = held.terms
    for rows in blocks(*terms.shape):
        picked = rows if order is None else order.rows[rows]
        own = backward.rows(picked)
        (peak, log_sum), c = own.normalizer, own.coefficients.map(lambda t: t.unsqueeze(1))
        e = terms[picked].to(peak.dtype)
        log_p = e.log().sub_(((peak - held.reference[picked]) + log_sum).unsqueeze(1))
        log_p.masked_fill_(e <= 0, FLOOR)
        if own.logps is not None:  # a term of 0 no longer tells its z
            put_(log_p, own, own.logps.clamp_min(FLOOR))
        z = log_p + (peak + log_sum).unsqueeze(1)
        g = z_gradient(log_p, c, e)
        if own.logps is not None:
            put_(g, own, own_gradient(own.logps, own.coefficients.target, own.coefficients))
        terms[rows] = own.transform.pull_back_(g, z, is_z=True).to(terms.dtype)
    return terms


def held_multiple_(
    held: Held, backward: Backward, *, x: Tensor | None = None, order: Order | None = None,
    least: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    transform, (peak, log_sum), c = backward.transform, backward.normalizer, backward.coefficients
    held.check(backward, multiple=True)
    assert c.prob is not None and backward.logps is not None
    multiple = c.prob * ((held.reference - peak) - log_sum).exp()
    own = own_gradient(backward.logps, c.target, c)
    others = [t.abs() for t in (c.target, least) if t is not None]
    if others:
        floor = torch.stack(others).amax(0) * SMALLEST
        multiple = torch.where(multiple.abs() < floor, floor, multiple)
    own = torch.where(multiple == 0, 0, own / torch.where(multiple == 0, 1, multiple))
    put_(held.terms, backward, own)
    multiple = transform.pull_back_(multiple.unsqueeze(1), multiple.unsqueeze(1)).squeeze(1)
    if order is not None:
        held.terms.copy_(held.terms[order.rows])
        multiple = multiple[order.rows]
        x = None if x is None else x[order.rows]
    return multiple, None if x is None else scaled_rows(x, multiple)


def chosen_logits(x: Tensor, w: Tensor, columns: Tensor, transform: Transform) -> Tensor:
    (n, count), dtype = columns.shape, wide(x.dtype)
    out = x.new_empty(n, count, dtype=dtype)
    here = (columns >= 0) & (columns < len(w))
    for rows in blocks(n, count * w.shape[1]):
        places = torch.where(here[rows], columns[rows], 0)
        raw = torch.linalg.vecdot(w[places].to(dtype), x[rows].to(dtype).unsqueeze(1))
        if transform.bias is not None:
            raw += transform.bias[places]
        out[rows] = torch.where(here[rows], transform.rows(rows)(raw), 0)
    return out


def chosen_gradient_(
    tile: Tensor, chosen: Chosen, backward: Backward, *, multiples: Tensor | None = None,
    order: Order | None = None
) -> None:
    picked = slice(None) if order is None else order.rows[: int(order.count)]
    columns, log_p, slopes = (t[picked] for t in chosen)
    own, places = backward.rows(picked), slice(len(columns))
    c, (peak, log_sum) = own.coefficients.map(lambda t: t.unsqueeze(1)), own.normalizer
    here = (columns >= 0) & (columns < tile.shape[1])
    slopes = slopes.clone()
    if c.target is not None:
        slopes += torch.where(columns == (own.targets - own.first).unsqueeze(1), c.target, 0)
    g = own_gradient(log_p.clamp_max(0), slopes, c)
    g = own.transform.pull_back_(g, log_p + (peak + log_sum).unsqueeze(1), is_z=True)
    if multiples is not None:
        multiple = multiples[places].unsqueeze(1)
        g = torch.where(multiple == 0, 0, g / torch.where(multiple == 0, 1, multiple))
    # Distinct columns: none is written twice.
    row = torch.arange(len(columns), device=tile.device).unsqueeze(1).expand_as(columns)
    tile[row[here], columns[here]] = g[here].to(tile.dtype)
