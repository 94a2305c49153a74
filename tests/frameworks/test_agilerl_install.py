"""AgileRL's algorithms give equal results with and without headloss, in two updates each."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parity import stubbed
from torch import Tensor

V, ROWS, LENGTH, PROMPT = 96, 4, 12, 5
ALGORITHMS = {
    "GRPO": ("grpo", {"group_size": 4, "loss_type": "grpo"}),
    "GSPO": ("gspo", {"group_size": 4}),
    "CISPO": ("cispo", {"group_size": 4}),
    "PPO": ("ppo_llm", {"lr_critic": 1e-3}),
    "REINFORCE": ("reinforce_llm", {}),
}


@pytest.fixture(scope="module", autouse=True)
def agilerl() -> Any:
    """Import AgileRL without its logger and other GPU-only parts of its LLM extra."""
    stubbed("agilerl", "wandb")
    package = pytest.importorskip("agilerl")
    package.HAS_LLM_DEPENDENCIES = True
    return package


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    from agilerl.algorithms.core import base

    before = base.FusedLinearLogProbsFunction, base.fused_linear_logprobs_chunked
    yield
    importlib.import_module("headloss.integrations.agilerl").uninstall()
    assert before == (base.FusedLinearLogProbsFunction, base.fused_linear_logprobs_chunked)


def agent(
    name: str, dtype: torch.dtype = torch.float32, adapted: tuple[str, ...] = ("q_proj", "v_proj"),
    **more: Any,
) -> Any:  # fmt: skip
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
        )
    ).to(dtype)
    model._agilerl_liger_patched = True  # avoids Liger's layers, which need a GPU
    module, options = ALGORITHMS[name]
    if name == "PPO":
        from agilerl.utils.ppo_value_head import AutoModelForCausalLMWithValueHead

        model = AutoModelForCausalLMWithValueHead(model)
    lr = {"lr_actor": 1e-2} if name == "PPO" else {"lr": 1e-2}
    kind = getattr(importlib.import_module(f"agilerl.algorithms.{module}"), name)
    return kind(
        pad_token_id=0,
        pad_token="<pad>",
        actor_network=model,
        lora_config=LoraConfig(
            r=4, target_modules=list(adapted), task_type="CAUSAL_LM", init_lora_weights=False
        ),
        batch_size=ROWS,
        micro_batch_size_per_gpu=2,
        max_model_len=32,
        max_output_tokens=8,
        use_liger_loss=False,
        gradient_checkpointing=False,
        device="cpu",
        wrap=False,
        **{"beta": 0.04, "temperature": 0.9, **options, **lr, **more},
    )


def updates(name: str, **more: Any) -> tuple[list[dict[str, float]], list[Tensor]]:
    made = agent(name, **more)
    reported = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ids = torch.randint(3, V, (ROWS, LENGTH))
        mask = (torch.arange(LENGTH - 1) >= PROMPT).expand(ROWS, -1)
        rewards = torch.randn(1, ROWS) if "group_size" in ALGORITHMS[name][1] else torch.randn(ROWS)
        reported.append(made.learn(([ids], [mask], rewards)))
    trained = [p.detach().clone() for p in made.actor.parameters() if p.requires_grad]
    assert any("lm_head" in n for n, _ in made.actor.named_parameters() if "lora" in n) == (
        "lm_head" in more.get("adapted", ())
    )
    return reported, trained


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_updates(name: str) -> None:
    """Metrics and trained weights of two updates agree with and without headloss in AgileRL."""
    from headloss.integrations.agilerl import install

    metrics, weights = updates(name)
    install()
    ours, trained = updates(name)
    for got, want in zip(ours, metrics, strict=True):
        assert got.keys() == want.keys()
        for key in want:
            if not key.endswith("_s"):  # except timings
                assert got[key] == pytest.approx(want[key], rel=2e-4, abs=2e-6, nan_ok=True), key
    assert max(off(a, b) for a, b in zip(trained, weights, strict=True)) < 2e-4
    start = [p.detach() for p in agent(name).actor.parameters() if p.requires_grad]
    assert max(off(a, b) for a, b in zip(weights, start, strict=True)) > 1e-2


def through_the_layer(self: Any) -> Any:
    """Return a log-prob function, the head's weight and its bias, as AgileRL's
    `_fused_logprob_fn_and_head` does; the function takes logits from the head's forward, which
    applies a LoRA."""
    from agilerl.lora.fused import ROUTING_STATE

    layer, with_gradient = self._get_lm_head(), torch.is_grad_enabled()

    def log_probs(hidden, head_w, head_b, target_ids, temperature, **more):
        routing = ROUTING_STATE.get(layer)
        # rows of the actor in a forward pass shared with the reference model
        if with_gradient and routing is not None:
            ROUTING_STATE[layer] = ["actor"] * len(hidden)
        logits = layer(hidden) / temperature
        ROUTING_STATE[layer] = routing
        return logits.log_softmax(-1).gather(-1, target_ids[..., None]).squeeze(-1)

    return log_probs, layer.weight, layer.bias


@pytest.mark.parametrize("name", ALGORITHMS)
def test_lora_on_the_head(name: str, monkeypatch: Any) -> None:
    """With a LoRA on the head, headloss agrees with the layer's forward; AgileRL's own function
    ignores the LoRA."""
    from agilerl.algorithms.core.base import LLMAlgorithm

    from headloss.integrations.agilerl import install

    adapted = {"adapted": ("q_proj", "lm_head")}
    without, _ = updates(name, **adapted)
    with monkeypatch.context() as patch:
        patch.setattr(LLMAlgorithm, "_fused_logprob_fn_and_head", through_the_layer)
        metrics, weights = updates(name, **adapted)
    install()
    ours, trained = updates(name, **adapted)
    for got, want in zip(ours, metrics, strict=True):
        assert got.keys() == want.keys()
        for key in want:
            if not key.endswith("_s"):  # except timings
                assert got[key] == pytest.approx(want[key], rel=2e-4, abs=2e-6, nan_ok=True), key
    assert max(off(a, b) for a, b in zip(trained, weights, strict=True)) < 2e-4
    named = agent(name, **adapted).actor.named_parameters()
    start = [(n, p.detach()) for n, p in named if p.requires_grad]
    moved = {n: off(b, a) for (n, a), b in zip(start, weights, strict=True) if "lm_head" in n}
    # AgileRL's critic has no language-model head, so it runs unchanged.
    assert min(moved[n] for n in moved if "critic" not in n) > 1e-4
    assert any(a[key] != pytest.approx(b[key], rel=1e-3, abs=1e-5, nan_ok=True)
               for a, b in zip(without, metrics, strict=True)
               for key in b if not key.endswith("_s"))  # fmt: skip
