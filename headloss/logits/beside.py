"""Quantities beyond the softmax statistics, measured on tiles of logits in the same pass.
`Statistics.extras` holds each measurement by its key, and the inputs of its gradient by (key,
"vjp").

T tokens, n tokens of a step, v columns of a tile, K chosen columns, P pairs (token, allowed id).
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
# Logits z [n, K] of K candidates, and the online-softmax state of all other columns; None in place
# of the state if the log-prob of all other columns together is not needed.
CandidateState = tuple[Tensor, SoftmaxState | None]


class LogitTile(NamedTuple):
    """Logits of some tokens in a slice of the vocabulary."""

    raw: Tensor  # Shape [n, v].
    first: int  # Index of the tile's first column in the whole vocabulary.
    acts: Kernels

    def at(self, ids: Tensor, transform: Transform) -> Tensor:
        """Return the logits z [n, K] of the columns `ids`, with 0 for a column outside of this
        tile."""
        inside = (ids >= self.first) & (ids < self.first + self.raw.shape[1])
        columns = torch.where(inside, ids - self.first, 0)
        return torch.where(inside, transform(self.raw.gather(1, columns)), 0)

    def state(
        self, transform: Transform, onto: SoftmaxState | None = None, without: Tensor | None = None
    ) -> SoftmaxState:
        """Return the online-softmax state of this tile's columns, merged with the state `onto` of
        earlier tiles; for each token, the K columns in `without` [n, K] are left out."""
        if without is not None:
            without = without - self.first
        return self.acts.partials(self.raw, Forward(None, 0, transform, NOTHING), onto, without)


class Pairs(NamedTuple):
    """Logits of some tokens, each in the columns of its allowed ids (`support_ids`) alone."""

    raw: Tensor  # Shape [P].
    support: Support
    acts: Kernels

    def at(self, ids: Tensor, transform: Transform) -> Tensor:
        """Return the logits z [n, K] of the columns `ids`: 0 for a column outside of this
        vocabulary slice, -inf for a column in the slice that is not among the token's allowed
        ids."""
        places, inside, _ = self.find(ids)
        z = transform(self.raw[places])
        column = ids - self.support.first
        in_window = (column >= 0) & (column < self.support.size)
        return torch.where(in_window, torch.where(inside, z, -torch.inf), 0)

    def state(
        self, transform: Transform, onto: SoftmaxState | None = None, without: Tensor | None = None
    ) -> SoftmaxState:
        """Return the online-softmax state of each token's allowed ids, without the K ids in
        `without` [n, K]. The argument `onto` (the state of earlier tiles) is unused, because one
        tile holds all allowed ids of a token."""
        support = self.support if without is None else self.find(without)[2]
        forward = Forward(self.nowhere, 0, transform, NOTHING)
        return self.acts.support_partials(self.raw, support, forward)

    @property
    def nowhere(self) -> Tensor:
        """Return target ids [n] of -1, which match no column."""
        return torch.full((len(self.support.offsets) - 1,), -1, device=self.raw.device)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor, Support]:
        """Look up `ids` [n, K] among the tokens' allowed ids. Return three things: the indices [n,
        K], in the vector `raw`, of the logits of `ids`; a mask [n, K], False for an id that the
        token does not allow; and a `Support` with the allowed ids that are not in `ids`."""
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
        # In the returned `Support`, replace each id found in `ids` by -1, which marks an unused
        # entry.
        return pairs, present, support._replace(ids=support.ids.masked_fill(chosen > 0, -1))


def normalizer_of(shard: WholeVocabulary, partials: SoftmaxState) -> Normalizer:
    """Return the normalizer over the whole vocabulary, from the online-softmax state of a rank's
    vocabulary slice."""
    return finish(shard.merge(partials), 1, NOTHING)[1]


def vjp_inputs(key: object, measured: Measured) -> list[Tensor]:
    """Return the columns [n] of the matrix `measured.stats.extras[key, "vjp"]`, which the forward
    pass stored for the gradient of the measurement `key` (such as a divergence)."""
    return [vector.contiguous() for vector in measured.stats.extras[key, "vjp"].unbind(1)]


class SquaredSum(NamedTuple):
    """Measurement of sum p^2 [n], as exp(log-sum-exp at half the temperature - 2 log-sum-exp)."""

    # The head's transform of raw logits (scale, soft cap, temperature) with the temperature halved,
    # which doubles the logits: the square of exp(z) is exp(2 z).
    transform: Transform
    shard: WholeVocabulary  # This rank's slice of the vocabulary.
    key = COLLISION
    own_logits = False

    def slopes(self, extras: ByStatistic) -> None:
        """Return None: sum p^2 has no gradient."""

    def take(self, index: Tensor) -> SquaredSum:
        """Return a copy of this `SquaredSum` for the tokens `index` only."""
        return self._replace(transform=self.transform.rows(index))

    def add(
        self, rows: Rows, logits: LogitTile | Pairs, state: SoftmaxState | None
    ) -> SoftmaxState:
        """Return the online-softmax state `state` merged with one tile's logits of the tokens
        `rows`."""
        return logits.state(self.transform.rows(rows), state)

    def value(self, rows: Rows, state: SoftmaxState, normalizer: Normalizer) -> ByStatistic:
        """Return sum p^2 [n] from the online-softmax state after the last tile."""
        twice = normalizer_of(self.shard, state)
        peak, log_sum = normalizer
        return {self.key: ((twice.max_logit - 2 * peak) + (twice.log_sum - 2 * log_sum)).exp()}


class Candidates(NamedTuple):
    """Measurement of K + 1 log-probs per token: of the K vocabulary columns `ids`, and of all other
    columns together (the tail). The softmax is computed from tiles of logits."""

    # Key of the log-probs [n, K + 1] (of K candidates, then of all other columns together) in the
    # dict `Statistics.extras`. The same `key` in the dict `Coefficients.extras` belongs to the
    # derivatives of the loss with respect to the log-probs [n, K + 1].
    key: object
    ids: Tensor  # Column ids [T, K] in the whole vocabulary; unused entries are below 0.
    transform: Transform  # Transform from raw logits to the logits z of the softmax.
    # True if the softmax is the head's own, not one at a teacher's temperature. For the head's own
    # softmax, the gradient coefficient `c_prob` already includes minus the sum of the loss's
    # derivatives with respect to the log-probs of the K candidates and of the tail. Log-probs at a
    # teacher's temperature are in float64, so that a small difference of large derivatives keeps
    # its digits.
    heads_own: bool
    # True if the log-prob of the tail (all columns but the candidates) is computed; if False, 0 is
    # returned for the tail.
    tail: bool
    shard: WholeVocabulary  # This rank's slice of the vocabulary.
    own_logits = False

    def slopes(self, extras: ByStatistic) -> Tensor | None:
        """Return the loss's derivatives [n, K + 1] with respect to the log-probs, or None if the
        loss has no such derivatives."""
        return extras.get(self.key)

    def take(self, index: Tensor) -> Candidates:
        """Return a copy of these `Candidates` for the tokens `index` only."""
        return self._replace(ids=self.ids[index], transform=self.transform.rows(index))

    def columns(self, rows: Rows, columns: slice) -> Tensor:
        """Return the candidates' column indices [n, K] within a tile. For an unused entry of `ids`,
        and for a column outside of the tile, the returned index lies outside of the tile."""
        return self.ids[rows].long() - (self.shard.first + (columns.start or 0))

    def add(
        self, rows: Rows, logits: LogitTile | Pairs, state: CandidateState | None
    ) -> CandidateState:
        """Return the candidates' logits z [n, K], with 0 for columns of tiles not yet added, and
        the online-softmax state of all other columns."""
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
        """Return the log-probs [n, K + 1] of candidates and tail (all other columns), and the
        normalizer of the tail, from the state after the last tile. The argument `normalizer` holds
        maximum and log-sum of the softmax at the head's temperature."""
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
        """Add the candidates' part of the gradient to `values` [P], the gradient of the raw logits
        of the pairs (token, allowed id). `slopes` [n, K + 1] are the loss's derivatives with
        respect to the log-probs."""
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
        """Return a sparse part of the gradient of the raw logits: values [P], one per pair (token,
        column). The value of a pair (token, candidate's column) is the derivative of the loss with
        respect to the candidate's log-prob; the value of a pair (token, target) is minus the sum of
        the candidates' derivatives. The full gradient of the raw logits is the returned sparse part
        minus c_prob (the gradient coefficient of the softmax) times the gradient of the target's
        log-prob. A derivative of the loss with respect to the log-prob of the tail (all columns but
        the candidates) is ignored."""
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
        """Return the inputs of the kernel that computes the gradient on a tile. `slopes` [n, K + 1]
        are the loss's derivatives with respect to the log-probs."""
        # Turn derivatives with respect to log-probs into derivatives with respect to logits.
        if not self.heads_own:
            slopes = slopes - measured.stats.extras[self.key].exp() * slopes.sum(1, keepdim=True)
        slopes = slopes.to(measured.normalizer.max_logit.dtype)
        return StoredTopk(
            self.columns(rows, columns),
            Distribution(self.transform.rows(rows), Normalizer(*vjp_inputs(self.key, measured))),
            slopes[:, :-1].contiguous(),
            slopes[:, -1].contiguous(),
        )
