"""The ids that a sampler kept, from where a token is drawn to the batch.

B rows, C completion columns, K ids of a token at most, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ...arguments import is_integers


class Recorder(LogitsProcessor):
    """Stands behind a model's own processors of logits, and writes down which ids they left."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []  # [B, K] each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        left = scores > -torch.inf
        most = int(left.sum(1).max())
        if most == scores.shape[1]:  # nothing was taken away from some row
            left = left & ~left.all(1, keepdim=True)
            most = int(left.sum(1).max())
        ids = left.to(torch.int8).topk(most, dim=1).indices
        self.steps.append(ids.masked_fill(~left.gather(1, ids), -1))
        return scores

    def rows(self) -> Tensor:
        """[B, C, K] the ids of each token that was drawn, -1 in empty slots."""
        most = max((step.shape[1] for step in self.steps), default=0)
        steps = [torch.nn.functional.pad(s, (0, most - s.shape[1]), value=-1) for s in self.steps]
        return torch.stack(steps, 1)


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[Recorder]:
    """Inside, what `model.generate` draws from is recorded."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    make, recorder = model._get_logits_processor, Recorder()

    def with_recorder(*args: Any, **kwargs: Any) -> Any:
        processors = make(*args, **kwargs)
        processors.append(recorder)
        return processors

    model._get_logits_processor = with_recorder
    try:
        yield recorder
    finally:
        del model._get_logits_processor


Kept = Sequence[Any] | Tensor  # of each completion: [C, K] integers, or the ids of each token


def padded(kept: Kept, completions: int, columns: int, device: torch.device) -> Tensor:
    """[B, C, K] int64 with -1 in empty slots; a token without ids has the whole vocabulary.

    Raises:
        ValueError: not one entry for each completion.
        TypeError: ids that are no integers, or of another number of dimensions.
    """
    if len(kept) != completions:
        raise ValueError(
            f"support_ids: got {len(kept)} entries, want one for each of {completions} completions"
        )
    rows = [_ids_of(row) for row in kept]
    most = max((len(ids) for row in rows for ids in row), default=0)
    shape = completions, columns, max(1, most)
    found = torch.full(shape, -1, dtype=torch.int64, device="cpu")
    for place, row in zip(found, rows, strict=True):
        if isinstance(row, Tensor):
            part = row[:columns]
            place[: len(part), : part.shape[1]] = part
            continue
        for slots, ids in zip(place, row, strict=False):
            slots[: len(ids)] = ids
    return found.to(device)


def _ids_of(row: Any) -> Tensor | list[Tensor]:
    """[C, K] int64 of a completion, or [K] of each of its tokens."""
    if isinstance(row, Tensor):
        return _integers(row, 2)
    if not isinstance(row, Iterable | None):
        raise TypeError(f"support_ids: got {row!r} for a completion, want ids for each token")
    return [_integers([] if ids is None else ids, 1) for ids in (() if row is None else row)]


def _integers(ids: Any, dimensions: int) -> Tensor:
    found = torch.as_tensor(ids, device="cpu")
    if found.dim() != dimensions or (found.numel() and not is_integers(found)):
        raise TypeError(
            f"support_ids: got {found.dtype} of shape {tuple(found.shape)}, want integers, [C, K] "
            "of a completion or [K] of a token"
        )
    return found.long()
