"""Log entries of `Trainer` under DDP on every rank of a test world."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import distributed

import headloss as hl


def rows() -> list[dict[str, list[int]]]:
    """Return 16 rows, some with few labels, so that a mean over ranks differs from the mean over
    rows."""
    torch.manual_seed(3)
    ids = torch.randint(3, 30, (16, 8))
    labels = ids.clone()
    for row, length in enumerate([2, 8, 3, 7, 2, 6, 8, 4] * 2):
        labels[row, length:] = -100
    pairs = zip(ids.tolist(), labels.tolist(), strict=True)
    return [{"input_ids": x, "labels": y} for x, y in pairs]


def trained(per_rank: int, objective: Any = None) -> list[dict[str, float]]:
    """Return the log entries of two steps with two micro-batches, and of an evaluation."""
    import transformers
    from test_head_models import tiny

    from headloss.integrations.transformers import apply

    if distributed.is_initialized():
        os.environ |= {
            "RANK": str(distributed.get_rank()), "LOCAL_RANK": str(distributed.get_rank()),
            "WORLD_SIZE": str(distributed.get_world_size()), "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=per_rank,
            per_device_eval_batch_size=per_rank, gradient_accumulation_steps=2, max_steps=4,
            logging_steps=2, learning_rate=0.1, optim="sgd", report_to="none", use_cpu=True,
            save_strategy="no", disable_tqdm=True, seed=1,
            ddp_backend="gloo" if distributed.is_initialized() else None,
        )  # fmt: skip
        model = tiny("llama")
        apply(model, objective or hl.cross_entropy() + 1e-3 * hl.z_loss())
        trainer = transformers.Trainer(
            model, arguments, transformers.default_data_collator,
            train_dataset=rows(), eval_dataset=rows()[:8],
        )  # fmt: skip
        trainer.train()
        assert distributed.is_initialized() == (trainer.args.world_size == 2)
        trainer.evaluate()
    return trainer.state.log_history
