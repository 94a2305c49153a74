"""The schedules of logits that exist already and that a kernel serves where they lie.

T scored tokens, V vocabulary. No logits are copied: one walk along each row gives its statistics, a
second one writes its gradient into the logits' memory or a new tensor. Where the objective's slopes
are known before the statistics are (`slopes`), one launch makes both walks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import interface as kernels
from .logits import ALL, GivenGradients, GivenLogits
from .objective import Gradient
from .schedules import Call, Gradients, Outcome, PullBack
from .stats import Normalizer, Partials, Statistics, finish


class Walk:
    """Launches on the rows of one call."""

    def __init__(self, call: Call, source: GivenLogits) -> None:
        self.call, self.source = call, source
        self.logits = self._rows(source.logits)

    def _rows(self, tensor: Tensor):
        return kernels.Rows(tensor.detach(), *self.source.offsets(tensor))

    def destination(self):
        """Where the gradient goes, with zeros where nothing is scored."""
        call = self.call
        found = GivenGradients(self.source, call.packed.unscored, call.inplace).total
        if found is not self.source.logits:
            return self._rows(found)
        torch.autograd.graph.increment_version(found)  # autograd does not see a kernel write
        return self.logits

    def run(
        self,
        out=None,
        gradient: Gradient | None = None,  # with statistics: at an entropy of 0
        slopes: Tensor | None = None,  # [P, 5, T] in closed form
        normalizer: Normalizer | None = None,  # in place of statistics
    ) -> Partials | None:
        call, batch = self.call, self.call.packed.batch
        return call.kernels.given_rows(
            kernels.Walk(
                self.logits,
                out,
                batch.live,
                batch.targets,
                call.slices.first,
                call.transform,
                call.needs if normalizer is None else None,
                None if gradient is None else gradient.coefficients,
                slopes,
                normalizer,
            )
        )

    def finish(self, partials: Partials | None) -> tuple[Statistics, Normalizer]:
        """Statistics of the whole vocabulary."""
        assert partials is not None
        merged = self.call.slices.merge(partials)
        return finish(merged, self.call.vocabulary, self.call.needs)


def one_pass(call: Call, source: GivenLogits) -> tuple[Outcome, PullBack]:
    """Statistics and the gradient for an upstream gradient of 1."""
    walk, batch = Walk(call, source), call.packed.batch
    if call.known_slopes():
        declared = call.options.upstream
        known = call.bound.beforehand(batch, call.needs, 1.0 if declared is None else declared)
        out = walk.destination()
        stats, _ = walk.finish(walk.run(out, *known))
        values = call.bound.gradient(stats, batch, ALL, needed=False).values
    else:
        stats, normalizer = walk.finish(walk.run())
        gradient = call.pull_back(stats)
        values, out = gradient.values, walk.destination()
        walk.run(out, gradient, normalizer=normalizer)

    def pull(upstream: Tensor, _) -> Gradients:
        factor = call.owed(upstream)
        if factor is not None:
            call.kernels.scale_rows_(out, factor)
        return [out.tensor]

    return Outcome(stats, values), pull


def recompute(call: Call, source: GivenLogits) -> tuple[Outcome, PullBack]:
    """Statistics; the gradient in the backward pass, with the upstream gradient in it."""
    walk = Walk(call, source)
    stats, normalizer = walk.finish(walk.run())
    gradient = call.pull_back(stats)

    def pull(upstream: Tensor, saved) -> Gradients:
        factor = call.owed(upstream)
        owed = gradient if factor is None else gradient.map(lambda t: t * factor.to(t.dtype))
        again = Walk(call, saved)
        out = again.destination()
        again.run(out, owed, normalizer=normalizer)
        return [out.tensor]

    return Outcome(stats, gradient.values), pull


def statistics(call: Call, source: GivenLogits) -> tuple[Outcome, None]:
    """No gradient: one walk."""
    walk = Walk(call, source)
    stats, _ = walk.finish(walk.run())
    gradient = call.bound.gradient(stats, call.packed.batch, ALL, needed=False)
    return Outcome(stats, gradient.values), None


SCHEDULES = {"one_pass": one_pass, "recompute": recompute, "statistics": statistics}
