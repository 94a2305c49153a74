"""A loss that lives in somebody else's code, where the library would have an objective.

T scored tokens. What the signature of a call needs to know of it is which statistics it reads and
which of them carry a gradient: `loss_elsewhere` stands for that where calls are prepared. The loss
itself only comes back as slopes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch.packing import PackedBatch
from ..batch.reduction import token_mean
from ..losses.scope import Scope
from ..losses.term import Objective, Reads, Term
from .bound import Gradient, power_of_two
from .statistics import Statistics, pull_back

READ: tuple[str, ...] = ("logp", "lse", "entropy")


class Elsewhere(NamedTuple):
    """What stands for the function of a term."""

    reads: Reads

    def __call__(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        raise AssertionError("a loss that lives elsewhere is not evaluated here")


@functools.cache
def loss_elsewhere(gradients: frozenset[str], scope: Scope = "elsewhere") -> Objective:
    """What stands for it: it reads the statistics of `READ`, and differentiates `gradients`."""
    term = Term(
        name="loss_elsewhere",
        function=Elsewhere(Reads(frozenset(READ), frozenset(), gradients)),
        scope=scope,
        reduction=token_mean,
        options=(("gradients", tuple(sorted(gradients))),),
    )
    return Objective.of(term)


def gradient_of(
    slopes: dict[str, Tensor],  # d loss / d statistic, [T] each
    stats: Statistics,
    vocabulary: int,
    rescaled: bool,
) -> tuple[Gradient, Tensor | None]:
    """The coefficients that follow; with `rescaled`, near 1, and the power of two that brought them
    there."""
    gradient = Gradient(pull_back(slopes, stats, vocabulary), {}, torch.empty(0))
    if not rescaled:
        return gradient, None
    found = gradient.coefficients.tensors().values()
    scale = power_of_two([c.abs().max() for c in found if len(c)])
    return gradient.map(lambda t: t * scale), scale
