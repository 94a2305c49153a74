"""The same call on many ranks: slices of the vocabulary, and tokens that are spread over them.

T scored tokens, n of a chunk, H hidden width, W ranks of a group. A schedule asks its slices of the
vocabulary to merge statistics and to sum hidden gradients. `Alone` is the whole vocabulary on one
rank; `Shard` is a slice of it. Every rank of a shard's group runs the same plan on the same tokens,
so the number and the shapes of collectives are the same on all of them (law 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from .logits import LinearGradients, Scaled
from .products import input_gradient
from .rows import RowGradient, Rows
from .stats import Partials

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .head import Head
    from .plan import Chunk


class Alone:
    """The whole vocabulary on this rank."""

    first = 0  # column of the whole vocabulary at which this rank's slice starts
    size: int | None = None  # columns of this rank's slice, None: all
    widest: int | None = None  # of all slices
    name = ""
    is_spread = False  # whether hidden states of the packed tokens are on several ranks

    def gradients(self, chunks: Sequence[Chunk], *args: Any, **options: Any) -> LinearGradients:
        """Where the gradient of the slice's logits goes."""
        return LinearGradients(*args, **options)

    def merge(self, partials: Partials) -> Partials:
        """Partials of this rank's slice to those of the whole vocabulary."""
        return partials

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the slices of the vocabulary."""
        return values

    def topk(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best k of each slice's best, [n, ..] to [n, k], best first."""
        return values, ids

    def index(self, index: Tensor | None) -> Tensor | None:
        """Which of this rank's rows are packed, in order; None: all."""
        return index

    def own(self, values: Tensor) -> Tensor:
        """Of [T] values, those whose hidden states this rank was given."""
        return values

    def open(self, features: Sequence[Tensor]) -> Sequence[Any]:
        """Packed features that can be indexed by rows of all T tokens."""
        return features

    def factors(self, head: Head, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        """`head.factors` of packed hidden states; gradients of adapters come out complete."""
        return head.factors(hidden)


WHOLE = Alone()


class Shard(Alone):
    """A slice of the vocabulary; the ranks of `group` hold the others, in rank order.

    Args:
        sizes: scored columns of each rank.
        spread: where the hidden states of the packed tokens are; None: all of them here.
    """

    def __init__(
        self, group: ProcessGroup, sizes: Sequence[int], spread: Spread | None = None
    ) -> None:
        rank = distributed.get_rank(group)
        self.group, self.spread, self.is_spread = group, spread, spread is not None
        self.first, self.size, self.widest = sum(sizes[:rank]), sizes[rank], max(sizes)
        self.name = f"{group.group_name}:{','.join(map(str, sizes))}"

    def gradients(self, chunks: Sequence[Chunk], *args: Any, **options: Any) -> LinearGradients:
        return ShardedGradients(self, chunks, *args, **options)

    def merge(self, partials: Partials) -> Partials:
        """One packed all-gather; the same operations in rank order give all ranks the same bits."""
        named = {f.name: getattr(partials, f.name) for f in fields(partials)}
        named = {name: value for name, value in named.items() if value is not None}
        gathered = gather(torch.stack(list(named.values())), self.group)
        slices = zip(named, gathered.unbind(1), strict=True)
        return merge_all(Partials(**dict(slices)))

    def sum(self, values: Tensor) -> Tensor:
        return gather(values, self.group).sum(0)

    def topk(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        missing = (0, k - values.shape[1])  # of a slice of fewer columns than k
        values, ids = (pad(t, missing, value=v) for t, v in ((values, -torch.inf), (ids, -1)))
        values, ids = (gather(t, self.group).transpose(0, 1).flatten(1) for t in (values, ids))
        values, order = values.topk(k, dim=1)
        return values, ids.gather(1, order)

    def start_sum(self, dense: Tensor, rows: slice) -> Pending:
        """Begin to sum a gradient [n, k] of the packed rows `rows` over the group."""
        if self.spread is not None:
            return self.spread.start_sum(dense, rows)
        work = distributed.all_reduce(dense, group=self.group, async_op=True)
        return Pending(work, dense, rows)

    def index(self, index: Tensor | None) -> Tensor | None:
        return index if self.spread is None else self.spread.index(index)

    def own(self, values: Tensor) -> Tensor:
        return values if self.spread is None else values[self.spread.mine]

    def open(self, features: Sequence[Tensor]) -> Sequence[Any]:
        if self.spread is None:
            return features
        return [SpreadRows(f, self.spread) for f in features]

    def factors(self, head: Head, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        if self.spread is not None and head.lora:  # each rank sees its own tokens alone
            lora = (replace(x, a=SumGradient.apply(x.a, self.group)) for x in head.lora)
            head = replace(head, lora=tuple(lora))
        return head.factors(hidden)


class SumGradient(torch.autograd.Function):
    """The same tensor on every rank; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, value: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        gradient = gradient.contiguous().clone()
        distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def gather(values: Tensor, group: ProcessGroup) -> Tensor:
    """[W, ..] of every rank's [..], in rank order."""
    found = values.new_empty(distributed.get_world_size(group), *values.shape)
    flat = values.contiguous().view(-1)  # gloo wants shapes as if one after another
    _gather_flat(found.view(-1), flat, group)
    return found


def _gather_flat(found: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """`all_gather_into_tensor`, under the name that this torch does not call deprecated."""
    names = ("all_gather_single", "all_gather_into_tensor")
    next(getattr(distributed, n) for n in names if hasattr(distributed, n))(found, own, group=group)


def named(name: str) -> Alone:
    """The slice of a `Shard.name`, which operators can carry; "" is the whole vocabulary."""
    if not name:
        return WHOLE
    from torch.distributed import distributed_c10d

    group, _, sizes = name.rpartition(":")
    found = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return Shard(found, [int(size) for size in sizes.split(",")])


def merge_all(slices: Partials) -> Partials:
    """`stats.merge` of the slices [W, n] of W ranks, in a few operations for any W."""
    peak, holder = slices.peak.max(0)
    shift = torch.where(slices.peak == peak, 0.0, slices.peak - peak).clamp_min_(-1e4)
    scale = shift.exp()
    mass = 1 + slices.rest
    # The largest term stays out of one slice's sum alone, also where several slices hold its equal.
    rest = (mass * scale).scatter(0, holder.unsqueeze(0), slices.rest.gather(0, holder[None]))
    spread = total = None
    if slices.spread is not None:
        spread = (scale * (slices.spread + mass * shift)).sum(0)
    if slices.total is not None:
        total = slices.total.sum(0)
    target = slices.target.amax(0)
    return Partials(peak=peak, rest=rest.sum(0), target=target, spread=spread, total=total)


# ---------------------------------------------------------------------- gradients of features


class Pending(NamedTuple):
    """A sum over the group that is under way."""

    work: Any
    buffer: Tensor
    rows: slice  # where it goes
    count: int = 1  # terms, one after another, that are still to be added

    def wait(self) -> Tensor:
        """[n, k], complete."""
        self.work.wait()
        if self.count == 1:
            return self.buffer
        return self.buffer.view(self.count, -1, self.buffer.shape[-1]).sum(0)


class ShardedGradients(LinearGradients):
    """Gradients of a slice's logits: those of features are summed over the group in float32.

    A chunk's sum is under way while its weight gradient is computed, and ends before the next one
    begins. Rows are sent whether or not they carry a gradient: skipping is local.
    """

    def __init__(self, slices: Shard, chunks: Sequence[Chunk], *args: Any, **options: Any) -> None:
        self.slices, self.chunks = slices, iter(chunks)
        self.pending: list[tuple[int, Pending]] = []
        self.summed = False  # with slabs: their sums are under way, or complete
        super().__init__(*args, **options)

    def _zeros(self, features: Any, dtype: torch.dtype) -> Tensor:
        own = features.own if isinstance(features, SpreadRows) else features
        return own.new_zeros(own.shape, dtype=dtype)

    def _add_to_features(self, gradient: RowGradient, columns: slice) -> None:
        if self.by_slab:
            return super()._add_to_features(gradient, columns)
        self._settle()
        rows = gradient.rows
        chunk = next(self.chunks).rows
        places = slice(None) if isinstance(rows, slice) else rows - chunk.start
        for i, total in enumerate(self.features):
            if total is None:
                continue
            weight = self.source.weights[i]
            part = input_gradient(gradient.values, weight, self.source.dtype)
            dense = part.new_zeros(chunk.stop - chunk.start, part.shape[1])
            gradient._replace(rows=places).put_(dense, part)
            self.pending.append((i, self.slices.start_sum(dense, chunk)))

    def features_are_done(self) -> None:
        """With slabs: no more is added to features; the sum over the group begins."""
        if not self.by_slab or self.summed:
            return
        self.summed = True
        for i, total in enumerate(self.features):
            if total is not None:
                self.pending.append((i, self.slices.start_sum(total, slice(0, len(total)))))

    def complete(self) -> None:
        self.features_are_done()
        self._settle()

    def _settle(self) -> None:
        for i, sum_ in self.pending:
            value, total = sum_.wait(), self.features[i]
            assert total is not None
            if self.by_slab:
                self.features[i] = value
            else:
                total[sum_.rows].copy_(value)
        self.pending = []

    def finish(self, factor: Tensor | None, scaled: Scaled) -> list[Tensor | None]:
        self.complete()
        return super().finish(factor, scaled)


# ---------------------------------------------------------------------- tokens spread over ranks


class Spread:
    """Which rank of a group was given the hidden states of each packed token.

    Args:
        index: [T] position of each packed token, None: all N in order.
        sizes: positions of each rank, in rank order.
    """

    def __init__(
        self,
        group: ProcessGroup,
        index: Tensor | None,
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        self.group, self.world = group, len(sizes)
        rank = distributed.get_rank(group)
        ends = torch.tensor(sizes).cumsum(0)
        positions = torch.arange(int(ends[-1])) if index is None else index.cpu()
        self.offset = int(ends[rank]) - sizes[rank]
        self.owners = torch.bucketize(positions, ends, right=True)  # [T] on the host
        self.on_device = self.owners.to(device)
        mine = self.owners == rank
        self.before = torch.cat([torch.zeros(1, dtype=torch.int64), mine.cumsum(0)])
        self.mine = mine.nonzero().squeeze(1).to(device)

    def __len__(self) -> int:
        return len(self.owners)

    def index(self, index: Tensor | None) -> Tensor | None:
        return None if index is None else index[self.mine] - self.offset

    def own_rows(self, rows: slice) -> slice:
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
        part = own[self.own_rows(rows)]
        found = own.new_empty(sum(counts), own.shape[1])
        sent = part.repeat(self.world, 1)
        distributed.all_to_all_single(
            found, sent, counts, [len(part)] * self.world, group=self.group
        )
        if order is None:
            return found
        return torch.empty_like(found).index_copy_(0, order, found)

    def start_sum(self, dense: Tensor, rows: slice) -> Pending:
        """Begin to sum [n, k] over the ranks and to give each row to its owner."""
        counts, order = self._chunk(rows)
        own = self.own_rows(rows)
        count = own.stop - own.start
        if order is not None:
            dense = dense[order]
        found = dense.new_empty(self.world * count, dense.shape[1])
        work = distributed.all_to_all_single(
            found,
            dense.contiguous(),
            [count] * self.world,
            counts,
            group=self.group,
            async_op=True,
        )
        return Pending(_Keeping(work, dense), found, own, self.world)


class _Keeping:
    """Work, and what it sends until it is done."""

    def __init__(self, work: Any, sent: Tensor) -> None:
        self.work, self.sent = work, sent

    def wait(self) -> None:
        self.work.wait()


class SpreadRows:
    """[T, k] features of which this rank holds its own rows; a chunk is gathered when it is read.

    Rows of the chunk that was read last are at hand; any other slice is a collective.
    """

    def __init__(self, own: Tensor, spread: Spread) -> None:
        self.own, self.spread = own, spread
        self.dtype, self.device, self.shape = own.dtype, own.device, (len(spread), own.shape[1])
        self._rows: slice | None = None
        self._held = own[:0]

    def __len__(self) -> int:
        return self.shape[0]

    def new_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.own.new_zeros(shape, dtype=dtype)

    def __getitem__(self, rows: Rows) -> Tensor:
        if isinstance(rows, Tensor):
            assert self._rows is not None
            return self._held[rows - self._rows.start]
        start, stop, _ = rows.indices(len(self))
        held = self._rows
        if held is None or start < held.start or stop > held.stop:
            held = self._rows = slice(start, stop)
            self._held = self.own[:0]  # before the next one is made
            self._held = self.spread.gather(self.own, held)
        return self._held[start - held.start : stop - held.start]
