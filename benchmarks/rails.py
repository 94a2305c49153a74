"""Compare results, speed and size of an internal change with an older version, on one page.

    python benchmarks/rails.py --against OLD --device cuda --json rails.json   # 8 minutes, one GPU
    python benchmarks/rails.py --against OLD --device cpu                      # calls and counts
    python benchmarks/rails.py --against OLD --device cuda --only 'GRPO*' 'small*'
    python benchmarks/rails.py --names

OLD is a folder with the older version's headloss/. Random calls of the old and the new version are
compared (tests/helpers/fuzz.py). Timed calls of the new version alternate with calls of the old
version or of another library. A row passes if the lower confidence bound of the median ratio of
times (compared implementation / new version, 30 pairs) is at least the row's required ratio. Lines
and tokens of code are counted. On two GPUs, calls on two ranks are timed too. Rows with missing
requirements are left out with a note; Fast-LLM is imported from PYTHONPATH.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import against
import cases
import torch
import works
from against import Side, judged, race
from cases import NARROW, WIDE, Case
from measure import one_line, synchronize
from run import about, part, warm, write
from works import Setting

TESTS = Path(__file__).parents[1] / "tests" / "helpers"
sys.path.append(str(TESTS))
from counts import counts  # noqa: E402

LEAST = against.LEAST
PAIRS, CALLS = 30, {"cpu": 500, "cuda": 5000}
RACES = 0.6  # No timed row begins after this fraction of the time limit.
STARTS = 20.0  # Seconds reserved for starting and ending the processes of the random calls.


@dataclass(frozen=True, kw_only=True)
class Rail:
    """A row of the regression benchmark.

    `theirs` names what the new version is compared with: "old" (the old version), "limit" (the
    necessary matrix products, or a copy of the logits), or the name of another implementation.
    `bar` is the smallest allowed ratio of times, `theirs` divided by the new version; None if the
    ratio is only reported.
    """

    name: str
    work: str
    setting: Setting
    ours: str = "headloss"
    theirs: str = "old"
    bar: float | None = LEAST
    alone: bool = False  # Each call is timed alone, including its CPU time.

    @property
    def case(self) -> Case:
        return Case(
            row=self.name,
            works=(self.work,),
            setting=self.setting,
            contestants=(self.ours,),
            group="small" if self.alone else "table",
        )


# ---------------------------------------------------------------------- rows of the comparison


def rails() -> Iterator[Rail]:
    """Yield all rows of the regression benchmark. A row with a `bar` below `LEAST` may be slower
    than the old version: its lower speed was accepted in exchange for less code."""
    for ours in ("headloss, 2200 MiB", "headloss, 1200 MiB", "headloss, recompute"):
        yield Rail(name=f"GRPO, {ours[10:]}", work="grpo", setting=WIDE, ours=ours)
    for shape, setting in (("H=4096", WIDE), ("H=2048", NARROW)):
        for work in ("grpo", "ce"):
            yield Rail(name=f"{work.upper()}, {shape}", work=work, setting=setting)
    ragged = replace(WIDE, segments=cases.RAGGED)
    yield Rail(name="GSPO, ragged", work="gspo", setting=ragged)
    for shape, wide in (("H=4096", WIDE), ("H=2048", NARROW)):
        scores = Rail(
            name=f"log-prob and entropy, {shape}",
            work="scores",
            setting=replace(wide, trains=()),
            ours="head_stats",
        )
        yield scores
        yield replace(scores, name=f"{scores.name}, products", theirs="limit", bar=0.98)
    yield from kinds()
    yield from small()
    yield from given()


def kinds() -> Iterator[Rail]:
    """Yield rows of less common calls (held schedule, frozen head, candidates, distillation,
    float16 ..), with 4096 tokens."""
    few = replace(WIDE, tokens=4096)
    yield Rail(name="held", work="grpo", setting=few, ours="head_stats, held")
    yield Rail(name="function", work="grpo", setting=few, ours="head_function, token")
    frozen = replace(few, trains=("hidden",))
    yield Rail(name="frozen head", work="grpo", setting=frozen, ours="headloss, frozen")
    quiet = replace(few, quiet=2, segments=256)
    yield Rail(name="half the rows", work="grpo", setting=quiet)
    certain = replace(few, certain=0.6, segments=256)
    ours = "headloss, tolerance 0.004"
    yield Rail(name="tolerance 0.004", work="grpo", setting=certain, ours=ours)
    yield Rail(name="64 candidates", work="grpo+candidates", setting=replace(few, candidates=64))
    kept = replace(few, support=64)
    yield Rail(name="support of 64 ids", work="grpo", setting=kept)
    teacher = replace(few, teacher=True)
    yield Rail(name="distillation", work="distillation", setting=teacher)
    yield Rail(
        name="distillation, recompute",
        work="distillation",
        setting=teacher,
        ours="headloss, recompute",
        bar=0.95,
    )
    half = replace(NARROW, tokens=4096, dtype=torch.float16)
    yield Rail(name="float16", work="grpo", setting=half, bar=0.95)


# Allowed time of small calls, as a multiple of eager PyTorch, torch.compile and the old version.
EAGER = {256: {"ce": 1.5, "grpo": 1.6, "gspo, wide clip": 3.0}}
EAGER[1024] = dict.fromkeys(EAGER[256], 1.0)
COMPILED = {1024: {"ce": 1.25, "grpo": 1.25}}
BEFORE = {4096: {"ce": 1.08, "grpo": 1.08, "gspo, wide clip": 1.15}}


def small() -> Iterator[Rail]:
    """Yield rows in which small calls are timed one at a time. Rows with captured CUDA graphs have
    no required speed, and are only reported."""
    for (width, vocabulary), tokens in itertools.product(
        ((896, 151936), (4096, 128256)), (256, 1024, 4096)
    ):
        setting = Setting(tokens=tokens, width=width, vocabulary=vocabulary, segments=256)
        for theirs, most in (("eager", EAGER), ("torch.compile", COMPILED), ("old", BEFORE)):
            for work, times in most.get(tokens, {}).items():
                name = f"small, {work.partition(',')[0].upper()} N={tokens} H={width}, {theirs}"
                bar = 1 / times
                row = Rail(name=name, work=work, setting=setting, theirs=theirs, bar=bar)
                yield replace(row, alone=True)
        if tokens < 4096:
            name = f"small, captured GRPO N={tokens} H={width}"
            row = Rail(name=name, work="grpo", setting=setting, ours="headloss, captured")
            yield replace(row, bar=None, alone=True)


# For each number of columns V: the number of tokens, and the required speed as a fraction of a
# copy's bandwidth.
COPY = {32768: (262144, 0.86), 128256: (66560, 0.68), 151936: (56320, 0.67), 262144: (32768, 0.55)}


def given() -> Iterator[Rail]:
    """Yield rows in which the caller passes in 16 GiB of logits: calls compared with a copy of the
    logits, and single calls compared with Fast-LLM."""
    for vocabulary, (tokens, bar) in COPY.items():
        setting = Setting(
            tokens=tokens, width=512, vocabulary=vocabulary, trains=("hidden",), given=True
        )
        row = Rail(name="", work="ce", setting=setting, ours="headloss in place", bar=None)
        size = f"V={vocabulary}"
        yield replace(row, name=f"given, copy, {size}", theirs="limit", bar=bar)
        for peer in ("Fast-LLM, Triton", "Fast-LLM, compiled"):
            row = replace(row, theirs=peer, alone=True)
            yield replace(
                row, name=f"given, CE, {peer}, {size}", bar=1.0 if vocabulary >= 151936 else None
            )
            yield replace(
                row,
                name=f"given, CE + z + GRPO, {peer}, {size}",
                work="ce+z+grpo",
                ours="headloss in place, metrics",
                bar=1.0 if vocabulary >= 128256 else None,
            )


def tiny(rail: Rail) -> Rail:
    """Return a copy of the benchmark row with sizes that a CPU can run."""
    return replace(rail, setting=cases.small_setting(rail.setting, tokens=32, vocabulary=131))


# ---------------------------------------------------------------------- timed rows


Row = dict[str, Any]


def run_races(
    chosen: list[Rail], before: Any, device: torch.device, pairs: int, until: float
) -> Iterator[Row]:
    """Time every row of the regression benchmark and yield its result; adjacent rows with equal
    settings use the same input tensors."""
    for setting, same in itertools.groupby(chosen, key=lambda rail: rail.setting):
        if time.perf_counter() > until:
            yield from ({"name": rail.name, "left out": "the time was up"} for rail in same)
            continue
        inputs: list[works.Inputs] = []
        for rail in same:
            try:
                inputs = inputs or works.make_sets(setting, device, pairs + 1)
                found = race(*sides(rail, before, inputs[0]), rail.case, inputs, device, pairs)
                yield verdict(rail, found)
            except Exception as failure:  # a failed row must not stop the remaining rows
                yield {"name": rail.name, "left out": one_line(failure)}
            gc.collect()
            if device.type == "cuda":
                synchronize(device)  # a persistent CUDA error ends the program here
                torch.cuda.empty_cache()


def sides(rail: Rail, before: Any, inputs: works.Inputs) -> tuple[Side, Side]:
    """Return the two implementations that a benchmark row times in alternation: `theirs`, and the
    new version of headloss."""
    new = works.hl
    package = before if rail.theirs == "old" else new
    theirs = rail.ours if rail.theirs == "old" else rail.theirs
    return (
        Side.of(package, theirs, rail.work, rail.case, inputs),
        Side.of(new, rail.ours, rail.work, rail.case, inputs),
    )


def verdict(rail: Rail, ratios: list[float]) -> Row:
    row = {"name": rail.name, "theirs": rail.theirs, "bar": rail.bar, "pairs": len(ratios)}
    return row | judged(ratios, rail.bar)


def run_once(chosen: list[Rail], before: Any, device: torch.device) -> None:
    """Run each row's old and new implementation once, to compile kernels before the timing; errors
    are ignored."""
    for rail in chosen:
        if rail.setting.given:
            continue
        try:
            (inputs,) = works.make_sets(rail.setting, device, 1)
            with torch.set_grad_enabled(bool(rail.setting.trains)):
                for side in sides(rail, before, inputs):
                    with against.using(side.package):
                        side.run(inputs)
            synchronize(device)
        # A benchmark row that fails in this first run fails again in the timed run, which reports
        # the error.
        except Exception as failure:
            print(f"{rail.name}: {one_line(failure)}")


# ---------------------------------------------------------------------- random calls and ranks


def run_calls(arguments: argparse.Namespace, seconds: float) -> Row:
    """Compare random calls of the old and the new version, on the device and on two ranks."""
    workers = max(1, min(6, (os.cpu_count() or 2) // 2)) if arguments.device == "cuda" else 1
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "calls.json"
        command = [sys.executable, str(TESTS / "fuzz.py"), "--against", str(arguments.against)]
        command += ["--device", arguments.device, "--json", str(output)]
        command += ["--count", str(arguments.calls or CALLS[arguments.device])]
        command += ["--workers", str(workers), "--close", str(arguments.close)]
        command += ["--seconds", str(seconds)]
        subprocess.run(command, check=False, env=with_this_tree())
        if not output.exists():
            return {"calls": 0, "differ": 0, "broken": ["the program ended early"]}
        return json.loads(output.read_text())


def run_ranks(arguments: argparse.Namespace) -> list[Row]:
    """Time calls on two GPUs with studies/parallel.py."""
    if arguments.device != "cuda" or torch.cuda.device_count() < 2:
        return [{"name": "two ranks", "left out": "needs two GPUs"}]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "ranks.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += [str(Path(__file__).parent / "studies" / "parallel.py"), "--out", str(output)]
        command += ["--against", str(arguments.against), "--repeats", str(arguments.pairs)]
        subprocess.run(command, check=False, env=with_this_tree(), timeout=300)
        if not output.exists():
            return [{"name": "two ranks", "left out": "the program ended early"}]
        return json.loads(output.read_text())


def with_this_tree() -> dict[str, str]:
    """Return the environment of a subprocess that imports this version."""
    paths = [str(Path(works.hl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


# ---------------------------------------------------------------------- the report


def page(found: Row) -> str:
    """Return all results as Markdown."""
    run = found["run"]
    versions = ", ".join(f"{name} {value}" for name, value in run["versions"].items())
    lines = [f"{run['commit']} against {found['against']}: {run['machine']}; {versions}", ""]
    if calls := found.get("calls"):
        drawn = ", ".join(f"{name} {n}" for name, n in sorted(calls.get("kinds", {}).items()))
        lines.append(f"Random calls: {calls['differ']} of {calls['calls']} differ ({drawn}).")
        lines += [f"- {what}" for what in [*calls.get("differing", ())[:10], *calls["broken"]]]
    if sizes := found.get("counts"):
        lines += ["", "| code | old | new |", "| --- | ---: | ---: |"]
        lines += [f"| {name} | {old} | {new} |" for name, (old, new) in sizes.items()]
    if found["rows"]:
        lines += ["", "| race, theirs / ours | theirs | median | at least | bar | verdict |"]
        lines += ["| --- | --- | ---: | ---: | ---: | --- |"]
    for row in found["rows"]:
        if "left out" in row:
            lines.append(f"| {row['name']} | | | | | left out: {row['left out']} |")
            continue
        bar = "" if row["bar"] is None else f"{row['bar']:.2f}"
        cells = [row["name"], row["theirs"], f"{row['ratio']:.3f}", f"{row['bound']:.3f}", bar]
        lines.append("| " + " | ".join([*cells, row["verdict"]]) + " |")
    return "\n".join(lines) + "\n"


def is_well(found: Row) -> bool:
    calls = found.get("calls")
    same = calls is None or (calls["calls"] and not calls["differ"] and not calls["broken"])
    return bool(same) and all(row.get("verdict") != "SLOWER" for row in found["rows"])


def main(argv: list[str] | None = None) -> int:
    """Run the regression benchmark; return 1 if a random call differs between the versions or if a
    row is slower than required, else 0."""
    arguments = _parse(argv)
    begin, quick = time.perf_counter(), arguments.quick

    def asks(name: str) -> bool:
        return not arguments.only or any(fnmatch(name, p) for p in arguments.only)

    chosen = [tiny(rail) if quick else rail for rail in rails() if asks(rail.name)]
    if arguments.names:
        print("calls", "counts", "two ranks", *(rail.name for rail in chosen), sep="\n")
        return 0
    if arguments.against is None:
        raise SystemExit("--against: got nothing, want the folder of another headloss/")
    device = torch.device(arguments.device, 0 if arguments.device == "cuda" else None)
    chosen = chosen if device.type == "cuda" or quick else []
    before = against.load(arguments.against) if chosen else None
    if arguments.once:
        run_once(chosen[arguments.part[0] - 1 :: arguments.part[1]], before, device)
        return 0
    found: Row = {"run": about(device, arguments.commit), "against": arguments.old, "rows": []}
    if asks("counts"):
        folders = (arguments.against, Path(works.hl.__file__).parents[1])
        old, new = (counts(folder / "headloss") for folder in folders)
        found["counts"] = {name: (old[name], new[name]) for name in new}
    if chosen and arguments.warm and device.type == "cuda":
        warm(arguments.warm)
    until = begin + 60 * arguments.minutes * (RACES if asks("calls") else 1.0)
    for row in run_races(chosen, before, device, arguments.pairs, until):
        found["rows"].append(row)
        said = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print(f"[{time.perf_counter() - begin:5.0f} s] {said}", flush=True)
    if asks("two ranks"):
        found["rows"] += run_ranks(arguments)
    if asks("calls"):
        left = 60 * arguments.minutes - (time.perf_counter() - begin)
        left = max(30.0, left - STARTS) if device.type == "cuda" else float("inf")
        found["calls"] = run_calls(arguments, left)
    found["seconds"] = round(time.perf_counter() - begin)
    text = page(found)
    if arguments.json:
        write(arguments.json, json.dumps(found, indent=1) + "\n")
        write(arguments.json.with_suffix(".md"), text)
    print(text)
    return 0 if is_well(found) else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The rails of a change of the inside.")
    parser.add_argument("--against", type=Path, metavar="OLD", help="folder of another headloss/")
    parser.add_argument("--old", default="old", help="what the page calls it, such as its commit")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path, help="where to write all of it; the page beside it")
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="rows, 'calls', 'counts', 'two ranks'"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--calls", type=int, help="random calls: 5000, or 500 on a CPU")
    parser.add_argument("--close", type=float, default=0.0, help="see tests/helpers/fuzz.py")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all of it, on a GPU")
    parser.add_argument(
        "--warm", type=int, default=5, metavar="N", help="first compile all, in N processes; or 0"
    )
    parser.add_argument("--quick", action="store_true", help="races in sizes for a CPU")
    parser.add_argument("--names", action="store_true", help="list the rows and leave")
    parser.add_argument("--commit", help="of the tree, where git cannot say")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=part, default=(1, 1), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
