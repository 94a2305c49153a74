"""Segments: the sequence of each token, and sums, means and expansion over sequences.

T tokens, S segments. Tokens are sorted by segment; the tokens between two offsets are summed
without atomic additions, so that two runs and two ranks give the same bits.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, distributed

from ..arguments import INT64, check_dense, check_device, check_integers, is_integers
from ..collectives import summed


class Chunk(NamedTuple):
    """A range [start, stop) of tokens sorted by segment, and the range [first, last) of their
    segments; the first and the last segment may have further tokens outside the range."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @classmethod
    def between(cls, ends: list[int], start: int, stop: int) -> Chunk:
        """Return the chunk [start, stop) of sorted tokens; `ends` is the end of each segment."""
        return cls(start, stop, bisect_right(ends, start), bisect_left(ends, stop) + 1)


class Segments:
    """A division of tokens of any shape into S segments, made by a `from_` method or `rows`.

    Args:
        ids: [..] int64, the segment of each token. A token with a negative id is in no segment, and
            its target must be -100.
        count: the number S of segments; a segment without tokens also counts, for instance in a
            mean over segments.
        group: process group whose ranks share the S segments; each rank holds some of the tokens.
    """

    def __init__(
        self,
        ids: Tensor,
        count: int,
        group: distributed.ProcessGroup | None = None,
        *,
        counts: Tensor | None = None,
        row: int | None = None,
    ) -> None:
        self.ids = ids
        self.count = count
        self.group = group
        # The common length of all segments; 0 if the lengths differ; None if the segment ids are
        # not known to be 0, 1, 2 .. in ascending order.
        self._row = row
        # True if the segment ids are sorted, and the number of tokens per segment on this rank is
        # known.
        self._packed = counts is not None
        self._lengths: Tensor | None = None
        if counts is not None:
            self._local_counts = counts

    def __repr__(self) -> str:
        return f"Segments(count={self.count}, shape={tuple(self.ids.shape)})"

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for copies and pickles; the common segment length `_row` becomes
        None if the segment ids were changed in place."""
        return {**vars(self), "_row": self._row if self._ascends else None}

    @classmethod
    def from_lengths(cls, lengths: Tensor | Sequence[int]) -> Segments:
        """Return consecutive segments of `lengths` ([S] integers) over a [sum(lengths)] vector. A
        segment of length 0 counts as one of the S segments.

        >>> Segments.from_lengths([2, 3]).ids.tolist()
        [0, 0, 1, 1, 1]
        """
        lengths = _vector("lengths", lengths)
        sizes = lengths.tolist()  # Reads the device once.
        if min(sizes, default=0) < 0:
            raise ValueError(f"lengths: got a negative length in {sizes}, want all >= 0")
        return cls(torch.repeat_interleave(lengths, output_size=sum(sizes)), len(lengths), row=0)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor | Sequence[int]) -> Segments:
        """Return segments between cumulative lengths ([S + 1] integers, starting at 0). A segment
        of length 0 counts as one of the S segments. If unused entries at the end of a buffer repeat
        the last cumulative length, remove them with `cu_seqlens.unique_consecutive()` first.

        >>> Segments.from_cu_seqlens([0, 2, 2, 5]).lengths.tolist()
        [2, 0, 3]
        """
        ends = _vector("cu_seqlens", cu_seqlens)
        if ends[:1].tolist() != [0]:
            raise ValueError(f"cu_seqlens: got {ends.tolist()}, want it to start at 0")
        lengths = ends.diff()
        if bool((lengths < 0).any()):
            raise ValueError(f"cu_seqlens: got {ends.tolist()}, want it not to decrease")
        return cls.from_lengths(lengths)

    @classmethod
    def from_ids(
        cls, ids: Tensor, count: int | None = None, group: distributed.ProcessGroup | None = None
    ) -> Segments:
        """Return segments from the id of each token, in any order; `count` defaults to the largest
        id + 1.

        An id from 0 to `count` - 1 that no token has is an empty segment, which counts in the
        number S of segments. A token with a negative segment id is padding, and belongs to no
        segment. With `group`, whose ranks hold tokens of common segments, `count` is required.
        """
        check_integers("ids", ids, "an integer tensor")
        if count is None:
            if group is not None or ids.is_meta:
                why = "a group" if group is not None else "ids on the meta device"
                raise ValueError(f"count: got None with {why}, want the number of segments")
            count = int(ids.max()) + 1 if ids.numel() else 0
        return cls(ids.to(torch.int64), check_integer("count", count, 0), group)

    @classmethod
    def rows(cls, rows: int, length: int, device: torch.device | str | None = None) -> Segments:
        """Return a segment for each row of a [rows, length] batch; S includes rows without scored
        positions."""
        rows = check_integer("rows", rows, 0)
        length = check_integer("length", length, 0)
        ids = torch.arange(rows, device=device).unsqueeze(1).expand(rows, length)
        return cls(ids, rows, row=length)

    @property
    def _ascends(self) -> bool:
        """True if ids ascend without gaps by construction, and the ids were not changed
        afterwards."""
        return self._row is not None and not self.ids.is_inference() and self.ids._version == 0

    @property
    def _sorted(self) -> bool:
        return self._packed or self._ascends

    @property
    def lengths(self) -> Tensor:
        """[S] int64, tokens in each segment (over the ranks of the group)."""
        # A cached_property would deadlock ranks that are threads: Python 3.11 holds a lock during
        # the computation.
        if self._lengths is None:
            self._lengths = self._over_ranks(self._local_counts)
        return self._lengths

    def sum(self, values: Tensor) -> Tensor:
        """[S] sums of [T] `values` over all ranks of the group; int64 for integers and booleans."""
        _check_values(values, "token", self.ids, self.ids.shape)
        return cast(Tensor, Linear.apply(self._total, self._at_totals, values))

    def mean(self, values: Tensor) -> Tensor:
        """[S] means of [T] `values` over each segment; 0 for an empty segment."""
        return self.sum(values) / self.lengths.clamp_min(1)

    def expand(self, values: Tensor) -> Tensor:
        """Give each token the value of its segment: [S] to [T]."""
        _check_values(values, "segment", self.ids, (self.count,))
        return cast(Tensor, Linear.apply(self._at_tokens, self._own_sum, values))

    def split_pairs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split [S] values of pairs of segments into values of the first segments (2k) and of the
        second segments (2k + 1), [S // 2] each."""
        pairs = len(values) // 2  # Leave out an extra segment that static shapes add at the end.
        return values[: 2 * pairs : 2], values[1 : 2 * pairs : 2]

    def slice(self, chunk: Chunk) -> Segments:
        """Return the segments of a chunk of sorted tokens. If the chunk has a part of a segment's
        tokens, `lengths` counts all tokens of the segment."""
        start, stop, first, last = chunk
        ids = self.ids[start:stop] - first
        part = Segments(ids, last - first, self.group, counts=self._local_counts[first:last])
        part._lengths = self.lengths[first:last]
        return part

    @cached_property
    def _local_counts(self) -> Tensor:
        """[S] this rank's tokens in each segment."""
        return count_in(self._bins, self.count + 1, self._bins < self.count)[: self.count]

    @cached_property
    def _offsets(self) -> Tensor:
        """[S + 1] start of each segment among the sorted tokens, and the end of the last
        segment."""
        return offsets_of(self._local_counts)

    @property
    def _bins(self) -> Tensor:
        """[N] int64 segment ids, S for tokens in no segment."""
        ids = self.ids.reshape(-1).long()
        return ids.where((ids >= 0) & (ids < self.count), self.count)

    def _at_tokens(self, values: Tensor) -> Tensor:
        """Expand [S] values to [T] tokens; 0 at tokens in no segment."""
        if self._sorted:
            return values[self.ids]
        return torch.cat([values, values.new_zeros(1)])[self._bins.view(self.ids.shape)]

    def _local_sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over this rank's tokens of each segment, [S] float64."""
        values = values.reshape(-1)
        if values.numel() == 0 or self.count == 0:
            return values.new_zeros(self.count, dtype=torch.float64)
        if not self._sorted:
            values = values[self._bins.argsort(stable=True)]
        # Sum in float64: a mean over 100k tokens keeps float32 precision, and so does a segment
        # whose partial sums on several ranks cancel.
        of = {"offsets": self._offsets, "initial": 0, "unsafe": True}
        return torch.segment_reduce(values.double(), "sum", **of)

    def _total(self, values: Tensor) -> Tensor:
        total = self._over_ranks(self._local_sum(values))
        return total.to(values.dtype if values.is_floating_point() else torch.int64)

    def _at_totals(self, gradient: Tensor) -> Tensor:
        """Return the vjp of `Segments.sum`: the upstream gradient, summed over ranks and expanded
        to tokens."""
        if self.group is not None:
            gradient = self._over_ranks(gradient.double()).to(gradient.dtype)
        return self._at_tokens(gradient)

    def _own_sum(self, gradient: Tensor) -> Tensor:
        """Return the vjp of `expand`: for each segment, the sum of the upstream gradient over the
        tokens of this rank. No all-reduce over ranks is needed here, because the vjp of
        `Segments.sum` contains an all-reduce."""
        return self._local_sum(gradient).to(gradient.dtype)

    def _over_ranks(self, values: Tensor) -> Tensor:
        if self.group is None:
            return values
        return summed("a sum over segments that run across ranks", values.clone(), self.group)


Map = Callable[[Tensor], Tensor]


class Linear(torch.autograd.Function):
    """Autograd function of a linear map with a given adjoint, such as a map between tokens and
    segments."""

    @staticmethod
    def forward(ctx, run: Map, adjoint: Map, values: Tensor) -> Tensor:
        ctx.adjoint = adjoint
        return run(values)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return None, None, ctx.adjoint(gradient)


def count_in(ids: Tensor, count: int, included: Tensor) -> Tensor:
    """Return [count] int64, the number of elements with each id, counting only elements at which
    `included` [n] is True."""
    counts = ids.new_zeros(count)  # `count` may be 0.
    return counts.scatter_add_(0, ids, included.to(counts.dtype)) if count else counts


def offsets_of(counts: Tensor) -> Tensor:
    """Return the [n + 1] start offsets of n consecutive runs of the given sizes, and the end of the
    last run."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def numbered(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank [n] of each value among the distinct values (0 for the smallest), and the
    number [] of distinct values. The host does not wait for the device."""
    ordered, places = values.sort()
    firsts = torch.ones_like(places)  # 1 where a sorted value differs from the value before it.
    firsts[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(places).scatter_(0, places, firsts.cumsum(0) - 1), firsts.sum()


def _check_values(values: Tensor, of: str, place: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(f"values: got {type(values).__name__}, want a tensor")
    check_dense("values", values)
    check_device("values", values, place, "that of the segments' ids,")
    if values.is_complex() or (values.is_floating_point() and values.element_size() < 2):
        raise TypeError(f"values: got {values.dtype}, want real numbers, of 16 bits or more")
    if values.shape != shape:
        raise ValueError(
            f"values: got shape {tuple(values.shape)}, want one value per {of}, {tuple(shape)}"
        )


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    """Return the value as an integer of 64 bits; TypeError for anything but an integer, ValueError
    for an integer out of range or below `least`."""
    try:
        # Do not call `operator.index` on an int: under torch.compile, the call would turn a dynamic
        # size into a constant of the compiled graph.
        number = value if isinstance(value, int) else operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, want an integer")
    if not (-INT64 if least is None else least) <= number < INT64:
        want = f">= {least}" if least is not None and number < least else "an integer of 64 bits"
        raise ValueError(f"{name}: got {number}, want {want}")
    return number


def _vector(name: str, value: Tensor | Sequence[int]) -> Tensor:
    """Return n integers, in a tensor or a sequence, as an int64 tensor [n]."""
    if not isinstance(value, Tensor):
        unordered = isinstance(value, str | bytes | Set | Mapping)
        if unordered or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
            raise TypeError(f"{name}: got {value!r}, want integers")
        value = torch.tensor([check_integer(name, one) for one in value], dtype=torch.int64)
    check_dense(name, value)
    if not is_integers(value) or value.dim() != 1:
        raise TypeError(f"{name}: got {value.dtype} of shape {tuple(value.shape)}, want [..] int64")
    if value.is_meta:
        raise ValueError(f"{name}: got a tensor on the meta device, want one with values")
    return value.to(torch.int64)
