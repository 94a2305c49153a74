"""An objective as a list of instructions, so that a call evaluates all of it in one launch.

T scored tokens, S segments, n tokens of a run, K terms. `taping.record` writes down what the terms
of an objective, their weights, their gradient and their metrics compute. `Tape.run` then gives what
`Bound.gradient` and the metrics give, for any T, S, totals and coefficients of the sum. One generic
kernel reads the instructions, so nothing is compiled for an objective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..batch.packing import PackedBatch
from ..batch.reduction import Number, Totals
from ..batch.segments import Chunk
from ..kernels.opcodes import Op, Way
from ..losses.term import Objective
from .bound import Bound, Gradient
from .metrics import Measurement, Metrics
from .recording import Constant, Source
from .statistics import Coefficients, Statistics


class Row(NamedTuple):
    """An instruction: operands are registers or a constant; of a LOAD or NUMBER, the input."""

    op: Op
    out: int  # register, or measurement
    operands: tuple[int | Constant, ...]
    kind: int  # of vectors: TOKENS or SEGMENTS


class Reported(NamedTuple):
    """A metric, by the places of its numbers among the measurements."""

    name: str
    kind: type[Measurement]
    places: tuple[int, ...]


COEFFICIENTS = [("coefficient", name) for name in Coefficients._fields]

LAUNCH, TOKEN, INDEX, SEGMENT = map(int, (Way.LAUNCH, Way.TOKEN, Way.INDEX, Way.SEGMENT))

# A field of the batch, [T], [N] or [S] contiguous, and the Way of a token's value (quick to hash).
Column = tuple[Tensor, int]


@dataclass(frozen=True, eq=False, kw_only=True)
class Tape:
    """Instructions in phases over tokens (even) and over segments (odd).

    Attributes:
        terms: K. The first K measurements are their values, the next is the loss.
        kinds: what each measurement is: SUM, LARGEST, SMALLEST or COUNT.
        constant: whether its gradient is the same whatever the statistics are, once that is known.
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
    constant: list[bool] = field(default_factory=list)
    linked: dict[object, Any] = field(default_factory=dict)  # a backend's own, by device

    def metrics(self, measured: Tensor) -> Metrics:
        """What [M] measured numbers say by name."""
        numbers = measured.unbind()
        return Metrics({n: kind(*(numbers[p] for p in at)) for n, kind, at in self.reported})

    def run(
        self, stats: Statistics, batch: PackedBatch, totals: Totals, coefficients: Sequence[float],
        *, vocabulary: int, factor: Number = 1.0, chunk: Chunk | None = None
    ) -> Gradient:
        """Evaluate the objective from the statistics [n] of the tokens of a chunk (None: of all),
        with the coefficients of its terms, and a factor, a number or [], on the gradient alone."""
        asked = [name for kind, name in self.inputs if kind == "statistic"]
        statistics = {name: getattr(stats, name).contiguous() for name in asked}
        given = statistics, batch, totals, coefficients, list(stats.divergences.values())
        launch = self.launch(*given, vocabulary=vocabulary, factor=factor, chunk=chunk)
        vectors, measured, loss = runner()(self, launch)
        slopes = Coefficients(*[None if k is None else vectors[k] for k in self.places])
        found, divergences = dict(zip(self.vectors, vectors, strict=True)), {}
        for k, teacher in enumerate(stats.divergences):
            if ("divergence", k) in found:
                divergences[teacher] = found["divergence", k]
        return Gradient(slopes, divergences, measured, loss, partial(self.metrics, measured))

    @property
    def is_multiple(self) -> bool:
        """Whether it gives the coefficients that `kernels.interface.Backward.is_multiple` asks for,
        and no more."""
        own = {("coefficient", "target"), ("coefficient", "prob")}
        return ("coefficient", "prob") in self.vectors and own >= {*self.vectors}

    @cached_property
    def places(self) -> list[int | None]:
        """Of the coefficients among the vectors."""
        return [None if s not in self.vectors else self.vectors.index(s) for s in COEFFICIENTS]

    def launch(
        self, statistics: Mapping[str, Any], batch: PackedBatch, totals: Totals,
        coefficients: Sequence[float], divergences: Sequence[Tensor] = (), *, vocabulary: int,
        factor: Number = 1.0, chunk: Chunk | None = None
    ) -> tuple[PackedBatch, Chunk, list[Column], list[Number]]:
        """What a run takes: a batch, of which no field is gathered, a chunk, inputs and numbers."""
        part = chunk or Chunk(0, batch.targets.shape[0], 0, batch.segments.count)
        inputs, numbers = list[Column](), list[Number]()
        for kind, name in self.inputs:
            if kind == "statistic":
                inputs.append((statistics[name], LAUNCH))
            elif kind == "divergence":
                inputs.append((divergences[name].contiguous(), LAUNCH))
            else:
                inputs.append(_column(kind, name, batch))
        given = {"vocabulary": vocabulary, "factor": factor}
        for kind, name in self.numbers:
            if kind == "coefficient":
                numbers.append(coefficients[name])
            else:
                numbers.append(given[kind] if kind in given else _total(kind, name, totals))
        return batch, part, inputs, numbers


@cache
def runner() -> Callable[..., tuple[Sequence[Tensor], Tensor, Tensor]]:
    """What makes vectors, measurements and the loss of a tape and a launch."""
    from ..kernels.triton.tape import run

    return run


def _column(kind: str, name: str, batch: PackedBatch) -> Column:
    if kind == "field" or kind == "mask":
        by_segment, at_once = name in batch._per_segment, batch.index is None
        return batch._given[name], SEGMENT if by_segment else TOKEN if at_once else INDEX
    if kind == "lengths":
        return batch.segments._local_counts, SEGMENT
    return batch._kept(name), SEGMENT


def _total(kind: str, name: str | None, totals: Totals) -> Number:
    counts = (totals.tokens, totals.segments) if name is None else totals.kept[name]
    return counts[kind == "segments"]


# ---------------------------------------------------------------------- in a call

@dataclass(eq=False, kw_only=True)
class Taped:
    """As `Bound`, of which one is made only if its weights are asked for.

    Attributes:
        find: the tape by (whether it measures metrics, whether it gives gradients).
        observe: measure the metrics beside the gradient.
        by_autograd: the same objective without a tape.
        rescaled: the coefficients are to be brought near 1, as `Bound.scaled` does.
        declared: the upstream gradient, where it is known in advance.
        measured: the metrics, once all tokens were at once.
    """

    objective: Objective
    batch: PackedBatch
    totals: Totals
    vocabulary: int
    find: Callable[[bool, bool], Tape | None]
    observe: bool
    by_autograd: Callable[[], Bound]
    rescaled: bool
    declared: float | None
    measured: Callable[[], Metrics] | None = None

    @cached_property
    def named(self) -> tuple[tuple[str, float], ...]:
        """Each term's key and coefficient."""
        return tuple((name, c) for name, c, _ in self.objective.named())

    @cached_property
    def bound(self) -> Bound:
        return self.by_autograd()

    @property
    def scale(self) -> Tensor | None:
        return self.bound.scale if self.rescaled else None

    def beforehand(
        self, batch: PackedBatch, needs: frozenset[str]
    ) -> tuple[Gradient, Tensor | None]:
        """As `Bound.beforehand`: by the tape where the gradient is the same whatever the statistics
        are, such as 0."""
        tape = self.find(False, True)
        assert tape is not None
        if not tape.constant:
            terms = [term for _, term in self.objective.parts if term.slopes]
            slopes = [slope for term in terms for slope in term.slopes(batch)]  # type: ignore[misc]
            tape.constant.append(all(slope.constant for slope in slopes))
        if not tape.constant[0]:
            return self.bound.beforehand(batch, needs)
        zero = batch.targets.new_zeros(len(batch), dtype=torch.float32)
        zeros: dict[str, Any] = dict.fromkeys(needs, zero)
        found = self._run(Statistics(**zeros), None, False, True)
        return Gradient(found.coefficients, {}, zero), None

    def gradient(
        self, stats: Statistics, batch: PackedBatch, chunk: Chunk | None, needed: bool = True
    ) -> Gradient:
        """Of the tokens of a chunk, or of all."""
        found = self._run(stats, chunk, self.observe and chunk is None, needed)
        if chunk is not None:
            return found._replace(loss=None)
        self.measured = found.metrics
        return found

    total = cast(Any, Bound.total)

    def metrics(self, stats: Statistics) -> Callable[[], Metrics]:
        """Those of all tokens, that were evaluated in chunks."""
        return self._run(stats, None, True, False).metrics or Metrics

    def launch(self, tape: Tape, statistics: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a tape of this objective takes of all tokens."""
        coefficients = [c for c, _ in self.objective.parts]
        given = statistics, self.batch, self.totals, coefficients
        return tape.launch(*given, vocabulary=self.vocabulary)

    def _run(self, stats: Statistics, chunk: Chunk | None, observe: bool, needed: bool) -> Gradient:
        tape = self.find(observe, needed)
        assert tape is not None
        factor: float | Tensor = 1.0 if self.declared is None or not needed else self.declared
        if needed and self.rescaled:
            factor = self.scale * factor  # type: ignore[operator]
        return tape.run(
            stats, self.batch, self.totals, [c for c, _ in self.objective.parts],
            vocabulary=self.vocabulary, factor=factor, chunk=chunk
        )


def serves(backend: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether launches are what a call's own arithmetic costs: on a CPU autograd is faster."""
    return backend == "triton" and dtype == torch.float32 and device.type == "cuda"
