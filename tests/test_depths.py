"""Multi-token prediction is one call: the rows of all prediction depths are concatenated, with a
weight per row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import headloss as hl

D, T, H, V, SCALE = 3, 21, 8, 33, 0.3


@pytest.mark.parametrize("own_counts", [False, True])
def test_one_call_is_the_formula(own_counts: bool) -> None:
    """One call gives the loss of multi-token prediction: main loss + scale / D * (sum of the losses
    of D prediction depths).

    If `own_counts` is True, the summed loss of a depth is divided by its own token count, else
    by the main loss's token count.
    """
    torch.manual_seed(0)
    ids = torch.arange(3).repeat_interleave(torch.tensor([9, 1, 11]))
    main = torch.randint(V, (T,))
    main[5] = -100
    labels = main.expand(1 + D, T).clone()
    for k in range(1, 1 + D):
        labels[k, -k:] = -100
        labels[k, :-k] = torch.where(ids[k:] == ids[:-k], main[k:], -100)
    counts = (labels != -100).sum(1)
    factors = torch.tensor([1.0] + [SCALE / D] * D, dtype=torch.float64)
    factors /= counts if own_counts else counts[0]
    hidden = torch.randn(1 + D, T, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.float64, requires_grad=True)

    logits = hidden @ weight.T
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    want = (factors[:, None] * each.view(labels.shape)).sum()
    gradients = torch.autograd.grad(want, (hidden, weight))

    rows = factors[:, None].expand(labels.shape)
    batch = hl.Batch(labels, totals=hl.Totals(1, 1), row_weights=rows)
    out = hl.head_loss(
        hidden, hl.Head(weight), batch, hl.cross_entropy().weighted("row_weights")
    )
    out.loss.backward()
    assert out.plan.schedule == "one_pass"
    assert abs(out.loss - want) < 1e-14
    for got, gradient in zip((hidden.grad, weight.grad), gradients, strict=True):
        assert (got - gradient).norm() < 1e-14 * gradient.norm()
