"""Speed of several ways to sum the hidden gradient over ranks in parallel with matrix products.

Page: benchmarks/NOTES.md.

    torchrun --nproc-per-node 4 benchmarks/studies/parallel_products.py --slice 16032

The study times several ways to compute dX and dW from a given logit gradient, on ranks that hold
slices of one vocabulary. Each variant computes dW, and dX [T, H], which is summed over the ranks
and rounded. The study prints the slowest rank's milliseconds of back-to-back calls, as medians of
alternating turns. `--copies` adds a variant that copies dX into the memory of other ranks, which
needs GPUs with peer access.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from ranks import Ranks
from torch import distributed

# Pause in GPU clock cycles before the weight-gradient product, as in headloss's own calls.
PAUSE = 20_000
IN_A_ROW = 4


class Products:
    """The operands of one rank, and the matrix products that compute its dX and dW.

    T tokens, H hidden width, V rows of the slice.
    """

    def __init__(self, ranks: Ranks, tokens: int, width: int, rows: int) -> None:
        self.ranks, self.world = ranks, ranks.size
        kind = torch.bfloat16 if ranks.on_gpu else torch.float32
        like: dict[str, Any] = {"device": ranks.device, "dtype": kind}
        self.terms = torch.randn(tokens, rows, **like)
        self.weight, self.x = torch.randn(rows, width, **like), torch.randn(tokens, width, **like)
        self.dw = torch.empty(rows, width, **like)
        self.dx = torch.empty(tokens, width, device=ranks.device)
        self.rounded = torch.empty(tokens, width, device=ranks.device, dtype=torch.bfloat16)
        self.aside = torch.cuda.Stream(priority=-1) if ranks.on_gpu else None

    def input_gradient(self, part: slice) -> None:
        given = self.terms[part], self.weight
        if self.ranks.on_gpu:
            torch.ops.aten.mm.dtype_out(*given, torch.float32, out=self.dx[part])
        else:
            torch.mm(*given, out=self.dx[part])

    def weight_gradient(self, parts: int) -> None:
        pairs = zip(self.dw.chunk(parts), self.terms.chunk(parts, 1), strict=True)
        for i, (into, terms) in enumerate(pairs):
            if i:
                self.pause()
            torch.mm(terms.t(), self.x, out=into)

    def pause(self) -> None:
        """Pause the CUDA stream for a moment, so that the collective starts first; otherwise the
        next matrix product would occupy every multiprocessor."""
        if self.ranks.on_gpu:
            torch.cuda._sleep(PAUSE)

    def beside(self) -> Any:
        """Return a context that queues operations (the rounding of dX) on a second CUDA stream."""
        return torch.cuda.stream(self.aside) if self.aside else contextlib.nullcontext()

    def whole(self, part: slice, group: Any) -> Callable[[], None]:
        """Sum dX over ranks by one all-reduce; each rank rounds all rows of dX."""
        work = distributed.all_reduce(self.dx[part], group=group, async_op=True)

        def end() -> None:
            work.wait()
            self.rounded[part].copy_(self.dx[part])

        return end

    def scattered(self, part: slice, group: Any) -> Callable[[], None]:
        """Sum dX over ranks by a reduce-scatter; each rank rounds its rows, and an all-gather
        distributes the rounded rows."""
        rows = self.dx[part]
        own = rows.new_empty(len(rows) // self.world, rows.shape[1])
        narrow = torch.empty_like(own, dtype=torch.bfloat16)
        work = distributed.reduce_scatter_tensor(own, rows, group=group, async_op=True)
        with self.beside():
            work.wait()
            narrow.copy_(own)
            into = self.rounded[part]
            done = distributed.all_gather_into_tensor(into, narrow, group=group, async_op=True)

        def end(kept: Any = (own, narrow)) -> None:  # keeps the buffers alive
            done.wait()

        return end


def call(products: Products, start: Any, group: Any, parts: int, of_dw: int) -> Callable[[], None]:
    """Make a function that computes dX for `parts` blocks of tokens, starts the sum over ranks
    after each block, and computes dW in `of_dw` blocks of vocabulary rows."""
    step = len(products.dx) // parts

    def run() -> None:
        ends = []
        for at in range(0, len(products.dx), step):
            part = slice(at, at + step)
            products.input_gradient(part)
            if start is not None:
                ends.append(start(part, group))
                products.pause()
        products.weight_gradient(of_dw)
        for end in ends:
            end()

    return run


class Copies:
    """Sum by copies between the memories of ranks, on copy engines in place of multiprocessors."""

    def __init__(self, products: Products) -> None:
        import torch.distributed._symmetric_memory as symmetric

        variables = "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"
        if [os.environ.get(name) for name in variables] != ["1", "0"]:
            raise SystemExit(f"copies: want {variables[0]}=1 and {variables[1]}=0")
        self.products, (tokens, width) = products, products.dx.shape
        me, world = products.ranks.rank, products.world
        group, device, own = distributed.group.WORLD, products.ranks.device, tokens // world
        terms = symmetric.empty(tokens * width, dtype=torch.float32, device=device)
        sums = symmetric.empty(tokens * width, dtype=torch.bfloat16, device=device)
        self.handles = [symmetric.rendezvous(t, group) for t in (terms, sums)]
        self.terms, self.sums = terms.view(world, own, width), sums.view(world, own, width)
        shape, size = (own, width), own * width
        others = [(me + i) % world for i in range(1, world)]
        self.their_terms, self.their_sums = (
            {r: handle.get_buffer(r, shape, t.dtype, size * me) for r in others}
            for handle, t in zip(self.handles, (terms, sums), strict=True)
        )
        self.me, self.others = me, others
        self.streams = [torch.cuda.Stream(priority=-1) for _ in others]

    def start(self, part: slice, group: Any) -> Callable[[], None]:
        products, aside = self.products, self.products.aside
        assert aside is not None and part.stop - part.start == len(products.dx)
        rows = products.dx.view_as(self.terms)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.handles[0].barrier(channel=0)
            self.send(lambda rank: self.their_terms[rank].copy_(rows[rank]))
            self.terms[self.me].copy_(rows[self.me])
            self.handles[0].barrier(channel=1)
            own = self.sums[self.me]
            own.copy_(self.terms.sum(0))
            self.send(lambda rank: self.their_sums[rank].copy_(own))
            self.handles[1].barrier(channel=0)

        def end() -> None:
            torch.cuda.current_stream().wait_stream(aside)
            products.rounded.copy_(self.sums.view_as(products.rounded))

        return end

    def send(self, act: Callable[[int], Any]) -> None:
        """Call `act(rank)`, which copies memory to that rank, for every other rank, each call on a
        CUDA stream of its own."""
        aside = torch.cuda.current_stream()
        for rank, stream in zip(self.others, self.streams, strict=True):
            stream.wait_stream(aside)
            with torch.cuda.stream(stream):
                act(rank)
        for stream in self.streams:
            aside.wait_stream(stream)


def ways(products: Products, copies: bool) -> dict[str, Callable[[], None]]:
    """Return the timed ways to compute dX and dW, by name: "all-reduce, dX 2, dW 1" sums dX over
    ranks by all-reduces, with dX computed in 2 blocks and dW in 1 block."""
    group, first = distributed.group.WORLD, distributed.group.WORLD
    if products.ranks.on_gpu:
        options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        first = distributed.new_group(pg_options=options)
    found = {f"no sum, dX {n}, dW {m}": (None, group, n, m) for n, m in ((1, 1), (2, 1), (1, 2))}
    for name, start in (("all-reduce", products.whole), ("scattered", products.scattered)):
        for parts, of_dw in itertools.product((1, 2), (1, 2)):
            found[f"{name}, dX {parts}, dW {of_dw}"] = (start, group, parts, of_dw)
        for parts in (1, 2):
            found[f"{name} with priority, dX {parts}, dW 1"] = (start, first, parts, 1)
    found["scattered, dX 1, dW 4"] = (products.scattered, group, 1, 4)
    if copies:
        found = {name: way for name, way in found.items() if way[2:] == (1, 1)}
        found["copies, dX 1, dW 1"] = (Copies(products).start, group, 1, 1)
    return {name: call(products, *way) for name, way in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--slice", type=int, default=16032, help="rows of the weight on a rank")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--copies", action="store_true", help="into the other ranks' memory too")
    parser.add_argument("--quick", action="store_true", help="tiny, on the CPU")
    chosen = parser.parse_args()
    sizes = (32, 16, 24) if chosen.quick else (chosen.tokens, chosen.width, chosen.slice)
    ranks = Ranks(chosen.quick)
    products = Products(ranks, *sizes)
    acts, truth = ways(products, chosen.copies), None
    times: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(chosen.turns + 1):
        for name, act in acts.items():
            ranks.wait()
            ms = ranks.milliseconds(act, 1, warm=0, in_a_row=IN_A_ROW)[0]
            times[name] += [ranks.most(ms)] if turn else []
            if turn or name.startswith("no sum"):
                continue
            truth = products.rounded.float() if truth is None else truth
            apart = float((products.rounded.float() - truth).norm() / truth.norm())
            if apart > 1e-2:
                ranks.say(f"{name}: another sum, off by {apart:.1e}")
            products.rounded.fill_(float("nan"))
    if ranks.rank == 0:
        print(f"{ranks.size} ranks, T H V {sizes}, ms in a row: median, least")
        for name, found in times.items():
            print(f"   {name:44} {statistics.median(found):7.3f} {min(found):7.3f}", flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
