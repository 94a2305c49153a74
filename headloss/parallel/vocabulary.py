"""Vocabulary shards: one call on many ranks, each with a slice of the vocabulary.

n tokens of a chunk, H hidden width, V vocabulary, W ranks of a group. The schedules merge
statistics and sum hidden gradients over the ranks through a `WholeVocabulary` or a `VocabShard`.
Every rank of a group runs the same plan on the same tokens, so that all ranks run equally many
collectives, with equal shapes.
"""

from __future__ import annotations

import itertools
from typing import cast

import torch
from torch import Tensor, distributed
from torch.nn.functional import dropout, pad

from ..batch.batch import Batch
from ..batch.packing import packing_of
from ..batch.segments import Linear
from ..collectives import gather, together
from ..kernels.interface import Kernels, Measured
from ..statistics.softmax import SoftmaxState, finish, merge_all
from .agreement import HIGHEST, OwnNumbers


class WholeVocabulary:
    """The whole vocabulary of V columns, all of them on this rank."""

    group: distributed.ProcessGroup | None = None
    first = 0  # First column of this rank's slice in the whole vocabulary.
    weight_gradient = False  # True if a rank of the group needs a weight gradient.
    # Memory, in bytes, of the smallest GPU among the ranks of the group; 0 without a group.
    memory = 0

    def __init__(self, vocabulary: int) -> None:
        # Vocabulary size V, number of columns on this rank, and largest number of columns on any
        # rank.
        self.vocabulary = self.size = self.widest = vocabulary

    def merge(self, partials: SoftmaxState) -> SoftmaxState:
        """Return the online-softmax state over the whole vocabulary, from the state of this rank's
        slice."""
        return partials

    def measured(self, kernels: Kernels, partials: SoftmaxState, needs: frozenset[str]) -> Measured:
        """Return the statistics over the whole vocabulary, from the online-softmax state of this
        rank's slice."""
        return Measured(*finish(partials, self.vocabulary, needs))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the ranks' slices of the vocabulary."""
        return values

    def slices(self, values: Tensor) -> Tensor:
        """Return the values [W, ..] of all slices of the vocabulary, in rank order."""
        return values.unsqueeze(0)

    def topk(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest values over all slices of the vocabulary, largest first, and their
        ids, [n, k] each, from the largest values and ids [n, ..] of this slice."""
        return values, ids

    def gathered(self, hidden: Tensor) -> Tensor:
        """Return hidden states [N, H] of all positions, from each rank's hidden states."""
        return hidden

    def dropout(self, hidden: Tensor, p: float) -> Tensor:
        """Return `hidden` after dropout, with one mask for all ranks, because all ranks hold equal
        hidden states."""
        return dropout(hidden, p)


class VocabShard(WholeVocabulary):
    """A rank's slice of the vocabulary. The ranks of `group` hold consecutive slices of the
    vocabulary in the order of the ranks, and every rank holds the hidden states of all packed
    tokens.

    Args:
        numbers: the named numbers that each rank sent, from `engine.facts.of_vocabulary`.
        vocab_size: the vocabulary size V; None: the sum of all ranks' weight rows.
        batch: the batch of the call, if any.

    Raises:
        ValueError: the ranks' numbers of rows or columns contradict each other, an id on some rank
            lies outside of the vocabulary, or the ranks' hidden states do not cover all positions.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        numbers: OwnNumbers,
        vocab_size: int | None,
        batch: Batch | None = None,
    ) -> None:
        self.group: distributed.ProcessGroup = group
        rows = numbers["rows"]
        vocabulary = sum(numbers["rows"])
        if vocab_size is not None:
            if vocab_size > vocabulary:
                want = f"at most {vocabulary}, the rows of all ranks"
                raise ValueError(f"vocab_size: got {vocab_size}, want {want}")
            vocabulary = vocab_size
        firsts = list(itertools.accumulate(rows, initial=0))
        sizes = [min(n, vocabulary - at) for n, at in zip(rows, firsts, strict=False)]
        if min(sizes) < 1:
            raise ValueError(
                f"weight: got {rows} rows on the ranks of vocab_group, of which the first "
                f"{vocabulary} are scored: want at least one on each rank"
            )
        for rank, theirs in enumerate(numbers["teacher_columns"]):
            if theirs not in (-1, sizes[rank]):
                raise ValueError(
                    f"teacher: got {theirs} columns on rank {rank} of vocab_group, want the "
                    f"student's {sizes[rank]} scored rows there"
                )
        self.rank = distributed.get_rank(group)
        self.vocabulary = vocabulary
        self.widest = max(sizes)
        self.first = firsts[self.rank]
        self.size = sizes[self.rank]
        self.weight_gradient = any(numbers["weight_gradient"])
        self.memory = min(numbers["memory"])
        # One number per rank: the number of rows of hidden states that the rank passes in, or -1 if
        # the rank passes in the hidden states of all positions.
        self.tokens = numbers["tokens"]
        for rank, highest in enumerate(numbers[HIGHEST]):
            if batch is not None and highest >= vocabulary:
                # The rank whose batch contains an id outside of the vocabulary raises an error in
                # `packing_of`, which names the field and the position.
                packing_of(batch, vocabulary)
                raise ValueError(
                    f"targets: got id {highest} on rank {rank} of vocab_group, want ids below "
                    f"{vocabulary}"
                )
        if batch and self.tokens[0] >= 0 and sum(self.tokens) != batch.targets.numel():
            raise ValueError(
                f"hidden: got {self.tokens} tokens on the ranks of vocab_group, want "
                f"{batch.targets.numel()} in all, the targets'"
            )

    def merge(self, partials: SoftmaxState) -> SoftmaxState:
        """Return the online-softmax state merged over ranks, by one all-gather of all vectors. All
        ranks run the same operations in rank order, so that all ranks get the same bits."""
        slices = zip(partials.tensors(), self._gathered(partials).unbind(1), strict=True)
        return merge_all(SoftmaxState(**dict(slices)))

    def measured(self, kernels: Kernels, partials: SoftmaxState, needs: frozenset[str]) -> Measured:
        return kernels.finish(self._gathered(partials), needs, self.vocabulary)

    def _gathered(self, partials: SoftmaxState) -> Tensor:
        return gather(torch.stack([*partials.tensors().values()]), self.group)

    def sum(self, values: Tensor) -> Tensor:
        return self.slices(values).sum(0)

    def slices(self, values: Tensor) -> Tensor:
        return gather(values, self.group)

    def topk(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        missing = (0, k - values.shape[1])  # A vocabulary shard may have fewer than k columns.
        values, ids = (pad(t, missing, value=v) for t, v in ((values, -torch.inf), (ids, -1)))
        values, ids = (gather(t, self.group).transpose(0, 1).flatten(1) for t in (values, ids))
        values, order = values.topk(k, dim=1)
        return values, ids.gather(1, order)

    def gathered(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all positions, concatenated in rank order. In the backward
        pass, each rank keeps its own rows of the hidden gradient, which is equal on all ranks."""
        start = sum(self.tokens[: self.rank])
        rows = slice(start, start + len(hidden))

        def gathered(mine: Tensor) -> Tensor:
            of_ranks = gather(pad(mine, (0, 0, 0, max(self.tokens) - len(mine))), self.group)
            return torch.cat([part[:n] for part, n in zip(of_ranks, self.tokens, strict=True)])

        # Copy the rows, because a view of the gradient would keep other ranks' rows alive.
        return cast(Tensor, Linear.apply(gathered, lambda gradient: gradient[rows].clone(), hidden))

    def dropout(self, hidden: Tensor, p: float) -> Tensor:
        """Return hidden states with the first rank's dropout mask, on all ranks."""
        mask = dropout(hidden.new_ones(hidden.shape), p) != 0
        sent = {"group": self.group, "group_src": 0}
        together("an adapter's dropout", self.group, distributed.broadcast, mask, **sent)
        return hidden * mask / (1 - p)
