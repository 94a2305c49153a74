"""Terms agree with NeMo-RL's loss functions, which are extracted from its sources because NeMo-RL
is not on PyPI.

NeMo-RL adds 1e-8 to token counts before it divides, so losses are compared to a relative error of
about 1e-8.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losses_case import assert_same, value_and_gradient
from parity import EDGES, B, C, Step, compare, extracted, file_of, ours, step, theirs
from torch import Tensor

import headloss as hl

CLIP = {"epsilon_low": 0.15, "epsilon_high": 0.25}
NEAR = 1e-7


class Kind(Enum):
    TOKEN_LEVEL = "token"
    SEQUENCE_LEVEL = "sequence"
    LOGPROB = "logprob"
    LOGIT = "logit"
    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


@pytest.fixture(scope="module")
def peer() -> SimpleNamespace:
    utils = extracted(
        file_of("nemo_rl", "nemo_rl/algorithms/utils.py"), "masked_mean", "calculate_kl"
    )
    return extracted(
        file_of("nemo_rl", "nemo_rl/algorithms/loss/loss_functions.py"),
        *("ClippedPGLossFn", "NLLLossFn", "PreferenceLossFn", "MseValueLossFn"),
        LossFunction=object,
        LossType=Kind,
        LossInputType=Kind,
        MetricNormalizer=Kind,
        **vars(utils),
    )


def policy(peer: SimpleNamespace, made: Step, filled: bool = False, **options: Any):
    """Return NeMo-RL's policy loss; with `filled`, rows without scored tokens are left out of the
    number of samples."""
    config = {
        "disable_ppo_ratio": False,
        "ratio_clip_min": 0.15,
        "ratio_clip_max": 0.25,
        "ratio_clip_c": None,
        "reference_policy_kl_penalty": 0.0,
        "use_kl_in_reward": False,
        "reference_policy_kl_type": "k3",
        "kl_input_clamp_value": 20.0,
        "kl_output_clamp_value": 10.0,
        "use_importance_sampling_correction": False,
        "truncated_importance_sampling_type": None,
        "truncated_importance_sampling_ratio": None,
        "truncated_importance_sampling_ratio_min": None,
        "use_on_policy_kl_approximation": False,
        "force_on_policy_ratio": False,
        "sequence_level_importance_ratios": False,
        "positive_example_nll_weight": 0.0,
        "token_level_loss": True,
        "use_cispo": False,
    }
    module = peer.ClippedPGLossFn(SimpleNamespace(**{**config, **options}))

    def shifted(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(B, 1, dtype=x.dtype), x], 1)

    data = {
        "token_mask": shifted(made["mask"].double()),
        "sample_mask": torch.ones(B, dtype=torch.float64),
        "advantages": shifted(made["advantages"]),
        "prev_logprobs": shifted(made["old_logps"]),
        "generation_logprobs": shifted(made["sampling_logps"]),
        "reference_policy_logprobs": shifted(made["ref_logps"]),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]),
    }

    def loss(logp: Tensor) -> Tensor:
        return module(logp, data, torch.tensor(float(B)), made["mask"].sum())[0]

    return loss


@pytest.mark.parametrize("edge", ["random", "clipped", "one token"])
@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("token_level", [True, False])
def test_clipped(peer: SimpleNamespace, edge: str, dual: float | None, token_level: bool) -> None:
    """PPO with dual clip agrees with NeMo-RL's clipped policy loss, as a mean over tokens or
    sequences."""
    made = step(edge)
    term = hl.ppo(dual_clip=dual, **CLIP).over("token_mean" if token_level else "sequence_mean")
    want = policy(peer, made, ratio_clip_c=dual, token_level_loss=token_level)
    compare(term, made, want, NEAR)


@pytest.mark.parametrize("edge", ["random", "clipped", "one token"])
def test_gspo(peer: SimpleNamespace, edge: str) -> None:
    """GSPO agrees with NeMo-RL's clipped policy loss with one ratio per sequence."""
    made = step(edge, per_token=False)
    options = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    compare(hl.gspo(**CLIP), made, policy(peer, made, **options), NEAR)


@pytest.mark.parametrize("edge", ["random", "clipped", "one token"])
def test_cispo(peer: SimpleNamespace, edge: str) -> None:
    """CISPO agrees with NeMo-RL's."""
    made = step(edge)
    compare(hl.cispo(**CLIP), made, policy(peer, made, use_cispo=True), NEAR)


@pytest.mark.parametrize("edge", EDGES)
def test_reinforce(peer: SimpleNamespace, edge: str) -> None:
    """REINFORCE agrees with NeMo-RL's policy loss without ratios."""
    made = step(edge)
    compare(hl.reinforce(), made, policy(peer, made, disable_ppo_ratio=True), NEAR)


def test_on_policy(peer: SimpleNamespace) -> None:
    """PPO with old log-probs equal to the current ones agrees with NeMo-RL's
    `force_on_policy_ratio`."""
    made = step()
    want = policy(peer, made, force_on_policy_ratio=True)
    compare(hl.ppo(**CLIP), {**made, "old_logps": made["logp"].clone()}, want, NEAR)


CORRECTIONS: dict[str, tuple[float | None, float, Any]] = {
    "tis": (None, 1.3, lambda t: t.corrected("token_truncate", max=1.3)),
    "icepop": (0.7, 1.4, lambda t: t.corrected("token_mask", min=0.7, max=1.4)),
    "seq-mask-tis": (
        0.9,
        1.1,
        lambda t: t.corrected("token_truncate", max=None).rejected(
            "ratio", "sequence_mean", min=0.9, max=1.1
        ),
    ),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction(peer: SimpleNamespace, name: str) -> None:
    """Truncated importance weights of the sampler agree with each of NeMo-RL's corrections."""
    low, high, modified = CORRECTIONS[name]
    for seed in range(3):
        made = step(seed=seed)
        want = policy(
            peer,
            made,
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type=name,
            truncated_importance_sampling_ratio=high,
            truncated_importance_sampling_ratio_min=low,
        )
        compare(modified(hl.ppo(**CLIP)), made, want, NEAR)


@pytest.mark.parametrize("scale", [0.4, 12.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("sampler", [False, True])
def test_kl(peer: SimpleNamespace, estimator: str, scale: float, sampler: bool) -> None:
    """KL estimators agree with NeMo-RL's, also with the gradient of sampling through an importance
    ratio."""
    made = step(scale=scale)
    made["sampling_logps"] = made["logp"] + 0.3 * torch.randn(B, C, dtype=torch.float64)
    options = {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": estimator}
    want = policy(peer, made, use_on_policy_kl_approximation=sampler, **options)
    bounds: Any = {"clamp_difference": 20, "clamp": 10, "bias_corrected": True}
    term = 0.1 * hl.kl(estimator=estimator, **bounds)  # type: ignore[arg-type]
    other = {**made, "old_logps": made["sampling_logps"] if sampler else made["logp"].clone()}
    want_ = theirs(made, want)
    for layout in ("padded", "packed"):
        surrogate = ours(hl.ppo(**CLIP), made, layout)
        found = [a + b for a, b in zip(surrogate, ours(term, other, layout), strict=True)]
        assert_same(found, want_, NEAR)


def test_likelihood_of_what_is_right(peer: SimpleNamespace) -> None:
    """VAPO's likelihood loss on right answers is cross-entropy restricted to samples with a
    reward."""
    made = step()
    want = policy(peer, made, positive_example_nll_weight=0.2)
    right = torch.tensor([True, False, True, False, False])
    term = hl.ppo(**CLIP) + 0.2 * hl.cross_entropy().where("right")
    compare(term, made, want, NEAR, right=right)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(peer: SimpleNamespace, clip: float | None) -> None:
    """The value loss agrees with NeMo-RL's, with and without clipping, in value and gradient."""
    made = step()
    module = peer.MseValueLossFn(SimpleNamespace(scale=1.0, cliprange=clip))
    data = {
        "token_mask": made["mask"].double(),
        "sample_mask": torch.ones(B),
        "returns": made["ref_logps"],
        "values": made["old_logps"],
    }
    want = theirs(made, lambda v: module(v, data, torch.tensor(B), made["mask"].sum())[0])
    batch = hl.Batch(
        torch.where(made["mask"], 0, -100), returns=made["ref_logps"], old_values=made["old_logps"]
    )
    leaf = made["logp"].clone().requires_grad_()
    value, gradient = value_and_gradient(hl.value_loss(leaf, batch, clip=clip), leaf)
    assert_same([value, gradient[made["mask"]]], want, NEAR)


def test_reward_model(peer: SimpleNamespace) -> None:
    """The Bradley-Terry loss agrees with NeMo-RL's preference loss, in value and gradient."""
    rewards = torch.randn(6, dtype=torch.float64, requires_grad=True)
    data = {"sample_mask": torch.ones(6, dtype=torch.float64)}
    want = peer.PreferenceLossFn()(rewards[:, None], data, torch.tensor(6.0), None)[0]
    got = hl.bradley_terry(rewards, hl.Batch(torch.zeros(6, 2).long()))
    assert_same(value_and_gradient(got, rewards), value_and_gradient(want, rewards), NEAR)


def test_likelihood(peer: SimpleNamespace) -> None:
    """Cross-entropy agrees with NeMo-RL's negative log-likelihood loss."""
    made = step()
    module = peer.NLLLossFn()
    mask = torch.cat([torch.zeros(B, 1).double(), made["mask"].double()], 1)
    data = {"token_mask": mask, "sample_mask": torch.ones(B).double()}
    want = lambda logp: module(logp, data, None, made["mask"].sum())[0]  # noqa: E731
    compare(hl.cross_entropy(), made, want, NEAR)
