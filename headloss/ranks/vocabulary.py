"""The same call on many ranks, each with a slice of the vocabulary.

T scored tokens, n of a chunk, H hidden width, W ranks of a group. A schedule asks its slices of the
vocabulary to merge statistics and to sum hidden gradients. `Whole` is the whole vocabulary on one
rank; `Shard` is a slice of it, and `Spread` one beside the hidden states of some of the tokens
(sequence parallelism). Every rank of a group runs the same plan on the same tokens, so the number
and the shapes of collectives are the same on all of them (law 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed
from torch.nn.functional import dropout, pad

from ..batch.segments import Linear
from ..kernels.interface import Kernels, Measured
from ..objective.statistics import Partials, finish, merge_all
from ..softmax.linear import LinearSoftmax, Wants
from ..softmax.products import Fixed, input_gradient
from ..softmax.rows import RowGradient, Rows
from ..softmax.sums import Hidden
from .agreement import settle
from .collectives import Misguessed, gather, summed, together

if TYPE_CHECKING:
    from ..head.head import Head

GIVE_WAY = 20_000  # clocks, about 11 microseconds, in which a collective gets its multiprocessors

# A sum that is under way: the work, its buffer, where that goes, and what has to live until then.
Pending = tuple[Any, Tensor, slice, Tensor]


class Whole:
    """The whole vocabulary on this rank."""

    group: distributed.ProcessGroup | None = None
    first = 0  # column of the whole vocabulary at which this rank's slice starts
    size: int | None = None  # columns of this rank's slice, None: all
    is_spread = False  # whether hidden states of the packed tokens are on several ranks

    def merge(self, partials: Partials) -> Partials:
        """From partials of this rank's slice to those of the whole vocabulary."""
        return partials

    def measured(
        self, kernels: Kernels, partials: Partials, needs: frozenset[str], vocabulary: int
    ) -> Measured:
        """The statistics that follow from partials of this rank's slice."""
        return Measured(*finish(partials, vocabulary, needs))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the slices of the vocabulary."""
        return values

    def topk(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best k of each slice's best, [n, ..] to [n, k], best first."""
        return values, ids

    def own(self, values: Tensor) -> Tensor:
        """Of [T] values, those whose hidden states this rank was given."""
        return values

    def factors(
        self, head: Head, hidden: Tensor, fixed: Fixed | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """`head.factors` of packed hidden states; gradients of adapters come out complete."""
        return head.factors(hidden, self.dropout, fixed)

    def dropout(self, hidden: Tensor, p: float) -> Tensor:
        """Of hidden states that every rank has."""
        return dropout(hidden, p)


WHOLE = Whole()


class Shard(Whole):
    """A slice of the vocabulary; the ranks of `group` hold the others, in rank order, and all of
    them the hidden states of the packed tokens.

    Args:
        sizes: scored columns of each rank.
        tokens: rows of hidden states of each rank, to be gathered at once; empty: not to be.
        confirm: what a call that began early does before its first collective.
    """

    def __init__(
        self, group: distributed.ProcessGroup, sizes: Sequence[int], tokens: Sequence[int] = (),
        confirm: Callable[[], object] = bool
    ) -> None:
        rank = distributed.get_rank(group)
        self.group: distributed.ProcessGroup = group
        self.tokens, self._confirm = tokens, confirm
        self.first, self.size = sum(sizes[:rank]), sizes[rank]

    def hidden(self, source: LinearSoftmax, wants: Wants, blocks: Sequence[Any] | None) -> Hidden:
        """Where gradients of features go: block by block, or (None) summed over slabs."""
        return SharedHidden(self, source, wants, blocks)

    def merge(self, partials: Partials) -> Partials:
        """One packed all-gather; the same operations in rank order give all ranks the same bits."""
        slices = zip(partials.tensors(), self._gathered(partials).unbind(1), strict=True)
        return merge_all(Partials(**dict(slices)))

    def measured(
        self, kernels: Kernels, partials: Partials, needs: frozenset[str], vocabulary: int
    ) -> Measured:
        return kernels.finish(self._gathered(partials), needs, vocabulary)

    def _gathered(self, partials: Partials) -> Tensor:
        return self.gather(torch.stack([*partials.tensors().values()]))

    def gather(self, values: Tensor) -> Tensor:
        """[W, ..] of every rank's [..], in rank order."""
        self._settle()
        return gather(values, self.group)

    def _settle(self) -> None:
        """Before a collective: read what the call went by so far."""
        settle(self.group)
        try:
            self._confirm()
        except ValueError as error:  # it is raised again where no rank has begun
            raise Misguessed(str(error)) from error

    def sum(self, values: Tensor) -> Tensor:
        return self.gather(values).sum(0)

    def topk(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        missing = (0, k - values.shape[1])  # of a slice of fewer columns than k
        values, ids = (pad(t, missing, value=v) for t, v in ((values, -torch.inf), (ids, -1)))
        values, ids = (self.gather(t).transpose(0, 1).flatten(1) for t in (values, ids))
        values, order = values.topk(k, dim=1)
        return values, ids.gather(1, order)

    def start_sum(self, dense: Tensor, rows: slice) -> Pending:
        """Begin to sum a gradient [n, k] of the packed rows `rows` over the group."""
        what, options = "a sum of hidden gradients", {"group": self.group, "async_op": True}
        work = together(what, self.group, distributed.all_reduce, dense, **options)
        return work, dense, rows, dense

    def added(self, buffer: Tensor) -> Tensor:
        """The sum [n, k], once the work is done."""
        return buffer

    def index(self, index: Tensor | None) -> Tensor | None:
        """Which of this rank's rows are packed, in order; None: all."""
        return index

    def given(self, hidden: Tensor) -> Tensor:
        """Hidden states as the call takes them: this rank's, or at once those [N, H] of all ranks,
        in rank order. Each then takes its own rows of the gradient, which is the same on all."""
        if not self.tokens:
            return hidden
        start = sum(self.tokens[: distributed.get_rank(self.group)])
        rows = slice(start, start + len(hidden))

        def gathered(own: Tensor) -> Tensor:
            found = gather(pad(own, (0, 0, 0, max(self.tokens) - len(own))), self.group)
            return torch.cat([part[:n] for part, n in zip(found, self.tokens, strict=True)])

        # A view of the gradient would keep the others' rows alive.
        return cast(Tensor, Linear.apply(gathered, lambda gradient: gradient[rows].clone(), hidden))

    def dropout(self, hidden: Tensor, p: float) -> Tensor:
        """The first rank's mask, on all ranks."""
        self._settle()  # before a random number is drawn
        kept = dropout(hidden.new_ones(hidden.shape), p) != 0
        what, options = "an adapter's dropout", {"group": self.group, "group_src": 0}
        together(what, self.group, distributed.broadcast, kept, **options)
        return hidden * kept / (1 - p)


# ---------------------------------------------------------------------- spread tokens


class Spread(Shard):
    """A slice of the vocabulary beside the hidden states of some of the packed tokens. A chunk of
    all is gathered when it is read, and its gradients go back to the ranks that own the tokens.

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


# ---------------------------------------------------------------------- gradients of features


class SharedHidden(Hidden):
    """Gradients of features that are summed over the group, in float32.

    A block's sum is under way while its weight gradient is computed, and ends before the next one
    begins. Rows are sent whether or not they carry a gradient: skipping is local.
    """

    def __init__(
        self, slices: Shard, source: LinearSoftmax, wants: Wants, blocks: Sequence[Any] | None
    ) -> None:
        self.slices = slices
        self.pending: list[tuple[int, *Pending]] = []  # by feature
        super().__init__(source, wants, blocks)

    def room(self, features: Any) -> Tensor:
        return super().room(_own(features))

    def add(
        self, gradient: RowGradient, columns: slice, last: bool, weights: Callable[[], bool]
    ) -> bool:
        if self.blocks is None:
            return super().add(gradient, columns, last, weights)
        self._arrive()
        block = next(self.blocks).rows
        for i, weight in enumerate(self.source.weights):
            if not self.wanted[i]:
                continue
            part = input_gradient(gradient.values, weight, self.source.dtype, self.source.fixed)
            self._start(i, gradient.whole(part, block, weight), block)
        return weights()

    def end(self) -> None:
        for i, total in enumerate(self.totals):
            if total is not None:
                self._start(i, total, slice(0, len(total)))

    def _start(self, i: int, dense: Tensor, rows: slice) -> None:
        self.pending.append((i, *self.slices.start_sum(dense, rows)))
        if dense.is_cuda:
            # A product that followed at once would take every multiprocessor until it ends.
            torch.cuda._sleep(GIVE_WAY)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        self._arrive()
        super().settle()

    def _arrive(self) -> None:
        for i, work, buffer, rows, _ in self.pending:
            together("a sum of hidden gradients", self.slices.group, work.wait)
            value = self.slices.added(buffer)
            total, features = self.totals[i], self.source.features[i]
            if len(value) == len(_own(features)):  # all: not rounded before they are scaled
                self.totals[i] = value
                continue
            if total is None:
                total = self.totals[i] = self.room(features)
            total[rows].copy_(value)
        self.pending = []


def _own(features: Any) -> Tensor:
    """This rank's rows of features."""
    return features.own if isinstance(features, SpreadRows) else features
