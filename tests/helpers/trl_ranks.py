"""Comparison of stock TRL and headloss step by step, on each of two ranks (see two_ranks.py)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import test_rl as algorithms
import test_trl_grpo as grpo
import test_trl_orpo as orpo
import test_trl_replay as replay
import test_trl_sft_dpo as others
import test_trl_totals as totals
import torch
from accelerate.state import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl_case import load, saved

import headloss as hl
from headloss import rl
from headloss.integrations.trl.forward import Request, add_head
from headloss.integrations.trl.orpo import LogProbs


def same_ppo() -> list[float]:
    options: dict[str, Any] = {"beta": 0.1, "num_iterations": 2, "per_device_train_batch_size": 2}
    want = algorithms.losses_of(rl.PPO, use_fused_loss=False, **options)
    got = algorithms.losses_of(rl.PPO, **options)
    assert got == pytest.approx(want, rel=1e-4, abs=1e-5)
    return got


def same_sharded(head_alone: bool, kind: type = Request, result: str = "loss") -> list[float]:
    """Check that an FSDP2 model has the mean of the ranks' gradients."""
    plain, sharded = load(saved("llama")), load(saved("llama"))
    rank = torch.distributed.get_rank()
    ids = torch.randint(100, (2, 7), generator=torch.Generator().manual_seed(rank))
    request = kind(batch=hl.Batch(ids[:, 1:]), objective=hl.cross_entropy() + hl.z_loss())
    mesh = init_device_mesh("cpu", (2,))
    for model in (plain, sharded):
        add_head(model)
    for module in [*sharded.model.layers, *([sharded.lm_head] if head_alone else []), sharded]:
        fully_shard(module, mesh=mesh)
    outputs = [model(input_ids=ids, headloss=request) for model in (plain, sharded)]
    losses = [getattr(output, result).sum() for output in outputs]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    for (name, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.distributed.all_reduce(a.grad)
        got = b.grad.full_tensor()
        torch.testing.assert_close(got, a.grad / 2, msg=lambda text, name=name: f"{name}: {text}")
    return [1.0]


def same_lone_head() -> list[float]:
    """Check that FSDP2 averages the head's gradient over the ranks if it wraps the head but not the
    model."""
    plain, sharded = load(saved("llama")), load(saved("llama"))
    rank = torch.distributed.get_rank()
    ids = torch.randint(100, (2, 7), generator=torch.Generator().manual_seed(rank))
    request = Request(batch=hl.Batch(ids[:, 1:]), objective=hl.cross_entropy())
    fully_shard(sharded.lm_head, mesh=init_device_mesh("cpu", (2,)))
    for model in (plain, sharded):
        add_head(model)
        model(input_ids=ids, headloss=request).loss.backward()
    want = plain.lm_head.weight.grad
    torch.distributed.all_reduce(want)
    torch.testing.assert_close(sharded.lm_head.weight.grad.full_tensor(), want / 2)
    return [1.0]


def same_orpo(name: str) -> list[float]:
    apart = orpo.largest_difference(name, gradient_accumulation_steps=2)
    assert apart < 1e-5
    return [apart]


def same_replay() -> list[float]:
    """Check that ratios between policy and sampler are 1 on the first step, in metrics over both
    ranks."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.1}
    trainer = replay.make(rl.GRPO, per_device_train_batch_size=2, **options)
    replay.check_first_step(trainer)
    log = next(row for row in trainer.state.log_history if "loss" in row)
    mine = torch.tensor([log[f"headloss/sampling/{name}"] for name in ("kl", "kept", "kept_max")])
    theirs = mine.clone()
    torch.distributed.broadcast(theirs, 0)
    assert torch.equal(mine, theirs)
    return mine.tolist()


CASES: dict[str, Any] = {
    "replay": same_replay,
    "grpo": lambda: grpo.same(
        per_device_train_batch_size=2,
        loss_type="dapo",
        beta=0.1,
        top_entropy_quantile=0.5,
        entropy_coef=0.02,
        gradient_accumulation_steps=2,
        num_iterations=2,
    ),
    "sft": lambda: others.same_sft(gradient_accumulation_steps=2),
    "dpo": others.same_dpo,
    "sft_totals": lambda: totals.same_as_large_batch(others.sft, 2, ranks=2),
    "dpo_totals": lambda: totals.same_as_large_batch(others.dpo, 3, ranks=2),
    "orpo": lambda: same_orpo("ORPO"),
    "cpo": lambda: same_orpo("CPO"),
    "ppo": same_ppo,
    "fsdp2": lambda: same_sharded(head_alone=False),
    "fsdp2_head": lambda: same_sharded(head_alone=True),
    "fsdp2_lone_head": same_lone_head,
    "fsdp2_log_probs": lambda: same_sharded(head_alone=True, kind=LogProbs, result="log_probs"),
}


def main() -> None:
    for name, case in CASES.items():
        got = case()
        state = PartialState()
        assert state.num_processes == 2
        sys.stdout.write(f"\n{name}: {len(got)} steps alike on rank {state.process_index}\n")
        sys.stdout.flush()
