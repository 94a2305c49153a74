"""Documents of packed rows [B, L], as the segments of terms that need segments.

Padding is not a document. Padding marked by a mask belongs to the preceding document. Without a
mask, unscored documents at a row's end are padding if they repeat one token id or have only one
token. A row's first document is never treated as padding, as in an unpacked batch.
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
# Arguments of a Transformers model that mark documents or padding.
TOLD_BY = (*ENDS, "seq_idx", "position_ids", "attention_mask", "input_ids")


def documents_of(call: Mapping[str, Any], targets: Tensor) -> Segments | None:
    """Return the packed documents of a call's tokens; None (each row is one document) if no
    argument of the call marks documents.

    Args:
        call: arguments of the call by name. Of the argument names in the list `TOLD_BY`, the first
            one present in the call marks the documents. `cu_seq_lens_q` [S + 1] are cumulative
            lengths over all B x L tokens; a repeated cumulative length marks no document. `seq_idx`
            [B, L] changes where a document begins, and is negative at padding. `position_ids` stop
            increasing by 1 where a document begins.
        targets: [B, L], shifted labels.

    Raises:
        ValueError, TypeError: an argument does not fit the tokens; the message names the argument.
    """
    shape, device, tokens = targets.shape, targets.device, call.get("input_ids")
    for name in ENDS:
        if (ends := call.get(name)) is not None:
            starts, end = _starts_of_ends(name, ends, shape)
            documents = _numbered(starts.to(device), targets, tokens)
            # Tokens after the last document are in no document, and raise an error if scored.
            documents.ids.view(-1)[end:] = -1
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
    """Return the documents of tokens [B, L]: each begins where positions stop increasing by 1.

    The positions are [B, L], [1, L], or the first of M-RoPE's four position tensors [4, B, L]. No
    document begins in padding. Padding is where the mask `attended` [B, L] is 0, and at the end of
    a row, where `tokens` [B, L] are all equal and `targets` [B, L] are all -100.
    """
    return _numbered(starts_of(positions, shape, attended), targets, tokens)


def of_text(positions: Tensor) -> Tensor:
    """Return the text's position ids: `positions[0]` of M-RoPE positions [4, B, L], else
    `positions` unchanged."""
    return positions[0] if positions.dim() == 3 and len(positions) == 4 else positions


def starts_of(positions: Tensor, shape: torch.Size, attended: Any = None) -> Tensor:
    """Return a mask [B, L], True where the position ids show that a document begins."""
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
        # The column of the latest non-padding token at or before each column; -1 if none exists.
        last = places.cummax(1).values[:, :-1]
        goes_on = positions[:, 1:] - positions.gather(1, last.clamp_min(0)) == 1
        starts = real[:, 1:] & (last >= 0) & ~goes_on
    return nn.functional.pad(starts, (1, 0), value=True)


def _starts_of_ends(name: str, ends: Any, shape: torch.Size) -> tuple[Tensor, int]:
    """Return a mask [B, L] of document starts on the CPU, and the end of the last document."""
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
    """Return the segments that begin at `starts` [B, L], without padding documents at a row's
    end."""
    starts, column = starts.clone(), torch.arange(starts.shape[1], device=starts.device)
    if targets is not None:
        # True at positions that cannot be padding, because the target is not -100 or the token
        # differs from the previous token.
        data = ~starts
        if isinstance(tokens, Tensor) and tokens.shape == starts.shape:
            differs = tokens.diff(dim=1).to(starts.device) != 0
            data = data & nn.functional.pad(differs, (1, 0))
        data = data | (targets != IGNORE)
        starts &= column <= column.where(data, -1).amax(1, keepdim=True)
    starts |= column == 0
    ids = starts.reshape(-1).cumsum(0) - 1
    return Segments.from_ids(ids.view(starts.shape), int(ids[-1]) + 1)
