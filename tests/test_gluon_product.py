"""The Gluon kernel, whose epilogue overlaps with the next tile's product, agrees with the plain
Triton kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
from triton_cases import DEVICE, coefficients_of, transforms

from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import Backward, ExpTile, Forward
from headloss.kernels.transform import Transform
from headloss.kernels.triton import product as triton_product

HERE = torch.device(DEVICE)
needs_hopper = pytest.mark.skipif(
    not triton_product.overlaps(HERE), reason="needs a Hopper GPU and the Triton that has its Gluon"
)


def cases(n: int, v: int) -> dict[str, Transform]:
    found = transforms(n) | {"turned": Transform(scale=-0.8, softcap=9.0)}
    bias = torch.randn(v, device=DEVICE)
    biased = {"biased": replace(found["plain"], bias=bias.bfloat16())}
    return found | biased | {"biased capped rows": replace(found["capped rows"], bias=bias)}


def products(monkeypatch, given, needs, *, hold: bool):
    """Yield the softmax statistics and the stored exponentials twice: computed by the Gluon kernel
    with an overlapping epilogue, then by the plain Triton kernel."""
    x, w = given[:2]
    for overlaps in (True, False):
        monkeypatch.setattr(triton_product, "overlaps", lambda device, to=overlaps: to)
        held = ExpTile.empty(len(x), len(w), x) if hold else None
        if held is not None:
            held.exp_logits.fill_(math.nan)
        yield triton_backend.product_partials(*given[:2], Forward(*given[2:], needs), held), held


@needs_hopper
@pytest.mark.parametrize(
    ("transform", "needs", "hold"),
    [
        ("plain", "logp|entropy", True),
        ("scaled", "logp", True),
        ("rows", "logp|entropy", False),
        ("plain", "logp", False),
        ("scaled", "logp|entropy|mean_logit|top1", True),
        ("capped", "logp|entropy|mean_logit|top1", False),
        ("capped", "logp", True),
        ("capped rows", "logp|entropy", True),
        ("turned", "logp|mean_logit", False),
        ("biased", "logp|entropy|mean_logit|top1", True),
        ("biased capped rows", "logp|entropy|mean_logit", True),
    ],
)
@pytest.mark.parametrize(
    ("n", "h", "v", "dtype"),
    [
        (5, 72, 300, torch.bfloat16),  # both dimensions are smaller than one tile
        (300, 512, 1000, torch.float16),
        # Each program of the Gluon kernel computes about twelve tiles.
        (2500, 1024, 20000, torch.bfloat16),
    ],
)
def test_the_same_partials_and_terms(monkeypatch, n, h, v, dtype, transform, needs, hold):
    needs = frozenset(needs.split("|"))
    first = 20
    x = torch.randn(n, h, device=DEVICE).to(dtype)
    w = (torch.randn(v, h, device=DEVICE) / math.sqrt(h)).to(dtype)
    targets = first + torch.randint(v, (n,), device=DEVICE)
    targets[1] += 2 * v
    given = (x, w, targets, first, cases(n, v)[transform])
    (found, terms), (expected, others) = products(monkeypatch, given, needs, hold=hold)
    close = 2e-7 if "capped" in transform or transform == "turned" else 0  # tanh's last bit
    torch.testing.assert_close(found.max_logit, expected.max_logit, rtol=close, atol=20 * close)
    assert torch.equal(found.target, expected.target)
    torch.testing.assert_close(found.sumexp_m1, expected.sumexp_m1, rtol=1e-5, atol=0)
    # Soft caps and biases change the last bits of logits, and so of exp(z).
    exact = transform in ("plain", "rows", "scaled")
    terms_of_spread = 1e-3 if exact else 1e-5 * (1 + expected.sumexp_m1)
    for name, atol in (("entropy_sum", terms_of_spread), ("logit_sum", 1e-2)):
        mine, other = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (other is None)
        if mine is not None:
            assert ((mine - other).abs() <= 1e-5 * other.abs() + atol).all(), name
    if hold:  # stored exp(z) may differ by one rounding
        torch.testing.assert_close(terms.exp_logits, others.exp_logits, rtol=2**-7, atol=0)
        if transform == "plain":
            assert (terms.exp_logits != others.exp_logits).float().mean() < 1e-3


@needs_hopper
@pytest.mark.parametrize("which", ["tp", "tpe", "tpeu", "p"])
@pytest.mark.parametrize(
    "transform", ["plain", "rows", "capped rows", "turned", "biased", "biased capped rows"]
)
@pytest.mark.parametrize(
    ("n", "h", "v", "dtype"),
    [
        (5, 72, 300, torch.bfloat16),
        (300, 512, 1000, torch.float16),
        (2500, 1024, 20000, torch.bfloat16),
    ],
)
def test_the_same_slabs(monkeypatch, n, h, v, dtype, transform, which):
    """The Gluon kernel with an overlapping epilogue and the plain Triton kernel give the same
    logit gradient, up to rounding."""
    x = torch.randn(n, h, device=DEVICE).to(dtype)
    w = (torch.randn(v, h, device=DEVICE) / math.sqrt(h)).to(dtype)
    targets = torch.randint(v, (n,), device=DEVICE)
    forward = Forward(targets, 0, cases(n, v)[transform], frozenset({"logp"}))
    stats, normalizer = triton_backend.product_statistics(x, w, forward, v)
    c = coefficients_of(n, which)
    given = Backward(targets, 0, forward.transform, normalizer, c, stats.logp)
    found = []
    for overlaps in (True, False):
        monkeypatch.setattr(triton_product, "overlaps", lambda device, to=overlaps: to)
        found.append(triton_backend.product_gradient(x, w, given))
    torch.testing.assert_close(*found, rtol=2 * torch.finfo(dtype).eps, atol=3e-6)
    assert (found[0] != found[1]).float().mean() < 0.01


@needs_hopper
def test_a_scale_below_zero_is_for_the_plain_kernel(monkeypatch):
    from headloss.kernels.triton import gluon as gluon_product

    x, w = (torch.randn(k, 64, device=DEVICE).bfloat16() for k in (8, 300))
    targets = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    called = []
    launch = gluon_product.launch_product

    def recorded(*arguments, **constants):
        called.append(arguments)
        launch(*arguments, **constants)

    monkeypatch.setattr(gluon_product, "launch_product", recorded)
    for transform, count in ((Transform(scale=-1.0), 0), (Transform(softcap=20.0), 1)):
        triton_backend.product_partials(x, w, Forward(targets, 0, transform, frozenset({"logp"})))
        assert len(called) == count


def test_everywhere_else_the_plain_kernel_serves(monkeypatch):
    assert not triton_product.overlaps(torch.device("cpu"))
    gpu, overlaps = torch.device("cuda", 0), triton_product.overlaps.__wrapped__  # without cache
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    for capability, served in {(9, 0): True, (8, 0): False, (10, 0): False}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert overlaps(gpu) is served
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    versions = dict.fromkeys(["3.6.1+git", "3.7.1", "3.8.0", "3.9.0"], True)
    versions |= dict.fromkeys(["3.5.1", "3.10.0", "3.60.0", "4.0.0"], False)
    for version, served in versions.items():
        monkeypatch.setattr(triton, "__version__", version)
        assert overlaps(gpu) is served
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert not overlaps(gpu)
