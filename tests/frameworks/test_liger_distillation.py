"""Distillation terms agree with Liger's fused distillation losses.

Liger's chunked loss runs on a CPU in float64, its Triton kernels in the float32 interpreter.
"""

from __future__ import annotations

import pytest
import torch

import headloss as hl

chunked = pytest.importorskip("liger_kernel.chunked_loss")
N, V, H = 12, 23, 5


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_jsd(beta: float, temperature: float) -> None:
    """Liger's JSD agrees: cross-entropy on labels uses temperature 1, and the divergence from the
    teacher is not multiplied by T^2."""
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
    # Liger computes the cross-entropy on labels in float32
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.double(), rtol=1e-5, atol=1e-6)


def kernels(name: str):
    return pytest.importorskip(f"liger_kernel.ops.{name}")


def single() -> tuple[torch.Tensor, ...]:
    """Return hidden states and weights of student and teacher, and labels with ignored
    positions."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, H), (V, H), (N, 2 * H), (V, 2 * H))
    made = [torch.randn(*shape, generator=generator) for shape in shapes]
    labels = torch.randint(V, (N,), generator=generator)
    labels[::4] = -100
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2], made[3], labels


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_fused_linear_jsd(beta: float) -> None:
    """Liger's fused linear JSD agrees; `beta` is the teacher's weight: 0 gives forward KL, 1
    reverse KL."""
    hidden, weight, teacher_hidden, teacher_weight, labels = single()
    function = kernels("fused_linear_jsd").LigerFusedLinearJSDFunction
    inputs = (hidden, weight, teacher_hidden, teacher_weight, labels)
    want = function.apply(*inputs, beta, -100, 2.0)
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "js")
    head = hl.Head(teacher_weight)
    share = {"beta": beta} if kind == "js" else {}
    term = hl.distillation(divergence=kind, temperature=2.0, teacher_head=head, **share)
    batch = hl.Batch(labels, teacher_hidden=teacher_hidden)
    out = hl.head_loss(hidden, hl.Head(weight), batch, term)
    assert_near(out.loss, want, hidden, weight)


def test_fused_linear_kl_div() -> None:
    """Liger's fused linear KL divergence agrees, with a target probability for each vocabulary
    token."""
    hidden, weight, teacher_hidden, teacher_weight, labels = single()
    target = (teacher_hidden @ teacher_weight.t()).softmax(1)
    function = kernels("fused_linear_kl_div").LigerFusedLinearKLDivFunction
    want = function.apply(hidden, weight, target, labels, "batchmean", -100, 2.0)
    term = hl.distillation(temperature=2.0)
    batch = hl.Batch(labels, teacher_logits=2.0 * target.log())
    out = hl.head_loss(hidden, hl.Head(weight), batch, term)
    assert_near(out.loss, want, hidden, weight)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, *leaves: torch.Tensor) -> None:
    got, want = (torch.autograd.grad(x, leaves) for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
