"""The cost of `Options(batch_invariant=True)`, and a check of the invariance.

Page: docs/concepts.md.

    python benchmarks/studies/invariance.py --output invariance.json     # on one GPU, two minutes
    python benchmarks/studies/invariance.py --quick                      # in Triton's interpreter

For each kind of head the study times cross-entropy, forward and backward, with and without
`batch_invariant=True`, in alternating calls. The study also compares a batch of N tokens with
smaller batches (N - 1, 4097, 129, 7, 1 tokens), and counts the tokens whose log-prob, entropy or
row of the hidden gradient differs in any bit. The exit code is 1 if any token's bits change with
the batch under `batch_invariant=True`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # modules shared with the benchmarks

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from measure import Stretch, synchronize
from report import invariance as table
from run import about, write
from torch import Tensor

import headloss as hl
from headloss.testing import trained_looking

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIXTEEN = torch.bfloat16 if DEVICE == "cuda" else torch.float16
KINDS = ("bfloat16", "bias", "adapter", "float16", "float32")
SIZES, QUICK = (8192, 4096, 128256), (20, 24, 90)
SOME = (4097, 129, 7, 1)


def inputs(kind: str, sizes: tuple[int, int, int]) -> tuple[Tensor, hl.Head, Tensor]:
    dtype = {"float16": torch.float16, "float32": torch.float32}.get(kind, SIXTEEN)
    hidden, weight, targets = trained_looking(*sizes, dtype, DEVICE)
    _, width, vocabulary = sizes
    more: dict[str, Any] = {}
    if kind == "bias":
        more["bias"] = torch.randn(vocabulary, device=DEVICE, dtype=dtype).requires_grad_()
    if kind == "adapter":
        a, b = torch.randn(16, width, device=DEVICE), torch.randn(vocabulary, 16, device=DEVICE)
        factors = {"a": (width**-0.5 * a).requires_grad_(), "b": (0.1 * b).requires_grad_()}
        more["lora"] = (hl.Lora(**factors, scaling=0.5),)
    return hidden, hl.Head(weight.requires_grad_(), **more), targets


def step(hidden: Tensor, head: hl.Head, targets: Tensor, invariant: bool) -> tuple[Tensor, ...]:
    """Return log-probs, entropies and the hidden gradient, with equal coefficients in any batch."""
    leaf = hidden.detach().requires_grad_()
    head.weight.grad = None
    batch = hl.Batch(targets, totals=hl.Totals(1, 1))
    options = hl.Options(backend="triton", batch_invariant=invariant)
    out = hl.head_loss(leaf, head, batch, hl.cross_entropy(), options)
    out.loss.backward()
    assert out.entropies is not None and leaf.grad is not None
    return out.logps, out.entropies, leaf.grad


def differ(kind: str, sizes: tuple[int, int, int], invariant: bool) -> dict[str, int]:
    """For log-probs, entropies and hidden gradients, count the tokens whose bits change in a
    smaller batch."""
    hidden, head, targets = inputs(kind, sizes)
    whole = step(hidden, head, targets, invariant)
    counts = dict.fromkeys(("logp", "entropy", "hidden gradient"), 0)
    for n in (sizes[0] - 1, *(n for n in SOME if n < sizes[0])):
        for first in {0, sizes[0] - n}:
            rows = slice(first, first + n)
            found = step(hidden[rows], head, targets[rows], invariant)
            for name, value, other in zip(counts, found, whole, strict=True):
                same = (value == other[rows]).view(n, -1).all(1)
                counts[name] += int((~same).sum())
    return counts


def times(kind: str, sizes: tuple[int, int, int], rounds: int) -> list[float]:
    """Return the median milliseconds of a call without and with `batch_invariant=True`."""
    given = inputs(kind, sizes)
    found: list[list[Stretch]] = [[], []]
    for round_ in range(rounds + 2):
        for invariant in (False, True):
            stretch = Stretch(torch.device(DEVICE))
            with stretch:
                step(*given, invariant)
            if round_ > 1:
                found[invariant].append(stretch)
    synchronize(torch.device(DEVICE))
    return [statistics.median(s.ms for s in each) for each in found]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--output", type=Path, help="JSON to write")
    parser.add_argument("--commit", help="of the tree, where git cannot say")
    given = parser.parse_args(argv)
    quick = given.quick or DEVICE == "cpu"
    rows = []
    for kind in given.kinds:
        sizes = QUICK if quick else SIZES
        # Float32 matrix products run at a twelfth of the speed of bfloat16 products.
        if kind == "float32" and not quick:
            sizes = (2048, *SIZES[1:])
        without, with_ = times(kind, sizes, 1 if quick else given.rounds)
        row = {"kind": kind, "sizes": sizes, "ms": [without, with_]}
        rows.append(row | {"differ": [differ(kind, sizes, i) for i in (False, True)]})
    print(table(rows))
    print("Tokens whose bits differ: of log-probs/entropies/rows of the hidden gradient.")
    if given.output:
        found = {"about": about(torch.device(DEVICE), given.commit), "rows": rows}
        write(given.output, json.dumps(found) + "\n")
    return int(any(sum(row["differ"][1].values()) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
