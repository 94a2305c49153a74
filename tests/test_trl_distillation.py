"""Distillation agrees with TRL's functions in value and gradient, in float64 if TRL supports it.

B rows of T positions, V vocabulary; q is the teacher's distribution, p the student's.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import headloss as hl

pytest.importorskip("trl", reason="TRL is the peer that these terms are compared with")
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gold import GOLDTrainer
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.sdft import loss_utils
from trl.trainer.distillation_trainer import _chunked_divergence_loss

B, T, V, H = 3, 5, 19, 4
LENGTHS = {"random": (5, 3, 4), "one_token": (1, 1, 1), "empty_answer": (4, 0, 2)}


class Step:
    """Hidden states, heads and logits of a student and a teacher."""

    def __init__(self, name: str = "random", scale: float = 2.0) -> None:
        generator = torch.Generator().manual_seed([*LENGTHS].index(name))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.mask = torch.arange(T) < torch.tensor(LENGTHS[name])[:, None]
        self.ids = torch.randint(V, (B, T), generator=generator)
        self.labels = torch.where(self.mask, self.ids, -100)
        self.hidden, self.weight = normal(B, T, H).requires_grad_(), normal(V, H).requires_grad_()
        self.teacher_hidden, self.teacher_weight = normal(B, T, H), scale * normal(V, H)
        self.old = -normal(B, T).abs()
        self.logits = self.hidden @ self.weight.t()
        self.teacher_logits = self.teacher_hidden @ self.teacher_weight.t()

    def check(
        self, term: hl.Term | hl.Objective, want: Tensor, form: str = "logits", tolerance=1e-10
    ) -> None:
        """Check the loss and the gradients of hidden states and head, in padded and packed rows."""
        gradients = torch.autograd.grad(want, (self.hidden, self.weight), retain_graph=True)
        for packed in (False, True):
            keep = self.mask if packed else ...
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), self.mask.sum(1).cumsum(0)])
            fields = {
                "logits": {"teacher_logits": self.teacher_logits},
                "hidden": {"teacher_hidden": self.teacher_hidden},
                "sampled": {"teacher_logps": self.sampled(self.teacher_logits)},
                "topk": self.likeliest(),
            }[form]
            batch = hl.Batch(
                self.labels[keep],
                hl.Segments.from_cu_seqlens(ends) if packed else None,
                sampling_logps=self.old[keep],
                **{name: value.detach()[keep] for name, value in fields.items()},  # type: ignore[arg-type]
            )
            head = hl.Head(self.weight)
            out = hl.head_loss(self.hidden[keep], head, batch, term)
            found = torch.autograd.grad(out.loss, (self.hidden, self.weight))
            for a, b in zip((out.loss, *found), (want, *gradients), strict=True):
                torch.testing.assert_close(a, b.double(), rtol=tolerance, atol=tolerance)

    def sampled(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(2, self.ids.unsqueeze(2)).squeeze(2)

    def likeliest(self) -> dict[str, Tensor]:
        """Return the student's six likeliest tokens with the teacher's log-probs."""
        ids = hl.head_topk(self.hidden.detach(), hl.Head(self.weight.detach()), 6).ids
        logps = self.teacher_logits.log_softmax(-1).gather(2, ids)
        return {"teacher_topk_ids": ids, "teacher_topk_logps": logps}

    def per_sequence(self, values: Tensor) -> Tensor:
        """Reduce values like TRL's self-distillation trainers."""
        mask = self.mask.double()
        return ((values * mask).sum(1) / mask.sum(1).clamp(min=1.0)).mean()


def generalized(beta: float, temperature: float = 1.0, head: hl.Head | None = None) -> hl.Term:
    """Return the headloss term for TRL's generalized Jensen-Shannon divergence with weight `beta`
    (in self-distillation, TRL's option `distillation_alpha`)."""
    ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
    if beta in ends:
        kind = ends[beta]
        return hl.distillation(divergence=kind, temperature=temperature, teacher_head=head)  # type: ignore[arg-type]
    return hl.distillation(divergence="js", beta=beta, temperature=temperature, teacher_head=head)


@pytest.mark.parametrize("shape", LENGTHS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_generalized_jsd(beta: float, shape: str) -> None:
    # at scale 400 the teacher's probabilities are 0 or 1
    for temperature, scale in ((1.0, 2.0), (2.5, 2.0), (1.0, 400.0)):
        step = Step(shape, scale)
        # TRL's log of the mixture of student and teacher is inexact if a probability underflows.
        tolerance = 1e-10 if scale == 2.0 else 1e-8
        for trainer in (GKDTrainer, GOLDTrainer, IWOPDTrainer):
            want = trainer.generalized_jsd_loss(
                step.logits, step.teacher_logits, step.labels, beta, temperature
            )
            step.check(generalized(beta, temperature), want, tolerance=tolerance)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_chunked_divergence(beta: float) -> None:
    """The divergence equals DistillationTrainer's for a teacher's hidden states and head, in
    float32."""
    step = Step()
    heads = (step.weight, step.teacher_weight)
    mask = step.mask.long()
    want, *_ = _chunked_divergence_loss(
        step.hidden.float(), step.teacher_hidden.float(), *(w.float() for w in heads), mask, beta
    )
    step.check(generalized(beta, head=hl.Head(step.teacher_weight)), want, "hidden", 1e-5)


@pytest.mark.parametrize("shape", LENGTHS)
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_self_distillation_of_whole_logits(alpha: float, shape: str) -> None:
    """Self-distillation (SDFT, SDPO) agrees, with the teacher being the student's head on a longer
    prompt's hidden states."""
    step = Step(shape)
    teacher = (step.teacher_hidden @ step.weight.t()).detach()
    values = loss_utils.compute_full_logit_self_distillation_loss(
        step.logits, teacher, distillation_alpha=alpha
    )
    term = generalized(alpha, head=hl.Head(step.weight)).over("sequence_mean")
    step.check(term, step.per_sequence(values), "hidden")


@pytest.mark.covering
@pytest.mark.parametrize("shape", LENGTHS)
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("tail", [True, False])
def test_self_distillation_of_the_student_s_likeliest(tail: bool, alpha: float, shape: str) -> None:
    """Self-distillation over the student's likeliest ids (distillation_topk) agrees, with and
    without distillation_add_tail."""
    step = Step(shape, 0.5)
    values = loss_utils.compute_topk_self_distillation_loss(
        step.logits,
        step.teacher_logits,
        distillation_topk=6,
        distillation_alpha=alpha,
        distillation_add_tail=tail,
    )
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(alpha, "js")
    term = hl.distillation(
        divergence=kind,  # type: ignore[arg-type]
        beta=alpha if kind == "js" else 0.5,
        tail="bucket" if tail else "renormalized",
    )
    step.check(term.over("sequence_mean"), step.per_sequence(values), "topk")


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_sums_over_the_likeliest_alone(kind: str) -> None:
    """Sums over the teacher's top k alone agree with TRL; such a sum may be negative, since
    probabilities do not add up to 1."""
    step = Step("random")
    near = (0.5 if kind == "forward_kl" else 1.6) * step.logits.detach()
    step.teacher_logits = near + 0.1 * step.teacher_logits
    fields = step.likeliest()
    log_q = fields["teacher_topk_logps"]
    log_p = step.logits.log_softmax(-1).gather(2, fields["teacher_topk_ids"])
    sides = (log_q, log_p) if kind == "forward_kl" else (log_p, log_q)
    values = (sides[0].exp() * (sides[0] - sides[1])).sum(-1)
    kept = values[step.mask]
    assert (kept < 0).any()
    for tail, want in (("truncated", kept), ("clamped", kept.clamp_min(0))):
        term = hl.distillation(divergence=kind, tail=tail)  # type: ignore[arg-type]
        step.check(term, want.mean(), "topk")


@pytest.mark.parametrize("shape", LENGTHS)
def test_self_distillation_of_sampled_tokens(shape: str) -> None:
    step = Step(shape)
    values = loss_utils.compute_sampled_token_self_distillation_loss(
        step.logits, step.teacher_logits, step.ids, distillation_alpha=1.0
    )
    term = hl.on_policy_distillation()
    step.check(term.over("sequence_mean"), step.per_sequence(values), "sampled")
    assert hl.check_term(term).gradients == ("logp",)


@pytest.mark.parametrize("shape", LENGTHS)
def test_clipped_weight_of_self_distillation(shape: str) -> None:
    """TRL's option `distillation_is_clip` weights self-distillation by the clipped ratio of the
    current policy to the sampling policy, and headloss's loss agrees."""
    step = Step(shape)
    teacher = (step.teacher_hidden @ step.weight.t()).detach()
    values = loss_utils.compute_full_logit_self_distillation_loss(
        step.logits, teacher, distillation_alpha=1.0
    )
    live = step.sampled(step.logits)
    values = loss_utils.apply_importance_sampling_clipping(values, live, step.old, 1.2)
    term = generalized(1.0, head=hl.Head(step.weight)).over("sequence_mean")
    term = term.corrected("token_truncate", max=1.2, live=True)
    step.check(term, step.per_sequence(values), "hidden")


@pytest.mark.parametrize("shape", LENGTHS)
def test_importance_weighted_on_policy_distillation(shape: str) -> None:
    """`reinforce` agrees with TRL's importance-weighted on-policy distillation, with advantages
    computed from the log-probs of teacher and rollout."""
    step = Step(shape)
    teacher = step.sampled(step.teacher_logits)
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_epsilon=1e-8,
        iw_opd_gamma=0.6,
        model=SimpleNamespace(training=False),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    want = IWOPDTrainer._compute_iw_opd_loss(
        trainer, step.logits, step.ids, step.labels, teacher, step.old
    )
    gap = (teacher - step.old).masked_fill(~step.mask, 0)
    before = gap.abs().cumsum(1) - gap.abs()
    weight = 1 + 0.6 * (1 - before / gap.abs().sum(1, keepdim=True).clamp_min(1e-8))
    batch = hl.Batch(step.labels, advantages=(weight * gap).detach())
    out = hl.head_loss(step.hidden, hl.Head(step.weight), batch, hl.reinforce())
    torch.testing.assert_close(out.loss, want)
    got, want = (torch.autograd.grad(x, (step.hidden, step.weight)) for x in (out.loss, want))
    torch.testing.assert_close(got, want)
