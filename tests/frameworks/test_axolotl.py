"""Axolotl's plugin manager, configuration and trainer give equal runs with and without headloss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import stubbed

stubbed("axolotl", "numba")  # imported by its samplers

# ruff: noqa: E402
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.training_args import AxolotlTrainingArguments
from axolotl.integrations.base import PluginManager
from axolotl.integrations.config import merge_input_args
from datasets import Dataset

from headloss.integrations.transformers import STATE

NAME = "headloss.integrations.axolotl.HeadlossPlugin"
V, LENGTH = 96, 24


@pytest.fixture(scope="module")
def manager() -> Any:
    found = PluginManager.get_instance()
    found.register(NAME, required=True)
    return found


def configured(**settings: Any) -> Any:
    given = {
        "base_model": "none",
        "datasets": [{"path": "none", "type": "alpaca"}],
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
    }
    return merge_input_args()[1](**{**given, **settings})


def data(packed: bool) -> Dataset:
    """Return rows of 24 tokens with masked prompts; packed rows have three documents."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(8):
        ids = torch.randint(3, V, (LENGTH,), generator=generator)
        row = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        row["labels"][: int(torch.randint(2, 12, (), generator=generator))] = -100
        if packed:
            row["position_ids"] = torch.cat([torch.arange(n) for n in (5, 12, 7)])
            row["labels"][[5, 17]] = -100
            del row["attention_mask"]
        rows.append({name: value.tolist() for name, value in row.items()})
    return Dataset.from_list(rows)


def trained(manager: Any, folder: Path, lora: bool, packed: bool, **settings: Any) -> Any:
    """Return losses and trained weights of two steps with two micro-batches."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    if lora:
        options = {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    manager.post_model_load(configured(**settings), model)
    arguments = AxolotlTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        learning_rate=0.1,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        include_tkps=False,
        lr_scheduler_type="constant",
    )
    trainer = AxolotlTrainer(
        model=model,
        args=arguments,
        train_dataset=data(packed),
        data_collator=default_data_collator,
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, [p.detach().clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_two_steps(manager: Any, tmp_path: Path, lora: bool, packed: bool) -> None:
    """Two training steps under Axolotl give equal losses and weights with and without headloss,
    with LoRA and with packed rows."""
    want, weights = trained(manager, tmp_path / "theirs", lora, packed)
    got, found = trained(manager, tmp_path / "ours", lora, packed, headloss=True)
    assert len(got) == 2 and got == pytest.approx(want, rel=1e-6)
    off = [float((a - b).norm() / b.norm()) for a, b in zip(found, weights, strict=True)]
    assert max(off) < 2e-6, off


def test_terms(manager: Any) -> None:
    """Axolotl's settings reach the objective; without `headloss: true` nothing changes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    manager.post_model_load(configured(), model)
    assert STATE not in vars(model)
    settings = {"headloss_label_smoothing": 0.1, "headloss_z_loss": 1e-3}
    manager.post_model_load(configured(headloss=True, **settings), model)
    ids = torch.randint(V, (2, 9))
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].flatten(0, 1)
    smooth = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    want = smooth + 1e-3 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(model(ids, labels=ids).loss, want)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("liger_fused_linear_cross_entropy", True),
        ("chunked_cross_entropy", True),
        ("rl", "dpo"),
        ("tensor_parallel_size", 2),
    ],
)
def test_refusals(manager: Any, name: str, value: Any) -> None:
    """Axolotl settings that headloss does not support raise ValueError with the setting's name."""
    with pytest.raises(ValueError, match=rf"{name}: is not supported here, only by Axolotl"):
        configured(headloss=True, **{name: value})
