"""The teachers of a call: from a term's teacher and the batch's fields to a teacher's softmax."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..batch.packing import PackedBatch
from ..kernels.interface import Kernels
from ..kernels.transform import Transform
from ..losses.distillation import Teacher
from ..ranks.dtensor import local_head
from ..ranks.vocabulary import Whole
from ..softmax.given import View
from ..softmax.linear import LinearSoftmax, Tokens
from ..softmax.teacher import NOTHING, DenseTeacher, TopkTeacher
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
) -> DenseTeacher | TopkTeacher:
    """What measures a teacher and takes its gradient, after its fields are checked."""
    acts = prepared.acts
    like = torch.zeros((), dtype=prepared.wide, device=batch.targets.device)
    size = slices.size or vocabulary
    student = transform
    if isinstance(transform.temperature, Tensor) or transform.temperature != teacher.temperature:
        student = replace(transform, temperature=teacher.temperature)
    form = teacher.source(batch)
    if form == "topk":
        ids = wide_field("teacher_topk_ids", batch, None, "one outcome or more")
        want = "a log-prob for each of teacher_topk_ids"
        logps = wide_field("teacher_topk_logps", batch, ids.shape[-1], want)
        return TopkTeacher(teacher, ids, logps, index, student, len(batch), acts, slices, like)
    source: LinearSoftmax | View
    if form == "logits":
        given = wide_field("teacher_logits", batch, size, "the student's vocabulary")
        source, other = View(given, index), Transform(temperature=teacher.temperature)
    else:
        source, other = _of_hidden(teacher, batch, index, vocabulary, size, acts, slices)
    pair = (student, other)
    return DenseTeacher(
        teacher, source, pair, student is transform, len(batch), acts, slices, like
    )


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
    source = LinearSoftmax(
        [f for f, _ in factors],
        [w[own] for _, w in factors],
        None if head.bias is None else head.bias[own],
        size,
        acts,
        Tokens(batch.targets, transform, NOTHING),
    )
    return source, transform
