"""Trainers on two processes, each with half of each batch, agree with one process.

Covered: stock TRL under DDP step by step, models sharded by FSDP2, `headloss train`, and wrappers
with mixed precision that rebuild outputs. accelerate allows FSDP2 only on accelerators;
`trainer_cases.allow_sharding_on_cpus` removes the restriction.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is the trainer that headloss is put into")
import torch
from blank_plots import blank_plots  # noqa: F401
from test_train_runs import RL, SMALL, metrics, run, weights
from worlds import script_on

CASES = ("grpo", "sft", "dpo", "sft_totals", "dpo_totals", "ppo")
CASES += ("replay", "fsdp2", "fsdp2_head", "fsdp2_lone_head", "orpo", "cpo", "fsdp2_log_probs")
FORWARDS = ("sharded", "sharded, float32 out", "sharded head")
MIXED = (*FORWARDS, "sft", "dpo", "grpo_trainer", "grpo", "gspo", "cispo", "ppo", "reinforce")
MIXED += ("float32", "replay", "replay, lora")


def test_trainers(tmp_path: Path) -> None:
    """Trainers on two ranks agree with one process.

    With greedy sampling, two ranks generate the same tokens as one process. REINFORCE compares the
    rewards of different prompts, so that equal samples of one prompt do not make all advantages 0.
    """
    steps = ["trainer.max_steps=3", "trainer.save_steps=3", "trainer.learning_rate=0.01"]
    recipes: dict[str, list[str]] = {
        "sft": [*steps, "terms.z_loss=0.01"],
        "reinforce": [*steps, "trainer.top_k=1", "trainer.beta=0.1", "terms.entropy=-0.01"],
    }
    asked = {
        name: [*SMALL, *(RL if name != "sft" else []), *more] for name, more in recipes.items()
    }
    printed = launched(tmp_path, asked, MIXED)
    for case in CASES:
        assert len(re.findall(rf"{case}: \d+ steps alike on rank [01]", printed)) == 2, case
    for case in MIXED:
        assert printed.count(f"{case}: well on rank") == 2, case
    for name, overrides in recipes.items():
        same_run(name, overrides, tmp_path)


def launched(folder: Path, recipes: dict[str, list[str]], cases: tuple[str, ...]) -> str:
    script = Path(__file__).parent / "helpers" / "two_ranks.py"
    command = [str(script), str(folder), json.dumps(recipes), *cases]
    return script_on(2, *command, seconds=500, ACCELERATE_USE_CPU="true")


def same_run(name: str, overrides: list[str], folder: Path) -> None:
    """Check that a run on two ranks equals a run on one."""
    alone, two = folder / "one" / name, folder / "two" / name
    assert run(name, alone, *overrides) == 0
    want, got = metrics(alone), metrics(two)
    assert len(want) == len(got) == 3
    for a, b in zip(want, got, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4, abs=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
        assert b["entropy"] == pytest.approx(a["entropy"], rel=1e-4)
    for key, value in weights(alone).items():
        torch.testing.assert_close(weights(two)[key], value, rtol=1e-3, atol=1e-4)
    same = [json.loads((folder / "after.json").read_text()) for folder in (alone, two)]
    assert same[0]["score"] == pytest.approx(same[1]["score"])
