"""Preference terms on pairs: segment 2k is the chosen answer, 2k + 1 the rejected one.

S segments, P = S / 2 pairs. Every term is [S], segment scope. A pair's loss stands at both of its
segments, and at one of them twice where the other is empty, so that the mean over segments is the
mean over pairs; a pair without a scored token has loss 0 and still counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import logsigmoid

from ..batch.reduction import sequence_mean
from ..objective.metrics import Observed
from ..objective.statistics import Statistics
from .factory import factory, non_negative, number, positive
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

Score = Callable[[Statistics, "PackedBatch"], Tensor]  # [S], by how much an answer is preferred


def _split(values: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:  # [P], [P]
    """The values of the chosen and of the rejected segments."""
    if len(values) % 2 and batch.live is None:
        raise ValueError(
            f"segments: got {len(values)}, want an even number of them: 2k is chosen, "
            "2k + 1 rejected"
        )
    return batch.segments.split_pairs(values)


def _pair_loss(
    stats: Statistics,
    batch: PackedBatch,
    *,
    score: Score,
    loss: Callable[[Tensor], Tensor],  # of the margin, [P] to [P]
    lead: float,
    label_smoothing: float,
) -> Tensor:  # [S]
    chosen, rejected = _split(score(stats, batch), batch)
    margin = chosen - rejected - lead
    value = loss(margin)
    if label_smoothing > 0:
        value = (1 - label_smoothing) * value + label_smoothing * loss(-margin)
    here = (batch.segments.lengths > 0).to(value.dtype)
    of_chosen, of_rejected = _split(here, batch)
    share = value * 2 / (of_chosen + of_rejected).clamp_min(1)
    return batch.segments.join_pairs(share, share) * here


def _observe(
    stats: Statistics, batch: PackedBatch, *, score: Score, beta: float
) -> dict[str, Observed]:
    chosen, rejected = (beta * r for r in _split(score(stats, batch), batch))
    found = {
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
    }
    join = batch.segments.join_pairs
    return {name: Observed(join(value, value), per="segment") for name, value in found.items()}


def _preference(
    score: Score,
    loss: Callable[[Tensor], Tensor],
    beta: float,
    label_smoothing: float,
    gamma: float = 0.0,
) -> Term:
    positive(beta=beta)
    non_negative(gamma=gamma)
    number("0 <= label_smoothing <= 0.5", lambda x: 0 <= x <= 0.5, label_smoothing=label_smoothing)
    return Term(
        name="",
        function=functools.partial(
            _pair_loss, score=score, loss=loss, lead=gamma / beta, label_smoothing=label_smoothing
        ),
        scope="segment",
        per="segment",
        reduction=sequence_mean,
        observe=functools.partial(_observe, score=score, beta=beta),
        segments_per_unit=2,
    )


def _log_loss(h: Tensor, beta: float) -> Tensor:
    return -logsigmoid(beta * h)


def _squared_loss(h: Tensor, beta: float) -> Tensor:
    return (h - 1 / (2 * beta)).square()


def _log_ratio_sum(stats: Statistics, batch: PackedBatch) -> Tensor:
    assert stats.logp is not None
    return batch.segments.sum(stats.logp - batch.ref_logps)


def _log_ratio_mean(stats: Statistics, batch: PackedBatch) -> Tensor:
    assert stats.logp is not None
    return batch.segments.mean(stats.logp - batch.ref_logps)


def _logp_mean(stats: Statistics, batch: PackedBatch) -> Tensor:
    assert stats.logp is not None
    return batch.segments.mean(stats.logp)


@factory
def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Term:
    """Direct preference optimization, on log-prob sums.

        -log sigmoid(beta h), h = sum_chosen(logp - ref) - sum_rejected(logp - ref)

    Rafailov et al. 2023, arXiv:2305.18290.

    Args:
        beta: strength of the pull to the reference, > 0.
        label_smoothing: share of pairs taken to be labelled the wrong way round, in [0, 0.5]; the
            loss is (1 - label_smoothing) f(h) + label_smoothing f(-h).

    Inputs: ref_logps; segments in pairs. Default reduction: sequence_mean, the mean over pairs.
    Metrics: chosen_rewards, rejected_rewards, margin, accuracy.
    """
    return _preference(
        _log_ratio_sum, functools.partial(_log_loss, beta=beta), beta, label_smoothing
    )


@factory
def ipo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Term:
    """Identity preference optimization, on log-prob means.

        (h - 1 / (2 beta))^2, h = mean_chosen(logp - ref) - mean_rejected(logp - ref)

    Azar et al. 2023, arXiv:2310.12036 (whose tau is beta); means in place of sums, as its authors
    run it.

    Args:
        beta: strength of the pull to the reference, > 0.
        label_smoothing: as `dpo`.

    Inputs: ref_logps; segments in pairs. Default reduction: sequence_mean, the mean over pairs.
    Metrics: chosen_rewards, rejected_rewards, margin, accuracy.
    """
    return _preference(
        _log_ratio_mean, functools.partial(_squared_loss, beta=beta), beta, label_smoothing
    )


@factory
def simpo(*, beta: float = 0.1, gamma: float = 0.5, label_smoothing: float = 0.0) -> Term:
    """Simple preference optimization: log-prob means with a target margin, without a reference.

        -log sigmoid(beta h - gamma), h = mean_chosen(logp) - mean_rejected(logp)

    Meng et al. 2024, arXiv:2405.14734.

    Args:
        beta: scale of the reward, > 0.
        gamma: the margin that the chosen answer's reward should lead by, >= 0.
        label_smoothing: as `dpo`, the sign of beta h - gamma turned.

    Inputs: segments in pairs. Default reduction: sequence_mean, the mean over pairs. Metrics:
    chosen_rewards, rejected_rewards, margin, accuracy.
    """
    return _preference(
        _logp_mean, functools.partial(_log_loss, beta=beta), beta, label_smoothing, gamma=gamma
    )
