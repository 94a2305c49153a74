"""The batch of a model's call with labels: targets, fields per token, documents.

B rows, L positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from ...batch.batch import IGNORE, Batch
from ...batch.labels import is_beside, next_in_row
from ...losses import Objective
from ..documents import TOLD_BY, documents_of, of_text, starts_of
from ..shared import needs_segments

CALL = ("labels", "num_items_in_batch", "shift_labels", *TOLD_BY)


def batch_of(
    call: Mapping[str, Any], fields: Mapping[str, Any], objective: Objective, device: torch.device
) -> Batch:
    """Return the `Batch` of a model's call with labels.

    If the call has `shift_labels`, its labels and fields are already shifted. Without
    `shift_labels`, `batch_of` shifts labels and fields [B, L] or [B, L, ..] by one position, and
    leaves batch fields without a value per token, such as `segments`, unchanged.

    Raises:
        ValueError: each rank has a part of its sequences, but the objective needs whole sequences.
    """
    labels, targets, fields = call["labels"], call["shift_labels"], dict(fields)
    if targets is None:
        dim = labels.dim() - 1  # A forward may flatten its labels.
        targets = next_in_row(labels, dim, fill=IGNORE)
        for name, value in fields.items():
            if is_beside(value, labels.shape):
                fields[name] = next_in_row(value, dim)
    targets, segments = targets.to(device), fields.pop("segments", None)
    if segments is None and needs_segments(objective):
        if call["shift_labels"] is not None:
            _check_whole(call, targets)
        segments = documents_of(call, targets)
    return Batch(targets, segments, **fields)


def _check_whole(call: Mapping[str, Any], targets: Tensor) -> None:
    """Raise ValueError if labels arrive shifted because each rank holds a part of each sequence."""
    ranks, positions = 1, call["position_ids"]
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
    at = 0
    if positions is not None:
        attended, positions = call["attention_mask"], of_text(positions.to(targets.device))
        starts = starts_of(positions, targets.shape, attended)
        if isinstance(attended, Tensor) and attended.shape == starts.shape:
            starts &= attended.to(starts.device) != 0
        at = int(positions.expand(targets.shape).where(starts, 0).max())
    if ranks > 1 or at:
        got = f"a document that begins at position {at}" if at else f"{ranks} ranks"
        raise ValueError(
            f"shift_labels: got them with {got}, as of context or sequence parallelism, whose "
            "parts of sequences would count as sequences; want segments=Segments.from_ids(ids, "
            'count=S, group=...) in the call and apply(..., fields=("segments",)), or under '
            "accelerate's context parallelism headloss.integrations.transformers.Trainer"
        )
