"""Correctness, tile shapes and time of the kernels for a narrow head (width H <= 256), each of
which is one pass over the vocabulary.

Page: benchmarks/NOTES.md.

    python benchmarks/studies/narrow.py --output narrow.json            # on one GPU, minutes
    python benchmarks/studies/narrow.py --tune --widths 64 128 256      # tile shapes

The study first checks log-probs, hidden gradient and weight gradient of a few tokens and columns
against float64. The study then times the forward pass over the vocabulary, with and without the
sums from which the hidden gradient is computed, and the pass that computes the weight gradient.
Kernels are compiled beforehand, in parallel processes.

N tokens, V items, H hidden width.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headloss as hl
from headloss.kernels.interface import Backward, Forward
from headloss.kernels.transform import Transform
from headloss.kernels.triton import launch, narrow
from headloss.statistics.softmax import Normalizer, SoftmaxCoefficients, finish

N, V = 16384, 1_000_000
NEEDS = frozenset({"logp", "entropy"})
# Tile shapes to try, as (rows, columns, warps, stages): for kernels in which a program owns a block
# of tokens, and for kernels in which a program owns a block of columns.
TRIED = {
    "tokens": {
        64: ((128, 64, 4, 3), (64, 128, 4, 4), (64, 128, 4, 2), (64, 64, 4, 4)),
        128: ((64, 128, 4, 3), (128, 64, 4, 3), (64, 64, 4, 3)),
        256: ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)),
    },
    "columns": {
        64: ((64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3)),
        128: ((64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 2)),
        256: ((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3)),
    },
}  # fmt: skip


class Inputs:
    """A head and tokens with targets like a trained model's, and the gradient of a mean
    cross-entropy."""

    def __init__(self, h: int, v: int, n: int, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        options: dict[str, Any] = {"device": "cuda", "generator": generator}
        self.w = (torch.randn(v, h, **options) * (8 / h) ** 0.5).to(dtype)
        self.targets = torch.randint(0, v, (n,), **options)
        self.targets[: n // 64] = v - 1 - torch.arange(n // 64, device="cuda") % 9
        noise = torch.randn(n, h, **options)
        self.x = (noise * 0.5 + 1.6 * self.w[self.targets].float()).to(dtype)
        self.forward = Forward(self.targets, 0, Transform(), NEEDS)
        self.out = torch.empty_like(self.w)

    def backward(self, state: Any) -> Backward:
        stats, normalizer = finish(state, len(self.w), NEEDS)
        one = torch.full_like(stats.logp, 1 / len(self.x))
        c = SoftmaxCoefficients(target=-one, prob=one)
        return Backward(self.targets, 0, Transform(), Normalizer(*normalizer), c, stats.logp)


def acts(inputs: Inputs) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """For each pass over the vocabulary, yield a name, which list of tile shapes applies, and a
    function that runs the pass."""
    x, w, forward = inputs.x, inputs.w, inputs.forward
    state, _ = narrow.narrow_partials(x, w, forward)
    backward = inputs.backward(state)
    yield "statistics", "tokens", lambda: narrow.narrow_partials(x, w, forward)
    yield "statistics and sums", "tokens", lambda: narrow.narrow_partials(x, w, forward, True)
    yield "weight", "columns", lambda: narrow.narrow_weight_(x, w, backward, inputs.out)
    yield "hidden", "tokens", lambda: narrow.narrow_hidden(x, w, backward)


def milliseconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Return the median time of several runs, after a warm-up run."""
    times = []
    run()
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def peak_mib(run: Callable[[], object], *leaves: Tensor) -> float:
    """Return the peak of memory of a run beyond the memory before the run and the gradients of
    `leaves`, in MiB."""
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    returned = sum(leaf.nbytes for leaf in leaves if leaf.requires_grad)
    return (torch.cuda.max_memory_allocated() - before - returned) / 2**20


def errors(inputs: Inputs) -> dict[str, float]:
    """Return the errors of some tokens and columns, against float64."""
    x, w = inputs.x, inputs.w
    state, _ = narrow.narrow_partials(x, w, inputs.forward, x.dtype != torch.float16)
    plain, _ = narrow.narrow_partials(x, w, inputs.forward)
    same = all(torch.equal(value, plain.tensors()[k]) for k, value in state.tensors().items())
    backward = inputs.backward(state)
    rows = torch.arange(0, len(x), max(1, len(x) // 64), device="cuda")
    logits, p = x[rows].double() @ w.double().t(), torch.empty(0)
    logps = logits.log_softmax(1)
    p = logps.exp()
    entropy = -(p * logps).sum(1)
    stats = finish(state, len(w), NEEDS)[0]
    g = p / len(x)
    g[torch.arange(len(rows)), inputs.targets[rows]] -= 1 / len(x)
    hidden = g @ w.double()

    def error(mine: Tensor, oracle: Tensor) -> float:
        return float((mine.double() - oracle).norm() / oracle.norm())

    logp = logps.gather(1, inputs.targets[rows, None])[:, 0]
    errors = {"same bits": float(same), "p": float(logp.exp().mean())}
    errors["logp"] = float((stats.logp[rows].double() - logp).abs().max())
    errors["entropy"] = float((stats.entropy[rows].double() - entropy).abs().max())
    errors["hidden"] = error(narrow.narrow_hidden(x, w, backward)[rows], hidden)
    inputs.out.fill_(torch.nan)
    narrow.narrow_weight_(x, w, backward, inputs.out)
    lse = backward.normalizer.max_logit.double() + backward.normalizer.log_sum
    columns = torch.cat([inputs.targets[:24], torch.arange(len(w) - 24, len(w), device="cuda")])
    g = (x.double() @ w[columns].double().t() - lse[:, None]).exp() / len(x)
    g -= (inputs.targets[:, None] == columns).double() / len(x)
    errors["weight"] = error(inputs.out[columns], g.t() @ x.double())
    errors["nan"] = float(inputs.out.isnan().sum())
    return errors


def use(owned: str, h: int, shape: tuple[int, ...]) -> None:
    {"tokens": narrow.TOKENS, "columns": narrow.COLUMNS}[owned][h] = shape


def compile_one(job: tuple[int, str, tuple[int, ...]]) -> str | None:
    """Compile, in a separate process, the kernel of a pass over the vocabulary with this tile
    shape."""
    h, owned, shape = job
    send = launch.Launcher.send
    use(owned, h, shape)

    def warmup(self: Any, programs: int, arguments: Any, constants: Any) -> None:
        if "narrow" in self.kernel.__name__:
            self.kernel.warmup(*arguments, grid=(programs,), **constants, **self.options)
        else:
            send(self, programs, arguments, constants)

    launch.Launcher.send = warmup  # type: ignore[method-assign]
    try:
        inputs = Inputs(h, 4099 if h % 2 else 4096, 1024)
        for _, of, run in acts(inputs):
            if of == owned:
                run()
    except Exception as error:
        return f"{job}: {type(error).__name__}: {error}"[:300]
    finally:
        launch.Launcher.send = send  # type: ignore[method-assign]
    return None


def tune(widths: list[int]) -> list[dict[str, Any]]:
    jobs = [(h, owned, s) for h in widths for owned in TRIED for s in TRIED[owned][h]]
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        failures = pool.map(compile_one, jobs, chunksize=1)
    print(*filter(None, failures), sep="\n", flush=True)
    table: list[dict[str, Any]] = []
    for h in widths:
        inputs = Inputs(h, V, N)
        best = dict.fromkeys(TRIED, (1e9, ()))
        for owned in TRIED:
            for shape in TRIED[owned][h]:
                use(owned, h, shape)
                row: dict[str, Any] = {"H": h, "owned": owned, "shape": shape}
                try:
                    for name, of, run in acts(inputs):
                        if of == owned:
                            row[name] = round(milliseconds(run), 2)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:120]
                table.append(row)
                time = row.get("statistics and sums", row.get("weight", 1e9))
                best[owned] = min(best[owned], (time, shape))
                print(row, flush=True)
        for owned, (_, shape) in best.items():
            use(owned, h, shape)  # type: ignore[arg-type]
        table.append({"H": h, "best": best, "errors": errors(inputs)})
        print(table[-1], flush=True)
    return table


def call(inputs: Inputs, schedule: str, score: bool) -> dict[str, Any]:
    """Measure a whole cross-entropy call: milliseconds, MiB in excess of inputs and gradients, and
    gradient errors of some rows and columns."""
    hidden, weight, targets = inputs.x.detach(), inputs.w.detach(), inputs.targets
    hidden.requires_grad_(not score)
    weight.requires_grad_(not score)
    options = hl.Options(schedule=schedule)

    def run() -> None:
        hidden.grad = weight.grad = None
        if score:
            hl.head_stats(hidden, hl.Head(weight), targets, options)
        else:
            head, batch = hl.Head(weight), hl.Batch(targets)
            hl.head_loss(hidden, head, batch, hl.cross_entropy(), options).loss.backward()

    time, mib = milliseconds(run), peak_mib(run, hidden, weight)
    row = {"schedule": schedule, "score": score, "ms": round(time, 2), "MiB": round(mib)}
    if not score:
        rows = torch.arange(0, len(hidden), max(1, len(hidden) // 64), device="cuda")
        g = (hidden.detach()[rows].double() @ weight.detach().double().t()).softmax(1)
        g[torch.arange(len(rows)), targets[rows]] -= 1
        oracle = g @ weight.detach().double() / len(hidden)
        row["hidden"] = float((hidden.grad[rows].double() - oracle).norm() / oracle.norm())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    table: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        table.append(row)
        print(row, flush=True)
        if options.output:
            options.output.write_text(json.dumps(table, indent=1))

    if options.tune:
        table += tune([h for h in options.widths if h in TRIED["tokens"]])
    for h in options.widths:
        sizes = (N, V), (N, V + 7), (2048, V), *((n, 1 << e) for e in (19, 17) for n in (N, 2048))
        for n, v in sizes[:3] if options.quick else sizes:
            inputs = Inputs(h, v, n)
            if n == N and v >= V:
                report({"H": h, "V": v} | errors(inputs))
            ways = [("narrow", False), ("one_pass", False), ("recompute", False), ("auto", True)]
            for schedule, score in ways[::3] if options.quick or v == V + 7 else ways:
                report({"H": h, "V": v, "N": n} | call(inputs, schedule, score))


if __name__ == "__main__":
    main()
