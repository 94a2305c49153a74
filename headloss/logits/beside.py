"""What is measured of the tiles beside the statistics, in the same sweep over them.

T tokens, n of a step, v columns of a tile, K chosen columns, P pairs of a support.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.interface import Backward, Forward, Kernels, Measured, Support
from ..kernels.pair import Distribution, StoredTopk
from ..kernels.transform import Transform
from ..statistics.softmax import COLLISION, Normalizer, SoftmaxCoefficients, SoftmaxState, finish
from .rows import ALL, Rows

NOTHING: frozenset[str] = frozenset()
HIGH = 1 << 32  # more than any column, so that token and column fit in one number


class SquaredSum:
    """sum p^2 [n]: exp of the log-sum-exp at half the temperature less twice that at the own."""

    key, more = COLLISION, ()

    def __init__(self, transform: Transform, acts: Kernels, slices: Any) -> None:
        self.transform = replace(transform, temperature=transform.temperature / 2)
        self.acts, self.slices = acts, slices
        self.partials: SoftmaxState | None = None

    def take(self, index: Tensor) -> SquaredSum:
        """Of some of the tokens, before they are measured."""
        found = copy(self)
        found.transform = self.transform.rows(index)
        return found

    def put(self, index: Tensor, taken: SquaredSum) -> None:
        """Nothing is kept."""

    def add(self, rows: Rows, columns: slice, raw: Tensor) -> None:
        """Take one of the tiles of some tokens."""
        forward = Forward(None, 0, self.transform.rows(rows), NOTHING)
        self.partials = self.acts.partials(raw, forward, self.partials)

    def add_pairs(self, rows: slice, raw: Tensor, support: Support) -> None:
        """Take the pairs [P] of some tokens and the columns of their support."""
        nowhere = torch.full((len(support.offsets) - 1,), -1, device=raw.device)
        forward = Forward(nowhere, 0, self.transform.rows(rows), NOTHING)
        self.partials = self.acts.support_partials(raw, support, forward)

    def found(self, rows: Rows, normalizer: Normalizer) -> Tensor:
        """[n], once all tiles were added."""
        assert self.partials is not None
        _, twice = finish(self.slices.merge(self.partials), 1, NOTHING)
        self.partials = None
        peak, log_sum = normalizer
        return ((twice.max_logit - 2 * peak) + (twice.log_sum - 2 * log_sum)).exp()


@dataclass(eq=False, kw_only=True)
class Candidates:
    """Log-probs of K columns of each token, and of all others, in a softmax of tiles' logits."""

    key: object  # of the [n, K + 1] log-probs and of their slopes; the rest's are the last
    ids: Tensor  # [N, K] columns of the whole vocabulary; those of empty slots are below 0
    index: Tensor | None  # [T] the row of each token in `ids`; None: all in order
    transform: Transform  # of the softmax
    # It is the head's own, and its share of c_prob is in the coefficients. Log-probs of another one
    # are in float64, so that slopes that cancel keep their digits.
    heads_own: bool
    tail: bool  # whether the rest is asked for; else its log-prob stays 0
    rest: Tensor  # [2, T] the tail's normalizer, in the dtype of the tiles' statistics
    acts: Kernels
    slices: Any  # of the vocabulary on the ranks of a group
    logits: Tensor | None = None  # of the tokens whose tiles are added, 0 elsewhere
    partials: SoftmaxState | None = None

    @property
    def more(self) -> tuple[int, ...]:
        """The shape of what is measured of a token."""
        return (self.ids.shape[-1] + 1,)

    def take(self, index: Tensor) -> Candidates:
        """Of some of the tokens, after they were measured."""
        places = index if self.index is None else self.index[index]
        transform = self.transform.rows(index)
        return replace(self, index=places, rest=self.rest[:, index], transform=transform)

    def put(self, index: Tensor, taken: Candidates) -> None:
        """Set what was measured of some of the tokens."""
        self.rest[:, index] = taken.rest

    def _ids(self, rows: Rows) -> Tensor:
        return self.ids[rows if self.index is None else self.index[rows]].long()

    def columns(self, rows: Rows, columns: slice) -> Tensor:
        """[n, K] as columns of a tile; empty slots and other tiles' columns lie outside of it."""
        ids = self._ids(rows)
        return torch.where(ids < 0, -1, ids - (self.slices.first + (columns.start or 0)))

    def add(self, rows: Rows, columns: slice, raw: Tensor) -> None:
        """Take one of the tiles of some tokens."""
        column, transform = self.columns(rows, columns), self.transform.rows(rows)
        here = (column >= 0) & (column < raw.shape[1])
        z = torch.where(here, transform(raw.gather(1, torch.where(here, column, 0))), 0)
        self.logits = z if self.logits is None else self.logits.add_(z)
        if self.tail:
            forward = Forward(None, 0, transform, NOTHING)
            self.partials = self.acts.partials(raw, forward, self.partials, column)

    def add_product(self, rows: Rows, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Take x [n, H] @ weight.T [H, V] + bias [V] without storing it; not for the rest."""
        columns, transform = self.columns(rows, ALL), replace(self.transform.rows(rows), bias=bias)
        self.logits = self.acts.chosen_logits(x, weight, columns, transform)

    def add_pairs(self, rows: slice, raw: Tensor, support: Support) -> None:
        """Take the pairs [P] of some tokens and the columns of their support; a candidate that is
        none of these has a logit of -inf."""
        pairs, here, rest = self._in_support(rows, support)
        column, transform = self._ids(rows) - support.first, self.transform.rows(rows)
        z = torch.where(here, transform(raw[pairs]), -torch.inf)
        self.logits = torch.where((column >= 0) & (column < support.size), z, 0)
        if self.tail:
            forward = Forward(torch.full_like(pairs[:, 0], -1), 0, transform, NOTHING)
            self.partials = self.acts.support_partials(raw, rest, forward)

    def _in_support(self, rows: slice, support: Support) -> tuple[Tensor, Tensor, Support]:
        """[n, K] the pair of each candidate, and whether there is one; and the other pairs."""
        n, count = len(support.offsets) - 1, len(support.ids)
        at = torch.arange(count, device=support.ids.device)
        token = torch.searchsorted(support.offsets, at, right=True) - 1
        inside = (support.ids >= support.first) & (support.ids < support.first + support.size)
        key = torch.where(inside, token * HIGH + support.ids, -1 - at)
        key, order = torch.cat([key, key.new_full((1,), -1 - count)]).sort()
        ids = self._ids(rows)
        asked = torch.arange(n, device=at.device).unsqueeze(1) * HIGH + ids
        place = torch.searchsorted(key, asked).clamp_max(count)
        here = (ids >= 0) & (key[place] == asked)
        pairs = torch.where(here, order[place], 0)
        # An empty slot, in place of those that are chosen.
        others = torch.cat([support.ids, at.new_zeros(1)])
        others[torch.where(here, pairs, count)] = -1
        return pairs, here, support._replace(ids=others[:-1])

    def add_to_pairs_(
        self, values: Tensor, raw: Tensor, rows: slice, support: Support, slopes: Tensor
    ) -> None:
        """For pairs what `gradient` is for a tile: the part of slopes [n, K + 1] is added to
        values [P], the rest of dL/draw."""
        transform = self.transform.rows(rows)
        pairs, here, rest = self._in_support(rows, support)
        own = slopes[:, :-1].to(values.dtype, copy=True)
        own = transform.vjp_(own, raw[pairs])
        values[pairs[here]] += own[here]
        if self.tail:
            nowhere, c = torch.full_like(pairs[:, 0], -1), SoftmaxCoefficients(prob=slopes[:, -1])
            tail = Normalizer(*self.rest[:, rows])
            backward = Backward(nowhere, support.first, transform, tail, c, None)
            values += self.acts.support_gradient(raw, rest, backward)

    def found(self, rows: Rows, normalizer: Normalizer) -> Tensor:
        """[n, K + 1], once all tiles were added; `normalizer` is that of the head's softmax."""
        assert self.logits is not None
        dtype = self.rest.dtype if self.heads_own else torch.float64
        z = self.slices.sum(self.logits).to(dtype)
        (peak, log_sum), tail = normalizer, torch.zeros_like(z[:, 0])
        if self.tail:
            assert self.partials is not None
            _, rest = finish(self.slices.merge(self.partials), 1, NOTHING)
            self.rest[0, rows], self.rest[1, rows] = rest
            own, own_sum = (t.to(dtype) for t in rest)
            tail = (own - peak) + (own_sum - log_sum) if self.heads_own else own + own_sum
        self.logits = self.partials = None
        empty, tail = self._ids(rows) < 0, tail.unsqueeze(1)
        if not self.heads_own:
            return torch.cat([z.masked_fill(empty, -torch.inf), tail], 1).log_softmax(1)
        log_p = ((z - peak.unsqueeze(1)) - log_sum.unsqueeze(1)).masked_fill_(empty, 0)
        return torch.cat([log_p, tail], 1)

    def beside_logp(
        self, measured: Measured, slopes: Tensor, targets: Tensor, vocabulary: int
    ) -> tuple[Tensor, Support]:
        """[P] dL/draw of pairs of all tokens and columns, beside the multiple of dlogp/draw that
        has the same c_prob: the slopes', and less their sum at the target. Not for the rest."""
        stats, (peak, log_sum) = measured.stats, measured.normalizer
        assert stats.logp is not None
        slopes = slopes[:, :-1]
        slopes = torch.cat([slopes, -slopes.sum(1, keepdim=True)], 1)
        logps = torch.cat([stats.extras[self.key][:, :-1], stats.logp.unsqueeze(1)], 1)
        z = logps + (peak + log_sum).unsqueeze(1)
        values = self.transform.vjp_(slopes.clone(), z, is_z=True)
        values = torch.where(slopes == 0, 0, values).reshape(-1)
        ids = torch.cat([self._ids(ALL), targets.unsqueeze(1)], 1)
        ends = torch.arange(0, ids.numel() + 1, ids.shape[1], device=ids.device)
        return values, Support(ids.reshape(-1), ends, 0, vocabulary)

    def gradient(
        self, raw: Tensor, rows: Rows, columns: slice, measured: Measured, gradient: Tensor,
        extra: Tensor | None = None, others: Backward | None = None
    ) -> Tensor:
        """The candidates' part of d/draw of a tile, from slopes [n, K + 1] of `found`; see
        `DenseTeacher.gradient`."""
        if not self.heads_own:  # slopes of log-probs to those of logits
            log_p = measured.stats.extras[self.key]
            gradient = gradient - log_p.exp() * gradient.sum(1, keepdim=True)
        gradient = gradient.to(self.rest.dtype)
        tail = Normalizer(*self.rest[:, rows]) if self.tail else measured.normalizer
        outcomes = StoredTopk(
            self.columns(rows, columns),
            Distribution(self.transform.rows(rows), tail),
            gradient[:, :-1].contiguous(),
            gradient[:, -1].contiguous(),
        )
        return self.acts.part_gradient_(raw, outcomes, extra, others)
