"""The derivative 1 - tanh(x)^2 of a saturated soft cap is accurate in every gradient kernel,
compared with float64.

n tokens, v columns; x is the logit times scale / softcap.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import twins
from triton_cases import DEVICE, coefficients_of, error, in_float64

from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import Backward, ExpTile, Forward, LogitRows, Support, Walk
from headloss.kernels.pair import Distribution, Divergence, Pair
from headloss.kernels.transform import Transform
from headloss.statistics.divergence import Measure
from headloss.statistics.softmax import Normalizer, SoftmaxCoefficients, finish

N, V = 6, 75
SATURATED = ((1, 3), (3, 5), (5, 8))  # |x|
TRANSFORMS = {
    "number": Transform(scale=1.1, softcap=12.0, temperature=0.9),
    "turned": Transform(scale=-0.8, softcap=30.0),
    "rows": Transform(softcap=20.0, temperature=torch.linspace(0.5, 2, N, device=DEVICE)),
}
NOTHING = frozenset[str]()
pytestmark = [
    pytest.mark.usefixtures("fresh_memory_is_nan"),
    pytest.mark.parametrize("between", SATURATED, ids=str),
    pytest.mark.parametrize("name", TRANSFORMS),
]


def saturated(between: tuple[int, int], transform: Transform, v: int = V) -> torch.Tensor:
    """Return raw logits [n, v] of both signs with |x| in an interval."""
    generator = torch.Generator().manual_seed(0)
    low, high = between
    size = low + (high - low) * torch.rand(N, v, generator=generator)
    sign = 1.0 - 2 * torch.randint(2, (N, v), generator=generator)
    assert transform.softcap is not None
    return (size * sign * (transform.softcap / transform.scale)).to(DEVICE)


def exact_operands(between: tuple[int, int], transform: Transform):
    """Return hidden states x and a weight w in float16 whose exact product is `saturated(..)`,
    logits in the flat part of the soft cap."""
    w = torch.zeros(V + 1, 8, dtype=torch.float16, device=DEVICE)
    w[:, :N] = saturated(between, transform, V + 1).t()
    return torch.eye(N, 8, dtype=torch.float16, device=DEVICE), w


def z_of(raw: torch.Tensor, transform: Transform) -> torch.Tensor:
    """Return raw logits after scale, soft cap and temperature, computed by plain torch."""
    t, cap = transform.temperature, transform.softcap
    z = cap * torch.tanh(raw * transform.scale / cap)
    return z / (t.unsqueeze(1).to(z.dtype) if isinstance(t, torch.Tensor) else t)


def side_of(raw: torch.Tensor, transform: Transform) -> Distribution:
    """Return the distribution of float64 logits."""
    transform = in_float64(transform)
    found = twins.partials(raw, Forward(None, 0, transform, NOTHING))
    return Distribution(transform, finish(found, 1, NOTHING)[1])


def narrow(side: Distribution) -> Distribution:
    t = side.transform.temperature
    t = t.float() if isinstance(t, torch.Tensor) else t
    own = replace(side.transform, temperature=t)
    return Distribution(own, Normalizer(*(part.float() for part in side.normalizer)))


def act_two(raw: torch.Tensor, transform: Transform, c: SoftmaxCoefficients, targets: torch.Tensor):
    """Return the float64 logit gradient computed by autograd, and the float32 arguments of a
    gradient kernel."""
    exact = raw.double().requires_grad_()
    z = z_of(exact, transform)
    log_p = z.detach().log_softmax(1)
    wide = c.map(lambda t: t.double().unsqueeze(1))
    slope = log_p.exp() * (wide.prob + wide.entropy * log_p)
    slope.scatter_add_(1, targets.unsqueeze(1), wide.target)
    z.backward(slope)
    normalizer = narrow(side_of(raw.double(), transform)).normalizer
    logps = log_p.gather(1, targets.unsqueeze(1)).squeeze(1).float()
    return exact.grad, Backward(targets, 0, transform, normalizer, c, logps)


@pytest.mark.covering
@pytest.mark.parametrize("form", ["tile", "walk", "support"])
def test_act_two(form, name, between):
    transform = TRANSFORMS[name]
    raw = saturated(between, transform)
    targets = torch.arange(N, device=DEVICE) * 31 % V
    oracle, backward = act_two(raw, transform, coefficients_of(N, "tpe"), targets)
    twin = twins.logit_gradient_(raw.clone(), backward)
    if form == "tile":
        found = triton_backend.logit_gradient_(raw.clone(), backward)
    elif form == "support":
        ends = torch.arange(N + 1, device=DEVICE) * V
        support = Support(torch.arange(V, device=DEVICE).repeat(N), ends, 0, V)
        found = triton_backend.support_gradient(raw.view(-1).clone(), support, backward)
        found = found.view(N, V)
    else:
        found, offsets = torch.full_like(raw, math.nan), torch.arange(N, device=DEVICE) * V
        rows, to = LogitRows(raw, offsets, False), LogitRows(found, offsets, False)
        c, normalizer = backward.coefficients, backward.normalizer
        given = Walk(rows, to, None, targets, 0, transform, None, c, None, normalizer)
        triton_backend.given_rows(given)
    assert error(twin, oracle) <= 2e-6
    assert error(found, oracle) <= 3 * error(twin, oracle) + 1e-6


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "js"])
def test_divergences(kind, name, between):
    transform = TRANSFORMS[name]
    if isinstance(transform.temperature, torch.Tensor):
        transform = replace(transform, temperature=1.5)
    raw, other = saturated(between, transform), torch.randn(N, V, device=DEVICE) * 3
    sides = side_of(raw.double(), transform), side_of(other.double(), Transform(temperature=1.5))
    exact, weight = Pair(*sides, (Measure(kind, 0.3),)), torch.rand(N, 1, device=DEVICE)
    pivot = twins.divergence(raw.double(), other.double(), exact)[..., 1]
    part = Divergence(other.double(), exact, pivot, weight.double())
    oracle = twins.part_gradient_(raw.double(), part)
    pair = exact._replace(student=narrow(sides[0]), teacher=narrow(sides[1]))
    part = Divergence(other, pair, pivot.float(), weight)
    found, twin = (a.part_gradient_(raw.clone(), part) for a in (triton_backend, twins))
    assert error(found, oracle) <= 3 * error(twin, oracle) + 1e-6


def test_a_slab(name, between):
    """The 16-bit logit gradient of a block of vocabulary rows is accurate, also at the target, for
    exactly computed logits."""
    transform = TRANSFORMS[name]
    x, w = exact_operands(between, transform)
    raw = x.float() @ w.float().t()
    targets = torch.arange(N, device=DEVICE) * 31 % V
    c = coefficients_of(N, "tpe").map(lambda t: t * 2.0**14)  # within float16's range
    oracle, backward = act_two(raw, transform, c, targets)
    found = triton_backend.product_gradient(x, w, backward)
    assert error(found, oracle) <= 3 * error(oracle.half(), oracle) + 1e-6


@pytest.mark.covering
@pytest.mark.parametrize("backend", [twins, triton_backend], ids=["reference", "triton"])
def test_held_terms(backend, name, between):
    """If a stored 16-bit exp(z) decodes to a logit beyond the soft cap, its derivative is 0, and no
    gradient gets the wrong sign."""
    transform = TRANSFORMS[name]
    x, w = exact_operands(between, transform)
    raw = x.float() @ w.float().t()
    targets = torch.arange(N, device=DEVICE) * 31 % V
    c = SoftmaxCoefficients(prob=torch.ones(N, device=DEVICE))
    zero = c._replace(target=torch.zeros(N, device=DEVICE), entropy=torch.zeros(N, device=DEVICE))
    oracle, backward = act_two(raw, transform, zero, targets)
    held = ExpTile.empty(len(x), V + 1, x)
    backend.product_partials(x, w, Forward(targets, 0, transform, NOTHING), held)
    found = backend.exp_gradient_(held, backward._replace(coefficients=c)).double()
    sign = math.copysign(1, transform.scale)
    assert (oracle * sign > 0).all() and (found * sign >= 0).all()
