"""What packing has to know of a batch before it drops and sorts, in one read of the device.

N positions, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .segments import Segments, count_in


@dataclass(kw_only=True)
class Survey:
    """The order of packed tokens, and facts on the device that the host is to read.

    Attributes:
        scored: [N] bool.
        key: [N] int64, the segment of each position, S where it is not scored (or its id is bad).
        order: [N] int64, positions sorted by key.
        counts: [S + unit] int64, positions of each key.
        ids: [N] int64, segments as given.
        values: what must lie within 0..V - 1 at scored positions, by name.
        facts: [1 + 1 + 2 values + S] int64: whether positions are packed as they lie; whether an id
            is bad; the smallest and the largest of each of `values`; lengths. None: none are read.
    """

    scored: Tensor
    key: Tensor
    order: Tensor
    counts: Tensor
    ids: Tensor
    values: dict[str, Tensor]
    facts: Tensor | None
    read: list[int] | None = None

    @classmethod
    def of(
        cls,
        targets: Tensor,  # [N]
        scored: Tensor,  # [N] bool
        segments: Segments,
        unit: int,
        static: bool,
        id_fields: dict[str, Tensor],  # each [N, K]
    ) -> Survey:
        """Look at a batch; nothing is read yet, and with `static` nothing will be."""
        ids, count = segments.ids.reshape(-1), segments.count
        wrong = scored & ((ids < 0) | (ids >= count))
        key = torch.where(scored & ~wrong, ids, count)
        order = key.argsort(stable=True)
        counts = count_in(key, torch.ones_like(scored), count + unit)
        values = {"targets": targets} | {name: v.amax(1) for name, v in id_fields.items()}
        facts = None
        if not static:
            place = torch.arange(len(order), device=order.device)
            found = [((order == place) & scored).all().long(), wrong.any().long()]
            for name, value in values.items():
                held = torch.where(scored, value, 0) if len(value) else value.new_zeros(1)
                # Ids below 0 are empty places; targets below 0 are not.
                found += [held.amin().long() if name == "targets" else found[0] * 0]
                found += [held.amax().long()]
            facts = torch.cat([torch.stack(found), counts[:count]])
        return cls(
            scored=scored,
            key=key,
            order=order,
            counts=counts,
            ids=ids,
            values=values,
            facts=facts,
        )

    def check(self, vocabulary: int) -> tuple[bool, list[int]]:
        """Whether positions are packed as they lie, and each segment's scored tokens.

        Raises:
            ValueError: a bad target, id or value of an id field at a scored position.
        """
        assert self.facts is not None
        read = self.facts.tolist() if self.read is None else self.read
        (in_order, wrong), extremes = read[:2], read[2 : 2 + 2 * len(self.values)]
        for i, (name, value) in enumerate(self.values.items()):
            if extremes[2 * i] < 0 or extremes[2 * i + 1] >= vocabulary:
                want = f"-100 or 0 <= target < {vocabulary}"
                if name == "targets":
                    bad = (value < 0) | (value >= vocabulary)
                else:
                    bad, want = value >= vocabulary, f"id < {vocabulary}"
                self._refuse(name, value, bad, want)
        count = len(read) - 2 - len(extremes)
        if wrong:
            bad = (self.ids < 0) | (self.ids >= count)
            self._refuse("segments", self.ids, bad, f"0 <= id < {count} at a scored position")
        return bool(in_order), read[2 + len(extremes) :]

    def _refuse(self, name: str, value: Tensor, bad: Tensor, want: str) -> None:
        position = int((bad & self.scored).nonzero()[0])
        got = int(value[position])
        raise ValueError(f"{name}: got {got} at position {position}, want {want}")
