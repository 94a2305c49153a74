"""Survey of a batch: extremes and counts that packing reads from the device. N positions, S
segments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..arguments import IGNORE
from ..host_copy import HostCopy
from .segments import Segments, count_in

# Fields of vocabulary ids, distinct at each position, and the field of their probabilities.
ID_FIELDS = {"teacher_topk_ids": "teacher_topk_logps", "candidate_ids": "candidate_probs"}
NO_LOGITS = "probabilities that sum to at most 1; of logits take log_softmax or softmax"


class Survey:
    """Extremes and counts of a batch's targets, segment ids and id fields.

    On a GPU, the constructor starts an asynchronous copy to the host, and `numbers` waits for this
    copy alone. A survey does not depend on the vocabulary; each call compares the survey's extremes
    with the vocabulary size of the head.

    Args:
        id_fields: fields [.., K] of vocabulary ids; negative ids are empty slots.
        probs: [.., K] probabilities or log-probs that belong to the ids, by the id field's name
            (see `ID_FIELDS`).
        of_support: the result of `SupportIds.survey`, copied to the host with the other numbers.
        tensors: all tensors that the survey reads.
    """

    packing: Any = None  # The packing of the first call, shared by batches of the same tokens.

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
        self.scored = scored = self.targets != IGNORE  # Shape [N], bool.
        # The segment of each scored position, [N]: S for a bad segment id, S + 1 for an unscored
        # position. None if all positions are in a segment, in order.
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
        """Return the smallest and the largest target; for each id field, the largest id and the
        number of scored positions with a repeated id or with probabilities that sum to more than 1.
        Unscored positions count as 0."""
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
        """[N] bool: True for positions whose probabilities of the id field `name` sum to more than
        1.01; for 16-bit and 8-bit probabilities, to more than rounding explains."""
        ids, values = self.id_fields[name], self.probs[name].view_as(self.id_fields[name]).float()
        probs = values.exp() if "logps" in ID_FIELDS[name] else values
        most = {1: 2.0, 2: 1.1}.get(self.probs[name].itemsize, 1.01)
        return torch.where(ids < 0, 0, probs).sum(1) > most

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """True if the survey was made from these tensors and can detect changes; RuntimeError if a
        tensor was changed in place."""
        same = list(map(id, self.tensors)) == list(map(id, tensors))
        if same and self.versions not in (None, versions(tensors)):
            raise RuntimeError(
                "batch: its targets, segments or stored ids were changed in place since it was "
                "made; make a new Batch"
            )
        return same and self.versions is not None

    @cached_property
    def numbers(self) -> tuple[list[int], list[int], list[int]]:
        """The survey's numbers on the host, in three lists: descents of the segment ids and
        extremes of the fields; counts of positions per bin; numbers of the support."""
        numbers = self._copy.tolist()
        count = self.segments.count
        extremes = 3 + 2 * len(self.id_fields)
        # Insert the numbers of descents and of positions in no segment, which are 0.
        if self.bins is None:
            numbers.insert(0, 0)
            last = extremes + count
            numbers[last:last] = 0, len(self.scored) - sum(numbers[extremes:last])
        counts = extremes + count + 2
        return numbers[:extremes], numbers[extremes:counts], numbers[counts:]

    @property
    def highest(self) -> int:
        """The largest of all scored targets and vocabulary ids, if no position has a repeated
        id."""
        return max(self.numbers[0][2:] + self.numbers[2][:1])

    def check(self, vocabulary: float) -> Survey:
        """Return the survey; ValueError for a bad target, segment or id field at a scored
        position."""
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
            if bad:
                self._refuse(name, ids, _repeated(ids), "distinct ids")
                values = self.probs[name].view_as(ids)
                self._refuse(ID_FIELDS[name], values, self._beyond_one(name), NO_LOGITS)
        if nowhere:
            count = self.segments.count
            want = f"0 <= id < {count} at a scored position"
            self._refuse("segments", self.segments.ids.reshape(-1), self.bins == count, want)
        return self

    def _refuse(self, name: str, value: Tensor, bad: Tensor, want: str) -> None:
        """ValueError for the first scored position that is `bad`, if there is one."""
        for position in (bad & self.scored).nonzero().flatten().tolist():
            got = value[position].tolist()
            raise ValueError(f"{name}: got {got} at position {position}, want {want}")


def versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the version counter of each tensor; None if a tensor made in inference mode has no
    counter."""
    return None if any(map(Tensor.is_inference, tensors)) else [t._version for t in tensors]


def _repeated(ids: Tensor) -> Tensor:
    """[N] bool: True for positions of [N, K] ids with a repeated nonnegative id."""
    ordered = ids.sort(1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
