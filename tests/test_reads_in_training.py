"""In training, headloss finds out in the first step which inputs a term reads, and all later steps
use the stored result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl", reason="these are TRL's trainers and Transformers'")
import test_rl
import test_transformers
import test_trl_grpo
import test_trl_orpo
import test_trl_sft_dpo
from test_head_models import tiny
from transformers import TrainerCallback
from trl_case import folder

import headloss as hl
from headloss.integrations.transformers import Trainer, apply
from headloss.integrations.trl import CPOTrainer, DPOTrainer, GRPOTrainer, ORPOTrainer, SFTTrainer
from headloss.objective import reads

STEPS = 50
TERMS = hl.cross_entropy() + 1e-3 * hl.z_loss()


def of_transformers(kind: Any = None) -> Any:
    model = tiny("llama")
    apply(model, TERMS)
    trainer = test_transformers.trainer(model, folder())
    trainer.args.max_steps = STEPS
    if kind is None:
        return trainer
    return kind(model, trainer.args, trainer.data_collator, train_dataset=trainer.train_dataset)


sft, dpo = test_trl_sft_dpo.sft, test_trl_sft_dpo.dpo
CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_generations": 2}
TRAINERS: dict[str, Callable[[], Any]] = {
    "transformers": of_transformers,
    "Trainer": lambda: of_transformers(Trainer),
    "SFT": lambda: sft(SFTTrainer, max_steps=STEPS),
    "SFT, in parts": lambda: sft(SFTTrainer, max_steps=STEPS, gradient_accumulation_steps=2),
    "DPO": lambda: dpo(DPOTrainer, max_steps=STEPS),
    "ORPO": lambda: test_trl_orpo.make(ORPOTrainer, max_steps=STEPS),
    "CPO": lambda: test_trl_orpo.make(CPOTrainer, max_steps=STEPS),
    "GRPO": lambda: test_trl_grpo.make(GRPOTrainer, max_steps=STEPS, beta=0.1),
    "Dr. GRPO": lambda: test_trl_grpo.make(GRPOTrainer, max_steps=STEPS, loss_type="dr_grpo"),
    "in parts": lambda: test_trl_grpo.make(GRPOTrainer, max_steps=STEPS, **CUT),
    "sampled": lambda: test_trl_grpo.make(GRPOTrainer, max_steps=STEPS, sampler=True),
    **{
        f"rl.{kind.__name__}": lambda kind=kind: test_rl.make(kind, max_steps=STEPS)
        for kind in test_rl.ALGORITHMS
    },
}


class Entries(TrainerCallback):
    """Trainer callback that records the size of `reads._TABLE`, the table of terms whose reads of
    the batch are remembered, after each step."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.sizes.append(len(reads._TABLE))


FAST = ("transformers", "SFT", "DPO", "GRPO", "rl.PPO")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in TRAINERS]
)
def test_the_table_does_not_grow(name: str) -> None:
    hl.clear_cache()
    trainer, entries = TRAINERS[name](), Entries()
    trainer.add_callback(entries)
    trainer.train()
    first, *_, last = entries.sizes
    assert len(entries.sizes) == STEPS and 0 <= last == first <= 4
    assert last or name in ("ORPO", "CPO"), "these ask for statistics alone"
