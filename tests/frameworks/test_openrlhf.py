"""Terms agree with OpenRLHF's loss modules.

The tests extract these modules from OpenRLHF's source files, since the package needs a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losses_case import assert_same, value_and_gradient
from parity import EDGES, Step, batch_of, compare, extracted, file_of, filled_rows, step, theirs
from torch import Tensor

import headloss as hl


@pytest.fixture(scope="module")
def peer() -> SimpleNamespace:
    utils = extracted(
        file_of("openrlhf", "models/utils.py"),
        "masked_mean",
        "compute_approx_kl",
        KL_IS_WEIGHT_CLIP=10.0,
    )
    names = ("aggregate_loss", "PolicyLoss", "ValueLoss", "PairWiseLoss", "LogExpLoss", "SFTLoss")
    losses = extracted(
        file_of("openrlhf", "models/loss.py"), *names, masked_mean=utils.masked_mean
    )
    return SimpleNamespace(**vars(utils), **vars(losses))


def policy(peer: SimpleNamespace, made: Step, **options: Any):
    module = peer.PolicyLoss(**options)

    def loss(logp: Tensor) -> Tensor:
        return module(
            logp,
            made["old_logps"],
            made["advantages"],
            made["mask"].double(),
            made["sampling_logps"],
        )[0]

    return loss


CLIP = {"clip_eps_low": 0.15, "clip_eps_high": 0.25}
OURS = {"epsilon_low": 0.15, "epsilon_high": 0.25}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("token_level", [True, False])
def test_ppo(peer: SimpleNamespace, edge: str, dual: float | None, token_level: bool) -> None:
    """PPO with dual clip agrees with OpenRLHF's policy loss, as a mean over tokens or sequences."""
    made = step(edge)
    term = hl.ppo(dual_clip=dual, **OURS).over("token_mean" if token_level else "sequence_mean")
    want = policy(peer, made, dual_clip=dual, token_level_loss=token_level, **CLIP)
    compare(term, made, want, 1e-7, totals=filled_rows(made))


@pytest.mark.parametrize("edge", ["random", "clipped", "one token"])
def test_gspo(peer: SimpleNamespace, edge: str) -> None:
    """GSPO agrees with OpenRLHF's."""
    made = step(edge, per_token=False)
    want = policy(peer, made, policy_loss_type="gspo", **CLIP)
    compare(hl.gspo(**OURS), made, want, 1e-7, totals=filled_rows(made))


CORRECTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "TIS": (
        {"level": "token", "mode": "clip", "threshold": [0.7, 1.4]},
        lambda t: t.corrected("token_truncate", min=0.7, max=1.4),
    ),
    "IcePop": (
        {"level": "token", "mode": "mask", "threshold": [0.7, 1.4]},
        lambda t: t.corrected("token_mask", min=0.7, max=1.4),
    ),
    "seq-mask-TIS": (
        {"level": "seq", "mode": "mask", "threshold": [0.9, 1.2]},
        lambda t: t.corrected("token_truncate", max=None).rejected(
            "ratio", "sequence_mean", min=0.9, max=1.2
        ),
    ),
    "binary KL": (
        {"level": "seq", "mode": "mask", "gating": "binary_kl", "threshold": [0.0, 0.02]},
        lambda t: t.corrected("token_truncate", max=None).rejected(
            "kl", "sequence_mean", max=0.02
        ),
    ),
    "TV": (
        {"level": "token", "mode": "mask", "gating": "tv", "threshold": [0.0, 0.05]},
        lambda t: t.corrected("token_truncate", max=None).rejected("tv", max=0.05),
    ),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction(peer: SimpleNamespace, name: str) -> None:
    """Importance weights of the sampler agree with each of OpenRLHF's corrections."""
    options, modified = CORRECTIONS[name]
    options = {f"is_correction_{key}": value for key, value in options.items()}
    for seed in range(3):
        made = step(seed=seed)
        want = policy(peer, made, **options, **CLIP)
        compare(modified(hl.ppo(**OURS)), made, want, 1e-7)


KL = {"k1": 1e-6, "k2": 1e-6, "k3": 1e-6}  # float32 in OpenRLHF


@pytest.mark.parametrize("scale", [0.4, 6.0])
@pytest.mark.parametrize("estimator", KL)
def test_kl(peer: SimpleNamespace, estimator: str, scale: float) -> None:
    """KL estimators agree with OpenRLHF's, also with clamped log-ratios."""
    made = step(scale=scale)

    def loss(logp: Tensor) -> Tensor:
        values = peer.compute_approx_kl(logp, made["ref_logps"], kl_estimator=estimator)
        return peer.masked_mean(values, made["mask"].double(), dim=None)

    term = hl.kl(estimator=estimator, clamp=10)  # type: ignore[arg-type]
    compare(term, made, loss, 3e-6)


@pytest.mark.parametrize("estimator", KL)
@pytest.mark.parametrize("off_policy", [False, True])
def test_kl_with_unbiased_gradient(
    peer: SimpleNamespace, estimator: str, off_policy: bool
) -> None:
    """KL estimators with an unbiased gradient agree with OpenRLHF's, on and off policy."""
    made = step()
    old = made["old_logps"] if off_policy else None

    def loss(logp: Tensor) -> Tensor:
        values = peer.compute_approx_kl(logp, made["ref_logps"], old, estimator, True)
        return peer.masked_mean(values, made["mask"].double(), dim=None)

    options: dict[str, Any] = {"bias_corrected": True, "ratio_max": 10} if off_policy else {}
    term = hl.kl(estimator=estimator, clamp=10, straight_through=True, **options)  # type: ignore[arg-type]
    compare(term, made, loss, 3e-6)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("token_level", [True, False])
def test_value_loss(peer: SimpleNamespace, clip: float | None, token_level: bool) -> None:
    """The value loss agrees with OpenRLHF's, with and without clipping, in value and gradient."""
    made = step()
    module = peer.ValueLoss(clip, token_level)
    old, returns = made["old_logps"], made["ref_logps"]
    want = theirs(made, lambda v: module(v, old, returns, made["mask"].double()))
    batch = hl.Batch(
        torch.where(made["mask"], 0, -100),
        returns=returns,
        old_values=old,
        totals=filled_rows(made),
    )
    leaf = made["logp"].clone().requires_grad_()
    over = "token_mean" if token_level else "sequence_mean"
    value = hl.value_loss(leaf, batch, clip=clip, reduction=over)
    value, gradient = value_and_gradient(value, leaf)
    assert_same([value, gradient[made["mask"]]], want, 1e-7)


@pytest.mark.parametrize("module", ["PairWiseLoss", "LogExpLoss"])
def test_reward_model(peer: SimpleNamespace, module: str) -> None:
    """The Bradley-Terry loss agrees with OpenRLHF's pairwise losses, with and without a margin, in
    value and gradient."""
    rewards = torch.randn(6, dtype=torch.float64, requires_grad=True)
    margin = torch.rand(3, dtype=torch.float64) if module == "PairWiseLoss" else None
    want = getattr(peer, module)()(rewards[::2], rewards[1::2], margin)
    fields = {} if margin is None else {"margin": margin.repeat_interleave(2)}
    batch = hl.Batch(torch.zeros(6, 2).long(), **fields)  # type: ignore[arg-type]
    got = hl.bradley_terry(rewards, batch)
    assert_same(value_and_gradient(got, rewards), value_and_gradient(want, rewards))


@pytest.mark.parametrize("token_level", [True, False])
def test_sft(peer: SimpleNamespace, token_level: bool) -> None:
    """Cross-entropy agrees with OpenRLHF's supervised loss, as a mean over tokens or sequences."""
    made = step()
    module = peer.SFTLoss(token_level)
    term = hl.cross_entropy().over("token_mean" if token_level else "sequence_mean")
    want = lambda logp: module(logp, made["mask"].double())  # noqa: E731
    compare(term, made, want, 1e-7, totals=filled_rows(made))
    assert batch_of(made, "packed").segments.count == len(made["mask"])
