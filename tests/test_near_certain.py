"""Divergences between two models that are nearly certain of the same token are accurate in float32,
also in their gradients.

T tokens, V columns. The head is the identity matrix, so that logits equal the hidden states without
rounding.
"""

from __future__ import annotations

import pytest
import torch
from triton_cases import DEVICE

import headloss as hl
from headloss.testing import error, plain, within_budget

T, V = 12, 64
KINDS = ("forward_kl", "reverse_kl", "js")
GAPS = (12, 18, 24, 30)  # differences between the largest and the second logit


@pytest.mark.covering
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("apart", [1.0, 0.01])
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_models_that_agree(kind, gap, apart, backend):
    """Divergences between close models are accurate; the gradient p - q of a forward KL has the
    absolute accuracy of p only."""
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
    if gap < 30:  # In float32, gaps up to 24 between the two largest logits are accurate.
        # The loss is quadratic in `apart`, the size of the logit differences between the models.
        assert error(out.loss, oracle.loss) <= 1e-6 / apart**2
        assert kind == "forward_kl" or error(hidden.grad, want) <= 1e-6 / apart
