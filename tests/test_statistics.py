"""Online-softmax states of vocabulary slices merge, statistics are exact, and four coefficients
express any logit gradient."""

from __future__ import annotations

import decimal
import math
from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headloss as hl
from headloss.kernels import reference
from headloss.kernels.interface import Backward, Forward
from headloss.kernels.reference import tile
from headloss.kernels.transform import Transform
from headloss.statistics.softmax import (
    DIFFERENTIABLE,
    STATISTICS,
    Normalizer,
    SoftmaxCoefficients,
    SoftmaxState,
    Statistics,
    finish,
    merge,
    vjp,
)

ALL = frozenset(STATISTICS)
PLAIN = Transform()
FIELDS = SoftmaxState._fields
act_one = tile.partials


def partials(raw: Tensor, *forward) -> SoftmaxState:
    return act_one(raw, Forward(*forward))


def logit_gradient_(raw: Tensor, targets, first, transform, normalizer, c) -> Tensor:
    logps = partials(raw, targets, first, transform, frozenset()).target
    logps = (logps - normalizer.max_logit) - normalizer.log_sum
    return tile.logit_gradient_(
        raw, Backward(targets, first, transform, normalizer, c, logps)
    )


def oracle(z: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return logp, lse, entropy, mean_logit and top1 by definition, differentiable and in float64;
    z may contain -inf."""
    z = z.double()
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    target = targets.unsqueeze(1)
    return {
        "logp": log_p.gather(1, target).squeeze(1),
        "lse": z.logsumexp(-1),
        "entropy": -(p * torch.where(p > 0, log_p, 0)).sum(-1),
        "mean_logit": z.mean(-1),
        "top1": (z.gather(1, target).squeeze(1) >= z.amax(-1)).double().detach(),
    }


def empty_slice(n: int, dtype: torch.dtype = torch.float64) -> SoftmaxState:
    nothing, nowhere = torch.zeros(n, dtype=dtype), torch.full((n,), -math.inf, dtype=dtype)
    return SoftmaxState(
        max_logit=nowhere,
        sumexp_m1=nothing - 1,
        target=nowhere.clone(),
        entropy_sum=nothing,
        logit_sum=nothing,
    )


def sliced(z: Tensor, targets: Tensor, borders: list[int]) -> list[SoftmaxState]:
    """Return the online-softmax states of consecutive vocabulary slices, some of which may be
    empty."""
    edges = [0, *sorted(borders), z.shape[1]]
    return [
        partials(z[:, a:b], targets, a, PLAIN, ALL) if b > a else empty_slice(len(z), z.dtype)
        for a, b in pairwise(edges)
    ]


def assert_same(a: SoftmaxState, b: SoftmaxState, tolerance: float = 1e-12) -> None:
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(a, name), getattr(b, name), rtol=tolerance, atol=tolerance, msg=name
        )


@st.composite
def problems(draw) -> tuple[Tensor, Tensor, list[int]]:
    """Draw logits of 3 tokens with ties, wide ranges and -inf, targets, and borders of slices."""
    width = draw(st.integers(1, 9))
    number = st.one_of(
        st.floats(-90, 90, allow_nan=False), st.sampled_from([0.0, 75.0, -700.0, -math.inf])
    )
    rows = draw(st.lists(st.lists(number, min_size=width, max_size=width), min_size=3, max_size=3))
    z = torch.tensor(rows, dtype=torch.float64)
    # Give each target a finite logit, so that its probability is positive.
    targets = torch.tensor(draw(st.lists(st.integers(0, width - 1), min_size=3, max_size=3)))
    z[torch.arange(3), targets] = z[torch.arange(3), targets].nan_to_num(neginf=1.0)
    return z, targets, draw(st.lists(st.integers(0, width), max_size=4))


# ---------------------------------------------------------------------- law 2: a monoid


@given(problems())
def test_the_empty_slice_is_the_identity(problem):
    z, targets, _ = problem
    whole, nothing = partials(z, targets, 0, PLAIN, ALL), empty_slice(len(z))
    assert_same(merge(whole, nothing), whole, 0)
    assert_same(merge(nothing, whole), whole, 0)
    assert_same(merge(nothing, nothing), nothing, 0)


@given(problems(), st.data())
def test_merge_commutes_and_associates(problem, data):
    z, targets, borders = problem
    parts = sliced(z, targets, [*borders, 0, 0])  # at least three slices
    a, b, c = data.draw(st.permutations(parts))[:3]
    assert_same(merge(a, b), merge(b, a))
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))


@given(problems(), st.randoms(use_true_random=False))
def test_any_split_in_any_order_merges_to_the_whole(problem, random):
    z, targets, borders = problem
    parts = sliced(z, targets, borders)
    random.shuffle(parts)
    joined, whole = reduce(merge, parts), partials(z, targets, 0, PLAIN, ALL)
    assert_same(joined, whole)
    found, _ = finish(joined, z.shape[1], ALL)
    for name, want in oracle(z, targets).items():
        torch.testing.assert_close(getattr(found, name), want, rtol=1e-12, atol=1e-12, msg=name)


def test_a_slice_without_mass_merges():
    """Vocabulary slices whose logits are all -inf merge correctly before, between and after other
    slices."""
    z = torch.randn(2, 8, dtype=torch.float64)
    z[:, :2] = z[:, 4:6] = z[:, 7:] = -math.inf
    targets = torch.tensor([2, 6])
    found, _ = finish(reduce(merge, sliced(z, targets, [2, 4, 6, 7])), 8, ALL)
    for name in ("logp", "lse", "entropy", "top1"):
        torch.testing.assert_close(getattr(found, name), oracle(z, targets)[name])
    assert found.mean_logit is not None and found.mean_logit.eq(-math.inf).all()


# ---------------------------------------------------------------------- the five statistics


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize(
    "transform",
    [
        PLAIN,
        Transform(scale=0.3),
        Transform(scale=-2.0, temperature=1.7),
        Transform(softcap=5.0, scale=1.5),
        Transform(softcap=30.0, temperature=torch.linspace(0.5, 2, 17)),
    ],
    ids=str,
)
def test_statistics_against_float64(transform, dtype, tolerance):
    raw = (3 * torch.randn(17, 101)).to(dtype)
    targets = torch.randint(101, (17,))
    targets[0] = transform(raw)[0].argmax()
    if isinstance(transform.temperature, Tensor):
        transform = Transform(softcap=30.0, temperature=transform.temperature.to(dtype))
    z = raw.double() * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    t = transform.temperature
    want = oracle(z / (t.double().unsqueeze(1) if isinstance(t, Tensor) else t), targets)
    found, normalizer = finish(partials(raw, targets, 0, transform, ALL), 101, ALL)
    for name in STATISTICS:
        value = getattr(found, name)
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), want[name], rtol=tolerance, atol=tolerance)
    lse = (normalizer.max_logit + normalizer.log_sum).double()
    torch.testing.assert_close(lse, want["lse"], rtol=tolerance, atol=tolerance)


def test_a_row_does_not_depend_on_the_blocks_of_the_reference(monkeypatch):
    raw, targets = torch.randn(13, 50), torch.randint(50, (13,))
    whole = partials(raw, targets, 0, PLAIN, ALL)
    monkeypatch.setattr(tile, "BLOCK_ELEMENTS", 150)
    assert_same(partials(raw, targets, 0, PLAIN, ALL), whole, 0)


# ---------------------------------------------------------------------- cancellation


# (entropy in nats, gap): logits with one largest entry and 1000 entries lower by the gap.
CERTAIN = [(1e-2, 14.22), (1e-5, 21.52), (1e-8, 28.72)]


def nearly_certain(gap: float) -> Tensor:
    """Return [1, 1001] float32 logits: 75 for token 7 and 75 - `gap` for all other tokens, so that
    the log-sum-exp is 75."""
    z = torch.full((1, 1001), 75 - gap)
    z[0, 7] = 75
    return z


def in_decimals(z: Tensor) -> tuple[float, float]:
    """Return the log-prob of vocabulary entry 7 and the entropy of the logits `z`, in 50-digit
    arithmetic, since float64 has too few digits."""
    with decimal.localcontext(prec=50):
        numbers = [decimal.Decimal(v) for v in z[0].double().tolist()]
        lse = sum(v.exp() for v in numbers).ln()
        entropy = -sum((v - lse).exp() * (v - lse) for v in numbers)
        return float(numbers[7] - lse), float(entropy)


@pytest.mark.parametrize("borders", [[], [8], [100, 333, 700]], ids=["whole", "after", "tiles"])
@pytest.mark.parametrize(("size", "gap"), CERTAIN)
def test_small_entropies_keep_their_digits(size, gap, borders):
    """Small entropies are accurate, because the online-softmax state stores the sum of exponentials
    without its largest term 1.

    At a log-sum-exp of 75 the formula lse - sum(p z) would lose all digits of an entropy of 1e-5.
    """
    z = nearly_certain(gap)
    logp, entropy = in_decimals(z)
    assert entropy == pytest.approx(size, rel=0.1)
    found, _ = finish(reduce(merge, sliced(z, torch.tensor([7]), borders)), 1001, ALL)
    assert found.logp is not None and found.entropy is not None
    assert float(found.logp) == pytest.approx(logp, rel=1e-5, abs=0)
    assert float(found.entropy) == pytest.approx(entropy, rel=1e-5, abs=0)


@pytest.mark.parametrize(("size", "gap"), CERTAIN)
def test_gradients_of_small_entropies_keep_their_digits(size, gap):
    """Gradients of small entropies, dH/dz_j = -p_j (log p_j + H), keep their digits for all
    tokens."""
    z, targets = nearly_certain(gap), torch.tensor([7])
    logp, entropy = in_decimals(z)
    others = logp - float(z[0, 7].double() - z[0, 0].double())
    stats, normalizer = finish(partials(z, targets, 0, PLAIN, ALL), 1001, ALL)
    coefficients = vjp({"entropy": torch.ones(1)}, stats, 1001)
    got = logit_gradient_(z.clone(), targets, 0, PLAIN, normalizer, coefficients)
    want = -math.exp(logp) * (logp + entropy), -math.exp(others) * (others + entropy)
    assert float(got[0, 7]) == pytest.approx(want[0], rel=1e-5, abs=0)
    assert float(got[0, 0]) == pytest.approx(want[1], rel=1e-5, abs=0)


def test_logits_of_minus_infinity():
    """Logits of -inf have probability 0, add nothing to the entropy, and get a gradient of exactly
    0."""
    z, targets = torch.randn(4, 30), torch.tensor([1, 5, 9, 29])
    banned = torch.zeros(30, dtype=torch.bool)
    banned[[0, 2, 10, 11]] = True
    z[:, banned] = -math.inf
    found, normalizer = finish(partials(z, targets, 0, PLAIN, ALL), 30, ALL)
    kept = oracle(z[:, ~banned], (~banned).cumsum(0)[targets] - 1)
    for name in ("logp", "lse", "entropy", "top1"):
        torch.testing.assert_close(
            getattr(found, name).double(), kept[name], rtol=1e-6, atol=1e-6, msg=name
        )
    slopes = {"logp": torch.randn(4), "lse": torch.randn(4), "entropy": torch.randn(4)}
    coefficients = vjp(slopes, found, 30)
    got = logit_gradient_(z.clone(), targets, 0, PLAIN, normalizer, coefficients)
    assert got[:, banned].eq(0).all() and got.isfinite().all()


def test_a_target_of_minus_infinity_has_no_probability():
    z, targets = torch.randn(1, 5), torch.tensor([3])
    z[0, 3] = -math.inf
    found, _ = finish(partials(z, targets, 0, PLAIN, ALL), 5, ALL)
    assert found.logp is not None and found.logp.tolist() == [-math.inf]
    assert found.entropy is not None and found.entropy.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_token_with_all_the_mass(dtype):
    z, targets = torch.zeros(2, 40, dtype=dtype), torch.tensor([3, 4])
    z[:, 3] = 1e5
    found, normalizer = finish(partials(z, targets, 0, PLAIN, ALL), 40, ALL)
    assert found.logp is not None and found.logp.tolist() == [0.0, -1e5]
    assert found.entropy is not None and found.entropy.tolist() == [0.0, 0.0]
    assert found.top1 is not None and found.top1.tolist() == [1.0, 0.0]
    one = torch.ones(2, dtype=dtype)
    coefficients = vjp({"logp": one, "entropy": one}, found, 40)
    got = logit_gradient_(z, targets, 0, PLAIN, normalizer, coefficients)
    want = torch.zeros(2, 40, dtype=dtype)
    # the log-prob's gradient: +1 at the unlikely target, -1 at the token that has all probability
    want[1, 4], want[1, 3] = 1, -1
    assert got.equal(want)


def test_a_vocabulary_of_one_token():
    found, _ = finish(
        partials(torch.randn(3, 1), torch.zeros(3, dtype=torch.long), 0, PLAIN, ALL), 1, ALL
    )
    assert found.logp is not None and found.logp.eq(0).all()
    assert found.entropy is not None and found.entropy.eq(0).all()


# ---------------------------------------------------------------------- law 1: the vjp


@st.composite
def transforms(draw) -> Transform:
    temperature = draw(st.sampled_from(["number", "vector", "one"]))
    return Transform(
        scale=draw(st.sampled_from([1.0, 0.25, -1.5])),
        softcap=draw(st.sampled_from([None, 2.0, 30.0])),
        temperature={
            "number": 0.7,
            "one": 1.0,
            "vector": 0.5 + torch.rand(6, dtype=torch.float64),
        }[temperature],
    )


@given(transforms(), st.sets(st.sampled_from(DIFFERENTIABLE), min_size=1), st.integers(0, 99))
def test_four_coefficients_are_the_gradient_of_any_mix(transform, names, seed):
    """Four coefficients per token give the logit gradient of any function of the statistics, for
    instance of a product of two."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(6, 23, generator=generator, dtype=torch.float64).mul_(3).requires_grad_()
    targets = torch.randint(23, (6,), generator=generator)
    g = {n: torch.randn(6, generator=generator, dtype=torch.float64) for n in sorted(names)}

    def mix(stats: dict[str, Tensor]) -> Tensor:
        linear = sum((g[n] * stats[n]).sum() for n in g)
        first, last = min(g), max(g)
        return linear + (stats[first] * stats[last]).sum()

    divisor = transform.temperature
    if isinstance(divisor, Tensor):
        divisor = divisor.unsqueeze(1)
    z = raw * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    (want,) = torch.autograd.grad(mix(oracle(z / divisor, targets)), raw)

    tile = raw.detach().clone()
    stats, normalizer = finish(partials(tile, targets, 0, transform, ALL), 23, ALL)
    leaves = {n: t.clone().requires_grad_() for n, t in stats.tensors().items() if n in g}
    slopes = dict(zip(leaves, torch.autograd.grad(mix(leaves), list(leaves.values())), strict=True))
    coefficients = vjp(slopes, stats, 23)
    # Compute the gradient in two tiles of the vocabulary, columns 0 to 8 and 9 to 22, as the
    # `recompute` schedule does.
    for columns in (slice(0, 9), slice(9, 23)):
        part = logit_gradient_(
            tile[:, columns].clone(), targets, columns.start, transform, normalizer, coefficients
        )
        torch.testing.assert_close(part, want[:, columns], rtol=1e-10, atol=1e-11)


def test_coefficients_are_those_of_the_law():
    stats = Statistics(entropy=torch.tensor([0.5]))
    slopes = {
        "logp": torch.tensor([2.0]),
        "lse": torch.tensor([3.0]),
        "entropy": torch.tensor([4.0]),
        "mean_logit": torch.tensor([10.0]),
    }
    found = {n: float(t) for n, t in vjp(slopes, stats, 5).tensors().items()}
    assert found == {"target": 2.0, "prob": 3.0 - 2.0 - 4.0 * 0.5, "entropy": -4.0, "uniform": 2.0}


def test_absent_coefficients_are_none():
    assert vjp({}, Statistics(), 5).tensors() == {}
    only = vjp({"logp": torch.ones(1)}, Statistics(), 5)
    assert set(only.tensors()) == {"target", "prob"}
    nothing = logit_gradient_(
        torch.randn(2, 4),
        torch.zeros(2, dtype=torch.long),
        0,
        PLAIN,
        Normalizer(torch.zeros(2), torch.zeros(2)),
        SoftmaxCoefficients(),
    )
    assert nothing.eq(0).all()


# ---------------------------------------------------------------------- only what is needed


def test_partials_hold_only_what_is_needed():
    raw, targets = torch.randn(3, 7), torch.zeros(3, dtype=torch.long)
    lean = partials(raw, targets, 0, PLAIN, frozenset({"logp", "lse", "top1"}))
    assert lean.entropy_sum is None and lean.logit_sum is None
    joined = merge(lean, lean)
    assert joined.entropy_sum is None and joined.logit_sum is None
    found, _ = finish(lean, 7, frozenset({"logp"}))
    assert set(found.tensors()) == {"logp"}


@pytest.mark.parametrize(
    ("objective", "metrics", "spread", "total"),
    [
        (hl.cross_entropy(), False, False, False),
        (hl.cross_entropy(), True, True, False),
        (hl.cross_entropy(label_smoothing=0.1), False, False, True),
        (hl.cross_entropy() - 1e-3 * hl.entropy(), False, True, False),
        (hl.cross_entropy() + 1e-4 * hl.z_loss(), False, False, False),
    ],
)
def test_a_call_computes_only_what_its_objective_reads(
    monkeypatch, objective, metrics, spread, total
):
    seen: list[SoftmaxState] = []

    def spy(*args, onto=None):
        seen.append(act_one(*args))
        return seen[-1]

    monkeypatch.setattr(reference, "partials", spy)
    weight = torch.randn(11, 4, requires_grad=True)
    batch = hl.Batch(torch.randint(11, (6,)))
    out = hl.head_loss(
        torch.randn(6, 4), hl.Head(weight), batch, objective, hl.Options(metrics=metrics)
    )
    assert seen
    assert {p.entropy_sum is not None for p in seen} == {spread}
    assert {p.logit_sum is not None for p in seen} == {total}
    assert (out.entropies is not None) == spread
    assert bool(out.metrics) == metrics


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("names", ["tp", "tpe", "tpu"])
def test_a_tile_of_the_whole_vocabulary_needs_no_search(names, softcap):
    """If a tile spans the whole vocabulary, its gradient is computed without a search for the
    target's column, and equals the gradient from tiles that span parts of the vocabulary.

    Token 0's target logit is 40, so that only 1e-9 of its probability lies elsewhere.
    """
    n, v, targets = 5, 17, torch.tensor([3, 0, 16, 7, 7])
    raw = torch.randn(n, v)
    raw[0, 3], raw[1, 5] = 40.0, 40.0
    transform, needs = Transform(softcap=softcap, temperature=0.5), frozenset({"logp", "entropy"})
    found = tile.partials(raw.clone(), Forward(targets, 0, transform, needs))
    stats, normalizer = finish(found, v, needs)
    fields = [k for k in SoftmaxCoefficients._fields if k[0] in names]
    c = SoftmaxCoefficients(**{k: torch.randn(n) for k in fields})
    given = targets, 0, transform, normalizer, c, stats.logp
    want, found = (
        tile.logit_gradient_(raw.clone(), Backward(*given, None, known)) for known in (False, True)
    )
    torch.testing.assert_close(found, want, rtol=2e-6, atol=1e-12)
