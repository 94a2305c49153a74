"""A teacher beside a student's softmax: measures divergences tile by tile and pulls them back.

T tokens, n tokens of a step, v columns of a tile, V vocabulary, K stored outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.interface import Backward, Forward, Kernels
from ..kernels.pair import Outcomes, Pair, Side, phi
from ..kernels.transform import Transform
from ..losses.distillation import Teacher, log_tail
from ..objective.statistics import FLOOR, Normalizer, Partials, finish
from .given import View
from .linear import LinearSoftmax
from .rows import Rows, compact_

Tiles = Sequence[tuple[slice, Callable[[], Tensor]]]  # columns, and how to make their raw logits
NOTHING: frozenset[str] = frozenset()


class Slices(Protocol):
    """The slices of the vocabulary on the ranks of a group."""

    first: int

    def merge(self, partials: Partials) -> Partials: ...

    def sum(self, values: Tensor) -> Tensor: ...


class _Memory:
    """[T] vectors that `measure` fills and `gradient` reads."""

    def __init__(self, tokens: int, names: Sequence[str], like: Tensor) -> None:
        self._vectors = {name: like.new_zeros(tokens) for name in names}

    def take(self, index: Tensor) -> _Memory:
        found = copy(self)
        found._vectors = {name: vector[index] for name, vector in self._vectors.items()}
        return found

    def write(self, rows: slice, **values: Tensor) -> None:
        for name, value in values.items():
            self._vectors[name][rows] = value

    def normalizer(self, side: str, rows: Rows) -> Normalizer:
        return Normalizer(self[f"{side}_peak"][rows], self[f"{side}_log_sum"][rows])

    def __getitem__(self, name: str) -> Tensor:
        return self._vectors[name]


class DenseTeacher:
    """A teacher whose logits over the whole vocabulary are given or made from hidden states.

    Args:
        key: the term's description of it.
        source: its logits.
        transforms: the student's and the teacher's, at the term's temperature.
        heads_own: the student's is that of its head: its normalizer is known already.
        acts: the backend's.
    """

    def __init__(
        self,
        key: Teacher,
        source: LinearSoftmax | View,
        transforms: tuple[Transform, Transform],
        heads_own: bool,
        tokens: int,
        acts: Kernels,
        slices: Slices,
        like: Tensor,
    ) -> None:
        self.key, self.source, self.slices = key, source, slices
        self.transforms, self.heads_own = transforms, heads_own
        self.acts = acts
        names = ["p_peak", "p_log_sum", "q_peak", "q_log_sum", "pivot"]
        self.memory, self.dtype = _Memory(tokens, names, like), like.dtype
        self.held: tuple[int, Tensor] | None = None  # first token and logits, until the gradient

    def take(self, index: Tensor) -> DenseTeacher:
        """Of some of the tokens, after they were measured."""
        found = copy(self)
        found.source, found.memory = self.source.take(index), self.memory.take(index)
        return found

    def measure(
        self, rows: slice, tiles: Tiles, normalizer: Normalizer, hold: bool = False
    ) -> Tensor:
        """[n] divergences of some tokens, from the student's tiles over the whole vocabulary.

        `normalizer` is that of the student at its head's own temperature. With `hold`, the next
        gradient will be that of the same tokens.
        """
        self.held = None
        teacher_tiles: Tiles = [
            (columns, lambda columns=columns: self._teacher(rows, columns)) for columns, _ in tiles
        ]
        if len(teacher_tiles) == 1:  # a whole block: its teacher logits are made once
            columns, make = teacher_tiles[0]
            raw = make()
            teacher_tiles = [(columns, lambda: raw)]
            if hold and isinstance(self.source, LinearSoftmax):
                self.held = (rows.start or 0, raw)
        student, teacher = self.transforms
        p = normalizer if self.heads_own else self._normalizer(tiles, student, rows)
        q = self._normalizer(teacher_tiles, teacher, rows)
        pair = Pair(Side(student, p), Side(teacher, q), self.key.kind, self.key.beta)
        total: Tensor | None = None
        for (_, make), (_, make_teacher) in zip(tiles, teacher_tiles, strict=True):
            total = self.acts.divergence(make(), make_teacher(), pair, total)
        assert total is not None
        value, pivot = self.slices.sum(total)
        self.memory.write(
            rows,
            p_peak=p.peak,
            p_log_sum=p.log_sum,
            q_peak=q.peak,
            q_log_sum=q.log_sum,
            pivot=pivot,
        )
        return value

    def _normalizer(self, tiles: Tiles, transform: Transform, rows: slice) -> Normalizer:
        """log-sum-exp over tiles."""
        nowhere = torch.full_like(self.memory["pivot"][rows], -1, dtype=torch.int64)
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

    def _teacher_again(self, rows: Rows, columns: slice) -> Tensor:
        """The same, where they may be those of the last measurement."""
        held, self.held = self.held, None
        if held is None:
            return self._teacher(rows, columns)
        first, raw = held
        return raw if isinstance(rows, slice) else compact_(raw, rows - first)

    def gradient(
        self,
        raw: Tensor,
        rows: Rows,
        columns: slice,
        weight: Tensor,
        extra: Tensor | None = None,
        others: Backward | None = None,
    ) -> Tensor:
        """weight * d divergence / d raw of a tile, plus `extra`, [n, v]; with `others`, the
        gradient of the whole objective, in raw's memory."""
        student, teacher = (
            Side(transform, self.memory.normalizer(side, rows))
            for side, transform in zip("pq", self.transforms, strict=True)
        )
        return self.acts.divergence_gradient_(
            raw,
            self._teacher_again(rows, columns),
            Pair(student, teacher, self.key.kind, self.key.beta),
            self.memory["pivot"][rows],
            weight,
            extra,
            others,
        )


class TopkTeacher:
    """A teacher of K stored outcomes and the mass of the rest; calls as those of `DenseTeacher`.

    Args:
        ids, logps: [N, K], of token t at row `index[t]`.
    """

    def __init__(
        self,
        key: Teacher,
        ids: Tensor,
        logps: Tensor,
        index: Tensor | None,
        transform: Transform,
        tokens: int,
        acts: Kernels,
        slices: Slices,
        like: Tensor,
    ) -> None:
        self.key, self.slices, self.transform = key, slices, transform
        self.ids, self.logps, self.index = ids, logps, index
        self.acts, self.dtype = acts, like.dtype
        self.memory = _Memory(tokens, ["tail_peak", "tail_log_sum", "slope_tail"], like)
        self.slope_stored = like.new_zeros(tokens, ids.shape[-1])

    def take(self, index: Tensor) -> TopkTeacher:
        found = copy(self)
        found.index = index if self.index is None else self.index[index]
        found.memory, found.slope_stored = self.memory.take(index), self.slope_stored[index]
        return found

    def _stored(self, values: Tensor, rows: Rows) -> Tensor:
        return values[rows if self.index is None else self.index[rows]]

    def measure(
        self, rows: slice, tiles: Tiles, normalizer: Normalizer, hold: bool = False
    ) -> Tensor:
        ids = self._stored(self.ids, rows).long()
        log_q = self._stored(self.logps, rows).to(self.dtype)
        z = torch.zeros_like(log_q)
        tail: Partials | None = None
        for columns, make in tiles:
            raw, column = make(), self._columns(ids, columns)
            inside = (column >= 0) & (column < raw.shape[1])
            picked = raw.gather(1, torch.where(inside, column, 0))
            z += torch.where(inside, self.transform.rows(rows)(picked), 0)
            tail = self.acts.tail_partials(raw, column, self.transform.rows(rows), onto=tail)
        z = self.slices.sum(z)
        assert tail is not None
        _, rest = finish(self.slices.merge(tail), 1, NOTHING)
        value, slopes = self._value(z, rest.peak + rest.log_sum, log_q, ids < 0)
        self.slope_stored[rows] = slopes[0]
        self.memory.write(
            rows, tail_peak=rest.peak, tail_log_sum=rest.log_sum, slope_tail=slopes[1]
        )
        return value

    def _value(
        self, z: Tensor, lse: Tensor, log_q: Tensor, empty: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The divergence over K + 1 outcomes [n], and its slopes at z [n, K] and at the lse of the
        rest [n]. Either side's rest has at least a rounding error's worth of mass."""
        least = math.log(torch.finfo(self.dtype).eps)
        # K + 1 numbers a token: float64 costs nothing, and slopes that cancel keep their digits.
        # (Nothing made in inference mode could be saved for the slopes.)
        with torch.inference_mode(False), torch.enable_grad():
            z, lse, log_q = (t.to(torch.float64, copy=True) for t in (z, lse, log_q))
            empty = empty.clone()
            log_q = log_q.masked_fill(empty, FLOOR).clamp_min(FLOOR)
            log_q = torch.cat([log_q, log_tail(log_q).clamp_min(least)], 1)
            z, lse = z.requires_grad_(), lse.requires_grad_()
            outcomes = torch.cat([z.masked_fill(empty, -math.inf), lse.unsqueeze(1)], 1)
            log_p = outcomes.log_softmax(1).clamp_min(FLOOR)
            log_p = torch.cat([log_p[:, :-1], log_p[:, -1:].clamp_min(least)], 1)
            value, _ = phi(log_q, log_p, self.key.kind, self.key.beta)
            slopes = torch.autograd.grad(value.sum(), (z, lse))
        return value.detach().to(self.dtype), tuple(slope.to(self.dtype) for slope in slopes)

    def _columns(self, ids: Tensor, columns: slice) -> Tensor:
        """Vocabulary ids as columns of a tile; those of empty slots stay outside of it."""
        return torch.where(ids < 0, -1, ids - (self.slices.first + (columns.start or 0)))

    def gradient(
        self,
        raw: Tensor,
        rows: Rows,
        columns: slice,
        weight: Tensor,
        extra: Tensor | None = None,
        others: Backward | None = None,
    ) -> Tensor:
        ids = self._stored(self.ids, rows).long()
        return self.acts.sparse_gradient_(
            raw,
            Outcomes(
                self._columns(ids, columns),
                Side(self.transform, self.memory.normalizer("tail", rows)),
                self.slope_stored[rows],
                self.memory["slope_tail"][rows],
            ),
            weight,
            extra,
            others,
        )
