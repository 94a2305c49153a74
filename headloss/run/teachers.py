"""What a call measures beside the softmax of its logits: from terms' teachers and the batch's
fields to what takes the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..batch.packing import PackedBatch
from ..kernels.interface import Kernels
from ..kernels.transform import Transform
from ..losses.teacher import Teacher
from ..objective.statistics import CANDIDATES, COLLISION
from ..ranks.dtensor import local_head
from ..ranks.vocabulary import Whole
from ..softmax.beside import NOTHING, Candidates, Collision
from ..softmax.given import View
from ..softmax.linear import LinearSoftmax, Tokens
from ..softmax.teacher import DenseTeacher
from .checks import wide_field
from .prepare import Prepared


def open_teacher(
    teacher: Teacher,
    batch: PackedBatch,
    index: Tensor | None,  # [T] position of each token
    transform: Transform,
    vocabulary: int,
    prepared: Prepared,
    slices: Whole,
) -> DenseTeacher:
    """What measures a dense teacher and computes its gradient. Its fields are checked first."""
    acts = prepared.acts
    like = torch.zeros((), dtype=prepared.wide, device=batch.targets.device)
    size = slices.size or vocabulary
    student = _at(transform, teacher.temperature)
    form = teacher.source(batch)
    source: LinearSoftmax | View
    if form == "logits":
        given = wide_field("teacher_logits", batch, size, "the student's vocabulary")
        source, other = View(given, index), Transform(temperature=teacher.temperature)
    else:
        source, other = _of_hidden(teacher, batch, index, vocabulary, size, acts, slices)
    pair, fused = (student, other), prepared.problem.differences
    if fused and isinstance(source, LinearSoftmax):
        fused = acts.can_fuse(source.features[0], source.weights[0])
    return DenseTeacher(
        teacher, source, pair, student is transform, len(batch), acts, slices, like, fused
    )


def _at(transform: Transform, temperature: float) -> Transform:
    """The same transform at another temperature."""
    own = transform.temperature
    if not isinstance(own, Tensor) and own == temperature:
        return transform
    return replace(transform, temperature=temperature)


def open_beside(
    teachers: Sequence[Teacher],
    batch: PackedBatch,
    index: Tensor | None,  # [T] position of each token
    transform: Transform,
    prepared: Prepared,
    slices: Whole,
) -> tuple[Candidates | Collision, ...]:
    """What is measured beside the statistics: stored outcomes, candidates, sum p^2."""
    acts, wide, needs = prepared.acts, prepared.wide, prepared.needs
    found: list[Candidates | Collision] = []

    def add(key: object, field: str, at: Transform, heads_own: bool, tail: bool) -> None:
        ids = batch.as_given(field)
        assert ids is not None
        given = (key, ids, index, at, heads_own, tail, len(batch))
        found.append(Candidates(*given, acts, slices, wide))

    for teacher in teachers:
        if teacher.source(batch) == "topk":
            add(teacher, "teacher_topk_ids", _at(transform, teacher.temperature), False, True)
    if needs & {"candidate_logps", "candidate_tail"}:
        add(CANDIDATES, "candidate_ids", transform, True, "candidate_tail" in needs)
    if COLLISION in needs:
        found.append(Collision(transform, acts, slices))
    return tuple(found)


def _of_hidden(
    teacher: Teacher,
    batch: PackedBatch,
    index: Tensor | None,
    vocabulary: int,
    size: int,
    acts: Kernels,
    slices: Whole,
) -> tuple[LinearSoftmax, Transform]:
    """Logits from a teacher's hidden states and its head."""
    assert teacher.head is not None
    head = local_head(teacher.head)
    width = head.weight.shape[1]
    states = wide_field("teacher_hidden", batch, width, "the teacher head's width")
    if head.vocab_group is None and head.vocabulary != vocabulary:
        raise ValueError(
            f"teacher_head: got a vocabulary of {head.vocabulary}, want the student's "
            f"{vocabulary} (set vocab_size on both heads to leave padded rows out)"
        )
    with torch.no_grad():
        rows = states if index is None else states[index]
        factors = head.factors(rows, slices.dropout)
    # A whole head beside a student's slice: its rows of that slice.
    first = slices.first if head.vocab_group is None else 0
    own = slice(first, first + size)
    transform = Transform(
        scale=head.logit_scale, softcap=head.softcap, temperature=teacher.temperature
    )
    pairs = [tensor for features, weight in factors for tensor in (features, weight[own])]
    tensors = [*pairs, None if head.bias is None else head.bias[own]]
    tokens = Tokens(acts, batch.targets, transform, NOTHING)
    return LinearSoftmax(tensors, tokens, size), transform
