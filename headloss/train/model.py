"""Build the model, tokenizer and LoRA adapter of a training recipe."""

from __future__ import annotations

import atexit
import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

from .errors import RecipeError
from .schema import Recipe, check_fields

PAD, END = "<pad>", "<end>"


def load(recipe: Recipe) -> tuple[Any, Any]:
    """Return (model, tokenizer).

    Raises:
        RecipeError: if the model does not exist or cannot be loaded.
    """
    if recipe.model == "tiny":
        return _saved(tiny(recipe)), byte_tokenizer(recipe.tiny.max_position_embeddings)
    if recipe.model.startswith((".", "/", "~", "runs/")) and not Path(recipe.model).is_dir():
        raise RecipeError(f"model: there is no folder {recipe.model}{_advice(recipe.model)}")
    dtype: Any = recipe.dtype if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model)
        model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())
        raise RecipeError(f"model: cannot load {recipe.model}: {why}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _advice(name: str) -> str:
    path = Path(name)
    if path.parts[:1] != ("runs",) or path.name != "model":
        return ""
    return f"; `headloss train {path.parent.name}` makes it, model= takes another one"


def tiny(recipe: Recipe) -> LlamaForCausalLM:
    """Return a small Llama over bytes, with random weights from the recipe's seed."""
    config = LlamaConfig(
        **dataclasses.asdict(recipe.tiny),
        vocab_size=len(byte_tokenizer()),
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    set_seed(recipe.seed)
    return LlamaForCausalLM(config)


def _saved(model: Any) -> Any:
    """Save the model to a temporary folder, from where TRL loads the reference; return the model.

    The temporary folder is removed when the process ends.
    """
    folder = tempfile.mkdtemp(prefix="headloss-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # TRL loads the reference on every rank, possibly from rank-local files, so that every rank must
    # save the model; model.save_pretrained would save on one rank only
    model.config.save_pretrained(folder)
    save_model(model, f"{folder}/model.safetensors", metadata={"format": "pt"})
    model.config._name_or_path = model.name_or_path = folder
    return model


def byte_tokenizer(longest: int = 512) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, a padding token and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([PAD, END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )


def adapter(recipe: Recipe) -> Any:
    """Return PEFT's configuration of the recipe's adapter, or None without an adapter."""
    if recipe.lora is None:
        return None
    from peft import LoraConfig

    check_fields(recipe.lora, LoraConfig, at="lora")
    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **recipe.lora})
    except (ValueError, TypeError) as error:
        raise RecipeError(f"lora: {' '.join(str(error).split())}") from None
