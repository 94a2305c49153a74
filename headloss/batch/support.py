"""Allowed vocabulary columns of each position's softmax: `SupportIds` holds the columns as passed
by the caller, `SupportPairs` the columns of the packed tokens.

N positions, T scored positions, P pairs of a token and a column, K the most columns of a position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..arguments import IGNORE, check_dense, check_device, is_integers
from ..kernels.interface import Support
from .segments import count_in, offsets_of

# Factor larger than every column id, so that position * HIGH + column is a different number for
# each (position, column).
HIGH = 1 << 32


class SupportIds:
    """The value of `support_ids` as given: [.., K] with negative ids in unused entries, or a pair
    of [P] ids and [N + 1] offsets; TypeError or ValueError for anything else."""

    def __init__(self, value: Any, targets: Tensor) -> None:
        self.value = value
        self.tensors = value if isinstance(value, tuple) else (value,)
        # Largest number K of ids of a position in `support_ids` of shape [.., K]; None if
        # `support_ids` are (ids, offsets).
        self.width: int | None = None
        want = "[.., K] integers, or ([P] ids, [N + 1] offsets)"
        if len(self.tensors) not in (1, 2) or not all(map(is_integers, self.tensors)):
            got = [getattr(t, "dtype", type(t).__name__) for t in self.tensors]
            raise TypeError(f"support_ids: got {got}, want {want}")
        for tensor in self.tensors:
            check_dense("support_ids", tensor)
            check_device("support_ids", tensor, targets)
        shapes = [tuple(t.shape) for t in self.tensors]
        if len(self.tensors) == 1:
            self.width = width = shapes[0][-1] if shapes[0] else 0
            fits = shapes[0][:-1] == targets.shape and width > 0
        else:
            fits = len(shapes[0]) == 1 and shapes[1] == (targets.numel() + 1,)
        if not fits:
            raise ValueError(
                f"support_ids: got shapes {shapes}, want {(*targets.shape, 'K')} with K >= 1, or "
                f"[P] ids and {(targets.numel() + 1,)} offsets"
            )

    @property
    def _pairs(self) -> SupportPairs:
        """Pairs of a position and an id, for all positions."""
        ids, *offsets = (t.reshape(-1).long() for t in self.tensors)
        return SupportPairs(ids, width=self.width, offsets=next(iter(offsets), None))

    def survey(self, targets: Tensor) -> Tensor:
        """Six int64 numbers, [6]: the largest and the smallest id at a scored position; the number
        of invalid offsets (offsets must not decrease, must begin at 0 and must end at P); the
        number of repeated ids within a position; the number of scored positions whose target is not
        among their ids; the number of scored positions with ids."""
        targets, n, pairs = targets.reshape(-1), targets.numel(), self._pairs
        ids = pairs.ids
        offsets = pairs.offsets
        bad = (offsets.diff() < 0).sum() + (offsets[0] != 0) + (offsets[-1] != len(ids))
        if not n or not len(ids):
            return bad * (torch.arange(6, device=bad.device) == 2)
        at = pairs.tokens()
        counted = targets[at] != IGNORE
        if self.width is not None:
            counted &= ids >= 0
        real = torch.where(counted, ids, 0)
        # Make a unique key for each position and id; unscored elements get distinct negative keys.
        alone = ~torch.arange(len(ids), device=ids.device)
        key = torch.where(counted, at * HIGH + real.clamp(0, HIGH - 1), alone).sort().values
        has = count_in(at, n, counted) > 0
        hit = count_in(at, n, counted & (ids == targets[at])) > 0
        repeated = (key[1:] == key[:-1]).sum()
        missing = (has & ~hit).sum()
        return torch.stack([real.amax(), real.amin(), bad, repeated, missing, has.sum()])

    def check(self, facts: list[int], targets: Tensor, vocabulary: float) -> None:
        """Raise a ValueError if `facts`, the six numbers that the method `survey` counted in
        `support_ids`, show an id outside of the vocabulary, a repeated id, a missing target or bad
        offsets."""
        most, least, bad, twice, missing, _ = facts
        if bad:
            raise ValueError(
                "support_ids: got offsets that do not rise from 0 to the number of ids, "
                f"{len(self.tensors[0])}"
            )
        if not (most >= vocabulary or least < 0 or twice or missing):
            return
        ids = self._pairs.ids
        at = self._pairs.tokens()
        targets = targets.reshape(-1)
        for position in (targets != IGNORE).nonzero().squeeze(1).tolist():
            listed = [i for i in ids[at == position].tolist() if i >= 0 or self.width is None]
            target = int(targets[position])
            if wrong := [i for i in listed if not 0 <= i < vocabulary]:
                got = f"id {wrong[0]}"
                want = f"0 <= id < {vocabulary}"
            elif repeated := [i for i in listed if listed.count(i) > 1]:
                got = f"id {repeated[0]} more than once"
                want = "distinct ids"
            elif listed and target not in listed:
                shown = f"{listed[:8]}{' and more' if len(listed) > 8 else ''}"
                got = f"ids {shown}"
                want = f"the target, {target}, among them"
            else:
                continue
            raise ValueError(f"support_ids: got {got} at position {position}, want {want}")

    def pack(
        self, index: Tensor | None, live: Tensor | None, restricted: int | None
    ) -> SupportPairs:
        """Return the (token, id) pairs of the packed tokens; `index` and `live` are attributes of a
        `Packing`. The argument `restricted` is the number of packed tokens with at least one id in
        `support_ids`; None if all scored tokens have an id in `support_ids`."""
        if live is not None and self.width is None:
            raise ValueError("static: got support_ids with offsets, want [.., K]")
        pairs = self._pairs if index is None else self._pairs.take(index)
        # Give every unscored token one allowed id (the arbitrary id 0), so that its softmax is not
        # empty.
        if live is not None:
            ids = pairs.ids.view(len(live), self.width or 0).masked_fill(~live.unsqueeze(1), -1)
            ids[:, 0] = torch.where(live, ids[:, 0], 0)
            pairs = SupportPairs(ids.reshape(-1), width=self.width)
        if restricted is not None and restricted < len(pairs):
            pairs.free = (pairs.counts == 0).nonzero().squeeze(1)
        return pairs


class SupportPairs:
    """P pairs of a token and a vocabulary column that the token allows, for T packed tokens, sorted
    by token."""

    ids: Tensor  # Columns [P], int64; a negative entry marks an unused entry (no column).
    offsets: Tensor  # [T + 1] int64: token t has the columns ids[offsets[t] : offsets[t + 1]].
    width: int | None  # Number of columns per token; None if the number differs between tokens.
    # Indices [m] of tokens without ids, whose softmax is over all columns; None: all have ids.
    free: Tensor | None = None

    def __init__(
        self, ids: Tensor, *, width: int | None = None, offsets: Tensor | None = None
    ) -> None:
        self.ids = ids
        self.width = width
        if offsets is None:
            offsets = torch.arange(0, len(ids) + 1, width or 1, device=ids.device)
        self.offsets = offsets
        self._sorted: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def counts(self) -> Tensor:
        """The number of columns over which each token's softmax runs, [T]."""
        return count_in(self.tokens(), len(self), self.ids >= 0)

    def tokens(self, pairs: Tensor | None = None) -> Tensor:
        """Return the token of each of the `pairs` (indices into `ids`), by default of all `ids`;
        the token is in range even if `offsets` is invalid."""
        if pairs is None:
            pairs = torch.arange(len(self.ids), device=self.ids.device)
        ends = self.offsets[1:]
        return torch.searchsorted(ends, pairs, right=True).clamp_max(len(ends) - 1)

    @property
    def restricted(self) -> int:
        """The number of tokens that have `support_ids`."""
        return len(self) - (0 if self.free is None else len(self.free))

    @cached_property
    def _free(self) -> list[int]:
        """The tokens without `support_ids`, in CPU memory."""
        return [] if self.free is None else self.free.tolist()

    @cached_property
    def _ends(self) -> Sequence[int]:
        """The offsets [T + 1] of the tokens' columns in `ids`, in CPU memory."""
        width = self.width
        return self.offsets.tolist() if width is None else range(0, len(self.ids) + 1, width)

    def window(self, rows: slice, first: int, size: int) -> Support:
        """Return those pairs of a token and an allowed column whose token is in `rows` and whose
        column is in [first, first + size)."""
        begin = self._ends[rows.start]
        end = self._ends[rows.stop]
        ids = self.ids[begin:end]
        offsets = self.offsets[rows.start : rows.stop + 1] - begin
        # A kernel needs at least one element in `ids`; the id -1 stands for no column.
        if begin == end:
            ids = ids.new_full((1,), -1)
        return Support(ids, offsets, first, size)

    def unrestricted(self, rows: slice) -> Tensor | None:
        """[m] indices, counted from `rows.start`, of the tokens in `rows` without `support_ids`;
        None if all tokens in `rows` have `support_ids`."""
        first, last = (bisect_left(self._free, at) for at in (rows.start, rows.stop))
        return None if first == last or self.free is None else self.free[first:last] - rows.start

    def by_column(self, rows: slice, first: int, size: int) -> tuple[Tensor, Support]:
        """Return the indices [P] into `ids` for the tokens `rows`, sorted by column, and the tokens
        that allow each column; the sort runs on first use."""
        key = rows.start, rows.stop
        if key not in self._sorted:
            begin = self._ends[rows.start]
            end = self._ends[rows.stop]
            # Convert vocabulary columns to 32 bits: a GPU's radix sort needs half as many passes
            # for 32-bit integers as for 64-bit integers.
            columns, pairs = self.ids[begin:end].int().sort(stable=True)
            self._sorted[key] = pairs, self.tokens(pairs + begin) - rows.start, columns
        pairs, tokens, columns = self._sorted[key]
        bounds = torch.arange(first, first + size + 1, device=columns.device, dtype=columns.dtype)
        offsets = torch.searchsorted(columns, bounds)
        return pairs, Support(tokens, offsets, 0, rows.stop - rows.start)

    def take(self, index: Tensor) -> SupportPairs:
        """Return the pairs of the tokens `index`, in the order of `index`."""
        if self.width is not None:
            ids = self.ids.view(-1, self.width)[index].reshape(-1)
            taken = SupportPairs(ids, width=self.width)
        else:
            counts = self.offsets.diff()[index]
            offsets = offsets_of(counts)
            shift = (self.offsets[index] - offsets[:-1]).repeat_interleave(counts)
            places = torch.arange(len(shift), device=shift.device) + shift
            taken = SupportPairs(self.ids[places], offsets=offsets)
        if self.free is not None:
            taken.free = torch.isin(index, self.free).nonzero().squeeze(1)
        return taken
