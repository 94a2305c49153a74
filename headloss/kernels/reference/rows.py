"""Rows that are ordered, scaled, or walked along where they lie, in plain PyTorch.

n rows, v columns of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...objective.statistics import Coefficients, Partials, Slope, finish
from ..interface import Backward, Forward, Order, Rows, Scaling, Walk
from .tile import logit_gradient_, partials, wide, widened


def dense_order(keep: Tensor, most: int) -> Order:
    n, kept = len(keep), keep.sum()
    place = torch.arange(n, device=keep.device)
    some = kept <= most
    gaps = torch.where(some & ~keep & (place < kept), place, n).sort().values
    movers = torch.where(some & keep & (place >= kept), place, n).sort().values
    rows = torch.arange(n + 1, device=keep.device).scatter_(0, gaps, movers)[:n]
    return Order(rows, torch.where(some, kept, n).reshape(1))


def scaled(values: Sequence[Scaling], factor: Tensor | None) -> list[Tensor]:
    found = []
    for value, dtype, multiplied, rows in values:
        if rows is not None:
            scaled_rows(value, rows, out=value)
        if factor is not None and multiplied:
            # A one-element vector takes part in type promotion, where a 0-dim tensor would not: a
            # 16-bit value is multiplied in float32.
            number = factor.reshape(1).to(wide(value.dtype))
            out = value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)
            value = torch.mul(value, number, out=out)
        found.append(value if value.dtype == dtype else value.to(dtype))
    return found


def scaled_rows(
    x: Tensor, scale: Tensor, *, out: Tensor | None = None, places: Tensor | None = None
) -> Tensor:
    n = len(scale)
    out = x.new_empty(n, x.shape[1]) if out is None else out
    if places is None:
        torch.mul(x[:n], scale.unsqueeze(1), out=out[:n])
    else:
        out[places] = (x[:n] * scale.unsqueeze(1)).to(out.dtype)
    return out


def _places(rows: Rows, picked: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
    """The whole tensor as a vector, and where in it the elements of some rows are."""
    x = rows.tensor
    extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    columns = torch.arange(x.shape[-1], device=x.device)
    return x.as_strided((extent,), (1,)), rows.offsets[picked].unsqueeze(1) + columns


def given_rows(walk: Walk) -> Partials | None:
    n, v = len(walk.targets), walk.logits.tensor.shape[-1]
    every = torch.arange(n, device=walk.targets.device)
    live = every if walk.live is None else every[walk.live]
    memory, places = _places(walk.logits, live) if n else (walk.logits.tensor, every)
    raw = widened(memory[places].reshape(len(live), v))
    targets, transform = walk.targets[live], walk.transform.rows(live)
    c = (walk.coefficients or Coefficients()).map(lambda t: t[live])
    here = partials(raw, Forward(targets, walk.first, transform, walk.needs or frozenset()))
    stats, normalizer = finish(here, v, frozenset({"logp"}))
    found = None
    if walk.needs is not None:
        if walk.out is not None:
            c = _completed(c, here, None if walk.slopes is None else walk.slopes[:, :, live])
        named = here.tensors()
        found = Partials(**{k: t.new_zeros(n).index_copy_(0, live, t) for k, t in named.items()})
    if walk.out is not None and n:
        backward = Backward(targets, walk.first, transform, normalizer, c, stats.logp)
        memory, places = _places(walk.out)
        memory[places] = 0
        memory[places[live]] = logit_gradient_(raw, backward).to(memory.dtype)
    return found


def _completed(c: Coefficients, found: Partials, slopes: Tensor | None) -> Coefficients:
    """With the entropy's own part and the slopes in closed form."""
    log_sum = found.rest.log1p()
    target, prob = c.target, torch.zeros_like(log_sum) if c.prob is None else c.prob
    if c.entropy is not None:
        assert found.spread is not None
        prob = prob + c.entropy * (log_sum - found.spread / (1 + found.rest))
    if slopes is not None:
        logp = (found.target - found.peak) - log_sum
        slope = torch.zeros_like(logp)
        for row in slopes:
            slope += Slope(*row).at(logp)  # type: ignore[arg-type]
        prob = prob - slope
        target = slope if target is None else target + slope
    return Coefficients(target=target, prob=prob, entropy=c.entropy, uniform=c.uniform)


def scale_rows_(rows: Rows, factor: Tensor) -> None:
    if len(rows.offsets):
        memory, places = _places(rows)
        x = memory[places]
        memory[places] = (widened(x) * factor.to(wide(x.dtype))).to(x.dtype)
