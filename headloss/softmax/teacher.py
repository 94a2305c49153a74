"""A teacher beside a student's softmax: measures divergences tile by tile and pulls them back.

T tokens, n tokens of a step, v columns of a tile, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from ..kernels.interface import Backward, Forward, Kernels, Measured
from ..kernels.pair import Compared, Differences, Divergence, Pair, Side
from ..kernels.transform import Transform
from ..losses.teacher import Teacher
from ..objective.statistics import Normalizer, Partials, finish
from .beside import NOTHING, Slices
from .given import View
from .linear import LinearSoftmax
from .rows import Rows, compact_

Tiles = Sequence[tuple[slice, Callable[[], Tensor]]]  # columns, and how to make their raw logits


class DenseTeacher:
    """A teacher whose logits over the whole vocabulary are given or made from hidden states.

    Args:
        key: the term's description of it.
        source: its logits.
        transforms: the student's and the teacher's, at the term's temperature.
        own: that of the student's head. Where it is the student's, its normalizer is known already.
        acts: the backend's.
        fused: where a block is one tile, the teacher's product measures it at once, and leaves in
            the memory of the student's logits what the gradient needs.
    """

    def __init__(
        self,
        key: Teacher,
        source: LinearSoftmax | View,
        transforms: tuple[Transform, Transform],
        own: Transform,
        tokens: int,
        acts: Kernels,
        slices: Slices,
        like: Tensor,
        fused: bool = False,
    ) -> None:
        self.key, self.source, self.slices, self.fused = key, source, slices, fused
        self.own, self.heads_own, self.acts = own, own is transforms[0], acts
        # What `measure` fills and `gradient` reads: both sides' normalizers, and the pivot.
        *rooms, self.pivot = (like.new_zeros(tokens) for _ in range(5))
        normalizers = Normalizer(*rooms[:2]), Normalizer(*rooms[2:])
        self.sides = tuple(map(Side, transforms, normalizers))
        self.dtype = like.dtype
        # First token and logits, until the gradient.
        self.held: tuple[int, Tensor | Differences] | None = None

    def take(self, index: Tensor) -> DenseTeacher:
        """Of some of the tokens, after they were measured."""
        found = copy(self)
        found.source, found.pivot = self.source.take(index), self.pivot[index]
        found.sides = tuple(side.rows(index) for side in self.sides)
        found.own = self.own.rows(index)
        return found

    def _keep(self, rows: slice, pivot: Tensor, *normalizers: Normalizer) -> None:
        self.pivot[rows] = pivot
        for side, found in zip(self.sides, normalizers, strict=False):
            peak, log_sum = side.normalizer
            peak[rows], log_sum[rows] = found

    def measure(
        self, rows: slice, tiles: Tiles, normalizer: Normalizer, hold: bool = False
    ) -> Tensor:
        """[n] divergences of some tokens, from the student's tiles over the whole vocabulary.

        `normalizer` is that of the student at its head's own temperature. With `hold`, the next
        gradient will be that of the same tokens.
        """
        self.held = None
        if self.fused and hold:
            return self._measure_at_once(rows, tiles[0][1](), normalizer)
        teacher_tiles: Tiles = [
            (columns, lambda columns=columns: self._teacher(rows, columns)) for columns, _ in tiles
        ]
        if len(teacher_tiles) == 1:  # a whole block: its teacher logits are made once
            columns, make = teacher_tiles[0]
            raw = make()
            teacher_tiles = [(columns, lambda: raw)]
            if hold and isinstance(self.source, LinearSoftmax):
                self.held = (rows.start or 0, raw)
        student, teacher = self.sides[0].transform, self.sides[1].transform
        p = normalizer if self.heads_own else self._normalizer(tiles, student, rows)
        q = self._normalizer(teacher_tiles, teacher, rows)
        pair = Pair(Side(student, p), Side(teacher, q), self.key.kind, self.key.beta)
        total: Tensor | None = None
        for (_, make), (_, make_teacher) in zip(tiles, teacher_tiles, strict=True):
            total = self.acts.divergence(make(), make_teacher(), pair, total)
        assert total is not None
        value, pivot = self.slices.sum(total)
        self._keep(rows, pivot, p, q)
        return value

    def _measure_at_once(self, rows: slice, raw: Tensor, normalizer: Normalizer) -> Tensor:
        source, student, teacher = self.source, self.sides[0].transform, self.sides[1].transform
        assert isinstance(source, LinearSoftmax)
        p = normalizer
        if not self.heads_own:
            p = self._normalizer([(slice(None), lambda: raw)], student, rows)
        x, w, targets = source.features[0][rows], source.weights[0], source.tokens.targets[rows]
        own = None if self.heads_own else Side(self.own.rows(rows), normalizer)
        to = Compared(Side(student, p), teacher, targets, self.key.kind, own)
        found = self.acts.teacher_product(x, w, raw, to)
        self.held = (rows.start or 0, found)
        self._keep(rows, found.value, p)  # differences need none of the teacher's
        return found.value

    def _normalizer(self, tiles: Tiles, transform: Transform, rows: slice) -> Normalizer:
        """log-sum-exp over tiles."""
        nowhere = torch.full_like(self.pivot[rows], -1, dtype=torch.int64)
        forward = Forward(nowhere, 0, transform, NOTHING)
        partials: Partials | None = None
        for _, make in tiles:
            partials = self.acts.partials(make(), forward, partials)
        assert partials is not None
        return finish(self.slices.merge(partials), 1, NOTHING)[1]

    def _teacher(self, rows: Rows, columns: slice) -> Tensor:
        """[n, v] raw logits, to be read."""
        if isinstance(self.source, View):
            return self.acts.readable(self.source.read(rows, columns), self.dtype)
        return self.source.raw(rows, columns)

    def _teacher_again(self, rows: Rows, columns: slice) -> Tensor | Differences:
        """The same, where they may be those of the last measurement."""
        held, self.held = self.held, None
        if held is None:
            return self._teacher(rows, columns)
        first, raw = held
        if isinstance(rows, slice):
            return raw
        if isinstance(raw, Differences):
            return raw.rows(rows - first)
        return compact_(raw, rows - first)

    def gradient(
        self,
        raw: Tensor,
        rows: Rows,
        columns: slice,
        measured: Measured,
        weight: Tensor,
        extra: Tensor | None = None,
        others: Backward | None = None,
    ) -> Tensor:
        """weight * d divergence / d raw of a tile, plus `extra`, [n, v]; with `others`, the
        gradient of the whole objective, in raw's memory."""
        student, teacher = (Side(s.transform, s.normalizer.rows(rows)) for s in self.sides)
        pair = Pair(student, teacher, self.key.kind, self.key.beta)
        part = Divergence(self._teacher_again(rows, columns), pair, self.pivot[rows], weight)
        return self.acts.part_gradient_(raw, part, extra, others)
