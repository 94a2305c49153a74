"""Law 4: the order in which statistics, coefficients and gradients are computed.

T scored tokens, V vocabulary, H hidden width, n tokens of a chunk, v columns of a tile.

Each schedule takes a `Call` and its source of logits and returns what it measured and a pull-back:
a function from the upstream gradient (and the saved tensors, where it asks for them) to the
gradients of the source's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .divergence import Divergence
from .held import RawChunk, TermsChunk, hold
from .kernels.interface import Backward, Forward, Kernels
from .kernels.transform import Transform
from .logits import (
    ALL,
    NO_GRADIENT,
    GivenGradients,
    GivenLogits,
    LinearGradients,
    LinearLogits,
    Wants,
)
from .objective import Bound, Gradient, Piece
from .options import Options
from .packing import Packed
from .parallel import WHOLE, Alone
from .plan import Plan
from .rows import Rows
from .stats import Coefficients, Normalizer, Partials, Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .taped import Taped

Source = LinearLogits | GivenLogits
Gradients = list[Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A validated, packed and planned call: everything but the logits' values."""

    packed: Packed
    bind: Callable[[Packed], Bound | Taped]  # the weights, made while the first product runs
    plan: Plan
    options: Options
    kernels: Kernels
    transform: Transform  # temperature [T] or a number
    needs: frozenset[str]
    vocabulary: int  # of the whole model
    wants: Wants = NO_GRADIENT
    slices: Alone = WHOLE
    divergences: tuple[Divergence, ...] = ()
    inplace: bool = False  # the gradient may overwrite the logits
    compute_dtype: torch.dtype | None = None  # under autocast
    gradient_dtype: torch.dtype | None = None  # of dL/dlogits on a GPU, None: as the logits
    known_slopes: Callable[[], bool] = lambda: False  # before the statistics are (plan.rows)

    @property
    def bound(self) -> Bound | Taped:
        return self.bind(self.packed)

    @property
    def groups(self) -> tuple[ProcessGroup | None, ...]:
        """Of the vocabulary's slices, and of segments that run across ranks."""
        return self.slices.group, self.packed.batch.segments.group

    def partials(
        self, raw: Tensor, rows: Rows, columns: slice = ALL, onto: Partials | None = None
    ) -> Partials:
        """Partial statistics of a tile and of those before it."""
        return self.kernels.partials(raw, self.forward(rows, columns), onto=onto)

    def forward(self, rows: Rows, columns: slice = ALL) -> Forward:
        """What act one takes beside the logits of a tile."""
        first = self.slices.first + (columns.start or 0)
        return Forward(
            self.packed.batch.targets[rows], first, self.transform.rows(rows), self.needs
        )

    def backward(
        self, rows: Rows, normalizer: Normalizer, gradient: Gradient, columns: slice = ALL
    ) -> Backward:
        """What act two takes beside the logits of a tile."""
        first = self.slices.first + (columns.start or 0)
        targets, transform = self.packed.batch.targets[rows], self.transform.rows(rows)
        return Backward(targets, first, transform, normalizer, gradient.coefficients)

    def logit_gradient_(
        self,
        raw: Tensor,
        rows: Rows,
        normalizer: Normalizer,
        gradient: Gradient,
        columns: slice = ALL,
    ) -> Tensor:
        """dL/draw of a tile of rows (an index of T) from gradients of those same rows."""
        others = self.backward(rows, normalizer, gradient, columns)
        if raw.is_cuda:  # what the products take in 16 bits need not be written in 32
            others = others._replace(dtype=self.gradient_dtype)
        *most, last = [None, *(d for d in self.divergences if d.key in gradient.divergences)]
        if last is None:
            return self.kernels.logit_gradient_(raw, others)
        extra = None  # all but the last find the student's logits intact
        for divergence in most[1:]:
            weight = gradient.divergences[divergence.key]
            extra = divergence.gradient(raw, rows, columns, weight, extra)
        weight = gradient.divergences[last.key]
        return last.gradient(raw, rows, columns, weight, extra, others)

    def gradients(self, source: Source, by_slab: bool = False) -> LinearGradients | GivenGradients:
        if isinstance(source, GivenLogits):
            live = self.packed.batch.live
            return GivenGradients(source, self.packed.unscored, self.inplace, live)
        return self.slices.gradients(
            (piece.rows for piece in self.plan.chunks),
            source,
            self.wants,
            self.options.accumulate_dtype,
            by_slab,
            self.options.main_grad,
            direct=by_slab
            or (self.options.upstream is not None and self.gradient_dtype != torch.float16),
        )

    def finish(
        self, gradients: LinearGradients | GivenGradients, factor: Tensor | None
    ) -> Gradients:
        """Gradients times `factor`, in their tensors' dtypes."""
        return gradients.finish(factor, self.kernels.scaled)

    def measure(self, source: Source, rows: slice) -> Chunk:
        """A chunk's logits, held for its gradient, and its statistics."""
        held = hold(self, source, rows)
        stats, normalizer, _ = held.measured()
        for divergence in self.divergences:
            assert isinstance(held, RawChunk)
            tiles = [(ALL, partial(getattr, held, "raw"))]
            found = divergence.measure(rows, tiles, normalizer, hold=True)
            stats.divergences[divergence.key] = found
        return Chunk(held, stats, normalizer)

    def pull_back(self, stats: Statistics, piece: Piece | None = None) -> Gradient:
        """The objective's coefficients on all tokens or some, with the upstream gradient where it
        is declared."""
        bound, batch = self.bound, self.packed.batch
        if piece is None:
            gradient = bound.gradient(stats, batch, ALL)
        else:
            gradient = bound.of_piece(stats, batch, piece)
        declared = self.options.upstream
        return gradient if declared in (None, 1) else gradient.map(lambda t: t * declared)

    def owed(self, upstream: Tensor) -> Tensor | None:
        """The factor between gradients of `pull_back`'s coefficients and those that are owed, None
        where it is one."""
        declared, scale = self.options.upstream, self.bound.scale
        if declared is None:
            factor = upstream if upstream.dtype == torch.float64 else upstream.float()
            return factor if scale is None else factor / scale
        same = (upstream - declared).abs() <= 1e-6 * abs(declared)
        message = f"out.loss: its upstream gradient differs from {declared}, as declared"
        torch._assert_async(same, message)  # type: ignore[attr-defined]
        return None if scale is None else 1 / scale


class Chunk(NamedTuple):
    """A chunk between its statistics and its gradient."""

    held: RawChunk | TermsChunk
    stats: Statistics
    normalizer: Normalizer


@dataclass(frozen=True)
class Outcome:
    """What a forward pass measured: statistics [T], each term's value [K] in float64."""

    stats: Statistics
    values: Tensor


PullBack = Callable[[Tensor, Source | None], Gradients]


# ---------------------------------------------------------------------- one pass


def one_pass(call: Call, source: Source) -> tuple[Outcome, PullBack]:
    """Statistics, coefficients and gradients chunk by chunk (6NHV)."""
    gradients = None  # their memory is had while the first product runs
    batch, found = call.packed.batch, []
    values: Tensor | float = 0.0
    for piece in call.plan.chunks:
        chunk = call.measure(source, piece.rows)
        gradients = gradients or call.gradients(source)
        gradient = call.pull_back(chunk.stats, piece if len(call.plan.chunks) > 1 else None)
        values = values + gradient.values
        found.append(chunk.stats)
        live = live_rows(call, gradient)
        gradients.add(chunk.held.gradient(chunk.normalizer, gradient, live))
        del chunk  # before the next one is made
    if not isinstance(values, Tensor):
        count = len(call.bound.named)
        values = torch.zeros(count, dtype=torch.float64, device=batch.targets.device)
    outcome = Outcome(join(found, call, source), values)
    gradients = gradients or call.gradients(source)
    return outcome, lambda upstream, _: call.finish(gradients, call.owed(upstream))


def live_rows(call: Call, gradient: Gradient) -> Tensor | None:
    """[n] bool, the rows that carry any gradient, where others are to be left out (law 5)."""
    if not call.options.skip_rows or call.options.static or call.wants.logits:
        return None
    return gradient.live()


# ---------------------------------------------------------------------- frozen head


def frozen(call: Call, source: Source) -> tuple[Outcome, PullBack]:
    """Without a weight gradient: dlogp/dhidden per token in the forward, scaled once the
    objective's gradient is known (4NHV)."""
    gradients = call.gradients(source)
    assert isinstance(gradients, LinearGradients)
    found = []
    for piece in call.plan.chunks:
        chunk = call.measure(source, piece.rows)
        one = torch.ones_like(chunk.normalizer.peak)
        unit = Gradient(Coefficients(target=one, prob=-one), {}, one)
        gradients.add(chunk.held.gradient(chunk.normalizer, unit, None))
        found.append(chunk.stats)
        del chunk
    gradients.complete()
    stats = join(found, call, source)
    gradient = call.pull_back(stats)
    slope = gradient.coefficients.target

    def pull(upstream: Tensor, _: Source | None) -> Gradients:
        factor = call.owed(upstream)
        row = slope
        if row is None:
            row = torch.zeros(len(stats), dtype=source.dtype, device=upstream.device)
        if factor is not None:
            row = row * factor.to(row.dtype)
        row = call.slices.own(row)
        for i, total in enumerate(gradients.features):
            if total is not None:
                gradients.features[i] = call.kernels.scaled_rows(total, row, out=total)
        return call.finish(gradients, None)

    return Outcome(stats, gradient.values), pull


def join(found: list[Statistics], call: Call, source: Source) -> Statistics:
    """[T] statistics from those of consecutive chunks."""
    if len(found) == 1:
        return found[0]
    if not found:
        empty = torch.empty(0, dtype=source.dtype, device=call.packed.batch.targets.device)
        keys = [d.key for d in call.divergences]
        return Statistics(
            **{name: empty.clone() for name in call.needs},
            divergences={key: empty.clone() for key in keys},
        )
    names, keys = found[0].tensors(), found[0].divergences
    return Statistics(
        **{name: torch.cat([getattr(s, name) for s in found]) for name in names},
        divergences={key: torch.cat([s.divergences[key] for s in found]) for key in keys},
    )
