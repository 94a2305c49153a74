"""Tokens that are spread over the ranks of a vocabulary group (sequence parallelism).

T scored tokens, n of a chunk, W ranks. Each rank holds the hidden states of its own positions; a
chunk is gathered when it is read, and its gradients go back to the ranks that own the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..softmax.rows import Rows
from .collectives import together


class Pending(NamedTuple):
    """A sum over the group that is under way."""

    group: distributed.ProcessGroup
    work: Any
    buffer: Tensor
    rows: slice  # where it goes
    count: int = 1  # terms, one after another, that are still to be added
    sent: Tensor | None = None  # which must live until the work is done

    def wait(self) -> Tensor:
        """[n, k], complete."""
        together("a sum of hidden gradients", self.group, self.work.wait)
        if self.count == 1:
            return self.buffer
        return self.buffer.view(self.count, -1, self.buffer.shape[-1]).sum(0)


class Spread:
    """Which rank of a group holds the hidden states of each packed token.

    Args:
        index: [T] position of each packed token, None: all N in order.
        sizes: positions of each rank, in rank order.
    """

    def __init__(
        self, group: distributed.ProcessGroup, index: Tensor | None, sizes: Sequence[int],
        device: torch.device
    ) -> None:
        self.group, self.world = group, len(sizes)
        rank = distributed.get_rank(group)
        ends = torch.tensor(sizes, device="cpu").cumsum(0)
        positions = torch.arange(sum(sizes), device="cpu") if index is None else index.cpu()
        self.offset = sum(sizes[:rank])
        self.owners = torch.bucketize(positions, ends, right=True)  # [T] on the host
        self.on_device = self.owners.to(device)
        mine = self.owners == rank
        self.before = torch.cat([ends.new_zeros(1), mine.cumsum(0)])
        self.mine = mine.nonzero().squeeze(1).to(device)

    def __len__(self) -> int:
        return len(self.owners)

    def index(self, index: Tensor | None) -> Tensor | None:
        """This rank's positions among its own, of those of all packed tokens; None: all."""
        return None if index is None else index[self.mine] - self.offset

    def _own_rows(self, rows: slice) -> slice:
        """This rank's rows of a chunk, among all of its own."""
        return slice(int(self.before[rows.start]), int(self.before[rows.stop]))

    def _chunk(self, rows: slice) -> tuple[list[int], Tensor | None]:
        """How many rows of a chunk each rank owns; the rows by owner, None: they are already."""
        owners = self.owners[rows]
        counts = torch.bincount(owners, minlength=self.world).tolist()
        if bool((owners.diff() >= 0).all()):
            return counts, None
        return counts, self.on_device[rows].argsort(stable=True)

    def gather(self, own: Tensor, rows: slice) -> Tensor:
        """[n, k] of a chunk, from the [.., k] rows that each rank owns."""
        counts, order = self._chunk(rows)
        part = own[self._own_rows(rows)]
        found = own.new_empty(sum(counts), own.shape[1])
        sent, taken = part.repeat(self.world, 1), [len(part)] * self.world
        self._exchange("an exchange of hidden states", found, sent, counts, taken)
        if order is None:
            return found
        return torch.empty_like(found).index_copy_(0, order, found)

    def start_sum(self, dense: Tensor, rows: slice) -> Pending:
        """Begin to sum [n, k] over the ranks and to give each row to its owner."""
        counts, order = self._chunk(rows)
        own = self._own_rows(rows)
        count = own.stop - own.start
        sent = dense.contiguous() if order is None else dense[order]
        found = dense.new_empty(self.world * count, dense.shape[1])
        taken, what = [count] * self.world, "a sum of hidden gradients"
        work = self._exchange(what, found, sent, taken, counts, async_op=True)
        return Pending(self.group, work, found, own, self.world, sent)

    def _exchange(self, what: str, *given: Any, **options: Any) -> Any:
        options["group"] = self.group
        return together(what, self.group, distributed.all_to_all_single, *given, **options)


class SpreadRows:
    """[T, k] features of which this rank holds its own rows; a chunk is gathered when it is read.

    Rows of the chunk that was read last are at hand; any other slice is a collective.
    """

    def __init__(self, own: Tensor, spread: Spread) -> None:
        self.own, self.spread = own, spread
        self.dtype, self.shape = own.dtype, (len(spread), own.shape[1])
        self._rows = slice(0, 0)
        self._held = own[:0]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Rows) -> Tensor:
        if isinstance(rows, Tensor):
            return self._held[rows - self._rows.start]
        start, stop, _ = rows.indices(len(self))
        held = self._rows
        if start < held.start or stop > held.stop:
            held = self._rows = slice(start, stop)
            self._held = self.own[:0]  # before the next one is made
            self._held = self.spread.gather(self.own, held)
        return self._held[start - held.start : stop - held.start]
