"""What packing has to know of a batch before it drops and sorts tokens. The device is asked when
the batch is made, so that a later call finds the answer.

N positions, T of them scored, S segments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import IGNORE
from ..kernels import choose, load
from ..reading import Reading, room_for
from .segments import Segments


class Order(NamedTuple):
    """The position that each packed token comes from."""

    index: Tensor | None  # [T], None: all N in order
    ids: Tensor | None  # [T] segments, ascending; None: there is one
    counts: Tensor | Callable[[], Tensor]  # [S] tokens of each
    lengths: Callable[[], list[int]] | None = None  # scored tokens of each segment, if known
    unscored: Tensor | None = None  # [N - T]
    live: Tensor | None = None  # [T] bool, with static shapes: which are scored
    targets: Tensor | None = None  # [T], where finding the order has given them
    facts: Tensor | None = None  # of a survey: it is the order only if they fit, see `guessed`


class Survey:
    """Extremes and counts of a batch, and the order of its tokens that follows.

    On a GPU the facts are on their way when this was made; `read` waits for them alone.
    Nothing here knows the vocabulary: a call compares the extremes with its own.

    Attributes:
        id_fields: [N, K] each (given as [.., K]), whose values are columns of the vocabulary where
            they are not < 0.
        facts: [2 + values + S + 3] int64, see `kernels.interface.Kernels.survey`; then, for each
            of `id_fields`, at how many scored positions an id stands twice.
        more: further facts, int64 numbers that are read with the others.
        scored: what `compact` needs to know of the positions.
        tensors, versions: all that was looked at, as it was then.
        packing: `packing.Packing`, once a call has made it; other batches of these tokens share it.
    """

    packing: Any = None

    def __init__(
        self, targets: Tensor, segments: Segments, id_fields: dict[str, Tensor],
        more: Tensor | None = None, tensors: tuple[Tensor, ...] = ()
    ) -> None:
        self.tensors, self.versions = tensors, versions(tensors)
        self.targets, self.segments = targets, segments
        self.id_fields = id_fields and {n: t.flatten(0, -2) for n, t in id_fields.items()}
        self.acts = load(choose("auto", targets.device, torch.float32))
        told = targets.is_cuda and more is None and not id_fields  # by one kernel
        room = room_for(segments.count + 6, targets.get_device()) if told else None
        ids, host = tuple(self.id_fields.values()), None if room is None else room.values
        given = targets, segments._given, segments.count, IGNORE
        self.facts, self.scored = self.acts.survey(*given, id_fields=ids, host=host)
        if id_fields:
            scored = targets.reshape(-1) != IGNORE
            twice = [(_repeated(one) & scored).sum() for one in ids]
            self.facts = torch.cat([self.facts, torch.stack(twice)])
        self.size, self._alone = self.facts.shape[0], more is None
        self.bins = 4 + len(id_fields)  # the first segment's count among the facts
        self._read: list[int] | None = None
        self._reading = Reading(self.facts if more is None else torch.cat([self.facts, more]), room)
        if targets.is_cuda:
            self._stream = _stream(targets)

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether these are the tensors, and can tell when they change."""
        same = len(self.tensors) == len(tensors) and all(map(operator.is_, self.tensors, tensors))
        return same and self.versions is not None

    def read(self) -> list[int]:
        """The facts, and from `size` on the further ones, on the host."""
        if self._read is None:
            self._read = self._reading.tolist()
        return self._read

    def of_segments(self, facts: Any) -> Callable[[], Any]:
        """Scored tokens of each segment, of facts on the host or the device; it keeps no survey,
        whose packing will keep it."""
        at = slice(self.bins, self.bins + self.segments.count)
        return lambda: facts[at]

    @property
    def is_asked(self) -> bool:
        """Whether the device was asked on this stream, and nobody has read its answer yet."""
        asked = self._reading.event is not None and self._read is None
        return asked and _stream(self.targets) == self._stream

    def guessed(self) -> Order | None:
        """The order if all positions are scored and segments ascend, while the device has not said
        so; None where it has, or where it is asked for more."""
        if self.id_fields or not (self._alone and self.is_asked and self.targets.numel()):
            return None
        counts = self.of_segments(self.facts)
        return Order(None, flat(self.segments._given), counts, facts=self.facts)

    def is_whole(self, found: list[int] | None = None) -> bool:
        """Whether it is that order: no segment precedes the one before, no position is unscored."""
        found = self.read() if found is None else found
        return not (found[0] or found[self.bins + self.segments.count + 1])

    def check(self, vocabulary: int) -> list[int]:
        """The facts; ValueError for a bad target, segment id or id field, where it is scored."""
        found, end = self.read(), self.bins + self.segments.count
        if vocabulary < 1:
            raise ValueError("vocabulary: got a weight without rows or logits without columns")
        lowest, most, below, beyond = found[1], found[2], found[self.bins - 1], found[end]
        if lowest < 0 or most >= vocabulary:
            value = self.targets.reshape(-1)
            bad = (value < 0) | (value >= vocabulary)
            self._refuse("targets", value, bad, f"-100 or 0 <= target < {vocabulary}")
        for at, name in enumerate(self.id_fields, 3):
            if found[at] >= vocabulary:
                value = self.id_fields[name].amax(1)
                self._refuse(name, value, value >= vocabulary, f"id < {vocabulary}")
        for at, (name, value) in enumerate(self.id_fields.items(), end + 2):
            if found[at]:
                self._refuse(name, value, _repeated(value), "distinct ids")
        if below or beyond:
            ids = self.segments.ids.reshape(-1)
            bad = (ids < 0) | (ids >= self.segments.count)
            want = f"0 <= id < {self.segments.count} at a scored position"
            self._refuse("segments", ids, bad, want)
        return found

    def _refuse(self, name: str, value: Tensor, bad: Tensor, want: str) -> None:
        position = int((bad & (self.targets.reshape(-1) != IGNORE)).nonzero()[0])
        got = value[position].tolist()
        raise ValueError(f"{name}: got {got} at position {position}, want {want}")

    def order(self) -> Order:
        """The scored positions by segment."""
        segments, found, total = self.segments, self.read(), self.targets.numel()
        counts, lengths = self.of_segments(self.facts), self.of_segments(found)
        out = found[self.bins + segments.count + 1]
        if self.is_whole(found) or not total:
            return Order(None, flat(segments._given), counts, lengths)
        if not found[0]:
            index, ids, targets, unscored = self.acts.compact(
                self.targets, segments.ids, IGNORE, self.scored, total - out
            )
            return Order(index, ids, counts, lengths, unscored, targets=targets)
        # A bin for ids below 0, the segments', one for ids beyond; the last: what is not scored.
        ids, count = segments.ids.reshape(-1), segments.count
        bins = ids.clamp(-1, count).add_(1)
        bins.masked_fill_(self.targets.reshape(-1) == IGNORE, count + 2)
        order = _argsort(bins, count)
        index, unscored = order.split([total - out, out])
        return Order(index, ids[index], counts, lengths, unscored)


def versions(tensors: tuple[Tensor, ...]) -> list[int] | None:
    """How often each was changed in place; None where one of inference mode cannot tell."""
    return None if any(map(Tensor.is_inference, tensors)) else [t._version for t in tensors]


def flat(x: Any) -> Any:
    """[N] contiguous (a view costs a host a microsecond or two); None of None."""
    return x if x is None else (x if x.dim() == 1 else x.reshape(-1)).contiguous()


def _stream(tensor: Tensor) -> int:
    """The current stream of a tensor's device. (An object for it takes ten times as long.)"""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device())


def _repeated(ids: Tensor) -> Tensor:
    """[N] bool: positions of [N, K] at which an id that is not below 0 stands twice."""
    ordered = ids.sort(1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)


def static_order(targets: Tensor, segments: Segments, unit: int) -> Order:
    """All positions, the scored ones first, without a read: unscored ones and those with bad ids go
    last, into `unit` segments of their own."""
    ids, count = segments.ids.reshape(-1), segments.count
    bad = (ids < 0) | (ids >= count) | (targets == IGNORE)
    ids = ids.masked_fill(bad, count)
    index = _argsort(ids, count)
    ids = ids[index]
    # Where each segment begins: a GPU adds ones to few counts one after another.
    ends = torch.searchsorted(ids, torch.arange(count + unit + 1, device=ids.device))
    return Order(index, ids, ends.diff(), live=ids < count)


def _argsort(bins: Tensor, count: int) -> Tensor:
    """[N] a stable order by bin, one for each segment; a GPU sorts narrow numbers faster."""
    return bins.to(torch.int16 if count < 1 << 14 else torch.int32).argsort(stable=True)
