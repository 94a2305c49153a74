"""Tests of models and trainers in mixed-precision wrappers, run on each of two ranks
(two_ranks.py)."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import test_trl_replay as replay
import torch
from peft import LoraConfig
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from transformers import AutoModelForCausalLM
from trl_case import load, saved

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "studies"))
import trainer_cases
import trainer_runs
from trainer_cases import SMALL, Case

import headloss as hl
from headloss import rl
from headloss.integrations.trl.forward import Request, add_head
from headloss.statistics.metrics import Metrics

BF16 = torch.bfloat16


# ---------------------------------------------------------------------- a single forward


def request(ids: Tensor) -> Request:
    """Make a request for headloss whose fields and coefficient bfloat16 cannot represent
    exactly."""
    targets = ids[:, 1:]
    generator = torch.Generator().manual_seed(int(ids.sum()))
    old = -4 - torch.rand(targets.shape, generator=generator)
    batch = hl.Batch(
        targets,
        advantages=torch.randn(len(ids), generator=generator),
        old_logps=old,
        ref_logps=old + 1e-3,
        share=torch.rand(targets.shape, generator=generator),
    )
    weight = torch.tensor(0.1001)
    objective = (
        hl.grpo().weighted("share")
        + 0.1001 * hl.kl()
        + hl.z_loss().over(
            hl.Reduction("per_weight", lambda lengths, *_: weight.expand_as(lengths))
        )
    )
    return Request(batch=batch, objective=objective)


def whole(parameter: Any) -> Tensor:
    grad = parameter.grad
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).float()


def same_forward(wrap: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """Check that loss, log-probs, metrics and gradient equal those of the unwrapped model."""
    generator = torch.Generator().manual_seed(distributed.get_rank())
    ids = torch.randint(100, (2, 7), generator=generator)
    plain = AutoModelForCausalLM.from_pretrained(saved("llama"), dtype=BF16)
    model = load(saved("llama"))
    for each in (plain, model):
        add_head(each)
    model = wrap(model)
    want, got = request(ids), request(ids)
    fields = {name: x.clone() for name, x in got.batch.fields.items()}  # type: ignore[union-attr]
    expected, found = want.of(plain, input_ids=ids), got.of(model, input_ids=ids)
    assert got.batch is not None
    for name, value in fields.items():
        assert torch.equal(got.batch.fields[name], value), name  # type: ignore[arg-type]
    assert got.result is not None and isinstance(got.result.metrics, Metrics)
    assert got.result.metrics.all_reduce()["tokens"].value == 24
    for name in ("loss", "log_probs", "entropy"):
        a, b = getattr(found, name), getattr(expected, name)
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(a, b), f"{name}: {a} and {b}"
    (found.loss / 3).backward()  # 1/3 is not representable in bfloat16
    (expected.loss / 3).backward()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        mean = a.grad.float()
        distributed.all_reduce(mean)
        error = (whole(b) - mean / 2).norm() / (mean / 2).norm()
        assert error < (6e-3 if dtype == BF16 else 1e-6), f"{name}: {error}"
    unrounded = Request().of(model, input_ids=ids, labels=ids)
    with torch.no_grad():
        passed = model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert torch.equal(unrounded.log_probs, expected.log_probs)  # type: ignore[arg-type]
    assert torch.allclose(passed.log_probs.float(), expected.log_probs, rtol=5e-3)


def sharded(output: torch.dtype | None, head_alone: bool = False) -> Callable[[Any], Any]:
    """Wrap a model in FSDP2 as accelerate does, with the last norm and the head in one FSDP group,
    or the head alone."""

    def wrap(model: Any) -> Any:
        policy = MixedPrecisionPolicy(
            param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=output
        )
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": policy}
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model.lm_head if head_alone else [model.model.norm, model.lm_head], **options)
        return fully_shard(model, **options)

    return wrap


def replicated(model: Any) -> Any:
    """Wrap a model in DDP with mixed precision, which casts the inputs."""
    policy = _MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    return DistributedDataParallel(copy.deepcopy(model), mixed_precision=policy)


FORWARDS: dict[str, Callable[[Any], Any]] = {
    "sharded": sharded(BF16),
    "sharded, float32 out": sharded(torch.float32),
    "sharded head": sharded(BF16, head_alone=True),
}


# ---------------------------------------------------------------------- trainers

BF16_RUN: dict[str, Any] = {"precision": "bf16"}
TRAINERS = {
    "sft": Case(trainer="SFTTrainer", wrapper="ddp", **BF16_RUN),
    "dpo": Case(trainer="DPOTrainer", wrapper="fsdp2", lora="body, head", **BF16_RUN),
    "grpo_trainer": Case(trainer="GRPOTrainer", wrapper="fsdp2", accumulation=2, **BF16_RUN),
    "grpo": Case(trainer="GRPO", wrapper="ddp", **BF16_RUN),
    "gspo": Case(trainer="GSPO", wrapper="fsdp2, gathered", **BF16_RUN),
    "cispo": Case(trainer="CISPO", wrapper="fsdp2", lora="body, head", **BF16_RUN),
    "ppo": Case(trainer="PPO", wrapper="fsdp2", tied=True, **BF16_RUN),
    "reinforce": Case(trainer="REINFORCE", wrapper="ddp", **BF16_RUN),
    "float32": Case(trainer="GSPO", wrapper="fsdp2", accumulation=2),
}


def same_run(case: Case, folder: Path) -> None:
    """Check a training run: in float32 it equals the reference run; in bf16 the gradient is close
    to that of a head computed in float64."""
    mine = trainer_runs.run(case, "headloss", SMALL, folder)
    kind, steps = ("exact", 1) if case.precision == "bf16" else (case.reference, trainer_runs.STEPS)
    other = trainer_runs.run(case, kind, SMALL, folder, steps=steps)
    assert any(name.startswith("headloss/") for name in mine["logs"][0])
    off = trainer_runs.gradient_apart(mine["gradient"], other["gradient"])
    found = trainer_runs.differences(mine["logs"][:steps], other["logs"])
    if case.precision == "float32":
        assert off < 1e-5 and max(found.values()) < 1e-4, f"{off}, {found}"
    else:
        assert off < 1e-2, off
        assert found["loss"] < 1e-4 and found["grad_norm"] < 5e-3, found
    assert all(norm > 1e-3 for norm in mine["grad_norms"])


def sharded_replay(lora: str = "") -> None:
    """Check that ratios between policy and sampler are 1 on the first step under FSDP2."""
    more = {}
    if lora:
        targets = ["q_proj", "lm_head"]
        more = {"peft_config": LoraConfig(r=2, target_modules=targets, init_lora_weights=False)}
    with trainer_cases.launched(Case(trainer="GRPO", wrapper="fsdp2", lora=lora)):
        trainer = replay.make(rl.GRPO, beta=0.1, per_device_train_batch_size=2, more=more)
        replay.check_first_step(trainer)
    del trainer
    trainer_runs.release()


REPLAYS = {"replay": "", "replay, lora": "body, head"}


def main(folder: Path, names: list[str]) -> None:
    trainer_runs.quiet()
    trainer_cases.allow_sharding_on_cpus()
    rank = distributed.get_rank()
    if rank == 0:
        for tied in (False, True):
            trainer_cases.save_model(SMALL, tied, experts=False, folder=folder)
    distributed.barrier()
    for name in names:
        if name in TRAINERS:
            same_run(TRAINERS[name], folder)
        elif name in REPLAYS:
            sharded_replay(REPLAYS[name])
        else:
            same_forward(FORWARDS[name], BF16)
        sys.stdout.write(f"\n{name}: well on rank {rank}\n")
        sys.stdout.flush()
