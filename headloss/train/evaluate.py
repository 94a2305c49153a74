"""Evaluation of a model on the held-out problems."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from trl.data_utils import apply_chat_template, is_conversational

from ..integrations.sharding import in_step, is_fsdp2
from .task import SOLVED, Row, Task

ROWS = 128  # problems generated in one batch


def held_out(trainer: Any, tokenizer: Any, task: Task, longest: int) -> dict[str, Any]:
    """Score greedy and sampled completions of the held-out problems, of at most `longest` tokens.

    Each of n ranks scores every n-th problem, and the ranks exchange their scores.

    Returns:
        "accuracy", the share of greedy completions of score 1; "score", their mean score;
        "sampled_accuracy" and "sampled_score", the share and mean score of one completion per
        problem sampled at the training temperature; "problems", the number of problems; "samples",
        some prompts with greedy completion, answer and score. Runs with equal seeds give a model
        equal scores.
    """
    accelerator = trainer.accelerator
    rank, ranks = accelerator.process_index, accelerator.num_processes
    # The number of batches is equal on all ranks, because generation with sharded weights needs
    # every rank.
    per_rank = -(-len(task.held_out) // ranks)
    rows = [task.held_out[(i * ranks + rank) % len(task.held_out)] for i in range(per_rank)]

    def of_all(scores: list[float]) -> Tensor:
        mine = torch.tensor(scores, dtype=torch.float32, device=accelerator.device)
        return accelerator.gather(mine).view(ranks, -1).T.flatten()[: len(task.held_out)].double()

    with _inference(trainer) as model:
        completions, scores = _scored(model, tokenizer, task, rows, longest)
        temperature = getattr(trainer.args, "temperature", 1.0)
        seed = trainer.args.seed + rank
        _, sampled = _scored(model, tokenizer, task, rows, longest, temperature, seed)
    greedy, drawn = of_all(scores), of_all(sampled)
    return {
        "accuracy": float((greedy >= SOLVED).double().mean()),
        "score": float(greedy.mean()),
        "sampled_accuracy": float((drawn >= SOLVED).double().mean()),
        "sampled_score": float(drawn.mean()),
        "problems": len(greedy),
        "samples": [
            {"prompt": row["prompt"], "completion": c, "answer": row["answer"], "score": s}
            for row, c, s in zip(rows[:8], completions, scores, strict=False)
        ],
    }


def _scored(
    model: Any,
    tokenizer: Any,
    task: Task,
    rows: list[Row],
    longest: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[list[Any], list[float]]:
    """Return (completions, scores) of all rows.

    Each batch of prompts sets the seed anew, so that the number of random numbers drawn in one
    batch does not change the samples of the next batch.
    """
    completions, scores = [], []
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        if temperature > 0:
            torch.manual_seed(seed + start)
        found = generate(model, tokenizer, part, longest, temperature)
        completions += found
        scores += [0.0 if score is None else score for score in task.scores(part, found)]
    return completions, scores


def generate(
    model: Any, tokenizer: Any, rows: list[Row], longest: int, temperature: float = 0.0
) -> list[Any]:
    """Return one completion per prompt, in the form of the prompts (text or conversation);
    temperature 0 means greedy decoding."""
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
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_p=1.0 if temperature > 0 else None,
        top_k=0 if temperature > 0 else None,
        max_new_tokens=longest,
        pad_token_id=tokenizer.pad_token_id,
    )
    found = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in found] if chat else found


@contextlib.contextmanager
def _inference(trainer: Any) -> Iterator[Any]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    training, cache = model.training, model.config.use_cache
    home = model.device  # under FSDP, the model is on the CPU until the first training step
    moves = home.type == "cpu" and not is_fsdp2(model)
    model.eval()
    model.config.use_cache = True
    if moves:
        model.to(trainer.accelerator.device)
    cuda = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(cuda),
            torch.no_grad(),
            trainer.accelerator.autocast(),
            in_step(model),
        ):
            yield model
    finally:
        if moves:
            model.to(home)
        model.train(training)
        model.config.use_cache = cache
