"""`logits_loss` overwrites logits passed in by the caller with a correct gradient: tests of the
kernel and of calls."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
import twins
from triton_cases import (
    DEVICE,
    EPS,
    NEEDS,
    assert_statistics,
    coefficients_of,
    error,
    in_float64,
    oracle_gradient,
    targets_of,
    tile,
    transforms,
)

import headloss as hl
from headloss.kernels import reference
from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import Forward, LogitRows, Walk
from headloss.kernels.transform import Transform
from headloss.kernels.triton.given import Shape, given_rows
from headloss.kernels.triton.rows import scale_rows_
from headloss.logits.given import InPlaceLogits, View
from headloss.logits.linear import RowContext
from headloss.parallel.vocabulary import WholeVocabulary
from headloss.statistics.softmax import (
    Normalizer,
    SoftmaxCoefficients,
    SoftmaxState,
    Statistics,
    finish,
)
from headloss.testing import plain

SMALL = Shape(warps=1)
TURNS = [SMALL, Shape(warps=1, turns=2)]


def rows_of(tensor: torch.Tensor, order: torch.Tensor | None = None) -> LogitRows:
    positions = torch.arange(len(tensor), device=DEVICE) if order is None else order
    return LogitRows(tensor, positions * tensor.stride(0), False)


def exactly(raw, targets, first, transform) -> tuple[Statistics, Normalizer]:
    v = raw.shape[1]
    exact = reference.partials(raw.double(), Forward(targets, first, in_float64(transform), NEEDS))
    return finish(exact, v, NEEDS)


# ---------------------------------------------------------------------- the kernel


SHAPES = [(5, 97, torch.float32), (3, 1000, torch.bfloat16), (4, 1040, torch.float16)]


@pytest.mark.covering
@pytest.mark.parametrize("shape", TURNS, ids=str)
@pytest.mark.parametrize("name", transforms(1))
@pytest.mark.parametrize(("n", "v", "dtype"), SHAPES)
def test_both_walks_in_one_launch(n, v, dtype, name, shape):
    """One kernel launch gives correct statistics and overwrites the logits by a correct gradient,
    also if the entropy has a coefficient."""
    raw, targets, transform = tile(n, v, dtype), targets_of(n, v), transforms(n)[name]
    raw[1, 3] = -math.inf
    stats, normalizer = exactly(raw, targets, 0, transform)
    c = coefficients_of(n, "tpeu")
    whole = SoftmaxCoefficients(
        target=c.target,
        prob=c.prob + c.entropy * stats.entropy,
        entropy=c.entropy,
        uniform=c.uniform,
    )
    oracle = oracle_gradient(raw, targets, 0, transform, normalizer, whole)
    rows, before = rows_of(raw), raw.clone()
    found = given_rows(
        Walk(rows, rows, None, targets, 0, transform, NEEDS, c), shape=shape
    )
    assert_statistics(found, before, targets, 0, transform)
    assert error(raw, oracle) <= EPS[dtype] + 3e-6


@pytest.mark.parametrize("which", ["tp", "tpeu"])
@pytest.mark.parametrize("name", ["plain", "scaled", "rows"])
def test_rows_that_stay_in_shared_memory(name, which):
    """The kernel that keeps a row of logits in shared memory gives correct results, also for rows
    with several equal largest logits and in calls with skipped rows."""
    n, v, dtype = 4, 2064, torch.bfloat16
    raw, targets, transform = tile(n, v, dtype), targets_of(n, v), transforms(n)[name]
    raw[1, 3], raw[0, :16] = -math.inf, raw[0].max()
    before, out = raw.clone(), torch.full_like(raw, math.nan)
    live = torch.tensor([True, True, False, True], device=DEVICE)
    raw[2] = math.nan
    stats, normalizer = exactly(before, targets, 0, transform)
    c = coefficients_of(n, which).map(lambda t: t * live)
    whole = c
    if c.entropy is not None:
        whole = c._replace(prob=c.prob + c.entropy * stats.entropy)
    oracle = oracle_gradient(before, targets, 0, transform, normalizer, whole)
    aligned = torch.empty(n, v, dtype=dtype, device=DEVICE).copy_(raw)
    walk = Walk(rows_of(aligned), rows_of(out), live, targets, 0, transform, NEEDS, c)
    for turns in (1, 2):
        found = given_rows(walk, shape=Shape(4, turns))
        kept = SoftmaxState(*(t[live] for t in found))
        assert_statistics(kept, before[live], targets[live], 0, transform.rows(live))
        assert not out[2].any()
        assert error(out[live], oracle[live]) <= EPS[dtype] + 3e-6


@pytest.mark.parametrize("which", ["tp", "t", "p", "tpe", "tpu"])
def test_two_launches(which):
    """Separate kernel launches for statistics and gradient are correct on a vocabulary slice, with
    reordered rows and a separate output tensor."""
    n, v, first, transform = 4, 97, 40, transforms(4)["capped rows"]
    targets = torch.tensor([41, 3, 136, 40 + v], device=DEVICE)
    order, c = torch.tensor([2, 0, 5, 3], device=DEVICE), coefficients_of(n, which)
    for dtype in (torch.float32, torch.bfloat16):
        raw = tile(6, v, dtype)
        named = raw[order]
        raw[[1, 4]] = math.nan  # never read
        out = torch.full((6, v + 5), math.nan, dtype=dtype, device=DEVICE)
        walk = Walk(rows_of(raw, order), None, None, targets, first, transform, NEEDS)
        found = given_rows(walk, shape=SMALL)
        assert_statistics(found, named, targets, first, transform)
        normalizer = finish(found, v, NEEDS)[1]
        to = rows_of(out[:, :v], order)
        args = (None, targets, first, transform, None, c, None, normalizer)
        given_rows(Walk(rows_of(raw, order), to, *args), shape=SMALL)
        oracle = oracle_gradient(
            named, targets, first, transform, Normalizer(*(t.double() for t in normalizer)), c
        )
        assert error(out[order, :v], oracle) <= EPS[dtype] + 3e-6
        assert out[[1, 4]].isnan().all() and out[:, v:].isnan().all()


def test_dead_rows_are_not_read_and_get_zeros():
    raw, targets = tile(3, 97, torch.float32), targets_of(3, 97)
    want = raw.clone()
    raw[1] = math.nan
    live = torch.tensor([True, False, True], device=DEVICE)
    c = coefficients_of(3, "tp").map(lambda t: t * live)
    rows = rows_of(raw)
    found = given_rows(Walk(rows, rows, live, targets, 0, Transform(), NEEDS, c), shape=SMALL)
    assert not raw[1].any() and raw[0].any() and raw[2].any()
    stats, _ = finish(found, 97, NEEDS)
    assert stats.logp[1] == 0 and stats.entropy[1] == 0
    oracle, _ = exactly(want, targets, 0, Transform())
    torch.testing.assert_close(stats.logp[live].double(), oracle.logp[live], rtol=2e-6, atol=1e-6)


def test_sumexp_m1_keeps_its_digits():
    """The sum of exponentials minus 1 is accurate for a nearly certain token, for several equal
    largest logits, and for a row whose whole probability lies in the last column."""
    raw = torch.full((3, 500), -20.0, device=DEVICE)
    raw[0, 7] = 0.0
    raw[1, 7] = raw[1, 499] = raw[1, 71] = 0.0
    raw[2] = -math.inf
    raw[2, 499] = 80.0
    targets = torch.full((3,), 7, device=DEVICE)
    args = (None, None, targets, 0, Transform(), NEEDS, None)
    found = given_rows(Walk(rows_of(raw), *args), shape=SMALL)
    e = math.exp(-20)
    expected = torch.tensor([499 * e, 2 + 497 * e, 0.0], device=DEVICE)
    torch.testing.assert_close(found.sumexp_m1, expected, rtol=2e-6, atol=0)
    assert found.max_logit.tolist() == [0, 0, 80] and found.target.tolist() == [0, 0, -math.inf]


def test_a_slice_of_minus_infinity_is_empty_and_nan_shows():
    raw = torch.randn(3, 200, device=DEVICE)
    raw[0] = -math.inf
    raw[1, 150] = math.nan
    targets = torch.tensor([1, 2, 3], device=DEVICE)
    for needs in (NEEDS, frozenset({"logp"})):
        walk = Walk(rows_of(raw), None, None, targets, 0, Transform(), needs)
        found = given_rows(walk, shape=SMALL)
        assert found.max_logit[0] == -math.inf and found.sumexp_m1[0] == -1
        assert found.sumexp_m1.isnan().tolist() == [False, True, False]


def test_a_factor_of_one_leaves_rows_alone():
    value = torch.randn(4, 70, device=DEVICE).bfloat16()
    want = (value.float() * 3).bfloat16()
    order = torch.tensor([0, 2, 3], device=DEVICE)
    before = value.clone()
    scale_rows_(rows_of(value, order), torch.tensor(1.0, device=DEVICE))
    assert value.equal(before)
    scale_rows_(rows_of(value, order), torch.tensor(3.0, device=DEVICE))
    assert error(value[order], want[order].double()) <= EPS[torch.bfloat16]
    assert value[1].equal(before[1])


# ---------------------------------------------------------------------- whole calls


V = 97
OBJECTIVES = [
    hl.cross_entropy(),
    hl.cross_entropy(label_smoothing=0.1) - 0.1 * hl.entropy() + 0.5 * hl.dapo().where("keep"),
    hl.gspo() + 1e-3 * hl.z_loss(),
]


def problem(dtype, layout=lambda t: t):
    """Return logits of [3, 7] positions in a `layout`, two positions unscored and NaN."""
    torch.manual_seed(1)
    whole = 2 * torch.randn(3, 8, V)
    whole[..., 5] += 4
    leaf = whole.to(dtype).to(DEVICE).requires_grad_()
    targets = torch.randint(V, (3, 7))
    targets[:, ::2] = 5
    clean = layout(leaf).detach()
    logps = clean.cpu().float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    old = logps + 0.3 * torch.randn(3, 7)
    targets[1, 2:4] = -100
    batch = hl.Batch(
        targets.to(DEVICE),
        advantages=torch.randn(3, device=DEVICE),
        old_logps=old.to(DEVICE),
        keep=(torch.rand(3, 7) > 0.2).to(DEVICE),
    )
    return leaf, clean, batch


def by_autograd(clean, batch, objective, dtype):
    z = clean.detach().to(dtype).requires_grad_()
    head = hl.Head(torch.eye(V, dtype=dtype, device=DEVICE))
    found = plain(z, head, batch, objective, mode="input")
    return found.loss, found.gradients["hidden"]


LAYOUTS = {
    "shifted": lambda t: t[:, :-1],
    "packed": lambda t: t[:, 1:].contiguous(),
    "batch second": lambda t: t.transpose(0, 1).contiguous()[1:].transpose(0, 1),
}


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.covering
@pytest.mark.parametrize("shift", range(3))
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_logits_loss(objective, inplace, shift):
    """`logits_loss` agrees with float64 for every objective, dtype and layout, with NaN at unscored
    positions and an upstream gradient of 2."""
    turn = shift + OBJECTIVES.index(objective)
    layout, dtype = list(LAYOUTS)[turn % 3], DTYPES[shift]
    leaf, clean, batch = problem(dtype, LAYOUTS[layout])
    (loss, exact), (_, rough) = (
        by_autograd(clean, batch, objective, d) for d in (torch.float64, torch.float32)
    )
    unscored = batch.targets == -100
    work = LAYOUTS[layout](leaf * 1)
    work.data[unscored] = math.nan
    seen = []
    work.register_hook(lambda g: seen.append(g.data_ptr()))
    out = hl.logits_loss(
        work, batch, objective, inplace=inplace, options=hl.Options(backend="triton")
    )
    assert out.plan.in_place and out.plan.backend == "triton"
    over = inplace and dtype != torch.float16
    assert out.plan.schedule == ("one_pass" if over else "recompute")
    torch.testing.assert_close(out.loss.detach().double(), loss, rtol=2e-6, atol=1e-7)
    (2 * out.loss).backward()
    gradient = LAYOUTS[layout](leaf.grad)
    assert not gradient[unscored].any()
    assert (seen == [work.data_ptr()]) == over
    budget = 3 * error(2 * rough.to(dtype), 2 * exact) + EPS[dtype] + 1e-6
    assert error(gradient, 2 * exact) <= budget


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("objective", OBJECTIVES[:2], ids=repr)
def test_the_gradient_outlives_the_logits(objective, backend):
    """If the forward pass writes the gradient to separate memory, logits freed before the backward
    pass do not matter."""
    leaf, clean, batch = problem(torch.float32, LAYOUTS["packed"])
    work = LAYOUTS["packed"](leaf * 1)
    logits = weakref.ref(work.untyped_storage())
    options = hl.Options(backend=backend, schedule="one_pass")
    out = hl.logits_loss(work, batch, objective, options=options)
    assert out.plan.in_place == (backend == "triton") and logits() is not None
    del work
    gc.collect()  # free the tensors that Triton's interpreter still refers to
    assert logits() is None
    (2 * out.loss).backward()
    _, exact = by_autograd(clean, batch, objective, torch.float64)
    gradient = LAYOUTS["packed"](leaf.grad).double()
    torch.testing.assert_close(gradient, 2 * exact, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"upstream": 1.0}, {"static": True}], ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_triton_is_reference(objective, options):
    """`logits_loss` agrees between Triton and the reference backend in loss, statistics, metrics
    and gradients, also with `upstream` and `static`."""
    found = []
    for backend in ("reference", "triton"):
        leaf, _, batch = problem(torch.float32, LAYOUTS["packed"])
        work = LAYOUTS["packed"](leaf * 1)
        if backend == "triton":
            work.data[batch.targets == -100] = math.nan
        elif options.get("static"):
            work.data[batch.targets == -100] = 0
        chosen = hl.Options(backend=backend, **options)
        out = hl.logits_loss(work, batch, objective, inplace=True, options=chosen)
        found.append((out, torch.autograd.grad(out.loss, work)[0]))
    (want, want_gradient), (got, gradient) = found
    assert not want.plan.in_place and got.plan.in_place
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(got.logps, want.logps)
    torch.testing.assert_close(got.entropies, want.entropies)
    assert got.metrics.compute() == pytest.approx(want.metrics.compute(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("inplace", [False, True])
def test_few_tokens_of_a_wide_vocabulary(tokens, inplace):
    v = 128257
    z = torch.randn(2, v, device=DEVICE)
    targets = torch.full((2,), -100, device=DEVICE)
    targets[:tokens] = v - 1
    work = (z.clone().requires_grad_() * 1).bfloat16()
    options = hl.Options(backend="triton", metrics=False)
    out = hl.logits_loss(
        work, hl.Batch(targets), hl.cross_entropy(), inplace=inplace, options=options
    )
    (gradient,) = torch.autograd.grad(out.loss, work)
    log_p = z.bfloat16().double().log_softmax(1)
    want = torch.zeros_like(log_p)
    for row in range(tokens):
        want[row] = log_p[row].exp()
        want[row, -1] -= 1
        assert abs(out.logps[row].double() - log_p[row, -1]) < 2e-6
    assert error(gradient, want) <= EPS[torch.bfloat16] + 1e-6


def test_two_runs_give_the_same_bits():
    found = []
    for _ in range(2):
        leaf, _, batch = problem(torch.bfloat16, LAYOUTS["shifted"])
        work = LAYOUTS["shifted"](leaf * 1)
        options = hl.Options(backend="triton")
        out = hl.logits_loss(work, batch, OBJECTIVES[1], inplace=True, options=options)
        found.append((out.loss, torch.autograd.grad(out.loss, leaf)[0]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_backward_through_overwritten_logits_raises():
    leaf, _, batch = problem(torch.float32, LAYOUTS["packed"])
    work = LAYOUTS["packed"](leaf).tanh()  # tanh saves its output
    options = hl.Options(backend="triton")
    out = hl.logits_loss(work, batch, OBJECTIVES[0], inplace=True, options=options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_logits_without_unit_stride_are_not_used_in_place():
    leaf, _, batch = problem(torch.float32, LAYOUTS["packed"])
    work = (leaf[:, 1:] * 1).transpose(1, 2).contiguous().transpose(1, 2)
    options = hl.Options(backend="triton")
    out = hl.logits_loss(work, batch, OBJECTIVES[0], inplace=True, options=options)
    assert not out.plan.in_place and "rows of the given logits" not in str(out.plan)
    other = hl.logits_loss((leaf[:, 1:] * 1), batch, OBJECTIVES[0], options=options)
    assert "rows of the given logits, where they lie" in str(other.plan)
    torch.testing.assert_close(out.loss, other.loss)


@pytest.mark.parametrize("index", [None, [5, 0, 22, 13]])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_offsets_of_more_dimensions(order, index):
    """Logits [a, b, c, V] without a flat view have correct row offsets."""
    whole = torch.arange(2 * 3 * 4 * 48).view(2, 3, 4, 48)
    logits = whole.permute(*order, 3)[..., :5]
    positions = torch.arange(24) if index is None else torch.tensor(index)
    _, found, aligned = View(logits, None if index is None else positions).rows()
    assert aligned
    assert torch.equal(found, logits.reshape(24, 5)[positions, 0])
    assert not View(whole[..., :47].contiguous(), None).rows().aligned
    one_for_all = View(whole[0, 0, 0, :5].expand(6, 5), None)
    assert one_for_all.rows().offsets.tolist() == [0] * 6


# ---------------------------------------------------------------------- GPU only


@pytest.mark.skipif(DEVICE == "cpu", reason="needs 12 GiB on a GPU")
def test_offsets_beyond_two_to_the_31():
    n, v = 9000, 262144
    raw = torch.randn(n, v, device=DEVICE, dtype=torch.bfloat16)
    last = slice(n - 3, n)
    before, targets = raw[last].clone(), torch.randint(v, (n,), device=DEVICE)
    rows = LogitRows(raw, torch.arange(n, device=DEVICE) * v, True)
    weight = torch.ones(n, device=DEVICE)
    c = SoftmaxCoefficients(target=-weight, prob=weight)
    given_rows(Walk(rows, rows, None, targets, 0, Transform(), frozenset({"logp"}), c))
    want = before.double().softmax(1)
    want[torch.arange(3, device=DEVICE), targets[last]] -= 1
    assert error(raw[last], want) <= 2**-8


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_static_calls_can_be_captured():
    leaf, _, batch = problem(torch.bfloat16, LAYOUTS["packed"])
    options = hl.Options(backend="triton", static=True, metrics=False, upstream=1.0)

    def run(z):
        out = hl.logits_loss(z, batch, OBJECTIVES[1], inplace=True, options=options)
        # Detach the loss: a live autograd graph would tie its leaf tensors to the CUDA stream of
        # their creation.
        return out.loss.detach(), torch.autograd.grad(out.loss, z)[0]

    pristine = LAYOUTS["packed"](leaf).detach()
    work = pristine.clone().requires_grad_()
    for _ in range(3):
        work.data.copy_(pristine)
        want = [t.clone() for t in run(work)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(work)
    for _ in range(2):
        work.data.copy_(pristine)
        graph.replay()
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("acts", [twins, triton_backend], ids=["twins", "triton"])
def test_targets_outside_a_ranks_slice_do_not_matter(acts):
    """A slice's statistics are correct for targets outside the rank's slice."""
    raw, targets = tile(4, 16, torch.float32), torch.tensor([3, 20, 31, 9], device=DEVICE)
    order = SimpleNamespace(index=None, live=None, unscored=None)
    shard = WholeVocabulary(raw.shape[-1])
    tokens = RowContext(acts, targets, Transform(), NEEDS, shard)
    source = InPlaceLogits([raw], tokens, order=order, overwrites=False)
    found = source._walk(NEEDS)
    assert_statistics(found, raw, targets, 0, Transform())


@pytest.mark.skipif(DEVICE == "cpu", reason="takes the interpreter minutes")
def test_many_rows_in_turn():
    """A kernel call on many rows, with unscored ones and a ragged last block, gives the same bits
    twice and in a CUDA graph."""
    n, v, transform = 3000, 20011, Transform(softcap=9.0)
    raw, targets = tile(n, v, torch.bfloat16), targets_of(n, v)
    live = torch.arange(n, device=DEVICE) % 7 != 3
    c = coefficients_of(n, "tpeu").map(lambda t: t * live)
    shape = Shape(warps=8, turns=5)
    work = raw.clone()
    rows = rows_of(work)

    def run():
        work.copy_(raw)
        walk = Walk(rows, rows, live, targets, 0, transform, NEEDS, c)
        return given_rows(walk, shape=shape)

    found = run()
    some = torch.arange(0, n, 50, device=DEVICE)[live[::50]]
    named, of_some, gradient = raw[some], targets[some], work.clone()
    of_found = SoftmaxState(*(t[some] for t in found))
    assert_statistics(of_found, named, of_some, 0, transform)
    assert not gradient[~live].any()
    stats, normalizer = exactly(named, of_some, 0, transform)
    # The kernel received gradient coefficients for all tokens; select those of the tokens `some`
    # for the reference gradient.
    own = c.map(lambda t: t[some])
    own = own._replace(prob=own.prob + own.entropy * stats.entropy)
    oracle = oracle_gradient(named, of_some, 0, transform, normalizer, own)
    assert error(gradient[some], oracle) <= EPS[torch.bfloat16] + 3e-6
    again = run()
    assert all(map(torch.equal, again, found))
    assert torch.equal(work, gradient)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run()
    for _ in range(2):
        graph.replay()
        assert all(map(torch.equal, again, found))
        assert torch.equal(work, gradient)
