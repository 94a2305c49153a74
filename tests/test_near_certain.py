"""Divergences of two models nearly certain of one token, and gradients, agree with float64 in
float32.

T tokens, V columns. A head of ones and zeros makes the logits without rounding.
"""

from __future__ import annotations

import pytest
import torch
from triton_cases import DEVICE

import headloss as hl
from headloss.testing import error, plain, within_budget

T, V = 12, 64
KINDS = ("forward_kl", "reverse_kl", "js")
GAPS = (12, 18, 24, 30)  # between the largest and the next logit


@pytest.mark.covering
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("apart", [1.0, 0.01])
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_models_that_agree(kind, gap, apart, backend):
    """Divergences keep their digits; the gradient p - q of a forward KL has only the digits of
    p."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, V, generator=generator)
    likely = torch.randint(V, (T, 1), generator=generator)
    logits.scatter_(1, likely, logits.amax(1, keepdim=True) + gap)
    other = logits + apart * torch.randn(T, V, generator=generator)
    targets, other = (likely.squeeze(1) + 1).remainder(V).to(DEVICE), other.to(DEVICE)
    hidden, head = logits.to(DEVICE).requires_grad_(), hl.Head(torch.eye(V, device=DEVICE))
    batch, objective = hl.Batch(targets, teacher_logits=other), hl.distillation(divergence=kind)
    oracle, coarse = (plain(hidden, head, batch, objective, m) for m in ("float64", "float32"))
    out = hl.head_loss(hidden, head, batch, objective, hl.Options(backend=backend))
    out.loss.backward()
    want, theirs = oracle.gradients["hidden"], coarse.gradients["hidden"]
    assert within_budget(out.loss, oracle.loss, coarse.loss)
    assert within_budget(hidden.grad, want, theirs)
    if gap < 30:  # float32 logits still resolve the certainty
        assert error(out.loss, oracle.loss) <= 1e-6 / apart**2  # the loss is of second order
        assert kind == "forward_kl" or error(hidden.grad, want) <= 1e-6 / apart
