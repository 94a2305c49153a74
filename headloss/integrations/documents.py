"""Documents of packed rows [B, L], as frameworks tell them: the segments of terms that ask for any.

Padding is no document. Where a mask tells it, it lies in the document before it. Where none does,
documents at the end of a row are padding if no token in them is scored and they are of one token,
or of one token id that is repeated. A row's first document is one in any case, as a row is of a
batch that is not packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import is_integers
from ..batch.batch import IGNORE
from ..batch.segments import Segments

ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
# What tells documents in a call of a model of Transformers, and what tells their padding.
TOLD_BY = (*ENDS, "seq_idx", "position_ids", "attention_mask", "input_ids")


def documents_of(call: Mapping[str, Any], targets: Tensor) -> Segments | None:
    """The documents of a call's tokens; None where nothing tells any, and each row is one.

    Args:
        call: arguments of the call by name; of `TOLD_BY` the first that is there tells documents.
            `cu_seq_lens_q` [S + 1] are cumulative lengths over all B x L tokens, where a repeated
            end is no document; `seq_idx` [B, L] changes where a document begins, and is negative
            at padding; `position_ids` do not go on there.
        targets: [B, L], shifted labels.

    Raises:
        ValueError, TypeError: what does not fit the tokens, by its name.
    """
    shape, device, tokens = targets.shape, targets.device, call.get("input_ids")
    for name in ENDS:
        if (ends := call.get(name)) is not None:
            starts, end = _starts_of_ends(name, ends, shape)
            documents = _numbered(starts.to(device), targets, tokens)
            documents.ids.view(-1)[end:] = -1  # in none: a scored one is an error
            return documents
    if (index := call.get("seq_idx")) is not None:
        if not is_integers(index) or index.shape != shape:
            got = tuple(index.shape) if isinstance(index, Tensor) else type(index).__name__
            raise ValueError(f"seq_idx: got {got}, want integers {tuple(shape)}")
        index = index.to(device)
        starts = nn.functional.pad((index.diff(dim=1) != 0) & (index[:, 1:] >= 0), (1, 0))
        return _numbered(starts, targets, tokens)
    if (positions := call.get("position_ids")) is not None:
        return as_documents(
            positions.to(device), shape, call.get("attention_mask"), targets, tokens
        )
    return None


def as_documents(
    positions: Tensor,
    shape: torch.Size,
    attended: Any = None,
    targets: Tensor | None = None,
    tokens: Any = None,
) -> Segments:
    """Documents of [B, L] tokens: each begins where positions ([B, L], [1, L], or the first of
    M-RoPE's [4, B, L]) do not go on.
    Padding, where `attended` is a mask [B, L] and 0, begins none, nor at the end of a row whose
    `targets` and `tokens` [B, L] say so."""
    return _numbered(starts_of(positions, shape, attended), targets, tokens)


def of_text(positions: Tensor) -> Tensor:
    """Positions [B, L] of the text: the first of M-RoPE's four [4, B, L]."""
    return positions[0] if positions.dim() == 3 and len(positions) == 4 else positions


def starts_of(positions: Tensor, shape: torch.Size, attended: Any = None) -> Tensor:
    """[B, L] bool, whether a document begins at a token by the positions."""
    positions = of_text(positions)
    if positions.shape not in (shape, (1, shape[1]), shape[1:]):
        wanted = " or ".join(map(str, dict.fromkeys([tuple(shape), (1, shape[1]), (4, *shape)])))
        raise ValueError(
            f"position_ids: got shape {tuple(positions.shape)}, want {wanted} to tell documents "
            "by, which the objective's segments are"
        )
    positions = positions.expand(shape)
    starts = positions.diff(dim=1) != 1
    if isinstance(attended, Tensor) and attended.shape == shape:
        real = attended.to(starts.device) != 0
        places = torch.arange(shape[1], device=starts.device).where(real, -1)
        last = places.cummax(1).values[:, :-1]  # token that is no padding, -1: there was none
        goes_on = positions[:, 1:] - positions.gather(1, last.clamp_min(0)) == 1
        starts = real[:, 1:] & (last >= 0) & ~goes_on
    return nn.functional.pad(starts, (1, 0), value=True)


def _starts_of_ends(name: str, ends: Any, shape: torch.Size) -> tuple[Tensor, int]:
    """[B, L] bool on the CPU, and the last end."""
    if not is_integers(ends) or ends.dim() != 1 or not len(ends):
        got = tuple(ends.shape) if isinstance(ends, Tensor) else type(ends).__name__
        raise ValueError(f"{name}: got {got}, want [S + 1] integers")
    places, count = ends.tolist(), shape.numel()
    if places[0] != 0 or places != sorted(places):
        raise ValueError(f"{name}: got {places}, want them to start at 0 and not to decrease")
    if places[-1] > count:
        raise ValueError(
            f"{name}: got an end at {places[-1]} in a call of {count} tokens, want all of its "
            "tokens: documents of which this is a part cannot be told"
        )
    starts = torch.zeros(count, dtype=torch.bool, device="cpu")
    starts[[place for place in places[:-1] if place < count]] = True
    return starts.view(shape), places[-1]


def _numbered(starts: Tensor, targets: Tensor | None, tokens: Any) -> Segments:
    """Segments that begin at `starts` [B, L], less those that are padding at a row's end."""
    starts, column = starts.clone(), torch.arange(starts.shape[1], device=starts.device)
    if targets is not None:
        data = ~starts  # what a document of padding has no token of
        if isinstance(tokens, Tensor) and tokens.shape == starts.shape:
            differs = tokens.diff(dim=1).to(starts.device) != 0
            data = data & nn.functional.pad(differs, (1, 0))
        data = data | (targets != IGNORE)
        starts &= column <= column.where(data, -1).amax(1, keepdim=True)
    starts |= column == 0
    ids = starts.reshape(-1).cumsum(0) - 1
    return Segments.from_ids(ids.view(starts.shape), int(ids[-1]) + 1)
