"""`Options(gradient_tolerance=x)` skips the token rows with the smallest gradients, keeps the error
below x, and reports the skipped rows.

T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headloss as hl
from headloss.kernels.transform import Transform
from headloss.objective.tolerance import least, masses
from headloss.objective.weighted import Coefficients
from headloss.statistics.softmax import SoftmaxCoefficients, Statistics
from headloss.testing import plain, random_batch, trained_looking

T, H, V = 96, 12, 40
LENGTHS = (20, 0, 31, 45)


def setting(
    dtype: torch.dtype = torch.float64, **of_head: Any
) -> tuple[Tensor, hl.Head, hl.Batch]:
    """Return inputs with mostly nearly certain tokens, and a segment with advantage 0."""
    hidden, weight, targets = trained_looking(T, H, V, torch.float64)
    head = hl.Head(weight.to(dtype).requires_grad_(), **of_head)
    hidden = hidden.to(dtype).requires_grad_()
    with torch.no_grad():
        logps = hl.head_stats(hidden, head, targets).logp
    batch = random_batch(targets, hl.Segments.from_lengths(torch.tensor(LENGTHS)), logps)
    advantages = batch.fields["advantages"].clone()
    advantages[2] = 0
    return hidden, head, batch.with_fields(advantages=advantages)


def run(
    hidden: Tensor, head: hl.Head, batch: hl.Batch, objective: hl.Objective, **options: Any
) -> tuple[list[Tensor], hl.Output]:
    out = hl.head_loss(hidden, head, batch, objective, hl.Options(**options))
    return list(torch.autograd.grad(out.loss, [hidden, head.weight])), out


OBJECTIVES = {
    "grpo": lambda: hl.grpo(),
    "gspo and entropy": lambda: hl.gspo() - 0.05 * hl.entropy(),
    "supervised": lambda: hl.cross_entropy(label_smoothing=0.1) + 1e-3 * hl.z_loss(),
}
TEMPERATURES = {
    "one": lambda: 1.0,
    "each its own": lambda: 0.5 + torch.rand(T, dtype=torch.float64),
}
SCALES = {"plain": {}, "scaled": {"logit_scale": 1.7}, "capped": {"softcap": 5.0}}
SCHEDULES = {
    "one pass": {"schedule": "one_pass"},
    "chunks": {"schedule": "one_pass", "memory_budget": 48 * V * 8},
    "recompute": {"schedule": "recompute", "chunk_tokens": 17},
    "held": {"schedule": "held", "chunk_tokens": T},
}


@pytest.mark.covering
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_error_is_bounded_by_the_skipped_mass(
    objective: str, temperature: str, scale: str
) -> None:
    torch.manual_seed(0)
    hidden, head, batch = setting(temperature=TEMPERATURES[temperature](), **SCALES[scale])
    term = OBJECTIVES[objective]()
    truth = plain(hidden, head, batch, term).gradients
    largest = head.weight.detach().norm(dim=1).max(), hidden.detach().norm(dim=1).max()
    for name, options in SCHEDULES.items():
        for x in (0.05, 0.3):
            found, out = run(hidden, head, batch, term, gradient_tolerance=x, **options)
            mass, share = out.metrics["skipped_mass"].sum, float(out.metrics["skipped_mass"])
            assert 0 < share <= x, name
            assert float(out.metrics["skipped_rows"]) >= 1
            for value, key, norm in zip(found, ("hidden", "weight"), largest, strict=True):
                lost = (value - truth[key]).norm()
                assert 0 < lost <= mass * norm * (1 + 1e-12), (name, x, key)
            zero = (found[0] == 0).all(1).sum()
            assert zero == float(out.metrics["skipped_rows"]) + _quiet(truth["hidden"])


def _quiet(gradient: Tensor) -> int:
    return int((gradient == 0).all(1).sum())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_changes_at_zero(schedule: str) -> None:
    given, options = setting(), SCHEDULES[schedule]
    before, out = run(*given, hl.grpo(), **options)
    after, same = run(*given, hl.grpo(), gradient_tolerance=0, **options)
    assert all(map(torch.equal, before, after))
    assert out.metrics.keys() == same.metrics.keys()
    assert "skipped_rows" not in out.metrics
    tiny, out = run(*given, hl.grpo(), gradient_tolerance=1e-300, **options)
    assert all(map(torch.equal, before, tiny))
    assert float(out.metrics["skipped_rows"]) == 0
    assert float(out.metrics["skipped_mass"]) == 0


def test_two_runs_agree_and_a_tie_goes_to_the_first() -> None:
    given = setting()
    first, second = (run(*given, hl.grpo(), gradient_tolerance=0.1)[0] for _ in range(2))
    assert all(map(torch.equal, first, second))
    hidden = torch.ones(8, 3, dtype=torch.float64, requires_grad=True)
    head = hl.Head(torch.randn(5, 3, dtype=torch.float64, requires_grad=True))
    batch = hl.Batch(torch.ones(8, dtype=torch.int64))
    (into, _), out = run(hidden, head, batch, hl.cross_entropy(), gradient_tolerance=0.3)
    assert (into == 0).all(1).tolist() == [True] * 2 + [False] * 6
    assert float(out.metrics["skipped_rows"]) == 2
    assert float(out.metrics["skipped_mass"]) == pytest.approx(0.25)


def test_metrics_merge_over_micro_batches() -> None:
    hidden, head, batch = setting()
    parts = [
        run(hidden[s], head, hl.Batch(batch.targets[s]), hl.cross_entropy(), gradient_tolerance=x)
        for s, x in ((slice(0, 40), 0.1), (slice(40, T), 0.01))
    ]
    a, b = (out.metrics for _, out in parts)
    both = a.merge(b)
    assert float(both["skipped_rows"]) == float(a["skipped_rows"]) + float(b["skipped_rows"])
    lost = a["skipped_mass"].sum + b["skipped_mass"].sum
    whole = a["skipped_mass"].count + b["skipped_mass"].count
    assert float(both["skipped_mass"]) == pytest.approx(float(lost / whole), rel=1e-12)


def test_mass_of_float16_is_that_of_the_objective() -> None:
    """In float16 `skipped_mass` reports the unscaled gradient mass, although the gradient
    coefficients are scaled internally."""
    wide = run(*setting(), hl.cross_entropy(), gradient_tolerance=0.1)[1].metrics
    narrow = run(*setting(torch.float16), hl.cross_entropy(), gradient_tolerance=0.1)[1].metrics
    count = float(wide["skipped_mass"].count)
    assert float(narrow["skipped_mass"].count) == pytest.approx(count, rel=1e-2)


def test_a_support_and_free_tokens() -> None:
    hidden, head, batch = setting()
    ids = torch.full((T, 4), -1)
    ids[::2, 0] = batch.targets[::2]
    ids[::2, 1:] = (batch.targets[::2, None] + torch.arange(1, 4)) % V
    batch = hl.Batch(batch.targets, support_ids=ids)
    truth, _ = run(hidden, head, batch, hl.cross_entropy())
    found, out = run(hidden, head, batch, hl.cross_entropy(), gradient_tolerance=0.1)
    mass = out.metrics["skipped_mass"].sum
    assert float(out.metrics["skipped_rows"]) > 0
    assert 0 < (found[0] - truth[0]).norm() <= mass * head.weight.norm(dim=1).max()
    assert 0 < (found[1] - truth[1]).norm() <= mass * hidden.norm(dim=1).max()


@hl.term
def of_candidates(stats, batch):
    return stats.candidate_logps.sum(1) - 0.5 * stats.candidate_tail


def test_candidates_count_in_the_mass() -> None:
    hidden, head, batch = setting()
    ids = (batch.targets[:, None] + torch.arange(3)) % V
    batch = hl.Batch(batch.targets, candidate_ids=ids)
    objective = of_candidates().over("token_mean") + hl.cross_entropy()
    truth, _ = run(hidden, head, batch, objective)
    found, out = run(hidden, head, batch, objective, gradient_tolerance=0.2)
    mass = out.metrics["skipped_mass"].sum
    assert float(out.metrics["skipped_rows"]) > 0
    assert 0 < (found[0] - truth[0]).norm() <= mass * head.weight.norm(dim=1).max()
    assert 0 < (found[1] - truth[1]).norm() <= mass * hidden.norm(dim=1).max()


@pytest.mark.parametrize("schedule", ["frozen", "one_pass"])
def test_a_frozen_head_and_supports_leave_nothing_out(schedule: Any) -> None:
    hidden, head, batch = setting()
    if schedule == "frozen":
        head = hl.Head(head.weight.detach())
    else:
        batch = batch.with_fields(support_ids=(batch.targets[:, None] + torch.arange(4)) % V)
    exact, found = (
        hl.head_loss(hidden, head, batch, hl.grpo(), hl.Options(schedule=schedule, **given))
        for given in ({}, {"gradient_tolerance": 0.3})
    )
    assert float(found.metrics["skipped_rows"]) == 0
    assert float(found.metrics["skipped_mass"].count) == 0  # no masses are computed
    gradients = [torch.autograd.grad(out.loss, hidden)[0] for out in (exact, found)]
    assert torch.equal(*gradients)


# ---------------------------------------------------------------------- mass and choice of rows


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_mass_bounds_the_gradient_of_the_logits(entropy: bool, uniform: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    z = 4 * torch.randn(T, V, generator=generator, dtype=torch.float64)
    y = torch.randint(V, (T,), generator=generator)
    log_p = z.log_softmax(1)
    numbers = [torch.randn(T, generator=generator, dtype=torch.float64) for _ in range(4)]
    c = SoftmaxCoefficients(
        target=numbers[0],
        prob=numbers[1],
        entropy=numbers[2] if entropy else None,
        uniform=numbers[3] / V if uniform else None,
    )
    bracket = c.prob[:, None] + (c.entropy[:, None] * log_p if entropy else 0)
    g = log_p.exp() * bracket
    g[torch.arange(T), y] += c.target
    if uniform:
        g = g + c.uniform[:, None]
    entropies = -(log_p.exp() * log_p).sum(1)
    stats = Statistics(logp=log_p.gather(1, y[:, None])[:, 0], entropy=entropies)
    transform = Transform(scale=-3.0, temperature=torch.full((T,), 1.5))
    mass = masses(Coefficients(c, {}, z), stats, transform, V)
    true = 2 * g.abs().sum(1)
    assert (mass >= true * (1 - 1e-12)).all()
    if not entropy and not uniform:
        torch.testing.assert_close(mass, true)


def test_mass_keeps_the_digits_of_a_certain_token() -> None:
    logp = torch.tensor([-1e-12], dtype=torch.float64)
    c = SoftmaxCoefficients(target=torch.ones(1), prob=-torch.ones(1))
    mass = masses(Coefficients(c, {}, logp), Statistics(logp=logp), Transform(), V)
    assert float(mass) == pytest.approx(2e-12, rel=1e-9)


MASSES = st.lists(
    st.sampled_from([0.0, 1e-30, 1e-6, 0.25, 1.0]) | st.floats(0, 1e6), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(MASSES, st.floats(0, 1.5))
def test_the_least_rows_leave_and_as_many_as_may(given: list[float], share: float) -> None:
    mass = torch.tensor(given, dtype=torch.float64)
    out, total = least(mass, share), float(mass.sum())
    exact = math.fsum(m for m, gone in zip(given, out.tolist(), strict=True) if gone)
    assert exact <= share * total * (1 + 1e-12)
    order = sorted(range(len(given)), key=lambda i: (given[i], i))
    # The skipped rows must be those with the smallest contributions to the gradient (`mass`).
    assert out[order].tolist() == sorted(out.tolist(), reverse=True)
    kept = [i for i in order if not out[i]]
    if total and kept:
        assert exact + given[kept[0]] > share * total * (1 - 1e-9) - 1e-12 * total


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nothing_is_left_out_beside_a_mass_that_is_no_number(poison: float) -> None:
    logp = torch.full((4,), -1.0, dtype=torch.float64)
    target = torch.tensor([1e-9, poison, 1.0, 1.0], dtype=torch.float64)
    gradient = Coefficients(SoftmaxCoefficients(target=target, prob=-target), {}, logp)
    mass = masses(gradient, Statistics(logp=logp), Transform(), V)
    assert not least(mass, 0.5).any()


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_values_that_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="gradient_tolerance: got .* want a finite number >= 0"):
        hl.Options(gradient_tolerance=value)


@pytest.mark.parametrize("value", [True, "0.1", None])
def test_kinds_that_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="gradient_tolerance: got .* want a number >= 0"):
        hl.Options(gradient_tolerance=value)


@pytest.mark.parametrize("other", [{"static": True}, {"skip_rows": False}])
def test_options_that_do_not_go_together(other: dict[str, bool]) -> None:
    (name,) = other
    with pytest.raises(ValueError, match=f"gradient_tolerance: got 0.1 with {name}="):
        hl.Options(gradient_tolerance=0.1, **other)
    hl.Options(gradient_tolerance=0, **other)


def test_teachers_and_given_logits_are_refused() -> None:
    hidden, head, batch = setting()
    options = hl.Options(gradient_tolerance=0.1)
    teacher = hl.Batch(batch.targets, teacher_logits=torch.randn(T, V))
    with pytest.raises(ValueError, match="gradient_tolerance: got 0.1 with .*distillation"):
        hl.head_loss(hidden, head, teacher, hl.distillation(), options)
    with pytest.raises(ValueError, match="gradient_tolerance: got 0.1.* given logits"):
        hl.logits_loss(torch.randn(T, V), batch, hl.grpo(), options=options)
