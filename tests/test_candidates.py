"""Candidates work with tiles of exp(z), and their Triton kernels agree with PyTorch versions.

n tokens, v columns, H hidden width, K candidates.
"""

from __future__ import annotations

import math
from dataclasses import replace

import matrix
import matrix_cases
import pytest
import torch
import twins
from triton_cases import DEVICE, EPS, coefficients_of, transforms

import headloss as hl
from headloss import kernels
from headloss.kernels import triton as triton_backend
from headloss.kernels.interface import Backward, ExpTile, Forward
from headloss.kernels.pair import Chosen
from headloss.kernels.transform import Transform
from headloss.statistics.softmax import Normalizer, SoftmaxCoefficients, finish
from headloss.testing import error, plain, trained_looking

SIXTEEN = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)
pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan", "skip_small_rows")


def columns_of(n: int, v: int, k: int, first: int = 0) -> torch.Tensor:
    """Return distinct columns, some inside a tile that starts at `first` and some outside."""
    return (torch.rand(n, 2 * v).argsort(1)[:, :k] - first).to(DEVICE)


@pytest.mark.covering
@pytest.mark.parametrize("name", ["plain", "scaled", "rows", "capped rows"])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
@pytest.mark.parametrize(("n", "h", "k"), [(5, 72, 3), (3, 300, 17), (0, 8, 2), (2, 8, 1)])
def test_chosen_logits(n, h, k, dtype, name):
    v, transform = 50, transforms(n)[name]
    x = torch.full((n, h + 8), math.nan, dtype=dtype, device=DEVICE)[:, :h].copy_(torch.randn(n, h))
    w = torch.randn(v, h, device=DEVICE).to(dtype)
    columns = columns_of(n, v, k, 20)
    bias = torch.randn(v, device=DEVICE) if name in ("scaled", "capped rows") else None
    given = x, w, columns, replace(transform, bias=bias)
    mine, twin = (b.chosen_logits(*given) for b in (triton_backend, twins))
    raw = x.double() @ w.double().t()
    z = transform((raw if bias is None else raw + bias).float())
    here = (columns >= 0) & (columns < v)
    want = torch.where(here, z.gather(1, torch.where(here, columns, 0)), 0)
    for found in (mine, twin):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, want, rtol=3e-6, atol=3e-6)


def test_chosen_logits_are_a_tokens_own():
    """A candidate's logit has the same bits whatever other tokens are in the batch."""
    x, w = (torch.randn(n, 200, device=DEVICE).half() for n in (7, 40))
    columns = columns_of(7, 20, 9)
    whole = triton_backend.chosen_logits(x, w, columns, Transform())
    alone = [
        triton_backend.chosen_logits(x[i : i + 1], w, columns[i : i + 1], Transform())
        for i in range(7)
    ]
    assert torch.equal(whole, torch.cat(alone))


@pytest.mark.covering
@pytest.mark.parametrize("name", ["plain", "scaled", "capped rows"])
@pytest.mark.parametrize("which", ["tp", "p", "tpeu"])
@pytest.mark.parametrize("ordered", [False, True])
def test_chosen_gradient(which, name, ordered):
    """The kernels and the reference backend add the gradients of candidate log-probs as autograd
    does."""
    n, v, k, first = 6, 40, 5, 7
    transform, c = transforms(n)[name], coefficients_of(n, which)
    raw = 3 * torch.randn(n, v, device=DEVICE)
    targets = first + torch.arange(n, device=DEVICE) * 31 % v
    columns = columns_of(n, v, k, 20)
    columns[1, 0] = targets[1] - first
    columns[1, 1:] = torch.where(columns[1, 1:] == columns[1, 0], -1, columns[1, 1:])
    slopes = torch.randn(n, k, device=DEVICE)
    z = transform(raw)
    normalizer = Normalizer(z.amax(1), (z - z.amax(1, keepdim=True)).exp().sum(1).log())
    log_p = z.log_softmax(1)
    here = (columns >= 0) & (columns < v)
    logps = torch.where(here, log_p.gather(1, torch.where(here, columns, 0)), 0)
    target = log_p.gather(1, (targets - first).unsqueeze(1)).squeeze(1)
    backward = Backward(targets, first, transform, normalizer, c, target)
    base = twins.logit_gradient_(raw.clone(), backward)
    # The expected gradient: autograd carries the derivatives with respect to the candidates'
    # transformed logits back to the raw logits.
    leaf = raw.clone().requires_grad_()
    picked = transform_of(transform, leaf).gather(1, torch.where(here, columns, 0))
    (extra,) = torch.autograd.grad((picked * torch.where(here, slopes, 0)).sum(), leaf)
    want, places = base + extra, torch.arange(n, device=DEVICE)
    order = None
    if ordered:
        order = twins.dense_order(torch.tensor([0, 1, 0, 1, 1, 1], device=DEVICE).bool(), 5)
        places = order.rows[: int(order.count)]
    multiples = torch.rand(n, device=DEVICE) + 0.5
    multiples[3], multiples[5] = -1, -multiples[5]
    chosen = Chosen(columns, logps, slopes)
    for backend in (triton_backend, twins):
        for divisor in (None, multiples):
            tile = torch.full((n, v + 3), math.nan, device=DEVICE)[:, :v]
            over = 1 if divisor is None else divisor[: len(places), None]
            tile[: len(places)] = base[places] / over
            backend.chosen_gradient_(tile, chosen, backward, multiples=divisor, order=order)
            torch.testing.assert_close(
                tile[: len(places)] * over, want[places], rtol=2e-5, atol=2e-6
            )
            assert tile[len(places) :].isnan().all()


def transform_of(transform: Transform, raw: torch.Tensor) -> torch.Tensor:
    """Apply the transform differentiably."""
    t = transform.temperature
    t = t.unsqueeze(1) if isinstance(t, torch.Tensor) else t
    if transform.softcap is None:
        return raw * transform.scale / t
    return (raw * transform.scale / transform.softcap).tanh() * transform.softcap / t


@pytest.mark.parametrize("backend", [triton_backend, twins], ids=["triton", "reference"])
def test_slopes_alone_make_a_multiple(backend):
    """Gradients are correct for two cancelling derivatives of candidate log-probs, whose sum makes
    the gradient coefficient `c_prob` 0."""
    n, h, v = 3, 16, 40
    x = torch.randn(n, h, device=DEVICE).half()
    w = torch.randn(v, h, device=DEVICE).half()
    targets = torch.arange(n, device=DEVICE)
    held = ExpTile.empty(len(x), v, x)
    partials = backend.product_partials(
        x, w, Forward(targets, 0, Transform(), frozenset({"logp"})), held
    )
    stats, normalizer = finish(partials, v, frozenset({"logp"}))
    zero = torch.zeros(n, device=DEVICE)
    c = SoftmaxCoefficients(prob=zero)
    backward = Backward(targets, 0, Transform(), normalizer, c, stats.logp)
    columns = torch.tensor([[5, 9]] * n, device=DEVICE)
    slopes = torch.tensor([[1.0, -1.0], [0.0, 0.0], [1e-6, -1e-6]], device=DEVICE)
    logps = torch.full((n, 2), -3.0, device=DEVICE)
    multiples, features = backend.exp_multiple_(
        held, backward, x=x.float(), least=slopes.abs().amax(1)
    )
    backend.chosen_gradient_(
        held.exp_logits, Chosen(columns, logps, slopes), backward, multiples=multiples
    )
    found = held.exp_logits.float() * multiples.unsqueeze(1)
    want = torch.zeros(n, v, device=DEVICE).scatter_(1, columns, slopes)
    assert (found - want).abs().max() <= 2**-7
    assert error(found[2], want[2]) <= 2**-7
    assert features is not None and features.isfinite().all()
    dx = torch.where(multiples[:, None] == 0, 0, held.exp_logits.float()) @ w.float()
    assert error(dx * multiples[:, None], want @ w.float()) <= 2**-7


# ---------------------------------------------------------------------- whole calls

T, H, V, K = 12, 8, 97, 6
SCHEDULES = {
    "one pass": {"schedule": "one_pass"},
    "chunks": {"schedule": "one_pass", "chunk_tokens": 5},
    "recompute": {"schedule": "recompute", "chunk_tokens": 4},
    "held": {"schedule": "held", "memory_budget": 1 << 20},
    "static": {"static": True},
}


@pytest.fixture(params=["twins", "kernels"])
def terms(request, monkeypatch):
    """Run calls on the GPU code path, once with Triton's kernels and once with their PyTorch
    versions."""
    monkeypatch.setattr(kernels, "can_write_exp", lambda *_: True)
    monkeypatch.setattr(kernels, "choose", lambda *_: "triton")
    if request.param == "twins":
        monkeypatch.setattr(kernels, "load", lambda _: twins)
    return request.param


@hl.term
def probe(stats, batch):
    """Test term with derivatives with respect to candidate log-probs, including the target's; at
    some tokens the derivatives cancel, at other tokens they are 0."""
    first = stats.candidate_logps[:, 0] * batch.advantages
    return (stats.candidate_logps.exp() * batch.scores).sum(1) + first


def inputs(dtype: torch.dtype):
    hidden, weight, targets = trained_looking(T, H, V, dtype, "cpu")
    ids = (hidden @ weight.t()).float().topk(K).indices
    ids[::4, 2] = -1
    ids[5] = -9
    scores = torch.randn(T, K)
    scores[::3] = 0
    advantages = torch.tensor([1.0, 0, -2, 0] * 3)
    old = torch.full((T,), -1.0)
    fields = {"advantages": advantages, "old_logps": old, "scores": scores}
    return hidden, weight, hl.Batch(targets, candidate_ids=ids, **fields)


@pytest.mark.covering
@pytest.mark.parametrize("objective", ["probe", "with grpo", "with entropy"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_calls(terms, schedule, objective):
    """Calls with candidates are correct on the GPU's code paths: 16-bit tiles of exp(z), blocks of
    vocabulary rows, and reordered token rows."""
    dtype = torch.bfloat16 if terms == "twins" else SIXTEEN[-1]
    hidden, weight, batch = inputs(dtype)
    made = {
        "probe": hl.Objective.of(probe()),
        "with grpo": hl.grpo() + 0.5 * probe(),
        "with entropy": probe() - 0.1 * hl.entropy() + hl.cross_entropy(label_smoothing=0.1),
    }[objective]
    hidden, weight = hidden.to(DEVICE).requires_grad_(), weight.to(DEVICE).requires_grad_()
    batch = batch.to(DEVICE)
    head = hl.Head(weight, temperature=1.3)
    oracle, coarse = (plain(hidden, head, batch, made, mode) for mode in ("float64", "input"))
    out = hl.head_loss(hidden, head, batch, made, hl.Options(**SCHEDULES[schedule]))
    assert out.plan.exp_tiles
    out.loss.backward()
    assert abs(out.loss.double() - oracle.loss) <= 1e-5
    for key, leaf in (("hidden", hidden), ("weight", weight)):
        want = oracle.gradients[key]
        floor = 3 * error(coarse.gradients[key], want) + 2 * EPS[torch.bfloat16]
        assert leaf.grad is not None and error(leaf.grad, want) <= floor


def test_statistics_to_be_read(terms):
    """A term's `observe` can read further statistics on the GPU's code path: the peak from tiles of
    exp(z), sum p^2 and others from logits."""
    hidden, weight, batch = inputs(SIXTEEN[-1])
    hidden, weight, batch = hidden.to(DEVICE), weight.to(DEVICE), batch.to(DEVICE)

    def observe(stats, batch):
        found = {"peak": stats.peak, "logps": stats.candidate_logps.sum(1)}
        return {name: hl.Observed(value, hl.Max) for name, value in found.items()}

    read = hl.term(lambda stats, batch: -stats.logp, observe=observe, name="read")
    out = hl.head_loss(hidden, hl.Head(weight), batch, read())
    assert out.plan.exp_tiles
    z = hidden.double() @ weight.double().t()
    logps = z.log_softmax(1).gather(1, batch.candidate_ids.clamp_min(0))
    logps = logps.masked_fill(batch.candidate_ids < 0, 0).sum(1)
    found = out.metrics.compute()
    assert abs(found["read/peak"] - z.max()) <= 1e-5
    assert abs(found["read/logps"] - logps.max()) <= 1e-5


ROWS = [row for row in matrix.pairwise() if row[0] in matrix_cases.CANDIDATES][:8]


@pytest.mark.parametrize("row", ROWS)
def test_logits_that_exist(row):
    """Candidate log-probs from logits passed in by the caller agree with float64 autograd in all
    cases."""
    known = matrix.make_inputs(row)
    if known.head.lora or known.head.bias is not None or known.hidden.dtype != torch.float64:
        known = matrix.make_inputs((row[0], row[1], "one_pass", "float64", "temperature", *row[5:]))
    head = known.head
    logits = replace(head, temperature=1.0).logits(known.hidden).detach().requires_grad_()
    oracle = plain(
        logits.detach().requires_grad_(),
        hl.Head(torch.eye(logits.shape[-1], dtype=torch.float64), temperature=head.temperature),
        known.batch,
        known.objective,
    )
    out = hl.logits_loss(logits, known.batch, known.objective, temperature=head.temperature)
    out.loss.backward()
    assert abs(out.loss.detach() - oracle.loss) <= 1e-10
    assert error(logits.grad, oracle.gradients["hidden"]) <= 1e-9


@hl.term
def with_the_rest(stats, batch):
    """A term: the reverse KL divergence from a uniform distribution over the candidates and one
    outcome for all other tokens."""
    log_p, tail = stats.candidate_logps, stats.candidate_tail
    return (log_p.exp() * log_p).sum(1) + tail.exp() * (tail - batch.scores.sum(1))


@pytest.mark.parametrize("schedule", ["one pass", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
def test_the_rest_in_triton(schedule, dtype):
    """The Triton backend computes `candidate_tail`, the log of the probability outside the
    candidates, from raw logits, with a temperature per token and a soft cap."""
    hidden, weight, batch = inputs(dtype)
    hidden, weight = hidden.to(DEVICE).requires_grad_(), weight.to(DEVICE).requires_grad_()
    batch, made = batch.to(DEVICE), with_the_rest() + hl.cross_entropy()
    head = hl.Head(weight, temperature=torch.linspace(0.5, 2, T, device=DEVICE), softcap=9.0)
    oracle, coarse = (plain(hidden, head, batch, made, mode) for mode in ("float64", "input"))
    options = hl.Options(backend="triton", **SCHEDULES[schedule])
    out = hl.head_loss(hidden, head, batch, made, options)
    assert not out.plan.exp_tiles
    out.loss.backward()
    assert abs(out.loss.double() - oracle.loss) <= 1e-5
    for key, leaf in (("hidden", hidden), ("weight", weight)):
        want = oracle.gradients[key]
        floor = 3 * error(coarse.gradients[key], want) + max(1e-5, 2 * EPS[dtype])
        assert leaf.grad is not None and error(leaf.grad, want) <= floor
