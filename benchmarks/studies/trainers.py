"""Trainers on two processes, compared with stock TRL step by step: wrappers, precisions, adapters.

Page: docs/train.md.

    torchrun --nproc-per-node 2 benchmarks/studies/trainers.py            # minutes, on two GPUs
    CUDA_VISIBLE_DEVICES=0 python benchmarks/studies/trainers.py --one-process
    python benchmarks/studies/trainers.py --table
    ... --quick                                                   # tiny models, on the CPU

One pair of processes runs all configurations (`trainer_cases.matrix`), with new models for each
run. Each configuration runs with headloss and with the reference trainer, and in bf16 also with a
float64 head. Some configurations also run an evaluation, or a run that is resumed from a
checkpoint. A restarted study continues after the last configuration. With `--one-process`, one
process runs the float32 configurations on the batches of both processes together. The study runs in
two processes. On a machine with one GPU these two processes share the GPU with a smaller
vocabulary, and times are meaningless.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
import trainer_cases
from ranks import share_a_gpu
from run import about
from torch import distributed
from trainer_cases import LARGE, SMALL, Case, Size, as_row, matrix, save_model
from trainer_runs import apart, compare, failures, quiet, run

NARROW = 16384  # Vocabulary size if two processes share one GPU.
RESULTS = Path(__file__).parents[1] / "results"
HEADINGS = {
    "loss_apart": "losses",
    "grad_norm_apart": "gradient norms",
    "gradient_apart": "gradient",
    "metrics_apart": "metrics",
    "gradient_off_exact": "off float64",
    "reference_gradient_off_exact": "reference off float64",
    "one_process_apart": "one process",
    "eval_apart": "eval",
    "resume_apart": "resumed",
    "step_ms": "step, ms",
    "reference_step_ms": "reference, ms",
    "peak_mib": "peak, MiB",
    "reference_peak_mib": "reference, MiB",
}


class Results:
    """Result rows by the name of their configuration. The file `path` is written anew after each
    new row."""

    def __init__(self, path: Path, write: bool) -> None:
        self.path, self.write = path, write
        self.rows: dict[str, dict[str, Any]] = {}
        self.about: dict[str, Any] = {}
        if path.exists():
            held = json.loads(path.read_text())
            self.rows, self.about = held["rows"], held["about"]

    def put(self, name: str, row: dict[str, Any]) -> None:
        self.rows[name] = row
        if not self.write:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"about": self.about, "rows": self.rows}, indent=1) + "\n")
        partial.rename(self.path)


def ordered(first: list[str]) -> list[Case]:
    """Return all configurations; those whose name matches a pattern of `first` come first."""
    return sorted(matrix(), key=lambda case: not any(fnmatch(case.name, p) for p in first))


def two_processes(
    results: Results, size: Size, folder: Path, began: float, limit: float, first: list[str]
) -> None:
    rank = distributed.get_rank()
    for case in ordered(first):
        if case.name in results.rows:
            continue
        late = torch.tensor([float(time.perf_counter() - began > limit)])
        distributed.all_reduce(late)
        if late:
            say(rank, "out of time")
            return
        start = time.perf_counter()
        # A restarted study skips a case that ended the process.
        results.put(case.name, {**as_row(case), "error": "it did not end"})
        try:
            row = compare(case, size, folder)
            verdict = "; ".join(failures(case, row)) or "as it must be"
        except Exception as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
            verdict = row["error"]
        row["seconds"] = time.perf_counter() - start
        results.put(case.name, {**as_row(case), **row})
        say(rank, f"[{time.perf_counter() - began:5.0f} s] {case.name}: {verdict}")


def one_process(results: Results, size: Size, folder: Path, began: float, limit: float) -> None:
    """Run the float32 configurations in one process, on the batches of both processes together.

    Cases with experts are skipped: the routers' loss is a product of two means over a process's
        rows.
    """
    for case in matrix():
        row = results.rows.get(case.name, {})
        known = "losses" not in row or "one_process_apart" in row
        if known or case.precision != "float32" or case.experts:
            continue
        if time.perf_counter() - began > limit:
            break
        try:
            found = run(case, "headloss", size, folder, processes=1)
        except Exception as error:
            traceback.print_exc()
            row["one_process_error"] = f"{type(error).__name__}: {error}"[:500]
        else:
            pairs = [
                *zip(found["losses"], row["losses"], strict=True),
                *zip(found["grad_norms"], row["grad_norms"], strict=True),
            ]
            row["one_process_apart"] = max(apart(a, b) for a, b in pairs)
            say(0, f"{case.name}: one process {row['one_process_apart']:.1e}")
        results.put(case.name, row)


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


# ---------------------------------------------------------------------- the table


def table(results: Results) -> str:
    """Return the results as a Markdown table."""
    versions = results.about.get("versions", {})
    lines = [
        f"{machine(results)}; " + ", ".join(f"{n} {v}" for n, v in versions.items()) + ".",
        "",
        "| configuration | " + " | ".join(HEADINGS.values()) + " | |",
        "| --- " + "| ---: " * len(HEADINGS) + "| --- |",
    ]
    for name, row in results.rows.items():
        case = Case(**{key: row[key] for key in trainer_cases.CHOICES})
        bad = row.get("error") or "; ".join(failures(case, row))
        cells = [_cell(key, row.get(key)) for key in HEADINGS]
        lines.append(f"| {name} | {' | '.join(cells)} | {bad} |")
    return "\n".join(lines) + "\n"


def machine(results: Results) -> str:
    about = results.about
    gpus = "Two processes share one" if about.get("gpus") == 1 else "2 x"
    return f"{gpus} {about.get('machine')}; commit {about.get('commit')}"


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if key.endswith(("ms", "mib")) else f"{value:.0e}"


# ---------------------------------------------------------------------- the command


def describe(commit: str | None) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packages = ("torch", "triton", "trl", "transformers", "peft", "accelerate", "deepspeed")
    return about(device, commit, packages)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--output", type=Path, default=RESULTS / "trainers.json")
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the results that are there")
    parser.add_argument("--quick", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--commit", help="to write beside the results")
    parser.add_argument("--first", nargs="+", default=[], metavar="PATTERN", help="cases")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds")
    arguments = parser.parse_args()
    began = time.perf_counter()
    if arguments.table:
        print(table(Results(arguments.output, write=False)))
        return 0
    quiet()
    if arguments.quick:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        trainer_cases.allow_sharding_on_cpus()
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    results = Results(arguments.output, write=rank == 0)
    gpus = results.about.get("gpus") if arguments.one_process else torch.cuda.device_count()
    shared = gpus == 1 and not arguments.quick
    size = SMALL if arguments.quick else replace(LARGE, vocabulary=NARROW) if shared else LARGE
    folder = Path(tempfile.gettempdir()) / f"headloss-trainers-{size.hidden}-{size.vocabulary}"
    if rank == 0:
        for case in matrix():
            save_model(size, case.tied, case.experts, folder)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic cuBLAS
    if not arguments.one_process:
        if shared:
            share_a_gpu(rank)
        if not arguments.quick:
            torch.cuda.set_device(local % torch.cuda.device_count())
        distributed.init_process_group(
            "gloo" if arguments.quick else "cuda:nccl,cpu:gloo",
            timeout=datetime.timedelta(seconds=90),
        )
    if arguments.one_process:
        one_process(results, size, folder, began, arguments.limit)
    else:
        results.about = describe(arguments.commit) | {"gpus": gpus}
        two_processes(results, size, folder, began, arguments.limit, arguments.first)
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
    say(rank, "\n" + table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
