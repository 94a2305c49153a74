"""An objective on one batch, evaluated by its tape in place of autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..batch.batch import Batch, Current
from ..batch.packing import PackedBatch
from ..batch.reduction import Totals
from ..losses.term import Objective
from .bound import Bound, Gradient, Piece, owed
from .metrics import Metrics
from .statistics import Statistics
from .tape import Evaluated, Tape, Tokens
from .tape import Piece as Place

BACKEND = "triton"


class Taped:
    """As `Bound`, of which one is made only if its weights are asked for.

    Args:
        find: the tape by (whether it measures metrics, whether it gives gradients).
        observe: measure the metrics beside the gradient.
        by_autograd: the same objective without a tape.
        rescaled: the coefficients are to be brought near 1, as `Bound.scaled` does.
        declared: the upstream gradient, where it is known in advance.
    """

    def __init__(
        self,
        objective: Objective,
        tokens: Tokens,
        totals: Totals,
        vocabulary: int,
        find: Callable[[bool, bool], Tape | None],
        *,
        observe: bool,
        by_autograd: Callable[[], Bound],
        rescaled: bool,
        declared: float | None,
    ) -> None:
        self.declared = declared
        self.named = tuple((name, c) for name, c, _ in objective.named())
        self.names = tuple(name for name, _ in self.named)
        self.coefficients = [c for _, c in self.named]
        self.tokens, self.totals, self.vocabulary = tokens, totals, vocabulary
        self.find, self.observe, self.rescaled = find, observe, rescaled
        self.by_autograd = by_autograd
        self.whole: Evaluated | None = None  # what was found for all tokens

    @cached_property
    def bound(self) -> Bound:
        return self.by_autograd()

    @property
    def scale(self) -> Tensor | None:
        return self.bound.scale if self.rescaled else None

    def owed(self, upstream: Tensor) -> Tensor | None:
        return owed(upstream, self.declared, self.scale)

    @property
    def parts(self) -> Any:
        return self.bound.parts

    def beforehand(self, *arguments: Any) -> tuple[Gradient, Tensor | None]:
        return self.bound.beforehand(*arguments)

    def gradient(
        self, stats: Statistics, batch: PackedBatch, rows: slice, needed: bool = True
    ) -> Gradient:
        """Of all tokens."""
        self.whole = found = self._run(stats, None, self.observe, needed)
        return Gradient(found.coefficients, found.divergences, found.values)

    def of_piece(self, stats: Statistics, batch: PackedBatch, piece: Piece) -> Gradient:
        place = Place(piece.rows, piece.first, piece.last)
        found = self._run(stats, place, False, True)
        return Gradient(found.coefficients, found.divergences, found.values)

    def total(self, values: Tensor) -> Tensor:
        """[] the loss."""
        return Bound.total(self, values) if self.whole is None else self.whole.loss  # type: ignore[arg-type]

    def metrics(self, stats: Statistics) -> Callable[[], Metrics]:
        """Those of all tokens, measured now if they were evaluated in pieces."""
        found = self.whole or self._run(stats, None, True, False)
        return partial(found.tape.metrics, found.measured)

    def _run(
        self, stats: Statistics, place: Place | None, observe: bool, needed: bool
    ) -> Evaluated:
        tape = self.find(observe, needed)
        assert tape is not None
        factor: float | Tensor = 1.0 if self.declared is None or not needed else self.declared
        if needed and self.scale is not None:
            factor = self.scale * factor
        return tape.run(
            stats,
            self.tokens,
            self.totals,
            self.coefficients,
            vocabulary=self.vocabulary,
            factor=factor,
            piece=place,
            backend=BACKEND,
        )


def kinds_of(batch: Batch) -> dict[str, torch.dtype | None]:
    """The fields that a tape can read: those of one value per token or segment. What reads K values
    per token, candidates or stored outcomes, is left to autograd."""
    return {
        name: None if isinstance(value := batch.fields[name], Current) else value.dtype
        for name, (_, more) in batch.kinds(torch.float32).items()
        if not more
    }


def serves(backend: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether launches are what a call's own arithmetic costs: on a CPU autograd is faster."""
    return backend == "triton" and dtype == torch.float32 and device.type == "cuda"
