"""Distillation from a teacher's full distribution, or from the teacher's stored top k.

T scored tokens, V entries of the vocabulary, H' the teacher's hidden width, K ids that a top-k
teacher stores per token.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..batch.reduction import token_mean
from ..statistics.metrics import Observed
from ..statistics.softmax import FLOOR, Statistics
from .arguments import naming, number, one_of, positive, with_floats
from .factory import factory
from .stored import of_target, outside
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
    """Divergence between the teacher's distribution q and the student's distribution p.

        KL(q || p), KL(p || q), or beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p

    Hinton et al. 2015, arXiv:1503.02531; generalized Jensen-Shannon: Agarwal et al. 2024,
    arXiv:2306.13649; skewed: Ko et al. 2024 (DistiLLM), arXiv:2402.03898; total variation: Wen et
    al. 2023, arXiv:2307.15190.

    Args:
        divergence: "forward_kl" = KL(q || p), "reverse_kl" = KL(p || q), "js", "skew_forward_kl" =
            KL(q || beta q + (1 - beta) p), "skew_reverse_kl" = KL(p || beta p + (1 - beta) q) or
            "total_variation" = sum |p - q| / 2.
        beta: weight of the teacher in "js", and of the first distribution in the mixture of the
            skewed divergences (0.1 in the paper of Ko et al.), between 0 and 1.
        temperature: temperature of teacher and student, in place of the heads' temperatures. The
            loss has no factor of the squared temperature.
        teacher_head: the teacher's head, for `teacher_hidden`.
        tail: treatment of the probability mass outside the K ids that a top-k teacher stores per
            token, 1 - sum of the K probabilities. The tail "bucket" counts the mass outside the
            teacher's K stored ids as one more outcome. The tail "renormalized" divides the
            teacher's probabilities of the K stored ids by their sum, and the student's
            probabilities of the K stored ids by their sum. The tail "truncated" sums over the
            teacher's K stored ids alone, which is not a divergence and may be negative. The tail
            "clamped" is max(s, 0), where s is the divergence's sum over the teacher's K stored ids;
            a token with s below 0 has no gradient, as in verl. The tail "generalized" is a
            divergence of the student's probabilities p_k and the teacher's probabilities q_k of the
            teacher's K stored ids, whose sums may be below 1: sum_k p_k (log p_k - log q_k) - p_k +
            q_k for "reverse_kl", sum_k q_k (log q_k - log p_k) - q_k + p_k for "forward_kl", and
            the sum over the K ids alone for "js". The generalized divergence is never negative, and
            is 0 with gradient 0 where student and teacher give equal probabilities to the teacher's
            K stored ids: Ma et al. 2026 (MOPD), arXiv:2606.30406, equation 5. The tail "sampled" is
            for divergence="reverse_kl" alone: the divergence's sum over the teacher's K stored ids,
            plus sg(1 + log p_y - log q_y) log p_y at a token whose target y, sampled by the
            student, is not among the K ids (p_y and q_y are the student's and the teacher's
            probability of y; sg stops the gradient). The gradient of the summand sg(1 + log p_y -
            log q_y) log p_y is an unbiased estimate of the gradient of the part of the divergence
            outside the teacher's K stored ids. The value of sg(1 + log p_y - log q_y) log p_y has
            no meaning; NeMo-RL's pull requests 3584 and 3608 define only its gradient.

    Inputs: one of `teacher_logits` [.., V]; `teacher_hidden` [.., H'] with `teacher_head` (its
    logits are made one tile at a time; with `teacher_index` [..], `teacher_hidden` has rows [M, H']
    that several positions may share); `teacher_topk_ids` [.., K] int64 (distinct; a negative id is
    an unused entry) and `teacher_topk_logps` [.., K] log-probs at the term's temperature. The ids
    in `teacher_topk_ids` may be the student's top k (from hl.head_topk) instead of the teacher's. A
    token that the teacher rules out (logit -inf) counts as a token of log-prob -10000. Where the
    teacher's vocabulary is larger than the student's, `teacher_lse` [..], at the term's
    temperature, replaces the log-sum-exp of the teacher's logits. If `teacher_lse` is passed, the
    teacher's probabilities of the student's vocabulary sum to m < 1, and the total variation grows
    by (1 - m) / 2. With tail="sampled" the term also reads teacher_logps [..], the teacher's
    log-prob log q_y of the target y at the term's temperature.

    Default reduction: token_mean. Metrics: the divergence, under its name in the option divergence
    (such as forward_kl). With tail="sampled" and a top-k teacher that stores K ids per token there
    are four more metrics: stored (the divergence's sum over the K ids), sampled (the summand of
    targets that are not among the K ids), mass (the student's total probability of the K ids) and
    outside (the fraction of tokens whose target is not among the K ids).
    """  # noqa: E501 (an equation is one line)
    with naming("distillation"):
        one_of(KINDS, divergence=divergence)
        number("between 0 and 1", lambda x: 0 < x < 1, beta=beta)
        one_of(TAILS, tail=tail)
        if divergence not in (kinds := KINDS_OF.get(tail, KINDS)):
            names = ", ".join(map(repr, kinds))
            raise ValueError(f"divergence: got {divergence!r} with tail={tail!r}, want {names}")
        teacher = Teacher(temperature=temperature, head=teacher_head, tail=tail)
    how = {"kind": divergence, "beta": beta}
    options = {"divergence": divergence, "beta": beta, "temperature": temperature}
    options |= {} if tail == "bucket" else {"tail": tail}
    return Term(
        name="distillation",
        function=partial(_divergence, **how),
        reduction=token_mean,
        options=tuple(options.items()),
        observe=partial(_observe, teacher=teacher, **how),
        teacher=teacher,
    )


# For each value of the argument `tail`, the divergences that the value supports; a value without an
# entry supports all divergences.
KINDS_OF: dict[str, tuple[Kind, ...]] = {
    "generalized": ("forward_kl", "reverse_kl", "js"),
    "sampled": ("reverse_kl",),
}


def _divergence(stats: Any, batch: PackedBatch, *, kind: Kind, beta: float) -> Tensor:
    return stats.divergence(kind, beta)  # type: ignore[no-any-return]


def _observe(
    stats: Any, batch: PackedBatch, *, kind: Kind, beta: float, teacher: Teacher
) -> dict[str, Observed]:
    value = stats.divergence(kind, beta)
    figures = {kind: value}
    if teacher.tail == "sampled" and teacher.source(batch) == "topk":
        log_p = stats.extras[teacher]
        sampled = of_target(log_p, batch).to(value.dtype)
        # An id below 0 marks an unused entry, whose probability is 0.
        mass = log_p[:, :-2].exp().sum(1).to(value.dtype)
        figures |= {"stored": value - sampled, "sampled": sampled, "mass": mass}
        figures["outside"] = outside(batch).to(value.dtype)
    return {name: Observed(values) for name, values in figures.items()}


@factory
@term
def on_policy_distillation(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Policy gradient of the reverse KL divergence, at tokens that the student sampled.

        sg(log p_y - log q_y) log p_y, q_y the teacher's probability of the sampled token y

    Lu et al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation. MOPD (Xiaomi 2026,
    MiMo-V2-Flash, arXiv:2601.02780) adds `hl.on_policy_distillation().corrected("token_mask",
    min=..., max=...)` to a policy term. The gradient of `hl.on_policy_distillation` equals the
    gradient of kl(estimator="k2") with the teacher as the reference.

    Inputs: teacher_logps [..], log q_y. Default reduction: token_mean.
    """
    return (stats.logp - batch.teacher_logps).detach() * stats.logp


def _gap(stats: Statistics, batch: PackedBatch) -> Tensor:
    """Return log q_y - log p_y, [T] (teacher's less student's log-prob); a log-prob of -inf counts
    as -10000."""
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
    """Distillation at sampled tokens, gated by the teacher's log-prob advantage over the student.

        g (log q_y - log p_y), gate g = sg(sigmoid(beta (log q_y - log p_y))); q_y and p_y the teacher's and the student's probability of the sampled token y

    Lu et al. 2026 (SDAR), arXiv:2605.15155; added to a policy term with a factor of 0.1 or 0.01.
    The loss of `hl.sdar` has the gradient of -g log p_y, where p_y is the student's probability of
    the sampled token y, and the gate g in [0, 1] is held constant. The loss g (log q_y - log p_y)
    is not a divergence: its value is negative where the student's probability p_y is above the
    teacher's probability q_y.

    Args:
        beta: steepness, > 0, of the sigmoid gate as a function of the teacher's log-prob minus the
            student's log-prob of the sampled token.

    Inputs: teacher_logps [..], the teacher's log-prob of the target. Default reduction: token_mean.
    Metrics: gate, gate_open (the fraction of tokens whose gate is above 0.5), gap (the teacher's
    minus the student's log-prob).
    """  # noqa: E501 (an equation is one line)
    positive(beta=beta)
    return Term(
        name="",
        function=partial(_gated, beta=beta),
        reduction=token_mean,
        observe=partial(_observe_gate, beta=beta),
    )
