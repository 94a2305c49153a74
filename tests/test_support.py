"""A softmax over the ids that a sampler kept agrees with float64 masked logits."""

from __future__ import annotations

import math

import matrix
import pytest
import support_cases as cases
import torch

import headloss as hl
from headloss.testing import plain, trained_looking

SCHEDULES = {
    "one_pass": hl.Options(),
    "small_chunks": hl.Options(chunk_tokens=7),
    "recompute": hl.Options(schedule="recompute"),
    "slabs": hl.Options(schedule="recompute", chunk_tokens=2),
    "upstream": hl.Options(upstream=1.75),
    "held": hl.Options(schedule="held"),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KINDS = ("padded", "flat", "mixed", "mixed flat")
HEADS = ("plain", "bias", "lora", "capped", "temperature_per_token", "everything")


def rows():
    """Return rows that cover each pair of values of two axes."""
    axes = {"kind": KINDS, "head": HEADS, "schedule": tuple(SCHEDULES), "dtype": DTYPES}
    return matrix.pairwise(axes)


@pytest.mark.parametrize(("kind", "head", "schedule", "dtype"), rows())
def test_within_budget(kind, head, schedule, dtype):
    inputs = cases.inputs(kind, head, dtype)
    out = matrix.check(inputs, SCHEDULES[schedule], upstream=1.75)
    assert out.plan.restricted == (13 if "mixed" in kind else 21)


@pytest.mark.parametrize(("kind", "head", "schedule", "dtype"), rows()[::2])
def test_candidates_within_budget(kind, head, schedule, dtype):
    """Candidates have log-probs over the `support_ids`; candidates outside of them have -inf and no
    gradient."""
    inputs = cases.inputs(kind, head, dtype, beside=True)
    matrix.check(inputs, SCHEDULES[schedule], upstream=1.75)


def test_candidates_that_are_the_whole_support():
    """If the candidates are all `support_ids`, the log-probability outside of the candidates is
    -inf and has no gradient."""
    seen = {}

    @hl.term
    def rest(stats, batch):
        seen["tail"], seen["logps"] = stats.candidate_tail, stats.candidate_logps
        return stats.logp + 0.1 * torch.where(stats.candidate_tail > -9, stats.candidate_tail, 0)

    hidden, weight, targets = trained_looking(3, 8, 20)
    ids = torch.stack([targets, (targets + 3) % 20], 1)
    batch = hl.Batch(targets, support_ids=ids, candidate_ids=ids.flip(1))
    out = hl.head_loss(hidden.requires_grad_(), hl.Head(weight), batch, rest())
    out.loss.backward()
    assert (seen["tail"] == -math.inf).all() and hidden.grad.isfinite().all()
    torch.testing.assert_close(seen["logps"].exp().sum(1), torch.ones(3))
    torch.testing.assert_close(seen["logps"][:, 1], out.logps)


@pytest.mark.parametrize("kind", ["padded", "mixed"])
def test_a_frozen_head(kind):
    inputs = cases.inputs(kind, train=False, terms=hl.grpo())
    out = matrix.check(inputs, hl.Options(schedule="frozen", chunk_tokens=8))
    assert out.plan.schedule == "frozen"


def test_static_shapes():
    inputs = cases.inputs("padded", "everything")
    for schedule in ("one_pass", "recompute"):
        matrix.check(inputs, hl.Options(static=True, schedule=schedule))


@pytest.mark.parametrize("kind", ["padded", "mixed flat"])
@pytest.mark.parametrize("schedule", ["held", "recompute"])
def test_a_loss_elsewhere(kind, schedule):
    """`head_stats` and `head_function` restrict the softmax to each token's `support_ids`."""
    terms = hl.cross_entropy() - 0.3 * hl.entropy() + 0.1 * hl.z_loss()
    inputs = cases.inputs(kind, "everything", terms=terms)
    oracle = inputs.plain()
    options, tokens = hl.Options(schedule=schedule), cases.TOKENS - len(cases.UNSCORED)
    call = (inputs.hidden, inputs.head, inputs.batch)
    logp, lse, entropy = hl.head_stats(*call, options)
    loss = (-logp - 0.3 * entropy + 0.1 * lse.square()).sum() / tokens
    found = torch.autograd.grad(loss, list(inputs.leaves().values()))
    wanted = (oracle.loss, *oracle.gradients.values())
    for gradient, want in zip((loss, *found), wanted, strict=True):
        matrix.within("head_stats", gradient, want, want)
    value = hl.head_function(*call, lambda logps, _: -logps.sum(), separable="token")
    assert float(value.detach()) == pytest.approx(-float(oracle.logps.sum()), rel=1e-6)


def test_main_grad():
    inputs, options = cases.inputs("mixed"), {}
    for name, schedule in (("one_pass", "one_pass"), ("recompute", "recompute")):
        total = torch.full_like(inputs.head.weight, 2.0, dtype=torch.float32)
        options = hl.Options(schedule=schedule, chunk_tokens=9, main_grad=total)
        out = hl.head_loss(inputs.hidden, inputs.head, inputs.batch, inputs.objective, options)
        out.loss.backward()
        want = 2 + inputs.plain().gradients["weight"]
        torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-5, msg=name)
        assert inputs.head.weight.grad is None
        inputs.hidden.grad = None


def test_a_support_of_the_whole_vocabulary_changes_nothing():
    inputs = cases.inputs("padded")
    everything = torch.arange(cases.VOCABULARY).expand(cases.TOKENS, -1)
    values = []
    for ids in (everything, None):
        batch = inputs.batch.with_fields(support_ids=ids)
        out = hl.head_loss(inputs.hidden, inputs.head, batch, inputs.objective)
        values.append((out.loss, *torch.autograd.grad(out.loss, list(inputs.leaves().values()))))
        assert (ids is None) == (out.plan.restricted == 0)
    for mine, theirs in zip(*values, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)


def test_one_column_has_probability_one():
    hidden, weight, targets = trained_looking(6, 8, 20)
    batch = hl.Batch(targets, support_ids=targets.unsqueeze(1))
    out = hl.head_loss(
        hidden.requires_grad_(), hl.Head(weight), batch, hl.cross_entropy() - hl.entropy()
    )
    out.loss.backward()
    assert not out.logps.any() and not out.entropies.any() and not hidden.grad.any()


def test_nothing_scored_and_nobody_restricted():
    inputs = cases.inputs("padded")
    none = torch.full((cases.TOKENS, 3), -1)
    flat = torch.zeros(0, dtype=torch.int64), torch.zeros(cases.TOKENS + 1, dtype=torch.int64)
    for ids in (none, flat):
        free = inputs.batch.with_fields(support_ids=ids)
        plan = hl.plan(inputs.hidden, inputs.head, free, inputs.objective)
        assert plan.restricted == 0 and "support" not in plan.bytes
    batch = hl.Batch(torch.full((4,), hl.batch.batch.IGNORE), support_ids=none[:4])
    out = hl.head_loss(inputs.hidden[:4], inputs.head, batch, hl.cross_entropy())
    gradients = torch.autograd.grad(out.loss, list(inputs.leaves().values()))
    assert out.loss == 0 and not any(g.any() for g in gradients)


def test_ratio_is_one_when_the_support_is_given():
    """PPO's probability ratio to a top-k sampler of the same policy is 1 if `support_ids` holds the
    ids that the sampler kept.

    Without `support_ids`, PPO's ratio to a top-k sampler is the total probability of the ids that
    the sampler kept.
    """
    hidden, weight, _ = trained_looking(12, 8, 50, torch.float64)
    z = hl.Head(weight, temperature=0.8).logits(hidden)
    kept = z.topk(5).indices
    inside = torch.full_like(z, -math.inf).scatter(1, kept, z.gather(1, kept)).log_softmax(1)
    targets = inside.exp().multinomial(1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    sampled = inside.gather(1, targets.unsqueeze(1)).squeeze(1)
    head = hl.Head(weight, temperature=0.8)
    for ids in (kept, None):
        batch = hl.Batch(targets, advantages=torch.ones(12), old_logps=sampled, support_ids=ids)
        ratio = hl.head_loss(hidden, head, batch, hl.ppo()).metrics.compute()["ppo/ratio"]
        mass = z.log_softmax(1).exp().gather(1, kept).sum(1)
        want = 1.0 if ids is not None else float(mass.mean())
        assert ratio == pytest.approx(want, rel=1e-12)
    assert want < 0.99


def test_rows_without_a_gradient_are_not_read():
    inputs = cases.inputs("mixed", terms=hl.grpo())
    advantages = inputs.batch.advantages.clone()
    advantages[2] = 0
    batch = inputs.batch.with_fields(advantages=advantages)
    for options in (hl.Options(), hl.Options(schedule="recompute", chunk_tokens=3)):
        out = hl.head_loss(inputs.hidden, inputs.head, batch, inputs.objective, options)
        found = torch.autograd.grad(out.loss, list(inputs.leaves().values()))
        oracle = plain(inputs.hidden, inputs.head, batch, inputs.objective)
        for gradient, want in zip(found, oracle.gradients.values(), strict=True):
            torch.testing.assert_close(gradient.double(), want, rtol=1e-5, atol=1e-6)
        assert not found[0][6:13].any()


@pytest.mark.parametrize("options", [{}, {"schedule": "recompute"}, {"static": True}])
def test_poison_where_nothing_is_scored(options):
    inputs = cases.inputs("padded")
    hidden = inputs.hidden.detach().clone()
    hidden[list(cases.UNSCORED)] = math.nan
    hidden.requires_grad_()
    found = []
    for x in (hidden, inputs.hidden):
        out = hl.head_loss(x, inputs.head, inputs.batch, inputs.objective, hl.Options(**options))
        found.append((out.loss, *torch.autograd.grad(out.loss, (x, inputs.head.weight))))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert not found[0][1][list(cases.UNSCORED)].any()


@pytest.mark.parametrize("kind", ["padded", "flat"])
def test_ids_made_in_inference_mode_and_ids_that_change(kind):
    """`support_ids` made in inference mode are accepted; ids changed before the backward pass
    raise, since `recompute` reads them again."""
    targets = torch.tensor([3, 0, 2])
    with torch.inference_mode():
        ids = torch.tensor(IDS).clone()
        flat = ids.reshape(-1)[[0, 1, 4, 6]], torch.tensor([0, 2, 3, 4])
        given = ids if kind == "padded" else flat
    hidden, head = torch.randn(3, 4, requires_grad=True), hl.Head(torch.randn(8, 4))
    options = hl.Options(schedule="recompute")
    call = (head, hl.Batch(targets, support_ids=given), hl.cross_entropy(), options)
    hl.head_loss(hidden, *call).loss.backward()
    assert hidden.grad is not None
    if kind == "padded":
        own = torch.tensor([[3, 4, 5], [5, 0, 1], [2, 6, 7]])
        batch = hl.Batch(targets, support_ids=own)
        loss = hl.head_loss(hidden, head, batch, hl.cross_entropy(), options).loss
        own[0, 1] = 7
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---------------------------------------------------------------------- invalid input

IDS = [[3, 4, -1], [5, 0, 1], [2, -1, -1]]
NO_IDS = torch.empty(0, dtype=torch.int64)


def refused(match: str, ids, targets=(3, 0, 2), vocabulary: int = 8, **options):
    ids = ids if isinstance(ids, tuple) else torch.tensor(ids)
    batch = hl.Batch(torch.tensor(targets, dtype=torch.int64), support_ids=ids)
    hidden, head = torch.randn(len(targets), 4), hl.Head(torch.randn(vocabulary, 4))
    with pytest.raises(ValueError, match=match):
        hl.head_loss(hidden, head, batch, hl.cross_entropy(), **options)


@pytest.mark.parametrize(
    ("ids", "targets", "match"),
    [
        (IDS, (3, 2, 2), r"got ids \[5, 0, 1\] at position 1, want the target, 2, among them"),
        (IDS, (-100, 0, 1), r"got ids \[2\] at position 2, want the target, 1, among them"),
        ([[3, 8, -1]], (3,), r"got id 8 at position 0, want 0 <= id < 8"),
        ([[3, 5, 3]], (3,), r"got id 3 more than once at position 0, want distinct ids"),
        ([[3, 5, 5]], (3,), r"got id 5 more than once at position 0, want distinct ids"),
        ((torch.tensor([3, -1]), torch.tensor([0, 2])), (3,), r"got id -1 at position 0"),
        ((torch.tensor([3, 2]), torch.tensor([0, 3])), (3,), r"offsets that do not rise from 0"),
        ((torch.tensor([3, 2]), torch.tensor([0, 2, 1])), (3, 2), r"offsets that do not rise"),
        ((NO_IDS, torch.tensor([0, 3])), (3,), r"offsets that do not rise .* number of ids, 0"),
        ((NO_IDS, torch.tensor([1, 0])), (3,), r"offsets that do not rise"),
        ((torch.tensor([3, 2]), torch.tensor([0])), (), r"offsets that do not rise"),
    ],
)
def test_bad_ids_are_named_by_position(ids, targets, match):
    refused(match, ids, targets)


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        (torch.zeros(3), TypeError, r"got \[torch.float32\], want \[.., K\] integers"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"got shapes \[\(3,\)\], want \(3, 'K'\)"),
        (torch.zeros(3, 0, dtype=torch.int64), ValueError, r"with K >= 1"),
        ((torch.zeros(3, dtype=torch.int64),) * 2, ValueError, r"\(4,\) offsets"),
        ([1, 2, 3], TypeError, "got"),
    ],
)
def test_a_support_of_another_kind_is_refused(ids, error, match):
    with pytest.raises(error, match=match):
        hl.Batch(torch.tensor([3, 0, 2]), support_ids=ids)


def test_what_cannot_have_a_support_says_so():
    mixed = [[3, 4, -1], [-1, -1, -1], [2, -1, -1]]
    refused("static: got support_ids at 2 of 3 scored", mixed, options=hl.Options(static=True))
    flat = (torch.tensor([3, 0, 2]), torch.tensor([0, 1, 2, 3]))
    refused("static: got support_ids with offsets", flat, options=hl.Options(static=True))
    batch = hl.Batch(torch.tensor([3, 0, 2]), support_ids=torch.tensor(IDS))
    with pytest.raises(ValueError, match="support_ids: got them beside given logits"):
        hl.logits_loss(torch.randn(3, 8), batch, hl.cross_entropy())
    teacher = batch.with_fields(teacher_logits=torch.randn(3, 8))
    with pytest.raises(ValueError, match="support_ids: got them with .*distillation"):
        hl.head_loss(torch.randn(3, 4), hl.Head(torch.randn(8, 4)), teacher, hl.distillation())


def test_a_changed_support_raises_and_another_is_found_anew():
    inputs = cases.inputs("padded")
    call = (inputs.hidden, inputs.head)
    first = hl.head_loss(*call, inputs.batch, inputs.objective).loss
    other = cases.supports(inputs.batch.targets, cases.VOCABULARY, "padded", seed=1)
    batch = inputs.batch.with_fields(support_ids=other)
    assert batch.support_ids is other
    assert hl.head_loss(*call, batch, inputs.objective).loss != first
    assert hl.head_loss(*call, batch.to("cpu"), inputs.objective).loss != first
    other[0] = other[0].roll(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        hl.head_loss(*call, batch, inputs.objective)


def test_the_plan_says_that_a_support_serves():
    inputs = cases.inputs("padded")
    plan = hl.plan(inputs.hidden, inputs.head, inputs.batch, inputs.objective)
    assert (plan.restricted, plan.support) == (21, 21 * cases.MOST)
    assert "189 dot products for 21 of 21 tokens" in str(plan)
    assert "logits" not in plan.bytes and plan.bytes["support"] == 189 * 48
    budget = hl.Options(memory_budget=7 * 9 * 48)  # pairs of seven tokens
    small = hl.plan(inputs.hidden, inputs.head, inputs.batch, hl.cross_entropy(), budget)
    assert (small.chunk_tokens, len(small.chunks)) == (7, 3)
    mixed = cases.inputs("mixed flat").batch
    plan = hl.plan(inputs.hidden, inputs.head, mixed, inputs.objective)
    assert "dot products for 13 of 21 tokens" in str(plan) and "logits" in plan.bytes
