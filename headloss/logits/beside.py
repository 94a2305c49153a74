"""Measurements of logit tiles in addition to the statistics, in one pass. `Statistics.extras` holds
each measurement by its key, and the inputs of its gradient by (key, "vjp").

T tokens, n tokens of a step, v columns of a tile, K chosen columns, P pairs of a support.
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
# Pair: z of the chosen columns, and the online-softmax state of all other columns.
CandidateState = tuple[Tensor, SoftmaxState | None]


class LogitTile(NamedTuple):
    """Logits of some tokens in a slab (a slice of vocabulary columns)."""

    raw: Tensor  # Shape [n, v].
    first: int  # First column, in the whole vocabulary.
    acts: Kernels

    def at(self, ids: Tensor, transform: Transform) -> Tensor:
        """Return z [n, K] of the columns `ids`, 0 for columns outside of the tile."""
        inside = (ids >= self.first) & (ids < self.first + self.raw.shape[1])
        columns = torch.where(inside, ids - self.first, 0)
        return torch.where(inside, transform(self.raw.gather(1, columns)), 0)

    def state(
        self, transform: Transform, onto: SoftmaxState | None = None, without: Tensor | None = None
    ) -> SoftmaxState:
        """Return the online-softmax state of all columns except `without` [n, K], merged with the
        online-softmax state `onto`."""
        if without is not None:
            without = without - self.first
        return self.acts.partials(self.raw, Forward(None, 0, transform, NOTHING), onto, without)


class Pairs(NamedTuple):
    """Logits of some tokens in the columns of their support alone."""

    raw: Tensor  # Shape [P].
    support: Support
    acts: Kernels

    def at(self, ids: Tensor, transform: Transform) -> Tensor:
        """Return z [n, K] of the columns `ids`: 0 for a column outside of this vocabulary slice,
        -inf for a column in the slice but outside of the token's support."""
        places, inside, _ = self.find(ids)
        z = transform(self.raw[places])
        column = ids - self.support.first
        in_window = (column >= 0) & (column < self.support.size)
        return torch.where(in_window, torch.where(inside, z, -torch.inf), 0)

    def state(
        self, transform: Transform, onto: SoftmaxState | None = None, without: Tensor | None = None
    ) -> SoftmaxState:
        """Return the online-softmax state of all support columns except `without`; a support has
        only one tile."""
        support = self.support if without is None else self.find(without)[2]
        forward = Forward(self.nowhere, 0, transform, NOTHING)
        return self.acts.support_partials(self.raw, support, forward)

    @property
    def nowhere(self) -> Tensor:
        """Return targets [n] that lie in no column."""
        return torch.full((len(self.support.offsets) - 1,), -1, device=self.raw.device)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor, Support]:
        """Return the index [n, K] of the pair (token, column) of each id, the mask [n, K] of ids
        that have such a pair, and the support of the remaining pairs."""
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
        # The chosen pairs become empty slots.
        return pairs, present, support._replace(ids=support.ids.masked_fill(chosen > 0, -1))


def normalizer_of(shard: WholeVocabulary, partials: SoftmaxState) -> Normalizer:
    """Return the normalizer over the whole vocabulary, from the online-softmax state of a rank's
    vocabulary slice."""
    return finish(shard.merge(partials), 1, NOTHING)[1]


def vjp_inputs(key: object, measured: Measured) -> list[Tensor]:
    """Return the inputs of the gradient of a teacher or of candidates, [n] each."""
    return [vector.contiguous() for vector in measured.stats.extras[key, "vjp"].unbind(1)]


class SquaredSum(NamedTuple):
    """Measurement of sum p^2 [n], as exp(log-sum-exp at half the temperature - 2 log-sum-exp)."""

    transform: Transform  # The head's transform at half the temperature.
    shard: WholeVocabulary  # This rank's slice.
    key = COLLISION
    own_logits = False

    def slopes(self, extras: ByStatistic) -> None:
        """Return None: sum p^2 has no gradient."""

    def take(self, index: Tensor) -> SquaredSum:
        """Return the measurement for the tokens `index` alone."""
        return self._replace(transform=self.transform.rows(index))

    def add(
        self, rows: Rows, logits: LogitTile | Pairs, state: SoftmaxState | None
    ) -> SoftmaxState:
        """Return the online-softmax state after adding a tile's logits of the tokens `rows`."""
        return logits.state(self.transform.rows(rows), state)

    def value(self, rows: Rows, state: SoftmaxState, normalizer: Normalizer) -> ByStatistic:
        """Return sum p^2 [n], after the last tile."""
        twice = normalizer_of(self.shard, state)
        peak, log_sum = normalizer
        return {self.key: ((twice.max_logit - 2 * peak) + (twice.log_sum - 2 * log_sum)).exp()}


class Candidates(NamedTuple):
    """Measurement of the log-probs of K columns of each token, and of the tail (all other columns),
    in a softmax of tiles' logits."""

    key: object  # Key of log-probs and slopes [n, K + 1], with the tail last.
    ids: Tensor  # Columns [T, K] of the whole vocabulary; empty slots are below 0.
    transform: Transform  # Transform of the softmax.
    # True for the head's softmax, whose share of c_prob is in the coefficients. Log-probs of
    # another softmax are in float64, so that slopes that cancel keep their digits.
    heads_own: bool
    tail: bool  # True if the tail is wanted; else the tail's log-prob stays 0.
    shard: WholeVocabulary  # This rank's slice.
    own_logits = False

    def slopes(self, extras: ByStatistic) -> Tensor | None:
        """Return the slopes [n, K + 1] of `value`, or None without slopes."""
        return extras.get(self.key)

    def take(self, index: Tensor) -> Candidates:
        """Return the measurement for the tokens `index` alone."""
        return self._replace(ids=self.ids[index], transform=self.transform.rows(index))

    def columns(self, rows: Rows, columns: slice) -> Tensor:
        """Return the columns' indices [n, K] within a tile; empty slots and columns of other tiles
        lie outside."""
        return self.ids[rows].long() - (self.shard.first + (columns.start or 0))

    def add(
        self, rows: Rows, logits: LogitTile | Pairs, state: CandidateState | None
    ) -> CandidateState:
        """Return z of the columns, 0 for columns outside of the tiles so far, and the
        online-softmax state of all other columns."""
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
        """Return log-probs [n, K + 1] after the last tile, and the tail's normalizer. `normalizer`
        is that of the head's softmax."""
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
        """Add the candidates' part of dL/draw, from slopes [n, K + 1], to dL/draw of pairs, values
        [P]."""
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
        """Return dL/draw of pairs [P] in addition to the multiple of dlogp/draw with the same
        c_prob: each slope at its candidate, and minus the slopes' sum at the target. The tail's
        slope is left out."""
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
        """Return the inputs of the kernel that computes the gradient on a tile, from `value`'s
        slopes [n, K + 1]."""
        if not self.heads_own:  # Turn slopes of log-probs into slopes of logits.
            slopes = slopes - measured.stats.extras[self.key].exp() * slopes.sum(1, keepdim=True)
        slopes = slopes.to(measured.normalizer.max_logit.dtype)
        return StoredTopk(
            self.columns(rows, columns),
            Distribution(self.transform.rows(rows), Normalizer(*vjp_inputs(self.key, measured))),
            slopes[:, :-1].contiguous(),
            slopes[:, -1].contiguous(),
        )
