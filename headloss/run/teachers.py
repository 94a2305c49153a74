"""What a call measures beside the softmax of its logits: from terms' teachers and the batch's
fields to what takes the tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..head.dtensor import local_head
from ..kernels.transform import Transform
from ..losses.teacher import Teacher
from ..objective.statistics import CANDIDATES, COLLISION
from ..softmax.beside import NOTHING, Candidates, Collision
from ..softmax.given import View
from ..softmax.linear import LinearSoftmax, Tokens
from ..softmax.teacher import DenseTeacher
from .checks import wide_field
from .work import Work


def with_beside(tokens: Tokens, work: Work) -> Tokens:
    """What a source takes, with dense teachers, stored outcomes, candidates and sum p^2; the
    batch's fields are checked first."""
    prepared, index, teachers = work.prepared, work.batch.index, work.objective.teachers
    acts, _, own, needs, slices, *_ = tokens

    def candidates(key: object, ids: Any, transform: Transform, tail: bool) -> Candidates:
        return Candidates(
            key=key,
            ids=ids,
            index=index,
            transform=transform,
            heads_own=key == CANDIDATES,
            tail=tail,
            rest=torch.empty(2, len(work.batch), dtype=prepared.wide, device=ids.device),
            acts=acts,
            slices=slices,
        )

    stored = [t for t in teachers if t.source(work.batch) == "topk"]
    dense = tuple(_dense(work, tokens, t) for t in teachers if t not in stored)
    found: list[Candidates | Collision] = [
        candidates(t, t.columns(work.batch), _at(own, t.temperature), True) for t in stored
    ]
    if needs & {"candidate_logps", "candidate_tail"}:
        ids = work.batch.as_given("candidate_ids")
        found.append(candidates(CANDIDATES, ids, own, "candidate_tail" in needs))
    if COLLISION in needs:
        found.append(Collision(own, acts, slices))
    return tokens._replace(teachers=dense, beside=tuple(found))


def _dense(work: Work, tokens: Tokens, teacher: Teacher) -> DenseTeacher:
    batch, prepared = work.batch, work.prepared
    size = work.slices.size or work.vocabulary
    student = _at(work.transform, teacher.temperature)
    source: Any
    if teacher.source(batch) == "logits":
        given = wide_field("teacher_logits", batch, size, "the student's vocabulary")
        source, other = View(given, batch.index), Transform(temperature=teacher.temperature)
    else:
        source, other = _of_hidden(work, teacher, size)
    fused = prepared.problem.differences  # which a teacher's own head alone can have
    fused = fused and tokens.acts.can_fuse(source.features[0], source.weights[0])
    kept = torch.empty(5, len(batch), dtype=prepared.wide, device=batch.targets.device)
    return DenseTeacher(teacher, source, (student, other), tokens, kept, fused)


def _of_hidden(work: Work, teacher: Teacher, size: int) -> tuple[LinearSoftmax, Transform]:
    """Logits from a teacher's hidden states and its head."""
    given: Any = teacher.head
    batch, slices, head = work.batch, work.slices, local_head(given)
    states = wide_field("teacher_hidden", batch, head.weight.shape[1], "the teacher head's width")
    if head.vocab_group is None and head.vocabulary != work.vocabulary:
        raise ValueError(
            f"teacher_head: got a vocabulary of {head.vocabulary}, want the student's "
            f"{work.vocabulary} (set vocab_size on both heads to leave padded rows out)"
        )
    with torch.no_grad():
        rows = states if batch.index is None else states[batch.index]
        if rows.element_size() == 1:  # torch multiplies no floats of 8 bits by others
            rows = rows.to(work.prepared.wide)
        factors = head.factors(rows, slices.dropout)
    # A whole head beside a student's slice: its rows of that slice.
    first = slices.first if head.vocab_group is None else 0
    own = slice(first, first + size)
    transform = Transform(
        scale=head.logit_scale, softcap=head.softcap, temperature=teacher.temperature
    )
    pairs = [tensor for features, weight in factors for tensor in (features, weight[own])]
    tensors = [*pairs, None if head.bias is None else head.bias[own]]
    given = batch.targets, transform, NOTHING, slices, work.vocabulary
    return LinearSoftmax(tensors, Tokens(work.prepared.acts, *given)), transform


def _at(transform: Transform, temperature: float) -> Transform:
    """The same transform at another temperature."""
    own = transform.temperature
    if not isinstance(own, Tensor) and own == temperature:
        return transform
    return replace(transform, temperature=temperature)
