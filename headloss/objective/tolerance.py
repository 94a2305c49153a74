"""The gradient tolerance: tokens of a chunk whose gradient is almost 0 are treated as tokens
without a gradient.

n tokens of a chunk, V vocabulary. The mass of a token is an upper bound of the sum, over all
vocabulary columns, of the absolute gradient |dL/draw| of the raw logit. For a token t, let m_t be
its mass (the bound of its logits' gradient), h_t its hidden state and W_j row j of the head's
weight: skipping token t changes the hidden gradient by at most m_t max_j |W_j|, and the weight
gradient by at most m_t |h_t|, in the Frobenius norm. If M is the sum of the masses (gradient
bounds) of all skipped tokens, skipping changes the hidden gradient by at most M times the largest
norm of a weight row, and the weight gradient by at most M times the largest norm of a hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.transform import Transform
from ..statistics.metrics import Mean, Metrics, Sum
from ..statistics.softmax import FLOOR, Statistics
from .weighted import Coefficients

# Masses (upper bounds of tokens' gradients) are rounded to integers in units of (sum of all masses)
# / UNITS.
UNITS = 1 << 50


def masses(
    gradient: Coefficients, stats: Statistics, transform: Transform, vocabulary: int
) -> Tensor:
    """Return each token's mass (an upper bound of its gradient), [n] float64; infinite if a
    gradient coefficient is NaN.

    With gradient coefficients c_target, c_prob, c_entropy and c_uniform, target y, V columns, and
    derivatives s with respect to `Statistics.extras` (such as candidates' log-probs), the mass of a
    token is
    (|c_target + p_y (c_prob + c_entropy log p_y)| + (1 - p_y) |c_prob|
     + |c_entropy| (entropy + p_y log p_y) + V |c_uniform| + sum |s|) |logit_scale| / temperature
    """
    c = gradient.softmax.map(lambda t: t.double())
    logp = stats.logp.double().clamp_min(FLOOR)
    p = logp.exp()
    q = -logp.expm1()
    zero = torch.zeros_like(logp)
    target, prob = (zero if t is None else t for t in (c.target, c.prob))
    # Compute c_target + c_prob p_y as (c_target + c_prob) - c_prob (1 - p_y), which keeps all
    # digits if c_target is near -c_prob and the target's probability p_y is near 1.
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
    """Return the mask [n] of tokens to skip. Tokens are skipped in ascending order of mass (an
    upper bound of a token's gradient), as long as the sum of the skipped masses is at most `share`
    times the sum of all masses. Of two tokens with equal upper bound of the gradient, the earlier
    token is skipped first. If the sum of the masses (bounds of the tokens' gradients) is not
    finite, no token is skipped.

    Each token's mass (upper bound of its gradient) is rounded up to an integer number of units,
    where a unit is 2^-50 of the sum of all masses. A sum of integers does not depend on the order
    of the tokens. Because each bound is rounded up, the sum of the rounded bounds is never below
    the sum of the exact bounds.
    """
    total = mass.sum()
    usable = total.isfinite() & (total > 0)
    units = torch.where(usable, (mass / total * UNITS).ceil(), 0).long()
    ranking = mass.argsort(stable=True)
    within = units[ranking].cumsum(0) <= int(min(share, 2.0) * UNITS)
    return torch.empty_like(within).scatter_(0, ranking, within & usable)


@dataclass(eq=False)
class Tolerance:
    """The gradient tolerance of a call. Calling a `Tolerance` sets the gradient coefficients of
    tokens with almost no gradient to 0, and counts these tokens."""

    # A token's mass is an upper bound of the norm of the gradient of the token's logits. Tokens may
    # be skipped while the sum of the skipped tokens' masses is at most `share` times the sum of all
    # masses in the chunk; with `share` = 0, no token is skipped.
    share: float
    transform: Transform  # Transform of all tokens' logits: scale, soft cap and temperature.
    vocabulary: int  # Number V of vocabulary columns of the whole model.
    skipped_rows: Tensor  # Sum over all chunks of the call, a float64 scalar.
    skipped_mass: Tensor
    mass: Tensor

    def __call__(
        self, gradient: Coefficients, stats: Statistics, rows: slice, scale: Tensor | None
    ) -> Coefficients:
        """Return the coefficients of the tokens `rows`, with 0 at the tokens whose mass (the bound
        of their gradient) is smallest. `scale` is the factor by which the coefficients were
        multiplied against float16 underflow, or None."""
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
        """Return the metrics. `skipped_rows` is the number of tokens with a gradient that were
        skipped because their gradient was almost 0. `skipped_mass` is the skipped fraction of the
        sum of all masses (upper bounds of gradients); `skipped_mass.sum`, the sum of the skipped
        masses, bounds the gradient's error."""
        share = Mean(self.skipped_mass, self.mass)
        return Metrics(skipped_rows=Sum(self.skipped_rows), skipped_mass=share)
