"""Measurements of the tiles beside the statistics, in the same sweep. Each stands in
`Statistics.extras` by its key, and the inputs of its gradient by (key, "vjp").

T tokens, n of a step, v columns of a tile, K chosen columns, P pairs of a support.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..batch.support import HIGH
from ..kernels.interface import Backward, Forward, Kernels, Measured, Support
from ..kernels.pair import Distribution, StoredTopk
from ..kernels.transform import Transform
from ..parallel.vocabulary import WholeVocabulary
from ..statistics.softmax import (
    COLLISION,
    ByStatistic,
    Normalizer,
    SoftmaxCoefficients,
    SoftmaxState,
    finish,
)
from .rows import Rows

NOTHING: frozenset[str] = frozenset()
CandidateState = tuple[Tensor, SoftmaxState | None]  # z of the columns, and the others' state


class LogitTile(NamedTuple):
    """Logits of some tokens in a slab of columns."""

    raw: Tensor  # [n, v]
    first: int  # column of the whole vocabulary
    acts: Kernels

    def at(self, ids: Tensor, transform: Transform) -> Tensor:
        """[n, K] of the columns `ids`, 0 where they lie outside."""
        inside = (ids >= self.first) & (ids < self.first + self.raw.shape[1])
        columns = torch.where(inside, ids - self.first, 0)
        return torch.where(inside, transform(self.raw.gather(1, columns)), 0)

    def state(
        self, transform: Transform, onto: SoftmaxState | None = None, without: Tensor | None = None
    ) -> SoftmaxState:
        """The state of all columns but `without` [n, K], and of those that gave `onto`."""
        if without is not None:
            without = without - self.first
        forward = Forward(None, 0, transform, NOTHING)
        return self.acts.partials(self.raw, forward, onto, without)


class Pairs(NamedTuple):
    """Logits of some tokens in the columns of their support alone."""

    raw: Tensor  # [P]
    support: Support
    acts: Kernels

    def at(self, ids: Tensor, transform: Transform) -> Tensor:
        """[n, K] of the columns `ids`, as of a tile; -inf outside of a token's support."""
        places, inside, _ = self.find(ids)
        z = transform(self.raw[places])
        column = ids - self.support.first
        in_window = (column >= 0) & (column < self.support.size)
        return torch.where(in_window, torch.where(inside, z, -torch.inf), 0)

    def state(
        self, transform: Transform, onto: SoftmaxState | None = None, without: Tensor | None = None
    ) -> SoftmaxState:
        """The state of all pairs but those of the columns `without`; this tile is the only one."""
        support = self.support if without is None else self.find(without)[2]
        forward = Forward(self.nowhere, 0, transform, NOTHING)
        return self.acts.support_partials(self.raw, support, forward)

    @property
    def nowhere(self) -> Tensor:
        """[n] targets that are in no column."""
        return torch.full((len(self.support.offsets) - 1,), -1, device=self.raw.device)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor, Support]:
        """[n, K] the pair of each column, and whether there is one; and the other pairs."""
        support = self.support
        count = len(support.ids)
        at = torch.arange(count, device=support.ids.device)
        token = torch.searchsorted(support.offsets, at, right=True) - 1
        key, order = (token * HIGH + support.ids.clamp_min(-1)).sort()
        sought = torch.arange(len(ids), device=at.device).unsqueeze(1) * HIGH + ids
        place = torch.searchsorted(key, sought).clamp_max(count - 1)
        pairs = order[place]
        present = (ids >= 0) & (key[place] == sought)
        chosen = at.new_zeros(count).index_add_(0, pairs.view(-1), present.view(-1).long())
        # An empty slot, in place of those that are chosen.
        return pairs, present, support._replace(ids=support.ids.masked_fill(chosen > 0, -1))


def normalizer_of(shard: WholeVocabulary, partials: SoftmaxState) -> Normalizer:
    """The normalizer over the whole vocabulary, from the state of a rank's slice."""
    return finish(shard.merge(partials), 1, NOTHING)[1]


def vjp_inputs(key: object, measured: Measured) -> list[Tensor]:
    """[n] each: the inputs of the gradient of a teacher or of candidates."""
    return [vector.contiguous() for vector in measured.stats.extras[key, "vjp"].unbind(1)]


class SquaredSum(NamedTuple):
    """sum p^2 [n]: exp of the log-sum-exp at half the temperature less twice the log-sum-exp."""

    transform: Transform  # at half the temperature
    shard: WholeVocabulary  # this rank's slice
    key = COLLISION
    own_logits = False

    def slopes(self, extras: ByStatistic) -> None:
        """None: sum p^2 has no gradient."""

    def take(self, index: Tensor) -> SquaredSum:
        """The measurement of some of the tokens."""
        return self._replace(transform=self.transform.rows(index))

    def add(
        self, rows: Rows, logits: LogitTile | Pairs, state: SoftmaxState | None
    ) -> SoftmaxState:
        """The state after more of the logits of some tokens."""
        return logits.state(self.transform.rows(rows), state)

    def value(self, rows: Rows, state: SoftmaxState, normalizer: Normalizer) -> ByStatistic:
        """[n] sum p^2, after the last tile."""
        twice = normalizer_of(self.shard, state)
        peak, log_sum = normalizer
        return {self.key: ((twice.max_logit - 2 * peak) + (twice.log_sum - 2 * log_sum)).exp()}


class Candidates(NamedTuple):
    """Log-probs of K columns of each token, and of all others, in a softmax of tiles' logits."""

    key: object  # of the [n, K + 1] log-probs and of their slopes; the rest's are the last
    ids: Tensor  # [T, K] columns of the whole vocabulary; those of empty slots are below 0
    transform: Transform  # of the softmax
    # It is the head's own, and its share of c_prob is in the coefficients. Log-probs of another one
    # are in float64, so that slopes that cancel keep their digits.
    heads_own: bool
    tail: bool  # the rest is asked for; else its log-prob stays 0
    shard: WholeVocabulary  # this rank's slice
    own_logits = False

    def slopes(self, extras: ByStatistic) -> Tensor | None:
        """[n, K + 1] slopes of `value`, None without any."""
        return extras.get(self.key)

    def take(self, index: Tensor) -> Candidates:
        """The measurement of some of the tokens."""
        return self._replace(ids=self.ids[index], transform=self.transform.rows(index))

    def columns(self, rows: Rows, columns: slice) -> Tensor:
        """[n, K] as columns of a tile; empty slots and other tiles' columns lie outside of it."""
        return self.ids[rows].long() - (self.shard.first + (columns.start or 0))

    def add(
        self, rows: Rows, logits: LogitTile | Pairs, state: CandidateState | None
    ) -> CandidateState:
        """z of the columns, 0 for columns outside of the tiles so far, and the state of the other
        columns."""
        ids = self.ids[rows].long()
        transform = self.transform.rows(rows)
        z = logits.at(ids, transform)
        others = None
        if state is not None:
            z = state[0].add_(z)
            others = state[1]
        if self.tail:
            others = logits.state(transform, others, ids)
        return z, others

    def value(self, rows: Rows, state: CandidateState, normalizer: Normalizer) -> ByStatistic:
        """[n, K + 1] log-probs after the last tile, and the rest's normalizer; `normalizer` is that
        of the head's softmax."""
        z, others = state
        peak, log_sum = normalizer
        of_tail = normalizer
        z = self.shard.sum(z).to(peak.dtype if self.heads_own else torch.float64)
        tail = torch.zeros_like(z[:, 0])
        if others is not None:
            of_tail = normalizer_of(self.shard, others)
            top, top_sum = (t.to(z.dtype) for t in of_tail)
            tail = (top - peak) + (top_sum - log_sum) if self.heads_own else top + top_sum
        if self.heads_own:
            z = (z - peak.unsqueeze(1)) - log_sum.unsqueeze(1)
        z = z.masked_fill_(self.ids[rows] < 0, 0 if self.heads_own else -torch.inf)
        logps = torch.cat([z, tail.unsqueeze(1)], 1)
        logps = logps if self.heads_own else logps.log_softmax(1)
        return {self.key: logps, (self.key, "vjp"): torch.stack(of_tail, 1)}

    def add_to_pairs_(
        self, values: Tensor, rows: slice, logits: Pairs, measured: Measured, slopes: Tensor
    ) -> None:
        """Add the part of slopes [n, K + 1] to values [P], the rest of dL/draw of pairs."""
        transform = self.transform.rows(rows)
        pairs, present, others = logits.find(self.ids[rows].long())
        chosen = transform.vjp_(slopes[:, :-1].to(values.dtype, copy=True), logits.raw[pairs])
        values[pairs[present]] += chosen[present]
        if self.tail:
            c = SoftmaxCoefficients(prob=slopes[:, -1])
            of_tail = Normalizer(*vjp_inputs(self.key, measured))
            backward = Backward(logits.nowhere, others.first, transform, of_tail, c, None)
            values += logits.acts.support_gradient(logits.raw, others, backward)

    def beside_logp(
        self, measured: Measured, slopes: Tensor, targets: Tensor
    ) -> tuple[Tensor, Support]:
        """[P] dL/draw of pairs of all tokens and columns, beside the multiple of dlogp/draw that
        has the same c_prob: the slopes', and less their sum at the target. Not for the rest."""
        stats = measured.stats
        peak, log_sum = measured.normalizer
        assert stats.logp is not None
        slopes = slopes[:, :-1]
        slopes = torch.cat([slopes, -slopes.sum(1, keepdim=True)], 1)
        logps = torch.cat([stats.extras[self.key][:, :-1], stats.logp.unsqueeze(1)], 1)
        z = logps + (peak + log_sum).unsqueeze(1)
        values = self.transform.vjp_(slopes.clone(), z, is_z=True)
        values = torch.where(slopes == 0, 0, values).reshape(-1)
        ids = torch.cat([self.ids.long(), targets.unsqueeze(1)], 1)
        ends = torch.arange(0, ids.numel() + 1, ids.shape[1], device=ids.device)
        return values, Support(ids.reshape(-1), ends, 0, self.shard.vocabulary)

    def vjp(self, rows: Rows, columns: slice, measured: Measured, slopes: Tensor) -> StoredTopk:
        """The vjp's record for slopes [n, K + 1] of `value` on a tile."""
        if not self.heads_own:  # slopes of log-probs to those of logits
            slopes = slopes - measured.stats.extras[self.key].exp() * slopes.sum(1, keepdim=True)
        slopes = slopes.to(measured.normalizer.max_logit.dtype)
        return StoredTopk(
            self.columns(rows, columns),
            Distribution(self.transform.rows(rows), Normalizer(*vjp_inputs(self.key, measured))),
            slopes[:, :-1].contiguous(),
            slopes[:, -1].contiguous(),
        )
