"""Losses of draft models for speculative decoding, from the verifier's acceptance probability.

T scored tokens, S segments; q the verifier's distribution, p the draft model's distribution,
a = sum min(p, q) the acceptance probability.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..batch.reduction import token_mean
from ..statistics.metrics import Observed
from .arguments import naming, non_negative, number, one_of, positive, with_floats
from .factory import factory
from .modifiers import Modifier
from .scope import Scope
from .teacher import Teacher
from .term import Term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch
    from ..head.head import Head

Level = Literal["token", "step"]
Weights = Literal["decay", "d_pace"]


def _observe(stats: Any, batch: PackedBatch) -> dict[str, Observed]:
    return {"acceptance": Observed(stats.acceptance), "top1": Observed(stats.top1)}


def _of_verifier(
    function: Any, head: Head | None, temperature: float, observe: Any = _observe, **more: Any
) -> Term:
    """Return a term that compares draft model and verifier; the term's factory sets the name."""
    teacher = Teacher(head=head, temperature=temperature)
    how = {"reduction": token_mean, "observe": observe, "teacher": teacher}
    return Term(name="", function=function, **how, **more)


def _rejected(stats: Any, batch: PackedBatch) -> Tensor:
    return -stats.log_acceptance  # type: ignore[no-any-return]


@factory
def nla(*, teacher_head: Head | None = None, temperature: float = 1.0) -> Term:
    """Negative log of the acceptance probability of speculative sampling.

        -log sum_j min(p_j, q_j)

    Samarin et al. 2026 (LK losses), arXiv:2602.23881. The negative log acceptance is computed as a
    log-sum-exp of min(log p, log q), without a clamp. The loss's gradient with respect to the
    logits stays bounded, however small the acceptance probability is.

    Args:
        teacher_head: the verifier's head, for `teacher_hidden`; for a draft model of a reduced
            vocabulary, the verifier's rows in the order of the draft's vocabulary.
        temperature: temperature of draft and verifier, in place of the heads' temperatures.

    Inputs: the inputs of `distillation`. Default reduction: token_mean. Metrics: acceptance (the
    mean acceptance probability), top1 (the share of targets that are the draft's likeliest token;
    for targets that are the verifier's likeliest tokens, the agreement of draft and verifier).

    Also called: speculators nla.
    """
    return _of_verifier(_rejected, teacher_head, temperature)


@factory
def lk_alpha(*, teacher_head: Head | None = None, temperature: float = 1.0) -> Term:
    """Negative log of the acceptance probability: the loss `nla` under its name in SpecForge.

        -log sum_j min(p_j, q_j)

    Samarin et al. 2026 (LK losses), arXiv:2602.23881. `lk_alpha` and `nla` are the same loss. A
    token whose draft and verifier distributions share no mass has a finite loss of 10000, where
    SpecForge and NeMo Automodel count 0.

    Args:
        teacher_head, temperature: the verifier's head (for `teacher_hidden`), and the temperature
            of draft and verifier.

    Inputs: the inputs of `distillation`. Default reduction: token_mean. Metrics: acceptance, top1.

    Also called: SpecForge LK alpha, Automodel LK alpha.
    """
    return _of_verifier(_rejected, teacher_head, temperature)


def _hybrid(stats: Any, batch: PackedBatch, *, eta: float, per: str) -> Tensor:
    acceptance = stats.acceptance.detach()
    if per == "step":
        acceptance = batch.segments.expand(batch.segments.mean(acceptance))
    share = (-eta * acceptance).exp()
    forward, distance = stats.divergence("forward_kl"), stats.divergence("total_variation")
    return share * forward + (1 - share) * distance  # type: ignore[no-any-return]


@factory
def lk_hybrid(
    *,
    eta: float = 3.0,
    per: Level = "token",
    teacher_head: Head | None = None,
    temperature: float = 1.0,
) -> Term:
    """Mix of a KL divergence and a total variation, weighted by each token's acceptance probability.

        l KL(q || p) + (1 - l) sum |p - q| / 2, weight l = sg exp(-eta a), acceptance probability a = sum_j min(p_j, q_j)

    Samarin et al. 2026 (LK losses), arXiv:2602.23881.

    Args:
        eta: rate, >= 0, at which the KL divergence's weight l = exp(-eta a) falls as the acceptance
            probability a grows.
        per: "token": each token's weight uses the token's own acceptance probability. "step": the
            weight uses the mean acceptance probability over the scored tokens of a segment.
            With per="step" the segments of the batch are the unrolled draft steps, over all ranks
            of a group: `Segments.from_ids(step, count, group=...)`.
        teacher_head, temperature: the verifier's head (for `teacher_hidden`), and the temperature
            of draft and verifier.

    Inputs: the inputs of `distillation`. Default reduction: token_mean. Metrics: acceptance, top1.

    Also called: speculators lk_hybrid, SpecForge LK lambda, Automodel LK lambda.
    """  # noqa: E501 (an equation is one line)
    non_negative(eta=eta)
    one_of(("token", "step"), per=per)
    scope: Scope = "token" if per == "token" else "segment"
    function = partial(_hybrid, eta=eta, per=per)
    return _of_verifier(function, teacher_head, temperature, scope=scope)


# ---------------------------------------------------------------------- blocks


def _up_to(values: Tensor, batch: PackedBatch) -> Tensor:
    """Return, for each token, the sum of `values` over its segment up to and including the token,
    [T] float64."""
    segments = batch.segments
    if segments.group is not None:
        raise ValueError("segments: got those of a group of ranks, want each block on one rank")
    running = values.double().cumsum(0)
    first = (segments.lengths.cumsum(0) - segments.lengths)[segments.ids]
    return running - (running - values)[first]


def _decay(stats: Any, batch: PackedBatch, *, gamma: float) -> Tensor:
    return (batch.slots.double() / -gamma).exp().to(stats.logp.dtype)


def _d_pace(stats: Any, batch: PackedBatch, *, floor: float) -> Tensor:
    confidence = stats.logp.detach().exp() * (1 - floor) + floor
    reach = _up_to(confidence.double().log(), batch).exp()
    total = batch.segments.expand(batch.segments.sum(reach))
    return (total - _up_to(reach, batch) + reach).to(stats.logp.dtype)


@with_floats
def draft_weights(
    weights: Weights = "decay", *, gamma: float = 4.0, floor: float = 0.5
) -> Modifier:
    """Modifier that weighs drafted tokens: `hl.cross_entropy().modified(hl.draft_weights())`.

        exp(-k / gamma) for weights="decay", sum_{i >= k} prod_{j <= i} ((1 - floor) p_j + floor) for weights="d_pace"; options gamma and floor; k the token's place in its block of drafted tokens, p_j the draft model's probability of the target at place j

    DFlash and DSpark weigh a drafted token by its place k in the block. D-PACE, arXiv:2605.18810,
    weighs a token by the expected number of accepted tokens from that token on, computed from
    log-probs without a gradient. Each block of drafted tokens is a segment, with its tokens in
    order; unscored tokens of a block count as accepted. `hl.draft_weights` leaves the denominator
    of the reduction unchanged.

    Args:
        weights: "decay" or "d_pace".
        gamma: decay length in tokens, > 0; 7, 5, 4 for blocks of 16, 10, 8 in DFlash's paper.
        floor: lower bound of a token's confidence in D-PACE, > 0 and at most 1.

    With weights="decay", the modifier reads the batch field slots [..]: the index k of each token
    among the drafted tokens of its block, counted from 0. The token that precedes the drafted
    tokens (the block's anchor) is not scored.
    """  # noqa: E501 (an equation is one line)
    with naming("draft_weights"):
        one_of(("decay", "d_pace"), weights=weights)
        positive(gamma=gamma)
        number("above 0, at most 1", lambda x: 0 < x <= 1, floor=floor)
    if weights == "decay":
        options = (("weights", weights), ("gamma", gamma))
        factor = partial(_decay, gamma=gamma)
        return Modifier(name="draft_weights", factor=factor, scope="token", options=options)
    options = (("weights", weights), ("floor", floor))
    factor = partial(_d_pace, floor=floor)
    return Modifier(name="draft_weights", factor=factor, scope="segment", options=options)


def _dspark(stats: Any, batch: PackedBatch, *, ce: float, tv: float, gamma: float | None) -> Tensor:
    loss = tv * stats.divergence("total_variation") - ce * stats.logp
    return loss if gamma is None else loss * _decay(stats, batch, gamma=gamma)


def _observe_blocks(stats: Any, batch: PackedBatch) -> dict[str, Observed]:
    """Return the metrics of each block: expected numbers of accepted tokens, including the bonus
    token that the verifier always adds."""
    if "slots" not in batch or batch.segments.group is not None:
        return _observe(stats, batch)
    order = batch.slots.argsort(stable=True)
    order = order[batch.segments.ids[order].argsort(stable=True)]
    log_a, hits, slots = (x[order] for x in (stats.log_acceptance, stats.top1, batch.slots))
    in_order = slots == _up_to(torch.ones_like(log_a), batch) - 1
    reach = torch.where(in_order, _up_to(log_a, batch).exp(), 0)
    run = (in_order & (_up_to(1 - hits, batch) == 0)).double()
    lengths = {"accept_len": 1 + batch.segments.sum(reach), "eal": 1 + batch.segments.sum(run)}
    return _observe(stats, batch) | {n: Observed(x, per="segment") for n, x in lengths.items()}


@factory
def dspark(
    *,
    ce: float = 0.1,
    tv: float = 0.9,
    gamma: float | None = 4.0,
    teacher_head: Head | None = None,
    temperature: float = 1.0,
) -> Term:
    """Cross-entropy and total variation of drafted tokens, weighted by exp(-k / gamma) at place k.

        (ce (-log p_y) + tv sum |p - q| / 2) exp(-k / gamma); options ce, tv and gamma; p and q the distributions of draft and verifier, y the target, k the token's place in its block of drafted tokens

    DSpark (2026) is the loss by which speculators, SpecForge and NeMo Automodel train draft models;
    the option tv of SpecForge and NeMo Automodel weighs sum |p - q|, twice the total variation.
    DSpark's confidence head needs a separate loss on `out.per_token["dspark/acceptance"]`.

    Args:
        ce, tv: weights of cross-entropy and total variation, each >= 0.
        gamma: decay length in tokens, > 0; None: all tokens have the weight 1.
        teacher_head, temperature: the verifier's head (for `teacher_hidden`), and the temperature
            of draft and verifier.

    Inputs: the inputs of `distillation`; slots [..], the place k of a token among its block's
    drafted tokens, from 0. With gamma=None, only the metrics of the accepted length (accept_len and
    eal) read the batch field `slots`. Each block of drafted tokens is a segment. Default reduction:
    token_mean. Metrics: acceptance, top1; per block accept_len (1 + sum_k prod_{i <= k} a_i, a_i
    the acceptance probability at place i) and eal (1 + the number of leading targets that are the
    draft's likeliest token). The metrics accept_len and eal count no token after a block's first
    unscored token, and are not reported for segments that run across ranks.

    Also called: speculators DSpark.
    """  # noqa: E501 (an equation is one line)
    non_negative(ce=ce, tv=tv)
    if gamma is not None:
        positive(gamma=gamma)
    function = partial(_dspark, ce=ce, tv=tv, gamma=gamma)
    return _of_verifier(function, teacher_head, temperature, _observe_blocks)
