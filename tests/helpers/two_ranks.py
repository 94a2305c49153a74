"""Trainer tests on two ranks, run in sequence by each of two processes.

accelerate launch --multi_gpu --num_processes 2 tests/helpers/two_ranks.py FOLDER RECIPES CASE ...

RECIPES are recipes of `headloss train` with overrides, as JSON: {"sft": ["seed=1"]}. If RECIPES is
empty, the script only runs the mixed-precision tests of trl_mixed_ranks.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import overhead
import trl_mixed_ranks
import trl_ranks
from accelerate.state import PartialState
from blank_plots import Blank
from torch import distributed
from trl_case import saved

from headloss.__main__ import main
from headloss.train import plots


def train(folder: Path, recipes: dict[str, list[str]]) -> None:
    """Run `headloss train` with half of each batch on each rank."""
    plots.Figure = Blank
    for name, overrides in recipes.items():
        further = [f"output={folder / name}", "trainer.per_device_train_batch_size=4"]
        assert main(["train", name, *overrides, *further]) == 0
        assert PartialState().num_processes == 2
    sys.stdout.write(f"\ntrain: ran on rank {PartialState().process_index}\n")


if __name__ == "__main__":
    folder, recipes = Path(sys.argv[1]), json.loads(sys.argv[2])
    overhead.spare()
    overhead.freeze()
    saved("llama")  # Save before the process group exists: transformers saves on rank 0 only.
    PartialState()  # Make the process group.
    if recipes:
        trl_ranks.main()
        train(folder / "two", recipes)
    # The mixed-precision cases run last, since they patch accelerate to shard on a CPU.
    trl_mixed_ranks.main(folder, sys.argv[3:])
    distributed.destroy_process_group()
