"""Terms agree with SkyRL's loss functions.

The tests extract these functions from SkyRL's source files, since importing the package `skyrl`
would import its inference engines.

SkyRL computes ratios in float32, so the tolerance is larger.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from parity import EDGES, B, Step, compare, extracted, file_of, step

import headloss as hl

UTILS = "backends/skyrl_train/utils"
NEAR = 3e-7
# Prompt of each row: -1 marks a row without a prompt, and the last row has no scored tokens.
PROMPTS = torch.tensor([4, 4, -1, -1, 0])
BOUNDARIES = [(0, 2), (2, 4), (4, 5)]


@pytest.fixture(scope="module")
def peer() -> SimpleNamespace:
    shared = extracted(file_of("skyrl", f"{UTILS}/torch_utils.py"), "masked_mean", "safe_exp_delta")
    return extracted(
        file_of("skyrl", f"{UTILS}/ppo_utils.py"),
        *("importance_sampling_loss", "rollout_is_policy_loss", "compute_policy_loss_cispo"),
        *("apply_loss_reduction_to_advantages_minibatch", "reduce_loss"),
        PolicyLossType=MagicMock(),
        register_policy_loss=lambda name: lambda function: function,
        apply_off_policy_correction=lambda loss, old, sampling, mask, config: (loss, mask, {}),
        **vars(shared),
    )


def options(**more: Any) -> SimpleNamespace:
    none = SimpleNamespace(tis_ratio_type=None)
    return SimpleNamespace(eps_clip_low=0.3, eps_clip_high=0.4, off_policy_correction=none, **more)


def scaled(peer: SimpleNamespace, made: Step, over: str) -> torch.Tensor:
    """Return the advantages after SkyRL's scaling, which turns a plain sum over tokens into the
    loss reduction `over`."""
    given = made["advantages"], made["mask"].double(), over, B, made["mask"].shape[1], BOUNDARIES
    return peer.apply_loss_reduction_to_advantages_minibatch(*given)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("over", ["prompt_mean", "token_mean", "sequence_mean"])
def test_reductions(peer: SimpleNamespace, edge: str, over: str) -> None:
    """REINFORCE agrees with SkyRL's loss reductions over tokens, sequences and prompts."""
    made = step(edge)
    advantages, mask = scaled(peer, made, over), made["mask"].double()

    def loss(logp: torch.Tensor) -> torch.Tensor:
        return peer.reduce_loss(-advantages * logp, mask)

    compare(hl.reinforce().over(over), made, loss, prompts=PROMPTS)


def test_prompt_mean_over_segments_that_are_whole_prompts(peer: SimpleNamespace) -> None:
    """A mean per prompt equals a sequence mean, if all answers to a prompt are one segment."""
    made = step()
    advantages, mask = scaled(peer, made, "prompt_mean"), made["mask"]
    want = (-advantages * made["logp"])[mask].sum()
    ids = torch.tensor([0, 0, 1, 1, 2])[:, None].expand(mask.shape)
    batch = hl.Batch(
        torch.where(mask, 0, -100),
        hl.Segments.from_ids(ids, 3),
        advantages=made["advantages"],
        logps=made["logp"],
    )

    @hl.term(reduction="sequence_mean")
    def known(stats, batch):
        return -batch.advantages * batch.logps + 0 * stats.logp

    logits = torch.zeros(*mask.shape, 2, dtype=torch.float64)
    torch.testing.assert_close(hl.logits_loss(logits, batch, known()).loss, want)


@pytest.mark.parametrize("edge", EDGES[:3])
def test_importance_sampling(peer: SimpleNamespace, edge: str) -> None:
    """DPPO with bounds of 1 on the probability difference agrees with SkyRL's importance-sampling
    loss."""
    made = step(edge)
    term = hl.dppo(delta_low=1.0, delta_high=1.0, ratio_max=None, surrogate="ratio")
    mask = made["mask"].double()

    def loss(logp: torch.Tensor) -> torch.Tensor:
        given = logp, made["old_logps"], made["advantages"], options(), mask
        return peer.importance_sampling_loss(*given)[0]

    compare(term, made, loss, totals=hl.Totals(1, 1))


@pytest.mark.parametrize("edge", EDGES)
def test_rollout_is(peer: SimpleNamespace, edge: str) -> None:
    """SkyRL's `rollout_is` agrees, with the sampler's log-probs as old_logps."""
    made = step(edge)
    mask, turned = made["mask"].double(), {**made, "old_logps": made["sampling_logps"]}

    def loss(logp: torch.Tensor) -> torch.Tensor:
        given = logp, made["old_logps"], made["advantages"], options(), mask
        return peer.rollout_is_policy_loss(*given, made["sampling_logps"])[0]

    compare(hl.icepop(alpha=0.7, beta=1.4), turned, loss, NEAR, totals=hl.Totals(1, 1))


@pytest.mark.parametrize("edge", EDGES)
def test_cispo_on_the_sampler(peer: SimpleNamespace, edge: str) -> None:
    """CISPO with the sampler's log-probs as `old_logps` agrees with SkyRL's rollout-anchored
    CISPO."""
    made = step(edge)
    mask, turned = made["mask"].double(), {**made, "old_logps": made["sampling_logps"]}
    bounds = SimpleNamespace(
        cispo_anchor="rollout", cispo_eps_clip_low=0.3, cispo_eps_clip_high=0.4
    )

    def loss(logp: torch.Tensor) -> torch.Tensor:
        given = logp, made["old_logps"], made["advantages"], options(cispo=bounds), mask
        return peer.compute_policy_loss_cispo(*given, made["sampling_logps"])[0]

    term = hl.cispo(epsilon_low=0.3, epsilon_high=0.4)
    compare(term, turned, loss, NEAR, totals=hl.Totals(1, 1))


@pytest.mark.parametrize("edge", EDGES)
def test_outliers(peer: SimpleNamespace, edge: str) -> None:
    """Sequences with a token ratio outside of [0.6, 1.8] are left out of the loss's sum, but their
    tokens still count in its denominator."""
    made = step(edge)
    file = file_of("skyrl", f"{UTILS}/off_policy_correction_utils.py")
    names = {"safe_exp_delta": peer.importance_sampling_loss.__globals__["safe_exp_delta"]}
    outliers = extracted(file, "compute_outlier_token_mask", Tuple=tuple, **names)
    bounds = SimpleNamespace(
        outlier_token_is_threshold_low=0.6, outlier_token_is_threshold_high=1.8
    )
    mask = made["mask"].double()
    given = made["old_logps"], made["sampling_logps"], mask, bounds
    kept, _ = outliers.compute_outlier_token_mask(*given)

    def loss(logp: torch.Tensor) -> torch.Tensor:
        ratio, a = (logp - made["old_logps"]).clamp(-20, 20).exp(), made["advantages"]
        value = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
        return (value * mask * kept).sum() / mask.sum()

    compare(hl.ppo().weighted("inside"), made, loss, inside=kept.double().squeeze(1))
