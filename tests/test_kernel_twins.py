"""Each Triton kernel agrees with its PyTorch twin (the same operation in plain PyTorch), and each
twin with float64 autograd.

n tokens, v columns, H hidden width, T tokens of a call, V vocabulary.
"""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import twins
from triton_cases import DEVICE, EPS, NEEDS, coefficients_of, error, in_float64, tile, transforms

import headloss as hl
from headloss import kernels
from headloss.kernels import reference
from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import (
    Acts,
    Backward,
    ExpTile,
    Forward,
    Kernels,
    LogitRows,
    Sum,
    Walk,
)
from headloss.kernels.transform import Transform
from headloss.kernels.triton.given import Shape
from headloss.statistics.softmax import SoftmaxCoefficients, SoftmaxState, finish
from headloss.testing import plain, trained_looking

# The interpreter multiplies the bits of bf16 operands as integers, so bf16 needs a GPU.
SIXTEEN = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


def double(of):
    """Return a copy of a tensor, dataclass or tuple with all floating-point tensors in float64."""
    if isinstance(of, torch.Tensor):
        return of.double() if of.is_floating_point() else of
    if isinstance(of, Transform):
        return in_float64(of)
    if isinstance(of, SoftmaxCoefficients):
        return of.map(lambda t: t.double())
    return type(of)(*map(double, of)) if isinstance(of, tuple) else of


def head(n: int, h: int, v: int, first: int, dtype: torch.dtype):
    """Return hidden states, weight (both views of wider matrices) and targets, one of which lies
    outside the weight's vocabulary rows."""
    x = torch.full((n, h + 8), math.nan, dtype=dtype, device=DEVICE)[:, :h]
    w = torch.full((v, h + 16), math.nan, dtype=dtype, device=DEVICE)[:, :h]
    x.copy_(torch.randn(n, h))
    w.copy_(torch.randn(v, h) / 3)
    targets = first + torch.arange(n, device=DEVICE) * 31 % v
    x[::2] += 2 * w[targets[::2] - first]
    targets[3:4] += 2 * v
    return x, w, targets


def assert_statistics(
    found: SoftmaxState, twin: SoftmaxState, exact: SoftmaxState, v: int, needs
) -> None:
    """Compare the statistics that follow from two online-softmax states, which may subtract
    different maxima.

    A log-prob near 0 is a difference of large numbers, so that its error may be as large as the
    rounding of the logit.
    """
    rounding = torch.finfo(torch.float32).eps * max(exact.max_logit.abs().tolist(), default=0.0)
    for name in finish(exact, v, needs)[0].tensors():
        mine, theirs, oracle = (getattr(finish(p, v, needs)[0], name) for p in (found, twin, exact))
        finite = oracle.isfinite()
        assert torch.equal(mine[~finite].double(), oracle[~finite]), name
        mine, theirs, oracle = mine[finite], theirs[finite], oracle[finite]
        assert error(mine, oracle) <= 3 * error(theirs, oracle) + 2e-6 + rounding, name


# ---------------------------------------------------------------------- the interface

OF_EVERY = [name for name in vars(Acts) if not name.startswith("_")]
ACTS = [*OF_EVERY, *(name for name in vars(Kernels) if not name.startswith("_"))]
SERVED = {triton_backend: ACTS, twins: ACTS, reference: OF_EVERY}


@pytest.mark.parametrize(("backend", "act"), [(b, act) for b in SERVED for act in SERVED[b]])
def test_every_backend_has_every_act(backend, act):
    declared = list(inspect.signature(getattr(Kernels, act)).parameters.values())[1:]
    found = list(inspect.signature(getattr(backend, act)).parameters.values())
    for parameter in found[len(declared) :]:  # parameters that tune this backend's kernels
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is None
    shape = [(p.name, p.kind, p.default) for p in declared]
    assert shape == [(p.name, p.kind, p.default) for p in found[: len(declared)]]
    assert inspect.getdoc(getattr(Kernels, act)), "an act without a description"


def test_at_least_twenty_kernel_functions_are_compared():
    assert len(ACTS) >= 20 and kernels.load("reference") is reference


# ---------------------------------------------------------------------- matmuls and tiles of exp(z)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["plain", "scaled", "rows", "capped rows"])
@pytest.mark.parametrize(("n", "v"), [(0, 97), (1, 97), (6, 97), (5, 300)])
def test_products_and_held_terms(n, v, name):
    first, transform = 20, transforms(n)[name]
    if name in ("scaled", "capped rows"):
        transform = replace(transform, bias=torch.randn(v, device=DEVICE).to(SIXTEEN[0]))
    for dtype, which in itertools.product(SIXTEEN, ("tp", "tpe")):
        x, w, targets = head(n, 72, v, first, dtype)
        forward, c = Forward(targets, first, transform, NEEDS), coefficients_of(n, which)
        c = c._replace(prob=-c.target)
        held = {a: ExpTile.empty(len(x), v, x) for a in (triton_backend, twins)}
        for one in held.values():
            one.exp_logits.fill_(math.nan)
        found, twin = (a.product_partials(x, w, forward, one) for a, one in held.items())
        exact = twins.product_partials(x.double(), w.double(), double(forward))
        assert_statistics(found, twin, exact, v, NEEDS)
        at_once = triton_backend.product_statistics(x, w, forward, v)
        merged = [a.finish(slices_of(x, w, forward), NEEDS, v) for a in (triton_backend, twins)]
        for one in (at_once, *merged):
            wanted = finish(exact, v, NEEDS)[0].tensors()
            for key, value in one.stats.tensors().items():
                close = {"rtol": 1e-5, "atol": 2e-5, "msg": key}
                torch.testing.assert_close(value.double(), wanted[key], **close)
        mine, theirs = held.values()
        below = (theirs.shift - mine.shift).exp().unsqueeze(1)
        close = {"rtol": 3 * EPS[torch.bfloat16], "atol": 1e-30}
        expected = theirs.exp_logits.float() * below
        torch.testing.assert_close(mine.exp_logits.float(), expected, **close)

        stats, normalizer = finish(twin, v, frozenset({"logp"}))
        backward = Backward(targets, first, transform, normalizer, c, stats.logp)
        oracle = twins.product_gradient(x.double(), w.double(), double(backward))
        found, twin = (a.product_gradient(x, w, backward) for a in (triton_backend, twins))
        assert found.dtype == twin.dtype == dtype and found.shape == (n, v)
        tiny = 6e-8 * found.numel() ** 0.5 if dtype == torch.float16 else 0
        for gradient in (found, twin):
            off = float((gradient.double() - oracle).norm()) - tiny
            assert off <= (EPS[dtype] + 1e-4) * float(oracle.norm())

        # two copies of the stored exp(z), since each operation overwrites its input
        if twins.is_multiple(backward):
            copies = [mine._replace(exp_logits=mine.exp_logits.clone()) for _ in range(2)]
            order = triton_backend.dense_order(torch.arange(n, device=DEVICE) % 3 > 0, n - 1)
            count = int(order.count)
            pairs = [
                a.exp_multiple_(one, backward, x=x, order=order)
                for a, one in zip(held, copies, strict=True)
            ]
            terms = [one.exp_logits[:count] for one in copies]
            torch.testing.assert_close(*(p[0][:count] for p in pairs), rtol=2e-5, atol=1e-30)
            torch.testing.assert_close(*terms, rtol=2**-6, atol=1e-30)
            scaled = [p[1][:count].float() for p in pairs]
            torch.testing.assert_close(*scaled, rtol=2e-5 + EPS[dtype], atol=6e-8)
        keep = torch.arange(n, device=DEVICE) % 3 > 0
        order = triton_backend.dense_order(keep, n - 1)
        copies = [mine._replace(exp_logits=mine.exp_logits.clone()) for _ in range(2)]
        found, twin = (
            a.exp_gradient_(one, backward, order=order)
            for a, one in zip(held, copies, strict=True)
        )
        count = int(order.count)
        assert error(found[:count], twin[:count].double()) <= 2 * EPS[torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_of_rows_that_several_programs_share(dtype):
    n, v, first = 6, 9001, 7
    z = tile(n, v, dtype)
    columns = torch.tensor([0, 4095, 4096, 9000, 9001, 8192], device=DEVICE)  # one is outside
    stats, normalizer = finish(
        twins.partials(z, Forward(columns + first, first, Transform(), NEEDS)), v, NEEDS
    )
    c = coefficients_of(n, "tpe")
    backward = Backward(columns + first, first, Transform(), normalizer, c, stats.logp)
    oracle = twins.logit_gradient_(z.double(), double(backward))
    for own in (tile(n, v, dtype), tile(n, v, torch.float32)):
        sixteen = None if own.dtype == dtype else dtype
        found = triton_backend.logit_gradient_(own, backward._replace(dtype=sixteen))
        assert found.dtype == dtype and found.data_ptr() == own.data_ptr()
        assert error(found, oracle) <= 2 * EPS[dtype] + 1e-5
    terms = (z.float() - normalizer.max_logit.unsqueeze(1)).exp().to(torch.bfloat16)
    keep = torch.arange(n, device=DEVICE) % 3 > 0
    order = triton_backend.dense_order(keep, n - 1)
    held = ExpTile(terms, normalizer.max_logit)
    wide = ExpTile(terms.double(), normalizer.max_logit.double())
    found = triton_backend.exp_gradient_(held, backward, order=order)[: int(keep.sum())]
    exact = twins.exp_gradient_(wide, double(backward), order=order)[: int(keep.sum())]
    assert error(found, exact) <= 2 * EPS[torch.bfloat16]


def slices_of(x, w, forward: Forward) -> torch.Tensor:
    """Return the online-softmax states [2, 5, n] of two halves of the vocabulary."""
    half, parts = len(w) // 2, []
    for own in (slice(0, half), slice(half, len(w))):
        here = forward._replace(first=forward.first + own.start)
        if forward.transform.bias is not None:
            part = replace(forward.transform, bias=forward.transform.bias[own])
            here = here._replace(transform=part)
        parts.append(torch.stack([*twins.product_partials(x, w[own], here)]))
    return torch.stack(parts)


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize("n", [0, 1, 6])
def test_order(n):
    patterns = list(itertools.product((False, True), repeat=n))
    for pattern in patterns[:: max(1, len(patterns) // 8)]:
        keep, most = torch.tensor(pattern, dtype=torch.bool, device=DEVICE), n - 2
        mine, twin = (a.dense_order(keep, most) for a in (triton_backend, twins))
        assert torch.equal(mine.count, twin.count)
        count = int(twin.count)
        assert torch.equal(mine.rows[:count], twin.rows[:count])


@pytest.mark.parametrize("dtype", FLOATS)
def test_scaled_rows_and_casts(dtype):
    x, scale = tile(6, 97, dtype), torch.randn(4, device=DEVICE)
    index = torch.tensor([4, 7, 1, 2], device=DEVICE)
    for out_dtype, places in itertools.product(FLOATS, (None, index)):
        rows = 4 if places is None else 8
        outs = []
        for backend in (triton_backend, twins):
            out = torch.full((rows, 101), math.nan, dtype=out_dtype, device=DEVICE)
            backend.scaled_rows(x, scale, out=out[:, :97], places=places)
            outs.append(out)
        torch.testing.assert_close(*outs, rtol=2e-7 + EPS[out_dtype], atol=0, equal_nan=True)
    by = torch.arange(6.0, device=DEVICE)
    for factor in (None, torch.tensor(0.3, device=DEVICE)):
        found = []
        for backend in (triton_backend, twins):
            sums = [Sum(x.clone(), to, rows) for to in FLOATS for rows in (None, by)]
            found.append(backend.scaled(sums, factor))
        for out_dtype, *pair in zip([to for to in FLOATS for _ in range(2)], *found, strict=True):
            assert pair[0].dtype == pair[1].dtype == out_dtype
            torch.testing.assert_close(*pair, rtol=2e-7 + EPS[out_dtype], atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_narrowed_gradient(dtype):
    """A kernel that writes a 16-bit gradient into the first half of each float32 row of the logit
    tile writes nothing behind the end of the tile."""
    n, v, transform = 4, 97, transforms(4)["capped rows"]
    targets = torch.tensor([3, 96, 500, 40], device=DEVICE)
    raw = tile(n, v, torch.float32)
    partials = twins.partials(raw, Forward(targets, 0, transform, NEEDS))
    stats, normalizer = finish(partials, v, frozenset({"logp"}))
    c = coefficients_of(n, "tpeu")
    backward = Backward(targets, 0, transform, normalizer, c, stats.logp, dtype)
    found = []
    for backend in (triton_backend, twins):
        buffer = torch.full((n, 2 * v), math.nan, device=DEVICE)
        buffer[:, :v] = raw
        found.append(backend.logit_gradient_(buffer[:, :v], backward))
        assert found[-1].dtype == dtype and buffer[:, v:].isnan().all()
    assert error(found[0], found[1].double()) <= 2 * EPS[dtype] + 3e-6


# ---------------------------------------------------------------------- given logits in place

LAYOUTS = ((lambda t: t[:, 1:]), (lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)))


def rows_in(tensor: torch.Tensor, order: torch.Tensor) -> LogitRows:
    """Return the rows of [B, S, V] in the given order."""
    b, s = order // tensor.shape[1], order % tensor.shape[1]
    return LogitRows(tensor, b * tensor.stride(0) + s * tensor.stride(1), False)


def walk_of(logits, out, n, name, which, needs, normalizer=None, live=None, slopes=None) -> Walk:
    order = torch.tensor([5, 0, 7, 2, 3][:n], dtype=torch.int64, device=DEVICE)
    targets = torch.tensor([41, 3, 136, 40, 99][:n], dtype=torch.int64, device=DEVICE)
    return Walk(
        rows_in(logits, order),
        None if out is None else rows_in(out, order),
        live,
        targets,
        40,
        transforms(n)[name],
        needs,
        None if which is None else coefficients_of(n, which),
        slopes,
        normalizer,
    )


@pytest.mark.parametrize(
    ("n", "name"),
    [(0, "plain"), (1, "scaled"), (5, "plain"), (5, "scaled"), (5, "capped rows")],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_walks(dtype, n, name):
    """Kernels on logits passed in by the caller agree with their PyTorch twins: statistics,
    in-place gradients, and both in one launch with skipped rows."""
    v, shape = 97, Shape(warps=1)
    logits = LAYOUTS[n % 2](tile(12, v, dtype).unflatten(0, (3, 4)))
    walk = walk_of(logits, None, n, name, None, NEEDS)
    wide = walk._replace(
        logits=walk.logits._replace(tensor=widened(logits)), transform=double(walk.transform)
    )
    twin, exact = twins.given_rows(walk), twins.given_rows(wide)
    found = triton_backend.given_rows(walk, shape=shape)
    assert_statistics(found, twin, exact, v, NEEDS)

    normalizer = finish(twin, v, frozenset())[1]
    outs = [torch.full_like(logits, math.nan) for _ in range(2)]
    for backend, out in zip((triton_backend, twins), outs, strict=True):
        backend.given_rows(walk_of(logits, out, n, name, "tpeu", None, normalizer))
    assert_rows(outs, dtype)

    live = torch.arange(n, device=DEVICE) != 2
    slopes = torch.randn(2, 5, n, device=DEVICE)
    slopes[:, 2], slopes[:, 3] = -30.0, 0.0
    slopes[:, 0] *= live
    slopes[:, 4] *= 0.1  # the largest float16 is 65504
    works = [logits.clone(), logits.clone()]
    pair = []
    for backend, work in zip((triton_backend, twins), works, strict=True):
        walk = walk_of(work, work, n, name, "tpeu", NEEDS, live=live, slopes=slopes)
        c = walk.coefficients.map(lambda t: t * live)
        pair.append(backend.given_rows(walk._replace(coefficients=c)))
        assert n < 3 or not work.flatten(0, 1)[7].any()
    assert_rows(works, dtype)
    for mine, theirs in zip(*pair, strict=True):
        torch.testing.assert_close(mine[live], theirs[live], rtol=1e-5, atol=1e-5)
        assert not mine[~live].any() and not theirs[~live].any()


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float64 copy with the tensor's layout."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((extent,), (1,)).double()
    return memory.as_strided(tensor.shape, tensor.stride())


def assert_rows(pair, dtype) -> None:
    """Check equal NaN positions and equal values elsewhere."""
    mine, theirs = pair
    assert torch.equal(mine.isnan(), theirs.isnan())
    there = ~theirs.isnan()
    assert error(mine[there], theirs[there].double()) <= 2 * EPS[dtype] + 2e-5


def test_a_wide_vocabulary():
    """A vocabulary of 128257 columns with the target in the last one is correct, both for a
    computed logit tile and for logits passed in."""
    v = 128257
    raw, targets = tile(1, v, torch.float32), torch.tensor([v - 1], device=DEVICE)
    forward = Forward(targets, 0, Transform(temperature=1.3), NEEDS)
    found, twin = (a.partials(raw, forward) for a in (triton_backend, twins))
    exact = twins.partials(raw.double(), double(forward))
    assert_statistics(found, twin, exact, v, NEEDS)
    walk = Walk(LogitRows(raw, targets * 0, False), None, None, *forward[:4])
    assert_statistics(triton_backend.given_rows(walk), twin, exact, v, NEEDS)
    stats, normalizer = finish(twin, v, frozenset({"logp"}))
    backward = Backward(*forward[:3], normalizer, coefficients_of(1, "tpe"), stats.logp)
    oracle = twins.logit_gradient_(raw.double(), double(backward))
    for backend in (triton_backend, twins):
        assert error(backend.logit_gradient_(raw.clone(), backward), oracle) <= 3e-6


def test_scale_rows():
    for dtype, factor in itertools.product(FLOATS, (1.0, 0.3)):
        works = [LAYOUTS[0](tile(12, 97, dtype).unflatten(0, (3, 4))) for _ in range(2)]
        before = works[0].clone()
        for backend, work in zip((triton_backend, twins), works, strict=True):
            rows = rows_in(work, torch.tensor([5, 0, 7], device=DEVICE))
            backend.scale_rows_(rows, torch.tensor(factor, device=DEVICE))
        torch.testing.assert_close(*works, rtol=2e-7 + EPS[dtype], atol=0)
        assert torch.equal(works[1], before) == (factor == 1)


# ---------------------------------------------------------------------- kernel twins and autograd


@pytest.mark.parametrize("name", ["plain", "scaled", "capped rows"])
@pytest.mark.parametrize("form", ["tile", "product", "held", "multiple", "walk"])
def test_twins_are_the_gradient(form, name):
    """The gradient of the PyTorch functions that mirror the Triton kernels equals float64 autograd:
    with respect to raw logits, for upstream gradients of logp, lse and entropy."""
    n, h, v, first, transform = 5, 7, 30, 4, double(transforms(5)[name])
    x, w, targets = head(n, h, v, first, torch.float64)
    targets[3] -= 2 * v
    raw = (x @ w.t()).requires_grad_()
    z, cap, t = raw * transform.scale, transform.softcap, transform.temperature
    z = z if cap is None else cap * torch.tanh(z / cap)
    log_p = (z / (t.unsqueeze(1) if isinstance(t, torch.Tensor) else t)).log_softmax(1)
    logp = log_p.gather(1, (targets - first).unsqueeze(1)).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    g, g_entropy = torch.randn(2, n, dtype=torch.float64, device=DEVICE)
    if form == "multiple":
        g_entropy = g_entropy * 0
    (want,) = torch.autograd.grad((g * logp + g_entropy * entropy).sum(), raw)
    forward = Forward(targets, first, transform, NEEDS)
    held = ExpTile.empty(len(x), v, x)
    partials = twins.product_partials(x, w, forward, held)
    stats, normalizer = finish(partials, v, NEEDS)
    torch.testing.assert_close(stats.logp, logp.detach(), rtol=1e-12, atol=1e-12)
    c = SoftmaxCoefficients(target=g, prob=-g - g_entropy * entropy.detach(), entropy=-g_entropy)
    backward = Backward(targets, first, transform, normalizer, c, stats.logp)
    if form == "tile":
        found = twins.logit_gradient_(raw.detach().clone(), backward)
    elif form == "product":
        found = twins.product_gradient(x, w, backward)
    elif form == "held":
        found = twins.exp_gradient_(held, backward)
    elif form == "multiple":
        backward = backward._replace(coefficients=SoftmaxCoefficients(target=g, prob=-g))
        if transform.softcap is not None:
            return
        multiple, _ = twins.exp_multiple_(held, backward)
        found = held.exp_logits * multiple.unsqueeze(1)
    else:
        out = torch.full_like(raw, math.nan)
        offsets = torch.arange(n, device=DEVICE) * v
        rows, to = (LogitRows(t, offsets, False) for t in (raw.detach(), out))
        # The kernel's PyTorch version adds the entropy's contribution to the coefficient `prob`, so
        # the test passes `prob` without the entropy's contribution.
        at_zero = c._replace(prob=-g)
        walk = Walk(rows, to, None, targets, first, transform, NEEDS, at_zero)
        twins.given_rows(walk)
        found = out
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


T, H, V = 12, 8, 30
SCHEDULES = {
    "one pass": {"schedule": "one_pass"},
    "chunks": {"schedule": "one_pass", "chunk_tokens": 5},
    "recompute": {"schedule": "recompute"},
    "static": {"static": True},
}


@pytest.fixture
def through_twins(monkeypatch):
    """Run calls on the kernels' code path, with a PyTorch twin in place of each kernel."""
    monkeypatch.setattr(kernels, "can_write_exp", lambda *_: True)
    monkeypatch.setattr(kernels, "choose", lambda *_: "triton")
    monkeypatch.setattr(kernels, "load", lambda _: twins)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("dtype", "bias"),
    [
        (torch.float64, False),
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float64, True),
    ],
)
@pytest.mark.parametrize("schedule", [*SCHEDULES, "frozen"])
@pytest.mark.parametrize("multiples", [True, False])
def test_whole_calls_through_the_twins(through_twins, multiples, bias, schedule, dtype):
    """Calls in which PyTorch functions take the place of the Triton kernels are correct in any
    dtype: with tiles of exp(z), blocks of vocabulary rows, reordered rows, and a bias."""
    hidden, weight, targets = trained_looking(T, H, V, dtype, "cpu")
    batch = hl.Batch(targets, advantages=torch.tensor([1.0, 0, -2, 0] * 3), old_logps=hl.CURRENT)
    objective = hl.grpo() if multiples or schedule == "frozen" else hl.grpo() - 0.1 * hl.entropy()
    options = SCHEDULES.get(schedule, {"schedule": "frozen"})
    leaves, shift = {"hidden": hidden.requires_grad_()}, torch.randn(V).to(dtype) if bias else None
    if schedule != "frozen":
        leaves["weight"] = weight.requires_grad_()
        if shift is not None:
            leaves["bias"] = shift.requires_grad_()
    head = hl.Head(weight, bias=shift)
    oracle = plain(hidden, head, batch, objective, "float64")
    coarse = plain(hidden, head, batch, objective, "input")
    out = hl.head_loss(hidden, head, batch, objective, hl.Options(**options))
    assert out.plan.exp_tiles
    out.loss.backward()
    floor = {torch.float64: 1e-11, torch.float32: 3e-6, torch.bfloat16: 2**-6}[dtype]
    assert abs(out.loss.double() - oracle.loss) <= (1e-12 if dtype == torch.float64 else 1e-5)
    for key, leaf in leaves.items():
        want = oracle.gradients[key]
        assert error(leaf.grad, want) <= 3 * error(coarse.gradients[key], want) + floor


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "slabs"])
def test_distillation_through_the_twins(through_twins, monkeypatch, kind, temperature, schedule):
    """Distillation on the kernels' code path is correct together with another term, a bias, and
    rows without gradient; PyTorch twins replace the kernels."""
    monkeypatch.setattr("headloss.logits.linear.GRAIN", 1)
    hidden, weight, targets = trained_looking(T, H, V, torch.float32, "cpu")
    states, other, shift = torch.randn(T, 8), torch.randn(V, 8), torch.randn(V)
    found = {}
    for dtype in (torch.float64, torch.float32):
        leaves = [t.to(dtype).clone().requires_grad_() for t in (hidden, weight, shift)]
        teacher = hl.Head(other.to(dtype), softcap=9.0)
        term = hl.distillation(divergence=kind, teacher_head=teacher, temperature=temperature)
        objective = term.where("kept") + 0.2 * hl.cross_entropy().where("kept")
        batch = hl.Batch(
            targets,
            teacher_hidden=states.to(dtype),
            kept=torch.arange(T) % 3 > 0,
        )
        head = hl.Head(leaves[1], bias=leaves[2])
        options = SCHEDULES.get(schedule, {"schedule": "recompute", "chunk_tokens": 5})
        out = hl.head_loss(leaves[0], head, batch, objective, hl.Options(**options))
        rows = 5 if "chunk_tokens" in options else T
        if options.get("schedule") != "recompute":
            assert out.plan.bytes["logits"] == rows * V * 2 * dtype.itemsize
        found[dtype] = out.loss.detach(), *torch.autograd.grad(out.loss, leaves)
    (loss, *gradients), (want, *exact) = found[torch.float32], found[torch.float64]
    assert abs(loss - want) <= 1e-6 * want
    for gradient, oracle in zip(gradients, exact, strict=True):
        assert error(gradient, oracle) <= 1e-5


@pytest.mark.parametrize("more", ["bias", "adapter"])
def test_a_teachers_head_with_more_than_a_weight_through_the_twins(through_twins, more):
    """Distillation from a teacher head with a bias or a LoRA is correct if PyTorch functions take
    the place of the Triton kernels."""
    hidden, weight, targets = trained_looking(T, H, V, torch.float32, "cpu")
    lora = (hl.Lora(a=torch.randn(2, 8), b=torch.randn(V, 2), scaling=0.5),)
    given: Any = {"bias": {"bias": torch.randn(V)}, "adapter": {"lora": lora}}[more]
    states, teacher = torch.randn(T, 8), hl.Head(torch.randn(V, 8), **given)
    found = []
    for fields in ({"teacher_hidden": states}, {"teacher_logits": teacher.logits(states)}):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        term = hl.distillation(teacher_head=teacher if "teacher_hidden" in fields else None)
        loss = hl.head_loss(leaves[0], hl.Head(leaves[1]), hl.Batch(targets, **fields), term).loss
        found.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [True, False])
def test_given_logits_through_the_twins(through_twins, inplace, dtype):
    z = (torch.randn(3, 4, V, dtype=torch.float64) * 2).to(dtype)
    targets = torch.randint(V, (3, 4))
    targets[1, 1:3] = -100
    leaf = z.clone().requires_grad_()
    work = (leaf * 1)[:, :, :]
    objective = hl.cross_entropy(label_smoothing=0.1) - 0.1 * hl.entropy()
    out = hl.logits_loss(work, hl.Batch(targets), objective, inplace=inplace)
    assert out.plan.in_place
    (2 * out.loss).backward()
    eye = hl.Head(torch.eye(V, dtype=torch.float64))
    wide = z.double().requires_grad_()
    oracle = plain(wide, eye, hl.Batch(targets), objective, mode="float64")
    floor = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype]
    assert error(leaf.grad, 2 * oracle.gradients["hidden"]) <= floor


def test_kept_rows_come_first_and_stay():
    keep = torch.tensor([False, True, False, True, True, False])
    order = twins.dense_order(keep, 5)
    assert order.rows.tolist() == [3, 1, 4, 3, 4, 5] and order.count.tolist() == [3]
    # `keep` selects three rows; with a limit of 2 rows `dense_order` leaves all rows in place.
    order = twins.dense_order(keep, 2)
    assert order.rows.tolist() == list(range(6)) and order.count.tolist() == [6]
