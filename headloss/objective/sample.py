"""A small made-up batch and its statistics, to try a term on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..batch.batch import CURRENT, Current, Kind
from ..batch.packing import PackedBatch
from ..batch.segments import Segments
from ..losses.term import Term
from ..statistics.softmax import CANDIDATES, COLLISION, PEAK, Statistics

Kinds = Mapping[str, Kind]  # of fields, by name
_SAMPLE = 2  # tokens, in a segment each: enough for a pair


class _NoSums(Segments):
    """Segments for tracing a token-scoped term, which may be called on parts of a segment."""

    def sum(self, values: Tensor) -> Tensor:
        raise ValueError('sums over segments, so it must declare scope="segment"')

    mean = sum


def sample_batch(kinds: Kinds, term: Term, device: torch.device) -> PackedBatch:
    """A batch of two made-up tokens with the fields of a real one, in as many segments as belong
    together."""
    ids = torch.arange(_SAMPLE, device=device)
    cls = _NoSums if term.scope == "token" else Segments
    fields: dict[str, Tensor | Current] = {}
    for name, (dtype, more) in kinds.items():
        values = torch.full((_SAMPLE, *more), 0.0 if more else -0.5, device=device)
        fields[name] = CURRENT if dtype is None else values.to(dtype)
    count = max(_SAMPLE, term.segments_per_unit)
    counts = (torch.arange(count, device=device) < _SAMPLE).long()
    return PackedBatch(torch.zeros_like(ids), cls(ids, count, counts=counts), fields)


def sample_statistics(
    dtype: torch.dtype, device: torch.device, kinds: Kinds, teachers: list, tokens: int = _SAMPLE
) -> Statistics:
    """Statistics of made-up tokens, each a leaf that requires a gradient."""

    def leaf(value: float, *more: int) -> Tensor:
        return torch.full((tokens, *more), value, dtype=dtype, device=device, requires_grad=True)

    def outcomes(ids: str, more: int = 0) -> Tensor:
        """Log-probs of K columns, of some more, and of the rest."""
        return leaf(-2.0, kinds[ids][1][-1] + more + 1)

    stored = {"teacher_topk_ids", "teacher_topk_logps"} <= kinds.keys()
    extras: dict[object, Tensor] = {
        t: outcomes("teacher_topk_ids", t.tail == "sampled") if stored else leaf(0.3)
        for t in teachers
    }
    extras |= {COLLISION: leaf(0.5), PEAK: leaf(1.0)}
    if "candidate_ids" in kinds:
        extras[CANDIDATES] = outcomes("candidate_ids")
    return Statistics(
        logp=leaf(-1.0),
        lse=leaf(2.0),
        entropy=leaf(1.5),
        mean_logit=leaf(0.1),
        top1=leaf(1.0).detach(),
        extras=extras,
    )
