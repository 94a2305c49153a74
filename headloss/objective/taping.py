"""From an objective to its tape: what its terms compute is written down once.

T tokens, S segments, K terms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import CURRENT, Current
from ..batch.packing import PackedBatch
from ..batch.reduction import Totals
from ..kernels.opcodes import Op
from ..losses.origin import key_of
from ..losses.term import TRACING, Objective
from .bound import Part, bind, without_poison
from .lowering import Written, lowered
from .metrics import Max, Min, Observed, Sum
from .recording import ONE, SEGMENTS, TOKENS, Constant, Operand, Recorder, Unrecorded
from .recording import RecordedSegments as Recorded
from .statistics import DIFFERENTIABLE, Statistics, pull_back
from .tape import Reported, Source, Tape

Kinds = Mapping[str, torch.dtype | None]  # of fields; None: CURRENT
SAMPLES = ((2, 0, 3, 1), (1, 4))  # lengths of segments
REMEMBERED = 256

_TAPES: OrderedDict[object, Tape | None] = OrderedDict()


def tape_of(
    objective: Objective,
    statistics: frozenset[str],
    fields: Kinds,
    dtype: torch.dtype,
    *,
    observe: bool = True,
    gradients: bool = True,
) -> Tape | None:
    """`record`, remembered for objectives of the same structure; coefficients are none of it."""
    teachers, structure = _teachers(objective), []
    for _, term in objective.parts:
        known = key_of(term)
        if known is None:
            return None
        structure.append((known, term.teacher and teachers.index(term.teacher)))
    key = tuple(structure), statistics, frozenset(fields.items()), dtype, observe, gradients
    if key not in _TAPES:
        while len(_TAPES) >= REMEMBERED:
            _TAPES.popitem(last=False)
        options = {"observe": observe, "gradients": gradients}
        _TAPES[key] = record(objective, statistics, fields, dtype, **options)
    return _TAPES[key]


def forget_tapes() -> None:
    _TAPES.clear()


def _teachers(objective: Objective) -> list[Any]:
    found = dict.fromkeys(term.teacher for _, term in objective.parts)
    found.pop(None, None)
    return list(found)


def record(
    objective: Objective,
    statistics: frozenset[str],
    fields: Kinds,
    dtype: torch.dtype,
    *,
    observe: bool = True,
    gradients: bool = True,
) -> Tape | None:
    """The tape of an objective of the library's own terms.

    Args:
        statistics: those that a run is given.
        fields: [T] fields of the batch.
        dtype: of statistics and registers, float32 or float64.
        observe: report metrics.
        gradients: give coefficients.

    Returns:
        None where a term or reduction may depend on more than its arguments, needs the whole batch
        at once, or does what no instruction does. `Bound.gradient` serves those.
    """
    if objective.scope == "batch" or any(key_of(term) is None for _, term in objective.parts):
        return None
    if objective.segments_per_unit > 2:  # an instruction knows of pairs alone
        return None
    teachers = _teachers(objective)
    written = []
    token = TRACING.set(True)
    try:
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            for lengths in SAMPLES:
                sample = _Sample(lengths, statistics, fields, dtype, teachers)
                written.append(_write(sample, objective, observe, gradients))
    except Unrecorded:
        return None
    finally:
        TRACING.reset(token)
    # What hangs on the sample's values or sizes would differ.
    if written[0] != written[1]:
        return None
    terms, unit = len(objective.parts), objective.segments_per_unit
    return lowered(written[0], terms, unit, dtype)


class _Sample:
    """Made-up tokens whose vectors the recorder knows as inputs."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        statistics: frozenset[str],
        fields: Kinds,
        dtype: torch.dtype,
        teachers: list,
    ) -> None:
        self.recorder = recorder = Recorder(dtype)
        self.count, self.dtype, self.gone = sum(lengths), dtype, 0
        self.segments = Recorded(recorder, torch.tensor(lengths, device="cpu"))
        named = {name: self._leaf(("statistic", name), name) for name in sorted(statistics)}
        slopes = {key: self._leaf(("divergence", k), "logp") for k, key in enumerate(teachers)}
        self.stats = Statistics(**named, divergences=slopes)  # type: ignore[arg-type]
        made: dict[str, Tensor | Current] = {}
        for name, kind in fields.items():
            made[name] = CURRENT if kind is None else self._field(name, kind)
        targets = torch.zeros(self.count, dtype=torch.int64, device="cpu")
        self.batch = PackedBatch(targets, self.segments, made).on(self.stats)

    def _vector(self) -> Tensor:
        self.gone += 1
        steps = torch.arange(self.count, dtype=self.dtype, device="cpu")
        return -0.3 - 0.1 * ((steps * 7 + 3 * self.gone) % 5)

    def _leaf(self, source: Source, name: str) -> Tensor:
        leaf = self._vector().requires_grad_(name in DIFFERENTIABLE)
        return self.recorder.know(leaf, self.recorder.load(source))

    def _field(self, name: str, kind: torch.dtype) -> Tensor:
        values = self._vector()
        values = values if kind.is_floating_point else (values < -0.5).to(kind)
        source = "mask" if kind == torch.bool else "field"
        return self.recorder.know(values, self.recorder.load((source, name)))

    def number(self, kind: str, name: Any = None, value: float = 3.0) -> Tensor:
        number = torch.full((), value, dtype=torch.float64, device="cpu")
        return self.recorder.know(number, self.recorder.number((kind, name)))


def _write(sample: _Sample, objective: Objective, observe: bool, gradients: bool) -> Written:
    recorder, written = sample.recorder, Written([], [], [], [], [])
    named = list(objective.named())
    fields = {term.kept_field for _, _, term in named}
    totals = Totals(
        sample.number("tokens"),
        sample.number("segments"),
        {f: (sample.number("tokens", f), sample.number("segments", f)) for f in fields if f},
    )
    coefficients = [sample.number("coefficient", k) for k in range(len(named))]
    with torch.set_grad_enabled(gradients), recorder:
        parts = bind(objective, sample.batch, totals, 1, sample.dtype).parts
        losses = [_loss(part, sample) for part in parts]
        pairs = zip(parts, losses, strict=True)
        shares = [recorder.of(part.weights * loss) for part, loss in pairs]
        for k, share in enumerate(shares):  # each value, and the sum of them
            factor = recorder.of(coefficients[k])
            for at, times in ((k, ONE), (len(shares), factor)):
                node = recorder.measure(Op.SUM, TOKENS, share, times, ONE)
                written.measured.append((at, node))
        written.kinds.extend([Op.SUM] * (len(shares) + 1))
        if gradients:
            _pull_back(sample, parts, losses, coefficients, written)
        if observe:
            with torch.no_grad():
                _observe(sample, parts, written)
    written.nodes.extend(recorder.nodes)
    return written


def _loss(part: Part, sample: _Sample) -> Tensor:
    """A term at each token, 0 where it is left out."""
    view = sample.batch if part.kept is None else without_poison(sample.batch, part.kept)
    losses = part.term(sample.stats, view.on(sample.stats))
    return losses if part.kept is None else torch.where(part.kept, losses, 0)


class _Seeded(torch.autograd.Function):
    """The sum of vectors times their seeds, of which only the gradient matters. (Given the seeds,
    `torch.autograd.grad` would import symbolic shapes to look at theirs.)"""

    @staticmethod
    def forward(ctx, seeds: list[Tensor], *values: Tensor) -> Tensor:
        ctx.seeds = seeds
        return values[0].new_zeros(())

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return None, *ctx.seeds


def _pull_back(
    sample: _Sample,
    parts: tuple[Part, ...],
    losses: list[Tensor],
    coefficients: list[Tensor],
    written: Written,
) -> None:
    """The gradient of the sum with respect to the statistics, and what it means for the logits."""
    stats, recorder = sample.stats, sample.recorder
    leaves: dict[Any, Tensor] = {n: t for n, t in stats.tensors().items() if t.requires_grad}
    leaves |= stats.divergences
    chosen = [k for k, loss in enumerate(losses) if loss.requires_grad]
    found: dict[Any, Tensor] = {}
    if chosen:
        seeds = [(coefficients[k] * parts[k].weights).to(losses[k].dtype) for k in chosen]
        given = [losses[k] for k in chosen]
        total = _Seeded.apply(seeds, *given)
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        factor = sample.number("factor")
        with torch.no_grad():
            pairs = zip(leaves, gradients, strict=True)
            found = {name: g * factor for name, g in pairs if g is not None}
    with torch.no_grad():
        divergences = [
            (("divergence", k), found.pop(key, None)) for k, key in enumerate(stats.divergences)
        ]
        vocabulary: Any = sample.number("vocabulary")
        pulled = pull_back(found, stats, vocabulary).tensors()
    for source, vector in [*((("coefficient", n), v) for n, v in pulled.items()), *divergences]:
        if vector is not None:
            at = Constant(float(len(written.vectors)))  # one vector for each, though they be equal
            node = recorder.measure(Op.OUT, TOKENS, recorder.of(vector), at)
            written.vectors.append((source, node))


# ---------------------------------------------------------------------- metrics


def _observe(sample: _Sample, parts: tuple[Part, ...], written: Written) -> None:
    """What the terms report, and what is reported of every batch."""
    recorder, stats, batch = sample.recorder, sample.stats, sample.batch
    assert stats.entropy is not None
    tokens = _measure(recorder, written, Op.SUM, ONE)
    segments = _measure(recorder, written, Op.COUNT, ONE)
    written.reported.append(Reported("tokens", Sum, tokens))
    written.reported.append(Reported("segments", Sum, segments))
    _fold(recorder, written, {"entropy": Observed(stats.entropy)}, ONE)
    for part in parts:
        seen: dict[str, Observed] = {}
        for source in (part.term, *part.term.modifiers):
            if source.observe is not None:
                seen |= source.observe(stats, batch)
        seen = {f"{part.name}/{name}": o for name, o in seen.items()}
        kept = ONE if part.kept is None else recorder.of(part.kept)
        _fold(recorder, written, {n: o for n, o in seen.items() if o.per == "token"}, kept)
        of_segments = {n: o for n, o in seen.items() if o.per == "segment"}
        if of_segments:
            present = batch.segments.lengths > 0
            if part.kept is not None:
                present = present & (batch.segments.sum(part.kept.to(sample.dtype)) > 0)
            _fold(recorder, written, of_segments, recorder.of(present), SEGMENTS)


def _fold(
    recorder: Recorder,
    written: Written,
    observed: dict[str, Observed],
    mask: Operand,
    kind: int = TOKENS,
) -> None:
    """As `metrics.fold_all`: sums first."""
    extremes = {Max: Op.LARGEST, Min: Op.SMALLEST}
    for name, o in sorted(observed.items(), key=lambda item: item[1].kind in extremes):
        count = -1
        counted = mask if o.where is None else recorder(Op.MIN, mask, recorder.of(o.where))
        if o.kind not in extremes and o.kind is not Sum:
            count = _measure(recorder, written, Op.SUM, ONE, counted, kind)
        op = extremes.get(o.kind, Op.SUM)  # type: ignore[arg-type]
        at = _measure(recorder, written, op, recorder.of(o.values), counted, kind)
        written.reported.append(Reported(name, o.kind, at, count))


def _measure(
    recorder: Recorder,
    written: Written,
    op: Op,
    values: Operand,
    mask: Operand = ONE,
    kind: int = TOKENS,
) -> int:
    """The place of a measurement; the same one twice is made once."""
    node = recorder.measure(op, kind, values, ONE, mask)
    for at, known in written.measured:
        if known == node:
            return at
    written.measured.append((len(written.kinds), node))
    written.kinds.append(op)
    return len(written.kinds) - 1

