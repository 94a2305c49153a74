"""Liger's fused distillation loss, called on a CPU, against terms; in float64."""

from __future__ import annotations

import pytest
import torch

import headloss as hl

chunked = pytest.importorskip("liger_kernel.chunked_loss")
N, V, H = 12, 23, 5


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_jsd(beta: float, temperature: float) -> None:
    """The hard part is at temperature 1, the soft one has no factor of T^2."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(N, H).requires_grad_(), normal(V, H).requires_grad_()
    teacher_hidden, teacher_weight = normal(N, 2 * H), normal(V, 2 * H)
    labels = torch.randint(V, (N,), generator=generator)
    labels[::4] = -100
    loss = chunked.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.2, weight_soft_loss=0.8, beta=beta, temperature=temperature,
        compiled=False, chunk_size=5,
    )  # fmt: skip
    want = loss(hidden, weight, teacher_hidden, teacher_weight, labels)
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "js")
    soft = hl.distillation(
        divergence=kind, beta=beta if kind == "js" else 0.5, temperature=temperature,
        teacher_head=hl.Head(teacher_weight),
    )  # fmt: skip
    batch = hl.Batch(labels, teacher_hidden=teacher_hidden)
    out = hl.head_loss(hidden, hl.Head(weight), batch, 0.2 * hl.cross_entropy() + 0.8 * soft)
    wanted = (want, *torch.autograd.grad(want, (hidden, weight)))
    found = (out.loss, *torch.autograd.grad(out.loss, (hidden, weight)))
    for a, b in zip(found, wanted, strict=True):  # the hard part goes through float32
        torch.testing.assert_close(a, b.double(), rtol=1e-5, atol=1e-6)
