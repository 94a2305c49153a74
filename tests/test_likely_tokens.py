"""The gradient of a nearly certain token keeps the accuracy of 1 - p if the backward pass
recomputes logits with different rounding.

T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, error

import headloss as hl
from headloss.head import products
from headloss.kernels import reference
from headloss.kernels import triton as triton_backend
from headloss.testing import plain

T, H, V = 8, 64, 80
ULPS = 2  # largest difference between products
SCHEDULES = {
    "recompute": hl.Options(schedule="recompute", memory_budget=3000),
    "chunks": hl.Options(schedule="one_pass", chunk_tokens=4),
}


@hl.term
def first_candidate(stats, batch):
    return -stats.candidate_logps[:, 0]


OBJECTIVES = {
    "cross_entropy": hl.cross_entropy(),
    "entropy": hl.entropy(),
    "candidate": first_candidate(),
    "forward_kl": hl.distillation(divergence="forward_kl"),
    "reverse_kl": hl.distillation(divergence="reverse_kl"),
    "js": hl.distillation(divergence="js"),
    "support": hl.cross_entropy(),
}
EXACT = ("cross_entropy", "support")  # losses whose gradient at the target is exactly c (p - 1)


@pytest.fixture
def rounded_anew(monkeypatch):
    """Patch the matmuls that compute logits, so that each matmul adds new random rounding errors
    to its logits."""
    generator = torch.Generator().manual_seed(9)

    def anew(product):
        def rounded(*args, **options) -> Tensor:
            z = product(*args, **options)
            ulps = torch.randint(-ULPS, ULPS + 1, z.shape, generator=generator).to(z.device)
            return z + ulps * 2.0**-24 * z.abs()

        return rounded

    monkeypatch.setattr(products.PLAIN, "logits", anew(products.PLAIN.logits))
    for backend in (reference, triton_backend):
        monkeypatch.setattr(backend, "support_logits", anew(backend.support_logits))


def case(name: str) -> tuple[Tensor, Tensor, hl.Batch]:
    """Return tokens whose likeliest column has probability above 1 - 1e-6; for the losses in
    `EXACT` this column is the target."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.functional.normalize(torch.randn(V, H, generator=generator))
    likely = torch.randint(V, (T,), generator=generator)
    hidden = 40 * weight[likely] + 0.1 * torch.randn(T, H, generator=generator)
    noise = torch.randn(T, V, generator=generator)
    fields = {}
    targets = likely if name in EXACT else (likely + 1) % V
    if name == "candidate":
        fields["candidate_ids"] = torch.stack([likely, (likely + 3) % V], 1)
    elif name == "support":
        fields["support_ids"] = (hidden @ weight.t()).topk(3, 1).indices
    elif name in ("forward_kl", "reverse_kl", "js"):
        # Keep the teacher far from the student: close to it the gradient of a JS divergence, p (log
        # p - log q) / 4, is inaccurate in any implementation.
        apart = (noise + noise.sign()).scatter(1, likely.unsqueeze(1), 0.0)
        fields["teacher_logits"] = (hidden @ weight.t() + apart).to(DEVICE)
    fields = {key: value.to(DEVICE) for key, value in fields.items()}
    return hidden.to(DEVICE), weight.to(DEVICE), hl.Batch(targets.to(DEVICE), **fields)


@pytest.mark.parametrize(
    ("schedule", "backend"),
    [("recompute", "reference"), ("chunks", "reference"), ("recompute", "triton")],
)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_a_likely_token_is_within_budget(rounded_anew, name, schedule, backend):
    hidden, weight, batch = case(name)
    options = replace(SCHEDULES[schedule], backend=backend)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    oracle = plain(leaves[0], hl.Head(leaves[1]), batch, OBJECTIVES[name], "float64")
    coarse = plain(leaves[0], hl.Head(leaves[1]), batch, OBJECTIVES[name], "input")
    out = hl.head_loss(leaves[0], hl.Head(leaves[1]), batch, OBJECTIVES[name], options)
    out.loss.backward()
    likely = (hidden.double() @ weight.double().t()).softmax(1).amax(1)
    assert (likely > 1 - 1e-6).all()
    off = 4 * ULPS * 2.0**-24 * float((hidden @ weight.t()).abs().max())
    for key, leaf in zip(("hidden", "weight"), leaves, strict=True):
        want = oracle.gradients[key]
        theirs = 0.0 if name in EXACT else 3 * error(coarse.gradients[key], want)
        assert error(leaf.grad, want) <= theirs + off, key
