"""Softmax statistics that a loss may read, and the gradient of the loss with respect to the logits,
which passes through these statistics.

T scored tokens, V vocabulary, z [T, V] logits after scale, soft cap and temperature, p =
softmax(z).

`SoftmaxState` is the softmax of a *slice* of the vocabulary in a few floats per token.
Online-softmax states form a commutative monoid under `merge`, so that tiles of a kernel, blocks of
columns and ranks of a group merge by one rule. `Statistics` are the inputs of a term.
`SoftmaxCoefficients` hold everything that a kernel needs to know of a loss, whose gradient for a
token with target y is
    dL/dz_j = c_target [j = y] + p_j (c_prob + c_entropy log p_j) + c_uniform

Log-probs of candidates (chosen columns of each token) add a few sparse numbers per token to the
gradient dL/dz. A derivative s_k of the loss with respect to the log-prob of candidate k, in column
id_k, adds s_k to dL/dz at column id_k, and adds -s_k to the gradient coefficient c_prob. The tail
is the set of all vocabulary columns that are not candidates (chosen columns) of the token. A
derivative s of the loss with respect to the tail's log-prob adds s p_j / (probability of the tail)
to dL/dz_j at each tail column j, and adds -s to the coefficient c_prob.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

STATISTICS = ("logp", "lse", "entropy", "mean_logit", "top1")
# Measurements in addition to the statistics, and their keys in `Statistics.extras`. The log-probs
# of candidates are [T, K + 1]: K chosen columns, and the tail (all other columns) last.
CANDIDATES = "candidates"
COLLISION = "sum_p_squared"
PEAK = "peak"
BESIDE = {
    "candidate_logps": CANDIDATES,
    "candidate_tail": CANDIDATES,
    "sum_p_squared": COLLISION,
    "peak": PEAK,
}
DIFFERENTIABLE = ("logp", "lse", "entropy", "mean_logit")
NOT_NEEDED: Any = None
ByStatistic = dict[object, Tensor]  # Keys: a statistic's name or a key of `Statistics.extras`.

# exp(FLOOR) is 0 in float32 and float64 and FLOOR is finite, so that 0 * log 0 is 0 and not NaN.
FLOOR = -1e4
# A column with log p > SURE has p > 0.6, so that the column is the likeliest, and each other column
# has p < 0.4.
SURE = -0.5


def _present(named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the entries of `named` that are tensors."""
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


class SoftmaxState(NamedTuple):
    """Softmax of a slice of the vocabulary, with e_j = exp(z_j - max_logit) over the slice; every
    field is [T].

    `sumexp_m1` leaves the largest term out of the sum, so that log1p of `sumexp_m1` keeps its
    digits where one column has a probability near 1. An empty slice has max_logit = -inf and
    sumexp_m1 = -1.
    """

    max_logit: Tensor  # Maximum of z.
    sumexp_m1: Tensor  # Sum over j of exp(z_j - max_logit), minus 1.
    target: Tensor  # Logit z of the target; -inf if the target is outside of the slice.
    # Sum over j of exp(z_j - max_logit) (z_j - max_logit), for the entropy.
    entropy_sum: Tensor | None = None
    logit_sum: Tensor | None = None  # Sum of the slice's logits z, for the mean logit.

    def tensors(self) -> dict[str, Tensor]:
        return _present(self._asdict())


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """Return the online-softmax state of two disjoint vocabulary slices together, from the state of
    each slice."""
    theirs = b.tensors()
    both = {name: (mine, theirs[name]) for name, mine in a.tensors().items() if name in theirs}
    return merge_all(SoftmaxState(**{name: torch.stack(pair) for name, pair in both.items()}))


def merge_all(slices: SoftmaxState) -> SoftmaxState:
    """Return the online-softmax state of W vocabulary slices together, from their states [W, n], in
    a few operations for any W."""
    max_logit, holder = slices.max_logit.max(0)
    # The scale of a slice is exp(largest logit of the slice - largest logit of all slices). The
    # vocabulary slice with the largest logit gets the factor 1 without a subtraction of two logits,
    # because the difference would be NaN if all logits are -inf.
    log_scale = torch.where(slices.max_logit == max_logit, 0.0, slices.max_logit - max_logit)
    scale = log_scale.clamp_min_(FLOOR).exp()
    mass = 1 + slices.sumexp_m1
    # `sumexp_m1` leaves out the exponential of the largest logit, exp(0) = 1, only once, even if
    # several slices contain a logit equal to the maximum.
    others = slices.sumexp_m1.gather(0, holder[None])
    sumexp_m1 = (mass * scale).scatter(0, holder[None], others).sum(0)
    entropy_sum = logit_sum = None
    if slices.entropy_sum is not None:
        entropy_sum = (scale * (slices.entropy_sum + mass * log_scale)).sum(0)
    if slices.logit_sum is not None:
        logit_sum = slices.logit_sum.sum(0)
    return SoftmaxState(max_logit, sumexp_m1, slices.target.amax(0), entropy_sum, logit_sum)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of each scored token, as vectors [T] in float32 (in float64 for float64 inputs).

    `logp` = z_y - lse, `lse` = log sum exp z, `entropy` = -sum p log p and `mean_logit` = sum z / V
    carry a gradient. `top1` (1 if no token has a higher probability than the target, else 0),
    `peak` = max z and `sum_p_squared` = sum p^2 carry no gradient. `batch.candidate_ids` [T, K]
    adds two statistics with a gradient: `candidate_logps` [T, K], the log-probs of the columns
    `candidate_ids` (0 at unused entries), and `candidate_tail` [T], the log of the summed
    probability of all other columns. Only statistics that loss terms read are computed. A term with
    a teacher can also read the divergences from the teacher (`losses.teacher`). `extras` holds
    further measurements: divergences [T] from a teacher under the key (teacher, measure), and
    log-probs [T, K + 1] of a teacher's K stored tokens and of the tail.
    """

    # None for a statistic that no loss term reads.
    logp: Tensor = NOT_NEEDED
    lse: Tensor = NOT_NEEDED
    entropy: Tensor = NOT_NEEDED
    mean_logit: Tensor = NOT_NEEDED
    top1: Tensor = NOT_NEEDED
    extras: ByStatistic = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.tensors().values())))

    @property
    def candidate_logps(self) -> Tensor:
        return self._candidates("logps")[:, :-1]

    @property
    def candidate_tail(self) -> Tensor:
        return self._candidates("tail")[:, -1]

    @property
    def sum_p_squared(self) -> Tensor:
        return self.extras[COLLISION].detach()

    @property
    def peak(self) -> Tensor:
        return self.extras[PEAK].detach()

    def _candidates(self, name: str) -> Tensor:
        if CANDIDATES not in self.extras:
            raise ValueError(f"reads stats.candidate_{name}, but batch.candidate_ids was not given")
        return self.extras[CANDIDATES]

    def tensors(self) -> dict[str, Tensor]:
        """Return the statistics that are present, by name."""
        return _present(vars(self))

    def map(self, function: Callable[[Tensor], Tensor]) -> Statistics:
        """Return the statistics with `function` applied to every vector, including the vectors in
        `extras`."""
        mapped: dict[str, Any] = {name: function(t) for name, t in self.tensors().items()}
        return Statistics(**mapped, extras={key: function(t) for key, t in self.extras.items()})


class Normalizer(NamedTuple):
    """Log-sum-exp in two parts, [T] each, with log_sum = log sum exp(z - max_logit). The formula
    log p_j = (z_j - max_logit) - log_sum stays accurate for large |z|, unlike z_j - lse."""

    max_logit: Tensor
    log_sum: Tensor

    def rows(self, rows: Tensor | slice) -> Normalizer:
        """Return the normalizer of some of the tokens."""
        return Normalizer(*(values[rows] for values in self))


def finish(
    partials: SoftmaxState, vocabulary: int, needs: frozenset[str]
) -> tuple[Statistics, Normalizer]:
    """Return the statistics in `needs` over the whole vocabulary, and the softmax normalizer, which
    the gradient reads."""
    log_sum = partials.sumexp_m1.log1p()
    values: dict[str, Any] = {}
    if "logp" in needs:
        values["logp"] = (partials.target - partials.max_logit) - log_sum
    if "lse" in needs:
        values["lse"] = partials.max_logit + log_sum
    if "entropy" in needs:
        assert partials.entropy_sum is not None
        mass = 1 + partials.sumexp_m1
        values["entropy"] = torch.addcdiv(log_sum, partials.entropy_sum, mass, value=-1)
    if "mean_logit" in needs:
        assert partials.logit_sum is not None
        values["mean_logit"] = partials.logit_sum / vocabulary
    if "top1" in needs:
        values["top1"] = (partials.target >= partials.max_logit).to(partials.max_logit.dtype)
    return Statistics(**values), Normalizer(partials.max_logit, log_sum)


class SoftmaxCoefficients(NamedTuple):
    """Coefficients c_target, c_prob, c_entropy and c_uniform of the loss's gradient with respect to
    the logits, [T] each; None for a coefficient that is 0 for every token."""

    target: Tensor | None = None
    prob: Tensor | None = None
    entropy: Tensor | None = None
    uniform: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return _present(self._asdict())

    def map(self, function: Callable[[Tensor], Tensor]) -> SoftmaxCoefficients:
        return SoftmaxCoefficients(*(None if value is None else function(value) for value in self))


def vjp(
    # Upstream gradients by the statistic's name, [T] each; for `CANDIDATES`, [T, K + 1].
    gradients: Mapping[Any, Tensor],
    stats: Statistics,
    vocabulary: int,
) -> SoftmaxCoefficients:
    """Turn the gradient with respect to the statistics into the coefficients c_target, c_prob,
    c_entropy and c_uniform of dL/dz.

    The formulas follow from dlogp/dz_j = [j = y] - p_j, dlse/dz_j = p_j, dentropy/dz_j = -p_j (log
    p_j + entropy) and dmean_logit/dz_j = 1/V, for the target y.
    """
    g_logp, g_lse, g_entropy, g_mean = map(gradients.get, DIFFERENTIABLE)
    parts = [] if g_lse is None else [g_lse]
    if g_logp is not None:
        parts.append(-g_logp)
    if g_entropy is not None:
        parts.append(-g_entropy * stats.entropy)
    if CANDIDATES in gradients:
        parts.append(-gradients[CANDIDATES].sum(1))
    prob = sum(parts[1:], parts[0]) if parts else None
    return SoftmaxCoefficients(
        target=g_logp,
        prob=prob,
        entropy=None if g_entropy is None else -g_entropy,
        uniform=None if g_mean is None else g_mean / vocabulary,
    )


class Slope(NamedTuple):
    """A part of a term's derivative with respect to a statistic (named by `of`), in closed form,
    which a kernel can compute from the log-prob `logp`:
        d term / d statistic = rate * exp(sign * (logp - anchor)) where low <= logp <= high, else 0

    Each field is a vector [T] or a number. The derivative of the term with respect to a statistic
    other than logp must be a constant.
    """

    rate: Tensor | float
    anchor: Tensor | float = 0.0
    low: Tensor | float = -math.inf
    high: Tensor | float = math.inf
    sign: Tensor | float = 1.0  # If `sign` is 0, the derivative is constant from `low` to `high`.
    of: str = "logp"

    @property
    def constant(self) -> bool:
        """True if the derivative that this `Slope` describes is the same for every log-prob of the
        target."""
        low = self.low
        high = self.high
        numbers = not (isinstance(low, Tensor) or isinstance(high, Tensor))
        return numbers and bool(self.sign == 0) and (low, high) == (-math.inf, math.inf)

    def at(self, logp: Tensor) -> Tensor:
        """Return the derivative that this `Slope` describes, at each of the log-probs `logp`
        [n]."""
        if self.constant:
            if isinstance(self.rate, Tensor):
                return torch.zeros_like(logp).add_(self.rate)
            return torch.full_like(logp, self.rate)
        exponent = logp - self.anchor
        if isinstance(self.sign, Tensor) or self.sign != 1:
            exponent *= self.sign
        value = exponent.exp_().mul_(self.rate)
        return value.where((logp >= self.low).logical_and_(logp <= self.high), 0)
