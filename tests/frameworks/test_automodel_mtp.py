"""Automodel's `calculate_mtp_loss` with headloss's loss class on hidden states agrees with logits.
"""

from __future__ import annotations

import pytest
import torch
from parity import file_of

B, L, D, H, V = 2, 9, 3, 16, 64
NEAR = 2e-6


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(H, V, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("count", [None, 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_depths(packed: bool, count: int | None, weighted: bool) -> None:
    """Multi-token-prediction losses of each depth, and gradients of hidden states and head, agree
    with Automodel's masked cross-entropy."""
    file_of("nemo_automodel", "components/loss/mtp.py")
    mtp = pytest.importorskip("nemo_automodel.components.loss.mtp")
    masked = pytest.importorskip("nemo_automodel.components.loss.masked_ce")
    from headloss.integrations.nemo_automodel import HeadLossCrossEntropy

    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.lm_head.weight.normal_()
    depths = [torch.randn(B, L, H) for _ in range(D)]
    labels = torch.randint(V, (B, L))
    labels[0, :3] = -100
    more = {"seq_idx": torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 7])} if packed else {}
    if weighted:
        more["loss_weights"] = torch.rand(B, L)
    found = []
    for loss_fn in (masked.MaskedCrossEntropy(), HeadLossCrossEntropy()):
        leaves = [h.clone().requires_grad_() for h in depths]
        model.zero_grad()
        loss = mtp.calculate_mtp_loss(
            loss_fn, mtp_per_depth_h=leaves, labels=labels, model=model, scaling_factor=0.3,
            num_label_tokens=count, return_per_depth=True, **more,
        )  # fmt: skip
        loss.loss.backward()
        found.append(
            [loss.loss.detach(), torch.stack(loss.per_depth_losses).detach()]
            + [leaf.grad for leaf in leaves]
            + [model.lm_head.weight.grad]
        )
    for want, got in zip(*found, strict=True):
        assert (got.double() - want.double()).norm() < NEAR * want.double().norm()
