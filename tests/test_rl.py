"""The trainers of `headloss.rl` (GRPO, GSPO, DAPO, PPO, REINFORCE) work on TRL's trainer: losses,
advantages and configuration switches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from live_tensors import LiveTensors

pytest.importorskip("trl", reason="TRL is the trainer that the algorithms run on")
import trl
from peft import LoraConfig
from transformers import TrainerCallback
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
from headloss import rl
from headloss.integrations.trl import Switches

ALGORITHMS = (rl.GRPO, rl.GSPO, rl.CISPO, rl.PPO, rl.REINFORCE)


def settings(**options: Any) -> dict[str, Any]:
    return {
        "output_dir": folder(),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "temperature": 0.9,
        **ARGUMENTS,
        **options,
    }


def make(
    kind: type,
    model: Any = None,
    config: type | None = None,
    peft_config: Any = None,
    rewards: Any = reward,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    return without_generation(kind)(
        model=load(llama()) if model is None else model,
        reward_funcs=rewards,
        args=(config or kind.config)(**settings(**options)),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


# ---------------------------------------------------------------------- advantages

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()


def test_rewards_at_tokens() -> None:
    scores = torch.tensor([2.0, 3.0, 5.0])
    kl = torch.full((3, 4), 0.5)
    got = rl.rewards_at_tokens(scores, MASK, kl, beta=0.2)
    want = [[-0.1, -0.1, -0.1, 1.9], [-0.1, 0, 2.9, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(got, torch.tensor(want))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.9, 0.0)])
def test_generalised_advantages(gamma: float, lam: float) -> None:
    """`rl.generalised` gives, for each unmasked token t, the sum over k of (gamma lam)^k times the
    temporal-difference error of token t + k."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in "rv")
    advantages, returns = rl.generalised(rewards, values, MASK, gamma, lam)
    for row in range(3):
        r, v = rewards[row][MASK[row]], values[row][MASK[row]]
        after = torch.cat([v[1:], v.new_zeros(1)])[: len(v)]
        delta = r + gamma * after - v
        n = len(v)
        want = [
            sum((gamma * lam) ** k * float(delta[t + k]) for k in range(n - t)) for t in range(n)
        ]
        torch.testing.assert_close(
            advantages[row][MASK[row]], torch.tensor(want, dtype=torch.float64)
        )
    assert not advantages[~MASK].any()
    torch.testing.assert_close(returns, advantages + values * MASK)
    if lam == 1.0:
        torch.testing.assert_close(returns, rl.discounted(rewards, MASK, gamma))


def test_normalised() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    got = rl.normalised(values, MASK)[MASK]
    assert float(got.mean()) == pytest.approx(0, abs=1e-6)
    assert float(got.std(unbiased=False)) == pytest.approx(1, rel=1e-6)
    assert not rl.normalised(torch.ones(3, 4), MASK).any()


def test_integers_are_numbers() -> None:
    """Integer rewards and values are not rounded in advantages."""
    rewards = torch.tensor([[0, 0, 3, 1], [2, 0, 1, 0], [0, 0, 0, 0]])
    for made in (
        lambda x: rl.discounted(x, MASK, 0.9),
        lambda x: rl.generalised(0.5 * x, x, MASK, 0.9, 0.8)[0],
        lambda x: rl.normalised(x, MASK),
    ):
        torch.testing.assert_close(made(rewards), made(rewards.float()))
    assert rl.discounted(rewards, MASK, 0.9)[0, 0].item() == pytest.approx(3 * 0.81 + 0.729)


def test_shapes_of_advantages_are_checked() -> None:
    """Differing shapes are refused, since they would broadcast."""
    ones, scores = torch.ones(3, 4), torch.ones(3)
    with pytest.raises(ValueError, match=r"scores: got shape \(3, 1\), want \(3,\)"):
        rl.rewards_at_tokens(scores[:, None], MASK)
    with pytest.raises(ValueError, match=r"kl: got shape \(4,\), want \(3, 4\)"):
        rl.rewards_at_tokens(scores, MASK, ones[0], 0.1)
    with pytest.raises(ValueError, match=r"values: got shape \(3, 1\), want \(3, 4\)"):
        rl.generalised(ones, ones[:, :1], MASK)
    with pytest.raises(TypeError, match=r"mask: got torch.int64 \(3, 4\), want torch.bool"):
        rl.discounted(ones, MASK.long())
    with pytest.raises(ValueError, match="group: got 2 of 3 rewards, want rows of whole groups"):
        rl.leave_one_out(scores, 2)


def test_leave_one_out() -> None:
    rewards = torch.tensor([1.0, 4.0, 7.0, math.nan, 2.0, 2.0, 5.0, 5.0])
    factor = rl.leave_one_out(rewards, 4)
    group = rewards[4:]
    others = torch.stack([r - (group.sum() - r) / 3 for r in group])
    torch.testing.assert_close((group - group.mean()) * factor[4:], others)
    assert factor[:4].tolist() == [1.5] * 4


# ---------------------------------------------------------------------- algorithms


@pytest.mark.parametrize(
    ("kind", "same"),
    [
        (rl.GRPO, {"loss_type": "grpo"}),
        (
            rl.GSPO,
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 3e-4,
                "epsilon_high": 4e-4,
            },
        ),
        (rl.CISPO, {"loss_type": "cispo", "epsilon_high": 1.28}),
    ],
)
def test_trainers_run_as_trls_grpo_trainer(kind: type, same: dict[str, Any]) -> None:
    more = {"num_iterations": 2, "beta": 0.1, "scale_rewards": "batch"}
    theirs = make(trl.GRPOTrainer, config=trl.GRPOConfig, **same, **more)
    assert_same_run(theirs, make(kind, **more))


def test_group_less_the_mean_of_the_others() -> None:
    """Leave-one-out advantages scale the unclipped gradient by n / (n - 1), visible in an SGD
    step."""
    options = {"scale_rewards": "none", "max_steps": 1}
    start = dict(load(llama()).named_parameters())
    _, plain = train(make(rl.GRPO, **options))
    _, one_out = train(make(rl.GRPO, leave_one_out=True, **options))
    for name, value in plain.items():
        step, larger = value - start[name], one_out[name] - start[name]
        torch.testing.assert_close(larger.detach(), (4 / 3 * step).detach(), rtol=1e-4, atol=2e-6)


def plain_step(trainer: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Compute a step of PPO or REINFORCE in plain PyTorch from logits."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    columns, mask = inputs["completion_ids"].shape[1], inputs["completion_mask"].bool()
    found = trainer.model(input_ids=ids, attention_mask=attention, output_hidden_states=True)
    logits = found.logits[:, -columns - 1 : -1] / trainer.temperature
    logps = logits.log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]
    advantages = inputs["advantages"]
    if isinstance(trainer, rl.REINFORCE):
        return -(advantages * logps)[mask].mean()
    ratio = (logps - inputs["old_per_token_logps"]).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if (dual := trainer.args.dual_clip) is not None:
        bounded = torch.maximum(surrogate, dual * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    values = trainer.model.value_head(found.hidden_states[-1][:, -columns - 1 : -1])[..., 0]
    old, returns = inputs["old_values"], inputs["returns"]
    near = old + (values - old).clamp(-trainer.args.value_clip, trainer.args.value_clip)
    errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return -surrogate[mask].mean() + trainer.args.value_coef * 0.5 * errors[mask].mean()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (rl.PPO, {"beta": 0.1, "gamma": 0.9, "dual_clip": 1.2, "num_iterations": 3}),
        (rl.PPO, {"value_clip": 0.05, "value_coef": 0.7, "num_iterations": 2}),
        (rl.REINFORCE, {"beta": 0.1, "gamma": 0.9}),
        (rl.REINFORCE, {}),
    ],
)
def test_in_plain_pytorch(kind: type, options: dict[str, Any]) -> None:
    """Loss and gradient of each step agree with plain PyTorch, even with clipped ratios and
    values."""
    compared = []

    class Compared(kind):
        def _compute_loss(self, model, inputs):
            want = plain_step(self, inputs)
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            wanted = torch.autograd.grad(want, parameters)
            loss = super()._compute_loss(model, inputs)
            got = torch.autograd.grad(loss, parameters, retain_graph=False)
            torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-5, atol=1e-6)
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
            compared.append(inputs)
            return super()._compute_loss(model, inputs)

    trainer = make(Compared, max_steps=3, learning_rate=0.2, **options)
    train(trainer)
    assert len(compared) == 3
    if options.get("beta"):
        assert compared[0]["advantages"].std() > 0


def test_a_critic_learns() -> None:
    def fixed(completion_ids, **kwargs):
        return [1.0] * len(completion_ids)

    trainer = make(rl.PPO, rewards=fixed, max_steps=12, learning_rate=0.3, value_coef=1.0)
    logs, parameters = train(trainer)
    assert logs[-1]["headloss/value_loss"] < 0.3 * logs[0]["headloss/value_loss"]
    assert bool(parameters["value_head.weight"].any())


def test_a_critic_is_saved_and_resumed(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "learning_rate": 0.1}
    trainer = make(rl.PPO, max_steps=1, save_strategy="steps", save_steps=1, **options)
    _, parameters = train(trainer)
    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            seen.append(model.value_head.weight.detach().clone())

    resumed = make(rl.PPO, max_steps=2, **options)
    resumed.add_callback(Look())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert torch.equal(seen[0], parameters["value_head.weight"])
    assert bool(seen[0].any())


def test_a_critic_beside_adapters() -> None:
    lora = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    logs, parameters = train(make(rl.PPO, peft_config=lora, max_steps=2, beta=0.1))
    assert any("value_head" in name for name in parameters)
    assert all(math.isfinite(entry["loss"]) for entry in logs)


def test_what_an_algorithm_refuses() -> None:
    with pytest.raises(ValueError, match="num_iterations: got 2, want 1"):
        make(rl.REINFORCE, num_iterations=2)
    with pytest.raises(ValueError, match="loss_type: got 'grpo', want \"dapo\""):
        make(rl.PPO, loss_type="grpo")
    with pytest.raises(TypeError, match=r"args: got GRPOConfig, want headloss.rl.GSPOConfig"):
        make(rl.GSPO, config=trl.GRPOConfig)


# ---------------------------------------------------------------------- switches


def losses_of(kind: type, **options: Any) -> list[float]:
    logs, _ = train(make(kind, **options))
    return [entry["loss"] for entry in logs]


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_fused_or_not(kind: type) -> None:
    options: dict[str, Any] = {"beta": 0.1, "max_steps": 3}
    if kind is not rl.REINFORCE:
        options["num_iterations"] = 2
    want = losses_of(kind, **options)
    for switches in (
        {"use_fused_loss": False},
        {"use_fused_loss": False, "use_fused_linear_logprobs": True},
        {"use_fused_loss": False, "cast_logprobs_to_fp32": True},
        {"cast_logprobs_to_fp32": False},
    ):
        got = losses_of(kind, **switches, **options)
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5), switches


def unfindable() -> Any:
    """Return a model with a custom head computation."""
    model = load(saved("llama"))
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.9)
    return model


def test_a_model_without_a_findable_head_trains_on_its_logits() -> None:
    trainer = make(rl.GRPO, model=unfindable(), max_steps=1)
    logs, _ = train(trainer)
    assert math.isfinite(logs[0]["loss"])
    assert logs[0]["entropy"] != train(make(rl.GRPO, max_steps=1))[0][0]["entropy"]
    for name in ("use_fused_loss", "use_fused_linear_logprobs"):
        with pytest.raises(TypeError, match=f"{name}: got True, but module: .* forward hook"):
            make(rl.GRPO, model=unfindable(), **{name: True})


@pytest.mark.parametrize(
    ("switches", "loss", "logprobs", "exact"),
    [
        ((None, None, None), True, True, True),
        ((True, None, None), True, True, True),
        ((False, None, None), False, False, False),
        ((False, True, None), False, True, False),
        ((True, False, None), True, False, True),
        ((None, None, False), True, True, False),
        ((False, None, True), False, False, True),
    ],
)
def test_resolution(switches: tuple, loss: bool, logprobs: bool, exact: bool) -> None:
    names = ("use_fused_loss", "use_fused_linear_logprobs", "cast_logprobs_to_fp32")
    found = Switches(**dict(zip(names, switches, strict=True))).resolve(load(llama()))
    assert (found.loss.fused, found.logprobs.fused) == (loss, logprobs)
    assert found.loss.exact == found.logprobs.exact == exact


def step_memory(**options: Any) -> int:
    """Return the number of elements of a training step's largest tensor."""
    trainer = make(rl.GRPO, max_steps=1, **options)
    trainer.options = hl.Options(chunk_tokens=2)
    with LiveTensors() as live:
        trainer.train()
    return live.largest


def test_memory() -> None:
    logits = 4 * 6 * VOCABULARY
    assert step_memory() < logits <= step_memory(use_fused_loss=False)


def test_bf16_log_probs() -> None:
    """With `cast_logprobs_to_fp32` False, logits are rounded to bf16 as in TRL's standard path;
    with True they are not, whether fused or not."""

    def measured(**switches: Any) -> float:
        model = load(llama()).to(torch.bfloat16)
        logs, _ = train(make(rl.GRPO, model=model, max_steps=1, **switches))
        return logs[0]["entropy"]

    rounded = measured(use_fused_loss=False)
    exact = measured()
    assert measured(use_fused_loss=False, cast_logprobs_to_fp32=True) == pytest.approx(
        exact, rel=1e-6
    )
    assert measured(cast_logprobs_to_fp32=False) == pytest.approx(rounded, rel=1e-5)
    assert rounded != pytest.approx(exact, rel=1e-5)
