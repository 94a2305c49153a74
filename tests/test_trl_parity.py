"""headloss's losses equal TRL's own loss methods, run on a stub trainer with only tensors.

The stub trainer's model returns a small tensor of log-probs (and entropies) that requires
gradients. The tests compare TRL's loss, and its gradient with respect to the log-probs, with the
loss and gradient of headloss on packed tokens.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folds import fold
from losses_case import assert_same, reduced, value_and_gradient
from torch import Tensor

from headloss import losses as h
from headloss.batch.batch import Batch
from headloss.batch.packing import PackedBatch, pack
from headloss.losses.term import Objective, Term
from headloss.statistics.softmax import Statistics

pytest.importorskip("trl", reason="TRL is the peer that these terms are compared with")
from trl import DPOTrainer, GRPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gmpo import GMPOTrainer

B, T, MAX_LENGTH = 5, 7, 9
LEVELS = ("token", "sequence")
CORRECTION = 3.0


def inputs(per_token: bool = False, empty: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """Return padded [B, T] tensors of a step; with `empty` the last row has no scored tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = (torch.arange(T) < torch.tensor([7, 4, 1, 5, 0 if empty else 6])[:, None]).long()
    mask[0, 2] = 0  # a tool's token
    logps = -0.3 - normal(B, T).abs()
    return {
        "prompt_ids": torch.zeros(B, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(B, 2, dtype=torch.int64),
        "completion_ids": torch.zeros(B, T, dtype=torch.int64),
        "completion_mask": mask,
        "logps": logps,
        "entropies": normal(B, T).abs().float().double(),
        "advantages": normal(B, T) if per_token else normal(B),
        "old_per_token_logps": logps + 0.4 * normal(B, T),
        "ref_per_token_logps": logps + 0.4 * normal(B, T),
        "sampling_per_token_logps": logps + 0.4 * normal(B, T),
        "num_items_in_batch": mask.sum(),
    }


# ---------------------------------------------------------------------- GRPO and variants


def stub(step: dict[str, Tensor], leaves: tuple[Tensor, Tensor], **options: Any) -> SimpleNamespace:
    """Return a stub with the attributes read by GRPOTrainer._compute_loss."""
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
        "entropy_target": 0.0,
    }
    arguments |= {name: options.pop(name) for name in list(options) if name in arguments}

    def same(value, *args, **kwargs):
        return value

    trainer = SimpleNamespace(
        args=SimpleNamespace(**arguments),
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=same,
            reduce=same,
            pad_across_processes=same,
            sync_gradients=False,
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        use_vllm="importance_sampling_ratio" in step,
        vllm_importance_sampling_correction=True,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (*leaves, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        **{
            "loss_type": "grpo",
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.0,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "entropy_coef": 0.0,
            "_entropy_bonus_enabled": False,
            **options,
        },
    )
    trainer.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, trainer)
    return trainer


def theirs(
    step: dict[str, Tensor], trainer_type: type = GRPOTrainer, **options: Any
) -> tuple[list[Tensor], dict[str, list[float]]]:
    """Return TRL's loss, its gradients at scored tokens, and its metrics."""
    leaves = (step["logps"].clone().requires_grad_(), step["entropies"].clone().requires_grad_())
    trainer = stub(step, leaves, **options)
    loss = trainer_type._compute_loss(trainer, None, step)
    scored = step["completion_mask"].bool()
    value, *gradients = value_and_gradient(loss, *leaves)
    return [value, *(g[scored] for g in gradients)], trainer._metrics["train"]


def packed(step: dict[str, Tensor], **more: Tensor) -> tuple[Statistics, PackedBatch]:
    scored = step["completion_mask"].bool()
    batch = Batch(
        torch.where(scored, 0, -100),
        advantages=step["advantages"],
        old_logps=step["old_per_token_logps"],
        ref_logps=step["ref_per_token_logps"],
        **more,
    )
    stats = Statistics(
        logp=step["logps"][scored].requires_grad_(),
        entropy=step["entropies"][scored].requires_grad_(),
    )
    return stats, pack(batch, vocabulary=1, dtype=torch.float64)


def ours(objective: Term | Objective, step: dict[str, Tensor], **more: Tensor) -> list[Tensor]:
    stats, batch = packed(step, **more)
    assert stats.logp is not None and stats.entropy is not None
    return value_and_gradient(reduced(objective, stats, batch), stats.logp, stats.entropy)


def our_term(loss_type: str, level: str, **options: Any) -> Term:
    if loss_type == "vespo":
        return h.vespo()
    # TRL's CISPO takes epsilon_high as the cap of the ratio, not as its distance from 1
    if loss_type == "cispo":
        return h.cispo(epsilon_high=0.3, importance_sampling_level=level)
    if loss_type == "dr_grpo":
        options["max_completion_length"] = MAX_LENGTH
    if loss_type == "dapo":
        options["epsilon_high"] = 0.2
    return getattr(h, loss_type)(importance_sampling_level=level, **options)


def their_options(loss_type: str) -> dict[str, Any]:
    return {"loss_type": loss_type, "epsilon_high": 1.3 if loss_type == "cispo" else 0.2}


def tolerance(loss_type: str) -> float:
    """Return the tolerance, larger for SAPO, whose temperature of 1.05 is float32 in TRL."""
    return 1e-6 if loss_type == "sapo" else 1e-12


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_type(loss_type: str, level: str) -> None:
    for seed in range(3):
        step = inputs(seed=seed)
        want, _ = theirs(step, importance_sampling_level=level, **their_options(loss_type))
        assert_same(ours(our_term(loss_type, level), step), want, tolerance(loss_type))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_per_token(loss_type: str) -> None:
    step = inputs(per_token=True)
    want, _ = theirs(step, **their_options(loss_type))
    assert_same(ours(our_term(loss_type, "token"), step), want, tolerance(loss_type))


def test_gspo_is_grpo_at_sequence_level() -> None:
    step = inputs()
    want, _ = theirs(
        step, importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4
    )
    assert_same(ours(h.gspo(), step), want)
    assert_same(ours(h.gspo_token(), step), want)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "luspo"])
def test_delta(loss_type: str, level: str) -> None:
    step = inputs(seed=1)
    want, _ = theirs(step, loss_type=loss_type, importance_sampling_level=level, delta=1.25)
    assert_same(ours(our_term(loss_type, level, delta=1.25), step), want)


@pytest.mark.covering
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_kl(loss_type: str, level: str, corrected: bool) -> None:
    step = inputs(seed=2)
    want, metrics = theirs(
        step,
        importance_sampling_level=level,
        beta=0.07,
        use_bias_correction_kl=corrected,
        **their_options(loss_type),
    )
    policy = our_term(loss_type, level)
    assert policy.reduction is not None
    kl = h.kl(estimator="k3", bias_corrected=corrected, importance_sampling_level=level)
    assert_same(ours(policy + 0.07 * kl.over(policy.reduction), step), want, tolerance(loss_type))
    stats, batch = packed(step)
    assert float(kl(stats, batch).mean().detach()) == pytest.approx(metrics["kl"][0])


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_off_policy_mask(loss_type: str, per_token: bool) -> None:
    step = inputs(per_token=per_token, seed=3)
    step["sampling_per_token_logps"][0, 1] = torch.nan
    options = {"off_policy_mask_threshold": 0.05, **their_options(loss_type)}
    term = our_term(loss_type, "token").off_policy_masked(0.05)
    without = {k: v for k, v in step.items() if k != "sampling_per_token_logps"}
    assert_same(ours(term, step), theirs(without, **options)[0], tolerance(loss_type))
    unmasked = ours(our_term(loss_type, "token"), step)[1]
    assert not torch.equal(ours(term, step)[1], unmasked)
    if loss_type != "vespo":  # headloss's VESPO weight would also read the sampler's log-probs
        sampling = step["sampling_per_token_logps"]
        got = ours(term, step, sampling_logps=sampling)
        assert_same(got, theirs(step, **options)[0], tolerance(loss_type))


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_top_entropy(loss_type: str, quantile: float) -> None:
    step = inputs(seed=4)
    want, _ = theirs(step, top_entropy_quantile=quantile, **their_options(loss_type))
    term = our_term(loss_type, "token").top_entropy(quantile=quantile)
    assert_same(ours(term, step), want, tolerance(loss_type))


@pytest.mark.parametrize("by", [-40.0, 40.0])
@pytest.mark.parametrize("loss_type", [x for x in LOSS_TYPES if x != "vespo"])
def test_one_token_far_from_the_old_policy(loss_type: str, by: float) -> None:
    """One token far from the old policy enters its sequence's mean unclamped, in TRL and
    headloss."""
    level = "sequence"
    step = inputs(seed=11)
    step["old_per_token_logps"] = step["old_per_token_logps"].clone()
    step["old_per_token_logps"][0, 0] -= by
    want, _ = theirs(step, importance_sampling_level=level, **their_options(loss_type))
    assert_same(ours(our_term(loss_type, level), step), want, tolerance(loss_type))


def sampler_ratio(step: dict[str, Tensor], mode: str) -> Tensor:
    """Return the sampler ratio of a TRL step, [B, T] or [B, 1]."""
    difference = step["old_per_token_logps"] - step["sampling_per_token_logps"]
    difference = (difference * step["completion_mask"]).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(max=1.4)
    return ratio.masked_fill(ratio > 1.4, 0.0)


@pytest.mark.covering
@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", [x for x in LOSS_TYPES if x != "vespo"])
def test_sampler_correction(loss_type: str, level: str, mode: str) -> None:
    step = inputs(seed=5)
    step["sampling_per_token_logps"][1, 1] = torch.nan
    step["importance_sampling_ratio"] = sampler_ratio(step, mode)
    want, _ = theirs(step, importance_sampling_level=level, **their_options(loss_type))
    term = our_term(loss_type, level).corrected(mode, max=1.4)
    got = ours(term, step, sampling_logps=step["sampling_per_token_logps"])
    assert_same(got, want, tolerance(loss_type))


@pytest.mark.parametrize("per_token", [False, True])
def test_vespo_with_a_sampler(per_token: bool) -> None:
    step = inputs(per_token=per_token, seed=6)
    step["sampling_per_token_logps"][1, 1] = torch.nan
    difference = (step["old_per_token_logps"] - step["sampling_per_token_logps"]).nan_to_num(nan=0)
    step["importance_sampling_ratio"] = (difference * step["completion_mask"]).exp()
    want, _ = theirs(step, loss_type="vespo")
    got = ours(h.vespo(), step, sampling_logps=step["sampling_per_token_logps"])
    assert_same(got, want)


def test_entropy_bonus() -> None:
    step = inputs(seed=7)
    want, _ = theirs(step, _entropy_bonus_enabled=True, entropy_coef=0.02)
    got = ours(h.grpo() - 0.02 * h.entropy(), step)
    assert_same(got, want)
    assert bool(got[2].all())


@pytest.mark.parametrize("loss_type", ["grpo", "sapo"])
def test_everything_at_once(loss_type: str) -> None:
    step = inputs(seed=8)
    step["importance_sampling_ratio"] = sampler_ratio(step, "token_truncate")
    want, _ = theirs(
        step,
        beta=0.1,
        use_bias_correction_kl=True,
        off_policy_mask_threshold=0.1,
        top_entropy_quantile=0.6,
        **their_options(loss_type),
    )
    policy = our_term(loss_type, "token")
    policy = (
        policy.off_policy_masked(0.1).top_entropy(quantile=0.6).corrected("token_truncate", max=1.4)
    )
    kl = h.kl(estimator="k3", bias_corrected=True).over("sequence_mean")
    got = ours(policy + 0.1 * kl, step, sampling_logps=step["sampling_per_token_logps"])
    assert_same(got, want, tolerance(loss_type))


@pytest.mark.parametrize("level", LEVELS)
def test_clip_metrics(level: str) -> None:
    # TRL counts sequences without scored tokens, headloss does not.
    step = inputs(empty=False, seed=9)
    stats, batch = packed(step)
    stats = stats.map(Tensor.detach)
    _, want = theirs(step, importance_sampling_level=level)
    observe = h.grpo(importance_sampling_level=level).observe
    assert observe is not None
    found = {k: float(fold(o).value) for k, o in observe(stats, batch).items()}
    for name in ("low", "high", "region"):
        assert found[f"clip_{name}"] == pytest.approx(want[f"clip_ratio/{name}_mean"][0])
    assert found["clip_region"] > 0
    cispo = h.cispo(epsilon_high=0.3, importance_sampling_level=level)
    _, want = theirs(step, loss_type="cispo", importance_sampling_level=level, epsilon_high=1.3)
    assert cispo.observe is not None
    share = float(fold(cispo.observe(stats, batch)["clip_high"]).value)
    assert share == pytest.approx(want["cispo_clip_ratio"][0])


def test_gmpo() -> None:
    # No sequence may be empty: headloss gives an empty sequence loss 0, TRL gives it the ratio 1
    # times its advantage.
    step = inputs(empty=False, seed=10)
    loss, want = theirs(step, GMPOTrainer, epsilon_low=0.4, epsilon_high=0.4)
    assert_same(ours(h.gmpo(), step), loss)
    observe = h.gmpo().observe
    assert observe is not None
    found = observe(*packed(step))
    for name in ("low", "high", "region"):
        share = float(fold(found[f"clip_{name}"]).value)
        assert share == pytest.approx(want[f"clip_ratio/{name}_mean"][0])


# ---------------------------------------------------------------------- preference


def their_preference(step: dict[str, Tensor], loss_type: str, beta: float) -> tuple[Any, ...]:
    """Return DPOTrainer's loss; TRL's rows are all chosen answers, then all rejected answers."""
    order = torch.tensor([0, 2, 1, 3])
    mask = step["completion_mask"][order]
    leaf = step["logps"].clone().requires_grad_()
    ref = (step["ref_per_token_logps"][order] * mask).sum(1)
    with_prompt = torch.cat([torch.zeros(4, 1, dtype=torch.int64), mask], 1)
    outputs = SimpleNamespace(
        log_probs=leaf[order] * mask,
        entropy=leaf.detach(),
        mean_logits=leaf.detach(),
        is_top1=mask.bool(),
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    batch = {
        "completion_mask": with_prompt,
        "input_ids": with_prompt,
        "ref_chosen_logps": ref[:2],
        "ref_rejected_logps": ref[2:],
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **kwargs: outputs, batch, False)
    value, gradient = value_and_gradient(loss, leaf)
    return [value, gradient[step["completion_mask"].bool()]], trainer._metrics["eval"]


def pairs(seed: int) -> dict[str, Tensor]:
    """Return four rows: chosen, rejected, chosen, rejected."""
    step = inputs(empty=False, seed=seed)
    return {name: value[:4] if value.dim() else value for name, value in step.items()}


@pytest.mark.parametrize(("loss_type", "make"), [("sigmoid", h.dpo), ("ipo", h.ipo)])
def test_direct_preference(loss_type: str, make) -> None:
    for seed in range(3):
        step = pairs(seed)
        want, metrics = their_preference(step, loss_type, 0.3)
        term = make(beta=0.3)
        assert_same(ours(term, step)[:2], want)
        if loss_type == "sigmoid":
            stats, batch = packed(step)
            found = term.observe(stats.map(Tensor.detach), batch)
            names = {
                "chosen_rewards": "rewards/chosen",
                "rejected_rewards": "rewards/rejected",
                "margin": "rewards/margins",
                "accuracy": "rewards/accuracies",
            }
            for own, other in names.items():
                assert float(fold(found[own]).value) == pytest.approx(metrics[other][0], rel=1e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_simpo(label_smoothing: float) -> None:
    step = pairs(5)
    mask = step["completion_mask"]
    leaf = step["logps"].clone().requires_grad_()
    means = (leaf * mask).sum(1) / mask.sum(1)
    trainer = SimpleNamespace(
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type="simpo",
        simpo_gamma=0.7,
        beta=2.0,
        label_smoothing=label_smoothing,
    )
    losses, *_ = CPOTrainer.cpo_loss(trainer, means[::2], means[1::2])
    value, gradient = value_and_gradient(losses.mean(), leaf)
    got = ours(h.simpo(beta=2.0, gamma=0.7, label_smoothing=label_smoothing), step)[:2]
    assert_same(got, [value, gradient[mask.bool()]])
