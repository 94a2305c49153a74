"""A tiny model, tokenizer and task for trainers, and a comparison of two runs."""

from __future__ import annotations

import copy
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

VOCABULARY = 120
EOS = 1
PROMPTS = [" ".join(f"w{(7 * i + j) % 100 + 3}" for j in range(2 + i % 3)) for i in range(16)]

ARGUMENTS: dict[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "optim": "sgd",  # a step of SGD is proportional to the gradient
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "shuffle_dataset": False,
}


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, VOCABULARY))]
    level = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=level, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="headloss")


def folder() -> str:
    """Return a folder for a run's output, removed at exit."""
    return _folder().name


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 2.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@functools.cache
def saved(family: str) -> str:
    """Return the path of a saved tiny random model."""
    settings = {"model_type": family, **SIZES, **FAMILIES[family]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    path = str(Path(folder()) / family)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def llama() -> str:
    return saved("llama")


def load(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [sum(ids[:-1]) % 7 / 3.0 + len(ids) / 4 for ids in completion_ids]


def sampled(rounds: int, rows: int, longest: int = 6, seed: int = 0) -> list[list[list[int]]]:
    """Return made-up completions; some end, some are truncated at `longest`."""
    generator = torch.Generator().manual_seed(seed)

    def one() -> list[int]:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        return ids if length == longest else [*ids, EOS]

    return [[one() for _ in range(rows)] for _ in range(rounds)]


def without_generation(trainer_type: type, logprobs: bool = False, tools: bool = False) -> type:
    """Return a subclass of a trainer with made-up completions in place of sampled completions."""

    class Given(trainer_type):
        _round = 0

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            ids = sampled(1, len(prompt_ids), self.max_completion_length, seed=self._round)[0]
            type(self)._round += 1
            if not logprobs:
                return ids, None
            generator = torch.Generator().manual_seed(self._round)
            likely = [(-4 - torch.rand(len(x), generator=generator)).tolist() for x in ids]
            likely[0][0] = None  # vLLM may return None for a token's log-prob
            return ids, likely

        def _generate(self, prompts):
            found = list(super()._generate(prompts))
            if tools:
                found[2] = [[int(i != 1) for i, _ in enumerate(ids)] for ids in found[1]]
            return tuple(found)

    return Given


def train(trainer: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the logs of each step and the trained parameters."""
    set_seed(0)  # TRL shuffles completions
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    return logs, {n: p.detach().clone() for n, p in named if p.requires_grad}


TIMES = ("step_time", "train_runtime", "epoch")


def assert_same_run(
    theirs: Any, ours: Any, rtol: float = 2e-5, atol: float = 2e-6, ties: tuple[str, ...] = ()
) -> list[dict[str, float]]:
    """Check that losses, common metrics and parameters of two runs agree; return headloss's logs.

    `ties` names metrics that are not compared at the first step, such as a count of a > b: a and b
    are equal at the first step, so that rounding decides the metric.
    """
    before = {n: p.detach().clone() for n, p in theirs.model.named_parameters() if p.requires_grad}
    (want, want_parameters), (got, got_parameters) = train(theirs), train(ours)
    assert len(want) == len(got) > 0
    for a, b in zip(want, got, strict=True):
        skipped = (*TIMES, *ties) if a is want[0] else TIMES
        shared = {name for name in a if not name.endswith(skipped)}
        assert shared <= b.keys()
        for name in shared:
            close = a[name] == b[name] or math.isclose(
                a[name], b[name], rel_tol=rtol, abs_tol=20 * atol
            )
            assert close, f"{name}: {a[name]} and {b[name]}"
        assert any(name.startswith("headloss/") for name in b)
    moved = 0.0
    for name, value in want_parameters.items():
        torch.testing.assert_close(got_parameters[name], value, rtol=rtol, atol=atol)
        moved = max(moved, float((value - before[name]).abs().max()))
    assert moved > 1e-4
    return got


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": copy.copy(PROMPTS)})


Make = Callable[[type], Any]
