"""`distillation` with the tails "generalized" and "sampled" agrees with formulas on materialised
logits.

T scored tokens, V vocabulary, K teacher ids stored per token; the teacher's distribution is q, the
student's is p.
"""

from __future__ import annotations

import math

import pytest
import torch
from materialised import N, Problem, V, agree, same
from torch import Tensor

import headloss as hl

K = 5
KINDS = ("reverse_kl", "forward_kl", "js")


def problem(k: int = K, temperature: float = 1.0, seed: int = 0) -> Problem:
    """Return a problem with a stored teacher's k likeliest tokens at a temperature, some of them
    replaced by unused entries."""
    case = Problem({}, seed=seed)
    generator = torch.Generator().manual_seed(40 + seed)
    z = 2 * torch.randn(N, V, generator=generator, dtype=torch.float64)
    logps, ids = (z / temperature).log_softmax(1).topk(k, 1)
    if k < V:
        ids[::3, 2], logps[::3, 2] = -1, math.nan  # unused entries of `ids`
        ids[6], logps[6] = -5, 0.0  # Token 6 has no stored teacher ids.
    case.fields |= {"teacher_topk_ids": ids, "teacher_topk_logps": logps}
    return case


def student(case: Problem, log_p: Tensor, temperature: float) -> Tensor:
    """Return the student's log-probs [T, V] at the term's temperature."""
    return (log_p * case.temperature / temperature).log_softmax(1)


def generalized(log_p: Tensor, fields, kind: str, beta: float = 0.5) -> Tensor:
    """Return the generalised divergence's [T] values, by a loop over stored ids."""
    values = []
    rows = zip(fields["teacher_topk_ids"].tolist(), fields["teacher_topk_logps"], strict=True)
    for t, (ids, logps) in enumerate(rows):
        total = log_p.new_zeros(())
        for j, log_q in zip(ids, logps, strict=True):
            if j < 0:
                continue
            p, q, log_q = log_p[t, j].exp(), log_q.exp(), log_q.clamp_min(-1e4)
            m = beta * q + (1 - beta) * p
            if kind == "reverse_kl":
                total = total + p * (log_p[t, j] - log_q) - p + q
            elif kind == "forward_kl":
                total = total + q * (log_q - log_p[t, j]) - q + p
            else:
                of_q = (q * (log_q - m.log()) if q > 0 else 0) - q + m
                of_p = p * (log_p[t, j] - m.log()) - p + m
                total = total + beta * of_q + (1 - beta) * of_p
        values.append(total)
    return torch.stack(values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])  # the head's is 0.7
def test_formula(kind: str, temperature: float) -> None:
    case = problem(temperature=temperature)
    agree(
        case,
        hl.distillation(divergence=kind, beta=0.3, temperature=temperature, tail="generalized"),  # type: ignore[arg-type]
        lambda log_p, targets, fields: generalized(
            student(case, log_p, temperature), fields, kind, 0.3
        ),
        frozen=False,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_the_vocabulary_is_the_divergence_itself(kind: str) -> None:
    case = problem(k=V)
    term = hl.distillation(divergence=kind, tail="generalized")  # type: ignore[arg-type]
    stored = case.got(term, hl.Options())
    ids, logps = case.fields.pop("teacher_topk_ids"), case.fields.pop("teacher_topk_logps")
    case.fields["teacher_logits"] = torch.zeros_like(logps).scatter(1, ids, logps)
    same(stored, case.got(hl.distillation(divergence=kind), hl.Options()), "bucket")  # type: ignore[arg-type]
    same(case.got(term, hl.Options()), stored, "a teacher's logits have no tail")


@pytest.mark.parametrize("kind", KINDS)
def test_zero_where_the_student_is_the_teacher_and_above_it_elsewhere(kind: str) -> None:
    """The generalised divergence is 0 exactly if student and teacher agree on the stored ids; the
    truncated sum is not."""
    case = problem()
    z = (case.hidden @ case.weight.t()).detach()
    logps, ids = z.log_softmax(1).topk(K, 1)
    case.fields |= {"teacher_topk_ids": ids, "teacher_topk_logps": logps}
    term = hl.distillation(divergence=kind, tail="generalized")  # type: ignore[arg-type]
    loss, *gradients = case.got(term, hl.Options())
    assert abs(loss) < 1e-15
    assert all(g.abs().max() < 1e-14 for g in gradients)
    # With tail="truncated", forward KL has a gradient even if the student equals the teacher.
    if kind == "forward_kl":
        _, *others = case.got(hl.distillation(divergence=kind, tail="truncated"), hl.Options())  # type: ignore[arg-type]
        assert all(g.abs().max() > 1e-3 for g in others)
    for seed in range(5):
        case = problem(seed=seed)
        for t in range(N):
            fields = {n: v[t : t + 1] for n, v in case.fields.items()}
            batch = hl.Batch(case.targets[t : t + 1], **fields)  # type: ignore[arg-type]
            out = hl.head_loss(case.hidden[t : t + 1], case.head, batch, term)
            empty = bool((fields["teacher_topk_ids"] < 0).all())
            assert out.loss == 0 if empty else out.loss > 0


def test_the_truncated_sum_of_a_js_is_the_same() -> None:
    case, options = problem(), hl.Options()
    both = (
        case.got(hl.distillation(divergence="js", beta=0.3, tail=tail), options)  # type: ignore[arg-type]
        for tail in ("generalized", "truncated")
    )
    same(*both, "js")


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
def test_an_outcome_that_the_teacher_rules_out(kind: str) -> None:
    """A stored id with teacher probability 0 counts as log-prob -10000, which gives a finite loss
    even if the student is certain of it."""
    case = problem()
    case.fields["teacher_topk_logps"][:, 1] = -math.inf
    agree(
        case,
        hl.distillation(divergence=kind, tail="generalized"),  # type: ignore[arg-type]
        lambda log_p, targets, fields: generalized(student(case, log_p, 1.0), fields, kind),
        frozen=False,
    )
    hidden = torch.zeros(1, V)
    # The student gives id 3 probability 1 and id 5 probability 0; the teacher stores these two ids.
    hidden[0, 3] = 2000.0
    ids, logps = torch.tensor([[3, 5]]), torch.tensor([[0.25, 0.5]]).log()
    batch = hl.Batch(torch.tensor([3]), teacher_topk_ids=ids, teacher_topk_logps=logps)
    term = hl.distillation(divergence=kind, tail="generalized")  # type: ignore[arg-type]
    out = hl.head_loss(hidden.requires_grad_(), hl.Head(torch.eye(V)), batch, term)
    reverse = -math.log(0.25) - 1 + 0.25 + 0.5
    forward = 0.25 * math.log(0.25) - 0.25 + 1 + 0.5 * (math.log(0.5) + 2000) - 0.5
    assert float(out.loss.detach()) == pytest.approx(reverse if kind == "reverse_kl" else forward)
    assert torch.autograd.grad(out.loss, hidden)[0].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_generalized_divergences_metric_is_its_loss(kind: str) -> None:
    case = problem()
    term = hl.distillation(divergence=kind, tail="generalized")  # type: ignore[arg-type]
    out = hl.head_loss(case.hidden, case.head, case.batch, term)
    assert float(out.metrics[f"distillation/{kind}"].value) == pytest.approx(
        float(out.loss.detach())
    )
    assert "tail='generalized'" in repr(term)


@pytest.mark.parametrize("kind", ["skew_forward_kl", "skew_reverse_kl", "total_variation"])
def test_other_divergences_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"distillation: divergence: got '{kind}' with tail="):
        hl.distillation(divergence=kind, tail="generalized")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="distillation: tail: got 'general', want one of"):
        hl.distillation(tail="general")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- a sampled tail


def with_samples(temperature: float = 1.0, k: int = K, seed: int = 0) -> Problem:
    """Return a problem in which some targets are among the stored teacher ids, with the teacher's
    log-probs of all targets."""
    case = problem(k, temperature, seed)
    generator = torch.Generator().manual_seed(60 + seed)
    case.fields["teacher_logps"] = -4 * torch.rand(N, generator=generator, dtype=torch.float64)
    at = case.fields["teacher_topk_ids"][:, 0]
    case.targets = torch.where((torch.arange(N) % 2 == 0) & (at >= 0), at, case.targets)
    return case


def sampled(log_p: Tensor, targets: Tensor, fields) -> Tensor:
    """Return [T] reverse KL divergences over the stored teacher ids, plus an estimate from the
    sampled target outside of them."""
    values = []
    for t, (ids, y) in enumerate(
        zip(fields["teacher_topk_ids"].tolist(), targets.tolist(), strict=True)
    ):
        total = log_p.new_zeros(())
        for j, log_q in zip(ids, fields["teacher_topk_logps"][t], strict=True):
            if j >= 0:
                total = total + log_p[t, j].exp() * (log_p[t, j] - log_q)
        if y not in ids:
            pull = 1 + log_p[t, y] - fields["teacher_logps"][t]
            total = total + pull.detach() * log_p[t, y]
        values.append(total)
    return torch.stack(values)


def of_samples(temperature: float) -> hl.Term:
    return hl.distillation(divergence="reverse_kl", temperature=temperature, tail="sampled")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])  # the head's is 0.7
def test_a_sampled_tail(temperature: float) -> None:
    case = with_samples(temperature)
    stored = (case.fields["teacher_topk_ids"] == case.targets[:, None]).any(1)
    assert 0 < int(stored.sum()) < N
    agree(
        case,
        of_samples(temperature),
        lambda log_p, targets, fields: sampled(student(case, log_p, temperature), targets, fields),
        frozen=False,
    )


def test_a_sampled_tail_is_three_terms() -> None:
    """With the head's temperature, `tail="sampled"` equals a reverse KL truncated to the stored
    ids, plus two terms on tokens whose target is not a stored id."""
    case = with_samples(0.7)
    ids = case.fields["teacher_topk_ids"]
    outside = (ids != case.targets[:, None]).all(1)
    got = case.got(of_samples(0.7), hl.Options())
    case.fields["outside"] = outside.double()
    three = hl.distillation(divergence="reverse_kl", temperature=0.7, tail="truncated")
    three = three + hl.on_policy_distillation().weighted("outside")
    three = three - hl.cross_entropy().weighted("outside")
    same(got, case.got(three, hl.Options()), "three terms")


def test_the_mean_gradient_of_a_sampled_tail_is_that_of_the_whole() -> None:
    """The gradient of `distillation(tail="sampled")`, averaged over tokens drawn from the student,
    is the gradient of the reverse KL divergence over the whole vocabulary."""
    case = problem(k=4)
    case.fields = {n: v[:1] for n, v in case.fields.items()}
    generator = torch.Generator().manual_seed(3)
    log_q = torch.randn(1, V, generator=generator, dtype=torch.float64).log_softmax(1)
    z = torch.randn(1, V, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([[4, 9, -1, 20]])
    p = z.detach().log_softmax(1).exp()[0]
    total = torch.zeros_like(z)
    for y in range(V):
        batch = hl.Batch(
            torch.tensor([y]),
            teacher_topk_ids=ids,
            teacher_topk_logps=log_q.gather(1, ids.clamp_min(0)),
            teacher_logps=log_q[:, y],
        )
        out = hl.head_loss(z, hl.Head(torch.eye(V, dtype=torch.float64)), batch, of_samples(1.0))
        total += p[y] * torch.autograd.grad(out.loss, z)[0]
    log_p = z.log_softmax(1)
    (want,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), z)
    torch.testing.assert_close(total, want, rtol=1e-9, atol=1e-12)


def test_all_stored_has_no_second_part() -> None:
    case = with_samples(k=V)
    both = (
        case.got(hl.distillation(divergence="reverse_kl", tail=tail), hl.Options())  # type: ignore[arg-type]
        for tail in ("sampled", "truncated")
    )
    same(*both, "all of the vocabulary")


def test_what_a_sampled_tail_reports() -> None:
    case = with_samples()
    log_p = student(case, case.log_p(), 1.0).detach()
    targets = case.targets[case.scored]
    fields = {n: v[case.scored] for n, v in case.fields.items()}
    ids = fields["teacher_topk_ids"]
    p = log_p.gather(1, ids.clamp_min(0)).exp().masked_fill(ids < 0, 0)
    outside = (ids != targets[:, None]).all(1)
    all_of_it = sampled(log_p, targets, fields)
    logp = log_p.gather(1, targets[:, None]).squeeze(1)
    second = torch.where(outside, (1 + logp - fields["teacher_logps"]) * logp, 0)
    metrics = case.metrics(of_samples(1.0))
    want = {
        "reverse_kl": all_of_it,
        "stored": all_of_it - second,
        "sampled": second,
        "mass": p.sum(1),
        "outside": outside.double(),
    }
    for name, values in want.items():
        assert metrics[f"distillation/{name}"] == pytest.approx(float(values.mean())), name


def test_a_target_of_any_probability() -> None:
    """Values and gradients are finite for p_y = 0, p_y = 1 and q_y = 0."""
    ids, logps = torch.tensor([[[3, 5]]]), torch.tensor([[[0.25, 0.5]]]).log()
    for size, y, log_q in ((2000.0, 7, -1.0), (-2000.0, 7, -math.inf), (0.0, 7, -800.0)):
        hidden = torch.zeros(1, 1, V)
        hidden[..., 3] = size
        batch = hl.Batch(
            torch.tensor([[y]]),
            teacher_topk_ids=ids,
            teacher_topk_logps=logps,
            teacher_logps=torch.tensor([[log_q]]),
        )
        head = hl.Head(torch.eye(V))
        out = hl.head_loss(hidden.requires_grad_(), head, batch, of_samples(1.0))
        assert out.loss.isfinite() and torch.autograd.grad(out.loss, hidden)[0].isfinite().all()


def test_bad_input_of_a_sampled_tail() -> None:
    for kind in ("forward_kl", "js", "skew_reverse_kl"):
        with pytest.raises(ValueError, match=f"divergence: got '{kind}' with tail='sampled', want"):
            hl.distillation(divergence=kind, tail="sampled")  # type: ignore[arg-type]
    case = with_samples()
    del case.fields["teacher_logps"]
    with pytest.raises(ValueError, match="term distillation: reads batch.teacher_logps, which was"):
        case.metrics(of_samples(1.0))
