"""An objective as a list of instructions, so that a call evaluates all of it in one launch.

T scored tokens, S segments, n tokens of a run, K terms. `taping.record` writes down what the terms
of an objective, their weights, their gradient and their metrics compute. `Tape.run` then gives what
`Bound.gradient` and the metrics give, for any T, S, totals and coefficients of the sum. On a GPU
one generic kernel reads the instructions, so nothing is compiled for an objective; `run_plain` is
its twin in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.packing import Packing
from ..batch.reduction import Number, Totals
from ..batch.segments import Segments
from ..kernels.opcodes import ELEMENTWISE, MEASURED, Op, Way
from .metrics import Measurement, Metrics
from .recording import COMPUTE, SEGMENTS, TOKENS, Constant
from .statistics import Coefficients, Statistics

LAUNCH, SEGMENT = int(Way.LAUNCH), int(Way.SEGMENT)

Source = tuple[str, Any]  # ("field", "advantages"), ("tokens", None)...


class Row(NamedTuple):
    """An instruction: operands are registers or a constant; of a LOAD or NUMBER, the input."""

    op: Op
    out: int  # register, or measurement
    operands: tuple[int | Constant, ...]
    kind: int  # of vectors: TOKENS or SEGMENTS


class Reported(NamedTuple):
    """A metric, by its places among the measurements."""

    name: str
    kind: type[Measurement]
    at: int
    count: int = -1


class Column(NamedTuple):
    """A field of the batch, and how the value of a token is found in it."""

    values: Tensor  # [T], [N] or [S], contiguous
    way: int  # a Way: an IntEnum is slow to hash


class Tokens:
    """What a run reads of a packed batch; nothing is gathered.

    Attributes:
        ids: [T] segments, ascending.
        counts: [S] tokens of each, those of unscored tokens after the last included.
        segments: S without those.
        index: [T] the position of each token; None where no field is read through it.
        live: [T] bool, with static shapes: which are scored.
    """

    def __init__(self, packing: Packing, batch: Batch) -> None:
        self.batch = batch
        self.ids = packing.segments.ids.contiguous()
        self.counts = packing.segments._local_counts.contiguous()
        self.segments, self.index, self.live = packing.count, packing.index, packing.live
        self._columns: dict[str, Column] = {}
        self._kept: dict[str, Tensor] = {}

    def column(self, name: str) -> Column:
        """A field with one value per token or segment."""
        found = self._columns.get(name)
        if found is None:
            value = self.batch.fields[name]
            assert isinstance(value, Tensor)
            way = Way.TOKEN if self.index is None else Way.INDEX
            way = way if self.batch.per_token(name) else Way.SEGMENT
            found = self._columns[name] = Column(value.reshape(-1).contiguous(), int(way))
        return found

    def kept(self, name: str) -> Tensor:
        """[S] tokens of each segment that a boolean field keeps, float64."""
        if name not in self._kept:
            rows = read(self.column(name), self, slice(None), None, torch.float64)
            segments = Segments(self.ids, len(self.counts), counts=self.counts)
            self._kept[name] = segments.sum(rows)
        return self._kept[name]


class Piece(NamedTuple):
    """The tokens of a run, and the segments first..last that they lie in."""

    tokens: slice
    first: int
    last: int


class Launch(NamedTuple):
    """The arguments of one run."""

    tokens: Tokens
    piece: Piece
    inputs: list[Column]
    numbers: list[Number]


@dataclass(frozen=True)
class Evaluated:
    """What an objective comes to on some tokens.

    Attributes:
        coefficients, divergences: [n] each.
        measured: [M] float64.
    """

    coefficients: Coefficients
    divergences: dict[object, Tensor]
    measured: Tensor
    tape: Tape

    @property
    def values(self) -> Tensor:
        """[K] float64, each term's share of its reduced value."""
        return self.measured[: self.tape.terms]

    @property
    def loss(self) -> Tensor:
        """[] float64, the sum of them with their coefficients."""
        return self.measured[self.tape.terms]

    @property
    def metrics(self) -> Metrics:
        return self.tape.metrics(self.measured)


@dataclass(frozen=True, eq=False, kw_only=True)
class Tape:
    """Instructions in phases over tokens (even) and over segments (odd).

    Attributes:
        terms: K. The first K measurements are their values, the next is the loss.
        kinds: what each measurement is: SUM, LARGEST, SMALLEST or COUNT.
        vectors: what the first token registers hold at the end, e.g. ("coefficient", "target").
    """

    phases: tuple[tuple[Row, ...], ...]
    registers: tuple[int, int]  # over tokens, over segments
    inputs: tuple[Source, ...]
    numbers: tuple[Source, ...]
    vectors: tuple[Source, ...]
    kinds: tuple[Op, ...]
    terms: int
    reported: tuple[Reported, ...]
    dtype: torch.dtype
    segments_per_unit: int
    linked: dict[object, Any] = field(default_factory=dict)  # a backend's own, by device

    def metrics(self, measured: Tensor) -> Metrics:
        """What [M] measured numbers say by name."""
        found, numbers = Metrics(), measured.unbind()
        for name, kind, at, count in self.reported:
            parts = (numbers[at],) if count < 0 else (numbers[at], numbers[count])
            found[name] = kind(*parts)  # type: ignore[call-arg]
        return found

    def run(
        self,
        stats: Statistics,  # [n]
        tokens: Tokens,
        totals: Totals,
        coefficients: Sequence[float],
        *,
        vocabulary: int,
        factor: Number = 1.0,
        piece: Piece | None = None,
        backend: str = "reference",
    ) -> Evaluated:
        """Evaluate the objective.

        Args:
            coefficients: of the terms in the sum.
            factor: on the gradient alone, a number or [].
            piece: which tokens `stats` are of; default: all.
        """
        if piece is None:
            piece = Piece(slice(0, len(tokens.ids)), 0, len(tokens.counts))
        inputs = [_column(source, stats, tokens) for source in self.inputs]
        numbers = [_number(s, totals, coefficients, vocabulary, factor) for s in self.numbers]
        launch = Launch(tokens, piece, inputs, numbers)
        vectors, measured = _runner(backend)(self, launch)
        found: dict[str, Tensor] = {}
        divergences: dict[object, Tensor] = {}
        teachers = list(stats.divergences)
        for (kind, name), vector in zip(self.vectors, vectors, strict=True):
            if kind == "divergence":
                divergences[teachers[name]] = vector
            else:
                found[name] = vector
        return Evaluated(Coefficients(**found), divergences, measured, self)


Runner = Callable[[Tape, Launch], tuple[Sequence[Tensor], Tensor]]


@cache
def _runner(backend: str) -> Runner:
    if backend == "reference":
        return run_plain
    from ..kernels.triton.tape import run

    return run


def _column(source: Source, stats: Statistics, tokens: Tokens) -> Column:
    kind, name = source
    if kind == "statistic":
        return Column(getattr(stats, name).contiguous(), LAUNCH)
    if kind == "field" or kind == "mask":
        return tokens.column(name)
    if kind == "lengths":
        return Column(tokens.counts, SEGMENT)
    if kind == "kept":
        return Column(tokens.kept(name), SEGMENT)
    return Column(list(stats.divergences.values())[name].contiguous(), LAUNCH)


def _number(
    source: Source, totals: Totals, coefficients: Sequence[float], vocabulary: int, factor: Number
) -> Number:
    kind, name = source
    if kind == "coefficient":
        return coefficients[name]
    if kind == "vocabulary":
        return vocabulary
    if kind == "factor":
        return factor
    counts = (totals.tokens, totals.segments) if name is None else totals.kept[name]
    return counts[kind == "segments"]


# ---------------------------------------------------------------------- the plain twin


def run_plain(tape: Tape, launch: Launch) -> tuple[list[Tensor], Tensor]:
    """The instructions in PyTorch, on any device and in any dtype."""
    tokens, (rows, first, last), dtype = launch.tokens, launch.piece, tape.dtype
    live = None if tokens.live is None else tokens.live[rows]
    segments = Segments(tokens.ids[rows] - first, last - first, counts=tokens.counts[first:last])
    count, device = len(segments.ids), tokens.ids.device
    real = torch.arange(first, last, device=device) < tokens.segments
    masks = (torch.ones_like(segments.ids, dtype=torch.bool) if live is None else live, real)
    shapes = (count, last - first)
    registers: tuple[list[Any], list[Any]] = tuple([None] * n for n in tape.registers)  # type: ignore[assignment]
    measured: list[Tensor | None] = [None] * len(tape.kinds)
    for row in (row for phase in tape.phases for row in phase):
        own, op = registers[row.kind], row.op
        if op is Op.LOAD:
            column = launch.inputs[row.operands[0]]  # type: ignore[index]
            where = rows if row.kind == TOKENS else slice(first, last)
            segment_rows = row.kind == SEGMENTS
            own[row.out] = read(column, tokens, where, live, dtype, segment_rows)
            continue
        if op is Op.NUMBER:
            number = launch.numbers[row.operands[0]]  # type: ignore[index]
            number = torch.as_tensor(number, dtype=dtype, device=device)
            own[row.out] = number.expand(shapes[row.kind])
            continue
        source = registers[1 - row.kind] if op in (Op.EXPAND, Op.TOTAL) else own
        values = [
            torch.full((shapes[row.kind],), o.value, dtype=dtype, device=device)
            if isinstance(o, Constant)
            else source[o]
            for o in row.operands
        ]
        if op in MEASURED:
            found = _measure(op, values, masks[row.kind], tokens.segments)
            before = measured[row.out]
            measured[row.out] = found if before is None else before + found
        elif op in ELEMENTWISE:
            own[row.out] = COMPUTE[op](*values)
        elif op is Op.OUT:
            own[row.out] = values[0] if live is None else torch.where(live, values[0], 0)
        else:
            own[row.out] = _of_segments(op, values, segments)
    sums = [m for m in measured if m is not None]
    return registers[TOKENS][: len(tape.vectors)], torch.stack(sums)


def read(
    column: Column,
    tokens: Tokens,
    rows: slice,
    live: Tensor | None,
    dtype: torch.dtype,
    of_segments: bool = False,
) -> Tensor:
    """An input at some tokens, or at some segments; 0 at tokens that are not scored."""
    values, way = column
    if of_segments:
        return values[rows].to(dtype)
    if way == LAUNCH:
        return values.to(dtype)
    live = tokens.live[rows] if tokens.live is not None else None
    if way == Way.TOKEN:
        found = values[rows]
    else:
        index = tokens.ids if way == SEGMENT else tokens.index
        assert index is not None
        at = index[rows]
        found = values[at if live is None else at.masked_fill(~live, 0)] if len(values) else values
    found = found.to(dtype)
    return found if live is None else torch.where(live, found, 0)


def _measure(op: Op, values: list[Tensor], kept: Tensor, segments: int) -> Tensor:
    if op is Op.COUNT:
        return values[0].new_full((), segments, dtype=torch.float64)
    value, factor, mask = (v.double() for v in values)
    kept = kept & (mask != 0)
    if op is Op.SUM:
        return torch.where(kept, value * factor, 0).sum()
    sign = 1 if op is Op.LARGEST else -1
    rows = torch.where(kept, sign * value, -torch.inf)
    return sign * torch.cat([rows, rows.new_full((1,), -torch.inf)]).amax()


def _of_segments(op: Op, values: list[Tensor], segments: Segments) -> Tensor:
    """EXPAND, TOTAL and pairs, which stand at both of their segments."""
    if op is Op.EXPAND:
        return segments.expand(values[0])
    if op is Op.TOTAL:
        return segments.sum(values[0])
    at = torch.arange(segments.count, device=values[0].device)
    first, second = at & ~1, at | 1
    paired = second < segments.count
    if op is Op.FIRST:
        return values[0][first]
    if op is Op.SECOND:
        return values[0][torch.where(paired, second, at)]
    return torch.where(paired, torch.where(at == first, *values), 0)

