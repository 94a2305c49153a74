"""A token's statistics have identical bits in any batch: only its hidden state and the head matter.

n tokens, H hidden width, V vocabulary. Without a GPU the kernels run in Triton's interpreter at
small sizes; tests over many sizes and of whole calls need a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE  # import this first: it turns on Triton's interpreter

import headloss as hl
from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import ExpTile, Forward, Measured
from headloss.kernels.transform import Transform
from headloss.testing import error, plain, trained_looking

# The interpreter multiplies the bits of bf16 operands as integers, so bf16 needs a GPU.
SIXTEEN = torch.bfloat16 if DEVICE == "cuda" else torch.float16
STATISTICS = frozenset({"logp", "lse", "entropy"})
MOST, H, V = 33, 40, 280
SIZES = (1, 2, 7, 16)
ALL = 300 if DEVICE == "cuda" else 140
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter takes hours")


def inputs(n: int, h: int, v: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets = trained_looking(n, h, v, SIXTEEN, DEVICE)
    hidden[5] *= -4  # now the target's logit lies far below the largest
    return hidden, weight, targets


def measure(
    x: Tensor, w: Tensor, targets: Tensor, needs: frozenset[str] = STATISTICS, keep: bool = False
) -> Measured:
    """Return the softmax statistics of the logits x @ w.T, computed by the Triton backend."""
    held = ExpTile.empty(len(x), len(w), x) if keep else None
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
        first = n * 7 % (ALL - n + 1)  # includes unaligned targets
        rows = slice(first, first + n)
        assert_same(measure(x[rows], w, targets[rows]), whole, rows)


@pytest.mark.parametrize("more", ["top1", "mean_logit"])
def test_whatever_else_is_asked_for_and_held(more: str) -> None:
    """A token's statistics have the same bits in training, where exp(z) is stored and more
    statistics are computed, as in scoring."""
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
    """Return the statistics that a training call computes."""
    leaf = hidden.clone().requires_grad_()
    out = hl.head_loss(leaf, head, hl.Batch(targets), hl.cross_entropy(), hl.Options(**options))
    out.loss.backward()
    assert out.entropies is not None
    return {"logp": out.logps, "entropy": out.entropies}


def of_stats(stats: hl.HeadStats) -> dict[str, Tensor]:
    """Return the statistics of a call of `head_stats` by name."""
    return dict(zip(("logp", "lse", "entropy"), stats, strict=True))


@ON_GPU
@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_sweep_of_sizes_permutations_and_schedules(softcap: float | None) -> None:
    n, h, v = 8192, 1024, 32000
    hidden, weight, targets = inputs(n, h, v)
    head = hl.Head(weight.requires_grad_(), softcap=softcap)
    with torch.no_grad():
        whole = of_stats(hl.head_stats(hidden, head, targets))
        for size in SWEEP:
            for first in {0, 1, n - size}:
                rows = slice(first, first + size)
                found = hl.head_stats(hidden[rows], head, targets[rows])
                for name, value in of_stats(found).items():
                    assert torch.equal(value, whole[name][rows]), (name, size, first)
        for seed in range(3):
            order = torch.randperm(n, device=DEVICE)
            found = hl.head_stats(hidden[order], head, targets[order])
            for name, value in of_stats(found).items():
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


# ---------------------------------------------------------------------- Options(batch_invariant)


FLOAT = torch.float32


@pytest.mark.parametrize("dtypes", [(SIXTEEN, SIXTEEN), (FLOAT, FLOAT), (FLOAT, SIXTEEN)])
@pytest.mark.parametrize("columns", [150, 9])  # sizes of a vocabulary and of a LoRA rank
def test_a_products_row_is_bitwise_independent_of_other_rows(
    dtypes: tuple[torch.dtype, torch.dtype], columns: int
) -> None:
    x = torch.randn(140, 77, device=DEVICE).to(dtypes[0])
    w = torch.randn(77, columns, device=DEVICE).to(dtypes[1])
    want = (x.double() @ w.double()).float()
    for b in (w, w.t().contiguous().t()):
        whole = triton_backend.fixed_product(x, b)
        torch.testing.assert_close(whole, want, rtol=1e-5, atol=1e-4)
        for rows in (slice(0, 1), slice(3, 10), slice(127, 130)):
            assert torch.equal(triton_backend.fixed_product(x[rows], b), whole[rows])
        more = torch.ones_like(whole)
        assert torch.equal(triton_backend.fixed_product(x, b, out=more), more)
        torch.testing.assert_close(more, want + 1, rtol=1e-5, atol=1e-4)
        narrow = triton_backend.fixed_product(x, b, dtype=SIXTEEN)
        assert torch.equal(narrow, whole.to(SIXTEEN))


def test_a_product_heeds_how_float32_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 product respects `fp32_precision`; once it is set, torch forbids reading
    `allow_tf32`."""
    from headloss.kernels.triton import fixed

    asked: list[str] = []
    monkeypatch.setattr(fixed, "launch", lambda *_, PRECISION, **__: asked.append(PRECISION))
    x, flags = torch.zeros(3, 8), torch.backends.cuda.matmul
    before = flags.fp32_precision
    try:
        for flags.fp32_precision in ("tf32", "ieee"):
            fixed.fixed_product(x, x.t())
    finally:
        flags.fp32_precision = before
    assert asked == ["tf32", "ieee"]


KINDS = ("plain", "bias", "adapter", "float32")


def special_head(kind: str, h: int, v: int, weight: Tensor) -> hl.Head:
    dtype = torch.float32 if kind == "float32" else SIXTEEN
    bias = torch.randn(v, device=DEVICE, dtype=dtype) if kind == "bias" else None
    lora = ()
    if kind == "adapter":
        a, b = torch.randn(4, h, device=DEVICE), torch.randn(v, 4, device=DEVICE)
        lora = (hl.Lora(a=a.requires_grad_(), b=(0.1 * b).requires_grad_(), scaling=0.5),)
    return hl.Head(weight.to(dtype).requires_grad_(), bias=bias, lora=lora)


def trained(
    hidden: Tensor, head: hl.Head, targets: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    leaf = hidden.to(head.weight.dtype).detach().requires_grad_()
    given = hl.Options(backend="triton", batch_invariant=True, **options)
    # Totals of 1 make the loss a plain sum, in which a token's weight does not depend on the
    # batch.
    totals = hl.Totals(1, 1)
    batch = hl.Batch(targets, totals=totals)
    out = hl.head_loss(leaf, head, batch, hl.cross_entropy(), given)
    out.loss.backward()
    assert leaf.grad is not None
    return out.logps, out.entropies, leaf.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "held"])
def test_calls_that_are_batch_invariant(kind: str, schedule: str) -> None:
    n, h, v = (19, 24, 90) if DEVICE == "cpu" else (3000, 512, 20000)
    hidden, weight, targets = inputs(n, h, v)
    head = special_head(kind, h, v, weight)
    whole = trained(hidden, head, targets, schedule=schedule)
    few = {"chunk_tokens": 7} if schedule == "one_pass" and DEVICE == "cpu" else {}
    for rows in (slice(0, 1), slice(2, n - 3)):
        found = trained(hidden[rows], head, targets[rows], schedule=schedule, **few)
        for value, other in zip(found, whole, strict=True):
            assert torch.equal(value, other[rows])


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CASES = (("one_pass", False), ("one_pass", True), ("recompute", True))


@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_tensors_of_two_dtypes(dtype: torch.dtype, other: torch.dtype) -> None:
    """Hidden states of one dtype beside columns, an adapter or a teacher of another dtype give the
    loss and the gradients of the float64 formula, with and without `batch_invariant`."""

    def normal(*shape: int, of: torch.dtype = other) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(of).requires_grad_()

    n, h, r, v = 19, 24, 3, 90
    hidden, weight, targets = normal(n, h, of=dtype), normal(v, h, of=dtype), torch.arange(n)
    features, rows, a, b = normal(n, r), normal(v, r), normal(r, h), normal(v, r)
    states, verifier = normal(n, h).detach(), normal(v, h).detach()
    batch = hl.Batch(targets.to(DEVICE), teacher_hidden=states)
    # A small loss, as of one token among thousands, would underflow in float16.
    objective = 2**-12 * (hl.cross_entropy() + hl.distillation(teacher_head=hl.Head(verifier)))
    lora = hl.Lora(a=a, b=b, scaling=0.5)
    head = hl.Head(weight, lora=(lora,), beside=((features, rows),))
    leaves = hidden, weight, features, rows, a, b

    x, w, f, g, a, b = (leaf.detach().double().requires_grad_() for leaf in leaves)
    logps = (x @ w.T + f @ g.T + 0.5 * (x @ a.T) @ b.T).log_softmax(-1)
    q = (states.double() @ verifier.double().T).log_softmax(-1)
    tokens = (q.exp() * (q - logps)).sum(-1) - logps[torch.arange(n), targets]
    loss = 2**-12 * tokens.mean()
    want = torch.autograd.grad(loss, (x, w, f, g, a, b))

    # On a GPU, the adapter's two matmuls round their inputs to the narrower dtype.
    narrower = min(other, dtype, key=lambda x: x.itemsize)
    matmul, factor = (narrower, 6) if DEVICE == "cuda" else (dtype, 3)
    for schedule, fixed in CASES:
        given = hl.Options(backend="triton", schedule=schedule, batch_invariant=fixed)
        out = hl.head_loss(hidden, head, batch, objective, given)
        assert error(out.loss, loss) <= 1e-6, (schedule, fixed)
        gradients = torch.autograd.grad(out.loss, leaves)
        for i, (mine, leaf, exact) in enumerate(zip(gradients, leaves, want, strict=True)):
            # Plain float16 has no gradient scaling; its relative error is that of `dtype` alone.
            rounded = exact.to(leaf.dtype), (exact * 2**12).to(matmul) / 2**12
            most = factor * max(error(value, exact) for value in rounded) + 1e-6
            assert mine.dtype == leaf.dtype and error(mine, exact) <= most, (schedule, fixed, i)


@pytest.mark.parametrize("size", [2.0**-24, 2.0**20])
def test_coefficients_of_any_size_leave_float16_its_digits(size: float) -> None:
    """Float16 gradients stay accurate for coefficients of any size: each row is scaled
    independently of the other rows."""
    hidden, weight, targets = (t.to(DEVICE) for t in trained_looking(7, 24, 90, torch.float16))
    head, batch = hl.Head(weight), hl.Batch(targets, share=torch.rand(7, device=DEVICE) + 0.5)
    objective = hl.cross_entropy().weighted("share")
    leaf = hidden.requires_grad_()
    given = hl.Options(backend="triton", batch_invariant=True)
    (hl.head_loss(leaf, head, batch, size * objective, given).loss / size).backward()
    assert leaf.grad is not None
    want = plain(leaf, head, batch, objective).gradients["hidden"]
    assert error(leaf.grad, want) <= 3 * error(want.half(), want) + 1e-6


def test_batch_invariance_is_refused_on_a_cpu() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    batch, options = hl.Batch(torch.arange(3)), hl.Options(batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant: got True for torch.float32 on cpu"):
        hl.head_loss(x, hl.Head(w), batch, hl.cross_entropy(), options)
