"""Trial of a term on a small sample: the inputs read, and the effect of splitting the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import did_you_mean
from ..batch.packing import MissingField, missing
from ..batch.segments import Chunk, Segments
from ..statistics.divergence import Measure
from ..statistics.metrics import Observed, checked
from ..statistics.softmax import BESIDE, STATISTICS, Statistics
from .identity import Recorder, leaves_of
from .scope import TRACING
from .teacher import Teacher
from .term import Objective, Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

# A piece of a batch for a trial run: indices of the piece's tokens in the whole batch, and the
# piece as a `PackedBatch`.
Piece = tuple[slice | Tensor, "PackedBatch"]


@dataclass(frozen=True)
class Reads:
    """Statistics and batch fields that a term reads.

    Attributes:
        statistics: names of the statistics read.
        fields: names of the batch fields read.
        gradients: names of the statistics through which the loss is differentiable.
        measures: the teacher's divergences read; empty for a stored top k.
        observed: names of the per-token metrics.
    """

    statistics: frozenset[str]
    fields: frozenset[str]
    gradients: frozenset[str]
    measures: frozenset[Measure] = frozenset()
    observed: frozenset[str] = frozenset()


def trace(term: Term, stats: Statistics, batch: PackedBatch, observe: bool = True) -> Reads:
    """Run a term once on a small sample and return the statistics and fields that it reads.

    Raises ValueError if the function captures a tensor that requires a gradient: the engine
    differentiates with respect to the statistics alone, so that the captured tensor's gradient
    would be lost.
    """
    for field in term.weight_fields:
        if field not in batch:
            raise MissingField(f"reads {missing(field, batch.kinds())}")
    seen: tuple[set[str], set[str]] = set(), set()
    stats_, batch_ = Recorder(stats, seen[0]), Recorder(batch, seen[1])
    token = TRACING.set(True)
    try:
        values, names = _trial(term, stats_, batch_, observe)
    except AttributeError as error:
        if error.obj is not stats:
            raise
        want = did_you_mean(str(error.name), (*STATISTICS, *BESIDE))
        if error.name in ("divergence", "acceptance", "log_acceptance"):
            want = "but has no teacher: want @hl.term(teacher=hl.teacher(...))"
        raise ValueError(f"reads stats.{error.name}, {want}") from None
    except (RuntimeError, ValueError) as error:
        if type(error) is RuntimeError and not term.is_own:
            raise ValueError(
                f"term {term.name}: {error} (statistics and fields are vectors, with a value for "
                f"each token; it was tried on {len(batch)}; pass numbers as options of the term)"
            ) from error
        wide = sorted(name for name in seen[1] & batch.kinds().keys() if batch.kinds()[name][1])
        said = str(error).removeprefix(f"term {term.name}: ")
        if not (term.is_own and wide) or said.startswith("reads "):  # a field is missing
            raise
        more = f"with several values of batch.{wide[0]} at each token"
        raise ValueError(f"term {term.name}: {said}, {more}") from error
    finally:
        TRACING.reset(token)
    own = {id(leaf): name for name, leaf in stats.tensors().items()}
    own |= {id(leaf): name_of(key) for key, leaf in stats.extras.items()}
    leaves = list(leaves_of(values))
    for leaf in leaves:
        if id(leaf) not in own:
            raise ValueError(
                f"term {term.name}: a tensor of shape {tuple(leaf.shape)} that requires a gradient "
                "is caught in its function; its gradient would be lost: detach it, or train it "
                "by headloss.head_function, whose loss_fn may hold parameters"
            )
    measures = (key[1] for key in stats.extras if isinstance(key, tuple))
    gradients = frozenset(own[id(leaf)] for leaf in leaves)
    read = frozenset(seen[0]), frozenset(seen[1])
    return Reads(*read, gradients, frozenset(measures), frozenset(names))


def measures_of(
    objective: Objective, reads: Mapping[str, Reads]
) -> tuple[tuple[Teacher, tuple[Measure, ...]], ...]:
    """Return each teacher of an objective, with all divergence measures that the terms read."""
    measures = {teacher: set[Measure]() for teacher in objective.teachers}
    for name, _, term in objective.named():
        if term.teacher is not None:
            measures[term.teacher] |= reads[name].measures
    return tuple((teacher, tuple(sorted(of_one))) for teacher, of_one in measures.items())


def observed(term: Term, stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
    """Return the metrics that a term and its modifiers report, by name."""
    reports: dict[str, Observed] = {}
    # Read the segment count from the batch itself: a `Recorder` of the batch would list the read of
    # `segments` as a read by the term.
    recorded = batch._target if isinstance(batch, Recorder) else batch
    for source in (term, *term.modifiers):
        if source.observe is not None:
            report = source.observe(term.view(stats, batch), batch)
            reports |= checked(source.name, report, len(batch), recorded.segments.count)
    return reports


def name_of(key: object) -> str:
    """Return a name for a key of `Statistics.extras`: the name of the divergence for a pair of
    teacher and divergence, "teacher_topk" for a teacher with a stored top k, else the key as a
    string."""
    if isinstance(key, Teacher):
        return "teacher_topk"
    return str(key[1].kind if isinstance(key, tuple) else key)


def _trial(term: Term, stats: Any, batch: Any, observe: bool) -> tuple[Tensor, set[str]]:
    """Return a term's values on a sample, and the names of its per-token metrics."""
    names = set[str]()
    with torch.enable_grad():
        values = term(stats, batch)
    if observe:
        own = batch._target  # even a token-scoped term's metrics may sum over segments
        segments = Segments(own.segments.ids, own.segments.count, counts=own.segments.lengths)
        batch = Recorder(replace(own, segments=segments), batch._seen)
        with torch.no_grad():
            report = observed(term, stats, batch)
            names = {name for name, of in report.items() if of.per == "token"}
    return values, names


NEEDS = 'declare scope="batch", or segments_per_unit=2 of a term of pairs of segments'


def check_pieces(
    term: Term, stats: Statistics, values: Tensor, pieces: Sequence[Piece], cut: str, rtol: float
) -> None:
    """Compare a term's values on parts of a batch with the term's values on the whole batch.

    Raises:
        ValueError: if the term fails on a part of the batch, or its values on a part differ from
            its values on the whole batch.
    """
    try:
        parts = []
        for rows, piece in pieces:
            part = stats.map(lambda t, rows=rows: t[rows])
            parts.append(term(part, piece.on(part)))
    except (IndexError, RuntimeError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"term {term.name}: fails on a part of the segments: {problem}; {NEEDS}"
        ) from error
    got = torch.cat(parts)
    want = torch.cat([values[rows] for rows, _ in pieces])
    if not torch.allclose(got, want, rtol, rtol / 100, equal_nan=True):
        raise ValueError(
            f"term {term.name}: differs by {float((got - want).abs().max()):.3g} between the whole "
            f'batch and {cut}; its scope is "{term.scope}", by which it may be cut there: leave a '
            "mean over tokens to its reduction, give the value of another position (the next "
            f"token's, say) as a field of the batch, or {NEEDS}"
        )


def check_cuts(term: Term, stats: Statistics, batch: PackedBatch) -> None:
    """Raise ValueError for a user's term whose values change if its batch is split into tokens.

    For example, `check_cuts` raises for a term whose function takes a mean over the batch's tokens,
    because the term gives other values on single tokens. `check_cuts` runs the term on segments of
    one token each and makes the CPU wait for the GPU.
    """
    capturing = batch.targets.is_cuda and torch.cuda.is_current_stream_capturing()
    uncut = term.is_own or term.scope == "batch" or term.segments_per_unit > 1
    if uncut or capturing:
        return
    ramp = torch.linspace(1.0, 0.5, len(batch), device=batch.targets.device)
    stats = stats.map(lambda t: t.detach() * ramp.view(-1, *[1] * (t.dim() - 1)))
    kinds = batch.kinds().items()
    vectors = [n for n, (dtype, more) in kinds if dtype and dtype.is_floating_point and not more]
    batch = batch.replacing({name: getattr(batch, name) * ramp for name in vectors})
    chunks = [Chunk(i, i + 1, i, i + 1) for i in range(len(batch))]
    token = TRACING.set(True)
    try:
        with torch.no_grad():
            values = term(stats, batch.on(stats))
            pieces = [(chunk.rows, batch.slice(chunk)) for chunk in chunks]
            check_pieces(term, stats, values, pieces, "single tokens", 1e-4)
    finally:
        TRACING.reset(token)
