"""Terms agree with the loss function of Liger's fused GRPO."""

from __future__ import annotations

from typing import Any

import pytest
from parity import B, Step, compare, step
from torch import Tensor

import headloss as hl

pytest.importorskip("liger_kernel", reason="`make test-frameworks` compares with Liger")
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

CLIP = {"epsilon_low": 0.15, "epsilon_high": 0.25}


def liger(made: Step, **options: Any):
    def loss(logp: Tensor) -> Tensor:
        mask = made["mask"].double()
        return LigerFusedLinearGRPOFunction.ppo_loss_fn(
            logp,
            mask,
            made["advantages"][:, 0],
            mask,
            ref_per_token_logps=made["ref_logps"],
            old_per_token_logps=made["old_logps"],
            **{"beta": 0.0, **CLIP, **options},
        )[0]

    return loss


TERMS: dict[str, tuple[hl.Term, dict[str, Any]]] = {
    "grpo": (hl.grpo(**CLIP), {}),
    "bnpo": (hl.bnpo(**CLIP), {}),
    "dapo": (hl.dapo(**CLIP), {}),
    "dr_grpo": (hl.dr_grpo(max_completion_length=9, **CLIP), {"max_completion_length": 9}),
    "luspo": (hl.luspo(**CLIP), {"importance_sampling_level": "sequence"}),
    "cispo": (hl.cispo(epsilon_high=0.25), {"epsilon_high": 1.25}),
    "sapo": (hl.sapo(), {}),
    "vespo": (hl.vespo(), {}),
}


@pytest.mark.parametrize("edge", ["random", "clipped", "one token"])
@pytest.mark.parametrize("name", TERMS)
def test_loss_type(name: str, edge: str) -> None:
    """Policy terms agree with Liger's fused GRPO loss of each `loss_type`."""
    term, options = TERMS[name]
    made = step(edge, per_token=False)
    if name == "vespo":  # compute VESPO's weight without the sampler's log-probs
        del made["sampling_logps"]
    compare(term, made, liger(made, loss_type=name, **options))


@pytest.mark.parametrize("edge", ["random", "clipped", "one token"])
def test_gspo(edge: str) -> None:
    """GSPO agrees with Liger's fused GRPO loss with one ratio per sequence."""
    made = step(edge, per_token=False)
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    compare(hl.gspo(**CLIP), made, liger(made, **options))


@pytest.mark.parametrize("corrected", [False, True])
def test_kl_delta_and_sampler(corrected: bool) -> None:
    """GRPO with an upper clip `delta`, truncated importance weights of the sampler and a KL penalty
    agrees with Liger's fused GRPO loss."""
    made = step(per_token=False)
    ratio = (made["old_logps"] - made["sampling_logps"]).exp().clamp(max=1.4)
    options = {"beta": 0.1, "use_bias_correction_kl": corrected, "delta": 1.3}
    want = liger(made, loss_type="grpo", vllm_is_ratio=ratio, **options)
    term = hl.grpo(delta=1.3, **CLIP).corrected("token_truncate", max=1.4)
    kl = hl.kl(estimator="k3", bias_corrected=corrected).over("sequence_mean")
    compare(term + 0.1 * kl, made, want)
    assert len(made["mask"]) == B
