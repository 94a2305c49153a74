"""What the loop is to do, and what it has done: the parts of a call that all schedules share.

T tokens, V vocabulary, n tokens of a block, v columns of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..batch.packing import PackedBatch, Packing
from ..batch.reduction import Number
from ..kernels.interface import Measured
from ..kernels.transform import Transform
from ..losses.term import Objective
from ..objective.bound import Bound, Gradient
from ..objective.statistics import PEAK, Partials, finish
from ..options import Options
from ..ranks.place import Place
from ..softmax.linear import RawSoftmax
from ..softmax.rows import ALL, of_several
from .plan import Plan
from .prepare import Prepared

Gradients = list[Tensor | None]
NOT_YET: Any = None
READ_AGAIN = ("teacher_logits", "teacher_hidden", "teacher_topk_ids", "candidate_ids")


class Swept(NamedTuple):
    """What act one of all tokens leaves behind: statistics, and what act two of the schedule needs
    beside coefficients.

    Attributes:
        held: what act one kept of each block's logits; used up by act two.
        sums: dlogp/dhidden of a frozen head, still to be scaled by each token's slope.
    """

    whole: Measured
    held: list[Any]
    sums: Any = None


@dataclass
class Work:
    """What the loop is to do with a source.

    Attributes:
        prepared: what the call's signature decides.
        given: the batch, by position.
        place: of this rank in the whole vocabulary.
        packing: where the packed tokens are in the batch.
        per_segment: fields with one value per segment.
        bind: makes `bound`, the objective on `batch`, while the first product runs.
        slices: of the vocabulary on the ranks of a group.
        transform: of raw logits, of the packed tokens.
        at_once: the objective's gradient is known before the statistics are.
        tolerance: which rows are left out in addition to those without gradient.
        open: makes the source of the call's tensors; `sums` takes its gradient in blocks of tokens.
    """

    prepared: Prepared
    objective: Objective
    given: Batch
    options: Options
    place: Place
    packing: Packing
    plan: Plan
    per_segment: frozenset[str]
    transform: Transform
    bind: Callable[[Work], Any]
    # What is not known when this is made.
    slices = open = sums = into = NOT_YET
    tolerance = NOT_YET
    at_once = False

    @property
    def vocabulary(self) -> int:
        """Of the whole model."""
        return self.place.vocabulary

    @cached_property
    def batch(self) -> PackedBatch:
        """As terms see it."""
        return self.packing.view(self.given, self.prepared.wide, self.per_segment)

    @cached_property
    def bound(self) -> Bound:
        return self.bind(self)  # type: ignore[no-any-return]

    @cached_property
    def unit(self) -> Tensor:
        """[T] coefficients of a frozen head's dlogp: about 1 / slope; `sweep` divides by 1 - p."""
        one = torch.ones_like(self.packing.targets, dtype=self.prepared.wide)
        if not self.prepared.problem.rescaled:
            return one
        return (one / slope_of(self.transform)).abs().clamp(max=1e30).log2().floor().exp2()

    @property
    def groups(self) -> tuple[Any, ...]:
        """Of the vocabulary's slices, and of segments that run across ranks."""
        return self.slices.group, self.packing.segments.group

    @property
    def constants(self) -> list[Tensor]:
        """What both acts read beside the logits: none of it may change in between."""
        packing, support = self.packing, self.packing.support
        given: list[Any] = [packing.targets, self.transform.temperature, support and support.ids]
        return [value for value in given if isinstance(value, Tensor)]

    @property
    def read_again(self) -> list[tuple[str, Tensor, int]]:
        """Fields that both acts read, and how often each was changed in place. (Hooks that move
        what autograd saves would copy them.)"""
        if not self.prepared.beside:
            return []
        given = ((name, self.batch.as_given(name)) for name in READ_AGAIN)
        return [(n, t, t._version) for n, t in given if t is not None and not t.is_inference()]

    def live(self, gradient: Gradient) -> Tensor | None:
        """[n] bool, the rows that carry a gradient, if the others are to be left out (law 5)."""
        return gradient.live() if self.plan.skip_rows else None


def slope_of(transform: Transform, of: object = None) -> Number:
    """Of the logits that a term sees over the raw ones; `of`: its teacher, if any."""
    return transform.scale / getattr(of, "temperature", transform.temperature)


def measure(
    work: Work, source: RawSoftmax, rows: slice, keep: bool = False
) -> tuple[Measured, Any]:
    """Act one on some tokens over the whole vocabulary; with `keep`, their logits are one tile and
    held."""
    columns = source.vocabulary if keep or work.plan.sweep_rows else work.plan.tile.columns
    tiles = [ALL] if columns >= source.vocabulary else steps(source.vocabulary, columns)
    return source.statistics(rows, tiles, keep)


def join(work: Work, source: RawSoftmax, found: list[Measured]) -> Measured:
    """[T] vectors from those of consecutive blocks."""
    if len(found) == 1:
        return found[0]
    if not found:
        empty = torch.empty(0, dtype=source.dtype, device=work.packing.targets.device)
        measured = Measured(*finish(Partials(*[empty] * 5), work.vocabulary, work.prepared.needs))
        beside = measured.stats.divergences
        beside |= {key: empty.clone() for key in work.prepared.needs & {PEAK}}
        beside |= {t.key: empty.clone() for t in source.teachers}
        beside |= {part.key: empty.new_empty(0, *part.more) for part in source.beside}
        return measured
    return of_several(torch.cat, found)


def steps(total: int, step: int) -> list[slice]:
    """Consecutive slices of at most `step`."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]
