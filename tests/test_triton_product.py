"""The matmul kernel that stores exp(z) of the logits z in 16 bits agrees with float64 logits, and
so do the gradients computed from the stored exp(z)."""

from __future__ import annotations

import math

import pytest
import torch
import twins
from triton_cases import (
    DEVICE,
    EPS,
    NEEDS,
    coefficients_of,
    error,
    in_float64,
    oracle_gradient,
    transforms,
)

import headloss as hl
from headloss.head.products import PLAIN
from headloss.kernels import reference
from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import Backward, ExpTile, Forward, Sum
from headloss.kernels.transform import Transform
from headloss.statistics.softmax import Normalizer, SoftmaxCoefficients, SoftmaxState, finish, merge
from headloss.testing import plain, trained_looking

# The interpreter multiplies the bits of bf16 operands as integers, so bf16 needs a GPU.
SIXTEEN = torch.bfloat16 if DEVICE == "cuda" else torch.float16
HELD_EPS = EPS[torch.bfloat16]


def head(n: int, h: int, v: int, *, first: int = 0, dtype: torch.dtype = SIXTEEN):
    """Return hidden states, weights, targets (some outside the slice), and float64 logits."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, h, generator=generator).to(dtype).to(DEVICE)
    w = (torch.randn(v, h, generator=generator) / 3).to(dtype).to(DEVICE)
    targets = first + torch.arange(n, device=DEVICE) * 97 % v
    x[::2] += 3 * w[targets[::2] - first]
    targets[1] += 2 * v
    return x, w, targets, x.double() @ w.double().t()


def poisoned_held(n: int, v: int) -> ExpTile:
    held = ExpTile.empty(n, v, torch.empty(0, dtype=SIXTEEN, device=DEVICE))
    held.exp_logits.fill_(math.nan)
    held.shift.fill_(math.nan)
    return held


def exact_gradient(raw, targets, first, transform, coefficients):
    exact = reference.partials(raw, Forward(targets, first, in_float64(transform), NEEDS))
    normalizer = finish(exact, raw.shape[1], frozenset())[1]
    return oracle_gradient(raw, targets, first, transform, normalizer, coefficients)


def assert_close_statistics(found: SoftmaxState, exact: SoftmaxState, v: int, needs=NEEDS) -> None:
    found, exact = finish(found, v, needs)[0], finish(exact, v, needs)[0]
    for name in needs:
        mine, oracle = getattr(found, name).double(), getattr(exact, name)
        torch.testing.assert_close(mine, oracle, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("step", [2, 0])
def test_a_bias_of_any_stride(step):
    x, w, targets, raw = head(5, 72, 300)
    bias, needs = torch.linspace(-3, 3, 600, device=DEVICE), frozenset({"logp", "lse"})
    bias = bias.as_strided((300,), (step,))
    forward = Forward(targets, 0, Transform(bias=bias), needs)
    found = triton_backend.product_partials(x, w, forward)
    exact = reference.partials(raw + bias, Forward(targets, 0, Transform(), NEEDS))
    assert_close_statistics(found, exact, 300, needs)


@pytest.mark.parametrize("name", ["plain", "scaled", "capped rows"])
@pytest.mark.parametrize("needs", [NEEDS, frozenset({"logp", "entropy"}), frozenset({"lse"})])
def test_product_partials(name, needs):
    """The statistics that the matmul kernel computes are correct for a vocabulary slice that begins
    at column 50."""
    n, v, first = 5, 300, 50
    x, w, targets, raw = head(n, 72, v, first=first)
    transform = transforms(n)[name]
    found = triton_backend.product_partials(x, w, Forward(targets, first, transform, needs))
    exact = reference.partials(raw, Forward(targets, first, in_float64(transform), NEEDS))
    assert_close_statistics(found, exact, v, needs)


def test_product_partials_of_two_shards_merge():
    n, v = 5, 300
    x, w, targets, raw = head(n, 64, v)
    targets[1] = 280
    needs = NEEDS
    parts = [
        triton_backend.product_partials(x, w[c], Forward(targets, c.start, Transform(), needs))
        for c in (slice(0, 100), slice(100, v))
    ]
    exact = reference.partials(raw, Forward(targets, 0, Transform(), NEEDS))
    assert_close_statistics(merge(*parts), exact, v)


def test_product_of_no_tokens():
    x, w, targets, _ = head(2, 64, 40)
    found = triton_backend.product_partials(x[:0], w, Forward(targets[:0], 0, Transform(), NEEDS))
    assert all(value.shape == (0,) for value in found if value is not None)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["plain", "scaled", "rows", "capped rows"])
@pytest.mark.parametrize("which", ["tp", "tpe", "p", "tpu"])
def test_held_gradient(which, name):
    """The gradient from stored exp(z) is correct up to two roundings, also relative to the small
    gradient of a row with a likely target."""
    n, v, first = 6, 300, 20
    x, w, targets, raw = head(n, 64, v, first=first)
    transform, c = transforms(n)[name], coefficients_of(n, which)
    if "t" in which:
        c = c._replace(prob=-c.target)
    held = poisoned_held(n, v)
    found = triton_backend.product_partials(
        x, w, Forward(targets, first, transform, NEEDS), exp_tile=held
    )
    assert not held.exp_logits.isnan().any()
    stats, normalizer = finish(found, v, frozenset({"logp"}))
    backward = Backward(targets, first, transform, normalizer, c, stats.logp)
    oracle = exact_gradient(raw, targets, first, transform, c)
    if twins.is_multiple(backward):
        copy = ExpTile(exp_logits=held.exp_logits.clone(), shift=held.shift)
        multiple, _ = triton_backend.exp_multiple_(copy, backward)
        got = copy.exp_logits.double() * multiple.double().unsqueeze(1)
        # Compare row by row: a row with a likely target has a small gradient.
        assert ((got - oracle).norm(dim=1) / oracle.norm(dim=1)).max() <= 2 * HELD_EPS
    if transform.softcap is not None and c.uniform is not None:
        # not supported: the soft cap's derivative needs z, which an exp(z) that underflowed to 0
        # does not determine
        return
    for mask in ([0, 1, 0, 1, 1, 1], [1] * 6, [0] * 6):
        copy, count = ExpTile(exp_logits=held.exp_logits.clone(), shift=held.shift), sum(mask)
        order = triton_backend.dense_order(torch.tensor(mask, device=DEVICE).bool(), n - 1)
        got = triton_backend.exp_gradient_(copy, backward, order=order)
        assert got.data_ptr() == copy.exp_logits.data_ptr()
        if count:
            assert error(got[:count], oracle[order.rows[:count]]) <= 2 * HELD_EPS


@pytest.mark.parametrize("name", ["plain", "scaled", "rows", "capped rows"])
@pytest.mark.parametrize("which", ["tp", "tpe", "p", "t", "tpu", "tpeu"])
def test_product_gradient(which, name):
    """The kernel that recomputes logits writes the gradient of a vocabulary slice, rounded once."""
    n, v, first = 6, 300, 20
    x, w, targets, raw = head(n, 64, v, first=first)
    transform, c = transforms(n)[name], coefficients_of(n, which)
    if which.startswith("tp"):
        c = c._replace(prob=-c.target)
    exact = reference.partials(raw, Forward(targets, first, in_float64(transform), NEEDS))
    stats, normalizer = finish(exact, v, frozenset({"logp"}))
    oracle = oracle_gradient(raw, targets, first, transform, normalizer, c)
    single = Normalizer(*(t.float() for t in normalizer))
    got = triton_backend.product_gradient(
        x, w, Backward(targets, first, transform, single, c, stats.logp.float())
    )
    assert got.shape == (n, v) and got.dtype == x.dtype
    # Compare each token's row of the logit gradient, since the row of a likely target is small.
    # Float16 rounding adds at most 6e-8 to an element.
    off = (got.double() - oracle).norm(dim=1) - 6e-8 * v**0.5 * (x.dtype == torch.float16)
    assert (off / oracle.norm(dim=1).clamp_min(1e-30)).max() <= EPS[x.dtype] + 1e-4


def test_tokens_far_above_their_reference_are_done_again():
    """A token whose exp(z - z_target) would overflow bf16, as at z - z_target = 100, is recomputed
    with its maximum subtracted."""
    n, v = 4, 200
    x, w, targets, _ = head(n, 64, v)
    targets[1] = 40  # a target inside the vocabulary slice
    w[targets[:2]] = (-80 * x[:2] / x[:2].norm(dim=1, keepdim=True)).to(w.dtype)
    raw = x.double() @ w.double().t()
    assert (raw.max(1).values - raw.gather(1, targets[:, None])[:, 0])[:2].min() > 100
    held = poisoned_held(n, v)
    needs = frozenset({"logp", "lse", "entropy"})
    found = triton_backend.product_partials(
        x, w, Forward(targets, 0, Transform(), needs), exp_tile=held
    )
    exact = reference.partials(raw, Forward(targets, 0, Transform(), NEEDS))
    assert_close_statistics(found, exact, v, needs)
    stats, normalizer = finish(found, v, frozenset({"logp"}))
    c = coefficients_of(n, "tp")
    oracle = exact_gradient(raw, targets, 0, Transform(), c)
    multiple, _ = triton_backend.exp_multiple_(
        held, Backward(targets, 0, Transform(), normalizer, c, stats.logp)
    )
    got = held.exp_logits.double() * multiple.double().unsqueeze(1)
    assert error(got, oracle) <= 2 * HELD_EPS


def test_rows_without_coefficients_have_no_gradient():
    """Rows whose gradient coefficients are 0 get a gradient of 0, without a division by the
    coefficient `c_prob`."""
    n, v = 3, 100
    x, w, targets, raw = head(n, 64, v)
    held = poisoned_held(n, v)
    found = triton_backend.product_partials(
        x, w, Forward(targets, 0, Transform(), NEEDS), exp_tile=held
    )
    stats, normalizer = finish(found, v, frozenset({"logp"}))
    c = SoftmaxCoefficients(
        target=torch.tensor([0.0, 0.0, 2.0], device=DEVICE),
        prob=torch.tensor([0.0, -1.0, 0.0], device=DEVICE),
    )
    multiple, _ = triton_backend.exp_multiple_(
        held, Backward(targets, 0, Transform(), normalizer, c, stats.logp)
    )
    oracle = exact_gradient(raw, targets, 0, Transform(), c)
    got = held.exp_logits.double() * multiple.double().unsqueeze(1)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    assert error(got, oracle) <= 2 * HELD_EPS


def test_product_keeps_the_digits_of_a_nearly_certain_token():
    x, w = (torch.zeros(k, 64, dtype=SIXTEEN, device=DEVICE) for k in (3, 600))
    x[:, 0], w[:, 0], w[7, 0] = 20, -1, 0
    # Token 1 has equal logits at its target, id 7, and at id 500, which the kernel computes in
    # another block of vocabulary columns.
    w[500, 1], x[1, 1] = 20, 1
    targets = torch.full((3,), 7, device=DEVICE)
    needs = frozenset({"logp", "entropy"})
    found = triton_backend.product_partials(x, w, Forward(targets, 0, Transform(), needs))
    small = math.exp(-20)
    expected = torch.tensor([599 * small, 1 + 598 * small, 599 * small], device=DEVICE)
    torch.testing.assert_close(found.sumexp_m1, expected, rtol=3e-6, atol=0)


needs_tensor_cores = pytest.mark.skipif(
    DEVICE != "cuda" or torch.cuda.get_device_capability()[0] != 9,
    reason="the rounding of a Hopper GPU's tensor cores",
)


def log_prob_errors(x, w, targets):
    """Return the [T] log-prob errors of a call, against float64."""
    with torch.no_grad():
        found = hl.head_stats(x, hl.Head(w), targets).logp.double()
        logits = x.double() @ w.double().t()
    return found - logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)


@needs_tensor_cores
@pytest.mark.parametrize(("h", "v"), [(896, 151936), (2048, 151936), (4096, 128256)])
def test_log_probs_of_a_trained_head(h, v):
    """Log-probs of a head like a trained one are accurate, although a likely target's large logit
    has a larger rounding error."""
    given = trained_looking(2048, h, v, torch.bfloat16, torch.device(DEVICE), 0)
    assert log_prob_errors(*given).abs().max() <= 1e-5


@needs_tensor_cores
@pytest.mark.parametrize(("h", "bound"), [(896, 6e-6), (4096, 1e-5)])
def test_log_probs_have_little_bias(h, bound):
    """Log-probs are nearly unbiased, although tensor cores round toward zero when they sum logits
    as large as 45.

    Without a correction of this rounding, the logits of likely tokens would be too small: by up to
    6e-5 and on average 2.4e-5 at hidden width 896, by up to 26e-5 and on average 12e-5 at 4096.
    """
    generator = torch.Generator(DEVICE).manual_seed(5)
    x = torch.randn(2048, h, generator=generator, device=DEVICE).bfloat16()
    w = (torch.randn(32000, h, generator=generator, device=DEVICE) * 8 * h**-0.5).bfloat16()
    targets = torch.randint(0, 32000, (2048,), generator=generator, device=DEVICE)
    assert log_prob_errors(x, w, targets).mean().abs() <= bound


@needs_tensor_cores
@pytest.mark.parametrize("h", [896, 4096])
def test_raw_logits_lack_nothing_of_their_size(h):
    """Raw float32 logits are corrected for the rounding toward zero on tensor cores."""
    x, w, _ = trained_looking(1024, h, 8192, torch.bfloat16, torch.device(DEVICE), 0)
    exact = x.double() @ w.double().t()
    z = PLAIN.logits(x, w)
    z = PLAIN.logits(x, w, z).double() / 2  # accumulates onto itself
    assert abs(((exact - z) * exact).sum() / exact.square().sum()) <= 0.25e-9 * h


def test_product_names_what_it_cannot_take():
    x, w = (torch.zeros(k, 65, dtype=SIXTEEN, device=DEVICE) for k in (4, 300))
    targets = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    assert not triton_backend.can_fuse(x, w)
    with pytest.raises(ValueError, match="16 bytes"):
        triton_backend.product_partials(x, w, Forward(targets, 0, Transform(), NEEDS))


@pytest.mark.parametrize("case", ["none", "few", "all", "no order"])
def test_a_multiple_moved_and_with_its_features_in_one_launch(case, fresh_memory_is_nan):
    """One kernel launch that scales and reorders rows gives the same bits as three launches."""
    n, v, first = 9, 300, 20
    x, w, targets, _ = head(n, 72, v, first=first)
    transform, c = transforms(n)["rows"], coefficients_of(n, "tp")
    held = poisoned_held(n, v)
    found = triton_backend.product_partials(
        x, w, Forward(targets, first, transform, NEEDS), exp_tile=held
    )
    stats, normalizer = finish(found, v, frozenset({"logp"}))
    backward = Backward(targets, first, transform, normalizer, c, stats.logp)
    kept = {"none": [], "few": [0, 3, 7, 8], "all": range(n), "no order": ()}[case]
    mask = torch.zeros(n, dtype=torch.bool, device=DEVICE)
    mask[list(kept)] = True
    order = None if case == "no order" else triton_backend.dense_order(mask, n)
    one, other = (ExpTile(exp_logits=held.exp_logits.clone(), shift=held.shift) for _ in range(2))
    multiple, features = triton_backend.exp_multiple_(one, backward, x=x, order=order)
    expected, nothing = triton_backend.exp_multiple_(other, backward)
    assert nothing is None and features is not None
    rows, count = torch.arange(n, device=DEVICE), n
    if order is not None:
        rows, count = order.rows, int(order.count)
        assert count == len(kept)
    scaled = triton_backend.scaled_rows(x[rows], expected[rows])
    assert torch.equal(one.exp_logits[:count], other.exp_logits[rows][:count])
    assert torch.equal(multiple[:count], expected[rows][:count])
    assert torch.equal(features[:count], scaled[:count])


def test_multiples_of_no_tokens():
    held = poisoned_held(0, 40)
    none = held.shift
    normalizer, c = Normalizer(none, none), SoftmaxCoefficients(prob=none)
    backward = Backward(none.long(), 0, Transform(), normalizer, c, none)
    multiple, features = triton_backend.exp_multiple_(held, backward, x=none[:, None])
    assert multiple.shape == (0,) and features is not None and features.shape == (0, 1)


@pytest.mark.parametrize("backend", [triton_backend, reference])
@pytest.mark.parametrize("number", [None, 1.0, 2.0**-18])
def test_gradients_are_scaled_and_rounded_once(backend, number, fresh_memory_is_nan):
    """`scaled` multiplies sums by a factor and rounds once, to the same, a wider or a narrower
    dtype, also for an empty tensor."""
    factor = None if number is None else torch.tensor(number, device=DEVICE)
    values = [torch.randn(shape, device=DEVICE) for shape in ((3, 3000), (40,), (5000,), (0, 7))]
    values.append(values[1].bfloat16())
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.bfloat16)
    for value, dtype in zip(values, dtypes, strict=True):
        exact = value.double() * (number or 1.0)
        (one,) = backend.scaled([Sum(value, dtype)], factor)
        assert one.dtype == dtype and (value.dtype != dtype or one is value)
        close = {"rtol": 2**-7 if dtype == torch.bfloat16 else 2**-10, "atol": 2**-24}
        close = close if dtype != torch.float32 else {"rtol": 1e-7, "atol": 0}
        torch.testing.assert_close(one.double(), exact, **close)


def test_scaled_rows():
    x, scale = torch.randn(6, 80, device=DEVICE)[:, ::2].bfloat16(), torch.rand(6, device=DEVICE)
    expected = (x.float() * scale[:, None]).bfloat16()
    close = {"rtol": HELD_EPS, "atol": 0}
    torch.testing.assert_close(triton_backend.scaled_rows(x, scale), expected, **close)
    places = torch.tensor([4, 7, 1], device=DEVICE)
    out = torch.full((8, 45), torch.nan, device=DEVICE)[:, :40]
    triton_backend.scaled_rows(x, scale[:3], out=out, places=places)
    torch.testing.assert_close(out[places], x[:3].float() * scale[:3, None], rtol=1e-6, atol=0)
    assert out[[0, 2, 3, 5, 6]].isnan().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_capture_in_a_graph_and_the_same_bits_twice():
    n, v = 200, 1000
    x, w, targets, _ = head(n, 64, v)
    needs = frozenset({"logp", "entropy"})
    c = coefficients_of(n, "tp")

    def run() -> tuple[torch.Tensor, ...]:
        held = ExpTile.empty(n, v, torch.empty(0, dtype=SIXTEEN, device=DEVICE))
        found = triton_backend.product_partials(
            x, w, Forward(targets, 0, Transform(), needs), exp_tile=held
        )
        stats, normalizer = finish(found, v, needs)
        backward = Backward(targets, 0, Transform(), normalizer, c, stats.logp)
        multiple, _ = triton_backend.exp_multiple_(held, backward)
        return stats.logp, stats.entropy, held.exp_logits, multiple

    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert all(map(torch.equal, first, captured))


@pytest.mark.skipif(DEVICE == "cpu", reason="whole calls take kernels on a GPU")
@pytest.mark.parametrize("schedule", ["one_pass", "held", "recompute"])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_whole_calls_of_a_head_with_a_bias(schedule, softcap):
    """Calls with a bias give its gradient correctly, both from stored exp(z) and from blocks of
    vocabulary rows."""
    hidden, weight, targets = trained_looking(900, 256, 3000, torch.bfloat16, DEVICE)
    bias = torch.randn(3000, device=DEVICE).bfloat16()
    leaves = {"hidden": hidden, "weight": weight, "bias": bias}
    for leaf in leaves.values():
        leaf.requires_grad_()
    head, batch = hl.Head(weight, bias=bias, softcap=softcap), hl.Batch(targets)
    for objective in (hl.cross_entropy(), hl.cross_entropy() - 0.1 * hl.entropy()):
        oracle = plain(hidden, head, batch, objective, "float64")
        coarse = plain(hidden, head, batch, objective, "input")
        options = hl.Options(schedule=schedule, memory_budget=3 << 20)
        if schedule == "held":
            options = hl.Options(schedule=schedule)
        out = hl.head_loss(hidden, head, batch, objective, options)
        assert out.plan.exp_tiles and abs(out.loss.double() - oracle.loss) <= 1e-5
        for key, found in zip(leaves, torch.autograd.grad(out.loss, leaves.values()), strict=True):
            want = oracle.gradients[key]
            assert error(found, want) <= 3 * error(coarse.gradients[key], want) + 2**-8, key
