"""Prompt means, and losses over the answers to a prompt, agree with plain float64 loops."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from matrix import SCHEDULES
from torch import Tensor

import headloss as hl
from headloss.batch.segments import numbered
from headloss.testing import trained_looking

# Tokens of each answer: the second answer's token is unscored, the fourth answer has no tokens.
LENGTHS = (3, 1, 4, 0, 2, 5)
# Prompt id of each answer; the answer without tokens belongs to prompt 2**62.
PROMPTS = (9, -7, 9, 2**62, -7, 2**62)
T, H, V = sum(LENGTHS), 6, 17
TRAINED = [name for name in SCHEDULES if name != "frozen"]  # schedules with a weight gradient


class Step:
    """Tokens in segments, some unscored, as tensors and as one list per segment."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden, self.weight, targets = trained_looking(T, H, V, torch.float64, seed=seed)
        unscored = torch.zeros(T, dtype=torch.bool)
        unscored[[1, 3]] = True
        self.targets = targets.masked_fill(unscored, -100)
        logps = (self.hidden @ self.weight.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        noise = torch.randn(T, generator=generator, dtype=torch.float64)
        self.old = logps + 0.4 * noise
        self.advantages = torch.tensor([1.0, -2.0, -0.5, 3.0, -1.0, 0.7], dtype=torch.float64)
        self.segments = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
        self.prompts = torch.tensor(PROMPTS)

    def batch(self, order: list[int] | None = None, **fields: Any) -> hl.Batch:
        """Return a batch of segments in the given order."""
        order = list(range(len(LENGTHS))) if order is None else order
        at = self.at(order)
        given: dict[str, Any] = {
            "old_logps": self.old[at], "advantages": self.advantages[order],
            "prompts": self.prompts[order], **fields,
        }  # fmt: skip
        lengths = hl.Segments.from_lengths([LENGTHS[i] for i in order])
        return hl.Batch(self.targets[at], lengths, **given)

    def at(self, order: list[int]) -> Tensor:
        """Return the token positions of the segments, in the given order of segments."""
        none = torch.arange(0)
        return torch.cat([none, *((self.segments == i).nonzero()[:, 0] for i in order)])

    def run(
        self, objective: Any, order: list[int] | None = None, options: Any = None, **fields: Any
    ) -> list[Tensor]:
        """Return the loss, the hidden gradient (in the original order of tokens) and the weight
        gradient."""
        order = list(range(len(LENGTHS))) if order is None else order
        leaves = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        batch, head = self.batch(order, **fields), hl.Head(leaves[1])
        out = hl.head_loss(leaves[0][self.at(order)], head, batch, objective, options)
        return [out.loss.detach(), *torch.autograd.grad(out.loss, leaves)]

    def plain(self, loss: Any) -> list[Tensor]:
        """Call the plain PyTorch function `loss` on the log-probs and old log-probs of each
        segment's scored tokens; return its value and gradients."""
        leaves = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        log_p = (leaves[0] @ leaves[1].t()).log_softmax(-1)
        rows = [[] for _ in LENGTHS]
        for t in range(T):
            if (target := int(self.targets[t])) >= 0:
                rows[int(self.segments[t])].append((log_p[t, target], self.old[t]))
        value = loss(rows)
        return [value.detach(), *torch.autograd.grad(value, leaves)]


def same(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-10) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def groups(prompts: Any = PROMPTS) -> list[list[int]]:
    return [[i for i, p in enumerate(prompts) if p == q] for q in sorted(set(prompts))]


# ---------------------------------------------------------------------- the mean over prompts


def mean_over_prompts(rows: list[list[Any]], of: Any, prompts: Any = PROMPTS) -> Tensor:
    """Return the mean over prompts of each prompt's token mean of the value `of(segment, log-prob,
    old log-prob)`."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups(prompts):
        values = [of(i, n, o) for i in group for n, o in rows[i]]
        total = total + sum(values, 0 * total) / max(len(values), 1)
    return total / len(groups(prompts))


@pytest.mark.parametrize("schedule", TRAINED)
def test_prompt_mean(schedule: str) -> None:
    step = Step()

    def loss(rows: list[list[Any]]) -> Tensor:
        return mean_over_prompts(rows, lambda i, n, o: -step.advantages[i] * n)

    got = step.run(hl.reinforce().over("prompt_mean"), None, SCHEDULES[schedule])
    same(got, step.plain(loss))


def test_prompt_mean_of_a_segments_value() -> None:
    step = Step()

    def loss(rows: list[list[Any]]) -> Tensor:
        means = [sum(n - o for n, o in row) / max(len(row), 1) for row in rows]
        return mean_over_prompts(rows, lambda i, n, o: (means[i] - step.advantages[i]) ** 2)

    @hl.term(scope="segment", per="segment")
    def squared(stats, batch):
        mean = batch.segments.mean
        return (mean(stats.logp - batch.old_logps) - mean(batch.advantages)).square()

    same(step.run(squared().over(hl.prompt_mean)), step.plain(loss))


@pytest.mark.parametrize("field", ["token", "segment"])
def test_prompt_mean_of_what_is_kept(field: str) -> None:
    """Denominators of a prompt mean count kept tokens, and prompts without kept tokens do not
    count."""
    step = Step()
    even = step.segments if field == "token" else torch.arange(len(LENGTHS))
    kept, objective = even % 2 == 0, hl.reinforce().over("prompt_mean").where("kept")

    def loss(rows: list[list[Any]]) -> Tensor:
        some = [rows[i] for i in (0, 2, 4)]
        chosen = dict(enumerate((0, 2, 4)))
        prompts = [PROMPTS[i] for i in (0, 2, 4)]
        return mean_over_prompts(some, lambda i, n, o: -step.advantages[chosen[i]] * n, prompts)

    same(step.run(objective, kept=kept), step.plain(loss))
    totals: Any = hl.Totals.of(step.batch(kept=kept))
    assert int(totals.prompts) == 3 and int(totals.kept["kept"][2]) == 2


def test_a_prompt_with_one_segment_each_is_the_sequence_mean() -> None:
    step, alone = Step(), torch.tensor([5, 4, 3, 2, 1, 0])
    for over in ("prompt_mean", "sequence_mean"):
        got = step.run(hl.dapo().over(over), prompts=alone)
        same(got, step.run(hl.dapo().over("sequence_mean"), prompts=alone))
    one = step.run(hl.dapo().over("prompt_mean"), prompts=torch.zeros(6, dtype=torch.int32))
    same(one, step.run(hl.dapo()))


def test_micro_batches_of_whole_prompts_add_up() -> None:
    """If micro-batches contain whole prompts and share step totals, their losses and gradients add
    up to the whole batch's loss and gradient, also if some prompts have no scored token."""
    step = Step()
    objective = hl.dapo().over("prompt_mean") + 0.3 * hl.real().over("prompt_mean")
    want = step.run(objective)
    orders = [[5, 3], [4, 0, 2, 1]]
    totals: Any = sum(hl.Totals.of(step.batch(order)) for order in orders)
    assert int(totals.prompts) == 3 and totals.segments == 6
    parts = [step.run(objective, order, totals=totals) for order in orders]
    same([a + b for a, b in zip(*parts, strict=True)], want)
    empty: Any = hl.Totals.of(step.batch([3]))
    assert (int(empty.tokens), empty.segments, int(empty.prompts)) == (0, 1, 1)


def test_totals_of_prompts() -> None:
    given = hl.Totals(10, 4, 2)
    assert given == hl.Totals(tokens=10, segments=4, prompts=2) and given.kept == {}
    assert given + given == hl.Totals(20, 8, 4) == sum([given, given])
    kept = hl.Totals(10, 4, 2, {"kept": (5, 3, 1)})
    assert kept + kept == hl.Totals(20, 8, 4, {"kept": (10, 6, 2)})
    assert hl.Totals(10, 4, {"kept": (5, 3)}) == hl.Totals(10, 4, kept={"kept": (5, 3)})
    assert hl.Totals.of(hl.Batch(torch.zeros(4).long())).prompts is None
    with pytest.raises(ValueError, match="totals: got prompts 2 and None, want a number in every"):
        given + hl.Totals(10, 4)
    with pytest.raises(
        TypeError, match=re.escape("kept['a']: got (1, 2), want (tokens, segments,")
    ):
        hl.Totals(10, 4, 2, {"a": (1, 2)})
    with pytest.raises(ValueError, match=r"prompts \(or kept\): got -1, want a finite number >= 0"):
        hl.Totals(10, 4, -1)


def test_numbers_of_distinct_values() -> None:
    for values in ([], [4], [2**62, -3, 2**62, 0, -3]):
        numbers, count = numbered(torch.tensor(values, dtype=torch.int64))
        distinct = sorted(set(values))
        assert numbers.tolist() == [distinct.index(v) for v in values]
        assert int(count) == len(distinct)


@pytest.mark.parametrize(
    ("error", "prompts", "says"),
    [
        (TypeError, torch.zeros(6), "prompts: got torch.float32, want integers"),
        (TypeError, torch.zeros(6).bool(), "prompts: got torch.bool, want integers"),
        (ValueError, torch.zeros(T).long(), r"prompts: got shape \(15,\), want \(6,\) per segment"),
        (TypeError, [1, 2, 3], "prompts: got list, want a tensor"),
    ],
)
def test_bad_prompts(error: type, prompts: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        Step().batch(prompts=prompts)


def test_as_many_segments_as_positions() -> None:
    """Prompts [S] are per segment, even if the targets have shape [S]."""
    segments = hl.Segments.from_ids(torch.tensor([2, 2, 0]), 3)
    batch = hl.Batch(torch.zeros(3).long(), segments, prompts=torch.tensor([4, 5, 4]))
    logits = torch.randn(3, 5, dtype=torch.float64)
    out = hl.logits_loss(logits, batch, hl.cross_entropy().over("prompt_mean"))
    logps = logits.log_softmax(-1)[:, 0]
    torch.testing.assert_close(out.loss, -logps.mean() / 2)


def test_a_mean_over_prompts_without_prompts_is_refused() -> None:
    step, objective = Step(), hl.dapo().over("prompt_mean")
    with pytest.raises(
        ValueError, match="term dapo: is averaged over batch.prompts, which was not"
    ):
        step.run(objective, prompts=None)
    with pytest.raises(ValueError, match="totals: have no count of prompts, over which term dapo"):
        step.run(objective, totals=hl.Totals(10, 4))
    with pytest.raises(ValueError, match="term real: reads batch.prompts, which was not given"):
        step.run(hl.real(), prompts=None)


# ---------------------------------------------------------------------- rewards as labels


def real_loss(step: Step, rows: list[list[Any]], tau: float, prompts: Any = PROMPTS) -> Tensor:
    """Return the sum of REAL's group losses over groups with a right and a wrong answer, divided by
    the number of answers."""
    zero = torch.zeros((), dtype=torch.float64)
    scores = [sum((n - o for n, o in row), zero) / max(len(row), 1) for row in rows]
    right = [bool(rows[i]) and float(step.advantages[i]) > 0 for i in range(len(rows))]
    total = zero
    for group in groups(prompts):
        positive = [scores[i] for i in group if right[i]]
        negative = [scores[i] for i in group if not right[i]]
        if positive and negative:
            value = torch.log(1 + sum(torch.exp(s / tau) for s in negative))
            value = value + torch.log(1 + sum(torch.exp(-s / tau) for s in positive))
            total = total + value * sum(bool(rows[i]) for i in group)
    return total / len(rows)


@pytest.mark.parametrize("schedule", TRAINED)
@pytest.mark.parametrize("tau", [0.5, 0.05])
def test_real(schedule: str, tau: float) -> None:
    """REAL agrees with Python loops for groups in any order; an answer without tokens counts as
    wrong, with score 0."""
    step = Step()
    want = step.plain(lambda rows: real_loss(step, rows, tau))
    assert float(want[0]) > 0 and want[1][step.segments == 5].any()
    same(step.run(hl.real(tau=tau), None, SCHEDULES[schedule]), want)
    same(step.run(hl.real(tau=tau), [4, 5, 0, 3, 2, 1], SCHEDULES[schedule]), want)


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_real_of_groups_on_one_side(sign: float) -> None:
    """Groups of only right or only wrong answers (0 is wrong) have no loss and no gradient."""
    step = Step()
    step.advantages = torch.full((6,), sign, dtype=torch.float64)
    # The prompt with id 3 has one answer, which has no tokens.
    step.prompts = torch.tensor([1, 2, 1, 3, 4, 5])
    value, *gradients = step.run(hl.real())
    assert value == 0 and not any(gradient.any() for gradient in gradients)


def test_real_reads_the_sign_of_advantages_alone() -> None:
    step = Step()
    want = step.run(hl.real())
    step.advantages = torch.where(step.advantages > 0, 1e-12, -1e9).double()
    same(step.run(hl.real()), want, 0.0)
    per_token = step.advantages[step.segments].clone()
    step.advantages = torch.zeros(6, dtype=torch.float64)
    same(step.run(hl.real(), advantages=per_token), want, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [90.0, 1e4, math.inf])
def test_real_far_from_the_old_policy(dtype: torch.dtype, far: float) -> None:
    """REAL is finite far from the old policy, where it does not clamp scores."""
    logits = torch.zeros(4, 3, dtype=dtype, requires_grad=True)
    old = torch.tensor([far, -far, far, -far], dtype=dtype)
    batch = hl.Batch(
        torch.zeros(4).long(),
        hl.Segments.from_lengths([1, 1, 1, 1]),
        old_logps=old,
        advantages=torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=dtype),
        prompts=torch.tensor([0, 0, 1, 1]),
    )
    out = hl.logits_loss(logits, batch, hl.real(tau=0.5))
    out.loss.backward()
    assert out.loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all()
    if far < math.inf:
        # With tau = 0.5, the score of an answer is its log-ratio / tau = 2 (-log 3 - old_logp).
        # Prompt 0's right answer (advantage 1) has old_logp = far, thus a low score. Prompt 1's
        # right answer has old_logp = -far, thus a high score.
        value = 2 * (far + math.log(3)) + 2 * (far - math.log(3))
        assert float(out.loss.detach()) == pytest.approx(value / 2, rel=1e-6)


def test_metrics_of_real() -> None:
    step = Step()
    batch = step.batch()
    out = hl.head_loss(step.hidden, hl.Head(step.weight), batch, hl.real())
    logps = (step.hidden @ step.weight.t()).log_softmax(-1)
    d = logps.gather(1, step.targets.clamp_min(0)[:, None])[:, 0] - step.old
    scored = step.targets >= 0
    score = [float(d[scored & (step.segments == i)].mean()) for i in (0, 2, 4, 5)]
    found = out.metrics.compute()
    assert found["real/positive_score"] == pytest.approx((score[0] + score[3]) / 2)
    assert found["real/negative_score"] == pytest.approx((score[1] + score[2]) / 2)
    # Two of the three prompts have both right and wrong answers; the prompt with id -7 has only
    # wrong answers.
    assert found["real/mixed_groups"] == pytest.approx(2 / 3)
    ratios = [math.exp(s) for s in score]
    assert found["real/ratio"] == pytest.approx(sum(ratios) / 4)
    assert found["real/ratio_max"] == pytest.approx(max(ratios))


@pytest.mark.parametrize("tau", [0, -1.0, math.nan, math.inf])
def test_bad_tau(tau: float) -> None:
    with pytest.raises(ValueError, match="real: tau: got .*, want > 0"):
        hl.real(tau=tau)
    with pytest.raises(TypeError, match="real: tau: got 'a'"):
        hl.real(tau="a")  # type: ignore[arg-type]
