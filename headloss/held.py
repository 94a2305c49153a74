"""A chunk's logits between its statistics and its gradient.

n tokens of the chunk, K of them with a gradient, V vocabulary, v columns of a slab. Either the raw
logits as they came out of the product (`RawChunk`, any backend and any objective), or softmax terms
exp(z - reference) in 16 bits (`TermsChunk`), which the product writes in place of logits and which
become the gradient in the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .logits import ALL, LinearLogits, RowGradient, Rows
from .objective import Gradient
from .stats import Normalizer

MOST = 15 / 16  # of the rows

if TYPE_CHECKING:
    from .schedules import Call, Source


class Live:
    """Which rows carry a gradient; read from the device when it is first asked."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask  # [n] bool
        self._count: int | None = None

    @property
    def count(self) -> int:
        if self._count is None:
            self._count = int(self.mask.sum())
        return self._count

    def few(self) -> bool:
        """Whether leaving the others out saves a GPU more than moving rows costs it. (A row that
        stays has coefficients of 0 all the same.)"""
        return self.count <= len(self.mask) * MOST

    def index(self) -> Tensor:
        """[count] their places, ascending."""
        return self.mask.logical_not().argsort(stable=True)[: self.count]


class RawChunk:
    """Raw logits [n, V] in float32 or float64."""

    def __init__(self, call: Call, source: Source, rows: slice) -> None:
        self.call, self.rows = call, rows
        self.raw = source.raw(rows)
        self.partials = call.partials(self.raw, rows)

    def gradient(
        self, normalizer: Normalizer, gradient: Gradient, live: Live | None
    ) -> RowGradient:
        """dL/draw of the rows that carry one."""
        raw, rows = self.raw, self.rows
        if live is not None and live.count < len(live.mask):
            index = live.index()
            raw = compact_(raw, index)
            rows = index + self.rows.start
            normalizer, gradient = normalizer.rows(index), gradient.rows(index)
        return RowGradient(self.call.logit_gradient_(raw, rows, normalizer, gradient), rows)


class TermsChunk:
    """exp(z - reference) [n, v] in bfloat16, of all columns or of a slab."""

    def __init__(
        self,
        call: Call,
        source: LinearLogits,
        rows: Rows,
        columns: slice = ALL,
        needs: frozenset[str] | None = None,
    ) -> None:
        self.call, self.rows = call, rows
        x, weight = source.features[0][rows], source.weights[0][columns]
        self.held = call.kernels.Held.empty(len(x), len(weight), x.device)
        self.first = call.slices.first + (columns.start or 0)
        self.partials = call.kernels.product_partials(
            x,
            weight,
            call.packed.batch.targets[rows],
            self.first,
            call.transform.rows(rows),
            call.needs if needs is None else needs,
            held=self.held,
        )

    def gradient(
        self, normalizer: Normalizer, gradient: Gradient, live: Live | None
    ) -> RowGradient:
        """dL/draw of the rows that carry one.

        `self.partials` are by now those of the whole vocabulary, or of the slab.
        """
        acts, held, rows = self.call.kernels, self.held, self.rows
        given = self._given(normalizer, gradient)
        as_multiple = acts.is_multiple(self.call.transform, gradient.coefficients)
        # Before the device is read, so that it has work meanwhile.
        multiple = acts.held_multiple_(held, *given) if as_multiple else None
        order = None
        if live is not None and live.few():
            order = acts.dense_rows(live.mask, live.count)
            assert isinstance(rows, slice)
            rows = order + rows.start
        if multiple is None:
            return RowGradient(acts.held_gradient_(held, *given, rows=order), rows)
        if order is None:
            return RowGradient(held.terms, rows, multiple, acts.scaled_rows)
        moved = acts.move_rows_(held.terms, order)
        return RowGradient(moved, rows, multiple[order], acts.scaled_rows)

    def whole(self, normalizer: Normalizer, gradient: Gradient) -> RowGradient:
        """dL/draw itself, so that slabs add up."""
        given = self._given(normalizer, gradient)
        return RowGradient(self.call.kernels.held_gradient_(self.held, *given), self.rows)

    def _given(self, normalizer: Normalizer, gradient: Gradient) -> tuple:
        rows, call = self.rows, self.call
        return (
            call.packed.batch.targets[rows],
            self.first,
            call.transform.rows(rows),
            normalizer,
            gradient.coefficients,
            self.partials.target,
        )


def hold(call: Call, source: Source, rows: slice) -> RawChunk | TermsChunk:
    """A chunk in the form that the plan chose."""
    if call.plan.terms:
        assert isinstance(source, LinearLogits)
        return TermsChunk(call, source, rows)
    return RawChunk(call, source, rows)


def slab_gradient(
    call: Call,
    source: Source,
    rows: Rows,
    columns: slice,
    normalizer: Normalizer,
    gradient: Gradient,
) -> RowGradient:
    """dL/draw of a slab of columns."""
    if call.plan.terms:
        assert isinstance(source, LinearLogits)
        return TermsChunk(call, source, rows, columns, frozenset()).whole(normalizer, gradient)
    raw = source.raw(rows, columns)
    return RowGradient(call.logit_gradient_(raw, rows, normalizer, gradient, columns), rows)


def compact_(raw: Tensor, index: Tensor) -> Tensor:
    """Move rows to the front of the same memory; `index` ascends."""
    block = max(1, (1 << 22) // max(1, raw.shape[1]))
    for start in range(0, len(index), block):
        rows = index[start : start + block]
        raw[start : start + len(rows)] = raw[rows]  # read in full before it is written
    return raw[: len(index)]
