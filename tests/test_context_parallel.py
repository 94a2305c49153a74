"""Context parallelism under Trainer and accelerate: two ranks, each with one part of each row,
train as one rank does.

The models have no attention, since ring attention needs a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_head_models import tiny
from test_step_totals import OBJECTIVES, assert_same, collate, run
from torch import Tensor
from worlds import World, world_of

import headloss as hl

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as made:
        yield made


def in_quarters(pairs: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to a multiple of 4: each of two ranks gets one chunk from the front and one from the
    back."""
    batch = collate(pairs)
    columns = -batch["input_ids"].shape[1] % 4
    return {
        name: torch.nn.functional.pad(x, (0, columns), value=-100 if name == "labels" else 0)
        if x.dim() == 2
        else x
        for name, x in batch.items()
    }


def step(name: str, pairs: int, **settings: Any) -> Any:
    model = tiny("llama", num_hidden_layers=0)
    return run(OBJECTIVES[name](), pairs, model=model, collate=in_quarters, **settings)


def tokens_alone(pairs: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = in_quarters(pairs)
    return {name: batch[name] for name in ("input_ids", "labels")}


def placed() -> Any:
    """Return accelerate's configuration for a rank with a part of each row."""
    from accelerate import ParallelismConfig

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", ACCELERATE_USE_CPU="true")
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None  # needs a GPU
    return ParallelismConfig(cp_size=2)


def parts(names: list[str], pairs: int, **settings: Any) -> list[Any]:
    return [step(name, pairs, parallelism_config=placed(), **settings) for name in names]


def without_average(names: list[str], pairs: int) -> list[Any]:
    return parts(names, pairs, average_tokens_across_devices=False)


def check(world: World, function: Any, names: list[str], pairs: int) -> None:
    want = {name: step(name, pairs) for name in names}
    for steps in world.run(function, names, pairs, seconds=400):
        for name, got in zip(names, steps, strict=True):
            assert_same(got, want[name])
            assert got[3] == pytest.approx(want[name][3], rel=2e-5)


def test_two_micro_batches(world: World) -> None:
    """Two micro-batches agree with one rank in loss, norm, weights and evaluation.

    Each sequence is split over both ranks. One loss is a mean over tokens, one has a term per
    sequence; the batch has fields with one value per token and with one value per sequence.
    """
    check(world, parts, ["tokens", "gspo"], 2)


@pytest.mark.slow
def test_terms(world: World) -> None:
    names = ["sequence_mean", "fixed_length", "where", "sum", "grpo", "dpo", "constant"]
    check(world, parts, names, 2)
    check(world, parts, ["gspo", "sum"], 4)
    check(world, without_average, ["gspo", "tokens"], 4)


def stock() -> tuple[Any, list[str]]:
    """Train with `transformers.Trainer` and `apply`; return the results, and the errors of
    unsupported losses."""
    config, refused = placed(), []
    objective = hl.cross_entropy() + 0.1 * hl.z_loss()
    plain: Any = {"kind": transformers.Trainer, "collate": tokens_alone}
    plain["parallelism_config"] = config
    calls = [(hl.gspo(), plain), (hl.cross_entropy(), {**plain, "collate": in_quarters})]
    for terms, settings in calls:
        try:
            run(terms, 2, model=tiny("llama", num_hidden_layers=0), **settings)
        except ValueError as error:
            refused.append(str(error))
    model = tiny("llama", num_hidden_layers=0)
    return run(objective, 2, model=model, fields=(), **plain), refused


def test_trainer_with_apply(world: World) -> None:
    """Under Trainer's context parallelism, a model after `apply(model)` gives correct means over
    tokens; sequence losses, and batch fields that Trainer does not shard, raise errors.

    The loss receives `shift_labels` and the token count. A rank holds only a shard of a sequence,
    so sequence losses cannot be computed; fields that Trainer does not shard do not fit the
    sharded labels.
    """
    objective = hl.cross_entropy() + 0.1 * hl.z_loss()
    model = tiny("llama", num_hidden_layers=0)
    want = run(objective, 2, model=model, collate=tokens_alone, fields=())
    for got, refused in world.run(stock, seconds=400):
        assert_same(got, want)
        assert refused[0].startswith("shift_labels: got them with ")
        assert "as of context or sequence parallelism, whose parts of seq" in refused[0]
        assert refused[1].startswith("old_logps: got shape (4, 8), want (4, 4) per token")


# ---------------------------------------------------------------------- TRL


def supervised(parallel: bool) -> Any:
    """Return logged losses, TRL's metrics and weights after two steps of two micro-batches."""
    import trl
    from datasets import Dataset
    from trl_case import ARGUMENTS, folder, tokenizer

    from headloss.integrations.trl import SFTTrainer

    class PerSequence(SFTTrainer):
        def objective(self, inputs: dict[str, Any]) -> hl.Objective:
            return hl.cross_entropy() + 0.3 * hl.unlikelihood().over("sequence_mean")

    generator = torch.Generator().manual_seed(5)
    lengths = (3, 7, 11, 5, 9, 4, 12, 6)
    ids = [torch.randint(2, 37, (n,), generator=generator).tolist() for n in lengths]
    more: Any = {"parallelism_config": placed()} if parallel else {}
    arguments = trl.SFTConfig(
        **ARGUMENTS, output_dir=folder(), per_device_train_batch_size=2, max_steps=2,
        gradient_accumulation_steps=2, pad_to_multiple_of=4, **more,
    )  # fmt: skip
    model = tiny("llama", num_hidden_layers=0)
    data = Dataset.from_dict({"input_ids": ids})
    trainer = PerSequence(model, arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    names = ("loss", "entropy", "mean_token_accuracy", "grad_norm")
    numbers = [log[name] for log in trainer.state.log_history[:2] for name in names]
    return numbers, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_sft(world: World) -> None:
    """TRL's SFT with a loss per sequence agrees with one rank, for documents split over both
    ranks."""
    pytest.importorskip("trl")
    numbers, weights = supervised(False)
    for found, moved in world.run(supervised, True, seconds=400):
        assert found == pytest.approx(numbers, rel=2e-5)
        torch.testing.assert_close(moved, weights, rtol=2e-5, atol=2e-6)
