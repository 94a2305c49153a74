"""The statistics and batch fields that loss terms read, found by calling each term with a small
sample batch, and cached in a bounded table."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor

from ..batch.batch import CURRENT, Current, Kind
from ..batch.packing import MissingField, PackedBatch
from ..batch.segments import Segments
from ..losses.identity import fingerprint
from ..losses.teacher import SampleExtras, Teacher
from ..losses.term import Objective, Term
from ..losses.trial import Reads, check_cuts, trace
from ..statistics.softmax import CANDIDATES, COLLISION, PEAK, Statistics

Kinds = Mapping[str, Kind]  # Dtype and trailing shape (a `Kind`) of each batch field, by name.
# Number of tokens of the sample batch on which a term is traced. Each token is a segment; two
# tokens suffice for a loss on pairs of segments.
SAMPLE = 2
# Fields of a `Term` that decide which statistics and batch fields the term reads.
CONTENT = attrgetter(
    "function",
    "observe",
    "scope",
    "per",
    "segments_per_unit",
    "modifiers",
    "weight_fields",
    "teacher",
)
# If an error's text begins with one of the texts in `OURS`, the function `reads` adds the term's
# name to the error.
OURS = ("sums over", "reads stats.")
TABLE_ENTRIES = 256  # Largest number of entries of the cache `_TABLE`.
_TABLE: dict[object, Reads] = {}
_LOCK = threading.Lock()


def clear_cache() -> None:
    """Clear the cache of statistics and fields that terms read; the next call traces its terms
    again.

    >>> import headloss as hl
    >>> hl.clear_cache()
    """
    with _LOCK:
        _TABLE.clear()


def reads(
    objective: Objective,
    kinds: Kinds,
    dtype: torch.dtype,
    device: torch.device,
    observe: bool,
    cuts: bool = False,
) -> dict[str, Reads]:
    """Return, for each term by its key, the statistics and batch fields that the term reads. Raise
    ValueError for a field that the batch lacks. If `cuts` is True, also raise ValueError for a term
    whose values change if the batch is divided.

    Terms that differ only in reduction or coefficient share an entry of the cache `_TABLE`, so that
    a term that is made anew in each step is traced only once.
    """
    by_term = {}
    fields = tuple(kinds.items())
    # A trace made in inference mode contains no gradients, so that the cache of traced terms has
    # separate entries for inference mode.
    how = dtype, observe, cuts, torch.is_inference_mode_enabled()
    for name, _, term in objective.named():
        # An external loss is not called with a small sample batch, because its term already lists
        # the statistics that the loss reads.
        if isinstance(term.function, Reads):
            by_term[name] = term.function
            continue
        key = fingerprint(CONTENT(term), []), fields, how
        try:
            read = _TABLE.get(key)
        except TypeError:  # An option of the term cannot be hashed.
            read = None
        if read is None:
            sample = sample_batch(kinds, term, device)
            stats = sample_statistics(dtype, device, kinds, term.teacher)
            try:
                read = trace(term, stats, sample.on(stats), observe)
                if cuts:
                    check_cuts(term, stats, sample)
            except ValueError as error:
                if isinstance(error, MissingField) or str(error).startswith(OURS):
                    raise ValueError(f"term {name}: {error}") from None
                raise
            # If the cache `_TABLE` is full, drop the oldest entry.
            with _LOCK, contextlib.suppress(TypeError):
                while len(_TABLE) >= TABLE_ENTRIES:
                    del _TABLE[next(iter(_TABLE))]
                _TABLE[key] = read
        by_term[name] = read
    return by_term


def has_slopes(objective: Objective, kinds: Kinds) -> bool:
    """Return True if the gradient can be computed before the statistics (by
    `WeightedObjective.beforehand`). Return False for terms with modifiers (such as
    `.corrected(...)`) and for batches with a field set to `headloss.CURRENT` (this call's own
    log-probs), because the gradient then depends on the statistics."""
    if (None, ()) in kinds.values():
        return False
    return all(term.slopes is not None and not term.modifiers for _, term in objective.parts)


# ---------------------------------------------------------------------- a made-up batch


class _NoSums(Segments):
    """Segments that raise an error on every sum over segments; used to call a term with
    scope="token" once on a small sample batch. A term with scope="token" may be called with only
    some tokens of a segment, so that a sum over segments would be wrong and raises an error."""

    def sum(self, values: Tensor) -> Tensor:
        raise ValueError('sums over segments, so it must declare scope="segment"')

    mean = sum


def sample_batch(kinds: Kinds, term: Term, device: torch.device) -> PackedBatch:
    """Return a sample batch of two tokens with fields of the given kinds, in at least
    `term.segments_per_unit` segments (two for a loss on pairs of segments)."""
    ids = torch.arange(SAMPLE, device=device)
    fields: dict[str, Tensor | Current] = {}
    for name, (dtype, more) in kinds.items():
        values = torch.full((SAMPLE, *more), 0.0 if more else -0.5, device=device)
        fields[name] = CURRENT if dtype is None else values.to(dtype)
    count = max(SAMPLE, term.segments_per_unit)
    counts = (torch.arange(count, device=device) < SAMPLE).long()
    segments = (_NoSums if term.scope == "token" else Segments)(ids, count, counts=counts)
    return PackedBatch(torch.zeros_like(ids), segments, fields)


def sample_statistics(
    dtype: torch.dtype,
    device: torch.device,
    kinds: Kinds,
    teacher: Teacher | None,
    tokens: int = SAMPLE,
) -> Statistics:
    """Return statistics of sample tokens; each statistic but `top1` is a leaf that requires a
    gradient."""

    def leaf(value: float, *more: int) -> Tensor:
        return torch.full((tokens, *more), value, dtype=dtype, device=device, requires_grad=True)

    def outcomes(ids: str, more: int = 0) -> Tensor:
        """Return K + `more` + 1 log-probs: of K columns, of `more` additional columns, and of the
        tail (all remaining columns)."""
        return leaf(-2.0, kinds[ids][1][-1] + more + 1)

    extras = SampleExtras(leaf)
    if teacher is not None and {"teacher_topk_ids", "teacher_topk_logps"} <= kinds.keys():
        extras[teacher] = outcomes("teacher_topk_ids", teacher.tail == "sampled")
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
