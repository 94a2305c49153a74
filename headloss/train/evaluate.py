"""How many of the problems that were kept aside a model solves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from trl.data_utils import apply_chat_template, is_conversational

from .task import Row, Task

ROWS = 128  # that are generated at once
SOLVED = 0.999  # a score of 1, less rounding


def held_out(trainer: Any, tokenizer: Any, task: Task, longest: int) -> dict[str, Any]:
    """Greedy completions of at most `longest` tokens, scored as in training.

    Ranks take every n-th problem and share their scores.

    Returns:
        "accuracy", the share of scores of 1; "score", their mean; "problems"; "samples", some
        prompts with completion, answer and score.
    """
    accelerator = trainer.accelerator
    rank, ranks = accelerator.process_index, accelerator.num_processes
    per_rank = -(-len(task.held_out) // ranks)  # as many calls on each, for sharded weights
    places = [(i * ranks + rank) % len(task.held_out) for i in range(per_rank)]
    scores, samples = [], []
    with _inference(trainer) as model:
        for start in range(0, per_rank, ROWS):
            rows = [task.held_out[i] for i in places[start : start + ROWS]]
            completions = generate(model, tokenizer, rows, longest)
            columns = {name: [row.get(name) for row in rows] for name in rows[0]}
            prompts = columns.pop("prompt")
            got = task.reward(prompts=prompts, completions=completions, **columns)
            scores += [0.0 if score is None else float(score) for score in got]
            samples += [
                {"prompt": p, "completion": c, "answer": row["answer"], "score": s}
                for p, c, row, s in zip(prompts, completions, rows, got, strict=True)
            ]
    mine = torch.tensor(scores, dtype=torch.float64, device=accelerator.device).to(torch.float32)
    every = accelerator.gather(mine).view(ranks, -1).T.flatten()[: len(task.held_out)]
    return {
        "accuracy": float((every >= SOLVED).double().mean()),
        "score": float(every.double().mean()),
        "problems": len(every),
        "samples": samples[:8],
    }


def generate(model: Any, tokenizer: Any, rows: list[Row], longest: int) -> list[Any]:
    """Greedy completions, in the form of the prompts."""
    chat = is_conversational(rows[0])
    texts = [
        apply_chat_template({"prompt": row["prompt"]}, tokenizer)["prompt"]
        if chat
        else row["prompt"]
        for row in rows
    ]
    inputs = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=not chat
    ).to(model.device)
    ids = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=longest,
        pad_token_id=tokenizer.pad_token_id,
    )
    found = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in found] if chat else found


@contextlib.contextmanager
def _inference(trainer: Any) -> Iterator[Any]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    training, cache = model.training, model.config.use_cache
    model.eval()
    model.config.use_cache = True
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            yield model
    finally:
        model.train(training)
        model.config.use_cache = cache
