"""Run by each of two processes: stock TRL and headloss, step for step alike.

    torchrun --nproc-per-node 2 tests/trl_ranks.py
"""

from __future__ import annotations

import sys
from typing import Any

import test_trl_grpo as grpo
import test_trl_sft_dpo as others
from torch import distributed


CASES: dict[str, Any] = {
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
    "dpo": lambda: others.same_dpo(),
}


def main() -> None:
    for name in sys.argv[1:]:
        got = CASES[name]()
        assert distributed.get_world_size() == 2
        print(f"{name}: {len(got)} steps alike", flush=True)


if __name__ == "__main__":
    main()
