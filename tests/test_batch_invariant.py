"""The same bits in any batch: a token's statistics are a function of its hidden state and the head.

n tokens, H hidden width, V vocabulary. Without a GPU the kernels run in the interpreter, at small
sizes; the sweep over sizes and whole calls is for a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE  # first: it asks for the interpreter

import headloss as hl
from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import Forward, Held, Measured
from headloss.kernels.transform import Transform
from headloss.testing import trained_looking

# The interpreter multiplies the bits of bf16 operands as integers: they are for the GPU.
SIXTEEN = torch.bfloat16 if DEVICE == "cuda" else torch.float16
STATISTICS = frozenset({"logp", "lse", "entropy"})
MOST, H, V = 33, 40, 280
SIZES = (1, 2, 7, 16)
ALL = 300 if DEVICE == "cuda" else 140
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter takes hours")


def inputs(n: int, h: int, v: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets = trained_looking(n, h, v, SIXTEEN, DEVICE)
    hidden[5] *= -4  # its target is far below the largest logit
    return hidden, weight, targets


def measure(
    x: Tensor, w: Tensor, targets: Tensor, needs: frozenset[str] = STATISTICS, keep: bool = False
) -> Measured:
    """Of tensors of their own, wherever the rows came from."""
    held = Held.empty(x, len(w)) if keep else None
    transform = Transform(scale=0.7, temperature=torch.full((len(x),), 0.9, device=DEVICE))
    forward = Forward(targets, 0, transform, needs)
    return triton_backend.product_statistics(x, w, forward, len(w), held)


def assert_same(found: Measured, whole: Measured, rows: Any) -> None:
    theirs = whole.stats.tensors()
    for name, value in found.stats.tensors().items():
        assert torch.equal(value, theirs[name][rows]), name
    for mine, other in zip(found.normalizer, whole.normalizer, strict=True):
        assert torch.equal(mine, other[rows])


def test_any_number_of_tokens_and_any_place() -> None:
    x, w, targets = inputs(MOST, H, V)
    whole = measure(x, w, targets)
    assert len(whole.stats.logp.unique()) > MOST // 2
    for n in SIZES:
        assert_same(measure(x[:n], w, targets[:n]), whole, slice(n))
        assert_same(measure(x[-n:], w, targets[-n:]), whole, slice(MOST - n, MOST))
    order = torch.randperm(MOST, device=DEVICE)
    assert_same(measure(x[order], w, targets[order]), whole, order)


@pytest.mark.slow
def test_every_number_of_tokens() -> None:
    x, w, targets = inputs(ALL, H, V)
    whole = measure(x, w, targets)
    for n in range(1, ALL + 1):
        first = n * 7 % (ALL - n + 1)  # also where the rows' targets are not aligned
        rows = slice(first, first + n)
        assert_same(measure(x[rows], w, targets[rows]), whole, rows)


@pytest.mark.parametrize("more", ["top1", "mean_logit"])
def test_whatever_else_is_asked_for_and_held(more: str) -> None:
    """A training pass keeps terms and measures more than a pass that scores."""
    x, w, targets = inputs(9, H, V)
    alone = measure(x, w, targets)
    assert_same(measure(x, w, targets, keep=True), alone, slice(None))
    found = measure(x, w, targets, STATISTICS | {more}, keep=True).stats.tensors()
    for name, value in alone.stats.tensors().items():
        assert torch.equal(found[name], value), name


# ---------------------------------------------------------------------- whole calls on a GPU

SWEEP = (*range(1, 34), 63, 64, 65, 127, 128, 129, 255, 257, 1000, 2049, 4095, 4096, 4097, 8191)


def of_call(
    hidden: Tensor, head: hl.Head, targets: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Statistics of a training pass."""
    leaf = hidden.clone().requires_grad_()
    out = hl.head_loss(leaf, head, hl.Batch(targets), hl.cross_entropy(), hl.Options(**options))
    out.loss.backward()
    assert out.entropies is not None
    return {"logp": out.logps, "entropy": out.entropies}


@ON_GPU
@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_sweep_of_sizes_permutations_and_schedules(softcap: float | None) -> None:
    n, h, v = 8192, 1024, 32000
    hidden, weight, targets = inputs(n, h, v)
    head = hl.Head(weight.requires_grad_(), softcap=softcap)
    with torch.no_grad():
        whole = hl.head_stats(hidden, head, targets)._asdict()
        for size in SWEEP:
            for first in {0, 1, n - size}:
                rows = slice(first, first + size)
                found = hl.head_stats(hidden[rows], head, targets[rows])
                for name, value in found._asdict().items():
                    assert torch.equal(value, whole[name][rows]), (name, size, first)
        for seed in range(3):
            order = torch.randperm(n, device=DEVICE)
            found = hl.head_stats(hidden[order], head, targets[order])
            for name, value in found._asdict().items():
                assert torch.equal(value, whole[name][order]), (name, seed)
    for options in (
        {"schedule": "one_pass"},
        {"schedule": "one_pass", "chunk_tokens": 1001},
        {"schedule": "recompute"},
        {"schedule": "recompute", "chunk_tokens": 700},
        {"schedule": "held"},
    ):
        for name, value in of_call(hidden, head, targets, **options).items():
            assert torch.equal(value, whole[name]), (name, options)
