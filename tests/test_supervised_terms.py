"""Supervised terms agree with float64 plain logits, even at the limits of floating point."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from folds import fold
from losses_case import assert_same, make, value_and_gradient
from torch import Tensor

import headloss as hl
from headloss import losses as h
from headloss.batch.packing import PackedBatch
from headloss.batch.segments import Segments
from headloss.losses.term import Term
from headloss.losses.trial import trace
from headloss.statistics.metrics import Mean, Perplexity
from headloss.statistics.softmax import CANDIDATES, Statistics

T, V = 13, 9  # T as in `make(lengths=(T,))`


def logits(scale: float = 2.0) -> tuple[Tensor, Tensor]:
    z = scale * torch.randn(T, V, dtype=torch.float64)
    return z.requires_grad_(), torch.randint(V, (T,))


def statistics(z: Tensor, targets: Tensor) -> Statistics:
    """Return every statistic by definition, differentiable in z."""
    log_p = z.log_softmax(1)
    target = log_p.gather(1, targets[:, None]).squeeze(1)
    return Statistics(
        logp=target,
        lse=z.logsumexp(1),
        entropy=-(log_p.exp() * log_p).sum(1),
        mean_logit=z.sum(1) / V,
        top1=(target == log_p.max(1).values).double(),
    )


def smoothed(z: Tensor, y: int, share: float) -> Tensor:
    log_p = [z[j] - torch.log(sum(torch.exp(z[k]) for k in range(V))) for j in range(V)]
    return -(1 - share) * log_p[y] - share * sum(log_p) / V


def squared_normalizer(z: Tensor, y: int) -> Tensor:
    return torch.log(sum(torch.exp(z[k]) for k in range(V))) ** 2


def negative_p_log_p(z: Tensor, y: int) -> Tensor:
    total = sum(torch.exp(z[k]) for k in range(V))
    return -sum(torch.exp(z[j]) / total * torch.log(torch.exp(z[j]) / total) for j in range(V))


def not_the_target(z: Tensor, y: int) -> Tensor:
    total = sum(torch.exp(z[k]) for k in range(V))
    return -torch.log(1 - torch.exp(z[y]) / total)


def dynamic(z: Tensor, y: int) -> Tensor:
    p = torch.exp(z[y]) / sum(torch.exp(z[k]) for k in range(V))
    return -p.detach() * torch.log(p)


def undecided(z: Tensor, y: int) -> Tensor:
    p = torch.exp(z[y]) / sum(torch.exp(z[k]) for k in range(V))
    return -(p * (1 - p)).detach() * torch.log(p)


def entropy_adaptive(z: Tensor, y: int) -> Tensor:
    p = torch.exp(z[y]) / sum(torch.exp(z[k]) for k in range(V))
    return -((negative_p_log_p(z, y).detach() / 2) ** 1.5) * torch.log(p)


def focused(z: Tensor, y: int) -> Tensor:
    p = torch.exp(z[y]) / sum(torch.exp(z[k]) for k in range(V))
    return -((1 - p) ** 1.3) * torch.log(p)


PAPERS = {
    "dft": (h.dft(), dynamic),
    "chord_phi": (h.chord_phi(), undecided),
    "eaft": (h.eaft(alpha=1.5, scale=2.0), entropy_adaptive),
    "focal": (h.focal(gamma=1.3), focused),
    "cross_entropy": (h.cross_entropy(), lambda z, y: smoothed(z, y, 0.0)),
    "cross_entropy_smoothed": (
        h.cross_entropy(label_smoothing=0.1),
        lambda z, y: smoothed(z, y, 0.1),
    ),
    "z_loss": (h.z_loss(), squared_normalizer),
    "entropy": (h.entropy(), negative_p_log_p),
    "unlikelihood": (h.unlikelihood(), not_the_target),
}


@pytest.mark.parametrize("name", PAPERS)
def test_formula(name: str) -> None:
    term, paper = PAPERS[name]
    z, targets = logits()
    weight = torch.rand(T, dtype=torch.float64)
    values = term(statistics(z, targets), make(lengths=(T,)).batch)
    want = torch.stack([paper(z[t], int(targets[t])) for t in range(T)])
    assert_same([values], [want])
    assert_same(
        value_and_gradient((weight * values).sum(), z),
        value_and_gradient((weight * want).sum(), z),
    )


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_cross_entropy_is_torch_s(share: float) -> None:
    z, targets = logits()
    values = h.cross_entropy(label_smoothing=share)(
        statistics(z, targets), make(lengths=(T,)).batch
    )
    want = F.cross_entropy(z, targets, label_smoothing=share, reduction="none")
    assert_same([values], [want])


def reads(term: Term, observe: bool) -> frozenset[str]:
    case = make(lengths=(2,))
    vectors = {
        name: torch.full((2,), value, dtype=torch.float64, requires_grad=True)
        for name, value in {"logp": -1.0, "lse": 2.0, "entropy": 1.0, "mean_logit": 0.1}.items()
    }
    stats = Statistics(**vectors, top1=torch.ones(2, dtype=torch.float64))  # type: ignore[arg-type]
    found = trace(term, stats, case.batch, observe)
    assert found.fields == frozenset()
    return found.statistics


def test_only_what_is_needed_is_read() -> None:
    assert reads(h.cross_entropy(), False) == {"logp"}
    assert reads(h.cross_entropy(label_smoothing=0.1), False) == {"logp", "lse", "mean_logit"}
    assert reads(h.z_loss(), True) == {"lse"}
    assert reads(h.entropy(), True) == {"entropy"}
    assert reads(h.unlikelihood(), False) == {"logp"}
    assert reads(h.cross_entropy(), True) == {"logp", "top1"}


@pytest.mark.parametrize("factory", [h.cross_entropy, h.z_loss, h.entropy, h.unlikelihood])
def test_defaults(factory) -> None:
    term = factory()
    assert (term.scope, term.per, term.reduction.name) == ("token", "token", "token_mean")
    assert term.name == factory.__name__


def test_dft_states_its_slope() -> None:
    logp = torch.tensor([-0.1, -3.0, -80.0], dtype=torch.float64, requires_grad=True)
    term, batch = h.dft(), make(lengths=(3,)).batch
    (want,) = torch.autograd.grad(term(Statistics(logp=logp), batch).sum(), logp)
    assert term.slopes is not None
    (slope,) = term.slopes(batch)
    assert (slope.rate * (slope.sign * (logp.detach() - slope.anchor)).exp()).equal(want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chord_phi_of_a_certain_or_impossible_target(dtype: torch.dtype) -> None:
    """CHORD-phi keeps the digits of 1 - p near p = 1, and is not NaN at p = 0 or p = 1."""
    points = [0.0, -1e-30, -1e-9, -1e-3, -0.7, -5.0, -800.0, -math.inf]
    logp = torch.tensor(points, dtype=dtype, requires_grad=True)
    values = h.chord_phi()(Statistics(logp=logp), make(lengths=(8,)).batch)
    (gradient,) = torch.autograd.grad(values.sum(), logp)
    x = [float(p) for p in logp.detach().double()]  # rounded to the dtype
    slope = [math.exp(p) * math.expm1(p) for p in x]
    want = [s * p if p > -math.inf else 0.0 for s, p in zip(slope, x, strict=True)]
    tolerance = 16 * torch.finfo(dtype).eps
    assert values.tolist() == pytest.approx(want, rel=tolerance, abs=1e-38)
    assert gradient.tolist() == pytest.approx(slope, rel=tolerance, abs=1e-38)


def test_focal_of_a_certain_or_impossible_target() -> None:
    logp = torch.tensor([0.0, -1e-30, -700.0], dtype=torch.float64, requires_grad=True)
    for gamma in (0.0, 0.5, 2.0):
        values = h.focal(gamma=gamma)(Statistics(logp=logp), make(lengths=(3,)).batch)
        (gradient,) = torch.autograd.grad(values.sum(), logp)
        assert values.tolist() == pytest.approx([0.0, 0.0, 700.0], abs=1e-20)
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("make_term", "message"),
    [
        (lambda: h.focal(gamma=-1), "focal: gamma: got -1, want >= 0"),
        (lambda: h.eaft(alpha=0), "eaft: alpha: got 0, want > 0"),
        (lambda: h.eaft(scale=-1), "eaft: scale: got -1, want > 0"),
    ],
)
def test_bad_option(make_term, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_term()


# ---------------------------------------------------------------------- unlikelihood at extreme p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unlikelihood_keeps_its_digits(dtype: torch.dtype) -> None:
    points = [-1e-6, -1e-3, -0.5, -math.log(2), -0.7, -5.0, -30.0, -80.0]
    logp = torch.tensor(points, dtype=dtype, requires_grad=True)
    values = h.unlikelihood()(Statistics(logp=logp), make(lengths=(8,)).batch)
    (gradient,) = torch.autograd.grad(values.sum(), logp)
    x = [float(p) for p in logp.detach().double()]  # rounded to the dtype
    want = [-math.log(-math.expm1(p)) if p > -1 else -math.log1p(-math.exp(p)) for p in x]
    slope = [math.exp(p) / -math.expm1(p) for p in x]
    tolerance = 4 * torch.finfo(dtype).eps
    assert values.tolist() == pytest.approx(want, rel=tolerance, abs=0)
    assert gradient.tolist() == pytest.approx(slope, rel=8 * tolerance, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unlikelihood_of_a_certain_or_impossible_target(dtype: torch.dtype) -> None:
    logp = torch.tensor([0.0, -1e-30, -math.inf], dtype=dtype, requires_grad=True)
    values = h.unlikelihood()(Statistics(logp=logp), make(lengths=(3,)).batch)
    (gradient,) = torch.autograd.grad(values.sum(), logp)
    most = -math.log(torch.finfo(dtype).eps)
    assert values.tolist() == pytest.approx([most, most, 0.0], rel=1e-6)
    assert gradient.isfinite().all()


# ---------------------------------------------------------------------- options and metrics


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_bad_smoothing(share: float) -> None:
    with pytest.raises(ValueError, match="cross_entropy: label_smoothing: got"):
        h.cross_entropy(label_smoothing=share)


def test_bad_type() -> None:
    with pytest.raises(TypeError, match="cross_entropy: label_smoothing: got True, want a number"):
        h.cross_entropy(label_smoothing=True)
    with pytest.raises(TypeError):
        h.z_loss(scale=2)


@pytest.mark.parametrize("factory", [h.cross_entropy, h.unlikelihood, h.chord_phi])
def test_metrics(factory) -> None:
    z, targets = logits()
    stats = statistics(z.detach(), targets)
    found = factory().observe(stats, make(lengths=(T,)).batch)
    assert set(found) == {"perplexity", "top1"}
    assert found["perplexity"].kind is Perplexity
    assert found["top1"].kind is Mean
    right = sum(int(z[t].argmax()) == int(targets[t]) for t in range(T))
    assert float(fold(found["top1"])) == pytest.approx(right / T)
    mean_nll = float(F.cross_entropy(z.detach(), targets))
    assert float(fold(found["perplexity"])) == pytest.approx(math.exp(mean_nll))


@pytest.mark.parametrize("factory", [h.dft, h.chord_phi, h.focal, h.eaft, h.on_policy_distillation])
def test_checked(factory) -> None:
    assert hl.check_term(factory()).gradients == ("logp",)


@pytest.mark.parametrize("factory", [h.soft_cross_entropy, h.any_of])
def test_terms_of_several_targets_are_checked(factory) -> None:
    ids = torch.zeros(28, 1, dtype=torch.int64)
    found = hl.check_term(factory(), candidate_ids=ids, candidate_probs=torch.rand(28, 1))
    assert found.cuts == ("segment borders", "single tokens", "permuted segments")


def several(z: Tensor, ids: Tensor) -> Statistics:
    chosen = z.log_softmax(1).gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0)
    return Statistics(extras={CANDIDATES: torch.cat([chosen, z[:, :1]], 1)})


def test_several_targets() -> None:
    """Soft targets on several tokens agree with PyTorch's cross-entropy on class probabilities;
    unused entries count nothing."""
    z, _ = logits()
    ids = torch.arange(V).expand(T, V).clone()
    probs = torch.rand(T, V, dtype=torch.float64)
    probs = probs / probs.sum(1, keepdim=True)
    fields = {"candidate_ids": ids, "candidate_probs": probs}
    batch = PackedBatch(torch.zeros(T), Segments.rows(1, T), fields)
    values = h.soft_cross_entropy()(several(z, ids), batch)
    want = F.cross_entropy(z, probs, reduction="none")
    assert_same(value_and_gradient(values.sum(), z), value_and_gradient(want.sum(), z))
    ids[:, 3:] = -1
    ids[2] = -1
    probs[:, 3:] = math.nan
    values = h.soft_cross_entropy()(several(z, ids), batch)
    kept = torch.arange(T) != 2
    want = -(probs[:, :3] * z.log_softmax(1)[:, :3]).sum(1)[kept]
    assert_same(value_and_gradient(values.sum(), z), value_and_gradient(want.sum(), z))
    values = h.any_of()(several(z, ids), batch)
    want = -z.softmax(1)[:, :3].sum(1).log()[kept]
    assert values[2] == 0
    assert_same(value_and_gradient(values.sum(), z), value_and_gradient(want.sum(), z))
