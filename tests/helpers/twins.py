"""The Triton kernels' operations in plain PyTorch (*twins*), for comparison.

An operation that the reference backend has is taken from the reference backend; an operation that
exists only as a Triton kernel is written here in PyTorch. Tests compare each kernel with its
PyTorch twin, and run whole calls on a CPU with the twins in place of kernels.

n tokens or rows, v columns, H hidden width, K chosen columns of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headloss.kernels.interface import (
    Backward,
    ExpTile,
    Forward,
    LogitRows,
    Measured,
    Order,
    ShiftedSums,
    Walk,
)
from headloss.kernels.pair import Chosen
from headloss.kernels.reference import (  # noqa: F401
    best,
    divergence,
    finish,
    logit_gradient_,
    part_gradient_,
    partials,
    scaled,
    scaled_rows,
    support_gradient,
    support_logits,
    support_partials,
    support_sums,
)
from headloss.kernels.reference.tile import (
    blocks,
    grad_z,
    gradient_from_logp,
    put_,
    wide,
    widened,
)
from headloss.kernels.transform import Transform
from headloss.statistics import softmax as stats
from headloss.statistics.softmax import FLOOR, Slope, SoftmaxCoefficients, SoftmaxState

NOTHING: frozenset[str] = frozenset()
# A gradient is divided by the coefficient `c_target` only if |c_target| is at least this number,
# since rounding errors matter below it.
SMALLEST = 2.0**-90


def is_multiple(backward: Backward) -> bool:
    """Return True if a token's logit gradient is one factor times exp(z) in all columns except the
    target's."""
    c, cap = backward.coefficients, backward.transform.softcap
    return c.prob is not None and c.entropy is None and c.uniform is None and cap is None


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


def product_partials(
    x: Tensor, w: Tensor, forward: Forward, exp_tile: ExpTile | None = None
) -> SoftmaxState:
    raw = _product(x, w, forward.transform.bias)
    found = partials(raw, forward)
    if exp_tile is not None:
        exp_tile.shift.copy_(found.max_logit)
        for rows in blocks(*raw.shape):
            z = forward.transform.rows(rows)(raw[rows])
            e = z.sub_(found.max_logit[rows].unsqueeze(1)).exp_()
            exp_tile.exp_logits[rows] = e.to(exp_tile.exp_logits.dtype)
    return found


def product_statistics(
    x: Tensor, w: Tensor, forward: Forward, vocabulary: int, exp_tile: ExpTile | None = None
) -> Measured:
    found = product_partials(x, w, forward, exp_tile)
    return Measured(*stats.finish(found, vocabulary, forward.needs))


def product_gradient(x: Tensor, w: Tensor, backward: Backward) -> Tensor:
    raw = _product(x, w, backward.transform.bias)
    return logit_gradient_(raw, backward._replace(dtype=None)).to(x.dtype)


def can_sweep(w: Tensor) -> bool:
    return True


def narrow_partials(
    x: Tensor, w: Tensor, forward: Forward, sums: bool = False
) -> tuple[SoftmaxState, ShiftedSums | None]:
    raw = _product(x, w, forward.transform.bias)
    found = partials(raw, forward)
    if not sums:
        return found, None
    shift = found.max_logit.clone()
    e = (forward.transform(raw) - shift.unsqueeze(1)).exp()
    slope = forward.transform.vjp_(torch.ones_like(e), raw)
    column = forward.targets - forward.first
    column = torch.where((column >= 0) & (column < len(w)), column, raw.argmax(1))
    terms = (e * slope).scatter_(1, column.unsqueeze(1), 0)
    return found, ShiftedSums(terms @ w.to(terms.dtype), shift, column, shift.isnan())


def narrow_hidden(
    x: Tensor, w: Tensor, backward: Backward, sums: ShiftedSums | None = None
) -> Tensor:
    if sums is None:
        return product_gradient(x, w, backward).to(wide(x.dtype)) @ w.to(wide(x.dtype))
    c, transform, (max_logit, log_sum) = backward[4], backward.transform, backward.normalizer
    others = (c.prob * (sums.shift - max_logit - log_sum).exp()).unsqueeze(1)
    at_target = gradient_from_logp(backward.logps, c.target, c).unsqueeze(1)
    of_target = (sums.column == backward.targets - backward.first).unsqueeze(1)
    z = (backward.logps + max_logit + log_sum).unsqueeze(1)
    at_target = transform.vjp_(at_target, z, is_z=True)
    g = transform.vjp_(others.clone(), sums.shift.unsqueeze(1), is_z=True)
    g = torch.where(of_target, at_target, g)
    return sums.rows * others + g * w[sums.column].to(g.dtype)


def narrow_weight_(
    x: Tensor,
    w: Tensor,
    backward: Backward,
    out: Tensor | None,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    g = product_gradient(x, w, backward).to(wide(x.dtype))
    if out is not None:
        total = g.t() @ x.to(g.dtype)
        out.copy_(total if factor is None else total * factor)
    if bias is not None:
        bias[: len(w)] = g.sum(0)


def exp_gradient_(exp_tile: ExpTile, backward: Backward, *, order: Order | None = None) -> Tensor:
    terms = exp_tile.exp_logits
    for rows in blocks(*terms.shape):
        picked = rows if order is None else order.rows[rows]
        own = backward.rows(picked)
        (max_logit, log_sum), c = own.normalizer, own.coefficients.map(lambda t: t.unsqueeze(1))
        e = terms[picked].to(max_logit.dtype)
        log_p = e.log().sub_(((max_logit - exp_tile.shift[picked]) + log_sum).unsqueeze(1))
        log_p.masked_fill_(e <= 0, FLOOR)
        # exp(z) has underflowed to 0, so its logarithm is taken from the stored log-probs
        if own.logps is not None:
            put_(log_p, own, own.logps.clamp_min(FLOOR))
        z = log_p + (max_logit + log_sum).unsqueeze(1)
        g = grad_z(log_p, c, e)
        if own.logps is not None:
            put_(g, own, gradient_from_logp(own.logps, own.coefficients.target, own.coefficients))
        terms[rows] = own.transform.vjp_(g, z, is_z=True).to(terms.dtype)
    return terms


def exp_multiple_(
    exp_tile: ExpTile,
    backward: Backward,
    *,
    x: Tensor | None = None,
    order: Order | None = None,
    least: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    transform, c = backward.transform, backward.coefficients
    max_logit, log_sum = backward.normalizer
    assert is_multiple(backward) and c.prob is not None and backward.logps is not None
    multiple = c.prob * ((exp_tile.shift - max_logit) - log_sum).exp()
    own = gradient_from_logp(backward.logps, c.target, c)
    others = [t.abs() for t in (c.target, least) if t is not None]
    if others:
        floor = torch.stack(others).amax(0) * SMALLEST
        multiple = torch.where(multiple.abs() < floor, floor, multiple)
    own = torch.where(multiple == 0, 0, own / torch.where(multiple == 0, 1, multiple))
    put_(exp_tile.exp_logits, backward, own)
    multiple = transform.vjp_(multiple.unsqueeze(1), multiple.unsqueeze(1)).squeeze(1)
    if order is not None:
        exp_tile.exp_logits.copy_(exp_tile.exp_logits[order.rows])
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
    tile: Tensor,
    chosen: Chosen,
    backward: Backward,
    *,
    multiples: Tensor | None = None,
    order: Order | None = None,
) -> None:
    picked = slice(None) if order is None else order.rows[: int(order.count)]
    columns, log_p, slopes = (t[picked] for t in chosen)
    own, places = backward.rows(picked), slice(len(columns))
    c, (max_logit, log_sum) = own.coefficients.map(lambda t: t.unsqueeze(1)), own.normalizer
    here = (columns >= 0) & (columns < tile.shape[1])
    slopes = slopes.clone()
    if c.target is not None:
        slopes += torch.where(columns == (own.targets - own.first).unsqueeze(1), c.target, 0)
    g = gradient_from_logp(log_p.clamp_max(0), slopes, c)
    g = own.transform.vjp_(g, log_p + (max_logit + log_sum).unsqueeze(1), is_z=True)
    if multiples is not None:
        multiple = multiples[places].unsqueeze(1)
        g = torch.where(multiple == 0, 0, g / torch.where(multiple == 0, 1, multiple))
    # Columns are distinct, so no element is written twice.
    row = torch.arange(len(columns), device=tile.device).unsqueeze(1).expand_as(columns)
    tile[row[here], columns[here]] = g[here].to(tile.dtype)


def dense_order(keep: Tensor, most: int) -> Order:
    n, kept = len(keep), keep.sum()
    place = torch.arange(n, device=keep.device)
    some = kept <= most
    gaps = torch.where(some & ~keep & (place < kept), place, n).sort().values
    movers = torch.where(some & keep & (place >= kept), place, n).sort().values
    rows = torch.arange(n + 1, device=keep.device).scatter_(0, gaps, movers)[:n]
    return Order(rows, torch.where(some, kept, n).reshape(1))


def _places(rows: LogitRows, picked: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return a flat view of the tensor's memory, and the [n, v] indices of the picked rows'
    elements in it."""
    x = rows.tensor
    extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    columns = torch.arange(x.shape[-1], device=x.device)
    return x.as_strided((extent,), (1,)), rows.offsets[picked].unsqueeze(1) + columns


def given_rows(walk: Walk) -> SoftmaxState | None:
    n, v = len(walk.targets), walk.logits.tensor.shape[-1]
    every = torch.arange(n, device=walk.targets.device)
    live = every if walk.live is None else every[walk.live]
    memory, places = _places(walk.logits, live) if n else (walk.logits.tensor, every)
    raw = widened(memory[places].reshape(len(live), v))
    targets, transform = walk.targets[live], walk.transform.rows(live)
    c = (walk.coefficients or SoftmaxCoefficients()).map(lambda t: t[live])
    here = partials(raw, Forward(targets, walk.first, transform, walk.needs or frozenset()))
    logps, normalizer = stats.finish(here, v, frozenset({"logp"}))
    found = None
    if walk.needs is not None:
        if walk.out is not None:
            c = _completed(c, here, None if walk.slopes is None else walk.slopes[:, :, live])
        named = here.tensors()
        full = {k: t.new_zeros(n).index_copy_(0, live, t) for k, t in named.items()}
        found = SoftmaxState(**full)
    if walk.out is not None and n:
        backward = Backward(targets, walk.first, transform, normalizer, c, logps.logp)
        memory, places = _places(walk.out)
        memory[places] = 0
        memory[places[live]] = logit_gradient_(raw, backward).to(memory.dtype)
    return found


def _completed(
    c: SoftmaxCoefficients, found: SoftmaxState, slopes: Tensor | None
) -> SoftmaxCoefficients:
    """Add to the gradient coefficients `c` the contributions of the entropy and of terms whose
    derivative has a closed form (`slopes`), and return the sum."""
    log_sum = found.sumexp_m1.log1p()
    target, prob = c.target, torch.zeros_like(log_sum) if c.prob is None else c.prob
    if c.entropy is not None:
        assert found.entropy_sum is not None
        prob = prob + c.entropy * (log_sum - found.entropy_sum / (1 + found.sumexp_m1))
    if slopes is not None:
        logp = (found.target - found.max_logit) - log_sum
        slope = torch.zeros_like(logp)
        for row in slopes:
            slope += Slope(*row).at(logp)  # type: ignore[arg-type]
        prob = prob - slope
        target = slope if target is None else target + slope
    return SoftmaxCoefficients(target=target, prob=prob, entropy=c.entropy, uniform=c.uniform)


def scale_rows_(rows: LogitRows, factor: Tensor) -> None:
    if len(rows.offsets):
        memory, places = _places(rows)
        x = memory[places]
        memory[places] = (widened(x) * factor.to(wide(x.dtype))).to(x.dtype)
