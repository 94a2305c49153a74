"""Laws 1 and 2: what a loss may see of a softmax, and how a gradient gets back through it.

T scored tokens, V vocabulary, z [T, V] logits after scale, soft cap and temperature,
p = softmax(z).

`SoftmaxState` is the softmax of a *slice* of the vocabulary in a few floats per token. States form
a commutative monoid under `merge`, so tiles of a kernel, blocks of a sweep and ranks of a group
join by the same rule. `Statistics` are what a term sees. `SoftmaxCoefficients` are all that a
kernel ever learns of a loss:

    dL/dz_j = c_target [j = y] + p_j (c_prob + c_entropy log p_j) + c_uniform

Candidates add K sparse numbers per token to these four: a slope s_k of the log-prob of column id_k
adds s_k at that column and -s_k to c_prob; a slope s of the rest's, all columns but the candidates,
adds s p_j / (mass of the rest) at each of those, and -s to c_prob.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

STATISTICS = ("logp", "lse", "entropy", "mean_logit", "top1")
# What is measured beside them, and its key in `Statistics.extras`. There candidates have
# [T, K + 1] log-probs, of which the rest's is the last.
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
ByStatistic = dict[object, Tensor]  # by its name, or its key in `Statistics.extras`

# exp(FLOOR) is 0 in float32 and float64 and FLOOR is finite, so that 0 * log 0 is 0 and not NaN.
FLOOR = -1e4
# Above this log p a column is the likeliest one, and no other is near it.
SURE = -0.5


def _present(named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The tensors of a record, by name."""
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


class SoftmaxState(NamedTuple):
    """A slice of the vocabulary, with e_j = exp(z_j - max_logit) over it; every field is [T].

    `sumexp_m1` leaves the largest term out of the sum: its log1p then keeps its digits where one
    token has nearly all the mass. An empty slice has max_logit = -inf and sumexp_m1 = -1.
    """

    max_logit: Tensor  # max z
    sumexp_m1: Tensor  # sum e - 1
    target: Tensor  # z_y, or -inf where y lies in another slice
    entropy_sum: Tensor | None = None  # sum e (z - max_logit)
    logit_sum: Tensor | None = None  # sum z, for the mean logit

    def tensors(self) -> dict[str, Tensor]:
        return _present(self._asdict())


def merge(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """The state of the union of two disjoint slices."""
    theirs = b.tensors()
    both = {name: (mine, theirs[name]) for name, mine in a.tensors().items() if name in theirs}
    return merge_all(SoftmaxState(**{name: torch.stack(pair) for name, pair in both.items()}))


def merge_all(slices: SoftmaxState) -> SoftmaxState:
    """The same of the slices [W, n] of W ranks, in a few operations for any W."""
    max_logit, holder = slices.max_logit.max(0)
    # A slice that holds the largest logit is not scaled at all, also where all are -inf.
    log_scale = torch.where(slices.max_logit == max_logit, 0.0, slices.max_logit - max_logit)
    scale = log_scale.clamp_min_(FLOOR).exp()
    mass = 1 + slices.sumexp_m1
    # The largest term stays out of one slice's sum alone, also where several slices hold its equal.
    others = slices.sumexp_m1.gather(0, holder[None])
    sumexp_m1 = (mass * scale).scatter(0, holder[None], others).sum(0)
    entropy_sum = logit_sum = None
    if slices.entropy_sum is not None:
        entropy_sum = (scale * (slices.entropy_sum + mass * log_scale)).sum(0)
    if slices.logit_sum is not None:
        logit_sum = slices.logit_sum.sum(0)
    target = slices.target.amax(0)
    return SoftmaxState(max_logit, sumexp_m1, target, entropy_sum, logit_sum)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """The statistics of each scored token: [T] vectors, float32 (float64 for float64 inputs).

    `logp` = z_y - lse, `lse` = log sum exp z, `entropy` = -sum p log p and `mean_logit` = sum z / V
    carry a gradient; `top1` = 1 where no token is likelier than the target, `peak` = max z and
    `sum_p_squared` = sum p^2 are to be read. With `batch.candidate_ids` [T, K] there are also
    `candidate_logps` [T, K], log-probs of these columns, 0 in empty slots, and `candidate_tail`
    [T], the log of the mass of all others; both carry a gradient. Only those that the objective
    reads are computed. A term of a teacher sees its divergences too (`losses.teacher`). `extras`
    holds what is measured beside these: [T] measures of a teacher by (teacher, measure), [T, K + 1]
    log-probs of a teacher's stored outcomes and of the rest.
    """

    # None where nobody has asked for it: whoever reads one has asked.
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
        """The statistics that are present, by name."""
        return _present(vars(self))

    def map(self, function: Callable[[Tensor], Tensor]) -> Statistics:
        """Apply `function` to every vector, what is measured beside them included."""
        mapped: dict[str, Any] = {name: function(t) for name, t in self.tensors().items()}
        beside = {key: function(t) for key, t in self.extras.items()}
        return Statistics(**mapped, extras=beside)


class Normalizer(NamedTuple):
    """log-sum-exp in two parts, [T] each: log p_j = (z_j - max_logit) - log_sum loses no digits to
    the size of z, where z_j - lse would. log_sum = log sum exp(z - max_logit)."""

    max_logit: Tensor
    log_sum: Tensor

    def rows(self, rows: Tensor | slice) -> Normalizer:
        """The normalizer of some of the tokens."""
        return Normalizer(*(values[rows] for values in self))


def finish(
    partials: SoftmaxState, vocabulary: int, needs: frozenset[str]
) -> tuple[Statistics, Normalizer]:
    """The statistics in `needs` of the whole vocabulary, and what a gradient kernel needs of it."""
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
    """The pull-back of an objective, [T] each; None where no token can have one."""

    target: Tensor | None = None
    prob: Tensor | None = None
    entropy: Tensor | None = None
    uniform: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return _present(self._asdict())

    def map(self, function: Callable[[Tensor], Tensor]) -> SoftmaxCoefficients:
        return SoftmaxCoefficients(*(None if value is None else function(value) for value in self))


def vjp(
    gradients: Mapping[Any, Tensor],  # d objective / d statistic, [T] each, candidates' [T, K + 1]
    stats: Statistics,
    vocabulary: int,
) -> SoftmaxCoefficients:
    """Turn the gradient with respect to the statistics into the four coefficients of law 1.

    From dlogp/dz_j = [j = y] - p_j, dlse/dz_j = p_j, dentropy/dz_j = -p_j (log p_j + entropy) and
    dmean_logit/dz_j = 1/V.
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
    """A part of a term's gradient in closed form, so that a kernel can find it once it has logp:

        d term / d of = rate * exp(sign * (logp - anchor))   where low <= logp <= high, else 0

    [T] vectors or numbers. Of another statistic than logp it must be a constant.
    """

    rate: Tensor | float
    anchor: Tensor | float = 0.0
    low: Tensor | float = -math.inf
    high: Tensor | float = math.inf
    sign: Tensor | float = 1.0  # 0: a constant
    of: str = "logp"

    @property
    def constant(self) -> bool:
        """True if the slope is the same for all statistics."""
        low = self.low
        high = self.high
        numbers = not (isinstance(low, Tensor) or isinstance(high, Tensor))
        return numbers and bool(self.sign == 0) and (low, high) == (-math.inf, math.inf)

    def at(self, logp: Tensor) -> Tensor:
        """[n] its values at the tokens' log-probs."""
        if self.constant:
            return torch.zeros_like(logp).add_(self.rate)
        exponent = logp - self.anchor
        if isinstance(self.sign, Tensor) or self.sign != 1:
            exponent *= self.sign
        value = exponent.exp_().mul_(self.rate)
        return value.where((logp >= self.low).logical_and_(logp <= self.high), 0)
