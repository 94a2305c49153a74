"""Speed of the logits product by three kernels: the vendor's, a plain Triton kernel with statistics
in its epilogue, and a kernel whose epilogue overlaps with the next tile's product.

Page: benchmarks/NOTES.md.

    python benchmarks/studies/products.py --output products.json

n tokens of a block, H hidden width, V vocabulary; bfloat16; medians of alternating calls, in ms.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import run
import torch
import triton
from measure import Stretch
from torch import Tensor

from headloss.kernels import triton as acts
from headloss.kernels.interface import Backward, ExpTile, Forward
from headloss.kernels.transform import Transform
from headloss.kernels.triton import product
from headloss.statistics.softmax import SoftmaxCoefficients

SHAPES = ((8192, 4096, 128256), (8192, 2048, 151936))
SCORES = frozenset({"logp", "lse", "entropy"})
Call = Callable[[], object]


@contextlib.contextmanager
def overlapping(wanted: bool) -> Iterator[None]:
    """Make headloss use, or not use, the Hopper kernel whose epilogue overlaps the next tile's
    product."""
    before = product.overlaps
    try:
        product.overlaps = lambda device: wanted
        yield
    finally:
        product.overlaps = before


def calls(x: Tensor, w: Tensor, targets: Tensor) -> Iterator[tuple[str, Call]]:
    n, v = len(x), len(w)
    rows = torch.linspace(0.5, 2.0, n, device=x.device)
    ones = torch.ones(n, device=x.device)
    for name, transform in (
        ("plain", Transform()),
        ("temperatures of tokens", Transform(temperature=rows)),
        ("soft cap", Transform(softcap=30.0)),
        ("bias", Transform(bias=torch.randn(v, device=x.device).bfloat16())),
    ):
        forward = Forward(targets, 0, transform, SCORES)
        held = ExpTile.empty(len(x), v, x)
        yield f"terms, {name}", lambda f=forward, h=held: acts.product_statistics(x, w, f, v, h)
        yield f"no terms, {name}", lambda f=forward: acts.product_statistics(x, w, f, v)
        stats, normalizer = acts.product_statistics(x, w, forward, v)
        for which, more in (("log-prob", {}), ("log-prob and entropy", {"entropy": ones})):
            c = SoftmaxCoefficients(target=ones, prob=-ones, **more)
            given = Backward(targets, 0, transform, normalizer, c, stats.logp)
            yield f"slab of {which}, {name}", lambda g=given: acts.product_gradient(x, w, g)


def race(call: Call, vendor: Call, repeats: int, device: torch.device) -> dict[str, float]:
    found: dict[str, list[Stretch]] = {"vendor": [], "plain": [], "overlapping": []}
    for turn in range(repeats + 1):
        for name, stretches in found.items():
            with overlapping(name == "overlapping"), Stretch(device) as stretch:
                vendor() if name == "vendor" else call()
            stretches.append(stretch)
        torch.cuda.synchronize(device)
        if not turn:
            for stretches in found.values():
                stretches.clear()  # Drop the first turn's times, which include compilation.
    return {name: statistics.median(s.ms for s in stretches) for name, stretches in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=14)
    arguments = parser.parse_args()
    device, rows = torch.device("cuda", 0), []
    print(f"triton {triton.__version__}; ms: vendor, plain, overlapping (of the plain one)")
    for n, h, v in SHAPES:
        x = torch.randn(n, h, device=device).bfloat16()
        w = (torch.randn(v, h, device=device) / h**0.5).bfloat16()
        z = torch.empty(n, v, dtype=torch.bfloat16, device=device)
        targets = torch.randint(v, (n,), device=device)
        for name, call in calls(x, w, targets):
            vendor = functools.partial(torch.mm, x, w.t(), out=z)
            ms = race(call, vendor, arguments.repeats, device)
            rows.append({"n": n, "h": h, "v": v, "call": name, "triton": triton.__version__} | ms)
            share = ms["overlapping"] / ms["plain"]
            figures = " ".join(f"{value:6.2f}" for value in ms.values())
            print(f"n={n} H={h} V={v} {name:40s} {figures} ({share:.2f})", flush=True)
    if arguments.output is not None:
        content = {"run": run.about(device, None), "rows": rows}
        run.write(arguments.output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
