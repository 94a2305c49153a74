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

# Batch fields of vocabulary ids, which must be distinct at each position, each with the name of the
# field that holds the probabilities or log-probs of the ids.
ID_FIELDS = {"teacher_topk_ids": "teacher_topk_logps", "candidate_ids": "candidate_probs"}
# Number larger than every vocabulary id. If a field of ids contains repeated ids, or ids whose
# probabilities sum to more than 1, `BAD` is stored in place of the field's largest id, so that the
# later check of ids against the vocabulary size raises an error.
BAD = (1 << 63) - 1
NO_LOGITS = (
    "probabilities >= 0 that sum to at most 1; of logits take log_softmax or softmax, of log-probs "
    "exp in the place of probabilities"
)


class Survey:
    """Extremes and counts of a batch's targets, segment ids and id fields.

    On a GPU, the constructor of `Survey` starts an asynchronous copy of the results to the CPU, and
    the first access to `Survey.numbers` waits for the end of the copy. The constructor of `Survey`
    does not compare ids with a vocabulary size; each loss call compares the smallest and largest
    ids with the vocabulary size of the call's head.

    Args:
        id_fields: fields [.., K] of vocabulary ids; negative ids are unused entries.
        probs: [.., K] probabilities or log-probs that belong to the ids, by the id field's name
            (see `ID_FIELDS`).
        of_support: the result of `SupportIds.survey`, copied to the CPU together with the extremes
            and counts.
        tensors: all tensors whose extremes and counts are computed.
    """

    # The `Packing` of the batch, made by the first loss computed on the batch; batches with the
    # same tokens share the `Packing`.
    packing: Any = None

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
        # Number [N] of the segment of each position, from 0 to S - 1; instead, S if the position's
        # segment id is invalid, and S + 1 if the position is unscored. None if segment ids ascend
        # and every position has a segment id.
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
        # [S] scored positions of each segment
        self.counts = counts if self.bins is None else counts[:count]
        numbers = [*descents, *self._extremes(), counts, of_support]
        self._copy = HostCopy(torch.hstack([n for n in numbers if n is not None]))

    def _extremes(self) -> list[Tensor]:
        """Return the smallest and the largest target, and the largest id of each id field, or `BAD`
        if a scored position has a repeated id or probabilities that sum to more than 1. Unscored
        positions count as 0."""
        scored = self.scored
        if not scored.shape[0]:
            return [self.targets.new_zeros(2 + len(self.id_fields), dtype=torch.int64)]
        numbers = list((self.targets * scored).aminmax())
        for name, ids in self.id_fields.items():
            ordered = ids.sort(1).values
            largest = ordered[:, -1].long().masked_fill(self._bad(name, ordered), BAD)
            numbers.append((largest * scored).amax())
        return numbers

    def _bad(self, name: str, ordered: Tensor) -> Tensor:
        """[N] bool: True for a position where the id field `name` has a repeated id, or where the
        absolute values of the ids' probabilities sum to more than 1, beyond what rounding explains.
        `ordered` holds the sorted ids."""
        repeated = _repeated(ordered)
        if name not in self.probs:
            return repeated.any(1)
        ids = self.id_fields[name]
        probs = self.probs[name].view_as(ids)
        most = {1: 2.0, 2: 1.1}.get(probs.itemsize, 1.01)
        probs = probs.float() if most > 1.1 else probs
        probs = probs.exp() if "logps" in ID_FIELDS[name] else probs
        # Each row of `terms` contains the probabilities of one token; each repeated id adds three
        # elements of value 1. A row of `terms` with a sum above `most` (1 and a margin for
        # rounding) means a repeated id, or probabilities that sum to more than 1. Sum absolute
        # values, so that the check also finds log-probs (negative numbers) passed by mistake as
        # probabilities.
        terms = torch.cat([repeated] * 3 + [probs.masked_fill(ids < 0, 0)], 1)
        return torch.linalg.vector_norm(terms, 1, 1) > most

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """True if the `Survey` was made from the given tensors and can detect changes; RuntimeError
        if a tensor was changed in place."""
        same = list(map(id, self.tensors)) == list(map(id, tensors))
        if same and self.versions not in (None, versions(tensors)):
            raise RuntimeError(
                "batch: its targets, segments or stored ids were changed in place since it was "
                "made; make a new Batch"
            )
        return same and self.versions is not None

    @cached_property
    def numbers(self) -> tuple[list[int], list[int], list[int]]:
        """Three lists of numbers in CPU memory: (1) the number of places where segment ids
        decrease, and the extremes of targets and id fields; (2) the number of scored positions in
        each segment, of scored positions outside of all segments, and of unscored positions; (3)
        the result of `SupportIds.survey`."""
        numbers = self._copy.tolist()
        extremes = 3 + len(self.id_fields)
        last = extremes + self.segments.count
        # If `self.bins` is None, segment ids ascend by construction and every position is in a
        # segment: the number of decreases of segment ids and the number of scored positions outside
        # of segments are 0. The number of unscored positions is the number of all positions minus
        # the number of scored positions.
        if self.bins is None:
            numbers.insert(0, 0)
            numbers[last:last] = 0, self.scored.shape[0] - sum(numbers[extremes:last])
        return numbers[:extremes], numbers[extremes : last + 2], numbers[last + 2 :]

    @property
    def highest(self) -> int:
        """The largest of all scored targets and vocabulary ids of a batch that `check` accepts."""
        return max(self.numbers[0][2:] + self.numbers[2][:1])

    def check(self, vocabulary: float) -> Survey:
        """Return `self`; ValueError for a bad target, segment id or value of an id field at a
        scored position."""
        if vocabulary < 1:
            raise ValueError("vocabulary: got a weight without rows or logits without columns")
        (_, lowest, highest, *of_fields), (*_, nowhere, _), _ = self.numbers
        if lowest < 0 or highest >= vocabulary:
            bad = (self.targets < 0) | (self.targets >= vocabulary)
            self._refuse("targets", self.targets, bad, f"-100 or 0 <= target < {vocabulary}")
        for (name, ids), largest in zip(self.id_fields.items(), of_fields, strict=True):
            if largest >= min(vocabulary, BAD):
                ordered = ids.sort(1).values
                value = ordered[:, -1]
                self._refuse(name, value, value >= vocabulary, f"id < {vocabulary}")
                self._refuse(name, ids, _repeated(ordered).any(1), "distinct ids")
                bad = self._bad(name, ordered)
                self._refuse(ID_FIELDS[name], self.probs[name].view_as(ids), bad, NO_LOGITS)
        if nowhere:
            count = self.segments.count
            want = f"0 <= id < {count} at a scored position"
            self._refuse("segments", self.segments.ids.reshape(-1), self.bins == count, want)
        return self

    def _refuse(self, name: str, value: Tensor, bad: Tensor, want: str) -> None:
        """ValueError for the first scored position where the mask `bad` is True, if any."""
        for at in (bad & self.scored).nonzero().flatten().tolist():
            raise ValueError(f"{name}: got {value[at].tolist()} at position {at}, want {want}")


def versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the version counter of each tensor; None if a tensor made in inference mode has no
    counter."""
    return None if any(map(Tensor.is_inference, tensors)) else [t._version for t in tensors]


def _repeated(ordered: Tensor) -> Tensor:
    """Return [N, K - 1] bool for sorted ids [N, K]: True for an id >= 0 that is equal to its left
    neighbour."""
    return ordered[:, :-1] >= ordered[:, 1:].clamp_min(0)
