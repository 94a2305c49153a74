"""Ids beyond 2^24, not exact in float32, are correct in a wide head's last columns."""

from __future__ import annotations

import torch

import headloss as hl

V, H = (1 << 24) + 9, 2
TARGETS = torch.tensor([V - 1, V - 2, (1 << 24) + 1])
CHOSEN = torch.tensor([[V - 3, 5], [V - 1, (1 << 24) + 1], [0, V - 1]])  # in addition to targets


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    hidden, weight = torch.randn(3, H), 0.1 * torch.randn(V, H)
    weight[CHOSEN[:, 1]] += 2 * hidden.sign()  # make the last vocabulary columns the likeliest
    return hidden.requires_grad_(), weight.requires_grad_()


def test_targets_and_candidates_at_the_end() -> None:
    hidden, weight = inputs()
    batch = hl.Batch(TARGETS, candidate_ids=CHOSEN)
    slopes = ("logp", "candidate_logps")
    stats = hl.head_stats(hidden, hl.Head(weight), batch, gradients=slopes)
    loss = -(stats.logp.sum() + 0.5 * stats.candidate_logps.sum())
    got = torch.autograd.grad(loss, (hidden, weight))
    logps = (hidden.double() @ weight.double().T).log_softmax(-1)
    logp, candidates = logps.gather(1, TARGETS[:, None])[:, 0], logps.gather(1, CHOSEN)
    assert torch.allclose(stats.logp.double(), logp, atol=1e-5, rtol=0)
    assert torch.allclose(stats.candidate_logps.double(), candidates, atol=1e-5, rtol=0)
    want = torch.autograd.grad(-(logp.sum() + 0.5 * candidates.sum()), (hidden, weight))
    for mine, exact in zip(got, want, strict=True):
        assert (mine - exact).norm() <= 1e-5 * exact.norm()
    # gradient rows at ids near the end, which a float32 id could not represent
    last = torch.cat([TARGETS, CHOSEN[:, 1]])
    assert torch.allclose(got[1][last], want[1][last], atol=1e-6)


def test_a_support_padding_and_the_likeliest_at_the_end() -> None:
    hidden, weight = inputs()
    support = torch.cat([TARGETS[:, None], CHOSEN], 1)
    support[1, 1:2] = 7  # keeps ids distinct
    support[2, 1:2] = 3
    logits = hidden.detach().double() @ weight.detach().double().T
    with torch.no_grad():
        batch = hl.Batch(TARGETS, support_ids=support)
        logp = hl.head_stats(hidden, hl.Head(weight), batch).logp
        want = logits.gather(1, support).log_softmax(-1)[:, 0]
        assert torch.allclose(logp.double(), want, atol=1e-5, rtol=0)
        head = hl.Head(torch.cat([weight, torch.full((3, H), 50.0)]), vocab_size=V)
        want = logits.log_softmax(-1).gather(1, TARGETS[:, None])[:, 0]
        assert torch.allclose(hl.head_stats(hidden, head, TARGETS).logp.double(), want, atol=1e-5)
        found = hl.head_topk(hidden, hl.Head(weight), 3)
        assert torch.equal(found.ids, logits.topk(3).indices)
