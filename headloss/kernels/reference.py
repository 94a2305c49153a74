"""The two acts over a tile of logits, in plain PyTorch on any device: the oracle of every kernel.

n tokens, v columns of the vocabulary starting at `first`. `raw` [n, v] holds the logits as the
matrix product left them, in float32 or float64; the transform (scale, soft cap, temperature) is
applied inside the act. A target is a column of the whole vocabulary; it counts where it falls into
the tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..stats import FLOOR, Coefficients, Normalizer, Partials, merge
from .transform import Transform

BLOCK_ELEMENTS = 1 << 20  # working memory of one step, so that temporaries stay small


def _blocks(tile: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK_ELEMENTS // max(1, tile.shape[1]))
    for start in range(0, tile.shape[0], rows):
        yield slice(start, start + rows)


def _inside(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Which targets fall into the tile, and the column of each (0 where it does not)."""
    column = targets - first
    inside = (column >= 0) & (column < width)
    return inside, torch.where(inside, column, 0).unsqueeze(1)


def partials(
    raw: Tensor,  # [n, v]
    targets: Tensor,  # [n]
    first: int,
    transform: Transform,
    needs: frozenset[str],
    onto: Partials | None = None,
) -> Partials:
    """Partial statistics of a tile, only those in `needs`; with `onto`, merged with those of
    earlier tiles."""
    n, v = raw.shape
    found = [raw.new_empty(n) for _ in range(5)]
    peak, rest, target, spread, total = found
    for rows in _blocks(raw):
        z = transform.rows(rows)(raw[rows])
        inside, column = _inside(targets[rows], first, v)
        target[rows] = torch.where(inside, z.gather(1, column).squeeze(1), -math.inf)
        top, likeliest = z.max(1)
        peak[rows] = top
        if "mean_logit" in needs:
            total[rows] = z.sum(1)
        # Where the whole tile is -inf there is no mass, and no largest term to leave out.
        empty = top == -math.inf
        shifted = z.sub_(torch.where(empty, 0, top).unsqueeze(1)).clamp_min_(FLOOR)
        e = shifted.exp().scatter_(1, likeliest.unsqueeze(1), 0.0)
        rest[rows] = e.sum(1) - empty.to(e.dtype)
        if "entropy" in needs:
            spread[rows] = e.mul_(shifted).sum(1)
    found_here = Partials(
        peak=peak,
        rest=rest,
        target=target,
        spread=spread if "entropy" in needs else None,
        total=total if "mean_logit" in needs else None,
    )
    return found_here if onto is None else merge(onto, found_here)


def logit_gradient_(
    raw: Tensor,  # [n, v], overwritten
    targets: Tensor,  # [n]
    first: int,
    transform: Transform,
    normalizer: Normalizer,  # [n]
    coefficients: Coefficients,  # [n]
    dtype: torch.dtype | None = None,
) -> Tensor:
    """dL/draw of a tile, in the tile's own memory (unless it is to be of another dtype)."""
    _, v = raw.shape
    for rows in _blocks(raw):
        c = coefficients.map(lambda t, rows=rows: t[rows].unsqueeze(1))
        part = transform.rows(rows)
        z = part(raw[rows])
        log_p = z - normalizer.peak[rows].unsqueeze(1)
        log_p.sub_(normalizer.log_sum[rows].unsqueeze(1)).clamp_min_(FLOOR)
        g = raw[rows]
        torch.exp(log_p, out=g)
        if c.entropy is not None:
            assert c.prob is not None
            g.mul_(log_p.mul_(c.entropy).add_(c.prob))
        elif c.prob is not None:
            g.mul_(c.prob)
        else:
            g.zero_()
        if c.uniform is not None:
            g.add_(c.uniform)
        if c.target is not None:
            inside, column = _inside(targets[rows], first, v)
            g.scatter_add_(1, column, torch.where(inside.unsqueeze(1), c.target, 0))
        part.pull_back_(g, z)
    return raw if dtype is None else raw.to(dtype)


def scaled(value: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """value * factor [], multiplied in float32 or wider and rounded to `dtype` once; where the
    dtypes are the same, in place."""
    if factor is None:
        return value.to(dtype)
    # A one-element vector takes part in type promotion, where a 0-dim tensor would not: a 16-bit
    # value is multiplied in float32.
    factor = factor.reshape(1).to(torch.promote_types(value.dtype, torch.float32))
    return torch.mul(
        value,
        factor,
        out=value if value.dtype == dtype else value.new_empty(value.shape, dtype=dtype),
    )


def scaled_rows(x: Tensor, scale: Tensor, *, out: Tensor) -> Tensor:
    """x [n, H] * scale [n] of each row, multiplied in float32 or wider and rounded once."""
    return torch.mul(x, scale.unsqueeze(1), out=out)
