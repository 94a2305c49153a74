"""With candidates, `head_stats` gives a user's own loss log-probs that agree with materialised
logits."""

from __future__ import annotations

import pytest
import torch

import headloss as hl
from headloss.testing import error

N, H, V, K = 12, 8, 97, 5
ALL = ("logp", "entropy", "candidate_logps", "candidate_tail")
SCHEDULES = {
    "recompute": {"schedule": "recompute", "chunk_tokens": 4},
    "held": {"schedule": "held"},
    "frozen": {"schedule": "frozen"},
    "static": {"static": True},
}


def problem(dtype: torch.dtype):
    hidden, weight = torch.randn(N, H).to(dtype), torch.randn(V, H).to(dtype)
    ids = torch.rand(N, V).argsort(1)[:, :K]
    ids[::3, 2] = -1
    targets = torch.where(torch.arange(N) % 2 == 0, ids[:, 0], torch.randint(V, (N,)))
    targets[[3, 8]] = -100
    ids[3], hidden[3] = 1 << 40, float("nan")
    batch = hl.Batch(targets.view(3, 4), candidate_ids=ids.view(3, 4, K))
    return hidden.view(3, 4, H), weight, batch


def foreign(logp, entropy, logps, tail):
    """A user's own loss of `head_stats` outputs, which also reads the values at unused entries of
    `candidate_ids`."""
    found = (logps.exp() * torch.linspace(-1, 2, K)).sum(-1) + 0.1 * logps.sum(-1) - logp
    found = found - 0.1 * entropy + (0 if tail is None else tail.exp() - 0.2 * tail)
    return found.square().sum().sqrt()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_loss_of_candidates(name: str, dtype: torch.dtype) -> None:
    hidden, weight, batch = problem(dtype)
    names = ("logp", "candidate_logps") if name == "frozen" else ALL
    scored, ids = (batch.targets != -100).view(-1), batch.candidate_ids.view(-1, K)
    x = hidden.view(-1, H)[scored].double().requires_grad_()
    w = weight.double().clone().requires_grad_()
    log_p = (x @ w.t()).log_softmax(1)
    kept = ids[scored]
    chosen = log_p.gather(1, kept.clamp_min(0)).masked_fill(kept < 0, 0)
    mask = torch.zeros(len(x), V + 1).scatter(1, torch.where(kept < 0, V, kept), -torch.inf)
    tail = (log_p + mask[:, :V]).logsumexp(1)
    logp = log_p.gather(1, batch.targets.view(-1, 1)[scored])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    if name == "frozen":
        loss = foreign(logp, entropy.detach(), chosen, None)
    else:
        loss = foreign(logp, entropy, chosen, tail)
    loss.backward()

    leaf = hidden.clone().requires_grad_()
    head = hl.Head(weight.clone().requires_grad_(name != "frozen"))
    found = hl.head_stats(leaf, head, batch, hl.Options(**SCHEDULES[name]), gradients=names)
    assert found.candidate_logps.shape == (3, 4, K) and len(found) == 3
    assert found.candidate_logps.view(-1, K)[~scored].eq(0).all()
    assert (found.candidate_tail is None) == (name == "frozen")
    ours = foreign(found.logp, found.entropy, found.candidate_logps, found.candidate_tail)
    # Values of unscored zeros.
    unscored = torch.linspace(-1, 2, K).sum() + (found.candidate_tail is not None)
    ours = (ours.square() - 2 * unscored**2).sqrt()
    assert abs(ours.double() - loss) <= (1e-9 if dtype == torch.float64 else 1e-3) * loss
    ours.backward()
    tolerance = 1e-10 if dtype == torch.float64 else 2e-2
    got = leaf.grad.view(-1, H)
    assert error(got[scored], x.grad) <= tolerance and got[~scored].eq(0).all()
    if name != "frozen":
        assert error(head.weight.grad, w.grad) <= tolerance


def test_only_named_candidate_statistics_carry_a_gradient() -> None:
    hidden, weight, batch = problem(torch.float64)
    hidden.requires_grad_()
    found = hl.head_stats(hidden, hl.Head(weight), batch)
    assert found.logp.requires_grad and not found.candidate_logps.requires_grad
    assert found.candidate_tail is None
    found = hl.head_stats(hidden, hl.Head(weight), batch, gradients=("candidate_tail",))
    assert found.candidate_tail.requires_grad and not found.candidate_logps.requires_grad
    with pytest.raises(ValueError, match="'candidate_logps', want a batch with candidate_ids"):
        hl.head_stats(hidden, hl.Head(weight), batch.targets, gradients=("candidate_logps",))
    assert hl.head_stats(hidden, hl.Head(weight), batch.targets).candidate_logps is None


# ---------------------------------------------------------------------- compiled graphs


def given_in_graph(kind: str, dtype: torch.dtype):
    hidden, weight, batch = problem(dtype)
    hidden = hidden.nan_to_num(0)
    support = (batch.targets.clamp_min(0)[..., None] + torch.arange(6)) % V
    if kind == "mixed":
        support[0] = -1
    given = {"candidate_ids": batch.candidate_ids} if "candidates" in kind else {}
    if kind.startswith("flat"):
        given["support_ids"] = (support.reshape(-1), torch.arange(0, 6 * N + 1, 6))
    elif not kind.startswith("candidates"):
        given["support_ids"] = support
    return hidden, weight, hl.Batch(batch.targets, **given)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("flat candidates", torch.float64),
        ("candidates, temperatures", torch.float64),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind in ("candidates", "padded", "mixed", "mixed candidates", "flat")
            for dtype in (torch.float64, torch.bfloat16)
        ),
    ],
)
def test_in_a_compiled_graph(kind: str, dtype: torch.dtype) -> None:
    """A compiled graph agrees with an eager call."""
    hidden, weight, batch = given_in_graph(kind, dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    options = hl.Options(schedule="recompute")
    names = ALL if "candidates" in kind else ALL[:2]
    several = torch.linspace(0.5, 1, batch.targets.numel()).view_as(batch.targets)
    temperature = several if "temperatures" in kind else 0.7

    def step(x, w):
        head = hl.Head(w, temperature=temperature)
        found = hl.head_stats(x, head, batch, options, names)
        loss = (found.logp * found.entropy).sum()
        if found.candidate_logps is not None:
            # A candidate outside of `support_ids` has log-prob -inf, so the loss reads its
            # probability instead.
            loss = loss + (found.candidate_logps.exp() * torch.linspace(-1, 2, K)).sum()
            loss = loss + 0.3 * found.candidate_tail.exp().sum()
        return loss, found.candidate_logps

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    (loss, logps), (want, true) = compiled(*leaves), step(*leaves)
    torch.testing.assert_close(loss, want)
    if logps is not None:
        torch.testing.assert_close(logps, true)
    for got, exact in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves), strict=True
    ):
        assert exact.abs().sum() > 0
        torch.testing.assert_close(got, exact)
    torch._dynamo.reset()


def test_a_compiled_graph_where_nothing_is_scored() -> None:
    """A compiled graph without scored tokens returns zeros of the right shapes, and zero
    gradients."""
    leaves = [torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)]
    batch = hl.Batch(torch.full((N,), -100), candidate_ids=torch.randint(V, (N, K)))
    options = hl.Options(schedule="recompute")

    def step(x, w):
        found = hl.head_stats(x, hl.Head(w), batch, options, ALL)
        return found.candidate_logps, found.candidate_tail

    torch._dynamo.reset()
    logps, tail = torch.compile(step, backend="aot_eager", fullgraph=True)(*leaves)
    assert logps.shape == (N, K) and not logps.any() and not tail.any()
    gradients = torch.autograd.grad(logps.sum() + tail.sum(), leaves)
    assert [g.shape for g in gradients] == [(N, H), (V, H)]
    assert not any(g.any() for g in gradients)
    torch._dynamo.reset()
