"""Comparison of trainers under ZeRO-3 with trainers under DDP step by step, in two processes.

torchrun --nproc-per-node 2 tests/helpers/trl_zero3_ranks.py FOLDER CASE ...
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import distributed

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "studies"))
import trainer_cases
import trainer_runs
from trainer_cases import SMALL, Case, Size

import headloss as hl
from headloss.integrations import trl as ours

# Odd sizes: the 121 x 9 embedding and the 9 weights of a norm cannot be divided evenly over two
# ranks.
ODD = Size(hidden=9, layers=2, vocabulary=121, completion=8, batch=2)
HEAD: dict[str, Any] = {"lora": "body, head", "wrapper": "zero3"}
CASES: dict[str, Case] = {
    "sft": Case(trainer="SFTTrainer", accumulation=2, then="eval", **HEAD),
    "sft, tied": Case(trainer="SFTTrainer", wrapper="zero3", tied=True, accumulation=2),
    "sft, recompute": Case(trainer="SFTTrainer", wrapper="zero3", tied=True),
    "sft, recompute, lora": Case(trainer="SFTTrainer", tied=True, **HEAD),
    "dpo": Case(trainer="DPOTrainer", wrapper="zero3"),
    "dpo, lora": Case(trainer="DPOTrainer", then="eval", **HEAD),
    "grpo_trainer": Case(trainer="GRPOTrainer", wrapper="zero3", accumulation=2),
    "grpo, experts": Case(trainer="GRPO", wrapper="zero3", experts=True),
    "gspo": Case(trainer="GSPO", tied=True, then="resume", **HEAD),
    "cispo": Case(trainer="CISPO", wrapper="zero3", checkpointing=True),
    "ppo": Case(trainer="PPO", wrapper="zero3", tied=True, then="resume"),
    "reinforce": Case(trainer="REINFORCE", wrapper="zero3", lora="body"),
    "sft, installed": Case(trainer="SFTTrainer", wrapper="zero3", accumulation=2),
    "dpo, installed, tied": Case(trainer="DPOTrainer", wrapper="zero3", tied=True),
    "grpo, installed": Case(trainer="GRPOTrainer", wrapper="zero3", checkpointing=True),
}


def same_as_replicated(name: str, folder: Path) -> None:
    """Check losses, gradient norms, metrics, the first gradient, an evaluation and a resumed
    run."""
    case = CASES[name]
    schedule = "recompute" if "recompute" in name else "auto"
    ours.SFTTrainer.options = hl.Options(schedule=schedule)
    size = SMALL if case.experts else ODD  # experts need even sizes
    kind = "trl" if "installed" in name else "headloss"
    if kind == "trl":
        ours.install()
    mine = trainer_runs.run(case, kind, size, folder)
    ours.uninstall()
    other = trainer_runs.run(replace(case, wrapper="ddp"), kind, size, folder)
    assert any(key.startswith("headloss/") for key in mine["logs"][0]) == (kind == "headloss")
    off = trainer_runs.gradient_apart(mine["gradient"], other["gradient"])
    found = trainer_runs.differences(mine["logs"], other["logs"])
    assert off < 2e-6 and max(found.values()) < 2e-4, f"{off}, {found}"
    assert all(norm > 1e-3 for norm in mine["grad_norms"])
    pairs = zip(mine["logs"], other["logs"], strict=True)
    # A policy loss near 0 is judged by an absolute bound, because positive and negative advantages
    # cancel in it.
    losses = [abs(a["loss"] - b["loss"]) / (abs(b["loss"]) + 0.1) for a, b in pairs]
    assert max(*losses, found["grad_norm"]) < 2e-5, found
    if case.then == "eval":
        found = trainer_runs.differences([mine["evaluated"]], [other["evaluated"]])
        assert math.isfinite(found["eval_loss"]) and max(found.values()) < 2e-4, found
    if case.then == "resume":
        apart = trainer_runs.resumed(case, size, folder)
        assert apart < 1e-5, apart


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    trainer_runs.quiet()
    trainer_cases.allow_sharding_on_cpus()
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    if rank == 0:
        trainer_cases.save_model(SMALL, tied=False, experts=True, folder=folder)
        for tied in (False, True):
            trainer_cases.save_model(ODD, tied, experts=False, folder=folder)
    distributed.barrier()
    for name in names:
        same_as_replicated(name, folder)
        sys.stdout.write(f"\n{name}: well on rank {rank}\n")
        sys.stdout.flush()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
