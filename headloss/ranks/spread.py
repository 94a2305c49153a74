"""Tokens that are spread over the ranks of a vocabulary group (sequence parallelism).

T scored tokens, n of a chunk, W ranks. Each rank holds the hidden states of its own positions; a
chunk is gathered when it is read, and its gradients go back to the ranks that own the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from ..batch.segments import Linear
from ..softmax.products import Fixed
from ..softmax.rows import Rows
from .collectives import summed, together
from .vocabulary import Pending, Shard

if TYPE_CHECKING:
    from ..head.head import Head


class Spread(Shard):
    """A slice of the vocabulary beside the hidden states of some of the packed tokens.

    Args:
        sizes: scored columns of each rank.
        index: [T] position of each packed token, None: all N in order.
        positions: how many each rank holds, in rank order.
    """

    is_spread = True

    def __init__(
        self, group: distributed.ProcessGroup, sizes: Sequence[int], index: Tensor | None,
        positions: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(group, sizes)
        rank, self.world = distributed.get_rank(group), len(positions)
        ends = torch.tensor(positions, device="cpu").cumsum(0)
        at = torch.arange(sum(positions), device="cpu") if index is None else index.cpu()
        self.offset = sum(positions[:rank])
        self.owners = torch.bucketize(at, ends, right=True)  # [T] on the host
        self.on_device = self.owners.to(device)
        mine = self.owners == rank
        self.before = torch.cat([ends.new_zeros(1), mine.cumsum(0)])
        self.mine = mine.nonzero().squeeze(1).to(device)

    def index(self, index: Tensor | None) -> Tensor | None:
        return None if index is None else index[self.mine] - self.offset

    def own(self, values: Tensor) -> Tensor:
        return values[self.mine]

    def open(self, features: Sequence[Tensor]) -> list[SpreadRows]:
        """Packed features that can be indexed by rows of all T tokens."""
        return [SpreadRows(own, self) for own in features]

    def factors(
        self, head: Head, hidden: Tensor, fixed: Fixed | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        def of_all(own: Tensor) -> Tensor:
            own = own.contiguous().clone()
            return summed("a sum of an adapter's gradients", own, self.group)

        # Each rank sees its own tokens alone, and has a part of the gradient.
        same = torch.ops.aten.alias
        lora = (replace(x, a=Linear.apply(same, of_all, x.a)) for x in head.lora)
        return replace(head, lora=tuple(lora)).factors(hidden, fixed=fixed)

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

    def chunk_of(self, own: Tensor, rows: slice) -> Tensor:
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
        """As of any shard, but each row goes to its owner alone."""
        counts, order = self._chunk(rows)
        own = self._own_rows(rows)
        count = own.stop - own.start
        sent = dense.contiguous() if order is None else dense[order]
        found = dense.new_empty(self.world * count, dense.shape[1])
        taken, what = [count] * self.world, "a sum of hidden gradients"
        work = self._exchange(what, found, sent, taken, counts, async_op=True)
        return work, found, own, sent

    def added(self, buffer: Tensor) -> Tensor:
        return buffer if self.world == 1 else buffer.view(self.world, -1, buffer.shape[1]).sum(0)

    def _exchange(self, what: str, *given: Any, **options: Any) -> Any:
        options["group"] = self.group
        return together(what, self.group, distributed.all_to_all_single, *given, **options)


class SpreadRows:
    """[T, k] features of which this rank holds its own rows; a chunk is gathered when it is read.

    Rows of the chunk that was read last are at hand; any other slice is a collective.
    """

    def __init__(self, own: Tensor, spread: Spread) -> None:
        self.own, self.spread = own, spread
        self.dtype, self.shape = own.dtype, (len(spread.owners), own.shape[1])
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
            self._held = self.spread.chunk_of(self.own, held)
        return self._held[start - held.start : stop - held.start]
