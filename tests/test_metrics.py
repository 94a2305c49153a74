"""Metrics are computed and merged correctly, and do not depend on how a call is split into chunks
or ranks."""

from __future__ import annotations

import math

import pytest
import torch
from folds import fold
from hypothesis import given
from hypothesis import strategies as st
from live_tensors import LiveTensors

import headloss as hl
from headloss.statistics.metrics import Max, Mean, Metrics, Min, Observed, Perplexity, Sum

KINDS = [Mean, Perplexity, Sum, Max, Min]


def of(kind, values: list[float]) -> float:
    """Compute a metric from all its values, by definition."""
    if kind is Sum:
        return sum(values)
    if kind is Max or kind is Min:
        return max(values, default=-math.inf) if kind is Max else min(values, default=math.inf)
    mean = sum(values) / len(values) if values else math.nan
    return math.exp(mean) if kind is Perplexity else mean


@pytest.mark.parametrize("kind", KINDS)
def test_a_measurement_of_some_of_the_values(kind):
    values = torch.tensor([1.0, math.nan, 3.0, 7.0], dtype=torch.float64)
    where, live = torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False])
    assert float(fold(Observed(values, kind, where=where), live).value) == of(kind, [1.0, 3.0])
    assert float(fold(Observed(values, kind, where=where)).value) == of(kind, [1.0, 3.0, 7.0])


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.lists(st.tuples(st.floats(-5, 5), st.booleans()), max_size=12),
    st.lists(st.tuples(st.floats(-5, 5), st.booleans()), max_size=12),
)
def test_fold_and_merge_are_the_measurement_of_the_whole(kind, left, right):
    def folded(pairs):
        values = torch.tensor([v for v, _ in pairs], dtype=torch.float64)
        live = torch.tensor([kept for _, kept in pairs], dtype=torch.bool)
        return fold(Observed(values, kind), live)

    want = of(kind, [v for v, kept in left + right if kept])
    for merged in (folded(left).merge(folded(right)), folded(right).merge(folded(left))):
        assert type(merged) is kind
        assert float(merged) == pytest.approx(want, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("kind", KINDS)
def test_fold_in_float64_and_without_a_mask(kind):
    values = torch.tensor([1.5, -2.0, 3.25])
    folded = fold(Observed(values, kind))
    assert folded.value.dtype == torch.float64
    assert float(folded) == pytest.approx(of(kind, values.tolist()))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing(kind):
    for nothing in (
        fold(Observed(torch.zeros(0), kind)),
        fold(Observed(torch.ones(3), kind), torch.zeros(3, dtype=torch.bool)),
    ):
        assert float(nothing) == pytest.approx(of(kind, []), nan_ok=True)
        assert float(nothing.merge(fold(Observed(torch.tensor([2.0]), kind)))) == pytest.approx(
            of(kind, [2.0])
        )


@pytest.mark.parametrize("kind", KINDS)
def test_poison_in_rows_that_do_not_count(kind):
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    live = torch.tensor([True, False, False, False])
    assert float(fold(Observed(values, kind), live)) == pytest.approx(of(kind, [1.0]))


def test_shares_of_ranks_that_report_alike():
    values = torch.tensor([1.0, 3.0])
    half = fold(Observed(values, Mean, "segment"), share=0.5)
    whole = half.merge(half)
    assert isinstance(whole, Mean)
    assert float(whole) == 2 and float(whole.count) == 2
    assert float(fold(Observed(values, Max), share=0.5)) == 3


def test_perplexity():
    nll = torch.tensor([0.5, 1.5, 4.0])
    assert float(fold(Observed(nll, Perplexity))) == pytest.approx(math.exp(2.0))


def test_metrics_merge_by_name():
    one = Metrics(a=Sum(torch.tensor(1.0)), b=Max(torch.tensor(2.0)))
    other = Metrics(a=Sum(torch.tensor(10.0)), c=Min(torch.tensor(3.0)))
    joined = one.merge(other)
    assert isinstance(joined, Metrics)
    assert joined.compute() == {"a": 11, "b": 2, "c": 3}
    assert one.compute() == {"a": 1, "b": 2}  # unchanged


def test_compute_of_nothing():
    assert Metrics().compute() == {}


# ---------------------------------------------------------------------- metrics of a call


OBJECTIVE = (
    hl.grpo().corrected("token_mask", max=1.1)
    + 0.1 * hl.kl(estimator="k3")
    + hl.gspo()
    + hl.cross_entropy()
)


def problem(tokens: int = 24):
    hidden, weight = torch.randn(tokens, 5).double(), torch.randn(17, 5).double()
    lengths = [5, 0, 8, 4, 6, 1]
    fields = {
        "advantages": torch.randn(6),
        "old_logps": -torch.rand(tokens) - 2,
        "ref_logps": -torch.rand(tokens) - 2,
        "sampling_logps": -torch.rand(tokens) - 2,
    }
    targets = torch.randint(17, (tokens,))
    targets[[3, 11, 23]] = -100
    return hidden, hl.Head(weight), targets, hl.Segments.from_lengths(lengths), fields


def compare(got: dict[str, float], want: dict[str, float]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name] == pytest.approx(want[name], rel=1e-9, nan_ok=True), name


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("schedule", ["auto", "recompute"])
def test_metrics_do_not_depend_on_the_chunks(schedule, chunk):
    hidden, head, targets, segments, fields = problem()
    batch = hl.Batch(targets, segments, **fields)
    want = hl.head_loss(hidden, head, batch, OBJECTIVE).metrics.compute()
    leaf = hidden.clone().requires_grad_()
    options = hl.Options(schedule=schedule, chunk_tokens=chunk)
    compare(hl.head_loss(leaf, head, batch, OBJECTIVE, options).metrics.compute(), want)


def test_metrics_of_micro_batches_merge_to_those_of_the_whole():
    hidden, head, targets, segments, fields = problem()
    batch = hl.Batch(targets, segments, **fields)
    want = hl.head_loss(hidden, head, batch, OBJECTIVE).metrics.compute()
    parts = []
    for rows, owners in ((slice(0, 13), slice(0, 3)), (slice(13, 24), slice(3, 6))):
        part = {n: v[owners] if n == "advantages" else v[rows] for n, v in fields.items()}
        lengths = segments.lengths[owners]
        cut = hl.Batch(targets[rows], hl.Segments.from_lengths(lengths), **part)
        parts.append(hl.head_loss(hidden[rows], head, cut, OBJECTIVE).metrics)
    compare(parts[0].merge(parts[1]).compute(), want)


def test_metrics_by_hand():
    hidden, head, targets, segments, fields = problem()
    batch = hl.Batch(targets, segments, **fields)
    out = hl.head_loss(hidden, head, batch, OBJECTIVE)
    found = out.metrics.compute()
    scored = targets != -100
    logps = hidden @ head.weight.T
    logps = logps.log_softmax(-1)
    chosen = logps.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1)
    d = (chosen - fields["old_logps"])[scored]
    ratio = d.exp()
    advantages = fields["advantages"][segments.ids][scored]
    entropy = -(logps.exp() * logps).sum(-1)[scored]
    mismatch = (fields["old_logps"] - fields["sampling_logps"])[scored].exp()
    reference = (fields["ref_logps"] - chosen)[scored]
    want = {
        "tokens": 21,
        "segments": 6,
        "entropy": entropy.mean(),
        "grpo/logps": chosen[scored].mean(),
        "grpo/old_logps": fields["old_logps"][scored].mean(),
        "grpo/ratio": ratio.mean(),
        "grpo/ratio_min": ratio.min(),
        "grpo/ratio_max": ratio.max(),
        "grpo/ratio_squared": ratio.square().mean(),
        "grpo/kl_old_k1": -d.mean(),
        "grpo/kl_old_k3": (ratio - 1 - d).mean(),
        "grpo/clip_low": ((ratio < 0.8) & (advantages < 0)).double().mean(),
        "grpo/clip_high": ((ratio > 1.2) & (advantages > 0)).double().mean(),
        "grpo/advantage": advantages.mean(),
        "grpo/advantage_min": advantages.min(),
        "grpo/advantage_max": advantages.max(),
        "grpo/mismatch": mismatch.mean(),
        "grpo/mismatch_max": mismatch.max(),
        "grpo/masked": (mismatch > 1.1).double().mean(),
        "kl/k1": -reference.mean(),
        "kl/k3": (reference.exp() - reference - 1).mean(),
        "cross_entropy/perplexity": (-chosen[scored].mean()).exp(),
        "cross_entropy/top1": (logps.argmax(-1) == targets)[scored].double().mean(),
    }
    for name, value in want.items():
        assert found[name] == pytest.approx(float(value), rel=1e-6), name
    assert found["grpo/clip_region"] == pytest.approx(
        found["grpo/clip_low"] + found["grpo/clip_high"]
    )


@pytest.mark.parametrize("make_term", [hl.grpo, hl.gspo])
def test_a_ratio_on_a_bound_is_inside_it(make_term):
    """A ratio on a bound counts as inside: with bounds of 1 and a ratio of 1 no token is
    clipped."""
    hidden, head, targets, segments, fields = problem()
    fields |= {"advantages": torch.tensor([1.0, 1, -1, 1, -1, 1]), "old_logps": hl.CURRENT}
    batch = hl.Batch(targets, segments, **fields)
    term = make_term(epsilon_low=0.0, epsilon_high=0.0)
    found = hl.head_loss(hidden, head, batch, term).metrics.compute()
    assert found[f"{term.name}/ratio_min"] == found[f"{term.name}/ratio_max"] == 1
    assert [found[f"{term.name}/clip_{side}"] for side in ("low", "high", "region")] == [0, 0, 0]


def test_figures_of_a_segment_scoped_term_are_per_segment():
    """Metrics of a segment-scoped term are per segment, without segments that have no scored
    token."""
    hidden, head, targets, segments, fields = problem()
    out = hl.head_loss(hidden, head, hl.Batch(targets, segments, **fields), hl.gspo())
    d = (out.logps - fields["old_logps"]).masked_fill(targets == -100, 0)
    means = [
        part[t != -100].mean()
        for part, t in zip(
            d.split(segments.lengths.tolist()),
            targets.split(segments.lengths.tolist()),
            strict=True,
        )
    ]
    ratios = torch.stack([m for m in means if not m.isnan()]).exp()
    # 4 of the 6 segments count: one segment is empty, one has no scored token
    assert len(ratios) == 4
    assert float(out.metrics["gspo/ratio"]) == pytest.approx(float(ratios.mean()))
    assert float(out.metrics["gspo/ratio_max"]) == pytest.approx(float(ratios.max()))
    assert out.metrics.compute()["segments"] == 6


def test_figures_of_a_restricted_term_are_of_what_it_keeps():
    hidden, head, targets, segments, fields = problem()
    keep = torch.rand(24) > 0.5
    batch = hl.Batch(targets, segments, keep=keep, **fields)
    out = hl.head_loss(hidden, head, batch, hl.reinforce().where("keep"))
    kept = keep & (targets != -100)
    assert float(out.metrics["reinforce/logps"]) == pytest.approx(float(out.logps[kept].mean()))
    assert out.metrics.compute()["tokens"] == 21


def test_no_metrics():
    hidden, head, targets, segments, fields = problem()
    out = hl.head_loss(
        hidden, head, hl.Batch(targets, segments, **fields), hl.grpo(), hl.Options(metrics=False)
    )
    assert out.metrics == {} and out.entropies is None


@pytest.mark.parametrize("scored", ["all", "some"])
@pytest.mark.parametrize("changed", ["advantages", "keep", "targets", "segments"])
def test_metrics_that_are_asked_for_later_are_those_of_the_call(changed, scored):
    """Metrics read later equal the call's metrics, or raise if inputs were overwritten."""
    hidden, weight = torch.randn(12, 4), torch.randn(9, 4)
    fields = {"advantages": torch.randn(3), "old_logps": -torch.rand(12), "keep": hidden[:, 0] > 0}
    targets = torch.arange(12) % 9
    targets = targets if scored == "all" else targets.where(targets != 4, -100)
    segments = hl.Segments.from_lengths([4, 4, 4])
    batch = hl.Batch(targets, segments, **fields)  # type: ignore[arg-type]
    objective = hl.gspo() + hl.cross_entropy().where("keep")
    out, again = (hl.head_loss(hidden, hl.Head(weight), batch, objective) for _ in range(2))
    assert out.metrics.compute() == again.metrics.compute()
    out = hl.head_loss(hidden, hl.Head(weight), batch, objective)
    {"targets": targets, "segments": segments.ids, **fields}[changed].zero_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out.metrics: the batch was changed in place since"):
            _ = out.metrics
    assert again.metrics["gspo/ratio"] and out.logps.shape == targets.shape


def test_metrics_of_inference_are_found_at_once():
    """In inference mode metrics are computed immediately, since PyTorch cannot tell later whether
    an input was changed."""
    hidden, targets = torch.randn(12, 4), torch.arange(12) % 9
    want = hl.head_loss(hidden, hl.Head(torch.ones(9, 4)), hl.Batch(targets), hl.cross_entropy())
    with torch.inference_mode():
        inside = targets.clone()
        out = hl.head_loss(hidden, hl.Head(torch.ones(9, 4)), hl.Batch(inside), hl.cross_entropy())
        inside.zero_()
    assert out.metrics.compute() == want.metrics.compute() and torch.equal(out.logps, want.logps)


def test_who_reads_no_metrics_pays_for_none():
    """Metrics that nobody reads cost nothing: a term's metrics are computed when they are first
    read, without copies of batch fields that hold many numbers per token."""
    hidden, head = torch.randn(12, 4), hl.Head(torch.randn(9, 4))
    fields = {"advantages": torch.randn(12), "old_logps": -torch.rand(12)}
    for more in ({}, {"candidate_ids": torch.arange(12).unsqueeze(1) % 9}):
        batch = hl.Batch(torch.arange(12) % 9, **fields, **more)
        out = hl.head_loss(hidden, head, batch, hl.grpo())
        with LiveTensors() as meter:
            assert "grpo/ratio" in out.metrics
        assert (meter.largest == 0) == bool(more)
