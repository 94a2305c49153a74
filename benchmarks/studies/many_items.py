"""Softmax over a million items: full cross-entropy, sampled softmax and gBCE, by several libraries.

Page: docs/other-heads.md.

    python benchmarks/studies/many_items.py --output many_items.json    # on one GPU, three minutes

The study measures the time of a call with its gradients, the bytes in excess of inputs and returned
gradients, and the errors of both gradients against float64. Gradient errors are measured on the
hidden states of 64 tokens, and on 48 rows of the weight: the rows of 24 target items and of the
last 24 items. If a library is not installed, the program prints the library's name and goes on.
Kernels are compiled beforehand, in parallel processes. Rows that do not begin before the time
limit `--seconds` are not timed; the program prints their names.

N tokens, V items, H hidden width, K negatives per token.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from narrow import Inputs, milliseconds, peak_mib
from torch import Tensor

import headloss as hl

MILLION = 1_000_000
# Number of tokens in a chunk of logits, in the runs with torch.compile and with PyTorch 2.15's
# loss.
CHUNK = 2048
BETA = 0.75  # The exponent beta of the gBCE loss.


class Case(NamedTuple):
    """A benchmarked loss, the implementation to time, and sizes."""

    work: str  # "cross-entropy", "sampled" or "gbce"
    who: str
    h: int
    v: int = MILLION
    n: int = 16384
    dtype: str = "bfloat16"
    k: int = 0


# ---------------------------------------------------------------------- cross-entropy


def headloss(x: Tensor, w: Tensor, targets: Tensor, schedule: str = "auto") -> None:
    options = hl.Options(schedule=schedule)
    out = hl.head_loss(x, hl.Head(w), hl.Batch(targets), hl.cross_entropy(), options)
    out.loss.backward()


def recompute(x: Tensor, w: Tensor, targets: Tensor) -> None:
    headloss(x, w, targets, "recompute")


def chunk_loss(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.T).float(), targets, reduction="sum")


chunk_compiled = torch.compile(chunk_loss, dynamic=False)


def compiled(x: Tensor, w: Tensor, targets: Tensor) -> None:
    """Run cross-entropy chunk by chunk; the weight gradient accumulates in the weight's dtype, as
    in autograd."""
    for rows in torch.arange(len(x)).split(CHUNK):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        (chunk_compiled(x[part], w, targets[part]) / len(x)).backward()


def liger(x: Tensor, w: Tensor, targets: Tensor) -> None:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(x, w, targets)
    (loss[0] if isinstance(loss, tuple) else loss).backward()


def cut(x: Tensor, w: Tensor, targets: Tensor) -> None:
    from cut_cross_entropy import linear_cross_entropy

    linear_cross_entropy(x, w, targets).backward()


def pytorch(x: Tensor, w: Tensor, targets: Tensor) -> None:
    """Run PyTorch 2.15's `linear_cross_entropy`. The module torch_2_15_lce (a copy of PyTorch
    2.15's files) adds `linear_cross_entropy` to an older PyTorch."""
    if not hasattr(F, "linear_cross_entropy"):
        __import__("torch_2_15_lce")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)  # type: ignore
    F.linear_cross_entropy(x, w, targets, options=options).backward()  # type: ignore


# ---------------------------------------------------------------------- K negatives


@hl.term
def gbce_term(stats, batch):
    z = stats.candidate_logps + stats.lse[:, None]  # [T, 1 + K], the positive first
    return -(BETA * F.logsigmoid(z[:, 0]) + F.logsigmoid(-z[:, 1:]).sum(1)) / z.shape[1]


def drawn(case: Case, targets: Tensor) -> Tensor:
    """Return ids [N, 1 + K]: each row has its target t and the K negatives t + step, t + 2 step, ..
    (modulo the vocabulary size)."""
    step = case.v // (case.k + 1) - 1
    places = torch.arange(case.k + 1, device=targets.device) * step
    return (targets[:, None] + places) % case.v


def sampled(x: Tensor, w: Tensor, ids: Tensor) -> None:
    batch = hl.Batch(ids[:, 0].contiguous(), support_ids=ids)
    hl.head_loss(x, hl.Head(w), batch, hl.cross_entropy()).loss.backward()


def gbce(x: Tensor, w: Tensor, ids: Tensor) -> None:
    batch = hl.Batch(ids[:, 0].contiguous(), support_ids=ids, candidate_ids=ids)
    hl.head_loss(x, hl.Head(w), batch, gbce_term()).loss.backward()


def gathered(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("nh,nkh->nk", x, F.embedding(ids, w)).float()


def sampled_plain(x: Tensor, w: Tensor, ids: Tensor) -> None:
    F.cross_entropy(gathered(x, w, ids), torch.zeros_like(ids[:, 0])).backward()


def gbce_plain(x: Tensor, w: Tensor, ids: Tensor) -> None:
    z = gathered(x, w, ids)
    loss = BETA * F.logsigmoid(z[:, 0]) + F.logsigmoid(-z[:, 1:]).sum(1)
    (-loss.mean() / z.shape[1]).backward()


WHO: dict[str, dict[str, Callable[..., None]]] = {
    "cross-entropy": {
        "headloss": headloss,
        "headloss, recompute": recompute,
        "torch.compile in chunks": compiled,
        "Liger": liger,
        "Cut Cross-Entropy": cut,
        "PyTorch 2.15": pytorch,
    },
    "sampled": {"headloss": sampled, "PyTorch": sampled_plain},
    "gbce": {"headloss": gbce, "PyTorch": gbce_plain},
}


def cases() -> Iterator[Case]:
    for who in ("headloss", "Cut Cross-Entropy", "torch.compile in chunks"):
        for v in (MILLION, MILLION + 7):
            for h in (64, 128, 256):
                yield Case("cross-entropy", who, h, v)
                if v == MILLION:
                    yield Case("cross-entropy", who, h, n=131072)
    for h in (64, 128, 256):
        for who in WHO["sampled"]:
            yield Case("sampled", who, h, k=256)
            yield Case("gbce", who, h, k=256)
            if who == "headloss" or h == 64:
                yield Case("sampled", who, h, k=4096)
    yield Case("cross-entropy", "headloss", 64, MILLION + 7, n=131072)
    for h in (64, 256):
        for who in ("headloss", "torch.compile in chunks", "Cut Cross-Entropy"):
            yield Case("cross-entropy", who, h, dtype="float32")
    yield Case("sampled", "headloss", 64, n=131072, k=256)
    yield Case("sampled", "PyTorch", 64, n=131072, k=256)
    for h in (64, 128, 256):
        yield Case("cross-entropy", "PyTorch 2.15", h)
    for h in (64, 256):
        yield Case("cross-entropy", "Liger", h)


# ---------------------------------------------------------------------- measuring


def inputs_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weight, and targets or ids."""
    of = Inputs(case.h, case.v, case.n, getattr(torch, case.dtype))
    ids = drawn(case, of.targets) if case.k else of.targets
    return of.x.requires_grad_(), of.w.requires_grad_(), ids


class Oracle:
    """Float64 reference for some rows of the hidden gradient and of the weight gradient."""

    def __init__(self, case: Case, x: Tensor, w: Tensor, ids: Tensor) -> None:
        device, n = x.device, len(x)
        self.rows = torch.arange(0, n, n // 64, device=device)
        last = torch.arange(case.v - 24, case.v, device=device)
        self.columns = torch.cat([ids.flatten()[: 24 * (case.k + 1) : case.k + 1], last]).unique()
        hidden, weight = (t.detach().double() for t in (x, w))
        if case.k:
            self._of_pairs(case, hidden, weight, ids)
            return
        lse = [(part @ weight.T).logsumexp(1) for part in hidden.split(512)]
        g = ((hidden @ weight[self.columns].T) - torch.cat(lse)[:, None]).exp()
        g -= (ids[:, None] == self.columns).double()
        self.of_weight = g.T @ hidden / n
        g = (hidden[self.rows] @ weight.T).softmax(1)
        g[torch.arange(len(self.rows)), ids[self.rows]] -= 1
        self.of_hidden = g @ weight / n

    def _of_pairs(self, case: Case, hidden: Tensor, weight: Tensor, ids: Tensor) -> None:
        places, self.of_weight = [], torch.zeros_like(weight[self.columns])
        for rows in torch.arange(len(hidden), device=ids.device).split(max(1, (1 << 20) // case.k)):
            z = torch.einsum("nh,nkh->nk", hidden[rows], weight[ids[rows]])
            if case.work == "sampled":
                g = z.softmax(1)
                g[:, 0] -= 1
            else:
                g = torch.sigmoid(z)
                g[:, 0] = -BETA * torch.sigmoid(-z[:, 0])
                g /= z.shape[1]
            places.append(torch.einsum("nk,nkh->nh", g, weight[ids[rows]]))
            at = torch.searchsorted(self.columns, ids[rows]).clamp(max=len(self.columns) - 1)
            token, pair = (self.columns[at] == ids[rows]).nonzero(as_tuple=True)
            values = g[token, pair][:, None] * hidden[rows][token] / len(hidden)
            self.of_weight.index_add_(0, at[token, pair], values)
        self.of_hidden = torch.cat(places)[self.rows] / len(hidden)

    def errors(self, x: Tensor, w: Tensor) -> dict[str, float]:
        pairs = {"dX": (x, self.rows, self.of_hidden), "dW": (w, self.columns, self.of_weight)}
        found = {}
        for name, (leaf, index, want) in pairs.items():
            assert leaf.grad is not None
            found[name] = float((leaf.grad[index].double() - want).norm() / want.norm())
        return found


def measured(case: Case, tensors: tuple[Tensor, Tensor, Tensor], oracle: Oracle | None) -> Any:
    x, w, ids = tensors
    work = WHO[case.work][case.who]

    def run() -> None:
        x.grad = w.grad = None
        work(x, w, ids)

    row: dict[str, Any] = {"ms": round(milliseconds(run, 1 if case.who == "Liger" else 3), 2)}
    row["MiB"] = round(peak_mib(run, x, w))
    return row | (oracle.errors(x, w) if oracle else {})


def warmed(case: Case) -> str | None:
    """Compile the kernels of a case in a separate process, with fewer tokens."""
    try:
        x, w, ids = inputs_of(case._replace(n=CHUNK))
        WHO[case.work][case.who](x, w, ids)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case}: {type(error).__name__}: {error}"[:300]
    return None


def warm(every: list[Case]) -> None:
    jobs = {(c.work, c.who, c.h, c.v, c.dtype, c.k): c for c in every}
    jobs = {k: c for k, c in jobs.items() if c.who not in ("PyTorch", "PyTorch 2.15")}
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        print(*filter(None, pool.map(warmed, jobs.values(), chunksize=1)), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    start, table, every = time.time(), list[dict[str, Any]](), list(cases())
    warm(every)
    print(f"compiled after {time.time() - start:.0f} s", flush=True)
    oracles: dict[Case, Oracle] = {}
    for case in every:
        row: dict[str, Any] = case._asdict()
        if time.time() - start > options.seconds:
            row["left out"] = "time"
        else:
            try:
                tensors, key = inputs_of(case), case._replace(who="")
                if case.n <= 16384 and key not in oracles:
                    oracles[key] = Oracle(case, *tensors)
                row |= measured(case, tensors, oracles.get(key))
            except Exception as error:
                row["left out"] = f"{type(error).__name__}: {error}"[:200]
            tensors = None
            torch.cuda.empty_cache()
        table.append(row)
        print(*row.values(), f"{time.time() - start:.0f} s", flush=True)
        if options.output:
            versions = {"torch": torch.__version__, "GPU": torch.cuda.get_device_name()}
            options.output.write_text(json.dumps(versions | {"rows": table}, indent=1))


if __name__ == "__main__":
    main()
