"""Preference terms against their papers' formulas, pair by pair in float64."""

from __future__ import annotations

import math

import pytest
import torch
from losses_case import Sequence, assert_same, make, reduced, value_and_gradient
from torch import Tensor

from headloss import losses as h
from headloss.batch.packing import PackedBatch
from headloss.batch.segments import Segments
from headloss.losses.term import Term, trace
from headloss.objective.metrics import fold

LENGTHS = (3, 1, 2, 5, 4, 2)


def total(values: list[Tensor]) -> Tensor:
    return sum(values, torch.zeros((), dtype=torch.float64))


def log_ratios(s: Sequence) -> list[Tensor]:
    return [n - r for n, r in zip(s.logp, s.ref, strict=True)]


def mean(values: list[Tensor]) -> Tensor:
    return total(values) / max(len(values), 1)


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def dpo_paper(chosen: Sequence, rejected: Sequence, beta: float, eps: float) -> Tensor:
    x = beta * (total(log_ratios(chosen)) - total(log_ratios(rejected)))
    return -(1 - eps) * log_sigmoid(x) - eps * log_sigmoid(-x)


def ipo_paper(chosen: Sequence, rejected: Sequence, beta: float, eps: float) -> Tensor:
    x = mean(log_ratios(chosen)) - mean(log_ratios(rejected))
    return (1 - eps) * (x - 1 / (2 * beta)) ** 2 + eps * (-x - 1 / (2 * beta)) ** 2


def simpo_paper(chosen: Sequence, rejected: Sequence, beta: float, eps: float) -> Tensor:
    x = beta * mean(chosen.logp) - beta * mean(rejected.logp) - 0.5
    return -(1 - eps) * log_sigmoid(x) - eps * log_sigmoid(-x)


PAPERS = {"dpo": (h.dpo, dpo_paper), "ipo": (h.ipo, ipo_paper), "simpo": (h.simpo, simpo_paper)}


@pytest.mark.parametrize("eps", [0.0, 0.2])
@pytest.mark.parametrize("name", PAPERS)
def test_paper(name: str, eps: float) -> None:
    make_term, paper = PAPERS[name]
    for seed, beta in enumerate((0.1, 0.5, 2.0)):
        case = make(lengths=LENGTHS, seed=seed)
        term = make_term(beta=beta, label_smoothing=eps)
        rows = case.sequences()
        pairs = [paper(c, r, beta, eps) for c, r in zip(rows[::2], rows[1::2], strict=True)]
        want = value_and_gradient(total(pairs) / len(pairs), case.logp)
        assert_same(value_and_gradient(reduced(term, case.stats, case.batch), case.logp), want)


@pytest.mark.parametrize("name", PAPERS)
def test_empty_sides(name: str) -> None:
    """A side without tokens has the empty sum; a pair without any has loss 0 and counts."""
    make_term, paper = PAPERS[name]
    case = make(lengths=(3, 0, 0, 2, 0, 0, 1, 4))
    rows = case.sequences()
    pairs = [paper(rows[i], rows[i + 1], 0.1, 0.0) for i in (0, 2, 6)]
    want = value_and_gradient(total(pairs) / 4, case.logp)
    term = make_term()
    assert_same(value_and_gradient(reduced(term, case.stats, case.batch), case.logp), want)
    values = term.function(case.stats, case.batch).tolist()
    assert values[1] == values[2] == values[4] == values[5] == 0
    assert values[0] == pytest.approx(2 * float(pairs[0].detach()))
    assert values[6] == values[7] == pytest.approx(float(pairs[2].detach()))


@pytest.mark.parametrize("name", PAPERS)
def test_odd_number_of_segments(name: str) -> None:
    case = make(lengths=(3, 1, 2))
    with pytest.raises(ValueError, match="got 3, want an even number"):
        PAPERS[name][0]()(case.stats, case.batch)


@pytest.mark.parametrize("name", PAPERS)
def test_unscored_tokens_in_a_segment_of_their_own(name: str) -> None:
    """Static shapes put them last, after an even number of segments."""
    term: Term = PAPERS[name][0]()
    case = make(lengths=(3, 1, 2, 2, 4))
    live = torch.arange(12) < 8
    whole = case.batch
    static = PackedBatch(
        whole.targets,
        Segments(whole.segments.ids, 5, counts=whole.segments.lengths),
        {name: getattr(whole, name) for name in whole.kinds()},
        live=live,
    )
    short = make(lengths=(3, 1, 2, 2, 4))
    short.logp = case.logp.detach()[:8]
    short.entropy = case.entropy.detach()[:8]
    short.lengths = (3, 1, 2, 2)
    short.fields = {k: v[:8] if len(v) == 12 else v[:4] for k, v in case.fields.items()}
    got = term(case.stats, static)
    assert got[8:].tolist() == [0.0] * 4
    assert_same([got[:8]], [term(short.stats, short.batch)])


@pytest.mark.parametrize("name", PAPERS)
def test_declared(name: str) -> None:
    term: Term = PAPERS[name][0]()
    assert (term.scope, term.per, term.segments_per_unit) == ("segment", "segment", 2)
    assert term.reduction is not None
    assert term.reduction.name == "sequence_mean"
    case = make(lengths=LENGTHS)
    reads = trace(term, case.stats, case.batch)
    assert reads.statistics == {"logp"}
    assert ("ref_logps" in reads.fields) == (name != "simpo")
    assert "beta=0.1" in repr(term)
    assert ("gamma=0.5" in repr(term)) == (name == "simpo")


@pytest.mark.parametrize("name", PAPERS)
def test_metrics(name: str) -> None:
    case = make(lengths=LENGTHS)
    rows = case.sequences()
    score = {
        "dpo": lambda s: total(log_ratios(s)),
        "ipo": lambda s: mean(log_ratios(s)),
        "simpo": lambda s: mean(s.logp),
    }[name]
    chosen = [0.5 * float(score(s).detach()) for s in rows[::2]]
    rejected = [0.5 * float(score(s).detach()) for s in rows[1::2]]
    want = {
        "chosen_rewards": sum(chosen) / 3,
        "rejected_rewards": sum(rejected) / 3,
        "margin": (sum(chosen) - sum(rejected)) / 3,
        "accuracy": sum(c > r for c, r in zip(chosen, rejected, strict=True)) / 3,
    }
    observe = PAPERS[name][0](beta=0.5).observe
    stats = case.stats.map(Tensor.detach)
    observed = observe(stats, case.batch)
    assert {o.per for o in observed.values()} == {"segment"}
    found = {k: float(fold(o)) for k, o in observed.items()}
    assert found == pytest.approx(want)


def test_a_wide_margin_stays_finite() -> None:
    case = make(lengths=(2, 2), dtype=torch.float32)
    ref = case.fields["ref_logps"]
    for far in (-1e4, 1e4):
        case = case.with_fields(ref_logps=torch.cat([ref[:2] + far, ref[2:]]))
        value, gradient = value_and_gradient(
            reduced(h.dpo(beta=1.0), case.stats, case.batch), case.logp
        )
        assert value.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("make_term", "message"),
    [
        (lambda: h.dpo(beta=0), "dpo: beta: got 0, want > 0"),
        (lambda: h.ipo(beta=math.inf), "ipo: beta: got inf, want > 0"),
        (lambda: h.simpo(beta=-1), "simpo: beta: got -1, want > 0"),
        (lambda: h.simpo(gamma=-0.5), "simpo: gamma: got -0.5, want >= 0"),
        (lambda: h.dpo(label_smoothing=0.6), "dpo: label_smoothing: got 0.6, want 0 <= label_sm"),
    ],
)
def test_bad_option(make_term, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_term()
