"""Ratio, mismatch and reward over the steps of GRPO on the demo's model, with replay and without.

    python benchmarks/replay_curves.py --json benchmarks/results/replay_curves.json    # an hour
    python benchmarks/replay_curves.py --quick                                         # seconds

Without replay, old and new log-probs are over the whole vocabulary, as stock TRL takes them; the
sampler's own are recorded beside them, so that the mismatch is known. One SFT run comes first, from
which all runs go on. For each step and seed: the mean of exp(trainer's - sampler's log-prob), the
KL that it stands for, the reward and the share of clipped ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from run import about, write

from headloss import rl, train

FILTERS = ["trainer.top_k=20", "trainer.top_p=0.9", "trainer.temperature=1.0"]
SMALL = [
    "tiny.hidden_size=16", "tiny.intermediate_size=32", "tiny.num_hidden_layers=1",
    "tiny.num_attention_heads=2", "train_problems=64", "held_out=8",
    "trainer.per_device_train_batch_size=16",
]  # fmt: skip
CURVES = {
    "ratio": "headloss/sampling/ratio_mean",
    "kl": "headloss/sampling/kl",
    "reward": "reward",
    "clipped": "clip_ratio/region_mean",
    "kept": "headloss/sampling/kept",
}


@contextlib.contextmanager
def without_replay(algorithm: str) -> Iterator[None]:
    """Inside, the trainer of an algorithm forgets the sets and keeps the sampler's log-probs."""
    name = algorithm.upper()
    theirs = getattr(rl, name)

    class WholeVocabulary(theirs):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            generated = super()._generate(*args, **kwargs)
            self._rows = None
            return generated

    WholeVocabulary.__name__ = name
    setattr(rl, name, WholeVocabulary)
    try:
        yield
    finally:
        setattr(rl, name, theirs)


def curves(result: train.Result) -> dict[str, list[float]]:
    steps = [line for line in result.metrics if "loss" in line]
    return {curve: [line[name] for line in steps if name in line] for curve, name in CURVES.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "gspo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("runs/replay"))
    parser.add_argument("--quick", action="store_true", help="a small model, 2 steps, one seed")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    small, steps, seeds = [], arguments.steps, arguments.seeds
    if arguments.quick:
        small, steps, seeds = SMALL, 2, arguments.seeds[:1]
    first = ["model=tiny", f"output={arguments.output / 'sft'}", *small]
    if arguments.quick:
        first += ["trainer.max_steps=2"]
    train.run(train.recipe("sft", first))
    runs = []
    for algorithm in arguments.algorithms:
        for seed in seeds:
            for replay in (True, False):
                folder = arguments.output / f"{algorithm}-{seed}-{'sets' if replay else 'whole'}"
                more = [f"trainer.max_steps={steps}", f"trainer.save_steps={steps}", f"seed={seed}"]
                where = [f"model={arguments.output / 'sft' / 'model'}", f"output={folder}"]
                recipe = train.recipe(algorithm, [*where, *small, *FILTERS, *more])
                with contextlib.nullcontext() if replay else without_replay(algorithm):
                    result = train.run(recipe)
                run = {"algorithm": algorithm, "seed": seed, "replay": replay, **curves(result)}
                runs.append(run | {"before": result.before, "after": result.after})
                ends = {c: round(statistics.fmean(run[c][-10:]), 4) for c in CURVES if run[c]}
                print(algorithm, seed, "sets" if replay else "whole vocabulary", ends, flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {**about(device, arguments.commit), "steps": steps, "runs": runs}
    if arguments.json is not None:
        write(arguments.json, json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
