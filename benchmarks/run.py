"""Benchmark of speed, memory and errors: headloss, plain PyTorch and other libraries.

    python benchmarks/run.py --quick                      # seconds, on a CPU
    python benchmarks/run.py --table --output table.json  # minutes, on one GPU
    python benchmarks/run.py --table --against ../before  # 30 pairs of calls of two versions
    python benchmarks/run.py --full --part 1/4 --output full.json

Every implementation must pass a correctness gate against float64 before it is timed. Results are
appended to one file after each case; a repeated case replaces its old rows. A CUDA error ends the
program; with --resume the program continues after the failed case.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import against
import cases
import measure
import report
import torch

PACKAGES = ("torch", "triton", "headloss", "trl", "liger-kernel", "cut-cross-entropy")
PACKAGES = (*PACKAGES, "quack-kernels", "nvidia-cutlass-dsl")
LISTS = {"quick": cases.quick, "table": cases.table, "full": cases.full}


class Results:
    """A file of results: machine and versions of each run, and a row for each case, loss and
    implementation."""

    def __init__(self, path: Path | None, run: dict) -> None:
        self.path = path
        self.content: dict = {"runs": [], "rows": []}
        if path is not None and path.exists():
            self.content = json.loads(path.read_text())
        self.number = len(self.content["runs"])
        self.tried = {name for run in self.content["runs"] for name in run.get("tried", ())}
        self.content["runs"].append(run | {"tried": []})

    def start(self, case: str) -> None:
        """Record the start of a case, since a case may end the program."""
        self.content["runs"][-1]["tried"].append(case)
        self._write()

    def add(self, rows: list[dict]) -> None:
        """Add `rows` to the file of results, and write the file. A new row replaces the old row
        with equal case, loss and implementation."""
        new = {_key(row) for row in rows}
        kept = [row for row in self.content["rows"] if _key(row) not in new]
        self.content["rows"] = kept + [row | {"run": self.number} for row in rows]
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            write(self.path, json.dumps(self.content, indent=1) + "\n")


def _key(row: dict) -> tuple[str, str, str]:
    return row["case"], row["work"], row["contestant"]


def write(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def about(device: torch.device, commit: str | None, packages: tuple[str, ...] = PACKAGES) -> dict:
    """Return machine, package versions and commit of a run."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return {
        "machine": _machine(device),
        "python": platform.python_version(),
        "versions": found,
        "commit": commit or _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _machine(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    name = torch.cuda.get_device_name(device)
    more = _output(query).splitlines()
    return f"{name}, CUDA {torch.version.cuda}" + (f", driver {more[0]}" if more else "")


def _commit() -> str:
    root = str(Path(__file__).parents[1])
    head = _output(["git", "-C", root, "rev-parse", "--short", "HEAD"])
    changed = _output(["git", "-C", root, "status", "--porcelain", "--", "headloss", "benchmarks"])
    return f"{head or 'unknown'}{'+changes' if changed else ''}"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# ---------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0 if every headloss configuration passed the comparison with
    float64, else 1."""
    arguments = _parse(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # set_device needs an index
        torch.cuda.set_device(device)
    chosen = [case for case in LISTS[arguments.list]() if _matches(case.name, arguments.only)]
    chosen = cases.part(chosen, *arguments.part)
    if arguments.names:
        print("\n".join(case.name for case in chosen))
        return 0
    keep = partial(_matches, patterns=arguments.contestants)
    if arguments.once:
        for case in chosen:
            measure.run_once(case, device, keep)
        return 0
    if arguments.warm:
        warm(arguments.warm)
    if arguments.against:
        return against.main(chosen, arguments.against, device, arguments.repeats or 30)
    results = Results(arguments.output, about(device, arguments.commit))
    if arguments.resume:
        chosen = [case for case in chosen if case.name not in results.tried]
    red = _run_all(chosen, results, device, arguments, keep)
    if arguments.markdown:
        write(arguments.markdown, report.tables(results.content))
    if arguments.plots:
        report.plots(results.content, arguments.plots)
    for row in red:
        print(f"FAILED {row['case']}: {row['contestant']}: {row['reason']}")
    return 1 if red else 0


def warm(processes: int) -> None:
    """Run all cases once in parallel processes, to fill the compilation caches on disk."""
    begin = time.perf_counter()
    command = [sys.executable, *sys.argv, "--once"]
    running = [
        subprocess.Popen([*command, "--part", f"{i}/{processes}"], stdout=subprocess.DEVNULL)
        for i in range(1, processes + 1)
    ]
    codes = [process.wait() for process in running]
    print(f"warmed in {time.perf_counter() - begin:.0f} s, {codes}", flush=True)


def _run_all(
    chosen: list[cases.Case],
    results: Results,
    device: torch.device,
    arguments: argparse.Namespace,
    keep: Callable[[str], bool],
) -> list[dict]:
    """Run every case, also after a case that failed; return the rows in which headloss failed."""
    repeats = arguments.repeats or (2 if arguments.list == "quick" else 9)
    begin, red = time.perf_counter(), []
    for case in chosen:
        start = time.perf_counter()
        if start - begin > 60 * arguments.minutes:
            print(f"{case.name}: left out after {arguments.minutes:g} minutes", flush=True)
            continue
        print(f"{case.name} ...", end=" ", flush=True)
        results.start(case.name)
        try:
            rows = measure.run_case(case, repeats, device, keep, arguments.seconds)
        except Exception as failure:  # a failed case must not stop the remaining cases
            reason = measure.one_line(failure)
            traceback.print_exc()
            red.append({"case": case.name, "contestant": "all", "reason": reason})
            measure.synchronize(device)  # a persistent CUDA error ends the program: see --resume
            continue
        results.add(rows)
        red += [row for row in rows if row["status"] == "failed" and report.is_ours(row)]
        print(f"{time.perf_counter() - start:.1f} s", flush=True)
        for row in rows:
            print(_line(row), flush=True)
    return red


def _line(row: dict) -> str:
    name = f"  {row['work']:18} {row['contestant']:36}"
    if "ms" not in row:
        return f"{name} {row['status']}: {row['reason']}"
    errors = " ".join(f"{quantity}={error:.0e}" for quantity, error in row["errors"].items())
    return (
        f"{name} {row['ms']:9.2f} ms  {row['of_limit']:.3f} of limit  "
        f"{row['working_bytes'] / report.MIB:7.0f} MiB  {errors}  {row['how']}"
    )


def _matches(name: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


def part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"got {text!r}, want I/N with 1 <= I <= N")
    return int(index), int(count)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure headloss beside its peers.")
    lists = parser.add_mutually_exclusive_group(required=True)
    for name, text in (
        ("quick", "tiny shapes, for a CPU"),
        ("table", "the rows of the table of goals"),
        ("full", "the sweeps over shapes, tokens and vocabularies"),
    ):
        lists.add_argument(f"--{name}", dest="list", action="store_const", const=name, help=text)
    parser.add_argument("--part", type=part, default=(1, 1), metavar="I/N")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="cases, by shell patterns")
    parser.add_argument("--contestants", nargs="+", metavar="PATTERN")
    parser.add_argument("--repeats", type=int, help="timed runs of each contestant")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of one race, after which it has few runs"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which no further case is begun"
    )
    parser.add_argument(
        "--warm", type=int, default=0, metavar="N", help="first compile all, in N processes"
    )
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--resume", action="store_true", help="leave out the cases that --output has begun"
    )
    parser.add_argument(
        "--against", type=Path, metavar="FOLDER", help="race the headloss of another checkout"
    )
    parser.add_argument("--output", type=Path, help="JSON to write or to append to")
    parser.add_argument("--markdown", type=Path, help="where to write the tables")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to write PNG files")
    parser.add_argument("--commit", help="of the tree, where git cannot say")
    parser.add_argument("--names", action="store_true", help="list the cases and leave")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
