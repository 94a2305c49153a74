"""What benchmarks/steps.py measures: models of known shapes, and trainers around them.

B completions, P tokens of a prompt, C of a completion, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

GIB = 1 << 30

# ---------------------------------------------------------------------- models


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, how it is trained, and on what.

    Attributes:
        family, sizes: of the transformers config.
        lora: train adapters of rank 16 on all projections of the backbone; else all weights.
        completions, prompt, completion: B, P and C of the timed step.
        gate: C of the batch on which contestants must agree.
        budget: bytes that the longest completion must fit in.
        unit, most: completion lengths that are tried are 1 to `most` units.
        dtype: of the weights.
    """

    family: str
    sizes: dict[str, Any]
    lora: bool
    completions: int
    budget: int
    prompt: int = 256
    completion: int = 2048
    gate: int = 256
    unit: int = 1024
    most: int = 32
    dtype: torch.dtype = torch.bfloat16


QWEN: dict[str, Any] = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
SETTINGS = {
    "Qwen2.5-0.5B, LoRA": Setting(
        family="qwen2", sizes=QWEN, lora=True, completions=8, budget=24 * GIB
    ),
    "Qwen2.5-0.5B, all weights": Setting(
        family="qwen2", sizes=QWEN, lora=False, completions=8, budget=24 * GIB
    ),
    "Llama-3-8B, LoRA": Setting(
        family="llama", sizes=LLAMA, lora=True, completions=4, budget=48 * GIB
    ),
}
TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
QUICK = {
    name: replace(
        setting,
        sizes={**TINY, "tie_word_embeddings": setting.sizes["tie_word_embeddings"]},
        completions=2,
        prompt=4,
        completion=32,
        gate=16,
        unit=16,
        most=8,
        budget=4 << 20,
        dtype=torch.float32,
    )
    for name, setting in SETTINGS.items()
}


def make_model(setting: Setting, device: torch.device) -> Any:
    """A model with random weights, made where it is to stay."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(setting.family, **setting.sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=setting.dtype, attn_implementation="sdpa"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if setting.lora:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        # B is not zero, or A would have no gradient to compare.
        lora = LoraConfig(r=16, target_modules=names, init_lora_weights=False)
        model = get_peft_model(model, lora)
    return model.train()


def make_batch(setting: Setting, completion: int, device: torch.device) -> dict[str, Tensor]:
    """What TRL makes of a generation. Without old log-probs: they are the current ones."""
    generator = torch.Generator().manual_seed(0)
    rows = setting.completions

    def ids(columns: int) -> Tensor:
        size = (rows, columns)
        return torch.randint(setting.sizes["vocab_size"], size, generator=generator).to(device)

    prompt_ids, completion_ids = ids(setting.prompt), ids(completion)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": torch.ones_like(completion_ids),
        "advantages": (torch.linspace(-1, 1, rows) + 0.25).to(device),  # none is 0
    }


# ---------------------------------------------------------------------- contestants


def _trl() -> type:
    import trl

    return trl.GRPOTrainer


def _headloss() -> type:
    from headloss.integrations.trl import GRPOTrainer

    return GRPOTrainer


def on_logits(measure: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[], type]:
    """TRL's loss on log-probs and entropies from the logits [B, C, V] of the model itself.

    The entropy is for the metrics and has no gradient. The logits stay in the model's dtype:
    accelerate, where it prepares a model, would make float32 of them.
    """

    def make() -> type:
        class Plain(_trl()):
            def _get_per_token_logps_and_entropies(
                self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            ):
                with self.accelerator.autocast():
                    found = model(
                        input_ids=input_ids,
                        attention_mask=attention_mask,
                        logits_to_keep=logits_to_keep + 1,
                        use_cache=False,
                    )
                targets = input_ids[:, -logits_to_keep:]
                return (*measure(found.logits[:, :-1], targets), None)

        return Plain

    return make


def measure_in_torch(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p = logits.log_softmax(-1, dtype=dtype)  # [B, C, V]
    with torch.no_grad():  # row by row: no further [B, C, V]
        entropy = torch.stack([-(row.exp() * row).sum(-1) for row in log_p])
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropy


def measure_in_trl(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from trl.trainer.utils import selective_log_softmax_and_entropy

    return selective_log_softmax_and_entropy(logits, targets, entropy_requires_grad=False)


def _exact() -> type:
    """TRL's loss on log-probs of a float64 head, on the hidden states of the model itself."""

    class Exact(_trl()):
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        ):
            with self.accelerator.autocast():
                found = model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    logits_to_keep=1,
                    output_hidden_states=True,
                    use_cache=False,
                )
            hidden = found.hidden_states[-1][:, -logits_to_keep - 1 : -1]
            with torch.autocast(hidden.device.type, enabled=False):
                weight = model.get_output_embeddings().weight.double()
                logits = hidden.double() @ weight.t()
            return (*measure_in_torch(logits, input_ids[:, -logits_to_keep:]), None)

    return Exact


# What the others are held against; it is not timed.
TRUTH = "float64 head"
CONTESTANTS: dict[str, Callable[[], type]] = {
    TRUTH: _exact,
    "plain logits": on_logits(measure_in_torch),
    "plain logits, TRL's kernel": on_logits(measure_in_trl),
    "TRL": _trl,
    "TRL with headloss": _headloss,
}


def _reward(completions: list, **kwargs: Any) -> list[float]:
    raise AssertionError("nothing is generated")


def _tokenizer() -> Any:
    """Bytes, and a token that ends and pads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    made = Tokenizer(models.BPE(vocab=ids, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def make_trainer(name: str, model: Any, setting: Setting, device: torch.device, folder: str) -> Any:
    """A contestant's trainer around the shared model, in place of any before it."""
    import datasets
    import trl

    base = model.get_base_model() if setting.lora else model
    base.__dict__.pop("forward", None)  # a head that another trainer has put there
    arguments = trl.GRPOConfig(
        output_dir=folder,
        report_to="none",
        use_cpu=device.type == "cpu",
        bf16=setting.dtype == torch.bfloat16,
        per_device_train_batch_size=setting.completions,
        num_generations=setting.completions,
        max_completion_length=setting.completion,
        loss_type="grpo",
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    trainer = CONTESTANTS[name]()(
        model=model,
        reward_funcs=_reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["."] * setting.completions}),
        processing_class=_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1  # `train` would set it
    return trainer
