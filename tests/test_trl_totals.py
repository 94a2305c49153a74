"""A step of headloss's TRL trainers with added terms equals a step on one large batch."""

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
from trl_case import assert_same_run, llama, load, train

import headloss as hl
from headloss import rl
from headloss.integrations.trl import DPOTrainer, GRPOTrainer, SFTTrainer
from headloss.integrations.trl.dpo import preference_batch

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


def large_batch(
    trainer: Any, terms: Any
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return loss, trained weights and terms of a step on all rows at once, from plain logits."""
    model = load(llama())
    rows = [{k: v for k, v in row.items() if k != "text"} for row in trainer.train_dataset]
    inputs = trainer.data_collator(rows)
    logits = model(inputs["input_ids"], inputs["attention_mask"]).logits[:, :-1].float()
    if "labels" in inputs:
        batch = hl.Batch(inputs["labels"][:, 1:])
    else:  # DPO: the untrained model is the reference model.
        ids = inputs["input_ids"][:, 1:, None]
        logps = logits.detach().log_softmax(-1).gather(-1, ids).squeeze(-1)
        chosen, rejected = (logps * inputs["completion_mask"][:, 1:]).sum(1).chunk(2)
        inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        batch = preference_batch(inputs)
    out = hl.logits_loss(logits, batch, terms)
    out.loss.backward()
    moved = {n: (p - 0.5 * p.grad).detach() for n, p in model.named_parameters()}
    return out.loss.item(), moved, out.terms


def same_as_large_batch(of: Any, micro_batches: int, ranks: int = 1) -> list[dict[str, float]]:
    """Check an SGD step on all twelve rows against one large batch; return the logs."""
    cut = {
        "per_device_train_batch_size": 12 // micro_batches // ranks,
        "gradient_accumulation_steps": micro_batches,
        "max_steps": 1,
    }
    trainer = of(adding(SFTTrainer if of is sft else DPOTrainer), **cut)
    loss, weights, terms = large_batch(
        trainer, (hl.cross_entropy() if of is sft else hl.dpo(beta=trainer.beta)) + FURTHER
    )
    logs, moved = train(trainer)
    assert logs[0]["loss"] == pytest.approx(loss, rel=2e-5)
    for name, value in terms.items():
        assert logs[0][f"headloss/{name}"] == pytest.approx(value.item(), rel=2e-5), name
    for name, value in weights.items():
        torch.testing.assert_close(moved[name], value, rtol=2e-5, atol=2e-6)
    return logs


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("of", [sft, dpo])
def test_a_term_that_is_added(of: Any, micro_batches: int) -> None:
    same_as_large_batch(of, micro_batches)


def test_documents_of_packed_rows_are_sequences() -> None:
    options: dict[str, Any] = {"padding_free": True, "max_length": None, "max_steps": 1}
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    large = sft(adding(SFTTrainer), per_device_train_batch_size=8, **options)
    assert_same_step(sft(adding(SFTTrainer), **cut, **options), large)


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


# ---------------------------------------------------------------------- no scored tokens


def without_answers(trainer: Any, scored: int) -> Any:
    """Evaluate rows of which only the first `scored` have scored tokens."""
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
    """An evaluation of batches without scored tokens agrees with TRL (SFT 0, DPO the loss of margin
    0)."""
    of = sft if kinds[1] is SFTTrainer else dpo
    more = {} if of is sft else {"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.3]}
    want, got = (
        without_answers(of(kind, per_device_eval_batch_size=2, **more), scored) for kind in kinds
    )
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-5, abs=1e-6)


def test_training_on_pairs_without_tokens() -> None:
    class Truncated:
        """A TRL collator whose first pair has fully truncated answers."""

        def __init__(self, stock: Any) -> None:
            self.stock = stock

        def __call__(self, rows: list[dict[str, Any]]) -> Any:
            inputs = self.stock(rows)
            inputs["completion_mask"][[0, len(rows)]] = 0
            return inputs

    trainers = []
    for kind in (trl.DPOTrainer, DPOTrainer):
        trainer = dpo(kind, gradient_accumulation_steps=2)
        trainer.data_collator = Truncated(trainer.data_collator)
        trainers.append(trainer)
    assert_same_run(*trainers, ties=("rewards/accuracies",))
