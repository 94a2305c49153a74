"""The engine's own calls beside the limit, in turn: engine_loop.py wide|narrow."""

from __future__ import annotations

import sys

import torch
from head_loop import SHAPES, limit
from setting import trained_looking

import headloss as hl

MIB = 1 << 20


def call(objective, **options):
    def run(i):
        x, w = i.x.detach().requires_grad_(), i.w.detach().requires_grad_()
        batch = hl.Batch(i.y.view(-1, 1024), advantages=i.advantages, old_logps=i.old)
        out = hl.head_loss(
            x.view(-1, 1024, x.shape[1]), hl.Head(w), batch, objective, hl.Options(**options)
        )
        out.loss.backward()
        return out, x.grad, w.grad

    return run


def main(shape: str) -> None:
    n, h, v = SHAPES[shape]
    sets = [trained_looking(n, h, v, seed) for seed in (0, 1)]
    for i in sets:
        object.__setattr__(i, "advantages", torch.randn(n // 1024, device="cuda"))
        with torch.no_grad():
            found = hl.head_stats(i.x, hl.Head(i.w), i.y)
        object.__setattr__(
            i, "old", (found.logp + 0.1 * torch.randn_like(found.logp)).view(-1, 1024)
        )
    gradient = torch.randn(4096, v, device="cuda", dtype=torch.bfloat16)
    grpo = hl.grpo()
    contestants = {
        "limit": limit(gradient),
        "grpo 1 GiB": call(grpo),
        "grpo 1 GiB no metrics": call(grpo, metrics=False),
        "grpo 1 GiB upstream": call(grpo, metrics=False, upstream=1.0),
        "grpo 2200 MiB": call(grpo, memory_budget=2200 * MIB),
        "grpo 2200 MiB no skip": call(grpo, memory_budget=2200 * MIB, skip_rows=False),
        "gspo": call(hl.gspo()),
        "ce": call(hl.cross_entropy()),
        "recompute": call(hl.gspo(), schedule="recompute"),
        "entropy bonus": call(hl.grpo() - 1e-3 * hl.entropy()),
    }
    times = {name: [] for name in contestants}
    peaks = {}
    for repeat in range(9):
        for name, run in contestants.items():
            i = sets[repeat % 2]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = run(i)
            stop.record()
            torch.cuda.synchronize()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / MIB
            if repeat > 1:
                times[name].append(start.elapsed_time(stop))
            del result
    base = sorted(times["limit"])[len(times["limit"]) // 2]
    for name, values in times.items():
        median = sorted(values)[len(values) // 2]
        print(f"{name:28} {median:8.2f} ms  {base / median:6.3f}  {peaks[name]:8.0f} MiB")
    out = contestants["grpo 1 GiB"](sets[0])[0]
    print(out.plan)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        contestants["grpo 1 GiB"](sets[0])
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=24)[:6000])


if __name__ == "__main__":
    main(sys.argv[1])
