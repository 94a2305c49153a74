"""Correctness checks of headloss before any timing, for each way to divide a batch or head among
ranks.

Imported by parallel.py. Page: docs/across-devices.md.

The oracle computes plain logits in float64 on one rank; the error budget follows from plain torch
(see headloss.testing). T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from ranks import Ranks
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import headloss as hl
from headloss.parallel.agreement import checksum
from headloss.testing import error, plain, random_batch, trained_looking

Found = dict[str, Any]  # "ok", and measured values


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid of ranks with `data` rows and `vocabulary` columns. Ranks in different rows hold
    different tokens of the same segments; ranks in different columns hold different vocabulary
    slices of the head. `spread` turns on sequence parallelism."""

    name: str
    data: int = 1
    vocabulary: int = 1
    spread: bool = False


def grids(size: int) -> list[Grid]:
    found = [
        Grid(name="vocabulary", vocabulary=size),
        Grid(name="vocabulary, spread", vocabulary=size, spread=True),
        Grid(name="segments", data=size),
    ]
    if size % 2 == 0 and size > 2:
        found.append(Grid(name="grid, spread", data=2, vocabulary=size // 2, spread=True))
    return found


class Problem:
    """A small whole call, identical on every rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        tokens, width, grain = (1000, 512, 16) if ranks.on_gpu else (60, 16, 8)
        # The kernels need vocabulary shards whose number of rows is a multiple of `grain`.
        self.grain = grain
        vocabulary = 4 * grain * ranks.size * (30 if ranks.on_gpu else 1)
        self.dtype = torch.bfloat16 if ranks.on_gpu else torch.float32
        sizes = (tokens, width, vocabulary)
        self.hidden, self.weight, targets = trained_looking(*sizes, self.dtype, ranks.device)
        lengths = torch.tensor([tokens // 2, 0, 1, tokens - tokens // 2 - 1])
        segments = hl.Segments.from_lengths(lengths.to(ranks.device))
        targets[tokens // 3 :: 7] = -100
        generator = torch.Generator(ranks.device).manual_seed(3)
        logps = -torch.rand(tokens, generator=generator, device=ranks.device)
        self.batch = random_batch(targets, segments, logps)

    def part(self, grid: Grid, groups: tuple[Any, Any]) -> Part:
        """Return this rank's inputs of the call. Ranks have different numbers of weight rows,
        tokens and hidden states."""
        row, column = divmod(self.ranks.rank, grid.vocabulary)
        count = len(self.batch.targets)
        owner = (torch.arange(count) % (grid.data + 1)).clamp_max(grid.data - 1)
        tokens = (owner == row).nonzero().squeeze(1).to(self.ranks.device)
        rows = uneven(len(self.weight), grid.vocabulary, self.grain)[column]
        mine = uneven(len(tokens), grid.vocabulary, 1)[column] if grid.spread else slice(None)
        ids, fields = self.batch.segments.ids[tokens], {}
        for name, value in self.batch.fields.items():
            assert isinstance(value, Tensor)
            fields[name] = value[tokens] if self.batch.per_token(name) else value
        over = groups[0] if grid.data > 1 else None
        segments = hl.Segments.from_ids(ids, count=self.batch.segments.count, group=over)
        return Part(
            hidden=self.hidden[tokens][mine].clone().requires_grad_(),
            weight=self.weight[rows].clone().requires_grad_(),
            batch=hl.Batch(self.batch.targets[tokens], segments, **fields),
            group=groups[1] if grid.vocabulary > 1 else None,
            rows=rows,
            positions=tokens[mine],
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's part of a call."""

    hidden: Tensor
    weight: Tensor
    batch: hl.Batch
    group: Any  # The vocabulary group.
    rows: slice  # Rows of the weight that the rank holds.
    positions: Tensor  # Indices of the rank's hidden states.

    @property
    def head(self) -> hl.Head:
        return hl.Head(self.weight, vocab_group=self.group)


def uneven(total: int, parts: int, grain: int) -> list[slice]:
    """Return consecutive slices with borders at multiples of `grain`, smaller slices first."""
    least = total // (2 * parts) // grain * grain
    borders = [least * i for i in range(parts)] + [total]
    return [slice(a, b) for a, b in itertools.pairwise(borders)]


# ---------------------------------------------------------------------- results of one rank


OBJECTIVES: dict[str, Callable[[], Any]] = {
    "gspo": lambda: hl.gspo(epsilon_low=0.2, epsilon_high=0.2),
    "grpo": hl.grpo,
    "mix": lambda: hl.dapo() + 1e-3 * hl.z_loss() - 1e-2 * hl.entropy(),
}


def placed(p: Problem, grid: Grid, groups: tuple[Any, Any], name: str, schedule: str) -> Found:
    """Check a grid of ranks: the errors of loss and gradients are within the error budget, and the
    ranks of a vocabulary group get identical bits."""
    leaf, weight = (t.detach().clone().requires_grad_() for t in (p.hidden, p.weight))
    objective = OBJECTIVES[name]()
    want, fine, coarse = (
        plain(leaf, hl.Head(weight), p.batch, objective, mode)
        for mode in ("float64", "float32", "input")
    )
    part = p.part(grid, groups)
    options = hl.Options(
        schedule=schedule,
        sequence_parallel=grid.spread,
        chunk_tokens=256 if name == "grpo" else None,
        metrics=name == "mix",
    )
    out = hl.head_loss(part.hidden, part.head, part.batch, objective, options)
    dx, dw = torch.autograd.grad(out.loss, (part.hidden, part.weight))
    loss, dw = out.loss.detach().double(), dw.float()
    same = True
    if part.group is not None:
        sums = checksum([loss, out.logps] if grid.spread else [loss, out.logps, dx])
        bits = torch.tensor(sums, device=loss.device)
        least, most = bits.clone(), bits.clone()
        distributed.all_reduce(least, distributed.ReduceOp.MIN, group=part.group)
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=part.group)
        same = bool(least == most)
    if grid.data > 1:  # Each row of the grid of ranks computes a part of the sum in the loss.
        distributed.all_reduce(loss, group=groups[0])
        distributed.all_reduce(dw, group=groups[0])
    scale = want.loss.abs().clamp_min(0.5)
    apart = float((loss - want.loss).abs() / scale)
    allowed = {"loss": 3 * float((fine.loss - want.loss).abs() / scale) + 1e-6}
    seen = {"loss": apart}
    places = {"hidden": (dx, part.positions), "weight": (dw, part.rows)}
    for key, (value, place) in places.items():
        # The error is divided by the norm of the gradient over all ranks, since the norm of one
        # rank's slice may be nearly zero.
        true, theirs = want.gradients[key], coarse.gradients[key].double()
        norm = float(true.norm())
        seen[key] = float((value.double() - true[place]).norm()) / norm
        allowed[key] = 3 * float((theirs - true).norm()) / norm + 1e-6
    good = same and all(seen[key] <= allowed[key] for key in seen)
    return {"ok": good, "same_bits": same, "errors": seen, "allowed": allowed}


def refused(p: Problem, group: Any) -> Found:
    """Check that all ranks raise if their targets differ."""
    part = p.part(Grid(name="", vocabulary=p.ranks.size), (None, group))
    if p.ranks.rank == p.ranks.size - 1:
        part.batch.targets = part.batch.targets.flip(0)
    try:
        hl.head_loss(part.hidden, part.head, part.batch, hl.gspo())
    except ValueError as caught:
        return {"ok": "targets: differs" in str(caught)}
    return {"ok": False}


# ---------------------------------------------------------------------- reads, CUDA graphs, FSDP2


def read_once(p: Problem, group: Any) -> Found:
    """Count the waits for the device in forward and backward, with their places in the code."""
    part = p.part(Grid(name="", vocabulary=p.ranks.size), (None, group))
    options = hl.Options(metrics=False, skip_rows=False)

    def step() -> None:
        out = hl.head_loss(part.hidden, part.head, part.batch, hl.gspo(), options)
        torch.autograd.grad(out.loss, (part.hidden, part.weight))

    step()
    p.ranks.settle()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [
        f"{w.filename.rpartition('/')[2]}:{w.lineno}"
        for w in caught
        if "synchron" in str(w.message)
    ]
    return {"ok": len(places) <= 1, "reads": places}


def captured(p: Problem, group: Any, spread: bool) -> Found:
    """Check a captured static call on vocabulary shards, forward and backward, replayed on new
    values."""
    part = p.part(Grid(name="", vocabulary=p.ranks.size, spread=spread), (None, group))
    objective = hl.gspo()
    options = hl.Options(static=True, metrics=False, sequence_parallel=spread)

    def step() -> list[Tensor]:
        out = hl.head_loss(part.hidden, part.head, part.batch, objective, options)
        return [out.loss.detach(), *torch.autograd.grad(out.loss, (part.hidden, part.weight))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    p.ranks.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = step()
    with torch.no_grad():
        part.hidden.copy_(part.hidden.flip(0))
    graph.replay()
    p.ranks.settle()
    found = [error(a, b) for a, b in zip(replayed, step(), strict=True)]
    return {"ok": max(found) < 1e-6, "errors": found}


class Tied(nn.Module):
    """A model with an embedding, a layer and a tied head; the forward returns the loss."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        (vocabulary, width), kind = weight.shape, {"dtype": weight.dtype, "device": weight.device}
        self.embedding = nn.Embedding(vocabulary, width, **kind)  # type: ignore[arg-type]
        self.layer = nn.Linear(width, width, bias=False, **kind)  # type: ignore[arg-type]
        with torch.no_grad():
            self.embedding.weight.copy_(weight)
            nn.init.eye_(self.layer.weight)

    def forward(self, batch: hl.Batch, objective: Any, options: hl.Options | None = None) -> Tensor:
        hidden = 12 * self.layer(self.embedding(batch.targets.clamp_min(0)))
        return hl.head_loss(hidden, hl.Head.of(self.embedding), batch, objective, options).loss


def wrapped(p: Problem, group: Any) -> Found:
    """Check training under FSDP2 with a tied head: the averaged gradient equals the gradient of the
    whole batch on one rank.

    Every segment lies on one rank, as if each rank had its own data loader.
    """
    ranks, objective = p.ranks, hl.gspo(epsilon_low=0.2, epsilon_high=0.2) + hl.cross_entropy()
    pieces = uneven(len(p.batch.targets), ranks.size, 1)

    def batch_of(positions: slice, ids: Tensor, count: int) -> hl.Batch:
        targets, old = p.batch.targets[positions], p.batch.old_logps[positions]
        ones = torch.linspace(-1, 1, ranks.size, device=ranks.device)
        own = ones if count > 1 else ones[ranks.rank : ranks.rank + 1]
        segments = hl.Segments.from_ids(ids[positions], count=count)
        return hl.Batch(targets, segments, advantages=own, old_logps=old)

    lengths = torch.tensor([s.stop - s.start for s in pieces], device=ranks.device)
    ids = torch.arange(ranks.size, device=ranks.device).repeat_interleave(lengths)
    whole = batch_of(slice(None), ids, ranks.size)
    mine = batch_of(pieces[ranks.rank], torch.zeros_like(ids), 1)
    mine.totals = hl.Totals.of(mine).all_reduce(group, gradients="mean")

    def gradients(model: Any, batch: hl.Batch) -> list[Tensor]:
        model(batch, objective).backward()
        found = [x.grad for x in model.parameters()]
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]

    true, theirs = (gradients(Tied(p.weight.to(d)), whole) for d in (torch.float64, p.dtype))
    model = fully_shard(Tied(p.weight), mesh=init_device_mesh(ranks.device.type, (ranks.size,)))
    found = gradients(model, mine)
    seen = [error(a, b) for a, b in zip(found, true, strict=True)]
    allowed = [3 * error(a, b) + 1e-6 for a, b in zip(theirs, true, strict=True)]
    good = all(a <= b for a, b in zip(seen, allowed, strict=True))
    return {"ok": good, "errors": seen, "allowed": allowed}


# ---------------------------------------------------------------------- all checks


def check(ranks: Ranks) -> dict[str, Found]:
    """Return the results of all checks by name; `ok` is True if a check holds on all ranks."""
    found: dict[str, Found] = {}

    def note(name: str, act: Callable[[], Found]) -> None:
        with ranks.step(f"check {name}"):
            try:
                one = act()
            except Exception as caught:  # no rank may wait for a failed rank
                one = {
                    "ok": False,
                    "error": f"rank {ranks.rank}: {type(caught).__name__}: {caught}",
                }
                print(one["error"], flush=True)
            one["ok"] = ranks.most(not one["ok"]) == 0
        if not one["ok"]:
            ranks.say(f"check {name} FAILED: {one}")
        found[name] = one

    with ranks.step("inputs of the checks"):
        p = Problem(ranks)
    for grid in grids(ranks.size):
        mesh = init_device_mesh(
            ranks.device.type, (grid.data, grid.vocabulary), mesh_dim_names=("data", "tp")
        )
        groups = mesh.get_group("data"), mesh.get_group("tp")
        for name, schedule in itertools.product(OBJECTIVES, ("auto", "recompute")):
            act = partial(placed, p, grid, groups, name, schedule)
            note(f"{grid.name}, {name}, {schedule}", act)
    note("other targets are refused", lambda: refused(p, ranks.group))
    note("FSDP2, tied head", lambda: wrapped(p, ranks.group))
    if ranks.on_gpu:
        note("one read of the device", lambda: read_once(p, ranks.group))
        note("CUDA graph", lambda: captured(p, ranks.group, spread=False))
        note("CUDA graph, spread", lambda: captured(p, ranks.group, spread=True))
    return found
