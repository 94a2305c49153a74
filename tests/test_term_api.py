"""User-defined terms: writing, adding, weighting and restricting terms work as documented."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from own_terms import centred_logps, sequence_loss, soft_policy_gradient, standardised_entropy
from torch import Tensor

import headloss as hl
from headloss.statistics.metrics import Observed
from headloss.testing import plain

T, H, V, S = 12, 6, 19, 4
LENGTHS = [4, 1, 5, 2]


def problem(dtype=torch.float64, **fields):
    """Return hidden, head and batch, in float64 for tight comparisons."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden, weight = draw(T, H).requires_grad_(), draw(V, H).requires_grad_()
    given = {
        "advantages": draw(S),
        "old_logps": -draw(T).abs() - 1,
        "ref_logps": -draw(T).abs() - 1,
        **fields,
    }
    targets = torch.randint(V, (T,), generator=generator)
    batch = hl.Batch(targets, hl.Segments.from_lengths(LENGTHS), **given)
    return hidden, hl.Head(weight), batch


def run(objective, dtype=torch.float64, **fields):
    hidden, head, batch = problem(dtype, **fields)
    return hl.head_loss(hidden, head, batch, objective)


def agrees_with_plain(objective, **fields) -> None:
    """Check value and gradients against autograd through materialised logits."""
    hidden, head, batch = problem(**fields)
    out = hl.head_loss(hidden, head, batch, objective)
    want = plain(hidden, head, batch, objective)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want.loss)
    torch.testing.assert_close(hidden.grad, want.gradients["hidden"])
    torch.testing.assert_close(head.weight.grad, want.gradients["weight"])


def per_segment(values: Tensor, reduce) -> Tensor:
    return torch.stack([reduce(part) for part in values.split(LENGTHS)])


# ---------------------------------------------------------------------- arithmetic


def test_the_loss_is_the_sum_of_coefficients_times_terms():
    objective = 2 * hl.grpo() + hl.z_loss() / 8 - 0.5 * hl.entropy() + (-hl.kl()) - hl.kl() * 3
    out = run(objective)
    coefficients = {"grpo": 2, "z_loss": 0.125, "entropy": -0.5, "kl": -1, "kl_2": -3}
    assert out.terms.keys() == coefficients.keys()
    total = sum(c * out.terms[name] for name, c in coefficients.items())
    torch.testing.assert_close(out.loss.detach(), total)
    assert not any(t.requires_grad for t in out.terms.values())
    agrees_with_plain(objective)


@pytest.mark.parametrize(
    ("objective", "parts"),
    [
        (hl.kl() + hl.entropy(), [1, 1]),
        (hl.kl() - hl.entropy(), [1, -1]),
        (sum([hl.kl(), hl.entropy(), hl.z_loss()]), [1, 1, 1]),
        (2 * (hl.kl() - 3 * hl.entropy()), [2, -6]),
        (-(hl.kl() - hl.entropy()) / 2, [-0.5, 0.5]),
        ((hl.kl() + hl.entropy()) - (hl.z_loss() - hl.kl()), [1, 1, -1, 1]),
        (True * hl.kl(), [1]),
    ],
)
def test_arithmetic(objective, parts):
    assert [c for c, _ in objective.parts] == parts


def test_repr():
    objective = hl.gspo(epsilon_low=0.1) - 1e-3 * hl.entropy()
    assert repr(objective) == (
        "1 * gspo(epsilon_low=0.1, epsilon_high=0.0004) + -0.001 * entropy()"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: hl.kl() + 1,
        lambda: 1 + hl.kl(),
        lambda: hl.kl() - 1,
        lambda: hl.kl() * hl.kl(),
        lambda: hl.kl() * "2",
        lambda: hl.kl() * torch.ones(()),
        lambda: 1 / hl.kl(),
    ],
)
def test_wrong_arithmetic(wrong):
    with pytest.raises((TypeError, ValueError)):
        wrong()


def test_repeated_terms_are_numbered_in_order():
    out = run(hl.kl(estimator="k1") + hl.entropy() + hl.kl(estimator="k2") + hl.kl(estimator="k3"))
    assert list(out.terms) == ["kl", "entropy", "kl_2", "kl_3"]
    d = problem()[2].ref_logps - out.logps
    for name, value in {"kl": -d, "kl_2": d**2 / 2, "kl_3": d.exp() - d - 1}.items():
        torch.testing.assert_close(out.terms[name], value.mean())
    assert {"kl/k1", "kl_2/k1", "kl_3/k3"} <= out.metrics.keys()


def test_one_term_object_may_stand_twice():
    term = hl.reinforce()
    out = run(term + 2 * term)
    torch.testing.assert_close(out.loss.detach(), 3 * out.terms["reinforce"])


# ---------------------------------------------------------------------- reductions


@pytest.mark.parametrize(
    ("reduction", "weigh"),
    [
        ("token_mean", lambda loss: loss.mean()),
        ("sequence_mean", lambda loss: per_segment(loss, torch.mean).mean()),
        ("sequence_sum", lambda loss: per_segment(loss, torch.sum).mean()),
        (hl.token_mean, lambda loss: loss.mean()),
        (hl.fixed_length(7), lambda loss: loss.sum() / (S * 7)),
        (hl.fixed_length(0.5), lambda loss: loss.sum() / (S * 0.5)),
    ],
)
def test_over(reduction, weigh):
    term = hl.cross_entropy().over(reduction)
    out = run(term)
    torch.testing.assert_close(out.loss.detach(), weigh(-out.logps))
    agrees_with_plain(term)


def test_a_reduction_of_ones_own():
    last = hl.Reduction("halves", lambda lengths, tokens, segments: lengths / (2 * tokens))
    out = run(hl.cross_entropy().over(last))
    lengths = torch.tensor(LENGTHS).double().repeat_interleave(torch.tensor(LENGTHS))
    torch.testing.assert_close(out.loss.detach(), -(lengths * out.logps).sum() / (2 * T))


def test_a_reduction_that_returns_the_wrong_shape():
    wrong = hl.Reduction("wrong", lambda lengths, tokens, segments: 1 / tokens)
    with pytest.raises(ValueError, match=r"reduction wrong: returned shape \(\), .*\(12,\)"):
        run(hl.cross_entropy().over(wrong))


@pytest.mark.parametrize(
    ("weights", "kind", "match"),
    [
        (lambda n: None, TypeError, "returned None, want one weight"),
        (lambda n: 0.5, TypeError, "returned 0.5, want one weight"),
        (lambda n: n * 1j, ValueError, "torch.complex128"),
        (lambda n: torch.ones_like(n, requires_grad=True) * 2, ValueError, "gradient True"),
    ],
    ids=["nothing", "number", "complex", "learned"],
)
def test_a_reduction_that_returns_no_weights(weights, kind, match):
    wrong = hl.Reduction("wrong", lambda lengths, tokens, segments: weights(lengths))
    with pytest.raises(kind, match=f"reduction wrong: .*{match}"):
        run(hl.cross_entropy().over(wrong))


def test_a_statistic_that_was_not_read_of_the_sample():
    @hl.term
    def by_size(stats, batch):
        return -stats.logp if len(batch) < 3 else 2 * stats.entropy

    with pytest.raises(TypeError) as raised:
        hl.head_loss(*problem(), by_size(), hl.Options(metrics=False))
    (note,) = raised.value.__notes__
    assert note == "term by_size: was given ['logp'], as it read of a small sample"


def test_an_unknown_reduction():
    with pytest.raises(ValueError, match="reduction: got 'mean', want one of .*token_mean"):
        hl.cross_entropy().over("mean")


def test_weighted():
    """`weighted` keeps the denominator."""
    per_token, per_seg = torch.rand(T).double(), torch.rand(S).double()
    out = run(hl.cross_entropy().weighted("w"), w=per_token)
    torch.testing.assert_close(out.loss.detach(), -(per_token * out.logps).mean())
    out = run(hl.cross_entropy().weighted("w").weighted("u"), w=per_token, u=per_seg)
    both = per_token * per_seg.repeat_interleave(torch.tensor(LENGTHS))
    torch.testing.assert_close(out.loss.detach(), -(both * out.logps).mean())
    agrees_with_plain(hl.gspo().weighted("u"), u=per_seg)


def test_where():
    """`where` counts only kept tokens in the denominator."""
    keep = torch.tensor([True, False] * 6)
    out = run(hl.cross_entropy().where("keep"), keep=keep)
    torch.testing.assert_close(out.loss.detach(), -out.logps[keep].mean())
    # `sequence_mean` with `where("keep")` averages the kept tokens of each sequence. Every sequence
    # has a token that `keep` selects, also the second sequence, which has a single token.
    out = run(hl.cross_entropy().over("sequence_mean").where("keep"), keep=keep)
    means = [
        -loss[kept].mean()
        for loss, kept in zip(out.logps.split(LENGTHS), keep.split(LENGTHS), strict=True)
    ]
    torch.testing.assert_close(out.loss.detach(), torch.stack(means).mean())
    agrees_with_plain(hl.grpo().where("keep") + hl.kl(), keep=keep)


def test_where_by_segment():
    keep = torch.tensor([True, False, True, False])
    tokens = keep.repeat_interleave(torch.tensor(LENGTHS))
    out = run(hl.cross_entropy().where("keep"), keep=keep)
    torch.testing.assert_close(out.loss.detach(), -out.logps[tokens].mean())
    out = run(hl.cross_entropy().over("sequence_mean").where("keep"), keep=keep)
    means = per_segment(-out.logps, torch.mean)[keep]
    torch.testing.assert_close(out.loss.detach(), means.mean())


def test_poison_where_a_term_is_restricted():
    """At tokens excluded by `where`, a term's fields may have any values, even NaN."""
    keep = torch.tensor([True, False] * 6)
    old = -torch.rand(T).double()
    clean = run(hl.grpo().where("keep"), keep=keep, old_logps=old)
    poisoned = torch.where(keep, old, torch.nan)
    out = run(hl.grpo().where("keep"), keep=keep, old_logps=poisoned)
    torch.testing.assert_close(out.loss, clean.loss)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: hl.kl().where("a").where("b"), ValueError, "kl is already restricted to 'a'"),
        (lambda: hl.kl().where(torch.ones(3)), TypeError, "field: got Tensor, want the name"),
        (lambda: hl.kl().weighted(2.0), TypeError, "field: got float, want the name"),
        (lambda: run(hl.kl().where("keep")), ValueError, "term kl: .*batch.keep.* not given"),
        (lambda: run(hl.kl().weighted("w")), ValueError, "term kl: reads batch.w, .* not given"),
        (
            lambda: run(hl.kl().where("keep"), keep=torch.ones(T)),
            TypeError,
            "keep: want a boolean tensor, as term kl is restricted",
        ),
        (
            lambda: run(
                hl.kl().where("keep"),
                keep=torch.ones(T) > 0,
                totals=hl.Totals(tokens=5, segments=1),
            ),
            ValueError,
            "totals: have no count for field 'keep' that term kl",
        ),
    ],
)
def test_wrong_restrictions(make, error, match):
    with pytest.raises(error, match=match):
        make()


# ---------------------------------------------------------------------- user-defined terms


@pytest.mark.parametrize(
    "factory", [soft_policy_gradient, sequence_loss, centred_logps, standardised_entropy]
)
def test_ones_own_term_at_every_scope(factory):
    agrees_with_plain(factory())
    agrees_with_plain(0.3 * factory() + hl.entropy())
    report = hl.check_term(factory)
    assert report.gradients


def test_values_of_ones_own_terms():
    hidden, head, batch = problem()
    objective = soft_policy_gradient(tau=2.0) + sequence_loss() + centred_logps()
    out = hl.head_loss(hidden, head, batch, objective)
    assert list(out.terms) == ["soft_policy_gradient", "sequence_loss", "centred"]
    d = out.logps - batch.old_logps
    advantages = batch.advantages.repeat_interleave(torch.tensor(LENGTHS))
    soft = -torch.sigmoid(2 * (d.exp() - 1)) * advantages
    torch.testing.assert_close(out.terms["soft_policy_gradient"], soft.mean())
    sequences = -per_segment(d, torch.mean).exp() * batch.advantages
    torch.testing.assert_close(out.terms["sequence_loss"], sequences.mean())
    centred = [(x - x.mean()).square().sum() for x in out.logps.split(LENGTHS)]
    torch.testing.assert_close(out.terms["centred"], torch.stack(centred).mean())


def test_a_terms_own_metrics():
    out = run(standardised_entropy())
    assert float(out.metrics["standardised_entropy/top"]) == pytest.approx(
        float(out.entropies.mean())
    )


def test_a_factory_shows_its_options():
    import inspect

    signature = inspect.signature(soft_policy_gradient)
    assert list(signature.parameters) == ["tau"]
    assert repr(soft_policy_gradient(tau=0.5)) == "soft_policy_gradient(tau=0.5)"


@pytest.mark.parametrize("make", [soft_policy_gradient, hl.grpo, hl.z_loss])
def test_a_wrong_option_is_named(make):
    with pytest.raises(TypeError, match="sharpness"):
        make(sharpness=2.0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scope": "document"}, "scope: got 'document', want one of"),
        ({"per": "row"}, "per: got 'row', want"),
        ({"per": "segment"}, 'scope: got "token" with per="segment"'),
        ({"reduction": "mean"}, "reduction: got 'mean'"),
    ],
)
def test_wrong_declarations(options, match):
    with pytest.raises(ValueError, match=match):
        hl.term(**options)(lambda stats, batch: stats.logp)()


@pytest.mark.parametrize(
    ("declared", "function", "error", "match"),
    [
        (
            {"scope": "segment", "per": "segment"},
            lambda stats, batch: stats.logp[:1],
            ValueError,
            r"term mine: returned shape \(1,\), want \(2,\) .*per segment",
        ),
        (
            {"scope": "segment"},
            lambda stats, batch: batch.segments.mean(stats.logp)[:1],
            ValueError,
            r"term mine: returned shape \(1,\), want",
        ),
        ({}, lambda stats, batch: stats.logp.sum(), ValueError, r"term mine: returned shape \(\)"),
        ({}, lambda stats, batch: 1.0, TypeError, "term mine: returned float, want a tensor"),
        ({}, lambda stats, batch: None, TypeError, "term mine: returned NoneType"),
    ],
)
def test_a_wrong_return_value(declared, function, error, match):
    with pytest.raises(error, match=match):
        run(hl.term(name="mine", **declared)(function)())


@pytest.mark.parametrize(
    ("objective", "field"),
    [
        (hl.grpo(), "advantages|old_logps"),
        (hl.kl(), "ref_logps"),
        (hl.dpo(), "ref_logps"),
        (hl.kl(bias_corrected=True), "old_logps|ref_logps"),
        (hl.reinforce().corrected("token_mask"), "advantages|sampling_logps"),
        (soft_policy_gradient(), "old_logps"),
    ],
)
def test_a_missing_field_is_named_with_its_term(objective, field):
    hidden, head, _ = problem()
    batch = hl.Batch(torch.randint(V, (T,)), hl.Segments.from_lengths(LENGTHS))
    name = next(iter(objective._objective().named()))[0]
    with pytest.raises(ValueError, match=rf"term {name}: .*batch\.({field}),"):
        hl.head_loss(hidden, head, batch, hl.entropy() + objective)


def test_a_field_that_is_read_with_get_is_optional():

    @hl.term
    def maybe(stats, batch):
        mask = batch.get("mask")
        return stats.logp if mask is None else stats.logp * mask

    hidden, head, batch = problem()
    bare = hl.Batch(batch.targets, batch.segments)
    out = hl.head_loss(hidden, head, bare, maybe())
    torch.testing.assert_close(out.loss.detach(), out.logps.mean())
    masked = hl.Batch(batch.targets, batch.segments, mask=torch.arange(T) % 2)
    out = hl.head_loss(hidden, head, masked, maybe())
    torch.testing.assert_close(out.loss.detach(), (out.logps * (torch.arange(T) % 2)).mean())


def test_a_field_that_requires_a_gradient():
    with pytest.raises(ValueError, match="old_logps: requires a gradient, .*detach"):
        hl.Batch(torch.zeros(3, dtype=torch.long), old_logps=torch.zeros(3, requires_grad=True))


def test_a_parameter_in_a_closure():
    """A parameter in a term's closure is refused, since its gradient would be lost silently."""
    scale = torch.nn.Parameter(torch.ones(()))

    @hl.term
    def scaled(stats, batch):
        return scale * stats.logp

    with pytest.raises(ValueError, match="term scaled: .* requires a gradient .*detach"):
        run(scaled())

    @hl.term
    def constant(stats, batch):
        return scale.detach() * stats.logp

    agrees_with_plain(constant())


def test_a_loss_that_is_a_parameter():
    value = torch.nn.Parameter(torch.ones(2))

    @hl.term
    def leaf(stats, batch):
        return value

    with pytest.raises(ValueError, match="term leaf: .* requires a gradient"):
        run(leaf())


@pytest.mark.parametrize("method", ["sum", "mean"])
def test_a_token_scoped_term_may_not_sum_over_segments(method):
    @hl.term
    def sneaky(stats, batch):
        return batch.segments.expand(getattr(batch.segments, method)(stats.logp))

    with pytest.raises(ValueError, match='term sneaky: sums over segments.*scope="segment"'):
        run(sneaky())


def test_detach_is_the_stop_gradient():
    @hl.term
    def frozen_weight(stats, batch):
        return stats.logp.exp().detach() * stats.logp

    hidden, head, batch = problem()
    out = hl.head_loss(hidden, head, batch, frozen_weight())
    out.loss.backward()
    leaf = hidden.detach().requires_grad_()
    logp = head.logits(leaf).log_softmax(-1).gather(1, batch.targets.unsqueeze(1)).squeeze(1)
    (logp.exp().detach() * logp).mean().backward()
    torch.testing.assert_close(hidden.grad, leaf.grad)


def test_a_term_that_is_not_called():
    with pytest.raises(TypeError, match=r"objective: got .*want terms.*hl.grpo\(\), not hl.grpo"):
        run(hl.grpo)


def test_an_empty_objective():
    from headloss.losses.term import Objective

    with pytest.raises(ValueError, match="objective: got no terms"):
        run(Objective(()))


def test_integer_and_wide_fields_reach_terms():
    """A term gets fields [T, K] row by row, and integer fields without a cast."""

    @hl.term
    def reads_both(stats, batch):
        assert batch.levels.dtype == torch.int64
        return stats.logp * batch.choices.sum(-1) * batch.levels

    levels, choices = torch.randint(5, (T,)), torch.rand(T, 3).double()
    out = run(reads_both(), levels=levels, choices=choices)
    torch.testing.assert_close(out.loss.detach(), (out.logps * choices.sum(-1) * levels).mean())


def test_a_field_may_not_take_the_name_of_the_batch():
    with pytest.raises(ValueError, match="slice: is a name of the batch itself"):
        hl.Batch(torch.zeros(3, dtype=torch.long), slice=torch.zeros(3))


# ---------------------------------------------------------------------- CURRENT


@pytest.mark.parametrize(
    "objective", [hl.grpo(), hl.gspo(), hl.cispo(), hl.kl(bias_corrected=True)]
)
def test_current_stands_for_this_calls_own_log_probs(objective):
    hidden, head, batch = problem()
    with torch.no_grad():
        old = hl.head_loss(hidden, head, batch, hl.entropy()).logps
    fields = {"advantages": batch.advantages, "ref_logps": batch.ref_logps}
    found = []
    for given in (hl.CURRENT, old):
        leaf = hidden.detach().requires_grad_()
        current = hl.Batch(batch.targets, batch.segments, old_logps=given, **fields)
        for options in (hl.Options(), hl.Options(schedule="recompute", chunk_tokens=3)):
            out = hl.head_loss(leaf, head, current, objective, options)
            (gradient,) = torch.autograd.grad(out.loss, leaf)
            found.append((out.loss.detach(), gradient))
    for loss, gradient in found[1:]:
        torch.testing.assert_close(loss, found[0][0])
        torch.testing.assert_close(gradient, found[0][1])
    assert found[0][1].abs().sum() > 0


def test_the_first_step_of_a_policy_is_reinforce():
    """In the first step of a policy, at ratio 1, the clipped surrogate has the gradient of -A
    logp."""
    hidden, head, batch = problem()
    current = hl.Batch(
        batch.targets, batch.segments, advantages=batch.advantages, old_logps=hl.CURRENT
    )
    gradients = []
    for term in (hl.dapo(), hl.reinforce()):
        out = hl.head_loss(hidden, head, current, term)
        gradients.append(torch.autograd.grad(out.loss, hidden)[0])
    torch.testing.assert_close(*gradients)
    assert float(hl.head_loss(hidden, head, current, hl.dapo()).metrics["dapo/ratio"]) == 1


def test_current_is_for_old_logps_alone():
    assert repr(hl.CURRENT) == "headloss.CURRENT"
    with pytest.raises(ValueError, match="ref_logps: got headloss.CURRENT, want a tensor"):
        hl.Batch(torch.zeros(3, dtype=torch.long), ref_logps=hl.CURRENT)


IMMUTABLE = [
    *(hl.grpo(), hl.grpo() + hl.kl(), hl.grpo().off_policy_masked(0.3).modifiers[0]),
    *(hl.token_mean, hl.Options(), hl.Head(torch.zeros(3, 2)), Observed(torch.zeros(1))),
]


@pytest.mark.parametrize("one", IMMUTABLE, ids=lambda one: type(one).__name__)
def test_what_a_call_is_made_of_cannot_be_changed(one):
    """Arguments of a call are immutable, since cached plans and the cached inputs of terms depend
    on their values."""
    for field in dataclasses.fields(one):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, field.name, None)
