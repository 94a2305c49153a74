"""Shared by tests of the Triton backend: tiles of logits, and the float64 reference.

Import this module before Triton: without a GPU it turns on Triton's interpreter.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from headloss.kernels import reference  # noqa: E402
from headloss.kernels.interface import Backward, Forward  # noqa: E402
from headloss.kernels.transform import Transform  # noqa: E402
from headloss.statistics.softmax import Normalizer, SoftmaxCoefficients, SoftmaxState, finish  # noqa: E402

NEEDS = frozenset({"logp", "lse", "entropy", "mean_logit", "top1"})
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)
# The interpreter truncates float32 to bf16, a GPU rounds.
EPS = {
    torch.float32: 0.0,
    torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7,
    torch.float16: 2**-10,
}


def transforms(n: int) -> dict[str, Transform]:
    rows = torch.linspace(0.5, 2.0, n, device=DEVICE)
    return {
        "plain": Transform(),
        "scaled": Transform(scale=0.7, temperature=1.3),
        "capped": Transform(scale=1.1, softcap=12.0, temperature=0.9),
        "rows": Transform(temperature=rows),
        "capped rows": Transform(softcap=20.0, temperature=rows),
    }


def in_float64(transform: Transform) -> Transform:
    t = transform.temperature
    t = t.double() if isinstance(t, torch.Tensor) else t
    bias = None if transform.bias is None else transform.bias.double()
    return replace(transform, temperature=t, bias=bias)


def tile(n: int, v: int, dtype: torch.dtype, *, seed: int = 0, pad: int = 3) -> torch.Tensor:
    """Return logits with a likely token in some rows, inside a wider buffer of NaN."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, v, generator=generator) * 3
    z[::2, v // 3] += 14
    buffer = torch.full((n, v + pad), math.nan, dtype=dtype, device=DEVICE)
    buffer[:, :v] = z.to(dtype)
    return buffer[:, :v]


def targets_of(n: int, v: int) -> torch.Tensor:
    targets = torch.arange(n, device=DEVICE) * 31 % v
    targets[::2] = v // 3
    return targets


def coefficients_of(n: int, which: str) -> SoftmaxCoefficients:
    """Return gradient coefficients of n tokens as strided columns of a matrix, since kernels must
    read vectors of any stride."""
    generator = torch.Generator().manual_seed(7)
    names = {"t": "target", "p": "prob", "e": "entropy", "u": "uniform"}
    columns = torch.randn(len(which), n, generator=generator).t().contiguous().to(DEVICE)
    values = {names[one]: column for one, column in zip(which, columns.unbind(1), strict=True)}
    if "u" in which:
        values["uniform"] /= 50
    return SoftmaxCoefficients(**values)


def error(found, oracle) -> float:
    assert not found.double().isnan().any()
    return float((found.double() - oracle).norm() / oracle.norm().clamp_min(1e-30))


def assert_statistics(found: SoftmaxState, raw, targets, first, transform) -> Normalizer:
    """Check statistics within 3 times the float32 reference's error plus a relative 1e-6."""
    v = raw.shape[1]
    exact = reference.partials(raw.double(), Forward(targets, first, in_float64(transform), NEEDS))
    plain = reference.partials(raw.float(), Forward(targets, first, transform, NEEDS))
    oracle, normalizer = finish(exact, v, NEEDS)
    torch_stats, _ = finish(plain, v, NEEDS)
    stats, _ = finish(found, v, NEEDS)
    for name, value in oracle.tensors().items():
        finite = value.isfinite()
        mine, theirs = getattr(stats, name), getattr(torch_stats, name)
        assert torch.equal(mine[~finite].double(), value[~finite]), name
        budget = 3 * error(theirs[finite], value[finite]) + 1e-6
        assert error(mine[finite], value[finite]) <= budget, name
    return normalizer


def oracle_gradient(raw, targets, first, transform, normalizer, coefficients):
    wide = raw.double().contiguous().clone()
    coefficients = coefficients.map(lambda t: t.double())
    given = targets, first, in_float64(transform), normalizer, coefficients
    return reference.logit_gradient_(wide, backward_of(raw, *given))


def backward_of(raw, targets, first, transform, normalizer, coefficients) -> Backward:
    """Return the arguments of a backward kernel (`Backward`); the targets' log-probs are computed
    in float64 from the raw logits `raw`."""
    given = Forward(targets, first, in_float64(transform), frozenset())
    target = reference.partials(raw.double(), given).target
    logps = target - normalizer.max_logit - normalizer.log_sum
    logps = logps.to(normalizer.max_logit.dtype)
    return Backward(targets, first, transform, normalizer, coefficients, logps)
