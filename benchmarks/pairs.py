"""Time small training steps, in which the GPU waits for the CPU, alternately with headloss and with
Transformers' own loss.

    python3 benchmarks/pairs.py --device cuda --json benchmarks/results/pairs.json
    python3 benchmarks/pairs.py --device cuda --only 'compiled*'
    python3 benchmarks/pairs.py --quick --device cpu

A step is the forward and the backward pass of a model of `step_cases`. The model with headloss and
the stock model have separate weights, and both get `num_items_in_batch`, as under `Trainer`. Steps
with headloss and steps with Transformers' own loss are timed alternately, `PAIRS` steps of each. A
row of the results has the median time of each implementation, and the median and quartiles of
headloss's time divided by the stock model's time over the pairs of steps. In rows named "host", a
call of headloss's head alone is compared with eager PyTorch's cross-entropy, by the time until the
call returns on the CPU, without waiting for the GPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import synchronize
from run import PACKAGES, Results, about
from step_cases import CONTESTANTS, QUICK, SETTINGS, WORKS, Setting, make_batch, make_model
from torch import Tensor
from torch.nn import functional as F

import headloss as hl
from headloss.integrations.transformers import apply

PAIRS, WARM_UP = 24, 6
LENGTH, SEGMENTS = 1024, 8
Step = Callable[[], Tensor]
Row = dict[str, Any]


def pairs(ours: Step, stock: Step, device: torch.device) -> Row:
    """Return the medians of times and of time ratios over alternating pairs of steps."""
    times: dict[Step, list[float]] = {ours: [], stock: []}
    for i in range(WARM_UP + PAIRS):
        for side in (ours, stock) if i % 2 else (stock, ours):
            synchronize(device)
            start = time.perf_counter()
            side().backward()
            synchronize(device)
            times[side].append(1e3 * (time.perf_counter() - start))
    mine, theirs = times[ours][WARM_UP:], times[stock][WARM_UP:]
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    of_sides = {"ms": statistics.median(mine), "stock_ms": statistics.median(theirs)}
    return {**of_sides, "ratio": median, "quartiles": [low, high], "pairs": PAIRS}


def applied_rows(name: str, setting: Setting, device: torch.device) -> Iterator[Row]:
    """Yield rows that compare a model after `apply(model)` with a copy of the model that computes
    its own loss."""
    stock = make_model(setting, device)
    model = copy.deepcopy(stock)
    apply(model)
    for rows in (1, 2, 4):
        step = steps_of(stock, rows, setting, device)
        yield of(name, "apply", rows) | pairs(step(model), step(stock), device)


def compiled_rows(name: str, setting: Setting, device: torch.device) -> Iterator[Row]:
    """Time training steps under `Trainer` of the stock model and of a copy after `apply`, both
    compiled by `torch.compile` in its default mode."""
    stock = make_model(setting, device)
    model = copy.deepcopy(stock)
    apply(model)
    compiled = torch.compile(model), torch.compile(stock)
    for rows in (1, 4):
        torch.compiler.reset()  # Compile anew for each number of rows.
        step = steps_of(stock, rows, setting, device)
        ours, theirs = map(step, compiled)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours().backward()
        named = [str(w.message) for w in caught if "headloss" in str(w.message)]
        row = of(name, "apply, compiled", rows) | pairs(ours, theirs, device)
        yield row | {"warnings": named}


def steps_of(
    like: Any, rows: int, setting: Setting, device: torch.device
) -> Callable[[Any], Step]:
    """Make a training step of a model on a batch of `rows` sequences, with labels drawn from the
    predictions of the model `like`."""
    length = setting.batches[0][1]
    batch = make_batch(like, rows, length, device)
    inputs = {"input_ids": batch.ids, "labels": batch.labels}
    count = torch.tensor(rows * (length - 1), device=device)

    def step(model: Any) -> Step:
        return lambda: model(**inputs, num_items_in_batch=count).loss

    return step


def work_rows(name: str, setting: Setting, device: torch.device) -> Iterator[Row]:
    """Time the losses SFT, GRPO and DPO of `steps.py` with headloss, and with full logits from
    Transformers."""
    stock = make_model(setting, device)
    model = copy.deepcopy(stock)
    length = setting.batches[0][1]
    for rows in (1, 4):
        for work in WORKS:
            many = max(rows, 2) if work == "DPO" else rows
            batch = make_batch(stock, many, length * rows // many, device)
            ours, theirs = CONTESTANTS["headloss"], CONTESTANTS["Transformers"]
            with ours.patch(work, model):
                mine = partial(ours.loss, work, model, batch)
                row = pairs(mine, partial(theirs.loss, work, stock, batch), device)
            yield of(name, work, rows) | row


def host_rows(name: str, setting: Setting, device: torch.device) -> Iterator[Row]:
    """Time the head and its loss without a backbone; each call makes its batch and objective."""
    h, v, n = setting.sizes["hidden_size"], setting.sizes["vocab_size"], setting.batches[0][1]
    generator = torch.Generator(device).manual_seed(0)
    made = (torch.randn(k, h, device=device, generator=generator) for k in (n, v))
    x, w = (t.div(h**0.5).to(setting.dtype).requires_grad_() for t in made)
    targets = torch.randint(v, (n,), device=device, generator=generator)
    lengths = torch.full((SEGMENTS,), n // SEGMENTS, device=device)
    advantages = torch.linspace(-1, 1, SEGMENTS, device=device)
    old_logps = torch.full((n,), -5.0, device=device)

    def eager() -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), targets)

    def cross_entropy() -> Tensor:
        return hl.head_loss(x, hl.Head(w), hl.Batch(targets), hl.cross_entropy()).loss

    def grpo() -> Tensor:
        segments = hl.Segments.from_lengths(lengths)
        batch = hl.Batch(targets, segments, advantages=advantages, old_logps=old_logps)
        return hl.head_loss(x, hl.Head(w), batch, hl.grpo()).loss

    sides = {"eager": eager, "cross-entropy": cross_entropy, "GRPO, 8 segments": grpo}
    if hasattr(F, "linear_cross_entropy"):
        sides["F.linear_cross_entropy"] = lambda: F.linear_cross_entropy(x, w, targets)
    times = {side: list[float]() for side in sides}
    for _ in range(WARM_UP + 2 * PAIRS):
        for side, run in sides.items():
            x.grad = w.grad = None
            synchronize(device)
            start = time.perf_counter()
            loss = run()
            forward = time.perf_counter() - start
            synchronize(device)
            start = time.perf_counter()
            loss.backward()
            times[side].append(1e3 * (forward + time.perf_counter() - start))
    medians = {side: statistics.median(ms[WARM_UP:]) for side, ms in times.items()}
    for side, ms in medians.items():
        ratio = {"ms": ms, "stock_ms": medians["eager"], "ratio": ms / medians["eager"]}
        yield of(name, f"host, {side}", 1) | ratio | {"pairs": 2 * PAIRS}


def of(model: str, work: str, rows: int) -> Row:
    case = f"{model}, {work}, {rows} x {LENGTH}"
    named = {"case": case, "model": model, "work": work, "contestant": "headloss"}
    return {**named, "rows": rows, "status": "ok", "reason": ""}


MEASURES = {
    "host": host_rows, "apply": applied_rows, "works": work_rows, "compiled": compiled_rows
}  # fmt: skip
PLANNED = [
    ("host", "Qwen2.5-0.5B"), ("apply", "Qwen2.5-0.5B"), ("apply", "Llama-3.2-1B"),
    ("works", "Qwen2.5-0.5B"), ("compiled", "Qwen2.5-0.5B"),
]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help='of "measure: model"')
    parser.add_argument("--json", type=Path, help="file to write or to append to")
    parser.add_argument("--commit", help="of the tree, where git cannot say")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    results = Results(arguments.json, about(device, arguments.commit, (*PACKAGES, "transformers")))
    for measure, name in PLANNED:
        patterns = arguments.only or ["*"]
        if not any(fnmatch(f"{measure}: {name}", pattern) for pattern in patterns):
            continue
        setting = (QUICK if arguments.quick else SETTINGS)[name]
        for row in MEASURES[measure](name, setting, device):
            results.add([row])
            more = f"  {row['warnings']}" if row.get("warnings") else ""
            sides = f"{row['ms']:8.2f} ms, stock {row['stock_ms']:8.2f}"
            print(f"{row['case']:52} {sides}  ratio {row['ratio']:.3f}{more}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
