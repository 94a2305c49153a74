"""Terms agree with Axolotl's float32 losses, which are extracted from Axolotl's source files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from losses_case import assert_same, value_and_gradient
from parity import extracted, file_of
from torch import Tensor

import headloss as hl

B, C, H, V = 3, 6, 5, 29
NEAR = 1e-5


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a weight, and labels with ignored positions."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, C, H, generator=generator).double().requires_grad_()
    weight = torch.randn(V, H, generator=generator).double()
    labels = torch.randint(V, (B, C), generator=generator)
    return hidden, weight, labels.masked_fill(torch.arange(C) % 4 == 2, -100)


def theirs(name: str, **options: float) -> list[Tensor]:
    peer = extracted(file_of("axolotl", f"monkeypatch/loss/{name}.py"), f"{name}_loss")
    hidden, weight, labels = problem()
    outputs = SimpleNamespace(logits=hidden @ weight.t())
    return value_and_gradient(getattr(peer, f"{name}_loss")(outputs, labels, **options), hidden)


def ours(objective: hl.Term, **fields: Tensor) -> list[Tensor]:
    hidden, weight, labels = problem()
    batch = hl.Batch.from_labels(labels, align="targets", **fields)
    out = hl.head_loss(hidden, hl.Head(weight), batch, objective)
    return value_and_gradient(out.loss, hidden)


def test_dft() -> None:
    """DFT agrees with Axolotl's, in loss and gradients."""
    assert_same(ours(hl.dft()), theirs("dft"), NEAR)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_eaft(alpha: float) -> None:
    """EAFT agrees with Axolotl, with weights from the 20 likeliest tokens found by `head_topk`."""
    hidden, weight, _ = problem()
    top = hl.head_topk(hidden.detach(), hl.Head(weight), 20).logps.log_softmax(-1)
    weights = (-(top.exp() * top).sum(-1)) ** alpha
    got = ours(hl.cross_entropy().weighted("weights"), weights=weights)
    assert_same(got, theirs("eaft", alpha=alpha), NEAR)
