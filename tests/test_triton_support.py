"""The kernels for `support_ids` and their plain PyTorch versions agree with dense float64
matmuls."""

from __future__ import annotations

import itertools
import math

import matrix
import pytest
import support_cases as cases
import torch
from triton_cases import DEVICE, EPS, NEEDS, coefficients_of, in_float64, transforms

import headloss as hl
from headloss.batch.support import SupportPairs
from headloss.kernels import reference
from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import Backward, Forward
from headloss.kernels.transform import Transform
from headloss.kernels.triton import support as kernels
from headloss.statistics.softmax import finish

BACKENDS = {"reference": reference, "triton": triton_backend}
pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


def pairs_of(n: int, v: int, most: int, ragged: bool = False, seed: int = 0) -> SupportPairs:
    """Return distinct ids for each of n tokens; some tokens have no ids, and unused entries lie
    between ids."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (n,), generator=generator).tolist()
    rows = [torch.randperm(v, generator=generator)[:c] for c in counts]
    if ragged:
        offsets = torch.tensor([0, *counts]).cumsum(0)
        ids = torch.cat([*rows, torch.zeros(0).long()])
        return SupportPairs(ids.to(DEVICE), offsets=offsets.to(DEVICE))
    ids = torch.full((n, most), -1)
    for row, own in zip(ids, rows, strict=True):
        row[torch.randperm(most, generator=generator)[: len(own)]] = own
    return SupportPairs(ids.reshape(-1).to(DEVICE), width=most)


def operands(n: int, v: int, h: int, dtype: torch.dtype, transposed: bool = False):
    x = torch.full((n, h + 8), math.nan, dtype=dtype, device=DEVICE)[:, :h]
    w = torch.full((v, h + 16), math.nan, dtype=dtype, device=DEVICE)[:, :h]
    x.copy_(torch.randn(n, h))
    w.copy_(torch.randn(v, h) / 3)
    return (x, w.t().contiguous().t()) if transposed else (x, w)


def close(found: torch.Tensor, want: torch.Tensor, dtype=torch.float32, tolerance=2e-6) -> None:
    assert found.isfinite().all()
    want = want.detach().double()
    off = float((found.double() - want).norm())
    assert off <= (EPS[dtype] + tolerance) * (float(want.norm()) + 1e-6)


@pytest.mark.parametrize(
    ("n", "most", "h", "ragged", "transposed"),
    [
        (0, 3, 8, False, False),
        (1, 1, 72, False, False),
        (5, 20, 72, False, True),
        (6, 5, 300, True, False),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_acts_against_dense_products(backend, n, most, h, ragged, transposed):
    acts, v, first, size = BACKENDS[backend], 37, 10, 17
    pairs = pairs_of(n, v, most, ragged)
    support = pairs.window(slice(0, n), first, size)
    tokens = torch.repeat_interleave(torch.arange(n).to(DEVICE), support.offsets.diff())
    # If no token has ids, the tensor of ids still has one placeholder element.
    tokens = torch.cat([tokens, tokens.new_zeros(len(support.ids) - len(tokens))])
    there = (support.ids >= first) & (support.ids < first + size)
    mask = torch.zeros(n, size, dtype=torch.bool, device=DEVICE)
    mask[tokens[there], support.ids[there] - first] = True
    targets = torch.where(mask.any(1), first + mask.int().argmax(1), -1)

    for dtype in (torch.float32, torch.float16):
        x, w = operands(n, size, h, dtype, transposed)
        raw = acts.support_logits(x, w, support)
        dense = x.double() @ w.double().t()
        close(raw[there], dense[mask.nonzero(as_tuple=True)][order_of(support, there, tokens)])
        doubled = acts.support_logits(x, w, support, raw.clone())
        close(doubled[there], 2 * raw[there])

        values = torch.where(there, torch.randn(len(raw), device=DEVICE), 0)
        values[::5] = 0
        scattered = torch.zeros_like(dense)
        scattered[tokens[there], support.ids[there] - first] = values[there].double()
        order, by = pairs.by_column(slice(0, n), first, size)
        for add, out_dtype in ((False, dtype), (True, torch.float32)):
            out = torch.full((n, h), 0.25 if add else math.nan, dtype=out_dtype, device=DEVICE)
            acts.support_sums(values, w, support, out, add)
            close(out, scattered @ w.double() + 0.25 * add, out_dtype)
            out = torch.full((size, h), 0.25 if add else math.nan, dtype=out_dtype, device=DEVICE)
            acts.support_sums(values[order], x, by, out, add, uneven=True)
            close(out, scattered.t() @ x.double() + 0.25 * add, out_dtype)

    for name, transform in transforms(n).items():
        raw = torch.randn(len(support.ids), device=DEVICE) * 4
        forward = Forward(targets, first, transform, NEEDS)
        partials = acts.support_partials(raw, support, forward)
        exact = raw.new_full((n, size), 0, dtype=torch.float64)
        exact[tokens[there], support.ids[there] - first] = raw[there].double()
        z = plain_z(transform, exact.requires_grad_()).masked_fill(~mask, -math.inf)
        own = mask.any(1)
        stats, normalizer = finish(partials, 1, NEEDS)
        assert (partials.max_logit[~own] == -math.inf).all()
        assert (partials.sumexp_m1[~own] == -1).all()
        log_p = z[own].log_softmax(1)
        y = (targets[own] - first).unsqueeze(1)
        want = {
            "logp": log_p.gather(1, y).squeeze(1),
            "lse": z[own].logsumexp(1),
            "entropy": -(log_p.exp() * log_p.clamp_min(-1e30)).sum(1),
            "mean_logit": z[own].masked_fill(~mask[own], 0).sum(1),
        }
        for key, value in want.items():
            close(getattr(stats, key)[own], value, tolerance=5e-6)
        for which in ("tp", "tpeu"):
            c = coefficients_of(n, which)
            backward = Backward(targets, first, transform, normalizer, c, stats.logp)
            found = acts.support_gradient(raw, support, backward)
            p = log_p.exp()
            zero = torch.zeros(n, dtype=torch.float64, device=DEVICE)
            four = (c.target, c.prob, c.entropy, c.uniform)
            at = [(zero if t is None else t.double())[own].unsqueeze(1) for t in four]
            g = p * (at[1] + at[2] * log_p.clamp_min(-1e30)) + at[3]
            g = g.scatter_add(1, y, at[0]).masked_fill(~mask[own], 0).detach()
            (g,) = torch.autograd.grad(z[own], exact, g, retain_graph=True)
            close(found[there], g[tokens[there], support.ids[there] - first], tolerance=1e-5)
            assert not found[~there].any(), name


def plain_z(transform: Transform, raw: torch.Tensor) -> torch.Tensor:
    t, cap = in_float64(transform).temperature, transform.softcap
    z = raw * transform.scale
    z = z if cap is None else cap * torch.tanh(z / cap)
    return z / (t.unsqueeze(1) if isinstance(t, torch.Tensor) else t)


def order_of(support, there, tokens) -> torch.Tensor:
    """Sort the (token, id) entries whose id lies in the vocabulary slice by token, then by id, and
    return each entry's position in this order."""
    key = tokens[there] * (1 << 20) + support.ids[there]
    return key.argsort().argsort()


def test_a_column_of_many_tokens_is_summed_in_pieces(monkeypatch):
    """A vocabulary column that many tokens allow is summed in several parts; other columns occur in
    few tokens or none."""
    monkeypatch.setattr(kernels, "PIECE", 16)
    n, v, h = 40, 12, 40
    ids = torch.full((n, 3), -1)
    ids[:, 0], ids[:, 1], ids[::7, 2] = 4, 9, 11
    pairs = SupportPairs(ids.reshape(-1).to(DEVICE), width=3)
    x = torch.randn(n, h, device=DEVICE)
    values = torch.randn(3 * n, device=DEVICE)
    order, by = pairs.by_column(slice(0, n), 0, v)
    dense = torch.zeros(n, v, dtype=torch.float64, device=DEVICE)
    for slot, column in enumerate((4, 9, 11)):
        rows = slice(None, None, 7 if slot == 2 else 1)
        dense[rows, column] = values.view(n, 3)[rows, slot].double()
    for add, dtype in itertools.product((False, True), (torch.float32, torch.float16)):
        out = torch.full((v, h), 0.5 if add else math.nan, dtype=dtype, device=DEVICE)
        triton_backend.support_sums(values[order], x, by, out, add, uneven=True)
        close(out, dense.t() @ x.double() + 0.5 * add, dtype)


@pytest.mark.parametrize(
    ("kind", "schedule"), [("padded", "one_pass"), ("mixed flat", "recompute")]
)
def test_calls(kind, schedule):
    """Calls with `support_ids` on Triton's kernels agree with masked logits."""
    inputs = cases.inputs(kind, "everything", torch.float16)
    if DEVICE == "cuda":
        pytest.skip("inputs are on the CPU")
    out = matrix.check(inputs, hl.Options(backend="triton", schedule=schedule))
    assert out.plan.backend == "triton"
