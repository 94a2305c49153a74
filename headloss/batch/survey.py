"""Questions of packing to the device about a batch's values. N positions, S segments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..arguments import IGNORE
from ..host_copy import HostCopy
from .segments import Segments, count_in

# Ids of columns, each once at a position, and the field of their probabilities.
ID_FIELDS = {"teacher_topk_ids": "teacher_topk_logps", "candidate_ids": "candidate_probs"}
NO_LOGITS = "probabilities that sum to at most 1; of logits take log_softmax or softmax"


class Survey:
    """Extremes and counts of a batch.

    On a GPU the answers are on their way to the host when this was made; `numbers` waits for them
    alone. Nothing here knows the vocabulary: a call compares the extremes with its own.

    Args:
        id_fields: [.., K] each, whose values are columns of the vocabulary where they are not < 0.
        probs: [.., K] values of the field in `ID_FIELDS`, by the name of the id field.
        of_support: `SupportIds.survey`, read with the other numbers.
        tensors: all that is looked at.
    """

    packing: Any = None  # once a call has made it; other batches of these tokens share it

    def __init__(
        self,
        targets: Tensor,
        segments: Segments,
        id_fields: dict[str, Tensor],
        probs: dict[str, Tensor],
        of_support: Tensor | None,
        tensors: tuple[Tensor, ...],
    ) -> None:
        self.tensors = tensors
        self.versions = versions(tensors)
        self.targets = targets.reshape(-1)
        self.segments = segments
        self.id_fields = {n: t.flatten(0, -2) for n, t in id_fields.items()}
        self.probs = probs
        self.scored = scored = self.targets != IGNORE  # [N]
        # [N] the segment of each scored position, S where it is in none; S + 1: not scored. None:
        # all positions are in a segment, in order.
        self.bins: Tensor | None = None
        count = segments.count
        descents = list[Tensor]()
        if segments._ascends and segments._row and count:
            counts = scored.view(count, -1).sum(1)
        elif segments._ascends:
            counts = count_in(segments.ids.reshape(-1), count, scored)
        else:
            ids = segments.ids.reshape(-1)
            self.bins = segments._bins.masked_fill(~scored, count + 1)
            counts = count_in(self.bins, count + 2, torch.ones_like(ids))
            descents = [(ids[1:] < ids[:-1]).sum()]
        self.counts = counts[:count]  # [S] scored positions of each segment
        numbers = [*descents, *self._extremes(), counts, of_support]
        self._copy = HostCopy(torch.cat([n.view(-1) for n in numbers if n is not None]))

    def _extremes(self) -> list[Tensor]:
        """Compute the smallest target and the largest; of each of id_fields the largest, and at how
        many scored positions an id stands twice or probabilities sum to more than 1. 0 stands for
        unscored positions."""
        scored = self.scored
        fields = self.id_fields
        if not len(scored):
            return [self.targets.new_zeros(2 + 2 * len(fields), dtype=torch.int64)]
        numbers = list((self.targets * scored).aminmax())
        for name, field in fields.items():
            largest = field.amax(1).masked_fill(~scored, 0).long().amax()
            bad = _repeated(field)
            if name in self.probs:
                bad |= self._beyond_one(name)
            numbers += [largest, (bad & scored).sum()]
        return numbers

    def _beyond_one(self, name: str) -> Tensor:
        """[N] bool: positions at which probabilities beside an id field sum to more than 1.01; in
        16 and 8 bits, than their rounding explains."""
        ids, values = self.id_fields[name], self.probs[name].view_as(self.id_fields[name]).float()
        probs = values.exp() if "logps" in ID_FIELDS[name] else values
        most = {1: 2.0, 2: 1.1}.get(self.probs[name].itemsize, 1.01)
        return torch.where(ids < 0, 0, probs).sum(1) > most

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """Tell whether these are the tensors, and can tell when they change; RuntimeError where
        they have changed."""
        same = list(map(id, self.tensors)) == list(map(id, tensors))
        if same and self.versions not in (None, versions(tensors)):
            raise RuntimeError(
                "batch: its targets, segments or stored ids were changed in place since it was "
                "made; make a new Batch"
            )
        return same and self.versions is not None

    @cached_property
    def numbers(self) -> tuple[list[int], list[int], list[int]]:
        """On the host: how often a segment's id is followed by a lower one, and the extremes; how
        many positions are in each bin; the support's."""
        numbers = self._copy.tolist()
        count = self.segments.count
        extremes = 3 + 2 * len(self.id_fields)
        if self.bins is None:  # no descent, and no position that is in no segment
            numbers.insert(0, 0)
            last = extremes + count
            numbers[last:last] = 0, len(self.scored) - sum(numbers[extremes:last])
        counts = extremes + count + 2
        return numbers[:extremes], numbers[extremes:counts], numbers[counts:]

    @property
    def highest(self) -> int:
        """The largest of all scored targets and ids of columns, where none stands twice."""
        return max(self.numbers[0][2:] + self.numbers[2][:1])

    def check(self, vocabulary: float) -> Survey:
        """The same; ValueError for a bad target, segment or id field, where it is scored."""
        if vocabulary < 1:
            raise ValueError("vocabulary: got a weight without rows or logits without columns")
        (_, lowest, highest, *of_fields), (*_, nowhere, _), _ = self.numbers
        if lowest < 0 or highest >= vocabulary:
            bad = (self.targets < 0) | (self.targets >= vocabulary)
            self._refuse("targets", self.targets, bad, f"-100 or 0 <= target < {vocabulary}")
        pairs = zip(of_fields[::2], of_fields[1::2], strict=True)
        for (name, ids), (largest, bad) in zip(self.id_fields.items(), pairs, strict=True):
            if largest >= vocabulary:
                value = ids.amax(1)
                self._refuse(name, value, value >= vocabulary, f"id < {vocabulary}")
            if bad and (twice := _repeated(ids) & self.scored).any():
                self._refuse(name, ids, twice, "distinct ids")
            if bad:
                values = self.probs[name].view_as(ids)
                self._refuse(ID_FIELDS[name], values, self._beyond_one(name), NO_LOGITS)
        if nowhere:
            count = self.segments.count
            want = f"0 <= id < {count} at a scored position"
            self._refuse("segments", self.segments.ids.reshape(-1), self.bins == count, want)
        return self

    def _refuse(self, name: str, value: Tensor, bad: Tensor, want: str) -> None:
        position = int((bad & self.scored).nonzero()[0])
        got = value[position].tolist()
        raise ValueError(f"{name}: got {got} at position {position}, want {want}")


def versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """Number of in-place changes of each tensor; None where one of inference mode cannot tell."""
    return None if any(map(Tensor.is_inference, tensors)) else [t._version for t in tensors]


def _repeated(ids: Tensor) -> Tensor:
    """[N] bool: positions of [N, K] at which an id that is not below 0 stands twice."""
    ordered = ids.sort(1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
