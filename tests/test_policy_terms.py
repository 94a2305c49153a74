"""Policy terms agree with their papers' formulas, written as plain float64 loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from folds import fold
from losses_case import (
    LENGTHS,
    assert_same,
    make,
    reduced,
    value_and_gradient,
)
from policy_papers import (
    Loops,
    average,
    cispo_paper,
    cispo_sequence_paper,
    dapo_paper,
    dr_grpo_paper,
    gmpo_paper,
    grpo_paper,
    gspo_paper,
    gspo_token_paper,
    kl_paper,
    luspo_paper,
    ppo_dual_paper,
    ratios,
    reinforce_paper,
    repeated,
    sapo_paper,
    sapo_sequence_paper,
    sequence_ratio,
    vespo_paper,
)
from torch import Tensor

from headloss import losses as h
from headloss.batch.batch import Batch
from headloss.batch.packing import pack
from headloss.batch.segments import Segments
from headloss.losses.catalogue import TERMS
from headloss.losses.term import Term
from headloss.losses.trial import trace
from headloss.statistics.metrics import Max, Mean, Min
from headloss.statistics.softmax import Statistics

PAPERS: dict[str, tuple[Term, Loops]] = {
    "grpo": (h.grpo(), grpo_paper),
    "grpo_delta": (h.grpo(delta=1.1), lambda b: grpo_paper(b, delta=1.1)),
    "grpo_wide": (
        h.grpo(epsilon_low=0.1, epsilon_high=0.5),
        lambda b: grpo_paper(b, 0.1, 0.5),
    ),
    "grpo_sequence": (
        h.grpo(importance_sampling_level="sequence"),
        lambda b: gspo_paper(b, 0.2, 0.2),
    ),
    "gspo": (h.gspo(), gspo_paper),
    "gspo_wide": (
        h.gspo(epsilon_low=0.1, epsilon_high=0.2),
        lambda b: gspo_paper(b, 0.1, 0.2),
    ),
    "gspo_token": (h.gspo_token(), gspo_token_paper),
    "gspo_token_wide": (
        h.gspo_token(epsilon_low=0.1, epsilon_high=0.2),
        lambda b: gspo_token_paper(b, 0.1, 0.2),
    ),
    "dapo": (h.dapo(), dapo_paper),
    "bnpo": (h.bnpo(), lambda b: dapo_paper(b, 0.2, 0.2)),
    "dr_grpo": (h.dr_grpo(max_completion_length=7), lambda b: dr_grpo_paper(b, 7)),
    "luspo": (h.luspo(), luspo_paper),
    "ppo": (h.ppo(), lambda b: dapo_paper(b, 0.2, 0.2)),
    "ppo_dual": (h.ppo(dual_clip=1.5), lambda b: ppo_dual_paper(b, 1.5)),
    "cispo": (h.cispo(), cispo_paper),
    "cispo_low": (h.cispo(epsilon_low=0.1), lambda b: cispo_paper(b, 0.1)),
    "cispo_sequence": (
        h.cispo(importance_sampling_level="sequence", epsilon_high=0.1),
        lambda b: cispo_sequence_paper(b, 0.1),
    ),
    "reinforce": (h.reinforce(), reinforce_paper),
    "sapo": (h.sapo(), sapo_paper),
    "sapo_sequence": (h.sapo(importance_sampling_level="sequence"), sapo_sequence_paper),
    "gmpo": (h.gmpo(), gmpo_paper),
    "vespo": (h.vespo(), vespo_paper),
    "kl": (h.kl(), lambda b: kl_paper(b, "k1")),
    "kl_k2": (h.kl(estimator="k2"), lambda b: kl_paper(b, "k2")),
    "kl_k3": (h.kl(estimator="k3"), lambda b: kl_paper(b, "k3")),
    "kl_corrected": (
        h.kl(estimator="k3", bias_corrected=True),
        lambda b: kl_paper(b, "k3", ratios),
    ),
    "kl_corrected_sequence": (
        h.kl(estimator="k1", bias_corrected=True, importance_sampling_level="sequence"),
        lambda b: kl_paper(b, "k1", repeated),
    ),
}
POLICY = [
    *("grpo", "gspo", "gspo_token", "dapo", "bnpo", "dr_grpo", "luspo", "ppo"),
    *("cispo", "sapo", "gmpo", "vespo"),
]


@pytest.mark.parametrize("per_token", [False, True], ids=["per_segment", "per_token"])
@pytest.mark.parametrize("name", PAPERS)
def test_paper(name: str, per_token: bool) -> None:
    term, paper = PAPERS[name]
    for seed in range(3):
        case = make(per_token=per_token, seed=seed)
        got = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
        want = value_and_gradient(paper(case.sequences()), case.logp)
        assert_same(got, want)
        assert bool(got[1].any())


@pytest.mark.parametrize("name", PAPERS)
def test_float32_stays_float32(name: str) -> None:
    term, paper = PAPERS[name]
    case = make(dtype=torch.float32)
    values = term(case.stats, case.batch)
    assert values.dtype == torch.float32
    assert float(reduced(term, case.stats, case.batch).detach()) == pytest.approx(
        float(paper(case.sequences()).detach()), rel=1e-4, abs=1e-5
    )


def test_vespo_without_a_sampler() -> None:
    case = make(per_token=True)
    want = vespo_paper(case.sequences(), sampled=False)
    fields = {k: v for k, v in case.fields.items() if k != "sampling_logps"}
    case = replace(case, fields=fields)
    assert_same([reduced(h.vespo(), case.stats, case.batch)], [want])


def test_vespo_takes_the_ratio_of_the_sampler_from_the_caller() -> None:
    """VESPO accepts the ratio to the sampler in place of the sampler's log-probs; a masked ratio of
    0 counts as 1e-8."""
    case = make(scale=0.1)
    ratio = (case.fields["old_logps"] - case.fields["sampling_logps"]).exp()
    ratio[4], masked = 1e-8, ratio.clone()
    masked[4] = 0
    sampled = case.fields["old_logps"] - ratio.log()
    want = vespo_paper(case.with_fields(sampling_logps=sampled).sequences())
    for given in (ratio, masked):
        batch = case.with_fields(importance_sampling_ratio=given).batch
        assert_same([reduced(h.vespo(), case.stats, batch)], [want])


# ---------------------------------------------------------------------- theoretical identities


@pytest.mark.parametrize("epsilons", [(3e-4, 4e-4), (0.05, 0.1), (1.0, 9.0)])
def test_gspo_token_with_one_advantage_per_sequence_is_gspo(epsilons) -> None:
    low, high = epsilons
    for seed in range(4):
        case = make(seed=seed, scale=0.2)
        options = {"epsilon_low": low, "epsilon_high": high}
        found = [
            value_and_gradient(reduced(term(**options), case.stats, case.batch), case.logp)
            for term in (h.gspo, h.gspo_token)
        ]
        assert_same(*found)
        level = h.grpo(**options, importance_sampling_level="sequence_token")
        assert_same(found[0], value_and_gradient(reduced(level, case.stats, case.batch), case.logp))


def test_on_policy_every_gradient_is_reinforce() -> None:
    """On policy, where all policy ratios are 1, the gradient of every policy term equals the
    gradient of REINFORCE."""
    case = make(per_token=False)
    case = case.with_fields(
        old_logps=case.logp.detach().clone(), sampling_logps=case.logp.detach().clone()
    )
    want = value_and_gradient(reduced(h.reinforce(), case.stats, case.batch), case.logp)[1]
    for name in POLICY:
        term = getattr(h, name)().over("token_mean")
        got = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)[1]
        # A segment's gradient is spread evenly over its tokens, and all tokens share an advantage.
        torch.testing.assert_close(got, want, msg=lambda m, name=name: f"{name}: {m}")


# ---------------------------------------------------------------------- edge cases


@pytest.mark.parametrize("name", [n for n in PAPERS if n not in ("kl", "kl_k2", "kl_k3")])
@pytest.mark.parametrize("infinity", [-math.inf, math.inf, -1e30, 1e30])
def test_infinite_ratio_gives_no_nan(name: str, infinity: float) -> None:
    case = make(per_token=True, dtype=torch.float32)
    old = case.fields["old_logps"].clone()
    old[::2] = infinity
    term = PAPERS[name][0]
    for sign in (1, -1):
        case = case.with_fields(old_logps=old, advantages=sign * case.fields["advantages"].abs())
        value, gradient = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
        assert value.isfinite()
        assert gradient.isfinite().all()


def test_ratio_is_clamped_at_exp_20() -> None:
    case = make(dtype=torch.float32)
    case = case.with_fields(old_logps=torch.full_like(case.fields["old_logps"], -500.0))
    assert term_metrics(h.grpo(), case)["ratio_max"] == pytest.approx(math.exp(20), rel=1e-6)


@pytest.mark.parametrize("name", PAPERS)
def test_empty_segment_and_empty_batch(name: str) -> None:
    term = PAPERS[name][0]
    case = make()
    values = term.function(case.stats, case.batch)
    if term.per == "segment":
        assert float(values[LENGTHS.index(0)].detach()) == 0.0
    nothing = make(lengths=(0, 0))
    assert term(nothing.stats, nothing.batch).shape == (0,)
    value, gradient = value_and_gradient(reduced(term, nothing.stats, nothing.batch), nothing.logp)
    assert float(value) == 0
    assert gradient.shape == (0,)


LEVELS = {
    "token": ("token", "token"),
    "sequence": ("segment", "segment"),
    "sequence_token": ("segment", "token"),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["grpo", "dapo", "bnpo", "dr_grpo", "luspo", "sapo"])
def test_scope_follows_the_level(name: str, level: str) -> None:
    term = getattr(h, name)(importance_sampling_level=level)
    assert (term.scope, term.per) == LEVELS[level]


def test_every_term_has_its_scope_and_denominator() -> None:
    found = {n: (t().scope, t().per) for n, t in ((f.__name__, f) for f in TERMS)}
    segment = {"gspo", "luspo", "gmpo", "dpo", "ipo", "simpo", "cpo", "orpo", "kto", "a2po"}
    for name, (scope, per) in found.items():
        if name in segment:
            assert (scope, per) == ("segment", "segment")
        elif name in ("aot", "real"):
            assert (scope, per) == ("batch", "segment")
        elif name in ("gspo_token", "vespo", "vaco", "fipo", "topr"):
            assert (scope, per) == ("segment", "token")
        elif name in ("clip_cov", "kl_cov"):
            assert (scope, per) == ("batch", "token")
        else:
            assert (scope, per) == ("token", "token"), name
    assert h.cispo(importance_sampling_level="sequence").scope == "segment"
    assert h.kl(bias_corrected=True, importance_sampling_level="sequence").scope == "segment"
    assert h.kl(importance_sampling_level="sequence").scope == "token"


def test_dr_grpo_asks_for_a_length() -> None:
    assert h.dr_grpo().reduction is None
    assert "max_completion_length" in h.dr_grpo().missing_reduction
    assert h.dr_grpo(max_completion_length=64).reduction.name == "fixed_length(64)"
    assert h.dr_grpo().over("token_mean").reduction.name == "token_mean"


@pytest.mark.parametrize(
    ("make_term", "message"),
    [
        (lambda: h.grpo(epsilon_low=-0.1), r"grpo: epsilon_low: got -0.1, want >= 0"),
        (lambda: h.gspo(epsilon_high=math.nan), r"gspo: epsilon_high: got nan, want >= 0"),
        (lambda: h.dapo(delta=0), r"dapo: delta: got 0, want > 0"),
        (
            lambda: h.luspo(importance_sampling_level="word"),
            r"luspo: importance_sampling_level: got 'word', want one of 'token', 'sequence'",
        ),
        (lambda: h.ppo(dual_clip=1.0), r"ppo: dual_clip: got 1.0, want > 1"),
        (lambda: h.dr_grpo(max_completion_length=0), r"dr_grpo: max_completion_length: got 0"),
        (lambda: h.cispo(epsilon_low=-1), r"cispo: epsilon_low: got -1"),
        (lambda: h.sapo(temperature_pos=0), r"sapo: temperature_pos: got 0, want > 0"),
        (lambda: h.gmpo(epsilon_high=-1), r"gmpo: epsilon_high: got -1"),
        (lambda: h.vespo(lambda_neg=-2), r"vespo: lambda_neg: got -2, want > 0"),
        (lambda: h.kl(estimator="k4"), r"kl: estimator: got 'k4', want one of 'k1', 'k2', 'k3'"),
    ],
)
def test_bad_option(make_term, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_term()


def test_bad_type() -> None:
    with pytest.raises(TypeError, match=r"grpo: epsilon_low: got '0.2', want a number >= 0"):
        h.grpo(epsilon_low="0.2")
    with pytest.raises(TypeError, match=r"kl: bias_corrected: got 1"):
        h.kl(bias_corrected=1)
    with pytest.raises(TypeError, match="epsilon_hihg"):
        h.grpo(epsilon_hihg=0.2)
    with pytest.raises(TypeError):
        h.grpo(0.2)


# ---------------------------------------------------------------------- metrics

ALWAYS = {"logps", "advantage", "advantage_min", "advantage_max"}
RATIO = {
    "old_logps",
    *("ratio", "ratio_min", "ratio_max", "ratio_squared"),
    *("kl_old_k1", "kl_old_k3"),
}
CLIP = {"clip_low", "clip_high", "clip_region"}


def term_metrics(term: Term, case) -> dict[str, float]:
    """Return a term's metrics over scored tokens, or over segments with a scored token."""
    scored = torch.tensor(case.lengths) > 0
    found = {}
    for name, observed in term.observe(case.stats.map(Tensor.detach), case.batch).items():
        live = scored if observed.per == "segment" else None
        assert len(observed.values) == len(scored if live is not None else case.logp)
        found[name] = float(fold(observed, live).value)
    return found


def test_metric_names() -> None:
    case = make()
    for name in POLICY:
        want = ALWAYS | RATIO | (set() if name in ("sapo", "vespo") else CLIP)
        assert set(term_metrics(getattr(h, name)(), case)) == want, name
    assert set(term_metrics(h.reinforce(), case)) == ALWAYS
    assert set(term_metrics(h.kl(), case)) == {"k1", "k3"}


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "cispo", "gmpo"])
def test_metric_values(name: str) -> None:
    case = make(scale=0.5)
    sequences = [s for s in case.sequences() if len(s)]
    rows = [(r, a) for s in sequences for r, a in zip(ratios(s), s.advantages, strict=True)]
    low, high = {"grpo": (0.8, 1.2), "cispo": (-math.inf, 1.28)}.get(name, (1 - 3e-4, 1 + 4e-4))
    if name == "gmpo":
        low, high = math.exp(-0.4), math.exp(0.4)
    if name == "gspo":
        rows = [(sequence_ratio(s), average(s.advantages)) for s in sequences]
    if name == "gspo_token":
        rows = [(sequence_ratio(s), a) for s in sequences for a in s.advantages]
    r = [float(r.detach()) for r, _ in rows]
    below = sum(bool(r < low and a < 0) for r, a in rows) / len(rows)
    above = sum(bool(r > high and a > 0) for r, a in rows) / len(rows)
    d = [float((n - o).detach()) for s in sequences for n, o in zip(s.logp, s.old, strict=True)]
    a = [float(a) for s in sequences for a in s.advantages]
    want = {
        "logps": float(case.logp.detach().mean()),
        "old_logps": float(case.fields["old_logps"].mean()),
        "ratio": sum(r) / len(r),
        "ratio_min": min(r),
        "ratio_max": max(r),
        "ratio_squared": sum(x * x for x in r) / len(r),
        "kl_old_k1": -sum(d) / len(d),
        "kl_old_k3": sum(math.exp(x) - x - 1 for x in d) / len(d),
        "clip_low": below,
        "clip_high": above,
        "clip_region": below + above,
        "advantage": sum(a) / len(a),
        "advantage_min": min(a),
        "advantage_max": max(a),
    }
    assert term_metrics(getattr(h, name)(), case) == pytest.approx(want, rel=1e-9)
    assert 0 < below + above < 1 or name == "gspo_token"


def test_metric_kinds() -> None:
    case = make()
    kinds = {name: o.kind for name, o in h.gspo().observe(case.stats, case.batch).items()}
    assert kinds["ratio"] is Mean
    assert kinds["ratio_min"] is kinds["advantage_min"] is Min
    assert kinds["ratio_max"] is kinds["advantage_max"] is Max


def test_sequence_weight_of_vespo_is_its_ratio() -> None:
    case = make(scale=0.2)
    sequences = [s for s in case.sequences() if len(s)]
    w = [
        math.exp(sum(float(n.detach()) - float(q) for n, q in zip(s.logp, s.sampling, strict=True)))
        for s in sequences
    ]
    found = term_metrics(h.vespo(), case)
    assert found["ratio"] == pytest.approx(sum(w) / len(w))
    assert found["ratio_max"] == pytest.approx(max(w))


# ---------------------------------------------------------------------- inputs of terms


@pytest.mark.parametrize("name", PAPERS)
def test_only_declared_statistics_are_read(name: str) -> None:
    case = make()
    reads = trace(PAPERS[name][0], case.stats, case.batch)
    assert reads.statistics == {"logp"}


def test_advantages_may_be_given_either_way() -> None:
    """Advantages [S], one per segment, give the same loss as advantages [T] that repeat the value
    for each token of a segment."""
    targets = torch.zeros(4, dtype=torch.int64)
    segments = Segments.from_lengths([1, 3])
    stats = Statistics(logp=torch.tensor([-1.0, -2.0, -0.5, -1.5]))
    values = []
    for advantages in (torch.tensor([1.0, -2.0]), torch.tensor([1.0, -2.0, -2.0, -2.0])):
        batch = Batch(targets, segments, advantages=advantages, old_logps=torch.full((4,), -1.1))
        values.append(
            reduced(h.gspo(), stats, pack(batch, vocabulary=1, dtype=torch.float32))
        )
    assert_same([values[0]], [values[1]])
