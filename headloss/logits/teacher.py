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
from .beside import NOTHING, LogitTile
from .given import View
from .linear import LinearLogits, RowContext
from .rows import ALL, Rows, compact_

READABLE = torch.float32, torch.bfloat16, torch.float16


class DenseTeacher:
    """A teacher whose logits over the whole vocabulary are given or made from hidden states.

    Args:
        key: the term's description of it.
        transforms: the student's and the teacher's, at the term's temperature.
        context: the student's; where its head's transform is the term's, its normalizer is known
            already.
        memory: [5, T], which `value` fills and `gradient` reads: both sides' normalizers, and the
            mean slope.
        keeps: whether the gradient of some tokens follows their measurement at once, so that logits
            made from hidden states are kept for it.
    """

    own_logits, more = True, ()

    def __init__(
        self, key: Teacher, source: LinearLogits | View, transforms: tuple[Transform, Transform],
        context: RowContext, memory: Tensor, keeps: bool
    ) -> None:
        self.key, self.shard, self.acts = key, context.shard, context.acts
        self.source: Any = source
        self.keeps = keeps and isinstance(source, LinearLogits)
        self.heads_own = context.transform is transforms[0]
        self.memory, (*sides, self.mean_slope) = memory, memory.unbind()
        normalizers = Normalizer(*sides[:2]), Normalizer(*sides[2:])
        self.sides = tuple(map(Distribution, transforms, normalizers))
        self.student: Tensor | None = None  # logits that are to be measured
        self.kept: tuple[int, Tensor] | None = None  # first token and logits, until the gradient

    def take(self, index: Tensor) -> DenseTeacher:
        """Of some of the tokens, after they were measured."""
        some = copy(self)
        some.source, some.mean_slope = self.source.take(index), self.mean_slope[index]
        some.sides = tuple(side.rows(index) for side in self.sides)
        return some

    def add(self, rows: Rows, tile: LogitTile) -> None:
        """Take the student's logits of some tokens, over the whole vocabulary."""
        self.student = tile.raw

    def value(self, rows: slice, normalizer: Normalizer) -> Tensor:
        """[n] divergences; `normalizer` is the student's at its head's own temperature."""
        assert self.student is not None
        student, teacher = (side.transform for side in self.sides)
        (raw, self.student), self.kept = (self.student, None), None
        p = normalizer if self.heads_own else self._normalizer(raw, student)
        raw_teacher = self._teacher(rows, ALL)
        q = self._normalizer(raw_teacher, teacher)
        sides = Distribution(student, p), Distribution(teacher, q)
        pair = Pair(*sides, self.key.kind, self.key.beta)
        value, mean_slope = self.shard.sum(self.acts.divergence(raw, raw_teacher, pair))
        if self.keeps:
            self.kept = (rows.start or 0, raw_teacher)
        torch.stack([*p, *q, mean_slope], out=self.memory[:, rows])
        return value

    def _normalizer(self, raw: Tensor, transform: Transform) -> Normalizer:
        """log-sum-exp."""
        partials = self.acts.partials(raw, Forward(None, 0, transform, NOTHING))
        return finish(self.shard.merge(partials), 1, NOTHING)[1]

    def _teacher(self, rows: Rows, columns: slice) -> Tensor:
        """[n, v] raw logits, to be read: a copy where no act takes them as they are, or where the
        student's have more digits."""
        if isinstance(self.source, LinearLogits):
            return self.source.raw(rows, columns)
        tile, dtype = self.source.read(rows, columns), self.mean_slope.dtype
        if dtype == torch.float64 or tile.dtype not in READABLE:
            tile = tile.to(dtype)
        return tile if tile.shape[1] < 2 or tile.stride(1) == 1 else tile.contiguous()

    def gradient(
        self, raw: Tensor, rows: Rows, columns: slice, measured: Measured, weight: Tensor,
        extra: Tensor | None = None, others: Backward | None = None
    ) -> Tensor:
        """weight * d divergence / d raw of a tile, plus `extra`, [n, v]; with `others`, the
        gradient of the whole objective, in raw's memory or in `others.to`."""
        student, teacher = (side.rows(rows) for side in self.sides)
        pair = Pair(student, teacher, self.key.kind, self.key.beta)
        (first, raw_teacher), self.kept = self.kept or (0, None), None
        if raw_teacher is None:
            raw_teacher = self._teacher(rows, columns)
        elif isinstance(rows, Tensor):
            raw_teacher = compact_(raw_teacher, rows - first)
        part = Divergence(raw_teacher, pair, self.mean_slope[rows], weight)
        return self.acts.part_gradient_(raw, part, extra, others)
