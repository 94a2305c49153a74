"""Terms agree with AgileRL's LLM losses.

The tests extract the loss functions from AgileRL's source files, since the package has
conflicting requirements.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losses_case import assert_same, value_and_gradient
from parity import Step, compare, extracted, file_of, filled_rows, ours, step, theirs
from torch import Tensor

import headloss as hl

TOOLS = (
    *("fill_outside_mask", "masked_mean", "pool_by_turns", "pool_log_ratio_by_level"),
    *("clipped_min_surrogate", "clipped_is_surrogate", "calculate_k3_kl"),
    "k3_kl_penalty_reference",
)
METHODS = (
    *("_apply_kl_advantage_shaping", "_token_loss_weights", "_reduce_masked_loss"),
    *("_clipped_units", "_log_importance_weights", "_compute_policy_loss", "_off_policy_drops"),
)
TURNS = torch.tensor([[0, 0, -1, 1, 1, 1, 2], [0, 1, 1, 1, -1, -1, -1]] + [[0] * 7] * 3)


@pytest.fixture(scope="module")
def peer() -> tuple[SimpleNamespace, SimpleNamespace]:
    tools = extracted(file_of("agilerl", "utils/llm_utils.py"), *TOOLS)
    grpo = extracted(
        file_of("agilerl", "algorithms/grpo.py"),
        *(f"GRPO.{name}" for name in METHODS),
        **vars(tools),
    )
    return tools, grpo


def trainer(methods: SimpleNamespace, window: Any = None, **options: Any) -> SimpleNamespace:
    made = SimpleNamespace(
        **{
            "beta": 0.0,
            "kl_clamp": None,
            "use_kl_advantage_shaping": False,
            "use_bias_correction_kl": False,
            "clip_coef_min": 0.85,
            "clip_coef_max": 1.25,
            "vllm_importance_sampling_cap": 1.4,
            "_masks_off_policy_tokens": False,
            "off_policy_token_mask_bounds": None,
            "off_policy_sequence_mask_threshold": None,
            **options,
        }
    )
    made._resolve_loss_window = lambda: window
    for name in METHODS:
        setattr(made, name, getattr(methods, name).__get__(made))
    return made


def policy(peer, made: Step, level="token", objective="grpo", sampled=False, turns=None, **options):
    agent = trainer(peer[1], **options)

    def loss(logp: Tensor) -> Tensor:
        return agent._compute_policy_loss(
            made["mask"],
            logp,
            made["old_logps"],
            made["ref_logps"],
            made["advantages"],
            turns,
            level,
            objective,
            sampling_log_probs=made["sampling_logps"] if sampled else None,
        )[0]

    return loss


CLIP = {"epsilon_low": 0.15, "epsilon_high": 0.25}
NEAR = 3e-7  # allowed error: AgileRL computes token weights in float32
EDGES = ("random", "clipped", "one token")


@pytest.mark.parametrize("edge", EDGES)
def test_grpo(peer, edge: str) -> None:
    """GRPO and DAPO agree with AgileRL's clipped policy loss."""
    made = step(edge)
    compare(hl.grpo(**CLIP), made, policy(peer, made), NEAR)
    window = (1, float(made["mask"].sum()))
    compare(hl.dapo(**CLIP), made, policy(peer, made, window=window), NEAR)


@pytest.mark.parametrize("edge", EDGES)
def test_gspo(peer, edge: str) -> None:
    """GSPO agrees with AgileRL's clipped policy loss with one ratio per trajectory."""
    made = step(edge, per_token=False)
    compare(hl.gspo(**CLIP), made, policy(peer, made, "trajectory"), NEAR)


@pytest.mark.parametrize("edge", EDGES)
def test_cispo(peer, edge: str) -> None:
    """CISPO agrees with AgileRL's."""
    made = step(edge)
    term = hl.cispo(epsilon_high=0.25).over("sequence_mean")
    compare(term, made, policy(peer, made, objective="cispo"), NEAR)


def test_sampler_correction_and_kl(peer) -> None:
    """GRPO with truncated importance weights of the sampler plus a KL penalty agrees with AgileRL,
    with and without AgileRL's bias correction of the KL penalty."""
    made = step()
    term = hl.grpo(**CLIP).corrected("token_truncate", max=1.4)
    for corrected in (False, True):
        kl = hl.kl(estimator="k3", zero_above=0.05, bias_corrected=corrected)
        options = {"beta": 0.1, "kl_clamp": 0.05, "use_bias_correction_kl": corrected}
        want = policy(peer, made, sampled=True, **options)
        compare(term + 0.1 * kl.over("sequence_mean"), made, want, NEAR)


def test_off_policy_masks(peer) -> None:
    """GRPO without off-policy sequences agrees with AgileRL's mask of sequences with a large KL
    divergence from the old policy."""
    made = step(per_token=False)
    options = {"_masks_off_policy_tokens": True, "off_policy_sequence_mask_threshold": 0.01}
    term = hl.grpo(**CLIP).off_policy_masked(0.01)
    without = {**made}
    del without["sampling_logps"]
    want = policy(peer, made, **options)
    compare(term, without, want, NEAR)


def test_off_policy_token_mask(peer) -> None:
    """Like AgileRL, headloss gives no policy gradient to a token whose current ratio is outside the
    bounds, but counts the token in the mean."""
    made = step()
    made["sampling_logps"] = made["old_logps"]
    options = {"_masks_off_policy_tokens": True, "off_policy_token_mask_bounds": (0.7, 1.4)}
    term = hl.grpo(**CLIP).rejected("ratio", min=0.7, max=1.4, live=True)
    plain = ours(hl.grpo(**CLIP), made)
    want = policy(peer, made, **options)
    compare(term, made, want, NEAR)
    assert (theirs(made, want)[0] - plain[0]).abs() > 1e-3


@pytest.mark.parametrize("edge", EDGES)
def test_reinforce(peer, edge: str) -> None:
    """REINFORCE agrees with AgileRL per token and per sequence, with truncated importance weights
    of the sampler."""
    made = step(edge, per_token=edge == "one token")
    weight = (made["old_logps"] - made["sampling_logps"]).exp().clamp(max=1.4)
    terms = {"token": hl.ppo(epsilon_low=0.1, epsilon_high=0.1)}
    terms["trajectory"] = hl.gspo(epsilon_low=0.1, epsilon_high=0.1)
    for level, term in terms.items():
        corrected = level == "token"

        def loss(logp: Tensor, level: str = level, corrected: bool = corrected) -> Tensor:
            ratio = logp - made["old_logps"]
            rest = (made["advantages"], made["mask"], None, level, 0.1)
            weights = weight if corrected else None
            return peer[0].clipped_is_surrogate(ratio, *rest, loss_weight=weights)[0]

        if corrected:
            term = term.corrected("token_truncate", max=1.4)
        compare(term, made, loss, NEAR, totals=filled_rows(made))


@pytest.mark.parametrize("edge", EDGES)
def test_sft(edge: str) -> None:
    """Cross-entropy agrees with AgileRL's supervised loss."""
    made = step(edge)
    method = extracted(file_of("agilerl", "algorithms/sft.py"), "SFT._sft_loss")._sft_loss

    def loss(logp: Tensor) -> Tensor:
        agent = SimpleNamespace(
            actor=Actor(),
            calc_position_embeddings=False,
            use_liger_loss=False,
            cast_logprobs_to_fp32=False,
            chunk_rows=4,
            _patch_lm_head_to_identity=contextlib.nullcontext,
            _fused_logprob_fn_and_head=lambda: (lambda *args, **kwargs: logp, None, None),
        )
        labels = torch.where(made["mask"], 0, -100)
        return method(agent, labels, labels, labels, True)

    compare(hl.cross_entropy(), made, loss)


class Actor(torch.nn.Module):
    def forward(self, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(5, 8, 1))


def test_kl_shaped_advantages(peer) -> None:
    """KL-shaped advantages agree with AgileRL; AgileRL also differentiates the advantages, which
    moves its gradient by 2.3 % from headloss's default."""
    made = step()
    want = policy(peer, made, beta=0.3, use_kl_advantage_shaping=True)
    options: dict[str, Any] = {"beta": 0.3, "estimator": "k3", "centred": True}
    compare(hl.kl_shaped(hl.grpo(**CLIP), through=True, **options), made, want, NEAR)
    got, theirs_ = ours(hl.kl_shaped(hl.grpo(**CLIP), **options), made), theirs(made, want)
    assert_same(got[:1], theirs_[:1], NEAR)
    away = (got[1] - theirs_[1]).norm() / got[1].norm()
    assert 0.02 < away < 0.03, away


def by_turns(made: Step) -> hl.Batch:
    """Return a batch with turns as segments: three in the first row, two in the second."""
    mask = made["mask"] & (TURNS >= 0)
    ids = TURNS + torch.tensor([0, 3, 5, 6, 7])[:, None]
    fields = {n: t for n, t in made.items() if n not in ("mask", "logp")}
    segments = hl.Segments.from_ids(ids.where(mask, 0), 8)
    return hl.Batch(torch.where(mask, 0, -100), segments, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reduction", "level"), [("mean", "sequence"), ("sum", "sequence_product")]
)
def test_turns(peer, reduction: str, level: Any) -> None:
    """Turn-level GRPO agrees with AgileRL if turns are passed as segments: ratios are means or sums
    over a turn, and the loss is a mean over turns."""
    made = step(scale=0.1)
    mask = made["mask"] & (TURNS >= 0)

    def loss(logp: Tensor) -> Tensor:
        return peer[0].clipped_is_surrogate(
            logp - made["old_logps"],
            made["advantages"],
            mask,
            TURNS,
            "turn",
            0.1,
            turn_reduction=reduction,
        )[0]

    leaf = made["logp"].clone().requires_grad_()
    want = value_and_gradient(loss(leaf), leaf)
    term = hl.grpo(epsilon_low=0.1, epsilon_high=0.1, importance_sampling_level=level)
    filled = hl.Totals(int(mask.sum()), 7)  # 7 of the 8 turns have scored tokens
    logits = torch.stack([leaf, torch.log1p(-leaf.exp())], -1)
    out = hl.logits_loss(logits, by_turns(made).with_fields(), term)
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    times = 8 / float(filled.segments)
    assert_same([out.loss.detach() * times, gradient * times], want, 1e-6)


def test_value_loss(peer) -> None:
    """The clipped value loss agrees with AgileRL's PPO, in value and gradient."""
    made = step()
    agent = SimpleNamespace(clip_coef=0.2, vf_coef=0.5)
    method = extracted(
        file_of("agilerl", "algorithms/ppo_llm.py"),
        "PPO._compute_vf_loss_token",
        **vars(peer[0]),
    )._compute_vf_loss_token
    old, returns = made["old_logps"], made["ref_logps"]
    want = theirs(made, lambda v: method(agent, v, old, returns, made["mask"]))
    batch = hl.Batch(torch.where(made["mask"], 0, -100), returns=returns, old_values=old)
    leaf = made["logp"].clone().requires_grad_()
    value = 0.5 * hl.value_loss(leaf, batch, clip=0.2)
    value, gradient = value_and_gradient(value, leaf)
    assert_same([value, gradient[made["mask"]]], want)
