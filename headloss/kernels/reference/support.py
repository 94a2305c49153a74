"""Softmax over a set of allowed columns per token, in plain PyTorch: logits, statistics, gradient.

n tokens, P pairs (token, column), H hidden width, K largest number of columns of a token. Tokens
are processed in blocks; within a block, each token's list of columns is padded to K columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ...statistics.softmax import SoftmaxState
from ..interface import Backward, Forward, Support, partials_of
from ..transform import Transform
from .tile import blocks, logit_gradient_, partials, wide

WIDTH = 256  # Number of columns of a matrix that are converted to a wider dtype at a time.


def _blocks(support: Support, elements: int = 1) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield, for each block of b tokens: the slice of the tokens, the indices [b, K] of the tokens'
    pairs (token, column), each column minus `first` (0 outside of the window [first, first +
    size)), and the mask of the pairs whose column lies in the window. The number b of tokens in a
    block is limited, so that a temporary tensor with `elements` numbers for each pair (token,
    column) stays small."""
    ids, offsets, first, size = support
    counts = offsets.diff()
    most = int(counts.max()) if len(counts) else 0
    slots = torch.arange(most, device=ids.device)
    for rows in blocks(len(counts), most * elements) if most else ():
        present = slots < counts[rows].unsqueeze(1)
        pairs = torch.where(present, offsets[:-1][rows].unsqueeze(1) + slots, 0)
        columns = ids[pairs] - first
        present &= (columns >= 0) & (columns < size)
        yield rows, pairs, torch.where(present, columns, 0), present


def _slots(columns: Tensor, present: Tensor, targets: Tensor) -> Tensor:
    """Return the index [b] of each token's target among the token's K columns; -1 if absent."""
    hit = present & (columns == targets.unsqueeze(1))
    return torch.where(hit.any(1), hit.int().argmax(1), -1)


def support_logits(x: Tensor, w: Tensor, support: Support, onto: Tensor | None = None) -> Tensor:
    dtype = wide(torch.promote_types(x.dtype, w.dtype)) if onto is None else onto.dtype
    out = x.new_zeros(len(support.ids), dtype=dtype) if onto is None else onto
    for rows, pairs, columns, present in _blocks(support, x.shape[1]):
        product = torch.bmm(w[columns].to(dtype), x[rows].to(dtype).unsqueeze(2))
        out[pairs[present]] += product.squeeze(2)[present]
    return out


def support_partials(raw: Tensor, support: Support, forward: Forward) -> SoftmaxState:
    targets, _, transform, needs = forward
    assert targets is not None
    nothing = (-math.inf, -1.0, -math.inf, 0.0, 0.0)
    state = partials_of([raw.new_full((len(targets),), value) for value in nothing], needs)
    for rows, pairs, columns, present in _blocks(support):
        z = transform.rows(rows)(raw[pairs])
        slots = _slots(columns, present, targets[rows] - support.first)
        of_slots = Forward(slots, 0, Transform(), needs - {"mean_logit"})
        of_block = partials(z.masked_fill(~present, -math.inf), of_slots).tensors()
        of_block["logit_sum"] = torch.where(present, z, 0).sum(1)
        for name, values in state.tensors().items():
            values[rows] = of_block[name]
    return state


def support_gradient(raw: Tensor, support: Support, backward: Backward) -> Tensor:
    out = torch.zeros_like(raw)
    # A raw logit of `least` gives z = -inf, so that padding has a probability of 0.
    least = math.copysign(math.inf, -backward.transform.scale)
    for rows, pairs, columns, present in _blocks(support):
        slots = _slots(columns, present, backward.targets[rows] - support.first)
        of_slots = backward.rows(rows)._replace(targets=slots, first=0, all_columns=False)
        g = logit_gradient_(torch.where(present, raw[pairs], least), of_slots)
        out[pairs[present]] = g[present]
    return out


def support_sums(
    values: Tensor,
    rows: Tensor,
    support: Support,
    out: Tensor,
    add: bool = False,
    uneven: bool = False,
) -> None:
    ids, offsets, first, size = support
    at = torch.arange(len(values), device=values.device)
    read = (values != 0) & (ids >= first) & (ids < first + size)
    pairs = (read & (at >= offsets[0]) & (at < offsets[-1])).nonzero().squeeze(1)
    bags = torch.searchsorted(pairs, offsets)
    columns = ids[pairs] - first
    factors = values[pairs]
    for out_part, rows_part in zip(out.split(WIDTH, 1), rows.split(WIDTH, 1), strict=True):
        total = embedding_bag(
            columns,
            rows_part.to(values.dtype),
            bags,
            mode="sum",
            per_sample_weights=factors,
            include_last_offset=True,
        )
        out_part.copy_(out_part + total if add else total)
