"""Preference terms that need no pairs of answers: each answer has its own loss, or the scores of
two sets of answers are compared.

S segments, P = S / 2 pairs. Every term of this module returns one loss per segment, [S].
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..batch.reduction import sequence_mean
from ..statistics.metrics import Observed
from ..statistics.softmax import Statistics
from .arguments import flags, non_negative, one_of, positive
from .factory import factory
from .preference_pairs import Pairwise, log_ratio, preference, split, spread, summed
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

UNPAIRED = ("kto", "apo_zero_unpaired")


def _desirable(batch: PackedBatch) -> Tensor:  # [S] bool
    return batch.segments.mean(batch.desirable.float()) > 0.5


def _unpaired(
    stats: Statistics,
    batch: PackedBatch,
    *,
    beta: float,
    weights: tuple[float, float],  # weight of desirable answers, weight of undesirable answers
    shifted: bool,
) -> Tensor:
    gain = log_ratio(stats, batch)
    if shifted:
        gain = gain - batch.segments.mean(batch.reference_kl).clamp_min(0)
    good = _desirable(batch)
    value = torch.sigmoid(beta * torch.where(good, -gain, gain))
    return torch.where(good, weights[0] * value, weights[1] * value)


def _observe_unpaired(stats: Statistics, batch: PackedBatch, *, beta: float) -> dict[str, Observed]:
    rewards, good = beta * log_ratio(stats, batch), _desirable(batch)
    return {
        "chosen_rewards": Observed(rewards, per="segment", where=good),
        "rejected_rewards": Observed(rewards, per="segment", where=~good),
    }


@factory
def kto(
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    loss_type: str = "kto",
) -> Term:
    """Kahneman-Tversky optimization: answers labelled desirable or undesirable, without pairs.

        w sigmoid(-beta (h - z)) for a desirable answer, w sigmoid(beta (h - z)) for an undesirable answer; weight w = desirable_weight or undesirable_weight, h = sum(logp - ref) over the answer, z = max(0, reference_kl)

    Ethayarajh et al. 2024, arXiv:2402.01306. The option loss_type="apo_zero_unpaired" replaces the
    reference point z = max(0, reference_kl), which is subtracted from an answer's summed log-ratio,
    by z = 0 (D'Oosterlinck et al. 2024, arXiv:2408.06266). The reference point `reference_kl`, one
    number for the batch, is the mean of sum(logp - ref) over answers matched with wrong prompts,
    without gradient. hl.head_stats computes the log-probs of such mismatched answers.

    Args:
        beta: strength of the pull to the reference, > 0.
        desirable_weight, undesirable_weight: factors of the losses of desirable and of undesirable
            answers, each >= 0.
        loss_type: "kto" or "apo_zero_unpaired".

    Also called: TRL kto.

    Inputs: ref_logps; desirable [S], boolean; reference_kl [S], unless loss_type is
    "apo_zero_unpaired". Default reduction: sequence_mean. Metrics: chosen_rewards and
    rejected_rewards, beta sum(logp - ref) of the desirable and of the undesirable answers.
    """  # noqa: E501 (an equation is one line)
    positive(beta=beta)
    non_negative(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    one_of(UNPAIRED, loss_type=loss_type)
    weights = (desirable_weight, undesirable_weight)
    shifted = loss_type == "kto"
    return Term(
        name="",
        function=functools.partial(_unpaired, beta=beta, weights=weights, shifted=shifted),
        scope="segment",
        per="segment",
        reduction=sequence_mean,
        observe=functools.partial(_observe_unpaired, beta=beta),
    )


def _regressed(stats: Statistics, batch: PackedBatch, *, beta: float) -> Tensor:  # [S]
    return (beta * log_ratio(stats, batch) - batch.segments.mean(batch.advantages)).square()


def _observe_regressed(
    stats: Statistics, batch: PackedBatch, *, beta: float
) -> dict[str, Observed]:
    return {"rewards": Observed(beta * log_ratio(stats, batch), per="segment")}


@factory
def a2po(*, beta: float = 1e-3) -> Term:
    """Optimal advantage regression (A*-PO): regress the implicit reward on the advantage.

        (beta sum(logp - ref) - A)^2, advantage A = the reward minus the prompt's optimal value

    Brantley et al. 2025, arXiv:2505.20686. The optimal value of a prompt is beta_1 log mean
    exp(reward / beta_1) over answers sampled from the reference policy, where the temperature
    beta_1 is the caller's choice.

    Args:
        beta: strength of the pull to the reference, > 0.

    Also called: TRL A2POTrainer.

    Inputs: ref_logps; advantages (a sequence's advantage is the mean over its tokens).
    Default reduction: sequence_mean. Metrics: rewards: the implicit reward.
    """
    positive(beta=beta)
    return Term(
        name="",
        function=functools.partial(_regressed, beta=beta),
        scope="segment",
        per="segment",
        reduction=sequence_mean,
        observe=functools.partial(_observe_regressed, beta=beta),
    )


def _transported(stats: Statistics, batch: PackedBatch, *, how: Pairwise, paired: bool) -> Tensor:
    policy = split(summed(stats.logp, batch), batch)
    reference = split(summed(batch.ref_logps, batch), batch)
    if paired:
        upper, lower = policy[0] - policy[1], reference[0] - reference[1]
    else:
        upper, lower = policy[0] - reference[0], policy[1] - reference[1]
    lengths = batch.segments.lengths
    if batch.live is not None:
        lengths = batch.segments.sum(batch.live.to(upper.dtype))
    of_chosen, of_rejected = split(lengths, batch)
    there = of_chosen + of_rejected > 0
    # A pair of answers without a scored token must not count: set the pair's scores in `upper` and
    # in `lower` to the largest float, so that the pair sorts last in both tensors.
    last = torch.finfo(upper.dtype).max
    upper, lower = (x.masked_fill(~there, last).sort().values for x in (upper, lower))
    # a NaN score stays in the mean, so that the loss becomes NaN
    counted = (upper != last) | (lower != last)
    x = how.beta * (upper - lower)
    values = torch.where(counted, how(x, torch.zeros_like(x)), 0)
    return spread((values.sum() / there.sum().clamp_min(1)).expand_as(x), batch)


@factory
def aot(*, beta: float = 0.1, label_smoothing: float = 0.0, paired: bool = True) -> Term:
    """Alignment via optimal transport: compare the sorted scores of two sets, rank by rank.

        mean_i -log sigmoid(beta (u_(i) - v_(i))), u_(i) and v_(i) the i-th smallest of two sets u and v: u = logp_chosen - logp_rejected of the policy, v of the reference; unpaired: u = sum(logp - ref) of chosen answers, v of rejected answers

    Melnyk et al. 2024, arXiv:2406.05882. The scores of all pairs in a call are sorted together, and
    every pair gets the same loss, the mean over the call. A pair in which neither answer has a
    scored token is left out of the sorted scores and of the mean loss.

    Args:
        beta: factor, > 0, of the difference between the i-th smallest scores of the two compared
            sets.
        label_smoothing: as in `dpo`.
        paired: compare the margins of the policy's pairs with the reference's margins; False:
            compare chosen answers with rejected answers.

    Also called: TRL aot.

    Inputs: ref_logps; segments in pairs. Default reduction: sequence_mean, the mean over pairs.
    Metrics: chosen_rewards, rejected_rewards, margin, accuracy.
    """  # noqa: E501 (an equation is one line)
    flags(paired=paired)
    how = Pairwise(beta=beta, label_smoothing=label_smoothing)
    term = preference(log_ratio, how)
    function = functools.partial(_transported, how=how, paired=paired)
    return replace(term, function=function, scope="batch")
