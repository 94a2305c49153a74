"""A training step of whole models, forward and backward, with one head after another.

    python3 benchmarks/steps.py --device cuda --json benchmarks/results/steps.json    # minutes
    python3 benchmarks/steps.py --quick --device cpu                                  # seconds

Models of Transformers with the shapes of Qwen2.5-0.5B, Llama-3.2-1B and four layers of Llama-3-8B,
random weights and labels that they predict with a probability of a half, in bfloat16, all weights
trained. In each model, batch and work, loss and gradient of each contestant are compared with those
of a float32 head on the same hidden states; those that agree are then timed in turn.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import report
import torch
from measure import Stretch, is_ours, one_line, synchronize
from run import PACKAGES, Results, about
from step_cases import (
    CONTESTANTS,
    QUICK,
    SETTINGS,
    WORKS,
    Batch,
    Contestant,
    exact,
    make_batch,
    make_model,
)
from torch import Tensor

from headloss.testing import LiveTensors

ROUNDS = 5
BACKBONE = 0.03  # of a gradient, off by its rounding to bfloat16 on the way through a backbone


def race(
    work: str, model: Any, batch: Batch, chosen: dict[str, Contestant], device: torch.device
) -> dict[str, dict[str, Any]]:
    """A row for each contestant: errors of all, times and memory of those that agree."""
    weights = list(model.parameters())
    model.zero_grad(set_to_none=True)
    loss = exact(work, model, batch)
    loss.backward()
    want = float(loss.detach()), [w.grad.clone() for w in weights]
    del loss
    rows = {}
    for name, contestant in chosen.items():
        rows[name] = gate(work, model, batch, contestant, weights, want, device)
        if rows[name]["status"] == "failed" and device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
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
        ms = [stretch.ms for stretch in stretches[1:]]  # the first is a warm-up
        rows[name] |= {"ms": statistics.median(ms), "low": min(ms), "high": max(ms)}
        rows[name]["runs"] = len(ms)
    return rows


def gate(
    work: str,
    model: Any,
    batch: Batch,
    contestant: Contestant,
    weights: list[Tensor],
    want: tuple[float, list[Tensor]],
    device: torch.device,
) -> dict[str, Any]:
    """Errors of loss (absolute) and gradient (norm over norm), and the memory of a second step."""
    if contestant.gpu and device.type != "cuda":
        return {"status": "skipped", "reason": "needs a GPU"}
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
    except Exception as failure:  # whatever a contestant does, the others go on
        row |= {"status": "failed", "reason": one_line(failure)}
    else:
        slack = BACKBONE if weights[0].dtype == torch.bfloat16 else 0.0
        limits = contestant.tolerance.values, contestant.tolerance.gradients + slack
        for name, limit in zip(("loss_error", "gradient_error"), limits, strict=True):
            if not row[name] <= limit:
                row |= {"status": "failed", "reason": f"{name} {row[name]:.1e} > {limit:.0e}"}
    return row


def clear(weights: list[Tensor]) -> None:
    """Gradients stay and are added to, as where a step has several batches."""
    for weight in weights:
        weight.grad.zero_()  # type: ignore[union-attr]


def peak(step: Any, device: torch.device) -> int:
    """Bytes beyond what is there before: on a GPU the allocator's, else of the tensors made."""
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
    """|got - want| and |want| of all gradients."""
    off = [torch.dist(w.grad.float(), g.float()) for w, g in zip(weights, want, strict=True)]  # type: ignore[union-attr]
    return torch.stack(off).norm(), torch.stack([g.float().norm() for g in want]).norm()


# ---------------------------------------------------------------------- the command


def table(results: dict, largest: bool = False) -> str:
    """A line for each model, batch and work (`largest`: of the largest batch), as Markdown."""
    head = ("model", "step", "tokens", *CONTESTANTS)
    lines = [head, ("---", "---", *("---:",) * (len(head) - 2))]
    groups: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in results["rows"]:
        groups.setdefault((row["model"], row["work"], row["tokens"]), {})[row["contestant"]] = row
    most, marks = max(tokens for _, _, tokens in groups), report.marks_of(results)
    for (model, work, tokens), rows in groups.items():
        if tokens < most and largest:
            continue
        best = min((row["ms"] for row in rows.values() if "ms" in row), default=0)
        mark = marks[max(row["run"] for row in rows.values())]
        cells = (_cell(rows.get(name), best) for name in CONTESTANTS)
        lines.append((model + mark, work, str(tokens), *cells))
    return f"{report.machine(results)}\n\n{report.markdown(lines)}"


def _cell(row: dict[str, Any] | None, best: float) -> str:
    if row is None or "ms" not in row:
        return "-" if row is None or row["status"] == "skipped" else row["reason"]
    ms = f"{row['ms']:.0f}"
    ms = f"**{ms}**" if row["ms"] <= (1 + report.TIE) * best else ms
    return f"{ms} ms, {row['peak_bytes'] / report.GIB:.1f} GiB"


def errors(results: dict) -> str:
    """How far gradients are off, in a sentence."""
    rows = [row for row in results["rows"] if "ms" in row]
    said = []
    for who, ours in (("of headloss", True), ("of the others", False)):
        off = [100 * r["gradient_error"] for r in rows if is_ours(r["contestant"]) is ours]
        said += [f"{who} by {min(off):.1g} to {max(off):.1g} %"] if off else []
    mean = statistics.mean(row["probability"] for row in results["rows"])
    return (
        "Against a float32 head on the same hidden states the gradient of all weights is off\n"
        f"{', '.join(said) or 'in nothing that ran'}. The labels' mean probability is {mean:.2f}."
    )


def main(argv: list[str] | None = None) -> int:
    """0 where every contestant of headloss agreed and ran, 1 otherwise."""
    arguments = _parse(argv)
    warnings.simplefilter("ignore", FutureWarning)  # names that a later transformers drops
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
        for work in WORKS:
            for rows, length in setting.batches:
                batch = make_batch(model, rows, length, device)
                case = f"{model_name}, {rows} x {length}"
                same = {"case": case, "model": model_name, "work": work, "tokens": rows * length}
                same["probability"] = batch.probability
                found = [
                    same | {"contestant": name} | row
                    for name, row in race(work, model, batch, chosen, device).items()
                ]
                results.add(found)
                for row in found:
                    print(_line(row), flush=True)
                red += [r for r in found if r["status"] == "failed" and is_ours(r["contestant"])]
        del model, batch
        gc.collect()
    print(f"\n{errors(results.content)}\n\n{table(results.content)}")
    for row in red:
        print(f"FAILED {row['case']}: {row['work']}: {row['contestant']}: {row['reason']}")
    return 1 if red else 0


def _line(row: dict[str, Any]) -> str:
    name = f"{row['case']}: {row['work']:4} {row['contestant']:20}"
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
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="models, by shell patterns")
    parser.add_argument("--contestants", nargs="+", metavar="PATTERN")
    parser.add_argument("--json", type=Path, help="file to write or to append to")
    parser.add_argument("--commit", help="of the tree, where git cannot say")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
