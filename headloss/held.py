"""How a chunk's logits are held between its statistics and its gradient.

n tokens of the chunk, V vocabulary. Either as they came out of the product (`RawChunk`, any backend
and any objective), or as softmax terms in 16 bits without a common normalizer (`TermsChunk`): a
sweep over tiles that stay in the L2 folds each float32 tile into exact statistics and keeps only
exp(z - peak of the block), which later becomes the gradient in the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .logits import LinearLogits, Rows
from .objective import Gradient
from .stats import Normalizer, Partials

if TYPE_CHECKING:
    from .schedules import Call, Source


class Live(NamedTuple):
    """Which rows carry a gradient."""

    mask: Tensor  # [n] bool
    count: int

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
    ) -> tuple[Tensor, Rows]:
        """dL/draw of the rows that carry one, and which rows of the T these are."""
        raw, rows = self.raw, self.rows
        if live is not None:
            index = live.index()
            raw = compact_(raw, index)
            rows = index + self.rows.start
            normalizer, gradient = normalizer.rows(index), gradient.rows(index)
        return self.call.logit_gradient_(raw, rows, normalizer, gradient), rows


class TermsChunk:
    """exp(z - peak of its block) [n, V] in 16 bits, and the peaks."""

    def __init__(self, call: Call, source: LinearLogits, rows: slice) -> None:
        self.call, self.rows = call, rows
        n, acts = rows.stop - rows.start, call.kernels
        self.held = acts.Held.empty(
            n, source.vocabulary, dtype=source.features[0].dtype, device=source.features[0].device
        )
        partials: Partials | None = None
        for start in range(0, source.vocabulary, call.plan.fold_columns):
            columns = slice(start, min(start + call.plan.fold_columns, source.vocabulary))
            partials = acts.partials(
                source.raw(rows, columns),
                self._targets,
                call.slices.first + start,
                call.transform.rows(rows),
                call.needs,
                onto=partials,
                held=self.held.tile(slice(0, n), columns),
            )
        assert partials is not None
        self.partials = partials

    @property
    def _targets(self) -> Tensor:
        return self.call.packed.batch.targets[self.rows]

    def gradient(
        self, normalizer: Normalizer, gradient: Gradient, live: Live | None
    ) -> tuple[Tensor, Rows]:
        """dL/draw of the rows that carry one, and which rows of the T these are."""
        order = None
        if live is not None:
            order = self.call.kernels.dense_rows(live.mask, live.count)
        found = self.call.kernels.held_gradient_(
            self.held,
            self._targets,
            self.call.slices.first,
            self.call.transform.rows(self.rows),
            normalizer,
            gradient.coefficients,
            self.partials.target,
            rows=order,
        )
        return found, self.rows if order is None else order + self.rows.start


def hold(call: Call, source: Source, rows: slice) -> RawChunk | TermsChunk:
    """A chunk in the form that the plan chose."""
    if call.plan.fold_columns:
        assert isinstance(source, LinearLogits)
        return TermsChunk(call, source, rows)
    return RawChunk(call, source, rows)


def compact_(raw: Tensor, index: Tensor) -> Tensor:
    """Move rows to the front of the same memory; `index` ascends."""
    block = max(1, (1 << 22) // max(1, raw.shape[1]))
    for start in range(0, len(index), block):
        rows = index[start : start + block]
        raw[start : start + len(rows)] = raw[rows]  # read in full before it is written
    return raw[: len(index)]
