"""The kernels for hidden widths up to 256 agree with float64 logits, and with the same operations
in plain PyTorch.

n tokens, v columns, H hidden width.
"""

from __future__ import annotations

import math
from dataclasses import replace

import narrow_ranks
import pytest
import torch
import twins
from test_kernel_twins import assert_statistics, double, head
from triton_cases import DEVICE, EPS, NEEDS, coefficients_of, error, transforms
from worlds import world_of

import headloss as hl
from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import Backward, Forward
from headloss.statistics.softmax import finish
from headloss.testing import plain, trained_looking

# The interpreter multiplies the bits of bf16 operands as integers, so bf16 needs a GPU.
DTYPES = (torch.float32, torch.float16) + (torch.bfloat16,) * (DEVICE == "cuda")
pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.mark.parametrize("name", ["plain", "scaled", "capped rows"])
@pytest.mark.parametrize(("n", "h", "v"), [(1, 16, 97), (5, 50, 300), (70, 96, 130)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sweeps(dtype, n, h, v, name):
    """The kernels for narrow hidden widths give correct statistics and gradients on a vocabulary
    slice, also for targets outside of the slice."""
    first, transform = 20, transforms(n)[name]
    if name in ("scaled", "capped rows"):
        transform = replace(transform, bias=(torch.randn(v, device=DEVICE) + 1).to(dtype))
    x, w, targets = head(n, h, v, first, dtype)
    forward, sums = Forward(targets, first, transform, NEEDS), dtype != torch.float16
    mine, sums_of_rows = triton_backend.narrow_partials(x, w, forward, sums)
    twin, _ = twins.narrow_partials(x, w, forward, sums)
    exact, _ = twins.narrow_partials(x.double(), w.double(), double(forward))
    assert_statistics(mine, twin, exact, v, NEEDS)
    stats, normalizer = finish(exact, v, frozenset({"logp"}))
    near = normalizer._replace(**{k: t.float() for k, t in normalizer._asdict().items()})
    for which in ("tp", "tpe", "tpeu"):
        c = coefficients_of(n, which)
        backward = Backward(targets, first, transform, near, c, stats.logp.float())
        oracle = twins.product_gradient(x.double(), w.double(), double(backward))
        hidden = oracle @ w.double()
        close = 2 * EPS[dtype] + 1e-5
        assert error(triton_backend.narrow_hidden(x, w, backward), hidden) <= close
        if which == "tp" and sums:
            found = triton_backend.narrow_hidden(x, w, backward, sums_of_rows)
            assert error(found, hidden) <= close
        factor = torch.tensor(0.5, device=DEVICE)
        out = torch.full((v, h + 3), math.nan, dtype=dtype, device=DEVICE)[:, :h]
        bias = torch.full((v,), math.nan, device=DEVICE)
        triton_backend.narrow_weight_(x, w, backward, out, bias, factor)
        assert error(out, oracle.t() @ x.double() / 2) <= close + EPS[dtype]
        assert error(bias, oracle.sum(0)) <= 1e-5


def test_tokens_far_above_their_shift():
    """Tokens whose target lies far below the largest logit are correct, although exp(z - z_target)
    would overflow."""
    n, h, v = 6, 32, 200
    x, w, targets = head(n, h, v, 0, torch.float32)
    targets[3] = 7
    x[1::2] *= 100
    forward = Forward(targets, 0, transforms(n)["plain"], NEEDS)
    mine, sums = triton_backend.narrow_partials(x, w, forward, True)
    exact, _ = twins.narrow_partials(x.double(), w.double(), forward)
    stats, normalizer = finish(exact, v, frozenset({"logp"}))
    assert float(stats.logp.min()) < -90
    logp = finish(mine, v, NEEDS)[0].logp.double()
    torch.testing.assert_close(logp, stats.logp, rtol=1e-5, atol=1e-5)
    near = normalizer._replace(**{k: t.float() for k, t in normalizer._asdict().items()})
    arguments = targets, 0, forward.transform, near, coefficients_of(n, "tp")
    backward = Backward(*arguments, stats.logp.float())
    oracle = twins.product_gradient(x.double(), w.double(), double(backward)) @ w.double()
    assert error(triton_backend.narrow_hidden(x, w, backward, sums), oracle) <= 1e-4


def test_a_nearly_certain_token_keeps_its_digits():
    h, v = 64, 500
    w = torch.randn(v, h, device=DEVICE) / 3
    x = torch.stack([w[3] * (k / float(w[3].norm() ** 2)) for k in (18.0, 22.0, 26.0)])
    targets = torch.full((3,), 3, device=DEVICE)
    forward = Forward(targets, 0, transforms(3)["plain"], frozenset({"logp"}))
    mine, _ = triton_backend.narrow_partials(x, w, forward, True)
    exact, _ = twins.narrow_partials(x.double(), w.double(), forward)
    logp, oracle = (finish(p, v, frozenset({"logp"}))[0].logp.double() for p in (mine, exact))
    assert float(oracle.max()) > -1e-5
    torch.testing.assert_close(logp, oracle, rtol=1e-5, atol=0)


def test_a_tokens_bits_are_its_own():
    """The bits of a token's statistics, and of its sums for dX, do not depend on the batch or on
    the token's position in the kernel for heads with at most 256 hidden units. The bits of the
    statistics do not depend on whether sums for dX are computed."""
    n, h, v = 100, 32, 300
    x, w, targets = head(n, h, v, 0, torch.float32)
    forward = Forward(targets, 0, transforms(n)["plain"], NEEDS)
    state, sums = triton_backend.narrow_partials(x, w, forward, True)
    some = slice(41, 90)
    part = triton_backend.narrow_partials(x[some], w, forward._replace(targets=targets[some]), True)
    plain, _ = triton_backend.narrow_partials(x, w, forward)
    for name, value in state.tensors().items():
        assert torch.equal(value, plain.tensors()[name]), name
        assert torch.equal(value[some], part[0].tensors()[name]), name
    assert torch.equal(sums.rows[some], part[1].rows)
    assert sums.rows.untyped_storage().nbytes() == n * h * 4, "the parts' memory lives on"


def test_no_tokens():
    x, w, targets = head(0, 32, 70, 0, torch.float32)
    forward = Forward(targets, 0, transforms(0)["plain"], NEEDS)
    assert triton_backend.narrow_partials(x, w, forward)[0].max_logit.shape == (0,)
    assert not triton_backend.can_sweep(torch.zeros(3, 300))


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_calls(dtype):
    """Calls under the `narrow` schedule have correct statistics and gradients; an entropy term
    needs a third pass over the vocabulary."""
    hidden, weight, targets = trained_looking(40, 24, 150, dtype, DEVICE)
    for objective in (hl.cross_entropy(), hl.cross_entropy() - 0.1 * hl.entropy()):
        x, w = (t.detach().clone().requires_grad_() for t in (hidden, weight))
        head, batch = hl.Head(w), hl.Batch(targets)
        options = hl.Options(schedule="narrow", backend="triton")
        out = hl.head_loss(x, head, batch, objective, options)
        out.loss.backward()
        oracle, coarse = (plain(x, head, batch, objective, p) for p in ("float64", "input"))
        assert abs(out.loss.double() - oracle.loss) <= 1e-5
        for mine, key in ((x.grad, "hidden"), (w.grad, "weight")):
            limit = 3 * error(coarse.gradients[key], oracle.gradients[key]) + 2 * EPS[dtype] + 1e-5
            assert error(mine, oracle.gradients[key]) <= limit


def test_two_ranks():
    """Two ranks with a vocabulary slice each give correct results, although a token's target lies
    in one slice only."""
    with world_of(2, narrow_ranks.interpret) as world:
        for name, softcap in (("sums", None), ("sums", 9.0), ("a third sweep", None)):
            first, second = world.run(narrow_ranks.against_one_head, name, softcap, seconds=200)
            assert torch.equal(first, second), "ranks differ in their bits"


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton's interpreter alone multiplies bits")
def test_bfloat16_in_the_interpreter_is_refused():
    hidden, weight, targets = trained_looking(5, 16, 97, torch.bfloat16)
    options = hl.Options(backend="triton", schedule="narrow")
    with pytest.raises(ValueError, match='schedule: got "narrow", but want triton on a GPU'):
        hl.head_loss(hidden, hl.Head(weight), hl.Batch(targets), hl.cross_entropy(), options)
