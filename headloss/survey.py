"""What packing has to know of a batch before it drops and sorts, in one read of the device.

N positions, T of them scored, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .segments import Segments, count_in


class Order(NamedTuple):
    """Which position each packed token comes from."""

    index: Tensor | None  # [T], None: all N in order
    ids: Tensor  # [T] segments, ascending
    counts: Tensor  # [S] tokens of each
    lengths: list[int] | None = None
    unscored: Tensor | None = None  # [N - T]
    live: Tensor | None = None  # [T] bool, with static shapes: which are scored


@dataclass(kw_only=True)
class Survey:
    """Facts of a batch on the device that the host is to read, and the order that follows.

    Few launches come before the read, since nothing else of a call can run until it is there.

    Attributes:
        bins: [N] int64. Bin 0 takes ids below 0, 1 to S the segments', S + 1 those beyond; the
            last, S + 2, takes what is not scored.
        values: [N] int64 each, what must lie within 0..V - 1 at scored positions, by name. (Ids
            below 0 are empty places; targets below 0 are not.) Of a temperature: 1 where it is not
            a finite number > 0, 0 elsewhere.
        facts: [2 + values + S + 3] int64: how often a bin is followed by a lower one (0: scored
            positions are sorted and stand before the others); the smallest target and the largest
            of each of `values`; positions in each bin. None: none are read.
    """

    unscored: Tensor  # [N] bool
    ids: Tensor  # [N] int64
    count: int  # S
    unit: int
    bins: Tensor
    values: dict[str, Tensor]
    facts: Tensor | None
    temperature: Tensor | None = None  # [N]
    read: list[int] | None = None

    @classmethod
    def of(
        cls,
        targets: Tensor,  # [N]
        unscored: Tensor,  # [N] bool
        segments: Segments,
        unit: int,
        static: bool,
        id_fields: dict[str, Tensor],  # each [N, K]
        temperature: Tensor | None = None,  # [N]
    ) -> Survey:
        """Look at a batch; nothing is read yet, and with `static` nothing will be."""
        ids, count = segments.ids.reshape(-1), segments.count
        bins = ids.clamp(-1, count).add_(1).masked_fill_(unscored, count + 2)
        values = {"targets": targets} | {name: v.amax(1) for name, v in id_fields.items()}
        if temperature is not None:
            values["temperature"] = (~((temperature > 0) & temperature.isfinite())).long()
        facts = None
        if not static and len(targets):
            first, *others = (v.masked_fill(unscored, 0) for v in values.values())
            descents = (bins[1:] < bins[:-1]).sum()
            found = [descents, *first.aminmax(), *(other.amax() for other in others)]
            facts = torch.cat([*(f.view(1) for f in found), count_in(bins, count + 3)])
        elif not static:
            facts = bins.new_zeros(2 + len(values) + count + 3)
        return cls(
            unscored=unscored,
            ids=ids,
            count=count,
            unit=unit,
            bins=bins,
            values=values,
            facts=facts,
            temperature=temperature,
        )

    def order(self, vocabulary: int) -> Order:
        """The scored positions by segment; with static shapes all, the scored ones first.

        Raises:
            ValueError: a bad target, id, temperature or value of an id field at a scored position.
        """
        if self.facts is None:
            return self._static_order()
        read = self.facts.tolist() if self.read is None else self.read
        (descents, lowest), read = read[:2], read[2:]
        largest, (below, *lengths, beyond, out) = read[: len(self.values)], read[len(self.values) :]
        for (name, value), most in zip(self.values.items(), largest, strict=True):
            if name == "targets" and (lowest < 0 or most >= vocabulary):
                bad = (value < 0) | (value >= vocabulary)
                self._refuse(name, value, bad, f"-100 or 0 <= target < {vocabulary}")
            elif name == "temperature":
                if most:
                    assert self.temperature is not None
                    self._refuse(name, self.temperature, value > 0, "a finite number > 0")
            elif most >= vocabulary:
                self._refuse(name, value, value >= vocabulary, f"id < {vocabulary}")
        if below or beyond:
            bad = (self.ids < 0) | (self.ids >= self.count)
            want = f"0 <= id < {self.count} at a scored position"
            self._refuse("segments", self.ids, bad, want)
        counts = self.facts[3 + len(self.values) : -2]
        if not (descents or out) or not len(self.ids):
            return Order(None, self.ids, counts, lengths)
        order = _argsort(self.bins, self.count)
        index, unscored = order.split([len(order) - out, out])
        return Order(index, self.ids[index], counts, lengths, unscored)

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
