"""Losses of draft models for speculative decoding: by the chance that the verifier accepts.

T scored tokens, S segments; q the verifier's distribution, p the draft's, a = sum min(p, q).
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
from .teacher import teacher
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
    """A term of a verifier, whose factory gives it its name."""
    how = {"reduction": token_mean, "observe": observe, "teacher": teacher(head, temperature)}
    return Term(name="", function=function, **how, **more)


def _rejected(stats: Any, batch: PackedBatch) -> Tensor:
    return -stats.log_acceptance  # type: ignore[no-any-return]


@factory
def nla(*, teacher_head: Head | None = None, temperature: float = 1.0) -> Term:
    """Negative log of the acceptance of speculative sampling.

        -log sum_j min(p_j, q_j)

    Samarin et al. 2026 (LK losses), arXiv:2602.23881. A log-sum-exp of min(log p, log q): there is
    no clamp, and the gradient stays bounded however small the acceptance is.

    Args:
        teacher_head: the verifier's head, for `teacher_hidden`; of a reduced vocabulary its rows
            in the draft's order.
        temperature: of both sides, in place of the heads' own.

    Inputs: as of distillation. Default reduction: token_mean. Metrics: acceptance (the mean of a),
    top1 (the share of targets that the draft finds the likeliest: of targets that are the
    verifier's own, their agreement).

    Also called: speculators nla.
    """
    return _of_verifier(_rejected, teacher_head, temperature)


@factory
def lk_alpha(*, teacher_head: Head | None = None, temperature: float = 1.0) -> Term:
    """Negative log of the acceptance, by the name of SpecForge and NeMo Automodel.

        -log sum_j min(p_j, q_j)

    Samarin et al. 2026 (LK losses), arXiv:2602.23881; see `nla`. A token whose two distributions
    share no mass has a finite loss of 10000, where these programs count 0.

    Args:
        teacher_head, temperature: as of nla.

    Inputs: as of distillation. Default reduction: token_mean. Metrics: acceptance, top1.

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
    """KL divergence while the acceptance is low, total variation as it grows.

        l KL(q || p) + (1 - l) sum |p - q| / 2, l = sg exp(-eta a)

    Samarin et al. 2026 (LK losses), arXiv:2602.23881.

    Args:
        eta: how fast the weight of the KL falls, >= 0.
        per: "token", a of each token; "step", the mean of a over the scored tokens of a segment,
            which is then an unrolled step: `Segments.from_ids(step, count, group=...)`, over all
            ranks of a group.
        teacher_head, temperature: as of nla.

    Inputs: as of distillation. Default reduction: token_mean. Metrics: acceptance, top1.

    Also called: speculators lk_hybrid, SpecForge LK lambda, Automodel LK lambda.
    """
    non_negative(eta=eta)
    one_of(("token", "step"), per=per)
    scope: Scope = "token" if per == "token" else "segment"
    function = partial(_hybrid, eta=eta, per=per)
    return _of_verifier(function, teacher_head, temperature, scope=scope)


# ---------------------------------------------------------------------- blocks


def _up_to(values: Tensor, batch: PackedBatch) -> Tensor:
    """[T] float64 sums over the tokens of a segment up to each, and with it."""
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
    """Weights of a block's drafted tokens: `hl.cross_entropy().modified(hl.draft_weights())`.

        exp(-k / gamma), or of D-PACE sum_{i >= k} prod_{j <= i} ((1 - floor) p_y + floor)

    DFlash and DSpark weigh by place; D-PACE, arXiv:2605.18810, by how far the draft would come,
    from log-probs without a gradient. A block is a segment, its unscored tokens count as passed;
    the denominator stays the number of tokens.

    Args:
        weights: "decay" or "d_pace".
        gamma: of the decay, > 0: 7, 5, 4 for blocks of 16, 10, 8 in DFlash's paper.
        floor: of a token's confidence in D-PACE, > 0 and at most 1.

    Inputs of the decay: slots [..], the place k of a token among the block's drafted ones, from 0;
    an anchor is not scored.
    """
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
    """Lengths of what a block's drafted tokens would bring, with the token that always comes."""
    if "slots" not in batch or batch.segments.group is not None:
        return _observe(stats, batch)
    log_a, hits = stats.log_acceptance, stats.top1
    in_order = batch.slots == _up_to(torch.ones_like(log_a), batch) - 1
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
    """Cross-entropy and total variation of a block's drafted tokens, by their place k.

        (ce (-log p_y) + tv sum |p - q| / 2) exp(-k / gamma)

    DSpark (2026), as speculators, SpecForge and NeMo Automodel train it (the last two on 2 tv). The
    loss of its confidence head is one on `out.per_token["dspark/acceptance"]`.

    Args:
        ce, tv: weights of the two, >= 0.
        gamma: of the decay, > 0; None: all tokens weigh alike.
        teacher_head, temperature: as of nla.

    Inputs: as of distillation; slots [..], the place k of a token among its block's drafted ones,
    from 0 (with gamma=None for metrics of blocks alone); a block is a segment. Default reduction:
    token_mean. Metrics: acceptance, top1; of blocks accept_len (1 + sum_k prod_{i <= k} a_i) and
    eal (1 + the leading targets that the draft finds the likeliest), both up to the first slot that
    is not scored; not of segments that run across ranks.

    Also called: speculators DSpark.
    """
    non_negative(ce=ce, tv=tv)
    if gamma is not None:
        positive(gamma=gamma)
    function = partial(_dspark, ce=ce, tv=tv, gamma=gamma)
    return _of_verifier(function, teacher_head, temperature, _observe_blocks)
