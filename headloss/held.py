"""A chunk's logits between its statistics and its gradient.

n tokens of the chunk, K of them with a gradient, V vocabulary, v columns of a slab. Either the raw
logits as they came out of the product (`RawChunk`, any backend and any objective), or softmax terms
exp(z - reference) in 16 bits (`TermsChunk`), which the product writes in place of logits and which
become the gradient in the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .kernels.interface import Held, Measured, is_multiple
from .logits import LinearLogits
from .objective import Gradient
from .rows import RowGradient, Rows
from .stats import Normalizer

MOST = 15 / 16  # of a GPU's rows: leaving so few out costs more than it saves

if TYPE_CHECKING:
    from .schedules import Call, Source


def rows_left(live: Tensor) -> Tensor | None:
    """[K] the rows that carry a gradient, ascending, from [n] bool; None where the others may as
    well stay (their coefficients are 0 all the same). Reads the device."""
    index = live.nonzero().squeeze(1)
    most = MOST if live.is_cuda else 1
    return None if len(index) >= most * len(live) else index


class RawChunk:
    """Raw logits [n, V] in float32 or float64."""

    def __init__(self, call: Call, source: Source, rows: slice) -> None:
        self.call, self.rows = call, rows
        self.raw = source.raw(rows)
        self.partials = call.partials(self.raw, rows)

    def measured(self) -> Measured:
        """Statistics over the whole vocabulary."""
        call = self.call
        return call.slices.measured(call.kernels, self.partials, call.needs, call.vocabulary)

    def gradient(
        self, normalizer: Normalizer, gradient: Gradient, live: Tensor | None
    ) -> RowGradient:
        """dL/draw of the rows that carry one."""
        raw, rows = self.raw, self.rows
        index = None if live is None else rows_left(live)
        if index is not None:
            raw = compact_(raw, index)
            rows = index + self.rows.start
            normalizer, gradient = normalizer.rows(index), gradient.rows(index)
        return RowGradient(self.call.logit_gradient_(raw, rows, normalizer, gradient), rows)


class TermsChunk:
    """exp(z - reference) [n, V] in bfloat16."""

    def __init__(self, call: Call, source: LinearLogits, rows: slice) -> None:
        self.call, self.rows = call, rows
        self.x = x = source.features[0][rows]
        weight = source.weights[0]
        self.held = Held.empty(x, len(weight))
        self.found = terms_statistics(call, x, weight, rows, self.held)

    def measured(self) -> Measured:
        """Statistics over the whole vocabulary."""
        return self.found

    def gradient(
        self, normalizer: Normalizer, gradient: Gradient, live: Tensor | None
    ) -> RowGradient:
        """dL/draw of the rows that carry one.

        Everything but the products is queued before the device is read, so that they follow at
        once.
        """
        acts, held, rows = self.call.kernels, self.held, self.rows
        given = (self.call.backward(rows, normalizer, gradient), self.found.target)
        order = None if live is None else acts.dense_order(live, int(MOST * len(live)))
        multiple = features = None
        if is_multiple(self.call.transform, gradient.coefficients):
            x = self.x if self.call.wants.weights[0] else None
            multiple, features = acts.held_multiple_(held, *given, x=x, order=order)
        else:
            acts.held_gradient_(held, *given, order=order)
        found = RowGradient(held.terms, rows, multiple, features, acts.scaled_rows)
        if order is None:
            return found
        places = order.rows + rows.start
        count = int(order.count)  # the read
        return found if count == len(held.terms) else found.first(count, places)


def terms_statistics(
    call: Call, x: Tensor, weight: Tensor, rows: slice, held: Held | None = None
) -> Measured:
    """Statistics over the whole vocabulary from a product that writes no logits."""
    forward = call.forward(rows)
    if call.slices.size is None:
        return call.kernels.product_statistics(x, weight, forward, call.vocabulary, held)
    partials = call.kernels.product_partials(x, weight, forward, held)
    return call.slices.measured(call.kernels, partials, call.needs, call.vocabulary)


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
    place: Rows,
    columns: slice,
    normalizer: Normalizer,
    gradient: Gradient,
    logps: Tensor,
) -> RowGradient:
    """dL/draw of a slab of columns, for the tokens `rows`, which stand at `place` in the source."""
    if call.plan.terms:
        assert isinstance(source, LinearLogits)
        found = call.kernels.product_gradient(
            source.features[0][place],
            source.weights[0][columns],
            call.backward(rows, normalizer, gradient, columns),
            logps,
        )
        return RowGradient(found, place)
    raw = source.raw(place, columns)
    return RowGradient(call.logit_gradient_(raw, rows, normalizer, gradient, columns), place)


def compact_(raw: Tensor, index: Tensor) -> Tensor:
    """Move rows to the front of the same memory; `index` ascends."""
    block = max(1, (1 << 22) // max(1, raw.shape[1]))
    for start in range(0, len(index), block):
        rows = index[start : start + block]
        raw[start : start + len(rows)] = raw[rows]  # read in full before it is written
    return raw[: len(index)]
