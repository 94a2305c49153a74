"""One training step of GRPO on a whole model: TRL, TRL with headloss, and plain logits.

    python benchmarks/steps.py --output benchmarks/results/steps.json \\
        --markdown benchmarks/results/steps.md         # minutes, on one GPU
    python benchmarks/steps.py --quick --device cpu    # seconds, tiny shapes
    python benchmarks/steps.py --gate --output ...     # the gradients alone, against a float64 head

Models have the shapes of Qwen2.5-0.5B and Llama-3-8B and random weights. A step is forward and
backward through TRL's `_compute_loss` and an AdamW step, in bfloat16 with gradient checkpointing as
TRL trains, on completions of full length; nothing is generated. All contestants share one model and
must agree with a float64 head on the loss and the gradient before anything is timed. B completions,
P tokens of a prompt, C of a completion.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import report
import torch
from measure import Stretch, one_line, synchronize
from run import PACKAGES, Results, about, write
from step_cases import (
    CONTESTANTS,
    GIB,
    QUICK,
    SETTINGS,
    TRUTH,
    Setting,
    make_batch,
    make_model,
    make_trainer,
)
from torch import Tensor

from headloss.testing import LiveTensors

WARM, TIMED = 2, 5  # steps
NOTES = """\
One step: forward, backward, AdamW; median of 5 after 2. *peak*: the allocator's, weights
and optimizer included. *longest*: completion length, in steps of 1024, whose forward and backward
fit when PyTorch may hold no more than the budget. *loss*, *gradient*: difference from a float64
head on the same backbone, on one batch of 256-token completions (of the gradient, norm over norm).
Random weights have small logits; larger ones are in gradient_truth.md.

- *float64 head*: the hidden states of the model, and everything after them in float64.
- *plain logits*: `log_softmax` in float32 of the model's logits at the completion's positions.
- *plain logits, TRL's kernel*: `selective_log_softmax_and_entropy` of the same logits, in Triton.
- *TRL*: the stock `GRPOTrainer`, whose head is chunked and computes its logits again in backward.
- *TRL with headloss*: `headloss.integrations.trl.GRPOTrainer`."""

# ---------------------------------------------------------------------- what is measured


class Bench:
    """One model on one device, and the contestants that are measured with it.

    `folder`: where trainers may write; `patience`: seconds for a search.
    """

    def __init__(
        self, name: str, setting: Setting, device: torch.device, folder: str, patience: float
    ) -> None:
        self.name, self.setting, self.device = name, setting, device
        self.folder, self.patience = folder, patience
        self.began = time.perf_counter()
        self.model = make_model(setting, device)
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        size = sum(p.numel() for p in self.model.parameters())
        trained = sum(p.numel() for p in self.weights)
        held = torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0.0
        self.say(f"{size / 1e6:.0f}M parameters, {trained / 1e6:.1f}M trained, {held:.2f} GiB")

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.began:6.1f} s  {self.name}: {text}", flush=True)

    def trainer(self, contestant: str) -> Any:
        return make_trainer(contestant, self.model, self.setting, self.device, self.folder)

    def close(self) -> None:
        """Free the model: trainers and it hold one another."""
        self.weights, self.model = [], None
        self.clear()

    def clear(self) -> None:
        for weight in self.weights:
            weight.grad = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ the gate

    def gate(self, chosen: list[str]) -> dict[str, dict[str, Any]]:
        """Loss and gradient of each on one batch, against those of a float64 head.

        Old log-probs are that head's, moved a little: some tokens are clipped.
        """
        batch = make_batch(self.setting, self.setting.gate, self.device)
        first = TRUTH
        found: dict[str, dict[str, Any]] = {}
        want: list[Tensor] = []
        for name in dict.fromkeys((first, *chosen)):
            trainer = self.trainer(name)
            if not found:
                batch["old_per_token_logps"] = self._old(trainer, batch)
            loss = trainer._compute_loss(self.model, batch)
            loss.backward()
            got = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]
            self.clear()
            want = want or got
            found[name] = row = {
                "loss": float(loss.detach()),
                "gradient_norm": _norm(got),
                "gradient_error": _distance(got, want) / max(_norm(want), 1e-30),
            }
            row["loss_error"] = abs(row["loss"] - found[first]["loss"])
            row |= _verdict(row, found[first], self.setting.dtype)
            self.say(
                f"gate: {name:26} loss {row['loss']:+.5f}  |gradient| {row['gradient_norm']:.5g}  "
                f"off by {row['gradient_error']:.1e}  {row['status']} {row['reason']}"
            )
        return found

    @torch.no_grad()
    def _old(self, trainer: Any, batch: dict[str, Tensor]) -> Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        columns = batch["completion_ids"].shape[1]
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            self.model, ids, torch.ones_like(ids), columns
        )
        generator = torch.Generator().manual_seed(1)
        return logps + 0.1 * torch.randn(logps.shape, generator=generator).to(self.device)

    # ------------------------------------------------------------------ time and memory

    def measure(self, contestant: str) -> dict[str, Any]:
        """Step time and peak bytes at the fixed length, and the longest that fits."""
        trainer = self.trainer(contestant)
        fused = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(self.weights, lr=1e-6, fused=fused)
        batch = make_batch(self.setting, self.setting.completion, self.device)

        def step() -> None:
            self.forward_backward(trainer, batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        ms = []
        for _ in range(WARM + TIMED):
            with Stretch(self.device) as stretch:
                step()
            synchronize(self.device)
            ms.append(stretch.ms)
        del ms[:WARM]
        row = {"ms": statistics.median(ms), "low": min(ms), "high": max(ms), "runs": len(ms)}
        row |= {"peak_bytes": self.peak(step)}
        size = row["peak_bytes"] / GIB
        self.say(f"{contestant:26} {row['ms']:9.1f} ms  {size:6.2f} GiB")
        return row | self.longest(trainer, contestant, row["peak_bytes"])

    def forward_backward(self, trainer: Any, batch: dict[str, Tensor]) -> None:
        trainer._compute_loss(self.model, batch).backward()

    def peak(self, run: Callable[[], Any]) -> int:
        """The allocator's peak; on a CPU, bytes of the tensors that a run makes."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            run()
            synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device)
        with LiveTensors() as meter:
            run()
        return meter.peak

    def longest(self, trainer: Any, contestant: str, peak: int) -> dict[str, Any]:
        """The longest completion within the budget, in tokens, and the next that was too long."""
        setting = self.setting
        start = time.perf_counter()

        def run(units: int) -> int:
            batch = make_batch(setting, units * setting.unit, self.device)
            return self.peak(lambda: self.forward_backward(trainer, batch))

        def fits(units: int) -> bool:
            try:
                good = run(units) <= setting.budget
            except torch.OutOfMemoryError:
                good = False
            self.clear()  # outside of `except`, whose traceback holds the tensors
            self.say(f"{contestant:26} C={units * setting.unit} {'fits' if good else 'does not'}")
            return good

        # Memory is close to linear in the length: two peaks say where to begin.
        units = setting.completion / setting.unit
        short = run(1)
        self.clear()
        each = max((peak - short) / max(units - 1, 1), 1)
        guess = int(1 + (setting.budget - short) / each)
        with limited(self.device, setting.budget):
            good, bad = longest(
                fits, guess, setting.most, lambda: time.perf_counter() - start > self.patience
            )
        return {
            "longest": good * setting.unit,
            "too_long": bad * setting.unit if bad <= setting.most else None,
            "unit": setting.unit,
            "budget_bytes": setting.budget,
        }


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.float().norm() for t in tensors]).norm())


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    return _norm([torch.dist(a.float(), b.float()) for a, b in zip(some, others, strict=True)])


def _verdict(row: dict[str, Any], want: dict[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """Agreement within what rounding of logits to bfloat16 does to a mean over tokens."""
    loss, share = (1e-2, 0.05) if dtype == torch.bfloat16 else (1e-5, 1e-4)
    out = []
    if not row["loss_error"] <= loss:
        out.append(f"loss {row['loss']:.5f}, want {want['loss']:.5f}")
    norm = want["gradient_norm"]
    if not abs(row["gradient_norm"] - norm) <= share * norm:
        out.append(f"gradient norm {row['gradient_norm']:.5g}, want {norm:.5g}")
    if not row["gradient_error"] <= 4 * share:
        out.append(f"gradient off by {row['gradient_error']:.2g}")
    return {"status": "failed" if out else "ok", "reason": "; ".join(out)}


def longest(
    fits: Callable[[int], bool], guess: int, most: int, late: Callable[[], bool] = lambda: False
) -> tuple[int, int]:
    """(largest that fits or 0, smallest that does not or most + 1), by doubling, then bisecting.

    Where time is up they are further apart than 1.
    """
    low, high, at, reach = 0, most + 1, min(max(guess, 1), most), 1
    while high - low > 1 and not late():
        if fits(at):
            low = at
        else:
            high = at
        if low and high <= most:
            at = (low + high) // 2
        else:
            at = min(low + reach, most) if low else max(high - reach, 1)
        reach *= 2
    return low, high


@contextmanager
def limited(device: torch.device, budget: int) -> Iterator[None]:
    """PyTorch's allocator holds no more than `budget` bytes of a GPU."""
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(budget / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def run_setting(
    bench: Bench, chosen: list[str], gate_alone: bool = False
) -> Iterator[dict[str, Any]]:
    """The rows of a model, each as soon as it is known: the gate's, and the step's behind it."""
    setting = bench.setting
    gate = bench.gate(chosen)
    sizes = {"completions": setting.completions, "prompt": setting.prompt}
    for name in chosen:
        row = {"case": bench.name, "work": "gate", "contestant": name, **sizes}
        yield row | {"completion": setting.gate, **gate[name]}
        if gate[name]["status"] != "ok" or gate_alone or name == TRUTH:
            continue
        row |= {"work": "grpo step", "completion": setting.completion, "status": "ok", "reason": ""}
        try:
            row |= bench.measure(name)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row |= {"status": "failed", "reason": one_line(error)}
        bench.clear()
        yield row


# ---------------------------------------------------------------------- the command


def table(results: dict) -> str:
    """Every model and contestant as Markdown."""
    head = ("model", "contestant", "B x (P + C)", "ms", "peak GiB", "longest C", "of GiB")
    lines = [(*head, "loss", "gradient"), ("---", "---", *("---:",) * 7)]
    found = {(row["case"], row["contestant"], row["work"]): row for row in results["rows"]}
    marks = report.marks_of(results)
    for case in dict.fromkeys(row["case"] for row in results["rows"]):
        for name in CONTESTANTS:
            gate, step = (found.get((case, name, work)) for work in ("gate", "grpo step"))
            if gate is None and step is None:
                continue
            errors = ("-", "-")
            if gate is not None and gate["status"] == "ok":
                errors = (f"{gate['loss_error']:.0e}", f"{100 * gate['gradient_error']:.2g} %")
            mark = marks[(step or gate)["run"]]
            lines.append((case, name + mark, *_measured(step or gate), *errors))
    return f"{report.machine(results)}\n\n{report.markdown(lines)}\n\n{NOTES}\n"


def _measured(row: dict[str, Any]) -> tuple[str, ...]:
    """Shape, time and memory of a step; of the gate's row what it holds of them."""
    if row["status"] != "ok":
        return ("-", row["reason"], "", "", "")
    if "ms" not in row:
        return ("-",) * 5
    shape = f"{row['completions']} x ({row['prompt']} + {row['completion']})"
    sizes = (f"{row['peak_bytes'] / GIB:.1f}", _longest(row), f"{row['budget_bytes'] / GIB:.0f}")
    return (shape, f"{row['ms']:.0f}", *sizes)


def _longest(row: dict[str, Any]) -> str:
    good, bad = row["longest"], row["too_long"]
    if bad is None:
        return f"{good} or more" if good else "not known"
    return f"{good}" if bad - good <= row["unit"] else f"{good} to {bad}"


def main(argv: list[str] | None = None) -> int:
    """0 where every contestant agreed and ran, 1 otherwise."""
    arguments = _parse(argv)
    warnings.simplefilter("ignore", FutureWarning)  # names that transformers 6 will drop
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    packages = (*PACKAGES[:4], "transformers", "peft", "accelerate")
    results = Results(arguments.output, about(device, arguments.commit, packages))
    red = []
    with tempfile.TemporaryDirectory() as folder:
        for name, setting in (QUICK if arguments.quick else SETTINGS).items():
            if not _matches(name, arguments.only):
                continue
            if arguments.budget is not None:
                setting = replace(setting, budget=int(arguments.budget * GIB))
            bench = Bench(name, setting, device, folder, arguments.patience)
            names = [c for c in CONTESTANTS if _matches(c, arguments.contestants)]
            for row in run_setting(bench, names, arguments.gate):
                results.add([row])
                red += [row] if row["status"] != "ok" else []
            bench.close()
            del bench
    text = table(results.content)
    print(text, flush=True)
    if arguments.markdown:
        write(arguments.markdown, text)
    for row in red:
        print(f"FAILED {row['case']}: {row['contestant']}: {row['reason']}")
    return 1 if red else 0


def _matches(name: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="models, by shell patterns")
    parser.add_argument("--contestants", nargs="+", metavar="PATTERN")
    parser.add_argument("--gate", action="store_true", help="loss and gradient alone, no times")
    parser.add_argument("--budget", type=float, metavar="GIB", help="that the longest must fit in")
    parser.add_argument(
        "--patience", type=float, default=15.0, help="seconds after which a search tries no more"
    )
    parser.add_argument("--output", type=Path, help="JSON to write or to append to")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    parser.add_argument("--commit", help="of the tree, where git cannot say")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
