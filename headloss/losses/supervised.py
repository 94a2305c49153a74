"""Supervised terms: cross-entropy, its weighted variants and regularizers of the logits.

T scored tokens, V vocabulary, p = softmax(z), y the target. Every term of this module has token
scope and returns one loss per token, [T].
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..batch.reduction import token_mean
from ..statistics.metrics import Observed, Perplexity
from ..statistics.softmax import FLOOR, Slope, Statistics
from .arguments import non_negative, number, positive
from .factory import factory
from .term import Term, term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch


def _observe(stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
    return {"perplexity": Observed(-stats.logp, Perplexity), "top1": Observed(stats.top1)}


def _cross_entropy(stats: Statistics, batch: PackedBatch, *, label_smoothing: float) -> Tensor:
    if label_smoothing == 0:  # lse and mean_logit are computed only if a term reads them
        return -stats.logp
    uniform = stats.lse - stats.mean_logit
    return (label_smoothing - 1) * stats.logp + label_smoothing * uniform


def _smoothed_slopes(batch: PackedBatch, *, label_smoothing: float) -> tuple[Slope, ...]:
    target = Slope(label_smoothing - 1, sign=0)
    if label_smoothing == 0:
        return (target,)
    return (
        target,
        Slope(label_smoothing, sign=0, of="lse"),
        Slope(-label_smoothing, sign=0, of="mean_logit"),
    )


@factory
def cross_entropy(*, label_smoothing: float = 0.0) -> Term:
    """Negative log-likelihood of the target, with optional label smoothing.

        -(1 - label_smoothing) log p_y - label_smoothing mean_j log p_j

    Label smoothing: Szegedy et al. 2015, arXiv:1512.00567.

    Args:
        label_smoothing: share of the target's mass that is spread evenly over the vocabulary,
            in [0, 1].

    For class weights use `.weighted(field)`, with the weight of each target's class in the field.
    With `.weighted`, the weight of the target's class also multiplies the label-smoothing part of
    the loss, whereas torch.nn.functional.cross_entropy multiplies the log-prob of each class in the
    label-smoothing part by the weight of that class. The page docs/how-to.md shows headloss code
    with PyTorch's result for class weights and label smoothing.

    Inputs: none. Default reduction: token_mean. Metrics: perplexity, top1.
    """
    number("0 <= label_smoothing <= 1", lambda x: 0 <= x <= 1, label_smoothing=label_smoothing)
    return Term(
        name="",
        function=functools.partial(_cross_entropy, label_smoothing=label_smoothing),
        reduction=token_mean,
        observe=_observe,
        slopes=functools.partial(_smoothed_slopes, label_smoothing=label_smoothing),
    )


@factory
@term
def z_loss(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Square of the log-normalizer, which keeps logits from drifting.

        (log sum_j exp z_j)^2

    Chowdhery et al. 2022 (PaLM), arXiv:2204.02311. A z-loss is usually added to the cross-entropy
    with a factor of 1e-4.

    Inputs: none. Default reduction: token_mean.
    """
    return stats.lse.square()


def _entropy_slopes(batch: PackedBatch) -> tuple[Slope, ...]:
    return (Slope(1.0, sign=0, of="entropy"),)


@factory
@term(slopes=_entropy_slopes)
def entropy(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Entropy of the prediction over the whole vocabulary; subtract this term for an entropy bonus.

        -sum_j p_j log p_j

    Mnih et al. 2016, arXiv:1602.01783, add the entropy as a bonus.

    Inputs: none. Default reduction: token_mean.
    """
    return stats.entropy


@factory
@term(observe=_observe)
def unlikelihood(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Unlikelihood: lower the probability of targets that the model should not predict.

        -log(1 - p_y)

    Welleck et al. 2019, arXiv:1908.04319. 1 - p_y is raised to at least the dtype's epsilon, so
    that the loss -log(1 - p_y) is finite at p_y = 1.

    Inputs: none. Default reduction: token_mean. Metrics: perplexity, top1.
    """
    return -log_1_minus_p(stats.logp)


def log_1_minus_p(logp: Tensor, least: float | None = None) -> Tensor:
    """Return log(1 - p) from log p; 1 - p is raised to at least `least` or the dtype's epsilon."""
    logp = logp.clamp(max=-(least or torch.finfo(logp.dtype).eps))
    # log(1 - exp x) is computed as log(-expm1(x)) for x > -log 2, else as log1p(-exp(x)).
    # torch.where differentiates both branches, so that the unused branch, too, needs a finite
    # gradient.
    likely = logp > -math.log(2)
    near = torch.where(likely, logp, -1.0).expm1().neg().log()
    far = torch.where(likely, -1.0, logp).exp().neg().log1p()
    return torch.where(likely, near, far)


# ---------------------------------------------------------------------- weighted cross-entropy


def _dft_slopes(batch: PackedBatch) -> tuple[Slope, ...]:
    return (Slope(-1.0),)


@factory
@term(observe=_observe, slopes=_dft_slopes)
def dft(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Dynamic fine-tuning: log-likelihood weighted by the target's probability, without gradient.

        -sg(p_y) log p_y

    Wu et al. 2025, arXiv:2508.05629. Anchored fine-tuning (ASFT, Zhu et al. 2025,
    arXiv:2509.23753) is hl.dft() +
    0.1 * hl.distillation() with the base model as the teacher.

    Inputs: none. Default reduction: token_mean. Metrics: perplexity, top1.
    """
    return -stats.logp.detach().exp() * stats.logp


@factory
@term(observe=_observe)
def chord_phi(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Fine-tuning on another policy's answers, with the largest weights for tokens of probability
    1/2.

        -sg(p_y (1 - p_y)) log p_y

    Zhang et al. 2025 (CHORD), arXiv:2508.11408. The weight p_y (1 - p_y) of a token's loss is 0
    where the target's probability p_y is 0 or 1. Combine `hl.chord_phi` with a policy term by two
    boolean batch fields, such as "rl" and "sft", that mark the tokens of each loss: (1 - mu) *
    hl.grpo().where("rl") + mu * hl.chord_phi().where("sft"), where the caller chooses mu, the
    weight of the supervised loss, at each step.

    Inputs: none. Default reduction: token_mean. Metrics: perplexity, top1.
    """
    logp = stats.logp.clamp_min(FLOOR)  # p log p at log p = -inf would be 0 * -inf = NaN
    undecided = -logp.exp() * logp.expm1()
    return -undecided.detach() * logp


def _focal(stats: Statistics, batch: PackedBatch, *, gamma: float) -> Tensor:
    return -(gamma * log_1_minus_p(stats.logp)).exp() * stats.logp


@factory
def focal(*, gamma: float = 2.0) -> Term:
    """Focal loss: lower the weight of targets that are likely already.

        -(1 - p_y)^gamma log p_y

    Lin et al. 2017, arXiv:1708.02002. The factor 1 - p_y, for the target's probability p_y, is
    clamped to at least the dtype's epsilon.

    Args:
        gamma: power of 1 - p_y, >= 0; with 0 the loss is cross_entropy.

    Inputs: none. Default reduction: token_mean. Metrics: perplexity, top1.
    """
    non_negative(gamma=gamma)
    function = functools.partial(_focal, gamma=gamma)
    return Term(name="", function=function, reduction=token_mean, observe=_observe)


def _entropy_adaptive(
    stats: Statistics, batch: PackedBatch, *, alpha: float, scale: float
) -> Tensor:
    return -(stats.entropy.detach() / scale).pow(alpha) * stats.logp


@factory
def eaft(*, alpha: float = 1.0, scale: float = 3.0) -> Term:
    """Entropy-adaptive fine-tuning: log-likelihood weighted by the entropy of the prediction.

        -sg(H / scale)^alpha log p_y, H = -sum_j p_j log p_j

    Diao et al. 2026, arXiv:2601.02151, with the entropy of the whole vocabulary in place of the
    entropy of the 20 likeliest tokens (at most log 20 = 3.0). To weigh by the entropy of the 20
    likeliest tokens, as Diao et al. do, compute the entropy of the 20 tokens from the log-probs of
    hl.head_topk, pass the weights as the batch field uncertainty, and use
    hl.cross_entropy().weighted("uncertainty").

    Args:
        alpha: power of the entropy, > 0.
        scale: entropy in nats at which the weight is 1, > 0.

    Inputs: none. Default reduction: token_mean. Metrics: perplexity, top1.
    """
    positive(alpha=alpha, scale=scale)
    function = functools.partial(_entropy_adaptive, alpha=alpha, scale=scale)
    return Term(name="", function=function, reduction=token_mean, observe=_observe)


# ---------------------------------------------------------------------- several targets


@factory
@term
def soft_cross_entropy(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Cross-entropy against probabilities of a few targets.

        -sum_k q_k log p_k

    For target probabilities q over the whole vocabulary use hl.distillation with `teacher_logits`,
    whose loss is the cross-entropy minus the entropy of q, with the gradient of the cross-entropy.

    Szegedy et al. 2015, arXiv:1512.00567.

    Inputs: candidate_ids [.., K]; candidate_probs [.., K], the probability q_k of each candidate k.
    Unused entries of candidate_ids count as probability 0.
    Default reduction: token_mean.
    """
    got, want = batch.candidate_probs.shape[1:], stats.candidate_logps.shape[1:]
    if got != want:
        raise ValueError(f"candidate_probs: got {tuple(got)} at each token, want {tuple(want)}")
    probs = batch.candidate_probs.to(stats.candidate_logps.dtype)
    return -torch.where(batch.candidate_ids < 0, 0, probs * stats.candidate_logps).sum(1)


@factory
@term
def any_of(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Maximum marginal likelihood of a set of targets, any of which is right.

        -log sum_k p_k

    Guu et al. 2017, arXiv:1704.07926. The loss is 0 at a token without candidates.

    Inputs: candidate_ids [.., K]. Default reduction: token_mean.
    """
    empty = batch.candidate_ids < 0
    likelihood = stats.candidate_logps.masked_fill(empty, FLOOR).logsumexp(1)
    return -torch.where(empty.all(1), 0, likelihood)
