"""Clock, peak memory and command line that several studies share.

Imported by candidates.py, draft_models.py, given.py and support.py; the docstring of each names the
page with its results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from run import write
from torch import Tensor

from headloss.testing import trained_looking

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def milliseconds(
    run: Callable[[], object], repeats: int, before: Callable[[], object] | None = None
) -> float:
    """Return the median time of several runs, after two warm-up runs, without the time of
    `before`."""
    found = []
    for turn in range(repeats + 2):
        if before is not None:
            before()
        if DEVICE.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            run()
            found.append(1e3 * (time.perf_counter() - begin))
        if turn == 1:
            found.clear()
    return statistics.median(found)


def peak_mib(run: Callable[[], object], returned: int) -> float | None:
    """Return the peak memory in MiB, in excess of prior memory and returned gradients; None on a
    CPU."""
    if DEVICE.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - returned
    del kept
    return round(peak / 2**20, 1)


def study_inputs(arguments: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return hidden states [T, H] and head weight [V, H] with `requires_grad`, targets [T], and the
    number of bytes of the two gradients; bfloat16 on a GPU, float32 on a CPU."""
    torch.manual_seed(0)  # The study draws its other inputs after these, equal in each run.
    sizes = arguments.tokens, arguments.hidden, arguments.vocab
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    hidden, weight, targets = trained_looking(*sizes, dtype, DEVICE)
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    return hidden, weight, targets, (hidden.numel() + weight.numel()) * hidden.element_size()


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"


def run_study(
    description: str,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    ids: dict[str, Any],
    quick_ids: int | list[int],
    argv: list[str] | None,
) -> int:
    """Run `measure` with sizes from the command line, and write its result. `ids` holds the keyword
    arguments (such as `default`) with which the command-line argument --ids is declared."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--ids", type=int, **ids)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="small sizes, one repeat")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        sizes = {"tokens": 64, "hidden": 32, "vocab": 1000, "ids": quick_ids, "repeats": 1}
        vars(arguments).update(sizes)
    found = measure(arguments)
    if arguments.output:
        write(arguments.output, json.dumps(found, indent=1))
    return 0
