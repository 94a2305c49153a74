"""A distillation term agrees with verl's top-k distillation.

verl sums q (log q - log p) over only the teacher's top k, in float32, and clamps the sum at 0.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from parity import compare, step

import headloss as hl

losses = pytest.importorskip("verl.trainer.distillation.fsdp.losses")
N, V, H, K = 14, 23, 5, 6


def test_forward_kl_topk() -> None:
    """verl's forward KL over the teacher's top k agrees.

    If the student puts more mass on the stored tokens than the teacher, verl's sum over them is
    negative; verl clamps it to 0, which stops the gradient.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(N, H).requires_grad_(), normal(V, H).requires_grad_()
    of_student = (hidden @ weight.t()).detach()
    log_q, ids = (0.5 * of_student + 0.5 * normal(N, V)).log_softmax(1).topk(K)
    logits = (hidden @ weight.t()).unsqueeze(0)
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None, topk=K))
    found = losses.compute_forward_kl_topk(
        student_logits=logits,
        teacher_topk_log_probs=torch.nested.as_nested_tensor([log_q], layout=torch.jagged),
        teacher_topk_ids=torch.nested.as_nested_tensor([ids], layout=torch.jagged),
        config=config,
        data_format="thd",
    )
    whole = found["distillation_losses"].squeeze(0)
    assert (whole < 0).any() and (whole > 0).any()
    want = whole.clamp_min(0).mean()  # verl clamps each token's loss at 0.
    # `tail="clamped"` counts the remaining vocabulary as one more outcome, so no token's divergence
    # is negative.
    batch = hl.Batch(ids[:, 0].contiguous(), teacher_topk_ids=ids, teacher_topk_logps=log_q)
    out = hl.head_loss(hidden, hl.Head(weight), batch, hl.distillation(tail="clamped"))
    torch.testing.assert_close(out.loss, want.double(), rtol=1e-5, atol=1e-7)
    exact = hl.head_loss(hidden, hl.Head(weight), batch, hl.distillation())
    both = float(out.loss), float(exact.loss), int((whole < 0).sum())
    assert both == pytest.approx((0.12615, 0.33947, 4), abs=1e-4)
    leaves = (hidden, weight)
    for a, b in zip(
        torch.autograd.grad(out.loss, leaves), torch.autograd.grad(want, leaves), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


ESTIMATORS = {
    "k1": hl.kl(),
    "k2": hl.kl(estimator="k2"),
    "abs": hl.kl(estimator="abs"),
    "k3": hl.kl(estimator="k3", clamp_difference=20, clamp=10),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_reverse_kl_estimators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's estimators of reverse KL at sampled tokens agree, with the teacher's log-probs as
    reference log-probs."""
    registered = pytest.importorskip("verl.trainer.distillation.losses")
    monkeypatch.setattr(registered, "no_padding_2_padding", lambda x, data: x)
    made = step()
    config = SimpleNamespace(distillation_loss=SimpleNamespace(loss_mode=name))
    data = {"teacher_logprobs": made["ref_logps"].unsqueeze(-1), "response_mask": made["mask"]}

    def loss(logp: torch.Tensor) -> torch.Tensor:
        function = registered.get_distillation_loss_fn(name)
        values = function(None, config, {"log_probs": logp}, data)[0]
        return values[made["mask"]].mean()

    compare(ESTIMATORS[name], made, loss)
