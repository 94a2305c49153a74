"""Terms that are added to headloss's TRL trainers: a step is that of one large batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
import trl
from datasets import Dataset
from test_rl import make as make_rl
from test_trl_grpo import make
from test_trl_sft_dpo import dpo, sft
from trl_case import assert_same_run, reward, train

import headloss as hl
from headloss import rl
from headloss.integrations.trl import DPOTrainer, GRPOTrainer, SFTTrainer

FURTHER = 0.1 * hl.z_loss() + 0.2 * hl.z_loss().over("sequence_mean")
FURTHER += 0.05 * hl.entropy().over(hl.fixed_length(5))


def adding(kind: type, terms: Any = FURTHER) -> type:
    class Adding(kind):
        def objective(self, inputs):
            return super().objective(inputs) + terms

    return Adding


def assert_same_step(cut: Any, large: Any) -> None:
    (got, moved), (want, weights) = train(cut), train(large)
    assert got[0]["loss"] == pytest.approx(want[0]["loss"], rel=2e-5)
    assert got[0]["grad_norm"] == pytest.approx(want[0]["grad_norm"], rel=2e-5)
    for name, value in weights.items():
        torch.testing.assert_close(moved[name], value, rtol=2e-5, atol=2e-6)


SFT: list[dict[str, Any]] = [
    {"completion_only_loss": True},
    {"padding_free": True, "max_length": None},  # documents are sequences
]


@pytest.mark.parametrize("options", SFT, ids=["padded", "packed"])
def test_sft(options: dict[str, Any]) -> None:
    options = {**options, "max_steps": 1}
    large = sft(adding(SFTTrainer), per_device_train_batch_size=8, **options)
    for rows in (4, 2):
        cut = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows}
        assert_same_step(sft(adding(SFTTrainer), **cut, **options), large)
        large = sft(adding(SFTTrainer), per_device_train_batch_size=8, **options)


def test_dpo() -> None:
    large = dpo(adding(DPOTrainer), per_device_train_batch_size=8, max_steps=1)
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
    assert_same_step(dpo(adding(DPOTrainer), **cut), large)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "luspo"])
def test_grpo(loss_type: str) -> None:
    options = {"loss_type": loss_type, "max_steps": 1, "beta": 0.1, "num_generations": 2}
    large = make(adding(GRPOTrainer), per_device_train_batch_size=8, **options)
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert_same_step(make(adding(GRPOTrainer), **cut, **options), large)


@pytest.mark.parametrize("kind", [rl.GSPO, rl.PPO])
def test_rl(kind: type) -> None:
    options = {"max_steps": 1, "num_generations": 2}
    large = make_rl(adding(kind), per_device_train_batch_size=8, **options)
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert_same_step(make_rl(adding(kind), **cut, **options), large)


# ---------------------------------------------------------------------- nothing scored


def without_answers(trainer: Any, scored: int) -> Any:
    """Evaluates rows of which only the first ones have anything to score."""
    rows = [dict(row) for row in trainer.train_dataset]
    for row in rows[scored:]:
        if "labels" in row:
            row["labels"] = [-100] * len(row["labels"])
        for name in ("chosen_ids", "rejected_ids"):
            if name in row:
                row[name] = []
    trainer.eval_dataset = Dataset.from_list(rows)
    return trainer.evaluate()


@pytest.mark.parametrize("scored", [0, 1, 5])
@pytest.mark.parametrize("kinds", [(trl.SFTTrainer, SFTTrainer), (trl.DPOTrainer, DPOTrainer)])
def test_evaluation_of_batches_with_nothing_scored(kinds: tuple[type, type], scored: int) -> None:
    """TRL's SFT has 0 there, and its DPO the loss of a margin of 0."""
    of = sft if kinds[1] is SFTTrainer else dpo
    more = {} if of is sft else {"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.3]}
    want, got = (
        without_answers(of(kind, per_device_eval_batch_size=2, **more), scored) for kind in kinds
    )
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-5, abs=1e-6)


def test_training_on_pairs_without_tokens() -> None:
    class Truncated:
        """A collator of TRL's whose first pair has no answer left."""

        def __init__(self, stock: Any) -> None:
            self.stock = stock

        def __call__(self, rows: list[dict[str, Any]]) -> Any:
            found = self.stock(rows)
            found["completion_mask"][[0, len(rows)]] = 0
            return found

    found = []
    for kind in (trl.DPOTrainer, DPOTrainer):
        trainer = dpo(kind, gradient_accumulation_steps=2)
        trainer.data_collator = Truncated(trainer.data_collator)
        found.append(trainer)
    assert_same_run(*found, ties=("rewards/accuracies",))
