"""From an objective to its tape: what its terms compute is written down once.

T tokens, S segments, K terms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import CURRENT
from ..batch.packing import PackedBatch
from ..batch.reduction import Totals
from ..kernels.opcodes import INPUTS, MEASUREMENTS, NUMBERS, Op
from ..losses.origin import key_of
from ..losses.scope import TRACING
from ..losses.term import Objective
from .bound import Part, bind, differentiate
from .metrics import Max, Mean, Min, Observed, Sum
from .recording import ONE, TOKENS, Node, Operand, RecordedSegments, Recorder, Source, Unrecorded
from .statistics import DIFFERENTIABLE, Statistics, pull_back
from .tape import Reported, Row, Tape

Kinds = Mapping[str, torch.dtype | None]  # of fields; None: CURRENT
SAMPLES = ((2, 0, 3, 1), (1, 4))  # lengths of segments
REMEMBERED = 256
# A recording: its nodes, and which of them are results, see `_Sample`.
Written = tuple[list[Node], list[tuple[Source, int]], list[tuple[int, int]], list[Reported]]
TENSORS = frozenset({"tokens", "segments", "factor"})  # numbers that may lie on the device

_TAPES: OrderedDict[object, Tape | None] = OrderedDict()


def tape_of(objective: Objective, *given: Any, **options: bool) -> Tape | None:
    """`record`, remembered for objectives of the same structure; coefficients are none of it."""
    statistics, fields, dtype = given
    terms, teachers = [term for _, term in objective.parts], objective.teachers
    structure = tuple((key_of(t), t.teacher and teachers.index(t.teacher)) for t in terms)
    key = structure, statistics, frozenset(fields.items()), dtype, frozenset(options.items())
    if key not in _TAPES:
        while len(_TAPES) >= REMEMBERED:
            _TAPES.popitem(last=False)
        _TAPES[key] = record(objective, *given, **options)
    return _TAPES[key]


def is_own(objective: Objective) -> bool:
    """Whether all terms are the library's own, so that it is known what they depend on."""
    return all(key_of(term) is not None for _, term in objective.parts)


def forget_tapes() -> None:
    _TAPES.clear()


def record(
    objective: Objective, statistics: frozenset[str], fields: Kinds, dtype: torch.dtype, *,
    observe: bool = True, gradients: bool = True
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
    # An instruction knows of pairs alone.
    if objective.scope == "batch" or objective.segments_per_unit > 2 or not is_own(objective):
        return None
    token = TRACING.set(True)
    try:
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            samples = [_Sample(n, statistics, fields, dtype, objective) for n in SAMPLES]
            written, other = [sample.record(gradients, observe) for sample in samples]
    except Unrecorded:
        return None
    finally:
        TRACING.reset(token)
    if written != other:  # something hangs on the sample's sizes
        return None
    return lowered(written, objective, dtype)


class _Sample:
    """An objective on made-up tokens, whose vectors the recorder knows as inputs."""

    def __init__(
        self, lengths: tuple[int, ...], statistics: frozenset[str], fields: Kinds,
        dtype: torch.dtype, objective: Objective
    ) -> None:
        self.recorder = recorder = Recorder(dtype)
        self.vectors: list[tuple[Source, int]] = []  # what they are, and nodes of OUT
        self.measured: list[tuple[int, int]] = []  # (measurement, node); it adds up its nodes
        self.reported: list[Reported] = []
        self.count, self.dtype, self.objective = sum(lengths), dtype, objective
        self.segments = RecordedSegments(recorder, torch.tensor(lengths, device="cpu"))
        named = {name: self._vector(("statistic", name)) for name in sorted(statistics)}
        keys = enumerate(objective.teachers)
        slopes: dict[Any, Tensor] = {key: self._vector(("divergence", k)) for k, key in keys}
        for leaf in (*slopes.values(), *(named[n] for n in DIFFERENTIABLE if n in named)):
            leaf.requires_grad_()
        self.stats = Statistics(**named, divergences=slopes)  # type: ignore[arg-type]
        made = {n: CURRENT if k is None else self._field(n, k) for n, k in fields.items()}
        targets = torch.zeros(self.count, dtype=torch.int64, device="cpu")
        self.batch = PackedBatch(targets, self.segments, made).on(self.stats)

    def _vector(self, source: Source, dtype: torch.dtype | None = None) -> Tensor:
        """An input; its values are read by nothing that can be recorded."""
        values = torch.zeros(self.count, dtype=dtype or self.dtype, device="cpu")
        return self.recorder.know(values, self.recorder.load(source))

    def _field(self, name: str, kind: torch.dtype) -> Tensor:
        source = "mask" if kind == torch.bool else "field"
        return self._vector((source, name), None if kind.is_floating_point else kind)

    def _number(self, kind: str, name: Any = None) -> Tensor:
        number = torch.full((), 3.0, dtype=torch.float64, device="cpu")
        node = Node(Op.NUMBER, ((kind, name),), TOKENS)
        return self.recorder.know(number, self.recorder.node(node))

    def record(self, gradients: bool, observe: bool) -> Written:
        """Values and the loss; the gradient; metrics."""
        of, named = self.recorder.of, list(self.objective.named())
        kept = {term.kept_field for _, _, term in named} - {None}
        totals = Totals(
            self._number("tokens"),
            self._number("segments"),
            {f: (self._number("tokens", f), self._number("segments", f)) for f in kept},  # type: ignore[misc]
        )
        coefficients = [self._number("coefficient", k) for k in range(len(named))]
        with torch.set_grad_enabled(gradients), self.recorder:
            parts = bind(self.objective, self.batch, totals, 1, self.dtype).parts
            shares = [part.weights * part.losses(self.stats, self.batch) for part in parts]
            for k, (share, times) in enumerate(zip(shares, coefficients, strict=True)):
                for place, factor in ((k, ONE), (len(shares), of(times))):  # its value; the loss
                    node = self.recorder.node(Node(Op.SUM, (of(share), factor, ONE), TOKENS))
                    self.measured.append((place, node))
            if gradients:
                pairs = zip(shares, coefficients, strict=True)
                self._pull_back(sum(share * times for share, times in pairs))  # type: ignore[arg-type]
            if observe:
                with torch.no_grad():
                    self._observe(parts)
        return self.recorder.nodes, self.vectors, self.measured, self.reported

    def _pull_back(self, losses: Tensor) -> None:
        """The gradient of the sum with respect to the statistics, and what it means for the
        logits."""
        stats, of = self.stats, self.recorder.of
        leaves: dict[Any, Tensor] = {n: t for n, t in stats.tensors().items() if t.requires_grad}
        found: dict[Any, Tensor] = differentiate(losses.sum(), leaves | stats.divergences)
        with torch.no_grad():
            factor: Any = self._number("factor") if found else None
            found = {name: g * factor for name, g in found.items()}
            vocabulary: Any = self._number("vocabulary")
            pulled = pull_back(found, stats, vocabulary).tensors()
        given: dict[Source, Tensor] = {("coefficient", n): vector for n, vector in pulled.items()}
        keys = enumerate(stats.divergences)
        given |= {("divergence", k): found[key] for k, key in keys if key in found}
        for at, (source, vector) in enumerate(given.items()):
            node = Node(Op.OUT, (of(vector), of(at)), TOKENS)  # one for each, though they be equal
            self.vectors.append((source, self.recorder.node(node)))

    # ------------------------------------------------------------------ metrics

    def _measure(self, op: Op, values: Operand, mask: Operand = ONE, kind: int = TOKENS) -> int:
        """The place of a measurement; the same one twice is made once."""
        node = self.recorder.node(Node(op, (values, ONE, mask), kind))
        known = [at for at, other in self.measured if other == node]
        if not known:
            known = [len(dict(self.measured))]
            self.measured.append((known[0], node))
        return known[0]

    def _observe(self, parts: tuple[Part, ...]) -> None:
        """What the terms report, and what is reported of every batch."""
        recorder, stats, batch = self.recorder, self.stats, self.batch
        for name, op in (("tokens", Op.SUM), ("segments", Op.COUNT)):
            self.reported.append(Reported(name, Sum, (self._measure(op, ONE),)))
        self._fold({"entropy": Observed(stats.entropy)}, ONE)
        for part in parts:
            for kind, (observed, kept) in enumerate(part.observed(stats, batch)):
                self._fold(observed, ONE if kept is None else recorder.of(kept), kind)

    def _fold(self, observed: dict[str, Observed], mask: Operand, kind: int = TOKENS) -> None:
        """As `metrics.fold_all`: sums first."""
        recorder, extremes = self.recorder, {Max: Op.LARGEST, Min: Op.SMALLEST}
        for name, o in sorted(observed.items(), key=lambda item: item[1].kind in extremes):
            counted = mask if o.where is None else recorder(Op.MIN, mask, recorder.of(o.where))
            op = extremes.get(o.kind, Op.SUM)  # type: ignore[arg-type]
            places = [self._measure(op, recorder.of(o.values), counted, kind)]
            if issubclass(o.kind, Mean):
                places.append(self._measure(Op.SUM, ONE, counted, kind))
            self.reported.append(Reported(name, o.kind, tuple(places)))


# ---------------------------------------------------------------------- instructions

def lowered(written: Written, objective: Objective, dtype: torch.dtype) -> Tape | None:
    """The nodes that results need, in phases, each with a register; None if they are too many."""
    nodes, vectors, measured, reported = written
    targets: dict[int, list[int]] = {}
    for at, node in [*((at, node) for at, (_, node) in enumerate(vectors)), *measured]:
        targets.setdefault(node, []).append(at)
    levels = _levels(nodes, list(targets))
    order = sorted(levels, key=levels.__getitem__)
    inputs, numbers = (
        list(dict.fromkeys(nodes[v].operands[0] for v in order if nodes[v].op is op))
        for op in (Op.LOAD, Op.NUMBER)
    )
    kinds = {place: nodes[v].op for place, v in measured}
    addresses = len(inputs) + sum(kind in TENSORS for kind, _ in numbers)
    if max(addresses - INPUTS, len(numbers) - NUMBERS, len(kinds) - MEASUREMENTS) > 0:
        return None
    places = {source: at for given in (inputs, numbers) for at, source in enumerate(given)}
    rows, registers = _allocated(nodes, order, targets, places, [len(vectors), 0])
    phases: list[list[Row]] = [[] for _ in range(max(levels.values(), default=0) + 1)]
    for v, row in rows:
        phases[levels[v]].append(row)
    return Tape(
        phases=tuple(map(tuple, phases)),
        registers=registers,
        inputs=tuple(inputs),
        numbers=tuple(numbers),
        vectors=tuple(source for source, _ in vectors),
        kinds=tuple([kinds[place] for place in range(len(kinds))]),
        terms=len(objective.parts),
        reported=tuple(reported),
        dtype=dtype,
        segments_per_unit=objective.segments_per_unit,
    )


def _levels(nodes: list[Node], results: list[int]) -> dict[int, int]:
    """The phase of every node that a result needs: even over tokens, odd over segments; each node
    stands after those that it reads, inputs right before they are needed."""
    levels: dict[int, int] = {}

    def visit(v: int) -> int:
        if v not in levels:
            reads, kind = nodes[v].reads, nodes[v].kind
            levels[v] = max([visit(o) + (nodes[o].kind != kind) for o in reads], default=kind)
        return levels[v]

    for v in results:
        visit(v)
    first: dict[int, int] = {}
    for v, level in levels.items():
        for o in nodes[v].reads:
            if not nodes[o].reads:
                level_of_input = level - (nodes[o].kind != nodes[v].kind)
                first[o] = min(first.get(o, level_of_input), level_of_input)
    return levels | first


def _allocated(
    nodes: list[Node], order: list[int], targets: dict[int, list[int]],
    places: dict[Source, int], taken: list[int]
) -> tuple[list[tuple[int, Row]], tuple[int, int]]:
    """Instructions with registers, which are used again once nothing reads them any more; how many
    there are over tokens and over segments. No instruction writes what it reads. `places` are those
    of sources among the inputs or numbers, `taken` the registers that are spoken for."""
    last = {o: at for at, v in enumerate(order) for o in nodes[v].reads}
    free: tuple[list[int], list[int]] = ([], [])
    place: Any = {**places}
    rows = []
    for at, v in enumerate(order):
        op, operands, kind = nodes[v]
        outs = targets.get(v)
        if outs is None:
            if not free[kind]:
                free[kind].append(taken[kind])
                taken[kind] += 1
            place[v] = free[kind].pop()
            outs = [place[v]]
        read = tuple(place.get(o, o) for o in operands)
        rows += [(v, Row(op, out, read, kind)) for out in outs]
        for o in set(nodes[v].reads):
            if last[o] == at:
                free[nodes[o].kind].append(place[o])
    return rows, (taken[0], taken[1])
