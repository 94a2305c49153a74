"""Stock TRL's SFT and DPO trainers and headloss agree step by step."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
import trl
from datasets import Dataset
from peft import LoraConfig
from trl_case import ARGUMENTS, assert_same_run, folder, llama, load, saved, tokenizer, train

import headloss as hl
from headloss.integrations.trl import DPOTrainer, SFTTrainer
from headloss.integrations.trl.forward import Request


def text(start: int, length: int) -> str:
    return " ".join(f"w{(start * 13 + i * i) % 110 + 3}" for i in range(length))


def settings(**options: Any) -> dict[str, Any]:
    ours = {name: value for name, value in ARGUMENTS.items() if name != "shuffle_dataset"}
    return {
        "output_dir": folder(),
        "per_device_train_batch_size": 3,
        "max_steps": 3,
        "max_length": 16,
        **ours,
        **options,
    }


# ---------------------------------------------------------------------- supervised


def sft(kind: type, path: str | None = None, peft_config: Any = None, **options: Any) -> Any:
    lengths = [3, 7, 12, 5, 9, 4, 11, 6, 8, 10, 3, 15]
    rows: dict[str, list[str]] = {"text": [text(i, n) for i, n in enumerate(lengths)]}
    if options.get("completion_only_loss"):
        rows = {
            "prompt": [text(i, 3) for i in range(12)],
            "completion": [" " + text(i + 5, n) for i, n in enumerate(lengths)],
        }
    torch.manual_seed(0)
    return kind(
        model=load(path or llama()),
        args=trl.SFTConfig(**settings(**options)),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def same_sft(**options: Any) -> list[dict[str, float]]:
    return assert_same_run(sft(trl.SFTTrainer, **options), sft(SFTTrainer, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"completion_only_loss": True, "gradient_accumulation_steps": 2},
        {"packing": True, "packing_strategy": "bfd"},
        {"padding_free": True, "max_length": None, "gradient_accumulation_steps": 2},
        {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
        {"path": "mixtral", "router_aux_loss_coef": 0.3, "gradient_accumulation_steps": 2},
        {"path": "gemma2"},
        {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_sft(options: dict[str, Any]) -> None:
    if "path" in options:
        options = {**options, "path": saved(options["path"])}
    got = same_sft(**options)
    # TRL averages `mean_token_accuracy` over several micro-batches differently, so compare it only
    # for one micro-batch.
    if "gradient_accumulation_steps" not in options:
        assert got[0]["headloss/cross_entropy/top1"] == pytest.approx(
            got[0]["mean_token_accuracy"], abs=1e-6
        )


def test_sft_evaluation() -> None:
    found = []
    for kind in (trl.SFTTrainer, SFTTrainer):
        trainer = sft(kind)
        found.append(trainer.evaluate(trainer.train_dataset))
    want, got = found
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert got[name] == pytest.approx(want[name], rel=1e-5)


def test_an_objective_of_ones_own() -> None:
    class Smooth(SFTTrainer):
        def objective(self, inputs):
            return hl.cross_entropy(label_smoothing=0.1) + 1e-2 * hl.z_loss()

    logs, _ = train(sft(Smooth, max_steps=1, gradient_accumulation_steps=2))
    plain, _ = train(sft(SFTTrainer, max_steps=1, gradient_accumulation_steps=2))
    assert logs[0]["loss"] > plain[0]["loss"] + 0.1
    assert logs[0]["headloss/tokens"] == plain[0]["headloss/tokens"]


def test_a_copy_of_a_trainers_model_runs_its_own_weights() -> None:
    """A copy of a trainer's model (averaged weights, frozen reference) runs its own weights, unlike
    TRL's wrapper."""
    model = sft(SFTTrainer).model
    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
    ids = torch.randint(3, 100, (1, 6))
    assert copy(ids).logits.abs().max() == 0
    assert model(ids).logits.abs().max() > 0.01
    request = Request(batch=hl.Batch(ids[:, 1:]), objective=hl.cross_entropy())
    loss = request.of(copy, input_ids=ids).loss
    torch.testing.assert_close(loss, torch.tensor(float(copy.config.vocab_size)).log())


def test_packed_documents_are_sequences() -> None:
    """The loss with one mean per document does not depend on whether each document is a row, or
    documents are packed into one row, with and without padding."""

    class PerSequence(SFTTrainer):
        def objective(self, inputs):
            return hl.Objective.of(hl.cross_entropy().over("sequence_mean"))

    options: dict[str, Any] = {"max_steps": 1, "max_length": None}
    want, weights = train(sft(PerSequence, **options))
    for more in ({}, {"pad_to_multiple_of": 16}):
        got, moved = train(sft(PerSequence, **options, padding_free=True, **more))
        assert got[0]["loss"] == pytest.approx(want[0]["loss"], rel=1e-5)
        assert got[0]["headloss/segments"] == want[0]["headloss/segments"] == 3
        torch.testing.assert_close(moved, weights, rtol=1e-4, atol=1e-5)


def test_lora_on_the_head_learns() -> None:
    lora = LoraConfig(r=4, target_modules=["lm_head"])
    logs, parameters = train(sft(SFTTrainer, peft_config=lora, max_steps=12))
    epoch = len(logs) // 3  # four batches per epoch
    assert sum(x["loss"] for x in logs[-epoch:]) < sum(x["loss"] for x in logs[:epoch])
    assert all(bool(p.any()) for p in parameters.values())


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("loss_type: is not supported by headloss's SFTTrainer", {"loss_type": "dft"}),
        ("label_smoothing_factor: is not supported", {"label_smoothing_factor": 0.1}),
        ("use_liger_kernel: is not supported", {"use_liger_kernel": True}),
    ],
)
def test_sft_refusals(match: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=match):
        sft(SFTTrainer, **options)


# ---------------------------------------------------------------------- preference


def dpo(kind: type, path: str | None = None, peft_config: Any = None, **options: Any) -> Any:
    rows = {
        "prompt": [text(i, 2 + i % 3) for i in range(12)],
        "chosen": [" " + text(i + 3, 2 + i % 5) for i in range(12)],
        "rejected": [" " + text(i + 7, 1 + i % 4) for i in range(12)],
    }
    torch.manual_seed(0)
    return kind(
        model=load(path or llama()),
        args=trl.DPOConfig(**settings(**options)),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def same_dpo(**options: Any) -> list[dict[str, float]]:
    theirs, ours = dpo(trl.DPOTrainer, **options), dpo(DPOTrainer, **options)
    return assert_same_run(theirs, ours, ties=("rewards/accuracies",))


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "sigmoid", "gradient_accumulation_steps": 2},
        {"loss_type": "ipo", "beta": 0.4, "learning_rate": 0.05},
        {"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.2], "learning_rate": 0.05},
        {"precompute_ref_log_probs": True},
        {"path": "mixtral", "router_aux_loss_coef": 0.3},
        {"path": "granite"},
        {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)},
    ],
    ids=lambda options: "-".join(f"{k}" for k in options),
)
def test_dpo(options: dict[str, Any]) -> None:
    if "path" in options:
        options = {**options, "path": saved(options["path"])}
    got = same_dpo(**options)
    assert got[-1]["rewards/margins"] != 0.0


def test_dpo_evaluation() -> None:
    found = []
    for kind in (trl.DPOTrainer, DPOTrainer):
        trainer = dpo(kind)
        trainer.eval_dataset = trainer.train_dataset
        found.append(trainer.evaluate())
    want, got = found
    for name in ("eval_loss", "eval_entropy", "eval_logits/chosen", "eval_mean_token_accuracy"):
        assert got[name] == pytest.approx(want[name], rel=1e-5)


@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"loss_type: is not supported by .* got \['hinge'\]", {"loss_type": ["sigmoid", "hinge"]}),
        ("f_divergence_type: is not supported", {"f_divergence_type": "forward_kl"}),
        ("ld_alpha: is not supported", {"ld_alpha": 0.5}),
        ("use_weighting: is not supported", {"use_weighting": True}),
    ],
)
def test_dpo_refusals(match: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=match):
        dpo(DPOTrainer, **options)


@pytest.mark.parametrize(("make", "kind"), [(sft, SFTTrainer), (dpo, DPOTrainer)])
def test_an_objective_that_is_a_bare_term(make: Any, kind: Any) -> None:
    def losses(objective: Any) -> list[float]:
        own = type("Own", (kind,), {"objective": lambda self, inputs: objective})
        return [log["loss"] for log in train(make(own, max_steps=2))[0] if "loss" in log]

    bare = hl.cross_entropy(label_smoothing=0.1)
    assert losses(bare) == losses(1.0 * bare)
