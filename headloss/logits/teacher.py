"""Measurements of a call apart from the softmax statistics, mainly divergences from a teacher.

T tokens, n tokens of a step, v columns of a slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from ..batch.packing import PackedBatch
from ..head.dtensor import local_head
from ..head.head import transform_of
from ..kernels.interface import Measured
from ..kernels.pair import Distribution, Divergence, Pair
from ..kernels.transform import Transform
from ..losses.teacher import SharedRows, Teacher
from ..statistics.divergence import ACCEPTANCE, LOG_ACCEPTANCE, Measure, merge_shares
from ..statistics.softmax import CANDIDATES, COLLISION, ByStatistic, Normalizer
from .beside import NOTHING, Candidates, LogitTile, SquaredSum, normalizer_of, vjp_inputs
from .given import View
from .linear import LinearLogits, RowContext
from .rows import ALL, Rows

READABLE = torch.float32, torch.bfloat16, torch.float16


def measuring(
    context: RowContext,
    batch: PackedBatch,
    teachers: Sequence[tuple[Teacher, tuple[Measure, ...]]],
    wide: torch.dtype,
    keeps_tiles: bool,
) -> RowContext:
    """Return a copy of `context` whose attribute `beside` lists the call's extra measurements: a
    `DenseTeacher` for each teacher with logits over the whole vocabulary, `Candidates` for each
    stored top-k teacher and for `candidate_ids`, and `SquaredSum` for sum p^2. The batch's fields
    are checked first. `wide` is the dtype of the statistics; `keeps_tiles` is True if each tile of
    logits stays in memory until its gradient is computed."""
    transform = context.transform
    needs = context.needs
    shard = context.shard
    stored = [t for t, _ in teachers if t.source(batch) == "topk"]
    beside: list[DenseTeacher | Candidates | SquaredSum] = [
        DenseTeacher(t, measures, context, batch, wide, keeps_tiles)
        for t, measures in teachers
        if t not in stored
    ]
    for teacher in stored:
        at = _at(transform, teacher.temperature)
        beside.append(Candidates(teacher, teacher.columns(batch), at, False, True, shard))
    if needs & {"candidate_logps", "candidate_tail"}:
        tail = "candidate_tail" in needs
        beside.append(Candidates(CANDIDATES, batch.candidate_ids, transform, True, tail, shard))
    if COLLISION in needs:
        beside.append(SquaredSum(replace(transform, temperature=transform.temperature / 2), shard))
    return context._replace(beside=tuple(beside))


class DenseTeacher:
    """Measurement of divergences from a teacher whose logits over the whole vocabulary are passed
    in or computed from hidden states. `Statistics.extras` holds the value of each measure (such as
    a divergence) under the key (teacher, measure).

    If the argument `keeps` is True, teacher logits computed from hidden states stay in memory until
    the gradient is computed, which must be the next operation after `value`. `context` is the
    `RowContext` of the student; `wide` is the dtype of the statistics.
    """

    own_logits = True

    def __init__(
        self,
        teacher: Teacher,
        measures: tuple[Measure, ...],
        context: RowContext,
        batch: PackedBatch,
        wide: torch.dtype,
        keeps: bool,
    ) -> None:
        self.key = teacher
        self.measures = measures
        self.shard = context.shard
        self.wide = wide
        self.student = _at(context.transform, teacher.temperature)
        # Rows of `source` to which the tokens map, if several tokens share a row; None: each token
        # has its own row.
        self.rows: SharedRows | None = None
        # Log-sum-exp [T] of the teacher's logits over the teacher's own, larger vocabulary.
        self.lse: Tensor | None = batch.get("teacher_lse")
        if teacher.source(batch) == "logits":
            want = self.shard.size, "the student's vocabulary"
            self.source = View(_wide_field("teacher_logits", batch, *want), batch.index)
            self.teacher = Transform(temperature=teacher.temperature)
        else:
            self.source = _of_hidden(context, batch, teacher, wide)
            if "teacher_index" in batch:
                self.rows = SharedRows.of(batch.teacher_index, batch.live is not None)
            self.teacher = self.source.context.transform
        self.keeps = keeps and isinstance(self.source, LinearLogits)
        # True if the student's softmax has the head's temperature, so that the softmax statistics
        # contain the student's normalizer.
        self.heads_own = context.transform is self.student
        # Teacher logits that are kept for the gradient, with the row of each token in these logits.
        self.raw: tuple[Tensor, Tensor | None] | None = None

    def take(self, index: Tensor) -> DenseTeacher:
        """Return a copy of this `DenseTeacher` for the tokens `index` only."""
        some = copy(self)
        if self.lse is not None:
            some.lse = self.lse[index]
        if self.rows is None:
            some.source = self.source.take(index)
        else:
            some.rows = self.rows.take(index)
        return some

    def add(self, rows: Rows, tile: LogitTile, state: None) -> LogitTile:
        """Return `tile`, the student's logits in all vocabulary columns, unchanged. With a teacher,
        there is only one tile per token, so that nothing is accumulated over tiles."""
        return tile

    def value(self, rows: slice, tile: LogitTile, normalizer: Normalizer) -> ByStatistic:
        """Return the value [n] of each divergence, and a tensor [n, 4 + K] from which the gradient
        is computed: maximum and log-sum of the student's softmax, maximum and log-sum of the
        teacher's, and for each of K divergences the sum over the vocabulary of the student's
        probability p times the divergence's derivative with respect to p. `normalizer` belongs to
        the student's softmax at the temperature of the head."""
        self.raw = None
        p = normalizer if self.heads_own else normalizer_of(self.shard, tile.state(self.student))
        raw, places = self._teacher(rows, ALL)
        q = normalizer_of(self.shard, tile._replace(raw=raw).state(self.teacher))
        q = q if places is None else q.rows(places)
        # Probability [n] of the student's vocabulary under the teacher, if the teacher has a larger
        # vocabulary.
        mass: Tensor | None = None
        if self.lse is not None:
            log_sum = self.lse[rows].to(q.log_sum.dtype) - q.max_logit
            mass = (q.log_sum - log_sum).exp()
            q = Normalizer(q.max_logit, log_sum)
        shares = tile.acts.divergence(tile.raw, raw, self._pair(p, q, self.measures, places))
        shares = merge_shares(self.shard.slices(shares), self.measures)
        values, mean_slopes = shares.unbind(-1)
        if self.keeps:
            self.raw = raw, places
        extras: ByStatistic = {}
        for k, measure in enumerate(self.measures):
            value = values[:, k].contiguous()
            if measure.kind == LOG_ACCEPTANCE:  # Rounding may lift sum min(p, q) above 1.
                value = value.clamp_max(0)
            if mass is not None and measure.kind == "total_variation":
                value = value + (1 - mass) / 2
            if mass is not None and measure.kind == "forward_kl":
                mean_slopes[:, k] = mass - 1
            extras[self.key, measure] = value
        extras[self.key, "vjp"] = torch.stack([*p, *q, *mean_slopes.unbind(1)], 1)
        return extras

    def _pair(
        self, p: Normalizer, q: Normalizer, measures: tuple[Measure, ...], places: Tensor | None
    ) -> Pair:
        sides = Distribution(self.student, p), Distribution(self.teacher, q)
        return Pair(*sides, measures, places)

    def _teacher(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Return the teacher's raw logits [M, v], which must not be changed, and the index [n] of
        each token's row in these logits; the index is None if token i has row i. The logits are
        copied if kernels cannot read the caller's tensor, or if the statistics are in float64."""
        index: Rows = rows
        places = None
        if self.rows is not None:  # Several tokens may have the same teacher row.
            index, places = self.rows.at(rows)
        if isinstance(self.source, LinearLogits):
            return self.source.raw(index, columns).to(self.wide), places
        tile = self.source.read(rows, columns)
        if self.wide == torch.float64 or tile.dtype not in READABLE:
            tile = tile.to(self.wide)
        return tile if tile.shape[1] < 2 or tile.stride(1) == 1 else tile.contiguous(), None

    def slopes(self, extras: ByStatistic) -> dict[Measure, Tensor] | None:
        """Return the loss's derivatives [n] with respect to the divergences from this teacher; None
        if the loss has no such derivative."""
        return {m: extras[self.key, m] for m in self.measures if (self.key, m) in extras} or None

    def vjp(
        self, rows: slice, columns: slice, measured: Measured, slopes: dict[Measure, Tensor]
    ) -> Divergence:
        """Return the inputs of the kernel that computes the divergences' gradient on a tile;
        `slopes` are the loss's derivatives with respect to the divergences."""
        raw, places = self.raw or self._teacher(rows, columns)
        self.raw = None
        sides = vjp_inputs(self.key, measured)
        normalizers = Normalizer(*sides[:2]), Normalizer(*sides[2:4])
        pair = self._pair(*normalizers, tuple(slopes), places)
        at = [4 + self.measures.index(measure) for measure in slopes]
        mean_slopes = torch.stack([sides[place] for place in at], 1)
        log_a = measured.stats.extras[self.key, ACCEPTANCE] if ACCEPTANCE in slopes else None
        return Divergence(raw, pair, mean_slopes, torch.stack([*slopes.values()], 1), log_a)


def _of_hidden(
    context: RowContext, batch: PackedBatch, teacher: Teacher, wide: torch.dtype
) -> LinearLogits:
    """Return logits from a teacher's hidden states and head: of each token or, if tokens share
    rows, of all rows."""
    assert teacher.head is not None
    if teacher.head.beside:
        raise ValueError("teacher_head: got a head with columns beside, want a head without")
    shard = context.shard
    head = local_head(teacher.head)
    states = _wide_field("teacher_hidden", batch, head.weight.shape[1], "the teacher head's width")
    if head.vocab_group is None and head.vocabulary != shard.vocabulary:
        raise ValueError(
            f"teacher_head: got a vocabulary of {head.vocabulary}, want the student's "
            f"{shard.vocabulary} (set vocab_size on both heads to leave padded rows out)"
        )
    with torch.no_grad():
        all_rows = "teacher_index" in batch or batch.index is None
        rows = states if all_rows else states[batch.index]
        if rows.element_size() == 1:  # PyTorch cannot multiply 8-bit floats by wider floats.
            rows = rows.to(wide)
        factors = head.factors(rows, shard.dropout)
    # If each rank has the whole teacher head, cut the head to the rows of the student's vocabulary
    # slice.
    first = shard.first if head.vocab_group is None else 0
    columns = slice(first, first + shard.size)
    transform = replace(transform_of(head), temperature=teacher.temperature)
    pairs = [tensor for features, weight in factors for tensor in (features, weight[columns])]
    tensors = [*pairs, None if head.bias is None else head.bias[columns]]
    return LinearLogits(tensors, RowContext(context.acts, batch.targets, transform, NOTHING, shard))


def _at(transform: Transform, temperature: float) -> Transform:
    """Return `transform` with its temperature replaced by `temperature`."""
    present = transform.temperature
    if not isinstance(present, Tensor) and present == temperature:
        return transform
    return replace(transform, temperature=temperature)


def _wide_field(name: str, batch: PackedBatch, want: int, what: str) -> Tensor:
    """Return the batch field `name`, after a check that its shape is [number of positions,
    `want`]."""
    value = batch.as_given(name)
    if value is None or value.dim() != 2 or value.shape[-1] != want:
        got = None if value is None else value.shape[-1]
        raise ValueError(f"{name}: got a last dimension of {got}, want {what}, {want}")
    return value
