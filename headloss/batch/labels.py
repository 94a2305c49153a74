"""Shift labels by one position to give targets, and shift the fields that belong to the labels.

Shapes: [..] is the shape of the labels, [.., K] has K values for each label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import check_dense

ALIGN = ("labels", "targets")
# Shift a value [..] or [.., K] by one position, with `fill` at the end.
Shift = Callable[..., Tensor]


def goes_on(ids: Tensor, shape: torch.Size) -> Tensor:
    """Return a bool tensor of the given `shape`: True where the next position has the same segment
    id in `ids`."""
    ids = ids.reshape(-1)
    inside = torch.zeros_like(ids, dtype=torch.bool)
    inside[:-1] = (ids[1:] == ids[:-1]) & (ids[1:] >= 0)
    return inside.reshape(shape)


def next_in_row(value: Tensor, dim: int, fill: float = 0) -> Tensor:
    """Return the value [.., L] or [.., L, K] of the next position along the dimension `dim` of
    length L; `fill` at the last position."""
    if not value.numel():
        return value
    after = (0, 0) * (value.dim() - 1 - dim)
    return pad(value.narrow(dim, 1, value.shape[dim] - 1), (*after, 0, 1), value=fill)


def next_inside(value: Tensor, inside: Tensor, fill: float = 0) -> Tensor:
    """Return the value [..] or [.., K] of the next position where the mask `inside` [..] is True;
    elsewhere return `fill`."""
    moved = value.flatten(0, inside.dim() - 1).roll(-1, 0)
    outside = inside.to(value.device).logical_not().view(-1, *[1] * (moved.dim() - 1))
    return moved.masked_fill(outside, fill).reshape(value.shape)


def is_beside(value: object, shape: torch.Size) -> bool:
    """True for a tensor whose leading dimensions are the labels' `shape` (a value per label)."""
    return isinstance(value, Tensor) and value.shape[: len(shape)] == shape


def aligned(
    fields: Mapping[str, Any], align: object, shape: torch.Size, shift: Shift
) -> dict[str, Any]:
    """Return fields aligned with the targets, from fields aligned with labels or targets: see
    `Batch.from_labels`. `shift` moves each value one position to the left.

    Raises:
        ValueError: `align` names no alignment for a field of the labels' shape; `align` holds an
            unknown alignment or field name; a field given as a pair (ids, offsets) is aligned with
            the labels, although such a pair cannot be shifted.
    """
    ways = align if isinstance(align, Mapping) else dict.fromkeys(fields, align)
    for way in (*ways.values(), *([] if ways is align else [align])):
        if way is not None and way not in ALIGN:
            raise ValueError(f'align: got {way!r}, want "labels", "targets" or a mapping to them')
    if absent := ways.keys() - fields:
        raise ValueError(f"align: got {sorted(absent)}, want names of fields: {sorted(fields)}")
    result = dict(fields)
    for name, value in fields.items():
        pair = isinstance(value, tuple)  # True for `support_ids` given as (ids, offsets).
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
