"""Losses of value, reward and classification heads, and shaped advantages, agree with float64
loops."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from losses_case import assert_same, make, reduced, value_and_gradient
from policy_papers import average, over_tokens, ratios
from torch import Tensor

import headloss as hl

LENGTHS = (3, 1, 0, 4)
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def layouts(**fields: Tensor) -> list[tuple[hl.Batch, Callable[[Tensor], Tensor]]]:
    """Return the batch in padded rows (NaN at unscored positions) and packed, each with a function
    that brings values into its layout."""
    poisoned = {
        n: t.masked_fill(~MASK, math.nan) if t.shape == MASK.shape and t.is_floating_point() else t
        for n, t in fields.items()
    }
    packed = {n: t[MASK] if t.shape[:2] == MASK.shape else t for n, t in fields.items()}
    return [
        (hl.Batch(torch.where(MASK, 0, -100), **poisoned), lambda x: x),  # type: ignore[arg-type]
        (
            hl.Batch(torch.zeros(8).long(), hl.Segments.from_lengths(LENGTHS), **packed),  # type: ignore[arg-type]
            lambda x: x[MASK] if x.shape[:2] == MASK.shape else x,
        ),
    ]


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum"])
def test_value_loss(clip: float | None, reduction: str) -> None:
    values, returns, old = normal(4, 5).requires_grad_(), normal(4, 5), normal(4, 5)
    rows = []
    for b, length in enumerate(LENGTHS):
        row = []
        for t in range(length):
            v, r, o = values[b, t], returns[b, t], old[b, t]
            error = (v - r) ** 2
            if clip is not None:
                held = abs(float((v - o).detach())) > clip
                near = o + clip * (v.detach() - o).sign() if held else v
                error = max(error, (near - r) ** 2, key=lambda x: float(x.detach()))
            row.append(error / 2)
        rows.append(row)
    tokens = [x for row in rows for x in row]
    want = {
        "token_mean": average(tokens),
        "sequence_mean": average([average(row) for row in rows]),
        "sequence_sum": sum(tokens, torch.zeros(())) / 4,
    }[reduction]
    want = value_and_gradient(want, values)
    for batch, lay in layouts(returns=returns, old_values=old):
        got = hl.value_loss(lay(values), batch, clip=clip, reduction=reduction)
        assert_same(value_and_gradient(got, values), want)


def test_value_loss_of_parts_is_that_of_the_whole() -> None:
    values, returns = normal(4, 5), normal(4, 5)
    targets = torch.where(MASK, 0, -100)
    whole = hl.value_loss(values, hl.Batch(targets, returns=returns), clip=None)
    totals = hl.Totals.of(hl.Batch(targets))
    parts = [
        hl.value_loss(values[i], hl.Batch(targets[i], returns=returns[i], totals=totals), clip=None)
        for i in (slice(0, 1), slice(1, 4))
    ]
    assert_same([sum(parts, torch.zeros(()))], [whole])


@pytest.mark.parametrize("centre", [0.0, 0.1])
@pytest.mark.parametrize("with_margin", [False, True])
def test_bradley_terry(centre: float, with_margin: bool) -> None:
    rewards, margin = normal(4).requires_grad_(), normal(4).abs()
    pairs = []
    for k in range(2):
        chosen, rejected = rewards[2 * k], rewards[2 * k + 1]
        lead = chosen - rejected - (margin[2 * k] if with_margin else 0)
        pairs.append(torch.log1p(torch.exp(-lead)) + centre * (chosen + rejected) ** 2)
    fields = {"margin": margin} if with_margin else {}
    want = value_and_gradient(average(pairs), rewards)
    for batch, _ in layouts(**fields):
        got = hl.bradley_terry(rewards, batch, centre=centre)
        assert_same(value_and_gradient(got, rewards), want)


def test_bradley_terry_at_the_last_token() -> None:
    """Bradley-Terry at the last token counts a pair with an empty answer, with loss 0."""
    values = normal(4, 5).requires_grad_()
    want = value_and_gradient(torch.log1p(torch.exp(values[1, 0] - values[0, 2])) / 2, values)
    for batch, lay in layouts():
        got = hl.bradley_terry(lay(values), batch)
        assert_same(value_and_gradient(got, values), want)


def test_classification() -> None:
    per_token, per_row = normal(4, 5, 3).requires_grad_(), normal(4, 3).requires_grad_()
    labels, row_labels = torch.randint(3, (4, 5)), torch.randint(3, (4,))
    token = [
        -per_token[b, t].log_softmax(0)[labels[b, t]]
        for b, length in enumerate(LENGTHS)
        for t in range(length)
    ]
    rows = [-per_row[b].log_softmax(0)[row_labels[b]] for b in range(4) if LENGTHS[b]]
    want = value_and_gradient(average(token), per_token)
    for batch, lay in layouts(labels=labels):
        got = hl.classification(lay(per_token), batch)
        assert_same(value_and_gradient(got, per_token), want)
    want = value_and_gradient(sum(rows, torch.zeros(())) / 4, per_row)
    for batch, _ in layouts(labels=row_labels):
        assert_same(value_and_gradient(hl.classification(per_row, batch), per_row), want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: hl.value_loss(normal(3), b), r"value_loss: values: got shape \(3,\)"),
        (lambda b: hl.value_loss(normal(4, 5), b, clip=-1), "value_loss: clip: got -1, want >= 0"),
        (lambda b: hl.value_loss(normal(4, 5), b), "returns"),
        (lambda b: hl.bradley_terry(normal(3), b), r"bradley_terry: rewards: got shape \(3,\)"),
        (lambda b: hl.bradley_terry(normal(4), b, centre=-1), "bradley_terry: centre: got -1"),
        (lambda b: hl.classification(normal(4, 3), b), "classification: batch.labels: want"),
    ],
)
def test_bad_input(call: Callable[[hl.Batch], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(hl.Batch(torch.where(MASK, 0, -100)))


@pytest.mark.parametrize("shape", [(), (4,), (4, 5), (4, 3), (4, 5, 0), (4, 5, 1, 3)], ids=str)
def test_logits_that_do_not_fit_the_labels(shape: tuple[int, ...]) -> None:
    batch = hl.Batch(torch.where(MASK, 0, -100), labels=torch.zeros(4, 5).long())
    message = f"classification: logits: got shape {shape}, want that of batch.labels, (4, 5)"
    with pytest.raises(ValueError, match=re.escape(message)):
        hl.classification(torch.zeros(shape), batch)


def test_labels_outside_the_classes() -> None:
    batch = hl.Batch(torch.where(MASK, 0, -100), labels=torch.full((4, 5), 3))
    with pytest.raises(ValueError, match=r"classification: labels: want integers in \[0, 3\)"):
        hl.classification(normal(4, 5, 3), batch)


# ---------------------------------------------------------------------- KL in the advantages


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("through", [False, True])
def test_kl_shaped(centred: bool, through: bool) -> None:
    case = make(per_token=True)

    def rows(s) -> list[Tensor]:
        kl = [torch.exp(q - n) - (q - n) - 1 for n, q in zip(s.logp, s.ref, strict=True)]
        kl = kl if through else [x.detach() for x in kl]
        mean = average(kl) if centred else 0.0
        shaped = zip(ratios(s), s.advantages, kl, strict=True)
        return [-r * (a - 0.5 * (k - mean)) for r, a, k in shaped]

    asked = {"centred": centred, "through": through}
    flags = {name: True for name, value in asked.items() if value}  # flags default to False
    term = hl.dppo(delta_low=1.0, delta_high=1.0, surrogate="ratio", ratio_max=None)
    term = hl.kl_shaped(term, beta=0.5, estimator="k3", **flags)
    got = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
    # With `through=True`, gradients also flow through shaped advantages and ratios, which the
    # reference loop does not support.
    if not through:
        assert_same(got, value_and_gradient(over_tokens(case.sequences(), rows), case.logp))
    clipped = hl.kl_shaped(
        hl.grpo(epsilon_low=0.999, epsilon_high=1e6).over("token_mean"),
        beta=0.5,
        estimator="k3",
        **flags,
    )
    got = value_and_gradient(reduced(clipped, case.stats, case.batch), case.logp)
    assert_same(got, value_and_gradient(over_tokens(case.sequences(), rows), case.logp))
    hl.check_term(clipped)


def test_kl_shaped_with_modifiers_and_errors() -> None:
    case = make(per_token=True)
    term = hl.kl_shaped(hl.grpo().corrected("sequence_mask"), beta=0.1, centred=True)
    assert term.scope == "segment" and term.name == "grpo"
    assert reduced(term, case.stats, case.batch).isfinite()
    with pytest.raises(ValueError, match="kl_shaped: estimator: got 'k9'"):
        hl.kl_shaped(hl.grpo(), beta=1.0, estimator="k9")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kl_shaped: term: got"):
        hl.kl_shaped(hl.grpo, beta=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["kl_shaped", "rlsd_shaped"])
def test_a_term_without_advantages_cannot_be_shaped(name: str) -> None:
    shaped = {"kl_shaped": hl.kl_shaped(hl.kl(), beta=0.1), "rlsd_shaped": hl.rlsd_shaped(hl.kl())}
    fields = ("advantages", "old_logps", "ref_logps", "teacher_logps")
    batch = hl.Batch(torch.arange(3), **{name: torch.zeros(3) for name in fields})
    with pytest.raises(ValueError, match=f"{name}: term: got one that reads no advantages"):
        hl.head_loss(torch.ones(3, 4), hl.Head(torch.ones(5, 4)), batch, shaped[name])


def test_kl_shaped_lets_a_term_read_as_ever() -> None:
    """Inside `kl_shaped`, a term can still read batch fields as attributes, a missing optional
    field with a default value, and the advantages by `batch.get`."""

    @hl.term
    def scaled(stats, batch):
        one = torch.ones_like(batch.old_logps)
        assert "bonus" not in batch and len(batch) == len(one)
        return -batch.get("advantages") * stats.logp * batch.get("bonus", 3 * one)

    case = make(per_token=True)
    shaped = case.fields["advantages"] - 0.5 * (case.fields["ref_logps"] - case.logp).neg().detach()
    got = value_and_gradient(
        reduced(hl.kl_shaped(scaled(), beta=0.5), case.stats, case.batch), case.logp
    )
    assert_same(got, value_and_gradient((-3 * shaped * case.logp).mean(), case.logp))


def test_staleness_weights() -> None:
    """Weights by the age of a sample are passed as a batch field, and do not change the denominator
    of the mean."""
    case = make()
    age = torch.tensor([0, 1, 2, 0, 3, 1])
    weights = 0.9**age.double()
    got = reduced(
        hl.reinforce().weighted("freshness"),
        case.stats,
        case.with_fields(freshness=weights).batch,
    )
    flat = [
        -w * a * n
        for s, w in zip(case.sequences(), weights, strict=True)
        for a, n in zip(s.advantages, s.logp, strict=True)
    ]
    assert_same([got.detach()], [average(flat).detach()])
