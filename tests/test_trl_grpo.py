"""Stock TRL's GRPO and headloss agree step by step in losses, gradients and metrics."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from live_tensors import LiveTensors

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
import trl
from peft import LoraConfig, PromptTuningConfig
from transformers import set_seed
from trl_case import (
    ARGUMENTS,
    VOCABULARY,
    assert_same_run,
    folder,
    llama,
    load,
    prompts,
    reward,
    saved,
    tokenizer,
    train,
    without_generation,
)

import headloss as hl
from headloss.integrations.trl import GRPOTrainer

TRAINERS = (trl.GRPOTrainer, GRPOTrainer)
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def config(**options: Any) -> trl.GRPOConfig:
    settings = {
        "output_dir": folder(),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "temperature": 0.9,
        **ARGUMENTS,
        **options,
    }
    return trl.GRPOConfig(**settings)


def make(
    kind: type,
    path: str | None = None,
    sampler: bool = False,
    tools: bool = False,
    peft_config: Any = None,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    trainer = without_generation(kind, logprobs=sampler, tools=tools)(
        model=load(path or llama()),
        reward_funcs=reward,
        args=config(**options),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    trainer.use_vllm = sampler  # sampler log-probs come with the completions
    return trainer


def same(**options: Any) -> list[dict[str, float]]:
    return assert_same_run(make(trl.GRPOTrainer, **options), make(GRPOTrainer, **options))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_type(loss_type: str) -> None:
    """All loss types agree with two micro-batches per step and two uses of each batch (ratio 1,
    then not 1)."""
    same(loss_type=loss_type, gradient_accumulation_steps=2, num_iterations=2, max_steps=2)


@pytest.mark.parametrize(
    "loss_type", ["grpo", *(pytest.param(x, marks=pytest.mark.slow) for x in LOSS_TYPES[1:])]
)
def test_sequence_level(loss_type: str) -> None:
    """Sequence-level ratios (GSPO under TRL's name) agree."""
    same(
        loss_type=loss_type,
        importance_sampling_level="sequence",
        num_iterations=2,
        epsilon=0.02,
        epsilon_high=0.03,
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "delta": {"delta": 1.5, "epsilon_high": 0.4, "num_iterations": 2},
    "kl": {"beta": 0.2, "loss_type": "dapo", "num_iterations": 2},
    "kl_bias_corrected": {
        "beta": 0.2,
        "use_bias_correction_kl": True,
        "importance_sampling_level": "sequence",
        "num_iterations": 2,
    },
    "entropy_bonus": {"entropy_coef": 0.05, "loss_type": "dapo"},
    "adaptive_entropy": {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.05,
        "entropy_coef_delta": 0.02,
        "entropy_target": 5.0,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
    },
    "top_entropy": {"top_entropy_quantile": 0.4, "loss_type": "bnpo", "beta": 0.1},
    "top_entropy_bonus": {"top_entropy_quantile": 0.4, "entropy_coef": 0.05},
    "off_policy_mask": {"off_policy_mask_threshold": 0.05, "num_iterations": 2},
    "truncated": {"mask_truncated_completions": True, "loss_type": "dr_grpo"},
    "steps_per_generation": {
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "loss_type": "cispo",
        "epsilon_high": 1.5,
        "max_steps": 4,
    },
    "tools": {"tools": True, "num_iterations": 2, "loss_type": "luspo"},
    "gradient_checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(option: str) -> None:
    same(**OPTIONS[option])


@pytest.mark.parametrize(
    ("mode", "loss_type", "clip"),
    [
        ("token_truncate", "grpo", 1.4),
        ("token_mask", "cispo", 1.4),
        ("sequence_truncate", "dapo", 1.4),
        ("sequence_mask", "grpo", 1.4),
        ("token_truncate", "vespo", 1.4),
        ("token_mask", "vespo", 30.0),
    ],
)
def test_sampler_mismatch(mode: str, loss_type: str, clip: float) -> None:
    got = same(
        sampler=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=clip,
        loss_type=loss_type,
        off_policy_mask_threshold=0.5,
        num_iterations=2,
    )
    assert got[0]["sampling/importance_sampling_ratio/mean"] != 1.0


# ---------------------------------------------------------------------- models


def test_lora() -> None:
    """LoRA runs agree, with the model without adapter as reference."""
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    same(peft_config=lora, beta=0.1, num_iterations=2)


def test_lora_on_the_head() -> None:
    """A LoRA on the head is trained, which TRL's fused path cannot do; the loss equals that of the
    merged model in TRL."""
    lora = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    ours = make(GRPOTrainer, peft_config=lora, max_steps=1, beta=0.1)
    merged = copy.deepcopy(ours.model).merge_and_unload()
    path = str(Path(folder()) / "merged")
    merged.save_pretrained(path)
    logs, _ = train(ours)
    want, _ = train(make(trl.GRPOTrainer, path=path, max_steps=1))
    assert logs[0]["loss"] - 0.1 * logs[0]["kl"] == pytest.approx(want[0]["loss"], abs=1e-5)
    assert logs[0]["entropy"] == pytest.approx(want[0]["entropy"], rel=1e-5)
    assert logs[0]["kl"] > 0
    assert logs[0]["grad_norm"] > 0


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "tied"])
def test_soft_cap_and_logit_scale(family: str) -> None:
    same(path=saved(family), num_iterations=2, beta=0.1)


def test_mixture_of_experts() -> None:
    got = same(
        path=saved("mixtral"), router_aux_loss_coef=0.3, gradient_accumulation_steps=2, beta=0.1
    )
    assert got[0]["aux_loss"] > 0


def test_evaluation() -> None:
    found = []
    for kind in TRAINERS:
        trainer = make(kind, per_device_eval_batch_size=4, loss_type="dapo")
        trainer.eval_dataset = prompts().select(range(2))
        set_seed(0)
        found.append(trainer.evaluate())
    want, got = found
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], abs=1e-6)
    assert got["eval_entropy"] == pytest.approx(want["eval_entropy"], rel=1e-5)


def test_autocast() -> None:
    """In bfloat16 headloss and TRL agree to bfloat16 precision; headloss uses float32 logits."""
    found = [train(make(kind, bf16=True, num_iterations=2)) for kind in TRAINERS]
    for want, got in zip(found[0][0], found[1][0], strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert got[name] == pytest.approx(want[name], rel=2e-2)


# ---------------------------------------------------------------------- features beyond TRL


def test_gspo_token_is_gspo_for_one_advantage_per_sequence() -> None:
    options = {"num_iterations": 2, "epsilon": 0.05}
    ours = make(GRPOTrainer, importance_sampling_level="sequence_token", **options)
    theirs = make(trl.GRPOTrainer, importance_sampling_level="sequence", **options)
    assert_same_run(theirs, ours)


def test_gspo_token_with_an_advantage_per_token() -> None:
    class PerToken(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            found = super()._generate_and_score_completions(inputs)
            columns = torch.linspace(0.5, 1.5, found["completion_ids"].shape[1])
            return {**found, "advantages": found["advantages"][:, None] * columns}

    options = {"num_iterations": 2, "epsilon": 0.05, "max_steps": 1}
    logs, _ = train(make(PerToken, importance_sampling_level="sequence_token", **options))
    other, _ = train(make(GRPOTrainer, importance_sampling_level="sequence_token", **options))
    assert logs[0]["grad_norm"] != other[0]["grad_norm"]
    with pytest.raises(ValueError, match=r"advantages: got shape .* want \(4,\), or the level"):
        train(make(PerToken, importance_sampling_level="sequence"))


def test_an_objective_of_ones_own() -> None:
    class Calm(GRPOTrainer):
        def objective(self, inputs):
            return super().objective(inputs) + 0.1 * hl.z_loss()

    logs, _ = train(make(Calm, max_steps=1))
    plain, _ = train(make(GRPOTrainer, max_steps=1))
    assert logs[0]["loss"] > plain[0]["loss"] + 0.1


def test_without_the_logits() -> None:
    """No tensor of a training step is as large as the logits."""
    seen = []

    class Watched(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            seen.append(loss)
            return loss

    trainer = make(Watched, max_steps=1)
    trainer.options = hl.Options(chunk_tokens=2)
    with LiveTensors() as live:
        trainer.train()
    assert seen
    assert live.largest < 4 * 6 * VOCABULARY


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("cast_lm_head_to_fp32: is not supported", {"cast_lm_head_to_fp32": True}),
        ("loss_type: got 'ppo', want one of", {"loss_type": "ppo"}),
        (
            "importance_sampling_level: got 'word', want one of",
            {"importance_sampling_level": "word"},
        ),
        ("use_liger_kernel: is not supported by headloss", {"use_liger_kernel": True}),
        (
            "prompt_learning: is not supported",
            {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)},
        ),
    ],
)
def test_refusals(match: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=match):
        make(GRPOTrainer, **options)


def test_trl_itself_is_left_as_it_was() -> None:
    from trl.trainer import grpo_trainer

    before = dict(vars(grpo_trainer))
    make(GRPOTrainer)
    with pytest.raises(ValueError):
        make(GRPOTrainer, loss_type="ppo")
    assert vars(grpo_trainer) == before


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_options_of_every_loss_type(loss_type: str, option: str) -> None:
    options = {**OPTIONS[option], "loss_type": loss_type}
    # "luspo" sums over tokens, so that large steps would amplify rounding errors
    if loss_type == "luspo":
        options["learning_rate"] = 0.05
    same(**options)
