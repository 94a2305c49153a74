"""verl's FSDP engine on a CPU, with a small model and a step of data.

B sequences, R response tokens at most, V vocabulary.
"""

from __future__ import annotations

import verl_platform  # isort: split

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    DistillationConfig,
    DistillationLossConfig,
    FSDPEngineConfig,
    HFModelConfig,
)
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import ppo_loss

import headloss.integrations.verl as adapter

assert verl_platform.platform_manager.get_platform().device_name == "cpu"
PROMPTS, RESPONSES, R, V, K = (3, 2, 4, 1), (5, 1, 7, 4), 7, 61, 6
B = len(PROMPTS)
FLOATS = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    adapter.install()
    yield
    adapter.uninstall()


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Yield a process group of one rank."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def saved(folder: Path, family: str = "llama", tied: bool = False) -> str:
    """Save a small model of a family; return its path."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # makes predictions non-uniform
        model.get_output_embeddings().weight.mul_(20)
    model.save_pretrained(folder)
    return str(folder)


def engine_of(
    path: str,
    backend: str | None,
    *,
    packed: bool = True,
    dtype: str = "fp32",
    strategy: str = "fsdp2",
    options: Any = None,
    engine: Any = None,
    **model: Any,
) -> Any:
    """Build an FSDP engine as verl's worker does; with `backend` None the engine materialises
    logits."""
    fused = backend is not None
    model_config = HFModelConfig(
        path=path, load_tokenizer=False, override_config={"attn_implementation": "eager"},
        use_remove_padding=packed, use_fused_kernels=fused, enable_gradient_checkpointing=False,
        fused_kernel_options={"impl_backend": backend, **(options or {})}, **model,
    )  # fmt: skip
    engine_config = FSDPEngineConfig(
        strategy=strategy, use_dynamic_bsz=False, micro_batch_size_per_gpu=2,
        use_torch_compile=False, mixed_precision={**FLOATS, "param_dtype": dtype},
        use_fused_kernels=fused, **(engine or {}),
    )  # fmt: skip
    found = EngineRegistry.new(
        model_type="language_model", backend=strategy, model_config=model_config,
        engine_config=engine_config, checkpoint_config=CheckpointConfig(),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10, clip_grad=1e9),
    )  # fmt: skip
    found.initialize()
    return found


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def step(seed: int = 0, temperature: Any = 0.8, **more: Any) -> TensorDict:
    """Return the batch that verl's worker passes to its engine; the first response has an unscored
    token, the last response is unscored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(lengths: tuple[int, ...], scale: float = 1.0, shift: float = 0.0) -> list[Tensor]:
        return [shift + scale * torch.randn(n, generator=generator) for n in lengths]

    prompts = [torch.randint(3, V, (n,), generator=generator) for n in PROMPTS]
    responses = [torch.randint(3, V, (n,), generator=generator) for n in RESPONSES]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones(n, dtype=torch.int64) for n in RESPONSES]
    masks[0][2] = 0
    masks[-1][:] = 0
    old = normal(RESPONSES, 0.6, -4.0)
    tensors = {
        "input_ids": jagged(whole),
        "position_ids": jagged([torch.arange(len(x)) for x in whole]),
        "prompts": jagged(prompts),
        "responses": jagged(responses),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
        "old_log_probs": jagged(old),
        "ref_log_prob": jagged([x + 0.3 * torch.randn(len(x), generator=generator) for x in old]),
        "advantages": jagged(normal(RESPONSES)),
    }
    if more.pop("weights", False):
        tensors["rollout_is_weights"] = jagged([x.exp() for x in normal(RESPONSES, 0.3)])
    if isinstance(temperature, Tensor):
        tensors["temperature"] = temperature
    data = TensorDict(tensors, batch_size=[B])
    flags = {
        "use_remove_padding": True, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2,
        "use_fused_kernels": True, "calculate_entropy": True, "global_batch_size": B,
        **more,
    }  # fmt: skip
    if not isinstance(temperature, Tensor):
        flags["temperature"] = temperature
    tu.assign_non_tensor(data, **flags)
    return data


def loss_of(mode: str, **options: Any) -> Any:
    """Return the loss function of an actor's worker."""
    policy = {"loss_mode": mode, **options.pop("policy_loss", {})}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2,
        policy_loss=PolicyLossConfig(**policy),
        **{"clip_ratio_low": 0.15, "clip_ratio_high": 0.25, **options},
    )  # fmt: skip
    return functools.partial(ppo_loss, config=config)


def taught(seed: int = 0, **more: Any) -> TensorDict:
    """Return a step with a teacher's K likeliest tokens, nested [B, L, K] as from verl's servers.

    The last token of a sequence has one id K times.
    """
    data = step(seed, **{"distillation_use_topk": True, **more})
    generator = torch.Generator().manual_seed(seed + 7)
    logps, ids = [], []
    for tokens in data["input_ids"].unbind():
        z = 4 * torch.randn(len(tokens), V, generator=generator)
        likeliest = z.log_softmax(-1).topk(K)
        likeliest.values[-1], likeliest.indices[-1] = 0, 0
        logps.append(likeliest.values)
        ids.append(likeliest.indices.int())
    data["teacher_logprobs"], data["teacher_ids"] = jagged(logps), jagged(ids)
    return data


WIDTH = 12  # width of a teacher's hidden states


def teacher_weight() -> Tensor:
    return 2 * torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(5))


def taught_whole(seed: int = 0, temperature: float = 0.8, **more: Any) -> TensorDict:
    """Return a step with a teacher's hidden states, a nested [B, L, H'] tensor, and with the
    teacher's log-probs of all V tokens in verl's top-k format."""
    data = step(seed, **{"distillation_use_topk": True, "temperature": temperature, **more})
    generator = torch.Generator().manual_seed(seed + 7)
    hidden = [torch.randn(len(x), WIDTH, generator=generator) for x in data["input_ids"].unbind()]
    data["teacher_hidden"] = jagged(hidden)
    logits = [x @ teacher_weight().T / temperature for x in hidden]
    data["teacher_logprobs"] = jagged([x.log_softmax(-1) for x in logits])
    data["teacher_ids"] = jagged([torch.arange(V).expand(len(x), V) for x in hidden])
    return data


def distillation_of(
    mode: str, settings: Any, divergence: str = "forward_kl_topk", **options: Any
) -> Any:
    """Return the loss function of an actor's worker with a configured teacher."""
    config = loss_of(mode, **options).keywords["config"]
    loss = DistillationLossConfig(loss_mode=divergence, **{"topk": K, **settings})
    teacher = DistillationConfig(distillation_loss=loss)
    return functools.partial(distillation_ppo_loss, config=config, distillation_config=teacher)


def gradients(engine: Any) -> dict[str, Tensor]:
    """Return the full gradients of the parameters."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return found


def trained(engine: Any, data: TensorDict, loss: Any) -> tuple[Any, dict[str, Tensor]]:
    """Run a batch forward and backward; return metrics and gradients."""
    engine.optimizer_zero_grad()
    tu.assign_non_tensor(data, return_model_output=True)
    out = engine.forward_backward_batch(copy.deepcopy(data), loss, forward_only=False)
    return out, gradients(engine)
