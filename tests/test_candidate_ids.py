"""`Batch(candidate_ids=...)` accepts valid ids and raises for invalid ids."""

from __future__ import annotations

import math

import pytest
import torch

import headloss as hl


def loss(ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
    targets = torch.tensor([1, -100, 2]) if targets is None else targets
    head, batch = hl.Head(torch.ones(5, 4)), hl.Batch(targets, candidate_ids=ids)
    return hl.head_loss(torch.ones(*targets.shape, 4), head, batch, hl.cross_entropy()).loss


def test_an_id_twice_at_one_position_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"candidate_ids: got \[4, 0, 4\] at position 2, want dis"):
        loss(torch.tensor([[0, 1, 2], [0, 1, 2], [4, 0, 4]]))


def test_empty_slots_and_unscored_positions_may_repeat() -> None:
    loss(torch.tensor([[0, -1, -1], [3, 3, 77], [-5, 2, -5]]))


def test_an_id_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="candidate_ids: got 5 at position 0, want id < 5"):
        loss(torch.tensor([[5], [0], [0]]))


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        (torch.zeros(3), ValueError, r"candidate_ids: got shape \(3,\), want \(3, 'K'\)"),
        (torch.zeros(3, 0).long(), ValueError, "with 1 <= K <= 512"),
        (torch.zeros(3, 513).long(), ValueError, "with 1 <= K <= 512"),
        (torch.zeros(3, 2), TypeError, "candidate_ids: got torch.float32, want integers"),
    ],
)
def test_malformed_ids_are_refused(ids: torch.Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        loss(ids)


# ---------------------------------------------------------------------- whole calls


@hl.term
def yes_or_no(stats, batch, yes=3, no=7):
    """A term: the log-ratio of the first candidate's probability to the second's."""
    return -batch.scores * (stats.candidate_logps[:, 0] - stats.candidate_logps[:, 1])


@hl.term
def everything(stats, batch):
    p = torch.cat([stats.candidate_logps, stats.candidate_tail.unsqueeze(1)], 1).exp()
    return (p * batch.outcome_scores).sum(1) + stats.sum_p_squared + stats.peak - stats.logp


def gradients(hidden, weight, batch, objective, **options):
    hidden, weight = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    out = hl.head_loss(hidden, hl.Head(weight), batch, objective, hl.Options(**options))
    out.loss.backward()
    return out, hidden.grad, weight.grad


def test_yes_or_no_is_a_difference_of_two_rows() -> None:
    """A loss on the difference of two candidates' log-probs gives gradients to two rows of the head
    only."""
    hidden, weight = torch.randn(6, 4).double(), torch.randn(9, 4).double()
    scores = torch.randn(6).double()
    ids = torch.tensor([3, 7]).expand(6, 2)
    batch = hl.Batch(torch.zeros(6).long(), candidate_ids=ids, scores=scores)
    out, dx, dw = gradients(hidden, weight, batch, yes_or_no())
    margin = hidden @ (weight[3] - weight[7])
    torch.testing.assert_close(out.loss.detach(), -(scores * margin).mean())
    torch.testing.assert_close(dx, -(scores / 6)[:, None] * (weight[3] - weight[7]))
    want = torch.zeros_like(weight)
    want[3] = -(scores[:, None] * hidden).mean(0)
    want[7] = -want[3]
    torch.testing.assert_close(dw, want, atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"schedule": "recompute", "chunk_tokens": 3}])
@pytest.mark.parametrize("static", [False, True])
def test_unscored_positions_may_hold_anything(options: dict, static: bool) -> None:
    """At unscored positions candidate ids may be invalid and hidden states and fields NaN; a second
    run gives identical bits."""
    hidden, weight, targets = torch.randn(8, 4), torch.randn(97, 4), torch.randint(97, (8,))
    ids, scores = torch.rand(8, 97).argsort(1)[:, :5], torch.randn(8, 6)
    scored = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1]).bool()

    def batch(bad: bool) -> hl.Batch:
        return hl.Batch(
            torch.where(scored, targets, -100),
            candidate_ids=ids.masked_fill(~scored[:, None], 1 << 40) if bad else ids,
            outcome_scores=scores.masked_fill(~scored[:, None], math.nan) if bad else scores,
        )

    poisoned = hidden.masked_fill(~scored[:, None], math.nan)
    want = gradients(hidden, weight, batch(False), everything(), **options)
    for _ in range(2):
        got = gradients(poisoned, weight, batch(True), everything(), static=static, **options)
        close = torch.testing.assert_close if static else torch.equal
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            assert close(mine, theirs) in (None, True)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "held"])
def test_few_tokens_and_many_candidates(tokens: int, schedule: str) -> None:
    """Candidates may cover the whole vocabulary, with no remaining probability."""
    hidden, weight = torch.randn(tokens, 4).double(), torch.randn(512, 4).double()
    ids, scores = torch.arange(512).expand(tokens, -1), torch.randn(tokens, 513).double()
    scores[:, -1] = 0
    batch = hl.Batch(torch.zeros(tokens).long(), candidate_ids=ids, outcome_scores=scores)
    options = {"schedule": schedule}
    out, dx, dw = gradients(hidden, weight, batch, everything(), **options)
    if not tokens:
        assert out.loss == 0 and dw.eq(0).all() and dx.shape == (0, 4)
        return
    leaf = hidden.clone().requires_grad_()
    log_p = (leaf @ weight.t()).log_softmax(1)
    (log_p.exp() * scores[:, :-1]).sum().sub(log_p[0, 0]).backward()
    torch.testing.assert_close(dx, leaf.grad)


def test_the_rest_keeps_its_digits() -> None:
    """The probability outside the candidates is accurate in float32, even if it is only 1e-12."""
    logits = torch.tensor([[30.0, 1.0, 2.0, 0.5]])
    leaf = logits.clone().requires_grad_()
    tail = hl.term(lambda stats, batch: stats.candidate_tail, name="tail")
    batch = hl.Batch(torch.tensor([0]), candidate_ids=torch.tensor([[0]]))
    out = hl.logits_loss(leaf, batch, tail())
    out.loss.backward()
    wide = logits.double().requires_grad_()
    want = (wide[:, 1:].logsumexp(1) - wide.logsumexp(1)).sum()
    want.backward()
    torch.testing.assert_close(out.loss.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-6, atol=1e-12)


def refuse(ids: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"got {ids.shape}, want other batch.candidate_ids")


def test_check_term_reports_the_candidate_statistics_read() -> None:
    report = hl.check_term(everything(), outcome_scores=torch.randn(28, 5).double())
    assert report.statistics == tuple(
        sorted(["candidate_logps", "candidate_tail", "logp", "peak", "sum_p_squared"])
    )
    assert report.gradients == ("candidate_logps", "candidate_tail", "logp")
    refusing = hl.term(lambda stats, batch: refuse(batch.candidate_ids), name="refusing")
    with pytest.raises(ValueError, match="want other batch.candidate_ids"):
        hl.check_term(refusing())
    for ids, want in ([0, 0], "distinct ids"), ([0, 1 << 31], "id < 2147483648"):
        with pytest.raises(ValueError, match=f"candidate_ids: got .* at position 0, want {want}"):
            hl.check_term(everything(), candidate_ids=torch.tensor(ids).expand(28, 2))
    with pytest.raises(ValueError, match="everything: reads stats.candidate_logps, but batch.cand"):
        gradients(torch.ones(2, 4), torch.ones(5, 4), hl.Batch(torch.ones(2).long()), everything())


def test_plan_counts_candidates() -> None:
    ids = torch.arange(16).expand(64, 16)
    batch = hl.Batch(torch.zeros(64).long(), candidate_ids=ids, scores=torch.zeros(64))
    hidden, head = torch.zeros(64, 4), hl.Head(torch.zeros(97, 4))
    assert hl.plan(hidden, head, batch, yes_or_no()).bytes["candidates"] == 64 * 16 * 24
    plan = hl.plan(hidden, head, batch, hl.cross_entropy())
    assert "candidates" not in plan.bytes and plan.bytes["logits"] == 64 * 97 * 4
    # With a teacher, part of the gradient is kept in a second buffer, so that the memory for
    # candidates and for logits doubles.
    batch = batch.with_fields(teacher_topk_ids=ids, teacher_topk_logps=-4 * torch.ones(64, 16))
    plan = hl.plan(hidden, head, batch, hl.distillation() + yes_or_no())
    assert plan.bytes["candidates"] == 2 * 64 * 16 * 24
    assert plan.bytes["logits"] == 2 * 64 * 97 * 4


@hl.term(scope="batch")
def standardised(stats, batch):
    return yes_or_no().function(stats, batch) * stats.logp.detach().std() + stats.logp


@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_frozen_head(softcap: float | None, dtype: torch.dtype) -> None:
    """With a frozen head, candidates get correct gradients from a term that normalises its values
    over the batch."""
    hidden, weight = torch.randn(9, 8).to(dtype), torch.randn(97, 8).to(dtype)
    ids = torch.rand(9, 97).argsort(1)[:, :4]
    ids[2, 2:] = -1
    targets = torch.where(torch.arange(9) % 3 == 0, ids[:, 1], torch.randint(97, (9,)))
    targets[4] = -100
    fields = {"scores": torch.randn(9)}
    batch = hl.Batch(targets, candidate_ids=ids, **fields)
    head = hl.Head(weight, softcap=softcap, temperature=torch.linspace(0.5, 2, 9))
    found = []
    for name in ("frozen", "recompute", "one_pass"):
        leaf = hidden.clone().requires_grad_()
        options = hl.Options(schedule=name, chunk_tokens=None if name == "one_pass" else 3)
        out = hl.head_loss(leaf, head, batch, standardised(), options)
        (3 * out.loss).backward()
        assert out.plan.schedule == name
        found.append(leaf.grad.double())
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[0], found[2], rtol=tolerance, atol=tolerance)
    with pytest.raises(ValueError, match="needs the gradient of more than logp"):
        hl.head_loss(
            hidden.requires_grad_(),
            head,
            batch.with_fields(outcome_scores=torch.ones(9, 5)),
            everything(),
            hl.Options(schedule="frozen"),
        )
