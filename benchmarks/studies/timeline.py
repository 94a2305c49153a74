"""Timeline of a call: kernels by kind, and gaps with an idle GPU.

Page: benchmarks/NOTES.md.

    python3 benchmarks/studies/timeline.py grpo wide "headloss, 2200 MiB"

The study records one call, forward and backward, after warm-up calls; times are ms of GPU time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from cases import NARROW, WIDE
from contestants import CONTESTANTS
from torch.profiler import ProfilerActivity, profile
from works import WORKS, make_inputs

SHAPES = {
    "wide": WIDE,
    "narrow": NARROW,
    "half": replace(WIDE, quiet=2),
    "frozen": replace(WIDE, trains=("hidden",)),
    "scores": replace(WIDE, trains=()),
}
# The program lists idle times of the GPU that are longer than `GAP` microseconds.
GAP = 15.0
KINDS = {"gemm": ("gemm", "nvjet", "cutlass", "sm90_xmma"), "product": ("product_kernel",)}


def kind_of(name: str) -> str:
    """Return "logits", "dX" or another name of the kernel's matrix product; for other kernels
    return the kernel's own name."""
    for kind, words in KINDS.items():
        if any(word in name for word in words):
            return kind
    return name.split("<")[0].split("(")[0][-40:] if "elementwise" not in name else "elementwise"


def record(run, inputs) -> list[dict]:
    """Return the GPU events of one call, sorted by start."""
    for _ in range(3):
        run(inputs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        run(inputs)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    host = [e for e in events if e.get("cat") == "cuda_runtime"]
    first = min((e["ts"] for e in host), default=0)
    gpu.sort(key=lambda e: e["ts"])
    return [{"name": e["name"], "at": e["ts"] - first, "time": e["dur"]} for e in gpu]


def report(title: str, events: list[dict]) -> None:
    """Print the total time of each kind of kernel, and the idle times of the GPU between
    kernels."""
    totals, counts = defaultdict(float), defaultdict(int)
    for e in events:
        totals[kind_of(e["name"])] += e["time"]
        counts[kind_of(e["name"])] += 1
    end = max(e["at"] + e["time"] for e in events)
    busy = sum(totals.values())
    print(f"== {title}: {len(events)} kernels, busy {busy / 1e3:.2f} of {end / 1e3:.2f} ms")
    for name, total in sorted(totals.items(), key=lambda item: -item[1])[:14]:
        print(f"   {total / 1e3:8.3f} ms {counts[name]:5d} x {name}")
    last, small, listed = 0.0, 0.0, []
    before = "the start"
    for e in events:
        gap = e["at"] - last
        if gap > GAP:
            listed.append((gap, before, e["name"]))
        elif gap > 0:
            small += gap
        if e["at"] + e["time"] > last:
            last, before = e["at"] + e["time"], e["name"]
    total = sum(g for g, *_ in listed)
    print(f"   gaps over {GAP:.0f} us: {total / 1e3:.3f} ms; under: {small / 1e3:.3f} ms")
    for gap, a, b in sorted(listed, reverse=True)[:12]:
        print(f"   {gap / 1e3:8.3f} ms  {kind_of(a)} -> {kind_of(b)}")


def main(work: str, shape: str, *names: str) -> None:
    setting = SHAPES[shape]
    inputs = make_inputs(setting, torch.device("cuda"))
    for name in names or ("headloss",):
        run = CONTESTANTS[name].make(WORKS[work], setting)
        report(f"{work}, {shape}, {name}", record(run, inputs))


if __name__ == "__main__":
    main(*sys.argv[1:])
