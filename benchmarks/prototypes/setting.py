"""Inputs, timing and float64 oracles of the prototypes. N tokens, H hidden width, V vocabulary."""

from __future__ import annotations

import json
import os
import statistics
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

try:
    import headloss  # noqa: F401
except Exception:  # a tree that is being worked on: the kernels alone
    package = types.ModuleType("headloss")
    package.__path__ = [str(Path(__file__).parents[2] / "headloss")]
    sys.modules["headloss"] = package

from headloss.stats import Coefficients, Statistics, pull_back


@dataclass
class Inputs:
    x: Tensor  # [N, H]
    w: Tensor  # [V, H]
    y: Tensor  # [N]
    old: Tensor  # [N]
    advantages: Tensor  # [N]
    weights: Tensor  # [N]


def trained_looking(n: int, h: int, v: int, seed: int = 0, w: Tensor | None = None) -> Inputs:
    """Mean probability of the label near one half."""
    g = torch.Generator("cuda").manual_seed(seed)
    make = lambda *s: torch.randn(*s, generator=g, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    if w is None:
        w = make(v, h) * h**-0.5
    y = torch.randint(v, (n,), generator=g, device="cuda")
    strength = torch.rand(n, 1, generator=g, device="cuda", dtype=torch.bfloat16) * 24
    x = make(n, h) * 0.8 + w[y] * strength
    z_y = (x.float() * w[y].float()).sum(1)
    lse = torch.cat(
        [torch.mm(part, w.t(), out_dtype=torch.float32).logsumexp(1) for part in x.split(2048)]
    )
    old = z_y - lse + 0.1 * torch.randn(n, generator=g, device="cuda")
    advantages = torch.randn(n, generator=g, device="cuda")
    return Inputs(x, w, y, old, advantages, torch.full((n,), 1 / n, device="cuda"))


SCALE = 2.0**14  # of the 16-bit gradient


def grpo(inputs: Inputs, rows, stats: Statistics, v: int, keep: Tensor | None = None):
    """Coefficients of the clipped surrogate, by autograd on [n] vectors."""
    logp = stats.logp.detach().requires_grad_()
    advantages = inputs.advantages[rows]
    if keep is not None:
        advantages = advantages * keep[rows]
    with torch.enable_grad():
        ratio = (logp - inputs.old[rows]).clamp(-20, 20).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (slope,) = torch.autograd.grad((loss * inputs.weights[rows]).sum() * SCALE, logp)
    return pull_back({"logp": slope}, stats, v)


def exact(inputs: Inputs, rows: Tensor, columns: Tensor):
    """float64: log-probs [N], dX of some rows, dW of some columns."""
    w, n, v = inputs.w.double(), len(inputs.y), len(inputs.w)
    logps, dx, dw = [], {}, 0
    for start in range(0, n, 2048):
        part = slice(start, min(n, start + 2048))
        z = inputs.x[part].double() @ w.t()
        log_p = z.sub_(z.logsumexp(1, keepdim=True))
        logp = log_p.gather(1, inputs.y[part, None]).squeeze(1)
        logps.append(logp)
        c: Coefficients = grpo(inputs, part, Statistics(logp=logp), v)
        p = log_p.exp_()
        g = p.mul_(c.prob.unsqueeze(1))
        g.scatter_add_(1, inputs.y[part, None], c.target.unsqueeze(1))
        inside = rows[(rows >= part.start) & (rows < part.stop)]
        for r, value in zip(inside.tolist(), g[inside - part.start] @ w, strict=True):
            dx[r] = value
        dw = dw + g[:, columns].t() @ inputs.x[part].double()
        del z, log_p, p, g
    return torch.cat(logps), torch.stack([dx[r] for r in rows.tolist()]), dw


def relative(found: Tensor, oracle: Tensor) -> float:
    return float((found.double() - oracle).norm() / oracle.norm())


class Record:
    """Measured rows, written out after each one."""

    def __init__(self, name: str):
        self.rows: list[dict] = []
        folder = os.environ.get("OUT", "/tmp")
        self.path = Path(folder) / f"{name}.json"

    def add(self, **row) -> None:
        self.rows.append(row)
        self.path.write_text(json.dumps(self.rows, indent=1))
        print(
            " ".join(
                f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()
            ),
            flush=True,
        )


def measure(function, inputs: list, repeats: int = 5, warm: int = 2) -> tuple[float, float]:
    """(median ms over rotating inputs, peak MiB beyond what was held and what is returned)."""
    for i in range(warm):
        kept = function(inputs[i % len(inputs)])
    torch.cuda.synchronize()
    del kept
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = function(inputs[0])
    torch.cuda.synchronize()
    returned = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before - returned
    del kept
    marks = []
    for i in range(repeats):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        kept = function(inputs[i % len(inputs)])
        b.record()
        del kept
        marks.append((a, b))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in marks), peak / 2**20


def race(record: Record, functions: dict, inputs: list, base: str, rounds: int = 7) -> None:
    """Times in turn, one call of each per round, so that all meet the same clocks and power."""
    memory, marks = {}, {label: [] for label in functions}
    for label, function in list(functions.items()):
        try:
            _, memory[label] = measure(function, inputs, repeats=1, warm=1)
        except Exception as e:
            record.add(what="failed", of=label, why=str(e)[:300])
            del functions[label]
            torch.cuda.empty_cache()
    for i in range(rounds):
        for label, function in functions.items():
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            kept = function(inputs[i % len(inputs)])
            b.record()
            del kept
            marks[label].append((a, b))
        torch.cuda.synchronize()
    times = {label: sorted(a.elapsed_time(b) for a, b in marks[label]) for label in functions}
    middle = {label: statistics.median(values) for label, values in times.items()}
    for label in functions:
        record.add(
            of=label,
            ms=middle[label],
            low=times[label][0],
            high=times[label][-1],
            mib=memory[label],
            fraction=middle[base] / middle[label],
        )
