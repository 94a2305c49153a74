"""The vocabulary over the ranks of a group, by what the ranks of its group said."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..batch.batch import Batch
from ..head.head import Head
from .agreement import HIGHEST, Facts, OwnNumbers, agree, attempt
from .facts import of_positions
from .vocabulary import WHOLE, VocabShard, WholeVocabulary


class VocabLayout(NamedTuple):
    """What a rank knows about the whole vocabulary and the other ranks' slices."""

    vocabulary: int  # V
    group: distributed.ProcessGroup | None = None
    sizes: tuple[int, ...] = ()  # scored rows of each rank; empty: no group
    tokens: tuple[int, ...] = ()  # rows of hidden states of each rank, under sequence parallelism
    weight_gradient: bool | None = None  # whether any rank wants one
    memory: int | None = None  # bytes of the smallest GPU; None: no group
    highest: tuple[int, ...] = ()  # target or id of columns on each rank

    @classmethod
    def of(
        cls, group: distributed.ProcessGroup, numbers: OwnNumbers, vocab_size: int | None = None
    ) -> VocabLayout:
        """From the own numbers of each rank; ValueError where they do not fit."""
        rows, vocabulary = numbers["rows"], sum(numbers["rows"])
        if vocab_size is not None:
            if vocab_size > vocabulary:
                raise ValueError(
                    f"vocab_size: got {vocab_size}, want at most {vocabulary}, the rows of all "
                    "ranks"
                )
            vocabulary = vocab_size
        firsts = itertools.accumulate(rows, initial=0)
        sizes = tuple(min(n, vocabulary - at) for n, at in zip(rows, firsts, strict=False))
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
        wanted, tokens = any(numbers["weight_gradient"]), tuple(numbers["tokens"])
        memory, highest = min(numbers["memory"]), tuple(numbers[HIGHEST])
        return cls(vocabulary, group, sizes, tokens, wanted, memory, highest)

    @property
    def widest(self) -> int:
        """The most columns that any rank holds; all ranks plan for these."""
        return max(self.sizes, default=self.vocabulary)

    def shard(self) -> WholeVocabulary:
        """This rank's slice."""
        if self.group is None:
            return WHOLE
        return VocabShard(self.group, self.sizes, self.tokens if any(self.tokens) else ())

    def check_batch(self, batch: Batch, sequence_parallel: bool) -> None:
        """ValueError where another rank's ids are outside the vocabulary, or where the ranks'
        hidden states are not those of all positions."""
        for rank, highest in enumerate(self.highest):
            if highest >= self.vocabulary:
                raise ValueError(
                    f"targets: got id {highest} on rank {rank} of vocab_group, want ids below "
                    f"{self.vocabulary}"
                )
        if sequence_parallel and sum(self.tokens) != batch.targets.numel():
            raise ValueError(
                f"hidden: got {list(self.tokens)} tokens on the ranks of vocab_group, want "
                f"{batch.targets.numel()} in all, the targets'"
            )


def agreed_layout(
    group: Any, facts: Facts | None, error: Exception | None, vocab_size: int | None,
    static: bool = False
) -> tuple[Any, Exception | None]:  # fmt: skip
    """The layout, or the error that every rank is to raise; see `agree`."""
    of_ranks, error = agree("vocab_group", group, facts, error, static)
    return attempt(error, lambda: VocabLayout.of(group, of_ranks, vocab_size))


def layout_of_positions(
    head: Head, hidden: Tensor, check: Callable[[], None], k: int, check_ranks: bool
) -> VocabLayout:
    """What a rank knows for a verb on positions alone, which `check` refuses on all ranks."""
    group = head.vocab_group
    if group is None:
        check()
        return VocabLayout(head.vocabulary)
    if torch.compiler.is_compiling():
        run: Any = torch.compiler.disable(layout_of_positions)
        return run(head, hidden, check, k, check_ranks)  # type: ignore[no-any-return]
    _, error = attempt(None, check)
    facts, error = attempt(error, lambda: of_positions(head, hidden, k, check_ranks))
    layout, error = agreed_layout(group, facts, error, head.vocab_size)
    if error is not None:
        raise error
    return layout  # type: ignore[no-any-return]
