"""Speed of a softmax over K ids per token, compared with a softmax over the whole vocabulary.

Page: docs/support.md.

    python benchmarks/studies/support.py --output support.json     # on one GPU, about a minute
    python benchmarks/studies/support.py --quick                   # small, on a CPU

For each distribution of ids, the study checks correctness first: log-probs, and hidden and weight
gradients of a few tokens and columns, against float64. For correct calls the study measures the
time of forward and backward, compared with a call over the whole vocabulary, with a new batch in
each call and with a reused batch. The study also measures the peak memory in excess of inputs and
gradients, and the rate at which each kernel reads rows of the head. An incorrect call gets no time.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from timed import DEVICE, device_name, milliseconds, peak_mib, run_study, study_inputs
from torch import Tensor

import headloss as hl
from headloss import kernels
from headloss.batch.support import SupportPairs

WORST = 1e-5  # The allowed error of a log-prob.
GRADIENTS = 5e-3  # The allowed relative error of a gradient; bfloat16 rounds by 4e-3.


def ids_of(kind: str, targets: Tensor, v: int, k: int) -> Tensor:
    """Return [T, K] distinct ids including the target, with -1 in unused entries.

    The ids depend on `kind`: "uniform": random ids; "skewed": some columns in nearly all supports,
    like frequent words of a text; "ragged": 1 to 2K ids per token; "half": no ids for every second
    token.
    """
    n, width = len(targets), 2 * k if kind == "ragged" else k
    at = torch.rand(n, width, device=DEVICE)
    if kind == "skewed":
        at = at**6
    # To make a token's ids distinct, the vocabulary is cut into `width` intervals, the shorter
    # intervals first, and the j-th id is drawn from the j-th interval.
    edges = (torch.arange(width + 1, device=DEVICE) / width) ** (4 if kind == "skewed" else 1)
    edges = (edges * (v - width)).long() + torch.arange(width + 1, device=DEVICE)
    ids = edges[:-1] + (at * (edges[1:] - edges[:-1])).long()
    stretch = torch.searchsorted(edges, targets, right=True) - 1
    ids[torch.arange(n, device=DEVICE), stretch.clamp(0, width - 1)] = targets
    if kind == "ragged":
        kept = torch.rand(n, width, device=DEVICE) < torch.rand(n, 1, device=DEVICE)
        ids = torch.where(kept | (ids == targets.unsqueeze(1)), ids, -1)
    if kind == "half":
        ids[::2] = -1
    return ids


def call(hidden: Tensor, weight: Tensor, batch: hl.Batch) -> tuple[Any, tuple[Tensor, ...]]:
    out = hl.head_loss(hidden, hl.Head(weight), batch, hl.grpo(), hl.Options(metrics=False))
    return out, torch.autograd.grad(out.loss, (hidden, weight))


def check(hidden: Tensor, weight: Tensor, batch: hl.Batch, ids: Tensor) -> dict[str, float]:
    """Return the errors of log-probs and gradients on a few tokens; ValueError if too large."""
    out, (dx, dw) = call(hidden, weight, batch)
    rows = torch.arange(1, len(ids), max(1, len(ids) // 128), device=DEVICE)
    x, w = hidden.detach(), weight.detach()
    advantages = batch.advantages.double()

    def slopes(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for the n tokens `rows`, the log-probs [n] of the targets, the derivatives [n,
        K] of the loss with respect to the logits of the support's ids, and these ids [n, K]."""
        own = ids[rows]
        raw = torch.einsum("nkh,nh->nk", w[own.clamp_min(0)].double(), x[rows].double())
        log_p = raw.masked_fill(own < 0, -torch.inf).log_softmax(1)
        hit = own == batch.targets[rows].unsqueeze(1)
        logp = log_p[hit]
        ratio = (logp - batch.old_logps[rows].double()).exp()
        clipped = (advantages[rows] > 0) & (ratio > 1.2) | (advantages[rows] < 0) & (ratio < 0.8)
        g = torch.where(clipped, 0, -ratio * advantages[rows]) / len(ids)
        return logp, g.unsqueeze(1) * (hit.double() - log_p.exp()), own

    rows = rows[(ids[rows] >= 0).any(1)]
    logp, g, own = slopes(rows)
    want = torch.einsum("nk,nkh->nh", g, w[own.clamp_min(0)].double())
    found = {"logp": float((out.logps[rows].double() - logp).abs().max())}
    found["hidden"] = float((dx[rows].double() - want).norm() / want.norm())
    if (ids >= 0).any(1).all():
        columns = own[:8, -1].clamp_min(0).unique()
        want = torch.zeros(len(columns), x.shape[1], dtype=torch.float64, device=DEVICE)
        for place, column in enumerate(columns):
            for part in (ids == column).any(1).nonzero().squeeze(1).split(512):
                _, g, own = slopes(part)
                want[place] += ((g * (own == column)).sum(1)) @ x[part].double()
        found["weight"] = float((dw[columns].double() - want).norm() / want.norm())
    if found["logp"] > WORST or max(found.values()) > GRADIENTS:
        raise ValueError(f"wrong by {found}")
    return found


def acts(hidden: Tensor, weight: Tensor, ids: Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """Time each kernel that gathers rows by token or by id, separately from whole calls. Return
    each kernel's time in milliseconds, and its TB/s of gathered rows."""
    n, v = len(hidden), len(weight)
    backend = kernels.load(kernels.choose("auto", DEVICE, hidden.dtype))
    pairs = SupportPairs(ids.reshape(-1), width=ids.shape[1])
    support, by = pairs.window(slice(0, n), 0, v), pairs.by_column(slice(0, n), 0, v)
    x, w = hidden.detach(), weight.detach()
    values = torch.randn(len(support.ids), device=DEVICE)
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    runs = {
        "logits": lambda: backend.support_logits(x, w, support),
        "hidden gradient": lambda: backend.support_sums(values, w, support, dx),
        "weight gradient": lambda: backend.support_sums(values[by[0]], x, by[1], dw, uneven=True),
        "sort": lambda: SupportPairs(pairs.ids, width=pairs.width).by_column(slice(0, n), 0, v),
    }
    moved = int((ids >= 0).sum()) * x.shape[1] * x.element_size()
    found = {}
    for name, run in runs.items():
        ms = milliseconds(run, repeats)
        found[name] = {"ms": round(ms, 3), "TB/s": round(moved / ms / 1e9, 2)}
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    n, h, v, k = arguments.tokens, arguments.hidden, arguments.vocab, arguments.ids
    hidden, weight, targets, returned = study_inputs(arguments)
    more = {"advantages": torch.randn(n, device=DEVICE)}

    def batch_of(ids: Tensor | None, old: Tensor) -> hl.Batch:
        return hl.Batch(targets, old_logps=old, support_ids=ids, **more)

    start = -torch.rand(n, device=DEVICE)
    dense = batch_of(None, start)
    dense_ms = milliseconds(lambda: call(hidden, weight, dense), arguments.repeats)
    found: dict[str, Any] = {
        "device": device_name(),
        "sizes": {"tokens": n, "hidden": h, "vocabulary": v, "ids": k},
        "dense": {
            "ms": round(dense_ms, 3),
            "peak MiB": peak_mib(lambda: call(hidden, weight, dense), returned),
        },
    }
    for kind in ("uniform", "skewed", "ragged", "half"):
        ids = ids_of(kind, targets, v, k)
        with torch.no_grad():
            old = hl.head_loss(hidden, hl.Head(weight), batch_of(ids, start), hl.grpo()).logps
        old = old + 0.05 * torch.randn_like(old)
        batch = batch_of(ids, old)
        row: dict[str, Any] = {"errors": check(hidden, weight, batch, ids)}
        again = partial(call, hidden, weight, batch)
        kept = milliseconds(again, arguments.repeats)
        make = partial(batch_of, ids, old)
        anew = milliseconds(lambda make=make: call(hidden, weight, make()), arguments.repeats)
        row |= {"ms": round(kept, 3), "ms with a new batch": round(anew, 3)}
        row["times faster"] = round(dense_ms / kept, 2)
        row["times faster with a new batch"] = round(dense_ms / anew, 2)
        row["peak MiB"] = peak_mib(again, returned)
        if kind != "half":
            row["kernels"] = acts(hidden, weight, ids, arguments.repeats)
        found[kind] = row
        print(kind, json.dumps(row), flush=True)
    print("dense", json.dumps(found["dense"]))
    return found


def main(argv: list[str] | None = None) -> int:
    return run_study(__doc__, measure, {"default": 64}, 8, argv)


if __name__ == "__main__":
    raise SystemExit(main())
