"""A task of spelling words backward: problems, a letter tokenizer, and models with large logits.

Imported by clip_sides.py and stacks.py. Page: docs/does-it-matter.md.

The standard deviation of the head's initial rows sets the size of the largest logit. Supervised
training teaches the model to spell words backward, and leaves the logits about as large as before.
Models and data are made locally, without a network.

B prompts or completions, P and C tokens of a prompt and of a completion, H hidden width, V
vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as TokenizerFast

import headloss as hl

LETTERS, SHORTEST, LONGEST = string.ascii_lowercase[:12], 3, 6
PAD, END, ARROW = "<pad>", "<end>", ">"
COMPLETION = LONGEST + 1  # largest number of tokens of an answer, with the end token


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model and of its supervised training."""

    hidden: int = 512
    layers: int = 4
    heads: int = 8
    # The vocabulary is larger than the 15 tokens that the spelling task uses.
    vocabulary: int = 4096
    batch: int = 128
    steps: int = 1500
    learning_rate: float = 5e-4
    # Training ends when the model solves a fraction `solved` of the held-out problems.
    solved: float = 0.6


SMALL = Size(hidden=16, layers=1, heads=2, vocabulary=64, batch=16, steps=3)


# ---------------------------------------------------------------------- the task


def words(seed: int, count: int) -> list[str]:
    """Return distinct words, in an order given by the seed alone."""
    chosen = random.Random(seed)
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn["".join(chosen.choices(LETTERS, k=chosen.randint(SHORTEST, LONGEST)))] = None
    return list(drawn)


HELD_OUT = words(1, 512)


def training_words(seed: int, count: int) -> list[str]:
    """Return words that are not held out."""
    return [word for word in words(seed + 2, count + len(HELD_OUT)) if word not in HELD_OUT][:count]


def tokenizer() -> TokenizerFast:
    """Return a tokenizer whose tokens are the letters, the arrow ">" between a word and the word
    spelled backward, padding, and the end of the text."""
    vocabulary = {token: i for i, token in enumerate([PAD, END, ARROW, *LETTERS])}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    letters.decoder = decoders.Fuse()
    return TokenizerFast(
        tokenizer_object=letters, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )


def reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return the rewards for TRL: the fraction of letters that a completion has in common with the
    answer (the prompt's word spelled backwards) at equal positions."""
    pairs = zip(completions, answer, strict=True)
    return [sum(map(str.__eq__, c, a)) / max(len(c), len(a)) for c, a in pairs]


def rows(problems: list[str]) -> list[dict[str, str]]:
    return [{"prompt": word + ARROW, "answer": word[::-1]} for word in problems]


# ---------------------------------------------------------------------- models


def model_of(size: Size, head_std: float, seed: int) -> LlamaForCausalLM:
    """Return a random Llama with an untied head."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=head_std)
    return model


def demonstrations(batch: list[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (ids, labels), both [B, P + C], right-padded; prompts have the label -100."""
    index = tokenizer().get_vocab()
    ids = torch.zeros(len(batch), LONGEST + 1 + COMPLETION, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for i, word in enumerate(batch):
        text = [index[c] for c in (*word, ARROW, *word[::-1], END)]
        ids[i, : len(text)] = torch.tensor(text)
        labels[i, len(word) + 1 : len(text)] = ids[i, len(word) + 1 : len(text)]
    return ids.to(device), labels.to(device)


def hidden_states(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return hidden states [B, P + C, H] in bfloat16, by autocast as in training."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        out = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    return out.last_hidden_state.to(torch.bfloat16)


@torch.no_grad()
def largest_logit(model: Any, device: torch.device) -> float:
    """Return the largest logit over the answers of held-out problems, by a float64 head."""
    ids, labels = demonstrations(HELD_OUT[:128], device)
    scored = hidden_states(model, ids)[:, :-1][labels[:, 1:] >= 0]
    return float((scored.double() @ model.lm_head.weight.double().t()).abs().max())


@torch.no_grad()
def solved(model: Any, problems: list[str], device: torch.device) -> float:
    """Return the share of problems solved by greedy completions."""
    letters = tokenizer()
    batch = letters([w + ARROW for w in problems], padding=True, padding_side="left")
    batch = {k: torch.tensor(batch[k], device=device) for k in ("input_ids", "attention_mask")}
    was_training = model.training
    model.eval()
    with torch.autocast(device.type, torch.bfloat16):
        out = model.generate(**batch, max_new_tokens=COMPLETION, do_sample=False)
    model.train(was_training)
    texts = letters.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(t == word[::-1] for t, word in zip(texts, problems, strict=True)) / len(problems)


def _batches(problems: list[str], size: Size, seed: int) -> Iterator[list[str]]:
    chosen = random.Random(seed)
    for _ in range(size.steps):
        yield chosen.sample(problems, size.batch)


def train(size: Size, wanted: float, device: torch.device, seed: int = 0) -> tuple[Any, dict]:
    """Train a model with a largest logit near `wanted`; return the model and its training
    record."""
    unit = largest_logit(model_of(size, 1.0, seed).to(device), device)
    std = wanted / unit
    model = model_of(size, std, seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), size.learning_rate, weight_decay=0.0)
    share, step = 0.0, 0
    for step, batch in enumerate(_batches(training_words(seed, 8192), size, seed), 1):
        ids, labels = demonstrations(batch, device)
        hidden = hidden_states(model, ids)
        head = hl.Head(model.lm_head.weight.to(torch.bfloat16))
        loss = hl.head_loss(hidden, head, hl.Batch.from_labels(labels), hl.cross_entropy()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == size.steps:
            share = solved(model, HELD_OUT[:256], device)
            if share >= size.solved:
                break
    how = {"wanted": wanted, "largest": largest_logit(model, device), "head_std": std}
    return model, how | {"steps": step, "solved": share, "size": dataclasses.asdict(size)}


def saved(folder: Path, size: Size, wanted: float, device: torch.device) -> Path:
    """Return the folder of a trained model, made once; its policy.json is the training record."""
    path = folder / f"policy-{size.hidden}-{wanted:g}"
    if not path.exists():
        model, how = train(size, wanted, device)
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        tokenizer().save_pretrained(partial)
        (partial / "policy.json").write_text(json.dumps(how, indent=1) + "\n")
        partial.rename(path)
    return path


def load(path: Path, device: torch.device) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
