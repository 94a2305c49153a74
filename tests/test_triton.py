"""Triton's softmax statistics and logit gradient agree with the float64 reference; on a CPU the
kernels are interpreted."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from triton_cases import (
    DEVICE,
    DTYPES,
    EPS,
    NEEDS,
    OUT_DTYPES,
    assert_statistics,
    backward_of,
    coefficients_of,
    error,
    in_float64,
    oracle_gradient,
    targets_of,
    tile,
    transforms,
)

from headloss.kernels import reference
from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import Backward, Forward
from headloss.kernels.transform import Transform
from headloss.statistics.softmax import Normalizer, SoftmaxState, finish


@pytest.mark.parametrize("name", transforms(1))
@pytest.mark.parametrize(
    ("n", "v", "dtype"),
    [(5, 97, torch.float32), (3, 1000, torch.bfloat16), (4, 1000, torch.float16)],
)
def test_partials(n, v, dtype, name, monkeypatch):
    monkeypatch.setattr("headloss.kernels.triton.records.BLOCK", 256)
    raw, targets, transform = tile(n, v, dtype), targets_of(n, v), transforms(n)[name]
    found = triton_backend.partials(raw, Forward(targets, 0, transform, NEEDS))
    assert_statistics(found, raw, targets, 0, transform)


def test_partials_writes_only_what_is_needed():
    raw, targets = tile(3, 97, torch.float32), targets_of(3, 97)
    found = triton_backend.partials(raw, Forward(targets, 0, Transform(), frozenset({"logp"})))
    assert found.entropy_sum is None and found.logit_sum is None


def test_partials_onto_earlier_tiles():
    """Merging the online-softmax states of tiles gives the state of the whole row, whether or not a
    tile contains the target."""
    n, v, tile_width = 5, 600, 256
    raw, transform = tile(n, v, torch.float32), transforms(n)["rows"]
    targets = torch.tensor([0, 255, 256, 599, 300], device=DEVICE)
    running = None
    for start in range(0, v, tile_width):
        columns = slice(start, min(v, start + tile_width))
        running = triton_backend.partials(
            raw[:, columns], Forward(targets, columns.start, transform, NEEDS), onto=running
        )
    assert_statistics(running, raw, targets, 0, transform)


def test_partials_into_poisoned_memory_with_minus_infinity():
    """Online-softmax states written into NaN-filled memory are correct for logits of -inf, for a
    first tile of -inf alone, and for a target of -inf."""
    n, v = 4, 130
    raw, targets = tile(n, v, torch.float32), torch.tensor([3, 100, 5, 129], device=DEVICE)
    raw[0, 3] = -math.inf
    raw[1, :64] = -math.inf
    raw[2, ::2] = -math.inf
    running = None
    for columns in (slice(0, 64), slice(64, 130)):
        running = triton_backend.partials(
            raw[:, columns], Forward(targets, columns.start, Transform(), NEEDS), onto=running
        )
    exact = reference.partials(raw.double(), Forward(targets, 0, Transform(), NEEDS))
    needs = frozenset({"logp", "lse", "entropy"})
    stats, oracle = finish(running, v, needs)[0], finish(exact, v, needs)[0]
    for name in needs:
        torch.testing.assert_close(
            getattr(stats, name).double(), getattr(oracle, name), rtol=2e-6, atol=1e-6
        )


def test_rest_keeps_its_digits():
    """The kernel's logarithm of the sum of exponentials, with the largest logit subtracted, is
    accurate for a nearly certain token and for several equal largest logits."""
    raw = torch.full((2, 500), -20.0, device=DEVICE)
    raw[0, 7] = 0.0
    raw[1, 7] = raw[1, 499] = 0.0
    targets = torch.full((2,), 7, device=DEVICE)
    found = triton_backend.partials(raw, Forward(targets, 0, Transform(), frozenset({"logp"})))
    expected = torch.tensor([499 * math.exp(-20), 1 + 498 * math.exp(-20)], device=DEVICE)
    torch.testing.assert_close(found.sumexp_m1, expected, rtol=2e-6, atol=0)


GRADIENTS = ["tp", "p", "t", "tpe", "tpu", "tpeu"]


@pytest.mark.parametrize("name", ["plain", "scaled", "capped rows"])
@pytest.mark.parametrize("which", GRADIENTS)
def test_gradient(which, name, monkeypatch):
    """The gradient of a tile from column 40 is correct in every dtype."""
    monkeypatch.setattr("headloss.kernels.triton.records.BLOCK", 64)
    n, v, first = 4, 97, 40
    transform, c = transforms(n)[name], coefficients_of(n, which)
    targets = torch.tensor([41, 3, 136, 40 + v], device=DEVICE)
    for dtype, out_dtype in zip(DTYPES, OUT_DTYPES, strict=True):
        raw = tile(n, v, dtype)
        exact = reference.partials(
            raw.double(), Forward(targets, first, in_float64(transform), NEEDS)
        )
        normalizer = finish(exact, v, frozenset())[1]
        normalizer = Normalizer(normalizer.max_logit.float(), normalizer.log_sum.float())
        oracle = oracle_gradient(raw, targets, first, transform, normalizer, c)
        backward = backward_of(raw, targets, first, transform, normalizer, c)
        found = triton_backend.logit_gradient_(raw, backward._replace(dtype=out_dtype))
        assert found.shape == (n, v) and found.dtype == out_dtype
        assert found.data_ptr() == raw.data_ptr() and raw._base[:, v:].isnan().all()
        # Normalizers are fp32, so log p has a relative error of a few 1e-7.
        assert error(found, oracle) <= EPS[out_dtype] + 3e-6


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_gradient_in_place(dtype, out_dtype, monkeypatch):
    """The gradient may overwrite raw logits, even in a narrower dtype and in several blocks."""
    monkeypatch.setattr("headloss.kernels.triton.records.BLOCK", 128)
    n, v = 5, 600
    raw, targets, c = tile(n, v, dtype, pad=4), targets_of(n, v), coefficients_of(n, "tpe")
    transform = transforms(n)["capped rows"]
    exact = reference.partials(raw.double(), Forward(targets, 0, in_float64(transform), NEEDS))
    normalizer = Normalizer(*(t.float() for t in finish(exact, v, frozenset())[1]))
    oracle = oracle_gradient(raw, targets, 0, transform, normalizer, c)
    backward = backward_of(raw, targets, 0, transform, normalizer, c)._replace(dtype=out_dtype)
    found = triton_backend.logit_gradient_(raw, backward)
    assert found.data_ptr() == raw.data_ptr()
    assert error(found, oracle) <= EPS[out_dtype] + 3e-6


def test_power_of_two_scaling_is_exact():
    """Scaling coefficients by 2^k scales a bf16 gradient exactly by 2^k."""
    raw, targets, c = tile(3, 97, torch.float32), targets_of(3, 97), coefficients_of(3, "tpe")
    normalizer = finish(
        triton_backend.partials(raw, Forward(targets, 0, Transform(), NEEDS)), 97, frozenset()
    )[1]
    backward = backward_of(raw, targets, 0, Transform(), normalizer, c)
    scaled = backward._replace(coefficients=c.map(lambda t: t * 2.0**10))
    small, large = (
        triton_backend.logit_gradient_(raw.clone(), b._replace(dtype=torch.bfloat16))
        for b in (backward, scaled)
    )
    assert torch.equal(small.float() * 1024, large.float())


@pytest.mark.parametrize("block", [4, 2048])
def test_dense_order_reads_no_row_after_it_is_written(block, monkeypatch):
    monkeypatch.setattr("headloss.kernels.triton.order.BLOCK", block)
    for pattern in itertools.product((False, True), repeat=6):
        kept = [i for i, k in enumerate(pattern) if k]
        rows, count = triton_backend.dense_order(torch.tensor(pattern, device=DEVICE), 4)
        if len(kept) > 4:  # `dense_order` moves no row if more than 4 rows are selected.
            assert int(count) == 6 and rows.tolist() == list(range(6))
            continue
        assert int(count) == len(kept)
        rows = rows[: len(kept)].tolist()
        assert sorted(rows) == kept
        assert all(row == place or row >= len(kept) for place, row in enumerate(rows))


def test_bad_tiles_are_named():
    targets = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(TypeError, match="float64"):
        triton_backend.partials(
            torch.zeros(4, 8, dtype=torch.float64, device=DEVICE),
            Forward(targets, 0, Transform(), NEEDS),
        )
    with pytest.raises(ValueError, match="unit stride"):
        triton_backend.partials(
            torch.zeros(8, 4, device=DEVICE).t(), Forward(targets, 0, Transform(), NEEDS)
        )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs 12 GiB on a GPU")
def test_offsets_beyond_two_to_the_31():
    n, v = 9000, 262144
    raw = torch.randn(n, v, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.randint(v, (n,), device=DEVICE)
    found = triton_backend.partials(raw, Forward(targets, 0, Transform(), NEEDS))
    last = slice(n - 5, n)
    part = SoftmaxState(*(t[last] for t in found))
    assert_statistics(part, raw[last], targets[last], 0, Transform())
    oracle_raw = raw[last].clone()
    c = coefficients_of(n, "tpe")
    _, normalizer = finish(found, v, NEEDS)
    logps = (found.target - normalizer.max_logit) - normalizer.log_sum
    triton_backend.logit_gradient_(raw, Backward(targets, 0, Transform(), normalizer, c, logps))
    oracle = oracle_gradient(
        oracle_raw,
        targets[last],
        0,
        Transform(),
        Normalizer(*(t[last].double() for t in normalizer)),
        c.map(lambda t: t[last]),
    )
    assert error(raw[last], oracle) <= 2**-8
