"""The same call on many ranks, each with a slice of the vocabulary.

T scored tokens, n of a chunk, H hidden width, W ranks of a group. A schedule asks its slices of the
vocabulary to merge statistics and to sum hidden gradients. `WholeVocabulary` is that on one rank,
`VocabShard` a slice. Every rank of a group runs the same plan on the same tokens, so the number and
the shapes of collectives are the same on all of them (law 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, distributed
from torch.nn.functional import dropout, pad

from ..batch.segments import Linear
from ..collectives import gather, together
from ..head.products import Fixed
from ..kernels.interface import Kernels, Measured
from ..statistics.softmax import SoftmaxState, finish, merge_all

if TYPE_CHECKING:
    from ..head.head import Head


class WholeVocabulary:
    """The whole vocabulary on this rank."""

    group: distributed.ProcessGroup | None = None
    first = 0  # column of the whole vocabulary at which this rank's slice starts
    size: int | None = None  # columns of this rank's slice, None: all

    def merge(self, partials: SoftmaxState) -> SoftmaxState:
        """From partials of this rank's slice to those of the whole vocabulary."""
        return partials

    def measured(
        self, kernels: Kernels, partials: SoftmaxState, needs: frozenset[str], vocabulary: int
    ) -> Measured:
        """The statistics that follow from partials of this rank's slice."""
        return Measured(*finish(partials, vocabulary, needs))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the slices of the vocabulary."""
        return values

    def topk(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best k of each slice's best, [n, ..] to [n, k], best first."""
        return values, ids

    def factors(
        self, head: Head, hidden: Tensor, fixed: Fixed | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """`head.factors` of packed hidden states; gradients of adapters come out complete."""
        return head.factors(hidden, self.dropout, fixed)

    def dropout(self, hidden: Tensor, p: float) -> Tensor:
        """Of hidden states that every rank has."""
        return dropout(hidden, p)


WHOLE = WholeVocabulary()


class VocabShard(WholeVocabulary):
    """A slice of the vocabulary; the ranks of `group` hold the others, in rank order, and all of
    them the hidden states of the packed tokens.

    Args:
        sizes: scored columns of each rank.
        tokens: rows of hidden states that each rank was given (sequence parallelism); empty: every
            rank was given all.
    """

    def __init__(
        self, group: distributed.ProcessGroup, sizes: Sequence[int], tokens: Sequence[int] = ()
    ) -> None:
        rank = distributed.get_rank(group)
        self.group: distributed.ProcessGroup = group
        self.tokens = tokens
        self.first, self.size = sum(sizes[:rank]), sizes[rank]

    def merge(self, partials: SoftmaxState) -> SoftmaxState:
        """One packed all-gather; the same operations in rank order give all ranks the same bits."""
        slices = zip(partials.tensors(), self._gathered(partials).unbind(1), strict=True)
        return merge_all(SoftmaxState(**dict(slices)))

    def measured(
        self, kernels: Kernels, partials: SoftmaxState, needs: frozenset[str], vocabulary: int
    ) -> Measured:
        return kernels.finish(self._gathered(partials), needs, vocabulary)

    def _gathered(self, partials: SoftmaxState) -> Tensor:
        return self.gather(torch.stack([*partials.tensors().values()]))

    def gather(self, values: Tensor) -> Tensor:
        """[W, ..] of every rank's [..], in rank order."""
        return gather(values, self.group)

    def sum(self, values: Tensor) -> Tensor:
        return self.gather(values).sum(0)

    def topk(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        missing = (0, k - values.shape[1])  # of a slice of fewer columns than k
        values, ids = (pad(t, missing, value=v) for t, v in ((values, -torch.inf), (ids, -1)))
        values, ids = (self.gather(t).transpose(0, 1).flatten(1) for t in (values, ids))
        values, order = values.topk(k, dim=1)
        return values, ids.gather(1, order)

    def gathered(self, hidden: Tensor) -> Tensor:
        """Hidden states as the call takes them: this rank's, or those [N, H] of all ranks, in rank
        order. Each then takes its own rows of the gradient, which is the same on all."""
        if not self.tokens:
            return hidden
        start = sum(self.tokens[: distributed.get_rank(self.group)])
        rows = slice(start, start + len(hidden))

        def gathered(mine: Tensor) -> Tensor:
            of_ranks = gather(pad(mine, (0, 0, 0, max(self.tokens) - len(mine))), self.group)
            return torch.cat([part[:n] for part, n in zip(of_ranks, self.tokens, strict=True)])

        # A view of the gradient would keep the others' rows alive.
        return cast(Tensor, Linear.apply(gathered, lambda gradient: gradient[rows].clone(), hidden))

    def dropout(self, hidden: Tensor, p: float) -> Tensor:
        """The first rank's mask, on all ranks."""
        mask = dropout(hidden.new_ones(hidden.shape), p) != 0
        what, options = "an adapter's dropout", {"group": self.group, "group_src": 0}
        together(what, self.group, distributed.broadcast, mask, **options)
        return hidden * mask / (1 - p)
