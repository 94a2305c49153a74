"""From labels to targets: the shift by one, and fields that lie beside labels.

Shapes: [..] is that of the labels, [.., K] has K values for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import check_dense

ALIGN = ("labels", "targets")
Shift = Callable[..., Tensor]  # of a value [..] or [.., K], with `fill` where nothing follows


def goes_on(ids: Tensor, shape: torch.Size) -> Tensor:
    """True where the next position is of the same segment, bool of a shape; `ids` of segments."""
    ids = ids.reshape(-1)
    inside = torch.zeros_like(ids, dtype=torch.bool)
    inside[:-1] = (ids[1:] == ids[:-1]) & (ids[1:] >= 0)
    return inside.reshape(shape)


def next_in_row(value: Tensor, dim: int, fill: float = 0) -> Tensor:
    """The value [.., L] or [.., L, K] of the next position along L, a dimension; last `fill`."""
    if not value.numel():
        return value
    after = (0, 0) * (value.dim() - 1 - dim)
    return pad(value.narrow(dim, 1, value.shape[dim] - 1), (*after, 0, 1), value=fill)


def next_inside(value: Tensor, inside: Tensor, fill: float = 0) -> Tensor:
    """The value [..] or [.., K] of the next position, where that is `inside` [..]; else `fill`."""
    outside = inside.to(value.device).logical_not().flatten()
    moved = value.flatten(0, inside.dim() - 1).roll(-1, 0)
    rows = outside.reshape(-1, *[1] * (moved.dim() - 1))
    return moved.masked_fill(rows, fill).reshape(value.shape)


def is_beside(value: object, shape: torch.Size) -> bool:
    """Tell whether a field has a value, or a row, for each position of labels of a shape."""
    return isinstance(value, Tensor) and value.shape[: len(shape)] == shape


def aligned(
    fields: Mapping[str, Any], align: object, shape: torch.Size, shift: Shift
) -> dict[str, Any]:
    """Fields beside the targets, of fields beside labels of a shape or targets: see
    `Batch.from_labels`. `shift` takes a field to the position before.

    Raises:
        ValueError: a field of the labels' shape of which `align` does not say how it lies; an
            `align` of other words or names; pairs of ids and offsets, which cannot be shifted.
    """
    ways = align if isinstance(align, Mapping) else dict.fromkeys(fields, align)
    for way in (*ways.values(), *([] if ways is align else [align])):
        if way is not None and way not in ALIGN:
            raise ValueError(f'align: got {way!r}, want "labels", "targets" or a mapping to them')
    if absent := ways.keys() - fields:
        raise ValueError(f"align: got {sorted(absent)}, want names of fields: {sorted(fields)}")
    result = dict(fields)
    for name, value in fields.items():
        pair = isinstance(value, tuple)  # of ids and offsets, for each position
        if not (pair or is_beside(value, shape)) or name == "prompts":
            continue
        if pair and ways.get(name) == "labels":
            raise ValueError(
                f'{name}: got a pair with align="labels", want [.., K] ids, -1 if empty'
            )
        if ways.get(name) is None:
            raise ValueError(
                f"{name}: got {'a pair' if pair else tuple(value.shape)} beside labels, want "
                f'align="labels" ({name}[t] belongs to labels[t] and is shifted with it) or '
                f'align="targets" ({name}[t] belongs to labels[t + 1], as out.logps[t] does)'
            )
        if isinstance(value, Tensor) and ways[name] == "labels":
            check_dense(name, value)
            result[name] = shift(value)
    return result
