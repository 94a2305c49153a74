"""Run by each of two processes: `headloss train`, half of each batch on each.

accelerate launch --multi_gpu --num_processes 2 tests/train_ranks.py OUTPUT '{"sft": ["seed=1"]}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelerate.state import PartialState

from headloss.__main__ import main

if __name__ == "__main__":
    output, recipes = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, overrides in recipes.items():
        further = [f"output={output / name}", "trainer.per_device_train_batch_size=4"]
        assert main(["train", name, *overrides, *further]) == 0
        assert PartialState().num_processes == 2
