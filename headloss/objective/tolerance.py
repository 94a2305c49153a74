"""The gradient tolerance: rows of a chunk with almost no gradient are treated as rows without a
gradient.

n tokens of a chunk, V vocabulary. The mass of a token is an upper bound of the sum of |dL/draw|
over all columns. In the Frobenius norm, skipping row t changes dX by at most mass_t max_j |W_j|,
and dW by at most mass_t |h_t|. Therefore the sum of the skipped masses bounds both errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.transform import Transform
from ..statistics.metrics import Mean, Metrics, Sum
from ..statistics.softmax import FLOOR, Statistics
from .weighted import Coefficients

UNITS = 1 << 50  # integer units of a chunk's total mass


def masses(
    gradient: Coefficients, stats: Statistics, transform: Transform, vocabulary: int
) -> Tensor:
    """The mass of each token, [n] float64; infinite if a coefficient is NaN:

    (|c_target + p_y (c_prob + c_entropy log p_y)| + (1 - p_y) |c_prob|
     + |c_entropy| (entropy + p_y log p_y) + V |c_uniform| + |candidate slopes|)
    |logit_scale| / temperature
    """
    c = gradient.softmax.map(lambda t: t.double())
    logp = stats.logp.double().clamp_min(FLOOR)
    p = logp.exp()
    q = -logp.expm1()
    zero = torch.zeros_like(logp)
    target, prob = (zero if t is None else t for t in (c.target, c.prob))
    # Compute c_target + c_prob p_y through 1 - p_y, which keeps all digits when the terms cancel.
    at_target = (target + prob) - prob * q
    others = q * prob.abs()
    if c.entropy is not None:
        at_target = at_target + c.entropy * (p * logp)
        others = others + c.entropy.abs() * (stats.entropy.double() + p * logp).clamp_min(0)
    mass = at_target.abs() + others
    if c.uniform is not None:
        mass = mass + vocabulary * c.uniform.abs()
    for slopes in gradient.extras.values():
        mass = mass + slopes.double().abs().unsqueeze(-1).flatten(1).sum(1)
    return (mass * abs(transform.scale) / transform.temperature).nan_to_num(nan=torch.inf)


def least(mass: Tensor, share: float) -> Tensor:
    """Return the mask [n] of tokens to skip: tokens in ascending order of mass, as long as the sum
    of masses is at most `share` of the total; of equal masses, the earlier token first. The mask is
    all False if the total mass is not finite.

    Masses are added as integer numbers of units, rounded up. The integer sum is the same in any
    order, and never below the exact sum.
    """
    total = mass.sum()
    usable = total.isfinite() & (total > 0)
    units = torch.where(usable, (mass / total * UNITS).ceil(), 0).long()
    ranking = mass.argsort(stable=True)
    within = units[ranking].cumsum(0) <= int(min(share, 2.0) * UNITS)
    return torch.empty_like(within).scatter_(0, ranking, within & usable)


@dataclass(eq=False)
class Tolerance:
    """The gradient tolerance of a call: removes rows with almost no gradient from a chunk's
    gradient and counts the rows."""

    share: float  # Share of a chunk's mass that may be skipped; 0 turns the tolerance off.
    transform: Transform  # The transform of all tokens' logits.
    vocabulary: int  # Vocabulary of the whole model, V.
    skipped_rows: Tensor  # Scalars in float64, 0 at first, on the device of the call.
    skipped_mass: Tensor
    mass: Tensor

    def __call__(
        self, gradient: Coefficients, stats: Statistics, rows: slice, scale: Tensor | None
    ) -> Coefficients:
        """Return the coefficients of the tokens `rows`, without a gradient at the tokens of least
        mass. `scale` is the factor in the coefficients that prevents float16 underflow."""
        if not self.share:
            return gradient
        mass = masses(gradient, stats, self.transform.rows(rows), self.vocabulary)
        out = least(mass, self.share)
        alive = gradient.live()
        if scale is not None:
            mass = mass / scale
        self.skipped_rows = self.skipped_rows + (out & alive).sum().double()
        self.skipped_mass = self.skipped_mass + torch.where(out, mass, 0).sum()
        self.mass = self.mass + mass.sum()
        return gradient.without(out)

    def metrics(self) -> Metrics:
        """Return the metrics. `skipped_rows` is the number of skipped rows that had a gradient.
        `skipped_mass` is the skipped share of the total mass; `skipped_mass.sum`, the skipped mass,
        bounds the error."""
        share = Mean(self.skipped_mass, self.mass)
        return Metrics(skipped_rows=Sum(self.skipped_rows), skipped_mass=share)
