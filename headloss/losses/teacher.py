"""What distillation compares with: a teacher's full distribution, or its top k."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch
    from ..head.head import Head

Tail = Literal["bucket", "renormalized", "truncated", "clamped", "generalized", "sampled"]
TAILS: tuple[Tail, ...] = get_args(Tail)
Kind = Literal[
    "forward_kl", "reverse_kl", "js", "skew_forward_kl", "skew_reverse_kl", "total_variation"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
INPUTS = {
    "logits": ("teacher_logits",),
    "hidden": ("teacher_hidden",),
    "topk": ("teacher_topk_ids", "teacher_topk_logps"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """What to compare with; a key into `Statistics.extras`."""

    kind: Kind
    beta: float
    temperature: float
    head: Head | None = field(repr=False)  # a repr would bring its weight from the device
    tail: Tail = "bucket"

    def source(self, batch: Container[str]) -> str:
        """Which of its inputs a batch holds, by its names: "logits", "hidden" or "topk"."""
        given = [form for form, names in INPUTS.items() if any(n in batch for n in names)]
        if len(given) != 1 or not all(name in batch for name in INPUTS[given[0]]):
            have = sorted(n for names in INPUTS.values() for n in names if n in batch)
            raise ValueError(
                f"term distillation: got {have or 'no teacher'} in the batch, want one of "
                "teacher_logits; teacher_hidden (with teacher_head); teacher_topk_ids and "
                "teacher_topk_logps"
            )
        if given[0] == "hidden" and self.head is None:
            raise ValueError(
                "term distillation: got batch.teacher_hidden without distillation(teacher_head=...)"
            )
        return given[0]

    def columns(self, batch: PackedBatch) -> Tensor:
        """[T, K] ids of stored outcomes; with the tail "sampled" [T, K + 1], of which the last is
        the target where it is not stored, and an empty slot where it is."""
        ids: Tensor = batch.teacher_topk_ids
        if self.tail != "sampled":
            return ids
        target = batch.targets.unsqueeze(1).to(ids.dtype)
        stored = (ids == target).any(1, keepdim=True)
        return torch.cat([ids, target.masked_fill(stored, -1)], 1)
