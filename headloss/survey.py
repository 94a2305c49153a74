"""What packing has to know of a batch before it drops and sorts, in one read of the device.

N positions, T of them scored, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import choose, load
from .kernels.interface import Kernels
from .segments import Segments, count_in


class Order(NamedTuple):
    """Which position each packed token comes from."""

    index: Tensor | None  # [T], None: all N in order
    ids: Tensor  # [T] segments, ascending
    counts: Tensor  # [S] tokens of each
    lengths: list[int] | None = None
    unscored: Tensor | None = None  # [N - T]
    live: Tensor | None = None  # [T] bool, with static shapes: which are scored
    targets: Tensor | None = None  # [T], where finding the order has given them


@dataclass(kw_only=True)
class Survey:
    """Facts of a batch on the device that the host is to read, and the order that follows.

    Few launches come before the read, since nothing else of a call can run until it is there.

    Attributes:
        facts: [2 + values + S + 3] int64, see `kernels.interface.Kernels.survey`. None: none are
            read.
        scored: what `compact` needs to know of the positions.
    """

    targets: Tensor  # of any shape, N positions
    segments: Segments
    ignore: int  # the target of what is not scored
    unit: int
    id_fields: dict[str, Tensor]  # [N, K] each
    temperature: Tensor | None = None  # as targets
    facts: Tensor | None = None
    scored: Tensor | None = None
    read: list[int] | None = None

    @classmethod
    def of(
        cls,
        targets: Tensor,
        segments: Segments,
        ignore: int,
        unit: int,
        static: bool,
        id_fields: dict[str, Tensor],  # each [N, K]
        temperature: Tensor | None = None,  # as targets
    ) -> Survey:
        """Look at a batch; nothing is read yet, and with `static` nothing will be."""
        found = cls(
            targets=targets,
            segments=segments,
            ignore=ignore,
            unit=unit,
            id_fields=id_fields,
            temperature=temperature,
        )
        if not static:
            found.facts, found.scored = found._acts.survey(
                targets,
                segments.ids,
                segments.count,
                ignore,
                id_fields=tuple(id_fields.values()),
                positive=temperature,
            )
        return found

    @property
    def _acts(self) -> Kernels:
        return load(choose("auto", self.targets.device, torch.float32))

    @property
    def count(self) -> int:
        """S."""
        return self.segments.count

    @cached_property
    def ids(self) -> Tensor:
        """[N] int64."""
        return self.segments.ids.reshape(-1)

    @cached_property
    def unscored(self) -> Tensor:
        """[N] bool."""
        return self.targets.reshape(-1) == self.ignore

    @cached_property
    def bins(self) -> Tensor:
        """[N] int64. Bin 0 takes ids below 0, 1 to S the segments', S + 1 those beyond; the last,
        S + 2, takes what is not scored."""
        count = self.count
        return self.ids.clamp(-1, count).add_(1).masked_fill_(self.unscored, count + 2)

    def values(self) -> dict[str, Tensor]:
        """[N] int64 each, what must lie within 0..V - 1 at scored positions, by name. (Ids below 0
        are empty places; targets below 0 are not.) Of a temperature: 1 where it is not a finite
        number > 0, 0 elsewhere."""
        values = {"targets": self.targets.reshape(-1)}
        values |= {name: v.amax(1) for name, v in self.id_fields.items()}
        if self.temperature is not None:
            t = self.temperature.reshape(-1)
            values["temperature"] = (~((t > 0) & t.isfinite())).long()
        return values

    def order(self, vocabulary: int) -> Order:
        """The scored positions by segment; with static shapes all, the scored ones first.

        Raises:
            ValueError: a bad target, id, temperature or value of an id field at a scored position.
        """
        if self.facts is None:
            return self._static_order()
        read = self.facts.tolist() if self.read is None else self.read
        names = ["targets", *self.id_fields, *["temperature"] * (self.temperature is not None)]
        (descents, lowest), read = read[:2], read[2:]
        largest, (below, *lengths, beyond, out) = read[: len(names)], read[len(names) :]
        for name, most in zip(names, largest, strict=True):
            self._check(name, lowest, most, vocabulary)
        if below or beyond:
            bad = (self.ids < 0) | (self.ids >= self.count)
            want = f"0 <= id < {self.count} at a scored position"
            self._refuse("segments", self.ids, bad, want)
        counts = self.facts[3 + len(names) : -2]
        total = self.targets.numel()
        if not (descents or out) or not total:
            return Order(None, self.ids, counts, lengths)
        if not descents:
            assert self.scored is not None
            index, ids, targets, unscored = self._acts.compact(
                self.targets, self.segments.ids, self.ignore, self.scored, total - out
            )
            return Order(index, ids, counts, lengths, unscored, targets=targets)
        order = _argsort(self.bins, self.count)
        index, unscored = order.split([total - out, out])
        return Order(index, self.ids[index], counts, lengths, unscored)

    def _check(self, name: str, lowest: int, most: int, vocabulary: int) -> None:
        """ValueError where a fact says that a value is out of its range."""
        if name == "temperature":
            if most:
                assert self.temperature is not None
                bad = self.values()[name] > 0
                self._refuse(name, self.temperature.reshape(-1), bad, "a finite number > 0")
        elif name == "targets":
            if lowest < 0 or most >= vocabulary:
                value = self.values()[name]
                bad = (value < 0) | (value >= vocabulary)
                self._refuse(name, value, bad, f"-100 or 0 <= target < {vocabulary}")
        elif most >= vocabulary:
            value = self.values()[name]
            self._refuse(name, value, value >= vocabulary, f"id < {vocabulary}")

    def _static_order(self) -> Order:
        """Bad ids count as not scored; these go last, into `unit` segments of their own."""
        bad = (self.bins == 0) | (self.bins > self.count)
        ids = (self.bins - 1).masked_fill_(bad, self.count)
        index, counts = _argsort(ids, self.count), count_in(ids, self.count + self.unit)
        ids = ids[index]
        return Order(index, ids, counts, live=ids < self.count)

    def _refuse(self, name: str, value: Tensor, bad: Tensor, want: str) -> None:
        position = int((bad & ~self.unscored).nonzero()[0])
        got = value[position].item()
        raise ValueError(f"{name}: got {got} at position {position}, want {want}")


def _argsort(bins: Tensor, count: int) -> Tensor:
    """[N] a stable order, of S segments' bins: a GPU sorts narrow numbers in fewer passes."""
    return bins.to(torch.int16 if count < 1 << 14 else torch.int32).argsort(stable=True)
