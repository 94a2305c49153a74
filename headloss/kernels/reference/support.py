"""Both acts on pairs of a token and a column, and their three products, in plain PyTorch.

n tokens, P pairs, v columns of the window, H hidden width. A block of tokens is padded to the most
pairs that one of them has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...objective.statistics import Partials
from ..interface import Backward, ByColumn, Forward, Support
from ..transform import Transform
from .tile import BLOCK_ELEMENTS, logit_gradient_, partials, wide


class _Block(NamedTuple):
    rows: slice
    pairs: Tensor  # [b, K]
    ids: Tensor  # [b, K]
    columns: Tensor  # [b, K] of the window, 0 for what is not there
    there: Tensor  # [b, K] bool


def _blocks(support: Support, elements: int = 1) -> Iterator[_Block]:
    """Blocks of tokens of `elements` numbers a pair."""
    ids, offsets, first, size = support
    n = len(offsets) - 1
    if not len(ids) or not n:
        return
    counts = offsets.diff()
    most = max(1, int(counts.max()))
    step = max(1, BLOCK_ELEMENTS // (most * elements))
    slots = torch.arange(most, device=ids.device)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        there = slots < counts[rows].unsqueeze(1)
        pairs = torch.where(there, offsets[rows].unsqueeze(1) + slots, 0)
        found = ids[pairs]
        columns = found - first
        there &= (columns >= 0) & (columns < size)
        yield _Block(rows, pairs, found, torch.where(there, columns, 0), there)


def _slots(block: _Block, targets: Tensor) -> Tensor:
    """[b] which of its pairs each token's target is; -1 where it is none of them."""
    hit = block.there & (block.ids == targets[block.rows].unsqueeze(1))
    return torch.where(hit.any(1), hit.int().argmax(1), -1)


def support_logits(x: Tensor, w: Tensor, support: Support, onto: Tensor | None = None) -> Tensor:
    dtype = wide(torch.promote_types(x.dtype, w.dtype)) if onto is None else onto.dtype
    out = x.new_zeros(len(support.ids), dtype=dtype) if onto is None else onto
    for block in _blocks(support, x.shape[1]):
        product = torch.bmm(w[block.columns].to(dtype), x[block.rows].to(dtype).unsqueeze(2))
        out[block.pairs[block.there]] += product.squeeze(2)[block.there]
    return out


def support_partials(raw: Tensor, support: Support, forward: Forward) -> Partials:
    targets, _, transform, needs = forward
    assert targets is not None
    n = len(targets)
    names = ["peak", "rest", "target"]
    names += ["spread"] * ("entropy" in needs) + ["total"] * ("mean_logit" in needs)
    nothing = {"peak": -torch.inf, "rest": -1.0, "target": -torch.inf}
    found = {name: raw.new_full((n,), nothing.get(name, 0.0)) for name in names}
    for block in _blocks(support):
        z = transform.rows(block.rows)(raw[block.pairs])
        if "mean_logit" in needs:
            found["total"][block.rows] = torch.where(block.there, z, 0).sum(1)
        z = z.masked_fill(~block.there, -torch.inf)
        own = Forward(_slots(block, targets), 0, Transform(), needs - {"mean_logit"})
        of_block = partials(z, own)
        for name in names:
            if name != "total":
                found[name][block.rows] = getattr(of_block, name)
    return Partials(**found)


def support_gradient(raw: Tensor, support: Support, backward: Backward) -> Tensor:
    out = torch.zeros_like(raw)
    least = math.copysign(math.inf, -backward.transform.scale)  # no logit of a token is below
    for block in _blocks(support):
        own = backward.rows(block.rows)._replace(targets=_slots(block, backward.targets), first=0)
        g = logit_gradient_(torch.where(block.there, raw[block.pairs], least), own)
        out[block.pairs[block.there]] = g[block.there]
    return out


def support_input_gradient(
    values: Tensor, w: Tensor, support: Support, out: Tensor, add: bool = False
) -> None:
    if not add:
        out.zero_()
    for block in _blocks(support, w.shape[1]):
        g = torch.where(block.there, values[block.pairs], 0)
        part = torch.bmm(g.unsqueeze(1), w[block.columns].to(g.dtype)).squeeze(1)
        out[block.rows] = (out[block.rows] + part if add else part).to(out.dtype)


def support_weight_gradient(
    values: Tensor, x: Tensor, pairs: ByColumn, out: Tensor, add: bool = False
) -> None:
    if not add:
        out.zero_()
    starts, (v, h) = pairs.starts.tolist(), out.shape
    step = max(1, BLOCK_ELEMENTS // max(1, h))
    for begin in range(0, v, step):
        end = min(begin + step, v)
        total = out.new_zeros(end - begin, h, dtype=values.dtype)
        for at in range(starts[begin], starts[end], step):
            some = slice(at, min(at + step, starts[end]))
            g = values[pairs.order[some]]
            place = torch.arange(some.start, some.stop, device=g.device)
            column = torch.searchsorted(pairs.starts, place, right=True) - 1 - begin
            left = g.new_zeros(len(total), len(g))
            left[column, place - at] = g
            rows = x[pairs.tokens[some]].to(g.dtype)
            total.addmm_(left, rows.masked_fill((g == 0).unsqueeze(1), 0))
        if starts[end] > starts[begin]:
            out[begin:end] = (out[begin:end] + total if add else total).to(out.dtype)
