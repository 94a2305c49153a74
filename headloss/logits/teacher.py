"""A teacher beside a student's softmax: measures divergences and pulls them back.

T tokens, n tokens of a step, v columns of a slab.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..kernels.interface import Backward, Forward, Measured
from ..kernels.pair import Distribution, Divergence, Pair
from ..kernels.transform import Transform
from ..losses.teacher import Teacher
from ..statistics.softmax import Normalizer, finish
from .beside import NOTHING
from .given import View
from .linear import LinearLogits, RowContext
from .rows import ALL, Rows, compact_


class DenseTeacher:
    """A teacher whose logits over the whole vocabulary are given or made from hidden states.

    Args:
        key: the term's description of it.
        transforms: the student's and the teacher's, at the term's temperature.
        context: the student's; where its head's transform is the term's, its normalizer is known
            already.
        memory: [5, T], which `measure` fills and `gradient` reads: both sides' normalizers, and
            the mean slope.
    """

    def __init__(
        self, key: Teacher, source: LinearLogits | View, transforms: tuple[Transform, Transform],
        context: RowContext, memory: Tensor
    ) -> None:
        self.key, self.shard = key, context.shard
        self.source: Any = source
        self.head_transform, self.acts = context.transform, context.acts
        self.heads_own = self.head_transform is transforms[0]
        self.measured, (*sides, self.mean_slope) = memory, memory.unbind()
        normalizers = Normalizer(*sides[:2]), Normalizer(*sides[2:])
        self.sides = tuple(map(Distribution, transforms, normalizers))
        # First token and logits, until the gradient.
        self.held: tuple[int, Tensor] | None = None

    def take(self, index: Tensor) -> DenseTeacher:
        """Of some of the tokens, after they were measured."""
        some = copy(self)
        some.source, some.mean_slope = self.source.take(index), self.mean_slope[index]
        some.sides = tuple(side.rows(index) for side in self.sides)
        some.head_transform = self.head_transform.rows(index)
        return some

    def measure(self, rows: slice, raw: Tensor, normalizer: Normalizer, hold: bool) -> Tensor:
        """[n] divergences of some tokens, from the student's logits over the whole vocabulary.

        `normalizer` is that of the student at its head's own temperature. With `hold`, the next
        gradient will be that of the same tokens.
        """
        self.held = None
        student, teacher = self.sides[0].transform, self.sides[1].transform
        p = normalizer if self.heads_own else self._normalizer(raw, student)
        source = self.source
        held = self._teacher(rows, ALL)
        q = self._normalizer(held, teacher)
        sides = Distribution(student, p), Distribution(teacher, q)
        pair = Pair(*sides, self.key.kind, self.key.beta)
        value, mean_slope = self.shard.sum(self.acts.divergence(raw, held, pair))
        if hold and isinstance(source, LinearLogits):
            self.held = (rows.start or 0, held)
        memory = self.measured if rows is ALL else self.measured[:, rows]
        torch.stack([*p, *q, mean_slope], out=memory)
        return value

    def _normalizer(self, raw: Tensor, transform: Transform) -> Normalizer:
        """log-sum-exp."""
        partials = self.acts.partials(raw, Forward(None, 0, transform, NOTHING))
        return finish(self.shard.merge(partials), 1, NOTHING)[1]

    def _teacher(self, rows: Rows, columns: slice) -> Tensor:
        """[n, v] raw logits, to be read."""
        if isinstance(self.source, View):
            return self.acts.readable(self.source.read(rows, columns), self.mean_slope.dtype)
        return self.source.raw(rows, columns)

    def gradient(
        self, raw: Tensor, rows: Rows, columns: slice, measured: Measured, weight: Tensor,
        extra: Tensor | None = None, others: Backward | None = None
    ) -> Tensor:
        """weight * d divergence / d raw of a tile, plus `extra`, [n, v]; with `others`, the
        gradient of the whole objective, in raw's memory or in `others.to`."""
        student, teacher = (Distribution(s.transform, s.normalizer.rows(rows)) for s in self.sides)
        pair = Pair(student, teacher, self.key.kind, self.key.beta)
        (first, raw_teacher), self.held = self.held or (0, None), None  # of the last measurement
        if raw_teacher is None:
            raw_teacher = self._teacher(rows, columns)
        elif isinstance(rows, Tensor):
            at = rows - first
            raw_teacher = compact_(raw_teacher, at)
        part = Divergence(raw_teacher, pair, self.mean_slope[rows], weight)
        return self.acts.part_gradient_(raw, part, extra, others)
