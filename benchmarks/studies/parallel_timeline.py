"""Timeline of back-to-back calls on several GPUs, by one rank's clock.

Imported by parallel.py. Page: docs/across-devices.md.

Before its weight gradient, each call launches a kernel that only waits (`PAUSE`). The timeline
shows the time from one call's `PAUSE` kernel to the next call's `PAUSE` kernel: the weight gradient
of the first call, and the beginning of the second call. The module also times a rank's matrix
product for the hidden gradient, whole and in several blocks of tokens, and the sum over ranks,
alone and in parallel with the product for the weight gradient.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from ranks import Ranks, covered
from timeline import kind_of
from torch import distributed

PAUSE = "spin_kernel"  # Name of the kernel that `torch.cuda._sleep` launches.
CALLS = 5  # Number of back-to-back calls; the one before the last is shown.
# A kernel gets its own line if it takes at least `LONG` microseconds, or if the GPU was idle for at
# least `GAP` microseconds before it.
LONG, GAP = 20.0, 5.0
Span = tuple[float, float, str]  # Begin and end of a kernel in microseconds, and its name.


class Line(NamedTuple):
    """A line of the timeline: start and duration in milliseconds, and preceding idle
    microseconds."""

    at: float
    takes: float
    idle: float
    what: str

    def __str__(self) -> str:
        idle = f"{self.idle:6.0f} us idle" if self.idle >= 1 else " " * 14
        return f"   {self.at:7.3f} ms {self.takes:7.3f} ms {idle}  {self.what}"


def recorded(step: Callable[[], Any], ranks: Ranks, calls: int = CALLS) -> list[dict[str, Any]]:
    """Return the profiler's events of back-to-back calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        ranks.wait()
        for _ in range(calls):
            step()
        ranks.settle()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]  # type: ignore[no-any-return]


def of_gpu(events: list[dict[str, Any]]) -> list[Span]:
    """Return the GPU's kernels in order of time."""
    gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in gpu)


def period(spans: list[Span], calls: int = 0) -> list[Span]:
    """Return the kernels of `spans` between the first `PAUSE` kernels (kernels that only wait) of
    the last two calls. `calls` is the number of calls in `spans`; if `calls` is 0, each call is
    assumed to launch exactly one `PAUSE` kernel."""
    pauses = [begin for begin, _, name in spans if PAUSE in name]
    each = max(1, len(pauses) // calls) if calls else 1
    if len(pauses) < 2 * each:
        raise ValueError(f"spans: got {len(pauses)} pauses of calls of ranks, want 2 or more")
    begin, end = pauses[-2 * each], pauses[-each]
    return [span for span in spans if begin <= span[0] < end]


def lines(spans: list[Span]) -> Iterator[Line]:
    """Yield the lines of the timeline. A kernel gets its own line if it takes at least `LONG`
    microseconds, or if the GPU was idle for at least `GAP` microseconds before it; successive short
    kernels share a line."""
    first = reached = spans[0][0]
    few: list[Span] = []

    def short() -> Iterator[Line]:
        if few:
            begin, end = few[0][0], max(end for _, end, _ in few)
            names = ", ".join(dict.fromkeys(kind_of(name) for *_, name in few))
            yield Line((begin - first) / 1e3, (end - begin) / 1e3, 0, f"{len(few)} x {names[:90]}")
            few.clear()

    for begin, end, name in spans:
        idle = max(0.0, begin - reached)
        if idle >= GAP or end - begin >= LONG:
            yield from short()
            yield Line((begin - first) / 1e3, (end - begin) / 1e3, idle, kind_of(name))
        else:
            few.append((begin, end, name))
        reached = max(reached, end)
    yield from short()


def timeline(step: Callable[[], Any], ranks: Ranks, title: str) -> None:
    """Run `step` on all ranks. With GPUs, print the kernels that rank 0's GPU runs between the
    `PAUSE` kernels of two successive calls."""
    if not ranks.on_gpu:
        step()
        return
    events = recorded(step, ranks)
    if ranks.rank:
        return
    try:
        found = period(of_gpu(events), CALLS)
    except (KeyError, ValueError) as error:  # an error on one rank must not stop the others
        ranks.say(f"{title}: no timeline: {error}")
        return
    total = max(end for _, end, _ in found) - found[0][0]
    idle = total - covered([span[:2] for span in found])
    ranks.say(f"{title}: a period of {total / 1e3:.3f} ms, idle {idle / 1e3:.3f} ms")
    print("\n".join(map(str, lines(found))), flush=True)


def products(ranks: Ranks, tokens: int, width: int, rows: int) -> None:
    """Print the milliseconds of four operations, as medians of 9 repetitions on the slowest rank:
    dX in one product and in several, dW, the sum of dX over ranks, and dW in parallel with the
    sum."""
    if not ranks.on_gpu:
        return
    like: dict[str, Any] = {"device": ranks.device, "dtype": torch.bfloat16}
    terms, weight = torch.randn(tokens, rows, **like), torch.randn(rows, width, **like)
    x, into = torch.randn(tokens, width, **like), torch.empty(rows, width, **like)
    dx = torch.empty(tokens, width, device=ranks.device)
    mm = torch.ops.aten.mm.dtype_out

    def parts(count: int) -> Callable[[], None]:
        def run() -> None:
            for part, e in zip(dx.chunk(count), terms.chunk(count), strict=True):
                mm(e, weight, torch.float32, out=part)

        return run

    def dw() -> None:
        torch.mm(terms.t(), x, out=into)

    def total() -> Any:
        return distributed.all_reduce(dx, async_op=True)

    def beside() -> None:
        work = total()
        torch.cuda._sleep(20_000)
        dw()
        work.wait()

    acts: dict[str, Callable[[], Any]] = {f"dX in {n}": parts(n) for n in (1, 2, 4)}
    acts |= {"dW": dw, "the sum": lambda: total().wait(), "dW beside the sum": beside}
    found: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(11):
        for name, act in acts.items():
            dx.zero_()
            found[name].append(ranks.milliseconds(act, 1, warm=0)[0])
    slowest = {name: ranks.most(statistics.median(times[2:])) for name, times in found.items()}
    said = ", ".join(f"{name} {ms:.3f}" for name, ms in slowest.items())
    ranks.say(f"{tokens} x {width} x {rows}, ms: {said}")
