"""Policy loss `hl.real`, which compares all answers to one prompt.

T scored tokens, S segments, d_t = logp_t - old_t; segments with equal `prompts` form a group.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..batch.packing import answers
from ..batch.reduction import sequence_mean
from ..batch.segments import Segments
from ..statistics.metrics import Observed
from ..statistics.softmax import Statistics
from .arguments import positive
from .factory import factory
from .importance import FAR, advantages_at, log_ratio, observe
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch


def _scores(stats: Statistics, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return each segment's score (mean log-ratio to the old policy), and whether the segment's
    advantage is above 0, [S] each."""
    d = log_ratio(stats, batch).clamp(-FAR, FAR)
    return batch.segments.mean(d), advantages_at(batch, "sequence") > 0


def _mixed(right: Tensor, group: Segments) -> Tensor:
    """Return [S] bool: segments of a group with both right and wrong answers."""
    share = group.expand(group.mean(right.double()))
    return (share > 0) & (share < 1)


def _anchored(x: Tensor, among: Tensor, group: Segments) -> Tensor:
    """Return log(1 + sum exp(x)), [S], where the sum runs over those answers to a segment's prompt
    for which `among` is True."""
    x = x.masked_fill(~among, -math.inf)
    peak = x.new_zeros(group.count).scatter_reduce(0, group.ids, x.detach(), "amax")
    total = (-peak).exp() + group.sum((x - group.expand(peak)).exp())
    return group.expand(peak + total.log())


def _real(stats: Statistics, batch: PackedBatch, *, tau: float) -> Tensor:
    (scores, right), group = _scores(stats, batch), answers(batch)
    wrong = _anchored(scores / tau, ~right, group)
    value = wrong + _anchored(-scores / tau, right, group)
    return torch.where(_mixed(right, group), value, 0)


def _observe(stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
    (scores, right), group = _scores(stats, batch), answers(batch)
    # The metric "mixed_groups" (groups with right and wrong answers) counts each group once, at the
    # group's first nonempty segment.
    present, place = batch.segments.lengths > 0, torch.arange(len(right), device=right.device)
    places = torch.where(present, place, len(right))
    first = places.new_full(places.shape, len(right)).scatter_reduce(0, group.ids, places, "amin")
    mixed = _mixed(right, group).to(scores.dtype)
    return observe(stats, batch, level="sequence") | {
        "positive_score": Observed(scores, per="segment", where=right),
        "negative_score": Observed(scores, per="segment", where=~right),
        "mixed_groups": Observed(mixed, per="segment", where=first[group.ids] == place),
    }


@factory
def real(*, tau: float = 0.5) -> Term:
    """Rewards as labels: classify a prompt's answers as good or bad by the mean log-ratio.

        log(1 + sum_{A_i <= 0} exp(s_i / tau)) + log(1 + sum_{A_i > 0} exp(-s_i / tau)), s_i = mean_t (logp_t - old_t) of answer i; the sums run over the answers to one prompt; 0 if all of them have A_i > 0 or all A_i <= 0

    Zhai et al. 2026, arXiv:2602.05630. The answers to one prompt form a group, and each answer (a
    segment) of the group gets the loss of the whole group. For groups of equal size the mean over
    segments is the mean over prompts, including prompts of loss 0; for groups of unequal size use
    `.over("prompt_mean")`. An answer's score (its mean log-ratio) is not clamped, and the loss's
    gradient with respect to the score is at most 1 / tau. An answer without scored tokens counts in
    its prompt's group with score 0 and advantage 0, and has no weight in the mean over segments.

    Args:
        tau: temperature of the scores, > 0.

    Inputs: advantages (an answer is good if the mean of its tokens' advantages is above 0);
    old_logps; prompts [S], an integer id of each segment's prompt. All segments of a prompt must be
    in one call, in any order. Default reduction: sequence_mean. Metrics: positive_score and
    negative_score, the scores s_i of the answers with A_i > 0 and with A_i <= 0; mixed_groups, the
    fraction of prompts with both good and bad answers.
    Also called: ms-swift real.
    """  # noqa: E501 (an equation is one line)
    positive(tau=tau)
    return Term(
        name="",
        function=functools.partial(_real, tau=tau),
        scope="batch",
        per="segment",
        reduction=sequence_mean,
        observe=_observe,
    )
