"""Files with the results of random calls, and differences between the results of two versions.

Each version runs in separate processes that find its package by path, so that two versions share
only public names. This module does not import headloss.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HANG = 400.0  # time limit in seconds of one call, including the start of ranks

PLANNED = ("schedule",)  # Result entries that are not compared between versions.
# Smallest divisors of relative differences, by name of the result (0.1 if not listed): a
# difference is divided by the norm of the values, or by this number if it is larger.
FLOORS = {"gradients": 1e-4}
SHOWN = 10
GRACE = 180.0  # seconds allowed to a process beyond the time of its calls

# ---------------------------------------------------------------------- differences


def difference(a: Any, b: Any, close: float = 0.0, floor: float = 0.1) -> str:
    """Describe the place of a difference between two values; "" if there is no difference.

    With `close` 0, tensors and numbers must be bitwise equal; otherwise their relative difference
    is at most `close`.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype}{tuple(a.shape)} is {b.dtype}{tuple(b.shape)}"
        off = _off(a.double(), b.double(), floor)
        return "" if off <= close else f"off by {off:.2g}"
    if isinstance(a, float) and isinstance(b, float):
        numbers = (torch.tensor([x], dtype=torch.float64) for x in (a, b))
        return "" if _off(*numbers, floor) <= close else f"{a} is {b}"
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{sorted(map(str, a.keys() ^ b.keys()))} only in one"
        found = ((key, difference(a[key], b[key], close, floor)) for key in a)
        return next((f"{key}: {what}" for key, what in found if what), "")
    if isinstance(a, tuple) and isinstance(b, tuple):
        found = (difference(x, y, close, floor) for x, y in zip(a, b, strict=True))
        return next((what for what in found if what), "")
    return "" if a == b else f"{a!r} is {b!r}"


def _off(a: Tensor, b: Tensor, floor: float) -> float:
    """Return the relative norm of the difference; infinite if only one value is finite."""
    finite = a.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    if not (same | (finite & b.isfinite())).all():
        return float("inf")
    away = float((a - b)[~same].norm())
    return away / max(float(a[finite].norm()), floor) if away else 0.0


NAMES = ("has no attribute", "unexpected", "want one of", "not a field")


def unknown(record: dict[str, Any]) -> bool:
    """Return True if the call failed on a name that an older version may lack."""
    return any(words in record.get("error", "") for words in NAMES)


def compare(old: list[dict[str, Any]], new: list[dict[str, Any]], close: float = 0.0) -> list[str]:
    """Compare the results of the same calls in two versions, and return one text per call whose
    results differ. If `close` is larger than 0, only the type of an error and the subject of its
    message are compared, else the whole message."""
    found = []
    for a, b in zip(old, new, strict=True):
        if what := _compared(a, b, close):
            found.append(f"{a['call']}\n    {what}")
    return found


def _compared(a: dict[str, Any], b: dict[str, Any], close: float) -> str:
    """Compare two records.

    If `close` is larger than 0, 16-bit gradients and their sums may differ by one rounding. A call
    that hangs in the old version counts as a difference.
    """
    if "error" in a and a["error"].startswith("hang"):
        return a["error"]
    a, b = ({k: v for k, v in r.items() if k not in PLANNED} for r in (a, b))
    digits = 2.0**-8 if a["dtype"] == "bfloat16" else 2.0**-11
    rounded = max(close, digits) if close and a["dtype"] in ("bfloat16", "float16") else close
    if ("error" in a) is not ("error" in b):
        return f"an error only in one: {a.get('error')!r}, {b.get('error')!r}"
    if a.keys() != b.keys():
        return difference(a, b)
    if close and "error" in a:
        a, b = ({**r, "error": ":".join(r["error"].split(":")[:2])} for r in (a, b))
    for name, value in a.items():
        allowed = rounded if name == "gradients" else close
        what = difference(value, b[name], allowed, FLOORS.get(name, 0.1))
        if what:
            return f"{name}: {what}"
    return ""


# ---------------------------------------------------------------------- files of records


def save(records: Iterator[dict[str, Any]], path: Path, package: str) -> int:
    """Pickle results one by one, so that a killed process keeps those of finished calls; return the
    number of calls."""
    count = 0
    with path.open("wb") as file:
        pickle.dump(package, file)
        for record in records:
            pickle.dump(record, file)
            file.flush()
            count += 1
    return count


def load(path: Path, folder: Path) -> dict[int, dict[str, Any]]:
    """Read the file `path` and return a dict from the seed of each random call to the call's
    results.

    Raises:
        ValueError: the file `path` was written by a package outside of `folder`.
    """
    found: dict[int, dict[str, Any]] = {}
    with path.open("rb") as file:
        package = pickle.load(file)
        if folder.resolve() not in Path(package).resolve().parents:
            raise ValueError(f"against: got the package {package}, want one below {folder}")
        while True:
            try:
                record = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the last result may be incomplete
                return found
            found[record["seed"]] = record


def kinds(records: Iterator[dict[str, Any]]) -> Counter[str]:
    """Count the random calls by kind of error and by features."""
    count: Counter[str] = Counter()
    for record in records:
        error = record.get("error", "").split(":")[0]
        count.update(["calls", error or "served", record["dtype"], *record["kinds"]])
    return count


# ---------------------------------------------------------------------- two versions


def against(arguments: Any, folders: dict[str, Path]) -> int:
    """Run two versions in `workers` processes each, in parallel, and compare the results; return 1
    if a result differs or is missing, else 0."""
    begin = time.perf_counter()
    found: dict[str, dict[int, dict[str, Any]]] = {"old": {}, "new": {}}
    with tempfile.TemporaryDirectory() as place:
        running = [
            (version, Path(place) / f"{version}{i}", _start(arguments, folder, i, place, version))
            for i in range(arguments.workers)
            for version, folder in folders.items()
        ]
        broken = []
        for version, path, process in running:
            try:
                code = process.wait(_left(arguments, begin))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            records = load(path, folders[version]) if path.exists() else {}
            found[version] |= records
            if code:
                broken.append(f"{version}: a process ended with {code} after {len(records)} calls")
    both = found["old"].keys() & found["new"].keys()
    seeds = sorted(seed for seed in both if not unknown(found["old"][seed]))
    print(f"{len(both) - len(seeds)} calls of names that the old version does not have")
    old, new = ([found[version][seed] for seed in seeds] for version in ("old", "new"))
    differ = compare(old, new, arguments.close)
    _report(arguments, kinds(iter(new)), differ, broken, time.perf_counter() - begin)
    return int(bool(differ or broken or not seeds))


def _left(arguments: Any, begin: float) -> float | None:
    if arguments.seconds == float("inf"):
        return None
    return max(1.0, arguments.seconds + GRACE - (time.perf_counter() - begin))


def _start(arguments: Any, folder: Path, part: int, place: str, version: str) -> Any:
    """Start a process that imports headloss from a folder and runs this worker's fraction of the
    random calls."""
    count, workers = arguments.count, arguments.workers
    first, last = (count * i // workers for i in (part, part + 1))
    script = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, str(script), "--save", str(Path(place) / f"{version}{part}")]
    command += ["--first", str(arguments.first + first), "--count", str(last - first)]
    command += ["--seconds", str(arguments.seconds), "--device", arguments.device]
    paths = f"{folder.resolve()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})


def _report(
    arguments: Any, counted: Counter[str], differ: list[str], broken: list[str], seconds: float
) -> None:
    print(", ".join(f"{name} {number}" for name, number in sorted(counted.items())))
    for what in differ[:SHOWN]:
        print(what)
    if differ:
        print(f"Replay one: python tests/helpers/fuzz.py --first SEED --count 1 "
              f"--device {arguments.device} --against {arguments.against}")  # fmt: skip
    print(*broken, f"{len(differ)} of {counted['calls']} calls differ", sep="\n", flush=True)
    if arguments.json is not None:
        found = {"device": arguments.device, "close": arguments.close, "kinds": dict(counted)}
        found |= {"calls": counted["calls"], "differ": len(differ), "differing": differ}
        found |= {"broken": broken, "seconds": round(seconds, 1)}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def watched(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield results of calls; a call that hangs ends the process and prints the stacks of its
    threads."""
    while True:
        faulthandler.dump_traceback_later(HANG, exit=True)
        try:
            record = next(found)
        except StopIteration:
            return
        finally:
            faulthandler.cancel_dump_traceback_later()
        yield record
