"""Scaling over the GPUs of one host: vocabulary shards, segments across ranks, FSDP2.

    torchrun --standalone --nproc-per-node 8 benchmarks/parallel.py --out benchmarks/results

Short checks against one rank come first; no time is reported where one of them fails. Rank 0 writes
parallel-<ranks>.json and prints it as a table. T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast needs a fabric manager

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import headloss as hl
from headloss.testing import error, random_batch, trained_looking

SHAPES = [(16384, 4096, 128256), (16384, 8192, 152064)]
OBJECTIVES: dict[str, Callable[[], hl.Term]] = {"grpo": hl.grpo, "gspo": hl.gspo}
SEGMENT = 1024  # tokens of a sequence
TOKENS_PER_RANK, WIDTH, VOCABULARY = 32768, 4096, 128256  # sequence data parallel, FSDP2


@dataclass
class Meter:
    """Bytes that this rank sends in collectives, by ring algorithms."""

    sent: float = 0.0
    saved: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def counting(self) -> Iterator[None]:
        def size(tensor: Tensor) -> int:
            return tensor.numel() * tensor.element_size()

        def others(group: Any) -> float:
            return distributed.get_world_size(group) - 1

        counts: dict[str, Callable[..., float]] = {
            "all_gather": lambda found, own, group=None, **_: others(group) * size(own),
            "all_reduce": lambda own, group=None, **_: (
                2 * others(group) / (others(group) + 1) * size(own)
            ),
            "all_to_all_single": lambda found, own, *_, group=None, **__: (
                others(group) / (others(group) + 1) * size(own)
            ),
        }
        for name, count in counts.items():
            self.saved[name] = run = getattr(distributed, name)

            def counted(*args: Any, run: Any = run, count: Any = count, **options: Any) -> Any:
                self.sent += count(*args, **options)
                return run(*args, **options)

            setattr(distributed, name, counted)
        try:
            yield
        finally:
            for name, run in self.saved.items():
                setattr(distributed, name, run)


def problem(
    tokens: int, width: int, vocabulary: int, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, hl.Batch]:
    """bf16 inputs that look trained, the same on every rank."""
    hidden, weight, targets = trained_looking(
        tokens, width, vocabulary, torch.bfloat16, device, seed=seed
    )
    lengths = [SEGMENT] * (tokens // SEGMENT)
    segments = hl.Segments.from_lengths(torch.tensor(lengths, device=device))
    generator = torch.Generator(device=device).manual_seed(seed)
    logps = -torch.rand(tokens, generator=generator, device=device)
    return hidden.requires_grad_(), weight, random_batch(targets, segments, logps)


def rows_of(weight: Tensor, ranks: int, rank: int) -> Tensor:
    """A slice of the vocabulary, of almost equal sizes, that requires a gradient."""
    return weight.tensor_split(ranks)[rank].detach().clone().requires_grad_()


def timed(step: Callable[[], Any], device: torch.device, steps: int = 7) -> float:
    """Median milliseconds of a step."""
    for _ in range(3):
        step()
    found = []
    for _ in range(steps):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        step()
        stop.record()
        torch.cuda.synchronize(device)
        found.append(start.elapsed_time(stop))
    return statistics.median(found)


def measured(step: Callable[[], Any], tokens: int, device: torch.device) -> dict[str, float]:
    """What is reported of a step."""
    meter = Meter()
    with meter.counting():
        step()
    found = {"ms": timed(step, device), "bytes_per_token": meter.sent / tokens}
    return {**found, "collectives": share_of_collectives(step, device)}


def loss_step(
    hidden: Tensor, head: hl.Head, batch: hl.Batch, term: hl.Term, options: hl.Options
) -> Callable[[], Any]:
    """Forward and backward."""

    def step() -> None:
        out = hl.head_loss(hidden, head, batch, term, options)
        torch.autograd.grad(out.loss, (hidden, head.weight))

    return step


def share_of_collectives(step: Callable[[], Any], device: torch.device) -> float:
    """Kernel time of NCCL over the time of all kernels; what overlaps counts in both."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    total = sum(e.self_device_time_total for e in events)
    return sum(e.self_device_time_total for e in events if "nccl" in e.key.lower()) / total


# ---------------------------------------------------------------------- checks


def check(group: Any, ranks: int, device: torch.device) -> dict[str, float]:
    """The largest relative differences from one rank, over placements; AssertionError if large."""
    rank, found = distributed.get_rank(group), {}
    hidden, weight, batch = problem(4096, 512, 8200, device)
    for name, make in (("grpo", hl.grpo), ("gspo", hl.gspo), ("mix", lambda: _mix())):
        for schedule in ("auto", "recompute"):
            options = hl.Options(schedule=schedule, chunk_tokens=1024 if name == "grpo" else None)
            alone = weight.detach().clone().requires_grad_()
            want = hl.head_loss(hidden, hl.Head(alone), batch, make(), options)
            into_hidden, into_weight = torch.autograd.grad(want.loss, (hidden, alone))
            for spread in (False, True):
                shard = rows_of(weight, ranks, rank)
                own = hidden.detach().tensor_split(ranks)[rank] if spread else hidden.detach()
                own = own.clone().requires_grad_()
                opts = hl.Options(
                    schedule=schedule,
                    chunk_tokens=options.chunk_tokens,
                    sequence_parallel=spread,
                )
                head = hl.Head(shard, vocab_group=group)
                got = hl.head_loss(own, head, batch, make(), opts)
                dx, dw = torch.autograd.grad(got.loss, (own, shard))
                target = into_hidden.tensor_split(ranks)[rank] if spread else into_hidden
                key = f"{name} {schedule}{' spread' if spread else ''}"
                found[key] = max(
                    error(got.loss, want.loss),
                    error(dx, target),
                    error(dw, into_weight.tensor_split(ranks)[rank]),
                )
                bits = got.loss.detach().view(torch.int32)
                low, high = bits.clone(), bits.clone()
                distributed.all_reduce(low, distributed.ReduceOp.MIN, group=group)
                distributed.all_reduce(high, distributed.ReduceOp.MAX, group=group)
                assert bool(low == high), f"{key}: ranks hold different bits"
    assert max(found.values()) < 1e-2, found
    return found


def _mix() -> hl.Objective:
    return hl.gspo() + 1e-3 * hl.z_loss() - 1e-2 * hl.entropy()


# ---------------------------------------------------------------------- what is measured


def vocabulary_parallel(group: Any, ranks: int, device: torch.device) -> list[dict[str, Any]]:
    rank, rows = distributed.get_rank(group), []
    for tokens, width, vocabulary in SHAPES:
        hidden, weight, batch = problem(tokens, width, vocabulary, device)
        shard = rows_of(weight, ranks, rank)
        del weight
        head = hl.Head(shard, vocab_group=group if ranks > 1 else None)
        for name, make in OBJECTIVES.items():
            step = loss_step(hidden, head, batch, make(), hl.Options(metrics=False))
            row = {"work": "vocabulary", "ranks": ranks, "objective": name}
            row |= {"T": tokens, "H": width, "V": vocabulary, **measured(step, tokens, device)}
            rows.append(row)
            del step
        del hidden, shard, head
        torch.cuda.empty_cache()
    return rows


def segments_parallel(group: Any, ranks: int, device: torch.device) -> list[dict[str, Any]]:
    """GSPO at a fixed number of tokens a rank: every segment has tokens on every rank."""
    hidden, weight, batch = problem(TOKENS_PER_RANK, WIDTH, VOCABULARY, device)
    if ranks > 1:
        ids, count = batch.segments.ids, batch.segments.count
        fields = {n: t for n, t in batch.fields.items() if isinstance(t, Tensor)}
        segments = hl.Segments.from_ids(ids, count=count, group=group)
        batch = hl.Batch(batch.targets, segments, **fields)  # type: ignore[arg-type]
    weight.requires_grad_()
    options = hl.Options(metrics=False, schedule="recompute")  # the same on one rank

    step = loss_step(hidden, hl.Head(weight), batch, hl.gspo(), options)
    row = {"work": "segments", "ranks": ranks, "objective": "gspo", "T": TOKENS_PER_RANK}
    return [{**row, "H": WIDTH, "V": VOCABULARY, **measured(step, TOKENS_PER_RANK, device)}]


class Tied(nn.Module):
    """A tied head under FSDP2."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        options: Any = {"dtype": torch.bfloat16, "device": device}
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, **options)
        self.layer = nn.Linear(WIDTH, WIDTH, **options)

    def forward(self, batch: hl.Batch) -> Tensor:
        hidden = self.layer(self.embedding(batch.targets))
        head = hl.Head.of(self.embedding)
        return hl.head_loss(hidden, head, batch, hl.gspo(), hl.Options(metrics=False)).loss


def sharded_data(ranks: int, device: torch.device) -> list[dict[str, Any]]:
    _, _, batch = problem(TOKENS_PER_RANK, 8, VOCABULARY, device)
    model: Any = Tied(device)
    mesh = init_device_mesh("cuda", (ranks,))
    fully_shard(model, mesh=mesh)
    batch.totals = hl.Totals.of(batch).all_reduce(mesh.get_group(), gradients="mean")

    def step() -> None:
        model(batch).backward()
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            parameter.grad = None

    row = {"work": "FSDP2, tied head", "ranks": ranks, "objective": "gspo", "T": TOKENS_PER_RANK}
    return [{**row, "H": WIDTH, "V": VOCABULARY, **measured(step, TOKENS_PER_RANK, device)}]


# ---------------------------------------------------------------------- the table


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Time on one rank over time here, over what it would be at best."""
    keys = ("work", "objective", "T", "H", "V")
    alone = {tuple(r[k] for k in keys): r["ms"] for r in rows if r["ranks"] == 1}
    for row in rows:
        base = alone.get(tuple(row[k] for k in keys))
        if base is not None:
            ideal = base / row["ranks"] if row["work"] == "vocabulary" else base
            row["efficiency"] = ideal / row["ms"]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    columns = ["work", "objective", "T", "H", "V", "ranks", "ms", "efficiency"]
    columns += ["bytes_per_token", "collectives"]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in sorted(rows, key=lambda r: [str(r[c]) for c in columns[:5]] + [r["ranks"]]):
        cells = [row.get(c, "") for c in columns]
        shown = [f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for parallel-<ranks>.json")
    parser.add_argument("--check", action="store_true", help="only the checks")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    world, rank = distributed.get_world_size(), distributed.get_rank()
    checks = check(distributed.group.WORLD, world, device)
    rows: list[dict[str, Any]] = []
    counts = [] if arguments.check else [n for n in (1, 2, 4, 8) if n <= world]
    for ranks in counts:
        # As many groups as there is room for, all at work: one runs no faster for the others' rest.
        lines = [list(range(i, i + ranks)) for i in range(0, world - ranks + 1, ranks)]
        made = [(line, distributed.new_group(line)) for line in lines]
        mine = next((group for line, group in made if rank in line), None)
        for work in (vocabulary_parallel, segments_parallel):
            if mine is not None:
                rows += work(mine, ranks, device)
            torch.cuda.empty_cache()
            distributed.barrier()
    if not arguments.check:
        rows += sharded_data(world, device)
    if rank == 0:
        rows = with_efficiency(rows)
        facts = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
        record = {**facts, "ranks": world, "checks": checks, "rows": rows}
        if arguments.out is not None:
            path = arguments.out / f"parallel-{world}.json"
            path.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(checks, indent=1))
        print(table(rows))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
