"""M2PO's mask, as a field and as a modifier, agrees with its definition in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from folds import fold
from losses_case import assert_same, make, reduced, value_and_gradient
from matrix import SCHEDULES
from test_prompts import TRAINED, Step, T, same
from torch import Tensor

import headloss as hl


def kept_of(moments: list[float], threshold: float) -> list[bool]:
    """Return a list that is True for kept tokens. Tokens with the largest second moments are
    dropped, as few as are needed to bring the mean of the remaining moments below `threshold`."""
    order = sorted(range(len(moments)), key=lambda i: -moments[i])
    for n in range(len(moments)):
        left = [moments[i] for i in order[n:]]
        if math.fsum(left) / len(left) < threshold or n == len(moments) - 1:
            return [i not in order[:n] for i in range(len(moments))]
    return []


def batch_of(old: Tensor, sampling: Tensor, targets: Tensor | None = None) -> hl.Batch:
    targets = torch.zeros(old.shape, dtype=torch.int64) if targets is None else targets
    return hl.Batch(
        targets, old_logps=old, sampling_logps=sampling, advantages=torch.ones_like(old)
    )


@pytest.mark.parametrize("threshold", [1e-6, 0.04, 0.3, 1.0, 1e6])
def test_the_mask(threshold: float) -> None:
    """`second_moment_mask` agrees with a Python loop for few and many tokens, and ignores unscored
    tokens even if their log-probs are NaN."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        rows = 1 + seed % 4
        old, noise = (torch.randn(rows, 8, generator=generator).double() for _ in range(2))
        targets = torch.where(torch.rand(rows, 8, generator=generator) < 0.3, -100, 1)
        scored = targets >= 0
        sampling = (old + noise).masked_fill(~scored, math.nan if seed % 2 else -1e9)
        got = hl.second_moment_mask(batch_of(old, sampling, targets), threshold=threshold)
        want = torch.zeros(rows, 8, dtype=torch.bool)
        moments = noise[scored].square().tolist()
        want[scored] = torch.tensor(kept_of(moments, threshold), dtype=torch.bool)
        assert torch.equal(got, want) and got.dtype == torch.bool


def test_edges_of_the_mask() -> None:
    def kept(moments: list[float], threshold: float = 0.25) -> list[bool]:
        sampling = torch.tensor(moments).double().sqrt()
        batch = batch_of(torch.zeros(len(moments)).double(), sampling)
        return hl.second_moment_mask(batch, threshold=threshold).tolist()

    assert kept([]) == []
    assert kept([9.0]) == [True]  # The token with the smallest second moment is always kept.
    assert kept([0.0625, 0.4]) == [True, True]  # The mean 0.23125 is below the threshold 0.25.
    assert kept([0.25, 0.25]).count(True) == 1  # A mean of 0.25 is not below the threshold 0.25.
    # Of three equal second moments, exactly one (any) is kept.
    assert kept([4.0, 4.0, 4.0]).count(True) == 1
    # A mean of 0.25 is not below the threshold 0.25.
    assert kept([0.0625, 0.4375]) == [True, False]
    assert kept([math.inf, 0.0, 0.0625]) == [False, True, True]
    assert kept([math.nan, 1.0]) == [True, False]  # NaN counts as a second moment of 0
    assert kept([0.0, 0.0]) == [True, True]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("threshold", [0.01, 0.04, 10.0])
def test_the_modifier(live: bool, threshold: float) -> None:
    for seed in range(3):
        case = make(per_token=True, seed=seed)
        trainer = case.logp.detach() if live else case.fields["old_logps"]
        moments = (trainer - case.fields["sampling_logps"]).square()
        mask = torch.tensor(kept_of(moments.tolist(), threshold))
        case = case.with_fields(mask=mask.double())
        term = hl.dapo().second_moment_masked(threshold, live=live)
        want = reduced(hl.dapo().weighted("mask"), case.stats, case.batch)
        got = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
        assert_same(got, value_and_gradient(want, case.logp))
        assert term.scope == "batch"
        (modifier,) = term.modifiers
        seen = modifier.observe(case.stats.map(Tensor.detach), case.batch)
        found = {name: float(fold(o).value) for name, o in seen.items()}
        assert found["second_moment"] == pytest.approx(float(moments.mean()))
        assert found["second_moment_kept"] == pytest.approx(float(moments[mask].mean()))
        assert found["second_moment_dropped"] == pytest.approx(1 - float(mask.double().mean()))
        assert threshold == 10.0 or 0 < found["second_moment_dropped"] < 1


@pytest.mark.parametrize("schedule", TRAINED)
def test_through_the_head(schedule: str) -> None:
    """`.second_moment_masked()` in `head_loss` drops tokens but still divides the loss by all
    scored tokens; with the mask as a batch field, the loss is divided by the kept tokens."""
    step = Step()
    order = [4, 2, 0, 5, 3, 1]
    noise = 0.5 * torch.randn(T, generator=torch.Generator().manual_seed(5)).double()
    scored = step.targets >= 0
    mask = torch.zeros(T, dtype=torch.bool)
    mask[scored] = torch.tensor(kept_of(noise[scored].square().tolist(), 0.04))
    assert 0 < int(mask.sum()) < int(scored.sum())

    def loss(over: int) -> Any:
        def of(rows: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
            total = torch.zeros((), dtype=torch.float64)
            for i, row in enumerate(rows):
                for kept, (n, _) in zip(mask[scored & (step.segments == i)], row, strict=True):
                    total = total - kept * step.advantages[i] * n
            return total / over

        return of

    sampling = (step.old + noise)[step.at(order)].masked_fill(~scored[step.at(order)], math.nan)
    options = SCHEDULES[schedule]
    term = hl.reinforce().second_moment_masked()
    same(
        step.run(term, order, options, sampling_logps=sampling), step.plain(loss(int(scored.sum())))
    )
    kept = hl.second_moment_mask(step.batch(order, sampling_logps=sampling))
    assert torch.equal(kept, mask[step.at(order)])
    got = step.run(hl.reinforce().where("kept"), order, options, kept=kept)
    same(got, step.plain(loss(int(mask.sum()))))


@pytest.mark.parametrize("threshold", [0, -0.1, math.nan, math.inf])
def test_bad_threshold(threshold: float) -> None:
    with pytest.raises(ValueError, match="second_moment_masked: threshold: got .*, want > 0"):
        hl.grpo().second_moment_masked(threshold)
    with pytest.raises(ValueError, match="second_moment_mask: threshold: got .*, want > 0"):
        hl.second_moment_mask(batch_of(torch.zeros(2), torch.zeros(2)), threshold=threshold)


def test_bad_calls() -> None:
    with pytest.raises(TypeError, match="second_moment_masked: live: got 1"):
        hl.grpo().second_moment_masked(live=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="second_moment_mask: batch: got int, want headloss.Batch"):
        hl.second_moment_mask(3)  # type: ignore[arg-type]
    current = hl.Batch(torch.zeros(2).long(), old_logps=hl.CURRENT, sampling_logps=torch.zeros(2))
    with pytest.raises(ValueError, match="second_moment_mask: old_logps: got CURRENT, want the"):
        hl.second_moment_mask(current)
    with pytest.raises(ValueError, match=r"batch\.sampling_logps, which was not given"):
        hl.second_moment_mask(hl.Batch(torch.zeros(2).long(), old_logps=torch.zeros(2)))
