"""Modifiers (sampler correction, off-policy mask, top-entropy mask) agree with float64 loops."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from folds import fold
from losses_case import LENGTHS, Case, assert_same, make, reduced, value_and_gradient
from torch import Tensor, multiprocessing

from headloss import losses as h
from headloss.batch.batch import Batch
from headloss.batch.packing import PackedBatch
from headloss.batch.segments import Segments
from headloss.losses.modifiers import MODES, Modifier, top_entropy
from headloss.losses.rejection import LEVELS, MEASURES
from headloss.losses.term import Term
from headloss.statistics.metrics import Max, Mean
from headloss.statistics.softmax import Statistics

BOUNDS = [(None, 3.0), (0.7, 1.3), (0.9, None), (None, None)]


def modifier_of(term: Term) -> Modifier:
    return term.modifiers[-1]


def factor(term: Term, case: Case) -> Tensor:
    return modifier_of(term).factor(case.stats, case.batch)


# ---------------------------------------------------------------------- corrected


def mismatch(case: Case, sequence: bool) -> list[list[float]]:
    """Return the clamped ratio between old policy and sampler, at each token of each sequence."""
    found = []
    for s in case.sequences():
        d = [float(o - q) for o, q in zip(s.old, s.sampling, strict=True)]
        d = [0.0 if math.isnan(x) else x for x in d]
        if sequence:
            d = [sum(d)] * len(d)
        found.append([math.exp(min(max(x, -20.0), 20.0)) for x in d])
    return found


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_corrected(mode: str, low: float | None, high: float | None) -> None:
    case = make()
    case.fields["sampling_logps"][4] = math.nan
    term = h.grpo().corrected(mode, min=low, max=high)
    weights = mismatch(case, mode.startswith("sequence"))
    bottom, top = -math.inf if low is None else low, math.inf if high is None else high

    def bounded(w: float) -> float:
        if mode.endswith("truncate"):
            return min(max(w, bottom), top)
        return w if bottom <= w <= top else 0.0

    want = [bounded(w) for row in weights for w in row]
    assert factor(term, case).tolist() == pytest.approx(want)
    assert_same(
        [term(case.stats, case.batch)],
        [torch.tensor(want, dtype=torch.float64) * h.grpo()(case.stats, case.batch)],
    )
    assert term.scope == ("segment" if mode.startswith("sequence") else "token")


@pytest.mark.parametrize("mode", MODES)
def test_correction_metrics(mode: str) -> None:
    case = make()
    sequence = mode.startswith("sequence")
    found = modifier_of(h.grpo().corrected(mode, min=0.7, max=1.3)).observe(case.stats, case.batch)
    rows = [row for row in mismatch(case, sequence) if row]
    w = [row[0] for row in rows] if sequence else [x for row in rows for x in row]
    live = torch.tensor(LENGTHS) > 0 if sequence else None
    share = "masked" if mode.endswith("mask") else "truncated"
    assert set(found) == {"mismatch", "mismatch_max", share}
    assert (found["mismatch"].kind, found["mismatch_max"].kind) == (Mean, Max)
    values = {name: float(fold(o, live)) for name, o in found.items()}
    assert {o.per for o in found.values()} == {"segment" if sequence else "token"}
    outside = sum(not 0.7 <= x <= 1.3 for x in w) / len(w)
    assert values == pytest.approx(
        {"mismatch": sum(w) / len(w), "mismatch_max": max(w), share: outside}
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("far", [-math.inf, math.inf, 1e4])
def test_extreme_mismatch_is_finite(mode: str, far: float) -> None:
    case = make(dtype=torch.float32)
    case.fields["sampling_logps"][[0, 4, 5]] = far
    term = h.grpo().corrected(mode, max=None)
    value, gradient = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert float(factor(term, case).max()) <= math.exp(20) * (1 + 1e-6)


def test_correction_carries_no_gradient_and_keeps_the_denominator() -> None:
    case = make()
    w = factor(h.grpo().corrected("token_truncate"), case)
    plain = h.grpo().over("token_mean")
    got = value_and_gradient(
        reduced(plain.corrected("token_truncate"), case.stats, case.batch), case.logp
    )
    losses = w * plain(case.stats, case.batch)
    assert_same(got, value_and_gradient(losses.sum() / sum(LENGTHS), case.logp))


# ---------------------------------------------------------------------- rejected


def disagreement(measure: str, old: float, sampling: float) -> float:
    d, p, q = old - sampling, math.exp(old), math.exp(sampling)
    return {
        "ratio": d,
        "k2": d * d / 2,
        "k3": math.exp(d) - 1 - d,
        "tv": abs(p - q),
        "kl": q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)),
    }[measure]


def of_sequence(values: list[float], level: str) -> float:
    if not values:
        return 0.0
    total = max(values) if level == "sequence_max" else sum(values)
    return total / len(values) if level == "sequence_mean" else total


@pytest.mark.parametrize(
    "limits", [{"min": 0.6}, {"max": 1.6}, {"min": 0.6, "max": 1.6}, {"min": 1e-4, "max": 100}]
)
@pytest.mark.parametrize("live", [False, True])
def test_rejected_by_the_ratio_of_each_token(limits: dict[str, float], live: bool) -> None:
    """`rejected` keeps a sequence if all token ratios are within the bounds.

    NaN ratios are ignored, and ratios are compared after the clamp at exp(20).
    """
    case = make(scale=0.35, seed=2)
    # the only token of the second sequence has no sampler log-prob
    case.fields["sampling_logps"][3] = math.nan
    case.fields["sampling_logps"][12] = -90.0 if limits.get("max") == 100 else -1.0
    low, high = limits.get("min", 0.0), limits.get("max", math.inf)
    want = []
    for s in case.sequences():
        new = [x.detach() for x in s.logp] if live else s.old
        d = [float(o - q) for o, q in zip(new, s.sampling, strict=True)]
        ratios = [1.0 if math.isnan(x) else math.exp(min(max(x, -20), 20)) for x in d]
        want += [float(all(low <= r <= high for r in ratios))] * len(ratios)
    assert 0 < sum(want) < len(want)
    term = h.grpo().rejected("ratio", "sequence_max", **limits, live=live)
    assert term.scope == "segment"
    assert factor(term, case).tolist() == want
    (modifier,) = term.modifiers
    dropped = modifier.observe(case.stats, case.batch)["rejected"]
    of_tokens = case.batch.segments.expand(dropped.values)
    assert dropped.per == "segment" and of_tokens.tolist() == [1 - x for x in want]
    if not live:
        batch = Batch(torch.zeros(len(want)).long(), Segments.from_lengths(LENGTHS), **case.fields)
        field = h.rejection_mask(batch, "ratio", level="sequence_max", **limits)
        assert field.tolist() == [x == 1 for x in want]


def test_bounds_of_the_ratio_of_each_token() -> None:
    for make_it in (
        h.grpo().rejected,
        lambda *given, **more: h.rejection_mask(None, *given, **more),
    ):
        with pytest.raises(ValueError, match="got min=None and max=None, want one"):
            make_it("ratio", level="sequence_max")
        with pytest.raises(ValueError, match="min: got 2, want <= max, 1"):
            make_it("ratio", level="sequence_max", min=2, max=1)
        with pytest.raises(ValueError, match="max: got -1, want >= 0"):
            make_it("ratio", level="sequence_max", max=-1)


@pytest.mark.covering
@pytest.mark.parametrize("bounds", ["min", "max", "both"])
@pytest.mark.parametrize(
    ("measure", "level"),
    [pair for pair in itertools.product(MEASURES, LEVELS) if pair != ("ratio", "sequence_max")],
)
def test_rejected(measure: str, level: str, bounds: str) -> None:
    """`rejected` agrees with Python loops, for thresholds in the middle of the values and next to
    their extremes."""
    case = make()
    probabilities = {n: case.fields[n].clamp_max(-0.05) for n in ("old_logps", "sampling_logps")}
    case = case.with_fields(**probabilities)
    tokens = [
        [disagreement(measure, float(o), float(q)) for o, q in zip(s.old, s.sampling, strict=True)]
        for s in case.sequences()
    ]
    if level != "token":
        tokens = [[of_sequence(values, level)] * len(values) for values in tokens]
    if measure == "ratio":
        tokens = [[math.exp(m) for m in values] for values in tokens]
    ordered = sorted({m for values in tokens for m in values})
    middle = (ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2
    low = middle if bounds == "min" else (ordered[0] + ordered[1]) / 2
    high = middle if bounds == "max" else (ordered[-2] + ordered[-1]) / 2
    limits = {"min": low if bounds != "max" else None, "max": high if bounds != "min" else None}
    want = [
        float((bounds == "max" or m >= low) and (bounds == "min" or m <= high))
        for values in tokens
        for m in values
    ]
    assert 0 < sum(want) < len(want)
    term = h.grpo().rejected(measure, level, **limits)
    assert factor(term, case).tolist() == want
    told = term.modifiers[0].observe(case.stats, case.batch)["rejected"]
    dropped = told.values if level == "token" else case.batch.segments.expand(told.values)
    assert told.per == ("token" if level == "token" else "segment")
    assert dropped.tolist() == [1 - kept for kept in want]
    batch = Batch(torch.zeros(len(want)).long(), Segments.from_lengths(LENGTHS), **probabilities)
    assert h.rejection_mask(batch, measure, level=level, **limits).tolist() == [
        x == 1 for x in want
    ]


# ---------------------------------------------------------------------- off-policy mask


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_off_policy_masked(per_token: bool, sampled: bool) -> None:
    case = make(per_token=per_token, scale=1.0, seed=3)
    case.fields["sampling_logps"][4] = math.nan
    rows = case.sequences()
    if not sampled:
        del case.fields["sampling_logps"]
    want = []
    for s in rows:
        behaviour = s.sampling if sampled else s.old
        drift = [float((b - n).detach()) for b, n in zip(behaviour, s.logp, strict=True)]
        drift = [0.0 if math.isnan(x) else x for x in drift]
        low = sum(drift) / max(len(drift), 1) <= 0.05
        want += [float(bool(a >= 0) or low) for a in s.advantages]
    term = h.grpo().off_policy_masked(0.05)
    assert factor(term, case).tolist() == want
    assert 0 < sum(want) < len(want)
    assert term.scope == "segment"


# ---------------------------------------------------------------------- top entropy


def exact_cut(values: list[float], quantile: str) -> float:
    """Return the (1 - quantile) quantile by linear interpolation, with an exact fractional rank."""
    ordered = sorted(values)
    rank = (1 - Fraction(quantile)) * (len(ordered) - 1)
    low = math.floor(rank)
    above = ordered[min(low + 1, len(ordered) - 1)]
    return ordered[low] + float(rank - low) * (above - ordered[low])


@pytest.mark.parametrize("quantile", ["0.01", "0.2", "0.25", "0.3", "0.5", "0.7", "0.9", "1"])
def test_quantile(quantile: str) -> None:
    term = h.grpo().top_entropy(quantile=float(quantile))
    assert term.scope == "batch"
    for lengths in (LENGTHS, (1,), (2,), (11,), (21,)):
        case = make(lengths=lengths)
        entropy = case.entropy.tolist()
        cut = exact_cut(entropy, quantile)
        assert factor(term, case).tolist() == [float(e >= cut) for e in entropy]
        # In float32, torch.quantile (from torch 2.14 on) rounds the fractional rank and may return
        # a larger element, so compare with an exact sort.
        case = make(lengths=lengths, dtype=torch.float32)
        cut = exact_cut(case.entropy.tolist(), quantile)
        assert factor(term, case).tolist() == [float(e >= cut) for e in case.entropy.tolist()]


def test_a_whole_rank_keeps_its_own_token() -> None:
    """`top_entropy(quantile=..)` keeps the token whose entropy is the threshold. With quantile=0.3
    and 11 tokens, this threshold is the eighth smallest entropy, however 1 - 0.3 is rounded."""
    for quantile, kept in ((0.1, 2), (0.3, 4), (0.6, 7), (0.7, 8), (0.9, 10), (1.0, 11)):
        case = make(lengths=(11,))
        got = factor(h.grpo().top_entropy(quantile=quantile), case)
        assert int(got.sum()) == kept


def test_threshold() -> None:
    case = make()
    cut = float(case.entropy.detach().median())
    term = h.grpo().top_entropy(threshold=cut)
    want = [float(e >= cut) for e in case.entropy.tolist()]
    assert factor(term, case).tolist() == want
    assert term.scope == "token"


def test_dead_tokens_do_not_count() -> None:
    case = make(lengths=(8, 5))
    whole = case.batch
    live = torch.arange(13) < 8
    entropy = case.entropy.detach().clone()
    entropy[8:] = 50.0
    static = PackedBatch(whole.targets, whole.segments, {}, live=live)
    modifier = top_entropy(quantile=0.5)
    got = modifier.factor(Statistics(entropy=entropy), static)
    want = (entropy[:8] >= torch.quantile(entropy[:8], 0.5)).double()
    assert torch.equal(got[:8], want)
    dead = torch.zeros(13, dtype=torch.bool)
    nothing = PackedBatch(whole.targets, whole.segments, {}, live=dead)
    assert modifier.factor(Statistics(entropy=entropy), nothing).tolist() == [0.0] * 13


def test_empty_batch() -> None:
    case = make(lengths=(0,))
    assert factor(h.grpo().top_entropy(quantile=0.5), case).shape == (0,)


def _rank(rank: int, store: str, sizes: list[int], found: Path) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(sizes)
    )
    entropy = torch.linspace(0, 3, sum(sizes)).cos().split(sizes)[rank]
    case = make(lengths=(sizes[rank],))
    modifier = top_entropy(quantile=0.4, group=distributed.group.WORLD)
    kept = modifier.factor(Statistics(entropy=entropy), case.batch)
    torch.save(kept, found / f"{rank}.pt")
    distributed.destroy_process_group()


def test_quantile_over_a_group(tmp_path: Path) -> None:
    """Ranks of different sizes, one of them empty, use the quantile over all tokens."""
    sizes = [7, 0, 4]
    arguments = (str(tmp_path / "store"), sizes, tmp_path)
    multiprocessing.start_processes(_rank, arguments, nprocs=len(sizes), start_method="fork")
    whole = torch.linspace(0, 3, sum(sizes)).cos()
    want = (whole >= exact_cut(whole.tolist(), "0.4")).float().split(sizes)
    for rank, expected in enumerate(want):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), expected)


# ---------------------------------------------------------------------- combinations and refusals


def test_modifiers_multiply() -> None:
    case = make(seed=3)
    term = (
        h.gspo().corrected("token_mask", max=1.2).off_policy_masked(0.1).top_entropy(threshold=0.3)
    )
    want = h.gspo()(case.stats, case.batch)
    for modifier in term.modifiers:
        want = want * modifier.factor(case.stats, case.batch)
    assert_same([term(case.stats, case.batch)], [want])
    assert [m.name for m in term.modifiers] == ["corrected", "off_policy_masked", "top_entropy"]


@pytest.mark.parametrize(
    ("make_term", "message"),
    [
        (
            lambda t: t.corrected("sequence"),
            "corrected: mode: got 'sequence', want one of 'token_truncate', 'token_mask'",
        ),
        (lambda t: t.corrected("token_mask", min=0), "corrected: min: got 0, want > 0"),
        (lambda t: t.corrected("token_mask", max=-1), "corrected: max: got -1, want > 0"),
        (lambda t: t.corrected("token_mask", min=2, max=1), "corrected: min: got 2, want <= max"),
        (lambda t: t.off_policy_masked(math.nan), "off_policy_masked: threshold: got nan"),
        (lambda t: t.top_entropy(), "top_entropy: got quantile=None and threshold=None"),
        (lambda t: t.top_entropy(0.5, 0.5), "top_entropy: got quantile=0.5 and threshold=0.5"),
        (lambda t: t.top_entropy(quantile=0), "top_entropy: quantile: got 0, want 0 < quantile"),
        (lambda t: t.top_entropy(quantile=1.5), "top_entropy: quantile: got 1.5"),
        (lambda t: t.top_entropy(threshold=-1), "top_entropy: threshold: got -1, want >= 0"),
    ],
)
def test_bad_option(make_term, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_term(h.grpo())
