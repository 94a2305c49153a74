"""Functions of the preference terms on pairs: scores of answers, and losses of a chosen answer
against rejected answers.

S segments in P groups of 1 + n: segment (1 + n) k is the chosen answer, the n segments after it are
the rejected answers. c and r are rewards: scores times beta. Each nonempty segment of a group of 1
+ n answers has the group's loss, multiplied by (1 + n) / (number of nonempty segments of the
group), so that the mean over segments equals the mean over groups. A group of answers without any
scored token has loss 0 and still counts in the mean over groups. An answer without scored tokens
(an empty answer) has a log-prob of 0. An empty rejected answer is left out of the group's loss if
the group has a nonempty rejected answer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..batch.reduction import sequence_mean
from ..statistics.metrics import Observed
from ..statistics.softmax import Statistics
from .arguments import counts, non_negative, number, one_of, positive
from .supervised import log_1_minus_p
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

Score = Callable[[Statistics, "PackedBatch"], Tensor]  # [S] score of each answer
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# Arguments of exp are clamped to at most 80, so that the result fits float32.
MAX_POWER = 80.0
# Values of 1 - p are clamped to at least 1e-30, so that a weight times 1 / (1 - p) fits float32.
LEAST = 1e-30


# ---------------------------------------------------------------------- losses of two rewards


@dataclass(frozen=True, kw_only=True)
class Pairwise:
    """Pairwise preference loss, a function of the reward c of a chosen answer and the reward r of a
    rejected answer."""

    loss_type: str = "sigmoid"
    beta: float
    label_smoothing: float = 0.0
    gamma: float = 0.0  # target margin, subtracted from the chosen minus the rejected reward
    tau: float = 0.05
    factor: float = 1.0
    rejected: int = 1
    weighted: bool = False  # multiply by `likely_under_policy`

    def __call__(self, c: Tensor, r: Tensor) -> Tensor:
        """Return the elementwise loss of the chosen and the rejected rewards of P groups: [P] and
        [P] for one rejected answer per group, [P, 1] and [P, n] for n rejected answers."""
        if self.of_both:
            return self.factor * OF_BOTH[self.loss_type](c, r, self)
        x = c - r - self.gamma
        value, share = OF_MARGIN[self.loss_type](x, self), self.share
        if share != 0:
            value = (1 - share) * value + share * OF_MARGIN[self.loss_type](-x, self)
        return self.factor * value

    @property
    def of_both(self) -> bool:
        """Return whether the loss needs the chosen answer's reward and the rejected answer's
        reward, not only the difference of the two rewards."""
        return self.loss_type in OF_BOTH

    @property
    def share(self) -> float:
        """Return the number s in the smoothed loss (1 - s) loss(c, r) + s loss(r, c), where c is
        the reward of the chosen answer and r the reward of the rejected answer."""
        e = self.label_smoothing
        return {"robust": -e / (1 - 2 * e) if e < 0.5 else 0, "exo_pair": 0}.get(self.loss_type, e)


def _sigmoid(x: Tensor, o: Pairwise) -> Tensor:
    return -logsigmoid(x)


def _exo(x: Tensor, o: Pairwise) -> Tensor:
    """Return KL(p || q), where x is the reward margin, p = (sigmoid(x), sigmoid(-x)) is the
    policy's preference, and q = (1 - e, e) is the smoothed label with e = label_smoothing."""
    e = o.label_smoothing
    right, wrong = logsigmoid(x) - math.log1p(-e), logsigmoid(-x) - math.log(e)
    return torch.sigmoid(x) * right + torch.sigmoid(-x) * wrong


def _discopop(x: Tensor, o: Pairwise) -> Tensor:
    mix = torch.sigmoid(x / o.tau)
    return -logsigmoid(x) * (1 - mix) + (-x).clamp(max=MAX_POWER).exp() * mix


OF_MARGIN: dict[str, Callable[[Tensor, Pairwise], Tensor]] = {
    **dict.fromkeys(("sigmoid", "robust", "sigmoid_norm", "softmax"), _sigmoid),
    "hinge": lambda x, o: (1 - x).clamp_min(0),
    "ipo": lambda x, o: ((x - 0.5) / o.beta).square(),
    "exo_pair": _exo,
    "discopop": _discopop,
}
OF_BOTH: dict[str, Callable[[Tensor, Tensor, Pairwise], Tensor]] = {
    "nca_pair": lambda c, r, o: -logsigmoid(c) - (logsigmoid(-c) + logsigmoid(-r)) / 2,
    "bco_pair": lambda c, r, o: -logsigmoid(c) - logsigmoid(-r),
    "sppo_hard": lambda c, r, o: ((c - 0.5).square() + (r + 0.5).square()) / o.beta**2,
    "apo_zero": lambda c, r, o: torch.sigmoid(-c) + torch.sigmoid(r),
    "apo_down": lambda c, r, o: torch.sigmoid(c) + torch.sigmoid(r - c),
}
LOSS_TYPES = (*OF_MARGIN, *OF_BOTH)
AVERAGED = ("ipo", "sigmoid_norm")
SMOOTHED = ("sigmoid", "robust", "sigmoid_norm", "softmax", "hinge", "ipo", "exo_pair")


# ---------------------------------------------------------------------- scores of answers


def summed(values: Tensor, batch: PackedBatch, ld_alpha: float | None = None) -> Tensor:  # [S]
    """Return the sum of the per-token `values` over each answer, [S]. If `ld_alpha` is given, the
    values of a pair's longer answer are multiplied by `ld_alpha` after the first m tokens, where m
    is the length of the shorter answer."""
    if ld_alpha is None:
        return batch.segments.sum(values)
    if batch.segments.group is not None:
        raise ValueError("segments: run across ranks, where ld_alpha cannot tell a token's place")
    lengths = batch.segments.lengths
    place = torch.arange(len(values), device=values.device)
    place = place - (lengths.cumsum(0) - lengths)[batch.segments.ids]
    shared = torch.minimum(*split(lengths, batch))
    inside = place < join(shared, batch)[batch.segments.ids]
    return batch.segments.sum(torch.where(inside, values, ld_alpha * values))


def log_ratio(
    stats: Statistics, batch: PackedBatch, *, average: bool = False, ld_alpha: float | None = None
) -> Tensor:
    """Return the log-ratio of policy to reference per answer, summed or averaged, [S]."""
    total = summed(stats.logp - batch.ref_logps, batch, ld_alpha)
    return _averaged(total, batch) if average else total


def f_log_ratio(
    stats: Statistics,
    batch: PackedBatch,
    *,
    average: bool,
    ld_alpha: float | None,
    power: float | None,  # None: the Jensen-Shannon divergence
) -> Tensor:
    """Return f'(t) per answer [S], for the f-divergence from the reference and the ratio t of
    policy to reference."""
    total = log_ratio(stats, batch, ld_alpha=ld_alpha)
    total = math.log(2) + logsigmoid(total) if power is None else powered(total, power)
    return _averaged(total, batch) if average else total


def logp(stats: Statistics, batch: PackedBatch, *, average: bool, alpha: float = 0.0) -> Tensor:
    """Return the log-prob per answer without a reference, [S]; see `simpo` for alpha."""
    total = summed(stats.logp, batch)
    return powered(_averaged(total, batch) if average else total, -alpha)


def likely_under_policy(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Return WPO's weight of an answer without gradient: exp(mean_t(log p_y - log sum_j p_j^2))."""
    gap = stats.logp.detach() - stats.sum_p_squared.log()
    return _averaged(batch.segments.sum(gap), batch).exp()


def log_odds(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Return each answer's log-odds log(p / (1 - p)), [S], for the geometric mean p of the answer's
    token probabilities."""
    mean = logp(stats, batch, average=True)
    return mean - log_1_minus_p(mean, LEAST)


def powered(x: Tensor, power: float) -> Tensor:
    """Return (e^(power x) - 1) / power, or x for power 0; the exponent is clamped at 80."""
    return x if power == 0 else (power * x).clamp(max=MAX_POWER).expm1() / power


def _averaged(total: Tensor, batch: PackedBatch) -> Tensor:
    return total / batch.segments.lengths.clamp_min(1).to(total.dtype)


# ---------------------------------------------------------------------- groups of answers


def split(values: Tensor, batch: PackedBatch, rejected: int = 1) -> tuple[Tensor, Tensor]:
    """Split [S] values into the values of the chosen and of the rejected answers of P groups: [P]
    and [P] for one rejected answer per group, [P, 1] and [P, n] for n rejected answers."""
    if len(values) % (1 + rejected) and batch.live is None:
        want = "an even number of them: 2k is chosen, 2k + 1 rejected"
        if rejected > 1:
            want = f"a multiple of {1 + rejected}: a chosen one, then {rejected} rejected"
        raise ValueError(f"segments: got {len(values)}, want {want}")
    if rejected == 1:
        return batch.segments.split_pairs(values)
    count = len(values) // (1 + rejected)  # static shapes may append segments without tokens
    groups = values[: count * (1 + rejected)].view(count, 1 + rejected)
    return groups[:, :1], groups[:, 1:]


def join(values: Tensor, batch: PackedBatch, rejected: int = 1) -> Tensor:
    """Expand values [P] of P groups (a chosen and its rejected answers) to the groups' S segments,
    [S]; 0 at segments that static shapes add."""
    joined = values.unsqueeze(1).expand(-1, 1 + rejected).flatten()
    return torch.cat([joined, joined.new_zeros(batch.segments.count - len(joined))])


def _of_rejected(values: Tensor, present: Tensor, rejected: int) -> Tensor:
    """Return the mean of `values` over each group's rejected answers, [P]. Answers without tokens
    are left out of the mean, unless all rejected answers of the group have no tokens."""
    if rejected == 1:
        return values
    counted = torch.where(present.any(1, keepdim=True), present, True)
    return torch.where(counted, values, 0).sum(1) / counted.sum(1)


def pair_loss(
    stats: Statistics, batch: PackedBatch, *, score: Score, how: Pairwise
) -> Tensor:  # [S]
    n = how.rejected
    c, r = split(how.beta * score(stats, batch), batch, n)
    present = split(batch.segments.lengths, batch, n)[1] > 0
    if how.loss_type == "softmax" and n > 1:
        counted = torch.where(present.any(1, keepdim=True), present, True)
        r = r.masked_fill(~counted, -math.inf).logsumexp(1, keepdim=True)
    value = how(c, r).expand_as(present)
    if how.weighted:
        of_chosen, of_rejected = split(likely_under_policy(stats, batch), batch, n)
        value = value * of_chosen * of_rejected
    return spread(_of_rejected(value, present, n), batch, n)


def spread(values: Tensor, batch: PackedBatch, rejected: int = 1) -> Tensor:
    """Expand the losses [P] of P groups to [S]: each nonempty segment of a group gets the group's
    loss, scaled so that empty segments do not change the mean over segments."""
    here = (batch.segments.lengths > 0).to(values.dtype)
    of_chosen, of_rejected = split(here, batch, rejected)
    if rejected > 1:
        of_chosen, of_rejected = of_chosen.squeeze(1), of_rejected.sum(1)
    share = values * (1 + rejected) / (of_chosen + of_rejected).clamp_min(1)
    return join(share, batch, rejected) * here


def observe(
    stats: Statistics, batch: PackedBatch, *, reward: Score, beta: float, rejected: int
) -> dict[str, Observed]:
    """Return the metrics: chosen and rejected rewards, their margin and the accuracy."""
    c, r = split(beta * reward(stats, batch), batch, rejected)
    present = split(batch.segments.lengths, batch, rejected)[1] > 0
    found = {
        "chosen_rewards": c.expand_as(r),
        "rejected_rewards": r,
        "margin": c - r,
        "accuracy": (c > r).to(c.dtype),
    }
    return {
        name: Observed(join(_of_rejected(x, present, rejected), batch, rejected), per="segment")
        for name, x in found.items()
    }


def preference(score: Score, how: Pairwise, reward: Score | None = None) -> Term:
    """Return a preference term, whose loss compares the `score` of chosen answers with the `score`
    of rejected answers. The term's metrics report the `reward` of each answer, or the `score` if
    `reward` is None."""
    one_of(LOSS_TYPES, loss_type=how.loss_type)
    positive(beta=how.beta)
    non_negative(gamma=how.gamma)
    _check_smoothing(how.loss_type, how.label_smoothing)
    counts(rejected=how.rejected)
    told = {"reward": reward or score, "beta": how.beta * how.factor, "rejected": how.rejected}
    return Term(
        name="",
        function=functools.partial(pair_loss, score=score, how=how),
        scope="segment",
        per="segment",
        reduction=sequence_mean,
        observe=functools.partial(observe, **told),
        segments_per_unit=1 + how.rejected,
    )


def _check_smoothing(loss_type: str, share: float) -> None:
    want, accept = "0 <= label_smoothing <= 0.5", lambda x: 0 <= x <= 0.5
    if loss_type == "robust":
        want, accept = "0 <= label_smoothing < 0.5", lambda x: 0 <= x < 0.5
    if loss_type == "exo_pair":  # The loss contains log(label_smoothing).
        want, accept = "0 < label_smoothing <= 0.5, e.g. 1e-3", lambda x: 0 < x <= 0.5
    if loss_type not in SMOOTHED:
        want, accept = f"0, as {loss_type!r} has no smoothing", lambda x: x == 0
    number(want, accept, label_smoothing=share)
