"""External losses: a loss function outside of headloss in place of the library's loss terms. Of an
external loss, headloss needs only the gradient with respect to statistics such as log-probs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import check_dense
from ..batch.packing import ALL, PackedBatch, Packing
from ..batch.reduction import token_mean
from ..batch.segments import Chunk
from ..losses.identity import leaves_of
from ..losses.scope import Scope
from ..losses.teacher import Teacher
from ..losses.term import Objective, Term
from ..losses.trial import Reads
from ..statistics.divergence import Measure
from ..statistics.softmax import BESIDE, SoftmaxCoefficients, Statistics, vjp
from .weighted import Coefficients, differentiate

HEAD_STATISTICS: tuple[str, ...] = ("logp", "lse", "entropy")
# Function from log-probs [..] and entropies [..] of all positions to a scalar loss.
LossFunction = Callable[[Tensor, Tensor], Tensor]
# Names of statistics that exist only if the batch has `candidate_ids`.
CANDIDATE_STATISTICS = ("candidate_logps", "candidate_tail")


@functools.cache
def external_loss(
    gradients: frozenset[str],
    scope: Scope = "external",
    candidates: bool = False,
    teacher: Teacher | None = None,
    measures: frozenset[Measure] = frozenset(),
) -> Objective:
    """Return an `Objective` that wraps an external loss function. The external loss function
    receives the statistics in `HEAD_STATISTICS` (log-prob, log-sum-exp, entropy). The external loss
    function also receives the log-probs of `candidate_ids` if `candidates` is True, and the
    divergences `measures` if a `teacher` is given. `gradients` names the statistics with respect to
    which the loss has a gradient; the log-prob of the tail (all columns but the candidates) may be
    one of these statistics."""
    statistics = frozenset((*HEAD_STATISTICS, *CANDIDATE_STATISTICS[:candidates])) | gradients
    differentiable = frozenset({BESIDE.get(name, name) for name in gradients})
    function = Reads(statistics, frozenset(), differentiable, measures)
    term = Term(
        name="external_loss",
        function=function,  # type: ignore[arg-type]
        scope=scope,
        reduction=token_mean,
        options=(("gradients", tuple(sorted(gradients))),),
        teacher=teacher,
    )
    return Objective.of(term)


@dataclass(eq=False)
class ExternalLoss:
    """A scalar loss that is a sum over tokens or segments, with the interface of
    `WeightedObjective`.

    Because the loss is a sum over tokens or segments, its gradient for a chunk of tokens is right
    even if the loss function gets 0 as the statistics of all tokens outside of the chunk. The
    method `total` computes the loss's value once, from all tokens.
    """

    loss: LossFunction
    packing: Packing
    vocabulary: int
    upstream: float  # The upstream gradient; 1 if unknown in advance.
    named: ClassVar = (("loss", 1.0),)
    scale: ClassVar = None

    def coefficients(
        self, stats: Statistics, batch: PackedBatch, chunk: Chunk | None, needed: bool = True
    ) -> Coefficients:
        rows = ALL if chunk is None else chunk.rows
        share = stats.logp.new_zeros(1, dtype=torch.float64)
        if not needed:
            return Coefficients(SoftmaxCoefficients(), {}, share)
        leaves = {n: getattr(stats, n).detach().requires_grad_() for n in ("logp", "entropy")}
        with torch.enable_grad():
            full = (self.packing.scatter(t, rows) for t in leaves.values())
            loss = scalar(self.loss(*full))
        if not loss.requires_grad:
            raise ValueError(
                "loss_fn: its value has no gradient with respect to log-probs or entropies (is "
                "everything detached?)"
            )
        for leaf in leaves_of(loss):
            if not any(leaf is one for one in leaves.values()):
                raise ValueError(
                    f"loss_fn: a tensor of shape {tuple(leaf.shape)} that requires a gradient is "
                    "caught in it; its gradient would be lost: detach it, or leave separable=None"
                )
        softmax = vjp(differentiate(loss, leaves), stats, self.vocabulary)
        return Coefficients(softmax, {}, share).map(lambda t: t * self.upstream)

    def total(self, shares: object, stats: Statistics) -> Tensor:
        """Return the loss, []."""
        with torch.no_grad():
            full = (self.packing.scatter(t) for t in (stats.logp, stats.entropy))
            return scalar(self.loss(*full))


def scalar(value: object) -> Tensor:
    """Return the scalar that a loss function returned; ValueError for anything else."""
    if isinstance(value, Tensor):
        check_dense("loss_fn", value)
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss_fn: returned {got}, want a floating scalar tensor")
    return value
