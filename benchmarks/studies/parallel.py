"""Scaling over the GPUs of one host: vocabulary shards, segments across ranks, FSDP2.

Page: docs/across-devices.md, benchmarks/README.md.

    torchrun --nproc-per-node 2 benchmarks/studies/parallel.py --out parallel.json
    python benchmarks/studies/parallel.py --merge OTHER.json --out parallel.json

Checks against a float64 oracle come first (`--check` runs only the checks). If a check fails, the
program measures no time. All reported times are those of the slowest rank. For comparison, each run
also measures one rank's time on rank 0's GPU while the remaining GPUs are idle. Rank 0 merges the
results into a file, by number of ranks, and writes a Markdown table next to the file. `--quick`
runs everything on the CPU, at tiny sizes.

The part "slice of 8" gives each rank an eighth of the vocabulary, whatever the number of ranks: a
rank computes as much as one of 8 ranks, but collectives run over fewer ranks. The part "peers"
times the vocabulary-parallel cross-entropies of other libraries, and compares their losses and
gradients with headloss's. The column "slice by itself" is the back-to-back time of the slowest rank
if each rank treats its slice as a whole vocabulary, without collectives. The part "timeline" prints
the kernels of back-to-back calls on rank 0, for GRPO, and the times of the calls' matrix products.
In "grid" the ranks form two rows: the rows hold different tokens of the same sequences, and the
ranks of a row hold slices of the vocabulary. With `--against OLD` the program only compares the
times of two versions of headloss, the imported one and the folder OLD/headloss, with slices of the
vocabulary on all ranks. On four ranks, `--against` also compares the times of two groups of two
ranks, where the ranks of a group hold different slices of the vocabulary.

T tokens (per rank; with vocabulary shards all ranks have identical tokens), H hidden width, V
vocabulary.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import against
import torch
from parallel_checks import Tied, check
from parallel_peers import agree, contestants, ours
from parallel_timeline import products, timeline
from ranks import Ranks, counted, middle, shares
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from works import WORKS, Inputs, Setting, make_inputs

import headloss as hl

OBJECTIVES = ("grpo", "gspo")
KINDS = ("vocabulary", "slice of 8", "peers", "grid", "segments", "fsdp", "timeline")
AGAINST, SHAPES = ("ce", *OBJECTIVES), ((1024, 4096, 128256), (4096, 4096, 128256))
# With --against, the smallest accepted speed of the new version relative to the old version, for
# calls of fewer than 4096 tokens and for larger calls.
LEAST_OF_FEW, LEAST_OF_MANY = 0.97, 0.95
SLICES = 8
IN_A_ROW = 8


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measured calls; the default values are those of the published table."""

    shapes: tuple[tuple[int, int, int], ...] = ((16384, 4096, 128256), (16384, 8192, 152064))
    segment: int = 1024  # Tokens in a sequence.
    # T, H and V of the calls with segments across ranks, and with FSDP2.
    per_rank: tuple[int, int, int] = (32768, 2048, 151936)
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, shape: tuple[int, int, int], ranks: Ranks) -> Inputs:
        """Return identical inputs on every rank."""
        tokens, width, vocabulary = shape
        setting = Setting(
            tokens=tokens,
            width=width,
            vocabulary=vocabulary,
            dtype=self.dtype,
            segments=self.segment,
        )
        found = make_inputs(setting, ranks.device)
        ranks.share(found.hidden, found.targets, found.advantages, found.old, found.ref)
        return found


QUICK = Sizes(shapes=((64, 16, 96),), segment=16, per_rank=(48, 16, 96), dtype=torch.float32)


# ---------------------------------------------------------------------- measurements


Row = dict[str, Any]
Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A timer of steps, on one rank or on all ranks."""

    ranks: Ranks
    repeats: int
    timelines: bool = True
    alone: dict[tuple, dict[str, float]] = field(default_factory=dict)

    def here(self, step: Step, *names: Any) -> dict[str, float]:
        """Time a step without collectives on rank 0 while all other ranks idle. If an earlier call
        had equal `names`, return the earlier call's time without a new measurement."""
        if names not in self.alone:
            with self.ranks.step(f"one rank, {' '.join(map(str, names))}"):
                found = self.times(step, lambda ms: ms) if self.ranks.rank == 0 else {}
                self.ranks.wait()
            self.alone[names] = found
        return self.alone[names]

    def times(self, step: Step, of_all: Callable[[float], float]) -> dict[str, float]:
        """Time a step on an idle device, and back to back as in training, where the CPU prepares a
        step while the GPU executes the previous step."""
        apart = self.ranks.milliseconds(step, self.repeats)
        in_a_row = self.ranks.milliseconds(step, 3, warm=1, in_a_row=IN_A_ROW)
        found = middle([of_all(ms) for ms in apart])
        return {**found, "ms_in_a_row": middle([of_all(ms) for ms in in_a_row])["ms"]}

    def everywhere(self, step: Step, tokens: int) -> Row:
        """Time a step of all ranks; return time, and calls, bytes and time shares of
        collectives."""
        ranks = self.ranks
        with counted() as sent:
            step()
        ranks.wait()
        found: Row = {**self.times(step, ranks.most), "collectives_per_call": sent["calls"]}
        found["bytes_per_token"] = sent["bytes"] / tokens
        if ranks.on_gpu:
            found["share"] = shares(step, ranks)
        ranks.wait()
        return found


def loss_step(
    hidden: Tensor,
    head: hl.Head,
    batch: hl.Batch,
    objective: Any,
    options: hl.Options,
    head_loss: Callable[..., hl.Output] = hl.head_loss,
) -> Step:
    """Make a step of forward and backward."""

    def step() -> None:
        out = head_loss(hidden, head, batch, objective, options)
        torch.autograd.grad(out.loss, (hidden, head.weight))

    return step


def vocabulary_parallel(
    clock: Clock, sizes: Sizes, shape: tuple[int, int, int], work: str = "vocabulary"
) -> list[Row]:
    ranks, rows = clock.ranks, []
    tokens, width, vocabulary = shape
    with ranks.step(f"inputs {shape}"):
        inputs = cut = sizes.inputs(shape, ranks)
        if work == "slice of 8":
            cut = sizes.inputs((tokens, width, vocabulary // SLICES * ranks.size), ranks)
        shard = cut.weight.detach().tensor_split(ranks.size)[ranks.rank]
        shard = shard.clone().requires_grad_()
        options = hl.Options(metrics=False)
    for name in OBJECTIVES:
        objective, batch = WORKS[name].objective(inputs), WORKS[name].batch(cut)
        row: Row = {"work": work, "objective": name} | dict(zip("THV", shape, strict=True))
        head, own = hl.Head(inputs.weight), WORKS[name].batch(inputs)
        step = loss_step(inputs.hidden, head, own, objective, options)
        row["alone"] = clock.here(step, shape, name)
        head = hl.Head(shard, vocab_group=ranks.group)
        step = loss_step(cut.hidden, head, batch, objective, options)
        with ranks.step(f"{work} {shape} {name}, {ranks.size} ranks"):
            rows.append(row | clock.everywhere(step, tokens))
        if name == OBJECTIVES[0] and clock.timelines:
            with ranks.step("its timeline, and its products"):
                timeline(step, ranks, f"{work} {shape} {name}")
                products(ranks, tokens, width, len(shard))
        own = hl.Batch(batch.targets % len(shard), batch.segments, **batch.fields)  # type: ignore[arg-type]
        step = loss_step(cut.hidden, hl.Head(shard), own, objective, options)
        with ranks.step(f"{work} {shape} {name}, each rank's slice by itself"):
            rows[-1]["slice"] = clock.times(step, ranks.most)
    return rows


def race(ranks: Ranks, steps: dict[str, Step], name: str, tokens: int, pairs: int) -> Row:
    """Return the ratios of two versions' back-to-back times on the slowest rank, pair by pair."""
    times: dict[str, list[float]] = {version: [] for version in steps}
    with ranks.step(f"two versions, {name}"):
        for turn in range(pairs + 1):
            for version in list(steps)[:: 1 - 2 * (turn % 2)]:
                (ms,) = ranks.milliseconds(steps[version], 1, 0 if turn else 1, IN_A_ROW)
                times[version].append(ranks.most(ms))
    ratios = [old / new for old, new in zip(times["old"][1:], times["new"][1:], strict=True)]
    bar = LEAST_OF_FEW if tokens < 4096 else LEAST_OF_MANY
    ms = {version: statistics.median(all_ms[1:]) for version, all_ms in times.items()}
    row = {"name": name, "theirs": "old", "bar": bar, "pairs": pairs, "ms": ms}
    return row | against.judged(ratios, bar)


def versions(
    ranks: Ranks, sizes: Sizes, shape: tuple[int, int, int], before: ModuleType, pairs: int
) -> list[Row]:
    """Time two versions of headloss with one slice of the vocabulary per rank and, if there are
    four ranks, also with two rows of two ranks, where each row holds half of the tokens."""
    rows, packages = [], {"old": before, "new": hl}
    size = f"N={shape[0]} H={shape[1]}"
    with ranks.step(f"inputs {shape}"):
        inputs = sizes.inputs(shape, ranks)
        shard = inputs.weight.detach().tensor_split(ranks.size)[ranks.rank].clone()
        shard.requires_grad_()
    for name in AGAINST:
        steps: dict[str, Step] = {}
        for version, package in packages.items():
            with against.using(package):
                objective, batch = WORKS[name].objective(inputs), WORKS[name].batch(inputs)
            head = package.Head(shard, vocab_group=ranks.group)
            options = package.Options(metrics=False, memory_budget=against.MEMORY)
            given = (inputs.hidden, head, batch, objective, options, package.head_loss)
            steps[version] = loss_step(*given)
        rows.append(race(ranks, steps, f"{ranks.size} ranks, {name} {size}", shape[0], pairs))
    if on_a_grid(ranks):
        mesh = two_rows(ranks)
        steps = {
            version: grid_step(mesh, inputs, package, memory_budget=against.MEMORY)
            for version, package in packages.items()
        }
        name = f"2 x {ranks.size // 2} ranks, gspo {size}"
        rows.append(race(ranks, steps, name, shape[0], pairs))
    return rows


def peers(clock: Clock, sizes: Sizes, shape: tuple[int, int, int]) -> list[Row]:
    """Time cross-entropy over slices of the vocabulary for all libraries."""
    ranks, rows = clock.ranks, []
    with ranks.step(f"inputs {shape}"):
        inputs = sizes.inputs(shape, ranks)
        shard = inputs.weight.detach().tensor_split(ranks.size)[ranks.rank]
        shard = shard.clone().requires_grad_()
    whole, plain = hl.Head(inputs.weight), hl.Options(metrics=False)
    step = loss_step(inputs.hidden, whole, hl.Batch(inputs.targets), hl.cross_entropy(), plain)
    alone = clock.here(step, shape, "cross_entropy")

    def act(contestant: Any) -> list[Tensor]:
        loss = contestant(inputs.hidden, shard, inputs.targets, ranks.group)
        return [loss.detach(), *torch.autograd.grad(loss, (inputs.hidden, shard))]

    wanted = act(ours)
    for name, contestant in contestants(ranks.on_gpu).items():
        row = {"work": name, "objective": "cross_entropy"} | dict(zip("THV", shape, strict=True))
        with ranks.step(f"{name} {shape} cross_entropy, {ranks.size} ranks"):
            if ranks.most(not agree(act(contestant), wanted)):
                ranks.say(f"{name}: another loss or gradient than ours: no time is taken")
                continue
            if ranks.on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                act(contestant)
                row["peak_bytes"] = ranks.most(torch.cuda.max_memory_allocated() - before)
            found = clock.everywhere(functools.partial(act, contestant), shape[0])
            rows.append(row | {"alone": alone} | found)
    return rows


def on_a_grid(ranks: Ranks) -> bool:
    return ranks.size >= 4 and ranks.size % 2 == 0


def two_rows(ranks: Ranks) -> DeviceMesh:
    names = ("data", "vocabulary")
    return init_device_mesh(ranks.device.type, (2, ranks.size // 2), mesh_dim_names=names)


def grid_step(mesh: DeviceMesh, inputs: Inputs, package: Any = hl, **options: Any) -> Step:
    """Make a GSPO step on a grid of ranks with two rows: each row of ranks holds half of the tokens
    of each sequence, and each rank of a row holds a slice of the vocabulary. As in data
    parallelism, ranks with equal slices of the vocabulary sum their weight gradients."""
    data, slices = mesh["data"].get_group(), mesh["vocabulary"].get_group()
    row_of, column = mesh.get_coordinate() or (0, 0)
    shard = inputs.weight.detach().tensor_split(slices.size())[column].clone().requires_grad_()
    with against.using(package):
        batch, objective = WORKS["gspo"].batch(inputs), WORKS["gspo"].objective(inputs)
    mine = torch.arange(len(inputs.targets), device=inputs.targets.device) % 2 == row_of
    ids, count = inputs.ids[mine], len(inputs.lengths)
    segments = package.Segments.from_ids(ids, count=count, group=data)
    fields = {n: x[mine] if batch.per_token(n) else x for n, x in batch.fields.items()}  # type: ignore[index]
    part = package.Batch(batch.targets[mine], segments, **fields)
    hidden = inputs.hidden.detach()[mine].requires_grad_()
    head, plain = package.Head(shard, vocab_group=slices), package.Options(metrics=False, **options)

    def step() -> None:
        out = package.head_loss(hidden, head, part, objective, plain)
        _, of_shard = torch.autograd.grad(out.loss, (hidden, shard))
        torch.distributed.all_reduce(of_shard, group=data)

    return step


def grid(clock: Clock, sizes: Sizes, shape: tuple[int, int, int]) -> list[Row]:
    """Time GSPO on a grid of ranks: two groups of ranks hold different tokens of the sequences, and
    the ranks of a group hold slices of the vocabulary."""
    ranks = clock.ranks
    if not on_a_grid(ranks):
        return []
    with ranks.step(f"inputs {shape}"):
        inputs = sizes.inputs(shape, ranks)
        on_ranks = grid_step(two_rows(ranks), inputs)
    batch, objective = WORKS["gspo"].batch(inputs), WORKS["gspo"].objective(inputs)
    row = {"work": "grid", "objective": "gspo"} | dict(zip("THV", shape, strict=True))
    plain = hl.Options(metrics=False)
    step = loss_step(inputs.hidden, hl.Head(inputs.weight), batch, objective, plain)
    row["alone"] = clock.here(step, shape, "gspo")
    with ranks.step(f"grid {shape} gspo, 2 x {ranks.size // 2} ranks"):
        return [row | clock.everywhere(on_ranks, shape[0])]


def segments_parallel(clock: Clock, sizes: Sizes) -> list[Row]:
    """Time GSPO at a fixed number of tokens per rank, with every segment on every rank."""
    ranks, shape = clock.ranks, sizes.per_rank
    with ranks.step(f"inputs {shape}"):
        inputs = sizes.inputs(shape, ranks)
        batch, objective = WORKS["gspo"].batch(inputs), WORKS["gspo"].objective(inputs)
        spread = hl.Segments.from_ids(inputs.ids, count=len(inputs.lengths), group=ranks.group)
        over = hl.Batch(batch.targets, spread, **batch.fields)  # type: ignore[arg-type]
    options = hl.Options(metrics=False, schedule="recompute")  # The options of a call on one rank.
    head = hl.Head(inputs.weight)
    row = {"work": "segments", "objective": "gspo"} | dict(zip("THV", shape, strict=True))
    step = loss_step(inputs.hidden, head, batch, objective, options)
    row["alone"] = clock.here(step, "segments", shape, "gspo")
    step = loss_step(inputs.hidden, head, over, objective, options)
    with ranks.step(f"segments {shape} gspo, {ranks.size} ranks"):
        return [row | clock.everywhere(step, shape[0])]


def sharded_data(clock: Clock, sizes: Sizes) -> list[Row]:
    """Time FSDP2 with a trainable tied head, compared with an equal model on one rank."""
    ranks, shape = clock.ranks, sizes.per_rank
    with ranks.step(f"inputs {shape}"):
        inputs = sizes.inputs(shape, ranks)
        batch, objective = WORKS["gspo"].batch(inputs), WORKS["gspo"].objective(inputs)
        batch.fields["old_logps"] = hl.CURRENT  # log-probs of this model's hidden states
        alone, model = Tied(inputs.weight), Tied(inputs.weight)
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        fully_shard(model, mesh=mesh)

    def step_of(model: Any) -> Step:
        def step() -> None:
            model(batch, objective, hl.Options(metrics=False)).backward()
            for parameter in model.parameters():
                parameter.grad = None

        return step

    row = {"work": "fsdp", "objective": "gspo"} | dict(zip("THV", shape, strict=True))
    row["alone"] = clock.here(step_of(alone), "fsdp", shape, "gspo")
    batch.totals = hl.Totals.of(batch).all_reduce(mesh.get_group(), gradients="mean")
    with ranks.step(f"fsdp {shape} gspo, {ranks.size} ranks"):
        return [row | clock.everywhere(step_of(model), shape[0])]


def measure(ranks: Ranks, sizes: Sizes, kinds: list[str], repeats: int) -> Iterator[list[Row]]:
    """For each kind of measurement that was asked for, yield a list of result rows, until the time
    limit."""
    clock = Clock(ranks=ranks, repeats=repeats, timelines="timeline" in kinds)
    works: list[Callable[[], list[Row]]] = []
    for kind in [k for k in KINDS[:2] if k in kinds]:
        for shape in sizes.shapes:
            works.append(lambda s=shape, k=kind: vocabulary_parallel(clock, sizes, s, k))
    for kind, work in (("peers", peers), ("grid", grid)):
        for shape in sizes.shapes if kind in kinds else ():
            works.append(lambda s=shape, w=work: w(clock, sizes, s))
    works += [lambda: segments_parallel(clock, sizes)] * ("segments" in kinds)
    works += [lambda: sharded_data(clock, sizes)] * ("fsdp" in kinds)
    for work in works:
        if ranks.is_late():
            ranks.say("the time is up: the rest is left out")
            break
        yield work()
        if ranks.on_gpu:
            torch.cuda.empty_cache()


# ---------------------------------------------------------------------- results


def efficiency(row: Row, ranks: int, key: str = "ms") -> float:
    """Return the ideal time over the measured time. The ideal time is the time on one rank, divided
    by the number of parts into which the run cuts the vocabulary and the tokens. In runs in which
    each rank has its own batch, the ideal time is the whole time on one rank."""
    shares = {"vocabulary": ranks, "grid": ranks, "slice of 8": SLICES}
    return row["alone"][key] / shares.get(row["work"].partition(",")[0], 1) / row[key]


def merged(results: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge the results of two benchmark runs: for each number of ranks, rows of `other` replace
    the rows of `results` for the same measurement."""
    found = dict(results)
    for ranks, new in other.items():
        old = found.get(ranks, {"rows": [], "checks": {}})
        rows = {tuple(r[k] for k in KEYS): r for r in [*old["rows"], *new["rows"]]}
        checks = {**old["checks"], **new["checks"]}
        found[ranks] = {**old, **new, "checks": checks, "rows": [rows[k] for k in sorted(rows)]}
    return {ranks: found[ranks] for ranks in sorted(found, key=int)}


KEYS = ("work", "objective", "T", "H", "V")
HEAD = (*KEYS, "ranks", "one rank, ms", "ms", "efficiency", "in a row, ms", "efficiency in a row")
HEAD = (*HEAD, "slice by itself", "kB sent per token", "collectives", "in collectives")
HEAD = (*HEAD, "exposed", "idle", "peak, MiB", "commit")


DETAILS = ("slice by itself", "kB sent per token", "collectives", "in collectives", "exposed")
DETAILS = (*DETAILS, "idle", "peak, MiB")


def table(results: dict[str, Any], left_out: Sequence[str] = ()) -> str:
    """Return results as Markdown, without the columns `left_out`."""
    rows = [(row, int(n)) for n, found in results.items() for row in found["rows"]]
    shown = [name not in left_out for name in HEAD]
    columns = list(itertools.compress(HEAD, shown))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row, ranks in sorted(rows, key=lambda r: ([r[0][k] for k in KEYS], r[1])):
        share = row.get("share", {})
        cells = [str(row[k]) for k in KEYS] + [str(ranks)]
        cells += [f"{row['alone']['ms']:.1f}"]
        for key in ("ms", "ms_in_a_row"):
            found = [f"{row[key]:.1f}", f"{efficiency(row, ranks, key):.2f}"] if key in row else []
            cells += found or ["", ""]
        cells.append(f"{row['slice']['ms_in_a_row']:.1f}" if "slice" in row else "")
        sent = (row["bytes_per_token"] / 1e3, row["collectives_per_call"])
        cells += ["", ""] if row["work"] == "fsdp" else [f"{sent[0]:.2f}", f"{sent[1]:.0f}"]
        cells += [f"{share[k]:.1%}" if share else "" for k in ("collectives", "exposed", "idle")]
        cells.append(f"{row['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in row else "")
        cells.append(row.get("commit", ""))
        lines.append("| " + " | ".join(itertools.compress(cells, shown)) + " |")
    for ranks, found in results.items():
        bad = [name for name, one in found["checks"].items() if not one["ok"]]
        said = f"failed: {', '.join(bad)}" if bad else "all within the error budget"
        lines.append(f"\n{ranks} ranks, {found['machine']}: {len(found['checks'])} checks, {said}.")
    return "\n".join(lines) + "\n"


def save(results: dict[str, Any], path: Path) -> dict[str, Any]:
    """Merge results into a file, and write the table next to the file."""
    old = json.loads(path.read_text()) if path.exists() else {}
    results = merged(old, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(results))
    return results


def race_versions(ranks: Ranks, sizes: Sizes, chosen: argparse.Namespace) -> int:
    """Compare two versions for the option `--against`; write result rows in the format of rails.py,
    and return 1 if the new version is slower in a row."""
    before = against.load(chosen.against)
    shapes = sizes.shapes if chosen.shapes or chosen.quick else SHAPES
    rows = [row for s in shapes for row in versions(ranks, sizes, s, before, chosen.repeats)]
    if ranks.rank == 0:
        for row in rows:
            print(row, flush=True)
        if chosen.out:
            chosen.out.write_text(json.dumps(rows, indent=1) + "\n")
    ranks.close()
    return int(any(row["verdict"] == "SLOWER" for row in rows))


def _shape(text: str) -> tuple[int, int, int]:
    try:
        tokens, width, vocabulary = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, want TOKENSxWIDTHxVOCABULARY") from None
    return tokens, width, vocabulary


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="file to merge results into")
    parser.add_argument("--merge", type=Path, nargs="+", help="add these files; measure nothing")
    parser.add_argument("--check", action="store_true", help="checks alone")
    parser.add_argument("--no-check", action="store_true", help="times alone")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shapes", nargs="+", type=_shape, help="16384x4096x128256 ...")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", default="", help="of the tree")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds; no work begins later")
    parser.add_argument("--quick", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--against", type=Path, metavar="OLD", help="race two versions")
    chosen = parser.parse_args(arguments)
    if chosen.merge:
        results: dict[str, Any] = {}
        for path in chosen.merge:
            results = merged(results, json.loads(path.read_text()))
        print(table(save(results, chosen.out) if chosen.out else results))
        return 0
    ranks = Ranks(chosen.quick, chosen.limit)
    sizes = QUICK if chosen.quick else Sizes()
    if chosen.shapes:
        sizes = Sizes(**{**vars(sizes), "shapes": tuple(chosen.shapes)})
    if chosen.against:
        return race_versions(ranks, sizes, chosen)
    checks = {} if chosen.no_check else check(ranks)
    bad = [name for name, found in checks.items() if not found["ok"]]
    machine = torch.cuda.get_device_name() if ranks.on_gpu else "CPU"
    found = {"machine": f"{machine}, torch {torch.__version__}", "checks": checks, "rows": []}
    results = {str(ranks.size): found}
    works = [] if bad or chosen.check else measure(ranks, sizes, chosen.only, chosen.repeats)
    for rows in itertools.chain([[]], works):  # the file is written after each step
        found["rows"] += [row | {"commit": chosen.commit} for row in rows]
        if ranks.rank == 0 and chosen.out:
            save(results, chosen.out)
    if ranks.rank == 0:
        print(table(results), flush=True)
    ranks.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
