"""Benchmark of a training step of whole models, forward and backward, with several heads.

    python3 benchmarks/steps.py --device cuda --json benchmarks/results/steps.json    # minutes
    python3 benchmarks/steps.py --longest --device cuda --json benchmarks/results/steps.json
    python3 benchmarks/steps.py --quick --device cpu                                  # seconds

The models are Transformers models in bfloat16, with random weights and the shapes of Qwen2.5-0.5B,
Llama-3.2-1B and four layers of Llama-3-8B; every weight is trained. Labels have a mean probability
of a half. For each model, batch and loss, the benchmark compares each implementation's loss and
gradient with a float32 head on identical hidden states, and then times the correct implementations
alternately. With `--longest` the program times nothing, and searches for the longest sequence that
each implementation can train on without running out of memory.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import report
import torch
from live_tensors import LiveTensors
from measure import Stretch, is_ours, one_line, synchronize
from run import PACKAGES, Results, about
from step_cases import (
    CONTESTANTS,
    QUICK,
    SETTINGS,
    WORKS,
    Contestant,
    Setting,
    exact,
    long_batch,
    make_batch,
    make_model,
)
from torch import Tensor

ROUNDS = 5
# Parts of error messages of PyTorch and Triton, and of cuBLAS.
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
BACKBONE = 0.03  # Allowed relative error of the backbone's bfloat16 gradients.


def race(
    work: str,
    model: Any,
    batch: Any,
    chosen: dict[str, Contestant],
    device: torch.device,
    exact: Callable[[str, Any, Any], Tensor] = exact,
) -> dict[str, dict[str, Any]]:
    """Return a row for each implementation: errors against the loss `exact`, and for correct
    implementations time and memory."""
    weights = list(model.parameters())
    model.zero_grad(set_to_none=True)
    loss = exact(work, model, batch)
    loss.backward()
    want = float(loss.detach()), [w.grad.clone() for w in weights]
    del loss
    rows = {}
    for name, contestant in chosen.items():
        rows[name] = gate(work, model, batch, contestant, weights, want, device)
        if rows[name]["status"] == "failed":
            release(device)
    del want
    runs: dict[str, list[Stretch]] = {n: [] for n, row in rows.items() if row["status"] == "ok"}
    for _ in range(1 + ROUNDS):
        for name, stretches in runs.items():
            clear(weights)
            with chosen[name].patch(work, model):
                synchronize(device)
                with Stretch(device) as stretch:
                    chosen[name].loss(work, model, batch).backward()
                synchronize(device)
            stretches.append(stretch)
    for name, stretches in runs.items():
        ms = [stretch.ms for stretch in stretches[1:]]  # without the warm-up
        rows[name] |= {"ms": statistics.median(ms), "low": min(ms), "high": max(ms)}
        rows[name]["runs"] = len(ms)
    return rows


def gate(
    work: str,
    model: Any,
    batch: Any,
    contestant: Contestant,
    weights: list[Tensor],
    want: tuple[float, list[Tensor]],
    device: torch.device,
) -> dict[str, Any]:
    """Return the errors of loss (absolute) and gradient (relative norm), and a second step's
    memory."""
    if reason := contestant.unserved(work, device):
        return {"status": "skipped", "reason": reason}
    row: dict[str, Any] = {"status": "ok", "reason": ""}
    try:
        with contestant.patch(work, model):
            clear(weights)
            loss = contestant.loss(work, model, batch)
            loss.backward()
            got = float(loss.detach())
            del loss
            error, size = (float(x) for x in _distance(weights, want[1]))
            row |= {"loss_error": abs(got - want[0]), "gradient_error": error / size}
            row["peak_bytes"] = peak(lambda: contestant.loss(work, model, batch).backward(), device)
    except ImportError as missing:
        row = {"status": "skipped", "reason": one_line(missing)}
    except Exception as failure:  # An error of one implementation must not stop the benchmark.
        row |= {"status": "failed", "reason": one_line(failure)}
    else:
        slack = BACKBONE if weights[0].dtype == torch.bfloat16 else 0.0
        limits = contestant.tolerance.values, contestant.tolerance.gradients + slack
        for name, limit in zip(("loss_error", "gradient_error"), limits, strict=True):
            if not row[name] <= limit:
                row |= {"status": "failed", "reason": f"{name} {row[name]:.1e} > {limit:.0e}"}
    return row


def release(device: torch.device) -> None:
    """Free unreferenced GPU memory, for example after a failed step."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def clear(weights: list[Tensor]) -> None:
    """Zero the gradients in place, so that steps accumulate into existing gradients."""
    for weight in weights:
        weight.grad.zero_()  # type: ignore[union-attr]


def peak(step: Any, device: torch.device) -> int:
    """Return a step's peak bytes in excess of prior memory, by the GPU's allocator or by live CPU
    tensors."""
    if device.type != "cuda":
        with LiveTensors() as meter:
            step()
        return meter.peak
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _distance(weights: list[Tensor], want: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the norms |got - want| and |want| over all gradients."""
    off = [torch.dist(w.grad.float(), g.float()) for w, g in zip(weights, want, strict=True)]  # type: ignore[union-attr]
    return torch.stack(off).norm(), torch.stack([g.float().norm() for g in want]).norm()


# ---------------------------------------------------------------------- the longest sequence


def longest(fits: Callable[[int], bool], unit: int, cap: int) -> int:
    """Return the largest number of tokens for which `fits` is true, to within `unit` tokens or a
    sixteenth of the number.

    The returned number of tokens is a multiple of `unit` and at most `cap`; `cap` must be `unit`
    times 4, 8, 16 or a higher power of 2.
    """
    low, high = 0, 4 * unit
    while high <= cap and fits(high):
        low, high = high, 2 * high
    while low < cap and high - low > max(unit, low // 16):
        middle = (low + high) // 2 // unit * unit
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest_row(
    work: str, model: Any, contestant: Contestant, setting: Setting, device: torch.device
) -> dict[str, Any]:
    """Return a row with the longest sequence for which a step does not run out of memory."""
    if reason := contestant.unserved(work, device):
        return {"status": "skipped", "reason": reason, "longest": None}

    def fits(length: int) -> bool:
        release(device)
        batch = long_batch(model, length, device)
        try:
            contestant.loss(work, model, batch).backward()
            synchronize(device)
        except RuntimeError as failure:
            if not any(sign in str(failure) for sign in OUT_OF_MEMORY):
                raise
            return False
        return True

    release(device)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    try:
        with contestant.patch(work, model):
            tokens = longest(fits, setting.unit, setting.cap)
    except ImportError as missing:
        return {"status": "skipped", "reason": one_line(missing), "longest": None}
    except Exception as failure:  # An error of one implementation must not stop the benchmark.
        return {"status": "failed", "reason": one_line(failure), "longest": None}
    return {"status": "ok", "reason": "", "longest": tokens}


# ---------------------------------------------------------------------- the command


def table(results: dict, largest: bool = False) -> str:
    """Return a Markdown table with a line for each model, batch and loss. If `results` contains
    searches for the longest sequence, the text also has a table of the longest sequences.

    `largest` restricts the table of times to the largest batches.
    """
    rule, columns = "---:", len(CONTESTANTS)
    timed = [("model", "step", "tokens", *CONTESTANTS), ("---", "---", *(rule,) * (1 + columns))]
    sought = [("longest sequence", "step", *CONTESTANTS), ("---", "---", *(rule,) * columns)]
    groups: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in results["rows"]:
        group = (row["model"], row["work"], row.get("tokens", 0))
        groups.setdefault(group, {})[row["contestant"]] = row
    most, marks = max(tokens for _, _, tokens in groups), report.marks_of(results)
    for (model, work, tokens), rows in groups.items():
        mark = marks[max(row["run"] for row in rows.values())]
        if not tokens:
            cells = (_length(rows.get(name)) for name in CONTESTANTS)
            sought.append((model + mark, work, *cells))
        elif tokens == most or not largest:
            best = min((row["ms"] for row in rows.values() if "ms" in row), default=0)
            cells = (_cell(rows.get(name), best) for name in CONTESTANTS)
            timed.append((model + mark, work, str(tokens), *cells))
    parts = [report.markdown(part) for part in (timed, sought) if len(part) > 2]
    return "\n\n".join((report.machine(results), *parts))


def _cell(row: dict[str, Any] | None, best: float) -> str:
    if row is None or "ms" not in row:
        return _absent(row)
    ms = f"{row['ms']:.0f}"
    ms = f"**{ms}**" if row["ms"] <= (1 + report.TIE) * best else ms
    return f"{ms} ms, {row['peak_bytes'] / report.GIB:.1f} GiB"


def _length(row: dict[str, Any] | None) -> str:
    return _absent(row) if row is None or row["longest"] is None else f"{row['longest']}"


def _absent(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row["status"] == "skipped" else row["reason"]


def errors(results: dict) -> str:
    """Return a sentence with the range of gradient errors."""
    rows = [row for row in results["rows"] if "ms" in row]
    said = []
    for who, ours in (("of headloss", True), ("of the others", False)):
        off = [100 * r["gradient_error"] for r in rows if is_ours(r["contestant"]) is ours]
        said += [f"{who} by {min(off):.1g} to {max(off):.1g} %"] if off else []
    mean = statistics.mean(r["probability"] for r in results["rows"] if "probability" in r)
    return (
        "Against a float32 head on the same hidden states the gradient of all weights is off\n"
        f"{', '.join(said) or 'in nothing that ran'}. The labels' mean probability is {mean:.2f}."
    )


Rows = Iterator[list[dict[str, Any]]]


def timed_rows(
    name: str, setting: Setting, model: Any, chosen: dict[str, Contestant], device: torch.device
) -> Rows:
    """Yield timed rows for each loss and batch; DPO is timed only on batches with an even number of
    sequences."""
    for work in WORKS:
        for rows, length in setting.batches:
            if work == "DPO" and rows % 2:
                continue
            batch = make_batch(model, rows, length, device)
            case = f"{name}, {rows} x {length}"
            same = {"case": case, "model": name, "work": work, "tokens": rows * length}
            same["probability"] = batch.probability
            raced = race(work, model, batch, chosen, device)
            yield [same | {"contestant": who} | row for who, row in raced.items()]


def longest_rows(
    name: str, setting: Setting, model: Any, chosen: dict[str, Contestant], device: torch.device
) -> Rows:
    """Yield rows of the longest-sequence search of each implementation, for SFT and GRPO."""
    for work in ("SFT", "GRPO"):
        for who, contestant in chosen.items():
            same = {"case": f"{name}, longest", "model": name, "work": work, "contestant": who}
            yield [same | longest_row(work, model, contestant, setting, device)]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0 if every headloss configuration ran correctly, else 1."""
    arguments = _parse(argv)
    warnings.simplefilter("ignore", FutureWarning)  # deprecated names in transformers
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    results = Results(arguments.json, about(device, arguments.commit, (*PACKAGES, "transformers")))
    chosen = {n: c for n, c in CONTESTANTS.items() if _matches(n, arguments.contestants)}
    red = []
    for model_name, setting in (QUICK if arguments.quick else SETTINGS).items():
        if not _matches(model_name, arguments.only):
            continue
        model = make_model(setting, device)
        measure = longest_rows if arguments.longest else timed_rows
        for found in measure(model_name, setting, model, chosen, device):
            results.add(found)
            for row in found:
                print(_line(row), flush=True)
            red += [r for r in found if r["status"] == "failed" and is_ours(r["contestant"])]
        del model
        gc.collect()
    if not arguments.longest:
        print(f"\n{errors(results.content)}")
    print(f"\n{table(results.content)}")
    for row in red:
        print(f"FAILED {row['case']}: {row['work']}: {row['contestant']}: {row['reason']}")
    return 1 if red else 0


def _line(row: dict[str, Any]) -> str:
    name = f"{row['case']}: {row['work']:4} {row['contestant']:20}"
    if row.get("longest") is not None:
        return f"{name} {row['longest']:8} tokens"
    if "ms" not in row:
        return f"{name} {row['status']}: {row['reason']}"
    return (
        f"{name} {row['ms']:8.1f} ms ({row['low']:.1f} to {row['high']:.1f})  "
        f"{row['peak_bytes'] / report.GIB:6.2f} GiB  gradient {row['gradient_error']:.0e}"
    )


def _matches(name: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--longest", action="store_true", help="seek the longest sequences alone")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="models, by shell patterns")
    parser.add_argument("--contestants", nargs="+", metavar="PATTERN")
    parser.add_argument("--json", type=Path, help="file to write or to append to")
    parser.add_argument("--commit", help="of the tree, where git cannot say")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
