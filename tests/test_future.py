"""FIPO's weight of a token's future agrees with plain float64 loops."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from folds import fold
from losses_case import Case, assert_same, make, reduced, value_and_gradient
from matrix import SCHEDULES
from policy_papers import Loops, Sequence, clip, over_tokens, ratios, smaller
from test_prompts import TRAINED, Step, same
from torch import Tensor

import headloss as hl
from headloss.losses.fipo import discounted


def fipo_paper(
    low: float = 0.2,
    high: float = 0.2,
    delta: float | None = None,
    half_life: float = 32.0,
    bounds: tuple[float, float] | None = (1.0, 1.2),
    safety: float | None = 4.0,
) -> Loops:
    """Return the paper's FIPO loss of sequences of 0-dim tensors, with `bounds` of the weight."""

    def of(s: Sequence) -> list[Tensor]:
        found, r = [], ratios(s)
        d = [float((n - o).detach()) for n, o in zip(s.logp, s.old, strict=True)]
        for t, a in enumerate(s.advantages):
            f = 0.0
            for k in range(t, len(s)):
                if delta is None or float(r[k].detach()) <= delta:
                    f += 2 ** (-(k - t) / half_life) * d[k]
            weight = math.exp(min(max(f, -20), 20))
            if bounds is not None:
                weight = min(max(weight, bounds[0]), bounds[1])
            if safety is not None and a < 0 and float(r[t].detach()) > safety:
                weight = min(max(weight, 0.8), 1.0)
            bounded = clip(r[t], -math.inf, math.inf if delta is None else delta)
            found.append(-weight * smaller(bounded * a, clip(r[t], 1 - low, 1 + high) * a))
        return found

    return lambda batch: over_tokens(batch, of)


PAPERS: dict[str, tuple[hl.Term, Loops]] = {
    "plain": (hl.fipo(), fipo_paper()),
    "short": (hl.fipo(half_life=0.7), fipo_paper(half_life=0.7)),
    "both sides": (hl.fipo(high_only=False), fipo_paper(bounds=(0.8, 1.2))),
    "wide": (hl.fipo(weight_clip=3.0, high_only=False), fipo_paper(bounds=(-2.0, 4.0))),
    "unclipped": (hl.fipo(weight_clip=None), fipo_paper(bounds=None)),
    "unclipped by 0": (hl.fipo(weight_clip=0), fipo_paper(bounds=None)),
    "delta": (hl.fipo(delta=1.1, weight_clip=None), fipo_paper(delta=1.1, bounds=None)),
    "safety": (hl.fipo(safety=1.05), fipo_paper(safety=1.05)),
    "no safety": (hl.fipo(safety=None, weight_clip=2), fipo_paper(safety=None, bounds=(1.0, 3.0))),
    "epsilons": (hl.fipo(epsilon_low=0.1, epsilon_high=0.5), fipo_paper(0.1, 0.5)),
}


@pytest.mark.parametrize("per_token", [False, True], ids=["per_segment", "per_token"])
@pytest.mark.parametrize("name", PAPERS)
def test_paper(name: str, per_token: bool) -> None:
    term, paper = PAPERS[name]
    for seed in range(3):
        case = make(per_token=per_token, seed=seed, scale=0.5)
        got = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
        assert_same(got, value_and_gradient(paper(case.sequences()), case.logp))
        assert bool(got[1].any())
    assert hl.check_term(term).gradients == ("logp",)


@pytest.mark.parametrize("schedule", TRAINED)
@pytest.mark.parametrize("name", ["plain", "unclipped", "delta"])
def test_through_the_head(name: str, schedule: str) -> None:
    """FIPO's loss, dX and dW are correct, and unscored tokens are left out of the discounted
    sum."""
    term, paper = PAPERS[name]
    step = Step(seed=1)

    def loss(rows: list[list[Any]]) -> Tensor:
        none: list[Tensor] = []
        advantages = [[step.advantages[i]] * len(row) for i, row in enumerate(rows)]
        columns = [([n for n, _ in row], [o for _, o in row]) for row in rows]
        batch = [
            Sequence(n, a, o, none, none) for (n, o), a in zip(columns, advantages, strict=True)
        ]
        return paper(batch)

    want = step.plain(loss)
    for order in (None, [5, 2, 0, 4, 3, 1]):
        same(step.run(term, order, SCHEDULES[schedule]), want)


@pytest.mark.parametrize("half_life", [1e-3, 1.0, 32.0, 1e4, 1e300])
def test_discounted_sums(half_life: float) -> None:
    """Discounted sums are correct for segments of any length: 0, 1, and powers of two minus or plus
    one."""
    lengths = [3, 0, 1, 7, 8, 9, 31, 33, 2]
    values = torch.randn(sum(lengths), dtype=torch.float64)
    found = discounted(values, hl.Segments.from_lengths(lengths), half_life)
    want = []
    for part in values.split(lengths):
        total, sums = 0.0, []
        for value in reversed(part.tolist()):
            total = value + 2 ** (-1 / half_life) * total
            sums.append(total)
        want += reversed(sums)
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_long_segment_is_stable(dtype: torch.dtype) -> None:
    """A segment of 200,000 tokens is stable and fast, without a loop over tokens."""
    count = 200_000
    values = torch.full((count,), 0.5, dtype=dtype)
    start = time.process_time()
    found = discounted(values, hl.Segments.from_lengths([count]), 32.0)
    assert time.process_time() - start < 5
    # The discounted sum of the value 0.5 over an infinite sequence.
    limit = 0.5 / (1 - 2 ** (-1 / 32))
    torch.testing.assert_close(found[:1000], torch.full((1000,), limit, dtype=torch.float64))
    assert float(found[-1]) == 0.5


@pytest.mark.parametrize("far", [90.0, 800.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_from_the_old_policy(far: float, dtype: torch.dtype) -> None:
    """FIPO gives finite losses and gradients for log-ratios up to infinity, of both signs, since
    its future KL is clamped."""
    for name in ("unclipped", "plain", "delta"):
        case = make(dtype=dtype, lengths=(1, 0, 4))
        old = case.fields["old_logps"].clone()
        old[0], old[1], old[2] = -far, far, -far
        for sign in (1, -1):
            advantages = sign * case.fields["advantages"].abs()
            case = case.with_fields(old_logps=old, advantages=advantages)
            term = PAPERS[name][0]
            value, gradient = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
            assert value.isfinite() and gradient.isfinite().all()


def test_a_certain_and_an_impossible_token() -> None:
    logp = torch.tensor([0.0, -math.inf, -1.0], dtype=torch.float64, requires_grad=True)
    fields = {
        "old_logps": torch.full((3,), -1.0, dtype=torch.float64),
        "advantages": torch.ones(1, dtype=torch.float64),
    }
    case = Case(logp, logp, fields, (3,))
    value, gradient = value_and_gradient(reduced(hl.fipo(), case.stats, case.batch), logp)
    assert value.isfinite() and gradient.isfinite().all()


def test_one_token_and_the_policy_itself() -> None:
    """In a segment of one token, FIPO's future KL is the token's own log-ratio. With
    old_logps=CURRENT, FIPO equals PPO, since its factor on every advantage (the influence weight)
    is 1."""
    case = make(lengths=(1, 1, 1))
    d = (case.logp - case.fields["old_logps"]).detach()
    observed = hl.fipo(weight_clip=None).observe(case.stats, case.batch)  # type: ignore[misc]
    torch.testing.assert_close(observed["future_kl"].values, d)
    torch.testing.assert_close(observed["influence_weight"].values, d.exp())
    step = Step()
    for order in (None, [3, 2, 1, 0, 5, 4]):
        got = step.run(hl.fipo(), order, old_logps=hl.CURRENT)
        same(got, step.run(hl.ppo(), order, old_logps=hl.CURRENT), 0.0)


def test_metrics() -> None:
    case = make(scale=0.6)
    term = hl.fipo(safety=1.05)
    seen = case.stats.map(Tensor.detach), case.batch
    found = {n: float(fold(o).value) for n, o in term.observe(*seen).items()}  # type: ignore[misc]
    dapo = hl.dapo(epsilon_high=0.2).observe(*seen)  # type: ignore[misc]
    assert found.keys() - dapo.keys() == {"future_kl", "influence_weight", "safe"}
    for name, observed in dapo.items():
        assert found[name] == float(fold(observed).value)
    rows = [
        (float(r.detach()), float(a))
        for s in case.sequences()
        for r, a in zip(ratios(s), s.advantages, strict=True)
    ]
    touched = sum(r > 1.05 and a < 0 for r, a in rows)
    assert 0 < touched < len(rows)
    assert found["safe"] == pytest.approx(1 - touched / len(rows))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"half_life": 0}, "half_life: got 0, want > 0"),
        ({"half_life": -1.0}, "half_life: got -1.0, want > 0"),
        ({"delta": 0}, "delta: got 0, want > 0"),
        ({"weight_clip": -0.1}, "weight_clip: got -0.1, want >= 0"),
        ({"safety": 0}, "safety: got 0, want > 0"),
        ({"epsilon_low": -1}, "epsilon_low: got -1, want >= 0"),
        ({"epsilon_high": math.nan}, "epsilon_high: got nan, want >= 0"),
    ],
)
def test_bad_option(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"fipo: {says}"):
        hl.fipo(**options)
    with pytest.raises(TypeError, match="fipo: high_only: got 1, want True or False"):
        hl.fipo(high_only=1)  # type: ignore[arg-type]
