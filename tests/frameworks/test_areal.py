"""Terms agree with AReaL's loss functions.

The tests extract these functions from AReaL's source files, since importing AReaL's actor would
import its inference engines.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from parity import EDGES, batch_of, compare, extracted, file_of, step
from torch import Tensor

import headloss as hl

ACTOR = "trainer/ppo/actor.py"


@pytest.fixture(scope="module")
def peer() -> SimpleNamespace:
    return extracted(file_of("areal", ACTOR), "_apply_m2po_masking", "_get_m2po_loss_mask")


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("threshold", [1e-5, 0.04, 0.3, 100.0])
def test_m2po(peer: SimpleNamespace, edge: str, threshold: float) -> None:
    """M2PO agrees with AReaL, whose proximal policy is the trainer's and whose old policy is the
    sampler's."""
    made = step(edge, scale=0.6)
    sampling, old = made["sampling_logps"], made["old_logps"]
    want = peer._apply_m2po_masking(sampling, old, made["mask"], threshold)
    kept = hl.second_moment_mask(batch_of(made, "padded"), threshold=threshold)
    assert torch.equal(kept, want)
    term = hl.ppo().where("kept")

    def loss(logp: Tensor) -> Tensor:
        ratio, a = (logp - old).clamp(-20, 20).exp(), made["advantages"]
        value = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
        return (value * want).sum() / want.sum()

    compare(term, made, loss, kept=kept)
