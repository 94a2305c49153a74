"""Chosen columns of each token in plain PyTorch: their logits, and their gradient over a tile's.

n tokens, v columns, H hidden width, K chosen columns of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..interface import Backward, Order
from ..pair import Chosen
from ..transform import Transform
from .tile import BLOCK_ELEMENTS, own_gradient, wide


def chosen_logits(x: Tensor, w: Tensor, columns: Tensor, transform: Transform) -> Tensor:
    (n, count), dtype = columns.shape, wide(x.dtype)
    out = x.new_empty(n, count, dtype=dtype)
    here = (columns >= 0) & (columns < len(w))
    step = max(1, BLOCK_ELEMENTS // max(1, count * w.shape[1]))
    for start in range(0, n, step):
        rows = slice(start, start + step)
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
