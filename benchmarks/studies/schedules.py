"""Time and memory of the schedules `one_pass` and `recompute` by the number of tokens in a chunk.

Page: benchmarks/NOTES.md.

    python benchmarks/studies/schedules.py --output schedules.json      # on one GPU, a minute

Each row is a call with forward and backward pass of a cross-entropy of 16,384 tokens. `rows` is the
number of tokens in a chunk under `one_pass`, which follows from the memory budget, and MiB is the
peak of memory beyond inputs and returned gradients.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from narrow import Inputs, milliseconds, peak_mib

import headloss as hl

N, MIB = 16384, 1 << 20


class Case(NamedTuple):
    h: int
    v: int
    dtype: str = "bfloat16"
    budget: int | None = None  # The memory budget in bytes; None: headloss's default.


def cases() -> Iterator[Case]:
    for h in (384, 512, 1024, 2048):
        yield Case(h, 1_000_000)
    for h in (512, 1024):
        yield Case(h, 500_000)
    for h in (512, 1024, 4096):
        for mib in (160, 320, 640):
            yield Case(h, 131072, budget=mib * MIB)
    for h in (64, 256):
        yield Case(h, 1_000_000, "float32")
    # Vocabularies whose size is no multiple of 8.
    yield Case(512, 1_000_007)
    yield Case(768, 50257)
    yield Case(768, 50264)
    yield Case(2048, 151_643)
    yield Case(2048, 151_648)


def measured(case: Case, schedule: str) -> dict[str, Any]:
    inputs = Inputs(case.h, case.v, N, getattr(torch, case.dtype))
    x, w = inputs.x.requires_grad_(), inputs.w.requires_grad_()
    options = hl.Options(schedule=schedule, memory_budget=case.budget)  # type: ignore[arg-type]
    call = x, hl.Head(w), hl.Batch(inputs.targets), hl.cross_entropy(), options

    def run() -> None:
        x.grad = w.grad = None
        hl.head_loss(*call).loss.backward()

    rows = hl.plan(*call).chunk_tokens
    row = {**case._asdict(), "schedule": schedule, "ms": round(milliseconds(run), 2)}
    row["MiB"] = round(peak_mib(run, x, w))
    return row | ({"rows": rows} if schedule == "one_pass" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    about = {"torch": torch.__version__, "GPU": torch.cuda.get_device_name()}
    table: list[dict[str, Any]] = []
    for case in cases():
        for schedule in ("one_pass", "recompute"):
            table.append(measured(case, schedule))
            print(table[-1], flush=True)
            if options.output:
                options.output.write_text(json.dumps(about | {"rows": table}, indent=1))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
