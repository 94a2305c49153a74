"""The teachers of a call: from a term's teacher and the batch's fields to a divergence."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .checks import wide_field
from .divergence import DenseDivergence, Divergence, TopkDivergence
from .kernels.interface import Kernels
from .kernels.transform import Transform
from .logits import GivenLogits, LinearLogits
from .losses.distillation import Teacher
from .packing import Packed, PackedBatch
from .parallel import Alone
from .shards import local_head


def teacher_tiles(teachers: list[Teacher], batch: PackedBatch) -> int:
    """Tiles beside the student's: logits of each dense teacher, and parts of the gradient of all
    divergences but the last."""
    dense = sum(teacher.source(batch) != "topk" for teacher in teachers)
    return dense + (len(teachers) > 1)


def divergence_of(
    teacher: Teacher,
    packed: Packed,
    transform: Transform,
    vocabulary: int,
    acts: Kernels,
    wide: torch.dtype,
    slices: Alone,
) -> Divergence:
    """What measures a teacher and takes its gradient, after its fields are checked."""
    batch = packed.batch
    like = torch.zeros((), dtype=wide, device=batch.targets.device)
    size = slices.size or vocabulary
    form = teacher.source(batch)
    student = transform
    if isinstance(transform.temperature, Tensor) or transform.temperature != teacher.temperature:
        student = replace(transform, temperature=teacher.temperature)
    if form == "topk":
        stored = wide_field("teacher_topk_ids", batch, None, "one outcome or more")
        wide_field(
            "teacher_topk_logps", batch, stored.shape[-1], "a log-prob for each of teacher_topk_ids"
        )
        return TopkDivergence(teacher, batch, student, acts, slices, like)
    if form == "logits":
        given = wide_field("teacher_logits", batch, size, "the student's vocabulary")
        source = GivenLogits(given, batch.index)
        other = Transform(temperature=teacher.temperature)
    else:
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
            rows = states if batch.index is None else states[batch.index]
            factors = head.factors(rows, slices.dropout)
        # A whole head beside a student's slice: its rows of that slice.
        first = slices.first if head.vocab_group is None else 0
        own = slice(first, first + size)
        bias = None if head.bias is None else head.bias[own]
        source = LinearLogits([f for f, _ in factors], [w[own] for _, w in factors], bias, size)
        other = Transform(
            scale=head.logit_scale, softcap=head.softcap, temperature=teacher.temperature
        )
    return DenseDivergence(
        teacher, source, student, other, transform, len(packed), acts, slices, like
    )
