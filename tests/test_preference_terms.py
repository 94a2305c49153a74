"""Preference terms agree with their papers' formulas, pair by pair in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from folds import fold
from losses_case import Sequence, assert_same, make, reduced, value_and_gradient
from torch import Tensor

import headloss as hl
from headloss import losses as h
from headloss.batch.packing import PackedBatch
from headloss.batch.segments import Segments
from headloss.losses.term import Term
from headloss.losses.trial import trace

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
    """An answer without tokens has a log-ratio of 0; a pair without any tokens has loss 0 and
    counts in the mean."""
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
    with pytest.raises(ValueError, match="got 3, want a multiple of 4: a chosen one, then 3 rej"):
        h.dpo(rejected=3)(case.stats, case.batch)


@pytest.mark.parametrize(
    "term",
    [*(make_term() for make_term, _ in PAPERS.values()), h.dpo(rejected=3), h.simpo(rejected=3)],
    ids=repr,
)
def test_unscored_tokens_in_a_segment_of_their_own(term: Term) -> None:
    """With static shapes, unscored tokens in a segment of their own change nothing."""
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


def test_means_or_sums_of_any_loss() -> None:
    case = make(lengths=LENGTHS)
    assert_same(
        [h.dpo(beta=2.0, average_log_prob=True)(case.stats, case.batch)],
        [h.dpo(beta=2.0, loss_type="sigmoid_norm")(case.stats, case.batch)],
    )
    rows = case.sequences()
    sums = [total(log_ratios(s)) for s in rows]
    of_sums = [(c - r - 1 / 0.6) ** 2 for c, r in zip(sums[::2], sums[1::2], strict=True)]
    term = h.dpo(beta=0.3, loss_type="ipo", average_log_prob=False)
    want = value_and_gradient(total(of_sums) / 3, case.logp)
    assert_same(value_and_gradient(reduced(term, case.stats, case.batch), case.logp), want)
    means = [mean(s.logp) for s in rows]
    margins = [0.3 * (c - r) for c, r in zip(means[::2], means[1::2], strict=True)]
    of_means = mean([-log_sigmoid(x) for x in margins])
    term = h.cpo(beta=0.3, average_log_prob=True)
    want = value_and_gradient(of_means, case.logp)
    assert_same(value_and_gradient(reduced(term, case.stats, case.batch), case.logp), want)
    with pytest.raises(TypeError, match="dpo: average_log_prob: got 1, want True, False or None"):
        h.dpo(average_log_prob=1)  # type: ignore[arg-type]


def test_a_token_s_place_is_unknown_where_segments_run_across_ranks() -> None:
    case = make(lengths=LENGTHS)
    batch = case.batch
    batch.segments.group = object()
    with pytest.raises(ValueError, match="ld_alpha cannot tell a token's place"):
        h.dpo(ld_alpha=0.5).function(case.stats, batch)


# ---------------------------------------------------------------------- several rejected answers


def group_paper(rows: list[Sequence], how: str) -> Tensor:
    """Return the published DPO loss of one chosen and three rejected answers, by loops; rejected
    answers without tokens are ignored."""
    scores = [0.3 * total(log_ratios(s)) for s in rows]
    others = [r for r, s in zip(scores[1:], rows[1:], strict=True) if len(s)] or scores[1:]
    if how == "softmax":
        return -torch.log(scores[0].exp() / (scores[0].exp() + total([r.exp() for r in others])))
    if how == "hinge":
        return mean([(1 - (scores[0] - r)).clamp_min(0) for r in others])
    return mean([-log_sigmoid(scores[0]) - log_sigmoid(-r) for r in others])


@pytest.mark.parametrize("loss_type", ["softmax", "hinge", "bco_pair"])
def test_several_rejected_answers(loss_type: str) -> None:
    case = make(lengths=(3, 1, 2, 5, 0, 2, 0, 4, 2, 0, 0, 0, 0, 0, 0, 0))
    rows = case.sequences()
    term = h.dpo(beta=0.3, loss_type=loss_type, rejected=3)
    groups = [group_paper(rows[i : i + 4], loss_type) for i in (0, 4, 8)]
    # The mean is over four groups, one of which has no tokens and no loss.
    want = value_and_gradient(total(groups) / 4, case.logp)
    assert_same(value_and_gradient(reduced(term, case.stats, case.batch), case.logp), want)
    assert term.observe is not None
    found = term.observe(case.stats.map(Tensor.detach), case.batch)
    scores = [0.3 * float(total(log_ratios(s)).detach()) for s in rows]
    assert found["margin"].values[0] == pytest.approx(scores[0] - sum(scores[1:4]) / 3)
    assert found["rejected_rewards"].values[4] == pytest.approx((scores[5] + scores[7]) / 2)
    assert found["accuracy"].values[0] == sum(scores[0] > r for r in scores[1:4]) / 3


@pytest.mark.parametrize("name", ["dpo", "simpo", "cpo", "orpo"])
def test_one_rejected_answer_of_a_group_of_two(name: str) -> None:
    """A group with two identical rejected answers has the same loss as a pair with this rejected
    answer once."""
    factory = getattr(h, name)
    pair, group = make(lengths=(3, 2)), make(lengths=(3, 2, 2))
    again = torch.tensor([0, 1, 2, 3, 4, 3, 4])
    group.logp = pair.logp.detach()[again].requires_grad_()
    group = group.with_fields(ref_logps=pair.fields["ref_logps"][again])
    one = factory()(pair.stats, pair.batch)
    two = factory(rejected=2)(group.stats, group.batch)
    torch.testing.assert_close(one[0], two[0])


def test_groups_of_several_sizes_in_one_objective() -> None:
    objective = h.dpo(rejected=3) + h.simpo() + h.cpo(rejected=2)
    assert objective.segments_per_unit == 12
    hidden, weight = torch.randn(24, 3), torch.randn(7, 3)
    batch = hl.Batch(
        torch.arange(24) % 7, hl.Segments.from_lengths([2] * 12), ref_logps=torch.zeros(24)
    )
    out = hl.head_loss(hidden, hl.Head(weight), batch, objective)
    parts = [hl.head_loss(hidden, hl.Head(weight), batch, t).loss for _, t in objective.parts]
    torch.testing.assert_close(out.loss, sum(parts))
    with pytest.raises(ValueError, match="segments: got 8, want a multiple of 12"):
        hl.head_loss(hidden[:16], hl.Head(weight), batch_of(8), objective)


def batch_of(segments: int) -> hl.Batch:
    return hl.Batch(torch.zeros(16, dtype=torch.int64), hl.Segments.from_lengths([2] * segments))


# ---------------------------------------------------------------------- unpaired, optimal transport


def test_answers_without_pairs_on_one_token() -> None:
    """KTO agrees with a hand computation: log-ratios 0.5 and -1, reference point 0.2, beta 2,
    weights 1 and 3."""
    case = make(lengths=(1, 1))
    case.logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    case = case.with_fields(
        ref_logps=torch.tensor([-1.5, -1.0], dtype=torch.float64),
        desirable=torch.tensor([True, False]),
        reference_kl=torch.full((2,), 0.2, dtype=torch.float64),
    )
    term = h.kto(beta=2.0, undesirable_weight=3.0)
    want = (1 - 1 / (1 + math.exp(-0.6)), 3 * (1 - 1 / (1 + math.exp(-2.4))))
    assert term(case.stats, case.batch).tolist() == pytest.approx(want)


@pytest.mark.parametrize("eps", [0.0, 0.2])
@pytest.mark.parametrize("paired", [True, False])
def test_optimal_transport(paired: bool, eps: float) -> None:
    """AOT agrees with the equation in section 3 of its paper, written with sorted Python lists."""
    case = make(lengths=LENGTHS)
    chosen, rejected = case.sequences()[::2], case.sequences()[1::2]
    if paired:
        pairs = list(zip(chosen, rejected, strict=True))
        upper = [total(c.logp) - total(r.logp) for c, r in pairs]
        lower = [total(c.ref) - total(r.ref) for c, r in pairs]
    else:
        upper, lower = ([total(log_ratios(s)) for s in side] for side in (chosen, rejected))
    ordered = zip(*(sorted(side, key=Tensor.item) for side in (upper, lower)), strict=True)
    margins = [0.7 * (u - v) for u, v in ordered]
    paper = mean([-(1 - eps) * log_sigmoid(x) - eps * log_sigmoid(-x) for x in margins])
    term = h.aot(beta=0.7, label_smoothing=eps, paired=paired)
    found = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
    assert_same(found, value_and_gradient(paper, case.logp))


@pytest.mark.parametrize("paired", [True, False])
def test_optimal_transport_leaves_out_pairs_without_tokens(paired: bool) -> None:
    """AOT ignores pairs of answers without tokens; with static shapes it also ignores unscored
    tokens after the last pair."""
    whole, term = make(lengths=(3, 1, 0, 0, 2, 5, 4, 2)), h.aot(paired=paired)
    advantages = whole.fields["advantages"][:6]
    short = replace(whole.with_fields(advantages=advantages), lengths=(3, 1, 2, 5, 4, 2))
    want = reduced(term, short.stats, short.batch) * 3 / 4
    torch.testing.assert_close(reduced(term, whole.stats, whole.batch), want)
    hidden, head = torch.randn(17, 3), hl.Head(torch.randn(5, 3))
    targets = torch.where(torch.arange(17) % 4 == 1, -100, 2)
    batch = hl.Batch(targets, whole.batch.segments, ref_logps=whole.fields["ref_logps"].float())
    plain = hl.head_loss(hidden, head, batch, term).loss
    static = hl.head_loss(hidden, head, batch, term, hl.Options(static=True)).loss
    torch.testing.assert_close(static, plain)
    for place in range(17):  # a NaN at each token in turn makes the loss NaN
        ref_logps = whole.fields["ref_logps"].clone()
        ref_logps[place] = torch.nan
        case = whole.with_fields(ref_logps=ref_logps)
        assert reduced(term, case.stats, case.batch).isnan()


@pytest.mark.parametrize(
    "term",
    [
        *(h.dpo(loss_type=t) for t in ("hinge", "nca_pair", "sppo_hard", "apo_down", "discopop")),
        h.dpo(loss_type="exo_pair", label_smoothing=0.1, rejected=3),
        h.dpo(f_divergence_type="js_divergence", ld_alpha=0.5),
        *(h.simpo(alpha=0.5), h.cpo(loss_type="ipo"), h.orpo(), h.orpo(rejected=4)),
        *(h.kto(), h.kto(loss_type="apo_zero_unpaired"), h.aot(), h.aot(paired=False), h.a2po()),
    ],
    ids=repr,
)
def test_checked(term: Term) -> None:
    assert hl.check_term(term).gradients == ("logp",)


@pytest.mark.parametrize(
    ("make_term", "message"),
    [
        (lambda: h.dpo(loss_type="kto"), "dpo: loss_type: got 'kto', want one of 'sigmoid'"),
        (lambda: h.dpo(loss_type="robust", label_smoothing=0.5), "want 0 <= label_smoothing < 0"),
        (lambda: h.dpo(loss_type="robust", label_smoothing=-0.1), "want 0 <= label_smoothing < 0"),
        (lambda: h.dpo(loss_type="exo_pair"), "dpo: label_smoothing: got 0.0, want 0 < label"),
        (lambda: h.dpo(loss_type="bco_pair", label_smoothing=0.1), "'bco_pair' has no smoothing"),
        (lambda: h.dpo(loss_type="apo_zero", f_divergence_type="forward_kl"), "f_divergence_type"),
        (lambda: h.dpo(f_divergence_type="kl"), "dpo: f_divergence_type: got 'kl'"),
        (lambda: h.dpo(ld_alpha=1.5), "dpo: ld_alpha: got 1.5, want 0 <= ld_alpha <= 1"),
        (lambda: h.dpo(ld_alpha=0.5, rejected=2), "dpo: ld_alpha: got 0.5 with rejected=2"),
        (lambda: h.simpo(rejected=0), "simpo: rejected: got 0, want an integer >= 1"),
        (lambda: h.cpo(loss_type="robust"), "cpo: loss_type: got 'robust'"),
        (lambda: h.a2po(beta=0), "a2po: beta: got 0, want > 0"),
        (lambda: h.orpo(beta=0), "orpo: beta: got 0, want > 0"),
        (lambda: h.kto(desirable_weight=-1), "kto: desirable_weight: got -1, want >= 0"),
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


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "held", "frozen"])
def test_odds_of_nearly_certain_answers(schedule: str) -> None:
    """ORPO's loss is correct for chosen and rejected answers with probabilities p near 1, for 1 - p
    down to 4e-27."""
    gaps = torch.tensor([9.0, 20, 1, 30, 40, 15, 60, 62, 0.5, 58])
    hidden = (gaps[:, None] * torch.eye(6)[0]).requires_grad_()  # hidden states equal logits
    weight = torch.eye(6, requires_grad=schedule != "frozen")
    lengths = torch.tensor([1, 2, 2, 1, 1, 1, 1, 1])
    batch = hl.Batch(torch.zeros(10).long(), segments=Segments.from_lengths(lengths))
    options = hl.Options(backend="reference", schedule=schedule)
    out = hl.head_loss(hidden, hl.Head(weight), batch, h.orpo(beta=0.3), options)
    out.loss.backward()
    z = hidden.detach().double().requires_grad_()
    logp = -(z[:, 1:] - z[:, :1]).exp().sum(1).log1p()
    means = torch.stack([part.mean() for part in logp.split(lengths.tolist())])
    odds = means - (-means.expm1()).log()
    want = -0.3 * torch.nn.functional.logsigmoid(odds[::2] - odds[1::2]).mean()
    want.backward()
    assert hidden.grad is not None and z.grad is not None
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(hidden.grad.double(), z.grad, rtol=2e-5, atol=1e-12)
    # Tokens 7 and 9 belong to rejected answers; their 1 - p is only 4e-27 and 3e-25, and their
    # gradient must not vanish.
    assert z.grad[[7, 9]].norm(dim=1).min() > 0.05
