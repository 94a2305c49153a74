"""CPU time that `head_loss` needs before it launches its first large matrix product.

Page: benchmarks/NOTES.md.

    python3 benchmarks/studies/start.py
    torchrun --nproc-per-node 2 benchmarks/studies/start.py

Each call of `head_loss` begins on an idle GPU and is stopped at the launch of its first matrix
product. The program prints three CPU times of a call in microseconds, as medians over many calls:
from the start of the call to its first read of a device tensor, the wait of that read, and from the
read to the launch of the first matrix product. The program also counts the tensor operations,
except views, that a call makes before and after its first read of a device tensor. Under `torchrun`
the head is a slice of the vocabulary, and rank 0 reports. `--tiny` uses a size for a CPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode
from works import WORKS, Setting, make_inputs

import headloss as hl
from headloss.head import products
from headloss.kernels.triton import product as triton_product

SIZES = Setting(tokens=16384, width=4096, vocabulary=32768)
TINY = Setting(tokens=64, width=16, vocabulary=96, dtype=torch.float32, segments=16)
CALLS = 200
ROW = "{:34s} {:>10} {:>8} {:>12} {:>10} {:>10}"


class Started(Exception):
    """Raised when a call launches its first matrix product."""


class Marks(TorchDispatchMode):
    """Times of three events of one call, with the number of tensor operations before each event:
    the first read of a device tensor begins, the read ends, and the call launches its first matrix
    product."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.operations: list[int] = []
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = [r.alias_info for r in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        self.count += not view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))

    def mark(self) -> None:
        self.times.append(time.perf_counter())
        self.operations.append(self.count)


@contextmanager
def watched(marks: Marks):
    """Patch `Tensor.tolist` and the logits product to record times in `marks`. The patched logits
    product ends the call by raising the exception `Started`."""
    plain, read = products.PLAIN.logits, torch.Tensor.tolist
    product = triton_product.statistics_of

    def reading(tensor):
        first = len(marks.times) < 2
        if first:
            marks.mark()
        found = read(tensor)
        if first:
            marks.mark()
        return found

    def launched(launch):
        def run(*args, **kwargs):
            launch(*args, **kwargs)
            marks.mark()
            raise Started

        return run

    torch.Tensor.tolist = reading
    products.PLAIN.logits, triton_product.statistics_of = launched(plain), launched(product)
    try:
        yield
    finally:
        torch.Tensor.tolist = read
        products.PLAIN.logits, triton_product.statistics_of = plain, product


def one(call, counted: bool, sync) -> Marks:
    """Run `call` until it launches its first matrix product, and return the times and counts of
    this run."""
    marks = Marks()
    sync()
    with watched(marks):
        begin = time.perf_counter()
        try:
            if counted:
                with marks:
                    call()
            else:
                call()
        except Started:
            pass
    sync()
    if len(marks.times) == 1:  # the call read nothing
        marks.times, marks.operations = marks.times * 3, [0, *marks.operations * 2]
        marks.times[:2] = [begin, begin]
    marks.times = [begin, *marks.times]
    return marks


def row(name: str, call, sync) -> str:
    """Time a call many times, and return a line of the printed table."""
    for _ in range(5):
        one(call, False, sync)
    parts: list[list[float]] = [[], [], []]
    for _ in range(CALLS):
        times = one(call, False, sync).times
        for part, a, b in zip(parts, times, times[1:], strict=False):
            part.append(1e6 * (b - a))
    before, _, after = one(call, True, sync).operations
    figures = [f"{statistics.median(part):.0f}" for part in parts]
    return ROW.format(name, *figures, before, after - before)


def main(tiny: bool) -> None:
    on_gpu = torch.cuda.is_available() and not tiny
    rank, group = int(os.environ.get("RANK", 0)), None
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if on_gpu else "gloo")
        group = distributed.group.WORLD
    setting = SIZES if on_gpu else TINY
    inputs = make_inputs(setting, device)
    padded = replace(inputs, targets=inputs.targets.clone())
    padded.targets[::7] = -100
    weight = inputs.weight
    if group is not None:
        size = distributed.get_world_size(group)
        weight = weight.detach().tensor_split(size)[rank].clone().requires_grad_()
    if rank == 0:
        print(ROW.format("", "to read", "read", "to product", "ops", "ops after"))
    for work in ("ce", "grpo"):
        objective = WORKS[work].objective(inputs)
        for name, given, options in (
            ("", inputs, hl.Options()),
            (", some unscored", padded, hl.Options()),
            (", static", inputs, hl.Options(static=True)),
        ):
            batch = WORKS[work].batch(given)

            def call(given=given, batch=batch, objective=objective, options=options) -> None:
                head = hl.Head(weight, vocab_group=group)
                hl.head_loss(given.hidden, head, batch, objective, options)

            line = row(work + name, call, torch.cuda.synchronize if on_gpu else lambda: None)
            if rank == 0:
                print(line, flush=True)
    if group is not None:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main("--tiny" in sys.argv)
