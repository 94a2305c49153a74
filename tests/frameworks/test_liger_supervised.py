"""Terms agree with Liger's fused linear cross-entropy, with its Triton kernels in the interpreter.

Liger computes in float32, so values agree to 1e-5. Liger's class weights and soft cap are not
compared, since they do not run in the interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headloss as hl

ops = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy")
N, V, H = 9, 23, 5


def problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator).requires_grad_()
    weight = torch.randn(V, H, generator=generator).requires_grad_()
    labels = torch.randint(V, (N,), generator=generator)
    labels[::4] = -100
    return hidden, weight, labels


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, **options) -> list[Tensor]:
    names = ("bias", "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing")
    names += ("reduction", "softcap", "return_z_loss", "accum_dtype", "use_token_scaling")
    given = {"ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0}
    given |= {"reduction": "mean", "return_z_loss": False, "use_token_scaling": False, **options}
    found = ops.LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, labels, *(given.get(name) for name in names)
    )
    loss = found[0] if isinstance(found, tuple) else found
    return [loss, *torch.autograd.grad(loss, (hidden, weight))]


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({}, hl.cross_entropy()),
        ({"label_smoothing": 0.1}, hl.cross_entropy(label_smoothing=0.1)),
        ({"lse_square_scale": 1e-2}, hl.cross_entropy() + 1e-2 * hl.z_loss()),
        ({"use_token_scaling": True}, hl.dft()),
    ],
    ids=["plain", "smoothed", "z_loss", "token_scaling"],
)
def test_cross_entropy(options, term) -> None:
    """Cross-entropy agrees with Liger's fused linear cross-entropy in loss and gradients, for each
    option."""
    hidden, weight, labels = problem()
    want = fused(hidden, weight, labels, **options)
    out = hl.head_loss(hidden, hl.Head(weight), hl.Batch(labels), term)
    got = [out.loss, *torch.autograd.grad(out.loss, (hidden, weight))]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
