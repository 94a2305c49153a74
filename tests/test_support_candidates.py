"""Candidates, sum p^2 and max z of a softmax over `support_ids` agree with float64."""

from __future__ import annotations

import matrix
import pytest
import support_cases as cases
import torch

import headloss as hl
from headloss.batch.batch import IGNORE


def observe(stats, batch):
    peak = hl.Observed(stats.peak, hl.Max)
    return {"peak": peak, "collision": hl.Observed(stats.sum_p_squared)}


@hl.term(observe=observe)
def probe(stats, batch):
    """A term of candidates' log-probs, which are -inf and without gradient outside of
    `support_ids`."""
    log_p, tail = stats.candidate_logps, stats.candidate_tail
    log_p = torch.where(log_p.isneginf(), 0, log_p)
    tail = torch.where(tail.isneginf(), 0, tail)
    return (log_p * batch.scores).sum(1) + (0.3 * log_p).exp().sum(1) + 0.5 * tail.exp() - tail


def inputs(kind: str, head: str, dtype: torch.dtype) -> matrix.Inputs:
    """Return inputs whose candidates are inside and outside of `support_ids`, include the target,
    and have unused entries."""
    known = cases.inputs(kind, head, dtype, terms=probe() + cases.objective())
    generator = torch.Generator().manual_seed(9)
    shape = (cases.TOKENS, cases.VOCABULARY)
    ids = torch.rand(shape, generator=generator).argsort(1)[:, :8]
    support = cases.supports(known.batch.targets, cases.VOCABULARY, kind.replace("flat", ""))
    # Copy three entries of `support_ids`, of which some are unused, to the candidates 4 to 6; a
    # copied id that the token already has as a candidate becomes -1.
    ids[:, 4:7] = support[:, :3]
    known_before = (ids[:, 4:7, None] == ids[:, None, :4]).any(2)
    ids[:, 4:7] = torch.where(known_before, -1, ids[:, 4:7])
    ids[:, 7] = -1
    ids[::4] = -1
    ids[known.batch.targets == IGNORE] = cases.BEYOND
    scores = torch.randn(cases.TOKENS, 8, generator=generator)
    batch = known.batch.with_fields(candidate_ids=ids, scores=scores)
    return matrix.Inputs(
        hidden=known.hidden, head=known.head, batch=batch, objective=known.objective
    )


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["padded", "mixed", "mixed flat"])
@pytest.mark.parametrize("head", ["plain", "everything"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "held"])
def test_candidates_of_a_support(kind, head, dtype, schedule):
    known = inputs(kind, head, dtype)
    out = matrix.check(known, hl.Options(schedule=schedule, chunk_tokens=None), 1.5)
    packed = known.batch.targets != IGNORE
    z = known.head.logits(known.hidden).double().detach()
    ids = known.batch.support_ids
    if "flat" not in kind:
        inside = torch.zeros(len(z), z.shape[1] + 1, dtype=torch.bool)
        kept = torch.where((ids < 0) | (ids >= z.shape[1]), z.shape[1], ids)
        inside.scatter_(1, kept, True)
        inside |= ~(ids >= 0).any(1, keepdim=True)
        z = z.masked_fill(~inside[:, :-1], -torch.inf)[packed]
        found = out.metrics.compute()
        tolerance = 1e-9 if dtype == torch.float64 else 3e-2  # the test's own matmul is in 16 bits
        want = z.softmax(1).square().sum(1).mean()
        assert abs(found["probe/peak"] - z.max()) <= tolerance * z.max().abs()
        assert abs(found["probe/collision"] - want) <= tolerance


@pytest.mark.parametrize("scale", [2.0, -1.0])
def test_the_rest_of_a_support_under_a_negative_scale(scale):
    """With `support_ids`, the probability outside of the candidates is correct for a negative logit
    scale and unused entries."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 6, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    ids = torch.rand(5, 30, generator=generator).argsort(1)[:, :4]
    batch = hl.Batch(ids[:, 0].clone(), support_ids=ids, candidate_ids=ids[:, :1].clone())
    rest = hl.term(lambda stats, batch: stats.candidate_tail.exp())
    out = hl.head_loss(hidden, hl.Head(weight, logit_scale=scale), batch, rest())
    (found,) = torch.autograd.grad(out.loss, hidden)
    p = (scale * hidden @ weight.t()).gather(1, ids).softmax(1)
    (exact,) = torch.autograd.grad((1 - p[:, 0]).mean(), hidden)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


def test_an_empty_slot_is_no_column_of_another_token():
    """Any negative number marks an unused entry of `support_ids`, also one that as a sort key would
    collide with another token's id."""
    # In a 64-bit sort key with the token above the id's 32 bits, the id -(2 << 32) + 5 of token 2
    # would equal id 5 of token 0.
    far = -(2 << 32) + 5
    support = torch.tensor([[1, 2], [2, 3], [4, far]])
    ids = {"support_ids": support, "candidate_ids": torch.full((3, 1), 5)}
    batch = hl.Batch(support[:, 0].clone(), **ids)
    hidden, weight = torch.randn(3, 4).requires_grad_(), torch.randn(7, 4)
    chosen = hl.term(lambda stats, batch: stats.candidate_logps.exp()[:, 0])
    out = hl.head_loss(hidden, hl.Head(weight), batch, chosen())
    out.loss.backward()
    assert out.loss == 0 and not hidden.grad.any()


@pytest.mark.parametrize("static", [False, True])
def test_a_support_of_no_tokens(static):
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = hl.Batch(nothing, support_ids=nothing.view(0, 2))
    hidden = torch.zeros(0, 4).requires_grad_()
    head = hl.Head(torch.ones(7, 4))
    out = hl.head_loss(hidden, head, batch, hl.cross_entropy(), hl.Options(static=static))
    out.loss.backward()
    assert out.loss == 0 and hidden.grad.shape == (0, 4)
