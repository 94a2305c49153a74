"""What a call measures beside the softmax of its logits: from terms' teachers and the batch's
fields to what takes the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..batch.packing import PackedBatch
from ..head.dtensor import local_head
from ..head.head import transform_of
from ..kernels.transform import Transform
from ..losses.teacher import Teacher
from ..statistics.softmax import CANDIDATES, COLLISION
from .beside import NOTHING, Candidates, SquaredSum
from .given import View
from .linear import LinearLogits, RowContext
from .teacher import DenseTeacher


def measuring(
    context: RowContext, batch: PackedBatch, teachers: Sequence[Teacher], wide: torch.dtype,
    keeps_tiles: bool
) -> RowContext:
    """What a source has to know, with dense teachers, stored top-k, candidates and sum p^2; the
    batch's fields are checked first. `wide`: dtype of statistics; `keeps_tiles`: of the plan."""
    acts, _, transform, needs, shard, *_ = context

    def candidates(key: object, ids: Any, of: Transform, tail: bool) -> Candidates:
        tail_normalizer = torch.empty(2, len(batch), dtype=wide, device=ids.device)
        return Candidates(
            key=key, ids=ids, index=batch.index, transform=of, heads_own=key == CANDIDATES,
            tail=tail, tail_normalizer=tail_normalizer, acts=acts, shard=shard,
        )  # fmt: skip

    stored = [t for t in teachers if t.source(batch) == "topk"]
    beside: list[DenseTeacher | Candidates | SquaredSum] = [
        _dense(context, batch, t, wide, keeps_tiles) for t in teachers if t not in stored
    ]
    for t in stored:
        beside.append(candidates(t, t.columns(batch), _at(transform, t.temperature), True))
    if needs & {"candidate_logps", "candidate_tail"}:
        ids = batch.as_given("candidate_ids")
        beside.append(candidates(CANDIDATES, ids, transform, "candidate_tail" in needs))
    if COLLISION in needs:
        beside.append(SquaredSum(transform, shard))
    return context._replace(beside=tuple(beside))


def _dense(
    context: RowContext, batch: PackedBatch, teacher: Teacher, wide: torch.dtype, keeps: bool
) -> DenseTeacher:
    size = context.shard.size
    student = _at(context.transform, teacher.temperature)
    source: Any
    if teacher.source(batch) == "logits":
        logits = _wide_field("teacher_logits", batch, size, "the student's vocabulary")
        source, other = View(logits, batch.index), Transform(temperature=teacher.temperature)
    else:
        source, other = _of_hidden(context, batch, teacher, size, wide)
    memory = torch.empty(5, len(batch), dtype=wide, device=batch.targets.device)
    return DenseTeacher(teacher, source, (student, other), context, memory, keeps)


def _of_hidden(
    context: RowContext, batch: PackedBatch, teacher: Teacher, size: int, wide: torch.dtype
) -> tuple[LinearLogits, Transform]:
    """Logits from a teacher's hidden states and its head."""
    assert teacher.head is not None
    shard, head = context.shard, local_head(teacher.head)
    states = _wide_field("teacher_hidden", batch, head.weight.shape[1], "the teacher head's width")
    if head.vocab_group is None and head.vocabulary != shard.vocabulary:
        raise ValueError(
            f"teacher_head: got a vocabulary of {head.vocabulary}, want the student's "
            f"{shard.vocabulary} (set vocab_size on both heads to leave padded rows out)"
        )
    with torch.no_grad():
        rows = states if batch.index is None else states[batch.index]
        if rows.element_size() == 1:  # torch multiplies no floats of 8 bits by others
            rows = rows.to(wide)
        factors = head.factors(rows, shard.dropout)
    # A whole head beside a student's slice: its rows of that slice.
    first = shard.first if head.vocab_group is None else 0
    columns = slice(first, first + size)
    transform = replace(transform_of(head), temperature=teacher.temperature)
    pairs = [tensor for features, weight in factors for tensor in (features, weight[columns])]
    tensors = [*pairs, None if head.bias is None else head.bias[columns]]
    plain = RowContext(context.acts, batch.targets, transform, NOTHING, shard)
    return LinearLogits(tensors, plain), transform


def _at(transform: Transform, temperature: float) -> Transform:
    """The same transform at another temperature."""
    present = transform.temperature
    if not isinstance(present, Tensor) and present == temperature:
        return transform
    return replace(transform, temperature=temperature)


def _wide_field(name: str, batch: PackedBatch, want: int, what: str) -> Tensor:
    """A [N, want] field of the batch."""
    value = batch.as_given(name)
    if value is None or value.dim() != 2 or value.shape[-1] != want:
        got = None if value is None else value.shape[-1]
        raise ValueError(f"{name}: got a last dimension of {got}, want {what}, {want}")
    return value
