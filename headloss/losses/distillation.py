"""Distillation from a teacher's full distribution, or from its top k.

T scored tokens, V vocabulary, H' the teacher's hidden width, K stored outcomes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..batch.reduction import token_mean
from ..statistics.divergence import phi
from ..statistics.metrics import Observed
from ..statistics.softmax import FLOOR, Statistics
from .arguments import naming, number, one_of, positive, with_floats
from .factory import factory
from .teacher import KINDS, TAILS, Kind, Tail, Teacher
from .term import Term, term

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch
    from ..head.head import Head


@with_floats
def distillation(
    *,
    divergence: Kind = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_head: Head | None = None,
    tail: Tail = "bucket",
) -> Term:
    """Divergence between the teacher's distribution q and the student's p.

    l_t = KL(q || p), KL(p || q) or beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1-beta) p

    Hinton et al. 2015, arXiv:1503.02531; generalized Jensen-Shannon: Agarwal et al. 2024,
    arXiv:2306.13649; skewed: Ko et al. 2024 (DistiLLM), arXiv:2402.03898; total variation: Wen et
    al. 2023, arXiv:2307.15190.

    Args:
        divergence: "forward_kl" = KL(q || p), "reverse_kl" = KL(p || q), "js", "skew_forward_kl" =
            KL(q || beta q + (1 - beta) p), "skew_reverse_kl" = KL(p || beta p + (1 - beta) q) or
            "total_variation" = sum |p - q| / 2.
        beta: weight of the teacher in "js", and of the first side in the skewed ones' mixture (0.1
            in their paper), between 0 and 1.
        temperature: of both sides, in place of the heads' own; there is no T^2 factor.
        teacher_head: the teacher's head, for `teacher_hidden`.
        tail: what becomes of the mass outside of a top-k teacher's K outcomes: "bucket", one more
            outcome; "renormalized", both sides are distributions over the K; "truncated", the sum
            over these alone, which is no divergence and may be negative; "clamped", that sum where
            it is above 0, else 0 and without a gradient, as verl has it; "generalized", the
            divergence of two measures that need not sum to 1: sum_k p_k (log p_k - log q_k) - p_k +
            q_k for "reverse_kl", likewise for "forward_kl", the truncated sum for "js", and no
            other. It is never negative, and 0 with a gradient of 0 where p = q on the K: Ma et al.
            2026 (MOPD), arXiv:2606.30406, equation 5; "sampled", of "reverse_kl" alone: the
            truncated sum, and where the target y, which the student sampled, is not stored, sg(1 +
            log p_y - log q_y) log p_y, an unbiased estimate of the gradient that the rest has. Its
            value is a choice: NeMo-RL's pull requests 3584 and 3608 name none.

    Inputs: one of `teacher_logits` [.., V]; `teacher_hidden` [.., H'] with `teacher_head` (its
    logits are made a tile at a time); `teacher_topk_ids` [.., K] int64 (distinct; a negative id is
    an empty slot) and `teacher_topk_logps` [.., K] log-probs at the term's temperature. The ids may
    be the student's own, of hl.head_topk. A token that the teacher rules out (logit -inf) counts as
    one of log-prob -10000. With the tail "sampled" also teacher_logps [..], log q_y at the term's
    temperature.

    Default reduction: token_mean. Metrics: the divergence by its name; with the tail "sampled" its
    two parts, stored and sampled, mass (the student's, on the K) and outside (the share of tokens
    whose target is not stored).
    """
    with naming("distillation"):
        one_of(KINDS, divergence=divergence)
        number("between 0 and 1", lambda x: 0 < x < 1, beta=beta)
        positive(temperature=temperature)
        one_of(TAILS, tail=tail)
        if divergence not in (kinds := KINDS_OF.get(tail, KINDS)):
            names = ", ".join(map(repr, kinds))
            raise ValueError(f"divergence: got {divergence!r} with tail={tail!r}, want {names}")
    of_teacher = 1 - beta if divergence == "skew_reverse_kl" else beta
    side = {"temperature": temperature, "head": teacher_head, "tail": tail}
    teacher = Teacher(kind=divergence, beta=of_teacher, **side)  # type: ignore[arg-type]
    options = {"divergence": divergence, "beta": beta, "temperature": temperature}
    options |= {} if tail == "bucket" else {"tail": tail}
    function, observe = partial(_divergence, teacher=teacher), partial(_observe, teacher=teacher)
    return Term(
        name="distillation",
        function=function,
        reduction=token_mean,
        options=tuple(options.items()),
        observe=observe,
        teacher=teacher,
    )


# Divergences that a tail is for, where it is not for all.
KINDS_OF: dict[str, tuple[Kind, ...]] = {
    "generalized": ("forward_kl", "reverse_kl", "js"),
    "sampled": ("reverse_kl",),
}
NOISE = 4  # times eps: 1 - sum of 512 probabilities, from a log-softmax, was off by 3.3 at most


def _divergence(stats: Statistics, batch: PackedBatch, *, teacher: Teacher) -> Tensor:
    found = stats.extras[teacher]
    if found.dim() == 1:
        return found
    wide = found.dtype if stats.logp is None else stats.logp.dtype
    empty = batch.teacher_topk_ids < 0
    log_q = batch.teacher_topk_logps.double().masked_fill(empty, FLOOR).clamp_min(FLOOR)
    log_p = found.double()
    if teacher.tail == "bucket":
        log_q, least = torch.cat([log_q, log_tail(log_q)], 1), torch.full_like(log_p, FLOOR)
        # A teacher's rest is 1 - sum, and unknown below what its log-probs were rounded by: then
        # both sides have a rounding error's mass at least, as they have where no token is outside.
        dtypes = [t for t in (wide, batch.teacher_topk_logps.dtype) if t.is_floating_point]
        noise = NOISE * max(torch.finfo(t).eps for t in dtypes)
        unknown = (log_q[:, -1] <= math.log(noise)) | log_p[:, -1].isneginf()
        least[:, -1].masked_fill_(unknown, math.log(torch.finfo(wide).eps))
    else:
        log_p = log_p[:, : empty.shape[1]].masked_fill(empty, FLOOR)
        least = torch.full_like(log_q[:1], FLOOR)
    if teacher.tail == "renormalized":
        log_q, log_p = log_q.log_softmax(1), log_p.log_softmax(1)
    log_q, log_p = log_q.clamp_min(least), log_p.clamp_min(least)
    value, _ = phi(log_q, log_p, teacher.kind, teacher.beta)
    if teacher.tail == "generalized" and teacher.kind != "js":  # of which the masses cancel
        more = log_q.exp().sum(1) - log_p.exp().sum(1)
        value = value + (more if teacher.kind == "reverse_kl" else -more)
    if teacher.tail == "clamped":
        value = value.clamp_min(0)
    if teacher.tail == "sampled":
        value = value + _of_target(found, batch)
    return value.to(wide)


def _outside(batch: PackedBatch) -> Tensor:
    """Where the target is not stored, [T] bool."""
    return (batch.teacher_topk_ids != batch.targets.unsqueeze(1)).all(1)


def _of_target(found: Tensor, batch: PackedBatch) -> Tensor:
    """What stands for the rest where the target is of it, [T]; `found` has its log-prob before the
    rest's."""
    outside = _outside(batch)
    log_p = torch.where(outside, found[:, -2].double(), 0).clamp_min(FLOOR)
    log_q = batch.teacher_logps.double().clamp_min(FLOOR)
    return torch.where(outside, (1 + log_p - log_q).detach() * log_p, 0)


def _observe(stats: Statistics, batch: PackedBatch, *, teacher: Teacher) -> dict[str, Observed]:
    value, found = _divergence(stats, batch, teacher=teacher), stats.extras[teacher]
    figures = {teacher.kind: value}
    if teacher.tail == "sampled" and found.dim() == 2:
        sampled = _of_target(found, batch).to(value.dtype)
        mass = found[:, :-2].exp().sum(1).to(value.dtype)  # that of an empty slot is 0
        figures |= {"stored": value - sampled, "sampled": sampled, "mass": mass}
        figures["outside"] = _outside(batch).to(value.dtype)
    return {name: Observed(values) for name, values in figures.items()}


@factory
@term
def on_policy_distillation(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Policy gradient of the reverse KL, at tokens that the student sampled.

        sg(log p_y - log q_y) log p_y

    Lu et al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation; as MOPD (Xiaomi 2026,
    MiMo-V2-Flash, arXiv:2601.02780) under `.corrected("token_mask", min=..., max=...)` and beside a
    policy term. The gradient is that of kl(estimator="k2") with the teacher as the reference.

    Inputs: teacher_logps [..], log q_y. Default reduction: token_mean.
    """
    return (stats.logp - batch.teacher_logps).detach() * stats.logp


def _gap(stats: Statistics, batch: PackedBatch) -> Tensor:
    """log q_y - log p_y, [T]; a token without any mass counts as one of log-prob -10000."""
    return batch.teacher_logps.clamp_min(FLOOR) - stats.logp.clamp_min(FLOOR)


def _gated(stats: Statistics, batch: PackedBatch, *, beta: float) -> Tensor:
    gap = _gap(stats, batch)
    return (beta * gap).sigmoid().detach() * gap


def _observe_gate(stats: Statistics, batch: PackedBatch, *, beta: float) -> dict[str, Observed]:
    gap = _gap(stats, batch)
    gate = (beta * gap).sigmoid()
    return {
        "gate": Observed(gate),
        "gate_open": Observed((gate > 0.5).to(gate.dtype)),
        "gap": Observed(gap),
    }


@factory
def sdar(*, beta: float = 5.0) -> Term:
    """Distillation at sampled tokens, gated by how much more the teacher likes them.

        g (log q_y - log p_y), g = sg(sigmoid(beta (log q_y - log p_y)))

    Lu et al. 2026 (SDAR), arXiv:2605.15155. Added to a policy term with 0.1 or 0.01. Its gradient
    is -g grad log p_y; its value is no divergence and may be negative.

    Args:
        beta: steepness of the gate, > 0.

    Inputs: teacher_logps [..], log q_y. Default reduction: token_mean. Metrics: gate, gate_open
    (the share of gates above a half), gap (log q_y - log p_y).
    """
    positive(beta=beta)
    return Term(
        name="",
        function=partial(_gated, beta=beta),
        reduction=token_mean,
        observe=partial(_observe_gate, beta=beta),
    )


def log_tail(log_p: Tensor) -> Tensor:
    """log(1 - sum exp(log_p)) over the last dimension, [.., K] to [.., 1]: the mass of the rest.

    At least the rounding error of a sum of probabilities in this dtype, so that it stays finite.
    """
    least = torch.finfo(log_p.dtype).eps
    total = log_p.logsumexp(-1, keepdim=True).clamp_max(math.log1p(-least))
    return torch.log(-torch.expm1(total))
