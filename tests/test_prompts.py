"""Means over prompts, in plain loops of float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from matrix import SCHEDULES
from torch import Tensor

import headloss as hl
from headloss.batch.segments import numbered
from headloss.testing import trained_looking

LENGTHS = (3, 1, 4, 0, 2, 5)  # the second one is left unscored, the fourth has no token
PROMPTS = (9, -7, 9, 2**62, -7, 2**62)  # the third has one answer without a token
T, H, V = sum(LENGTHS), 6, 17
TRAINED = [name for name in SCHEDULES if name != "frozen"]  # those with a gradient of the weight


class Step:
    """Tokens in segments, of which some are unscored, as tensors and as a list for each segment."""

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
        """Some segments, in an order, one after another."""
        order = list(range(len(LENGTHS))) if order is None else order
        at = self.at(order)
        given: dict[str, Any] = {
            "old_logps": self.old[at], "advantages": self.advantages[order],
            "prompts": self.prompts[order], **fields,
        }  # fmt: skip
        lengths = hl.Segments.from_lengths([LENGTHS[i] for i in order])
        return hl.Batch(self.targets[at], lengths, **given)

    def at(self, order: list[int]) -> Tensor:
        """The positions of some segments."""
        none = torch.arange(0)
        return torch.cat([none, *((self.segments == i).nonzero()[:, 0] for i in order)])

    def run(
        self, objective: Any, order: list[int] | None = None, options: Any = None, **fields: Any
    ) -> list[Tensor]:
        """Loss and both gradients, the hidden one in the order of all tokens."""
        order = list(range(len(LENGTHS))) if order is None else order
        leaves = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        batch, head = self.batch(order, **fields), hl.Head(leaves[1])
        out = hl.head_loss(leaves[0][self.at(order)], head, batch, objective, options)
        return [out.loss.detach(), *torch.autograd.grad(out.loss, leaves)]

    def plain(self, loss: Any) -> list[Tensor]:
        """The same of a loss of the log-probs and old log-probs of each segment's scored tokens."""
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
    """The mean over prompts of that over their tokens, of a value of (segment, log-prob, old)."""
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
    """The denominators count what is kept, and a prompt of which nothing is kept does not count."""
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
    """In any order, with totals of the step; a prompt without a scored token counts."""
    step = Step()
    objective = hl.dapo().over("prompt_mean")
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
    """[S] prompts are of segments, also where the targets have this shape."""
    segments = hl.Segments.from_ids(torch.tensor([2, 2, 0]), 3)
    batch = hl.Batch(torch.zeros(3).long(), segments, prompts=torch.tensor([4, 5, 4]))
    logits = torch.randn(3, 5, dtype=torch.float64)
    out = hl.logits_loss(logits, batch, hl.cross_entropy().over("prompt_mean"))
    logps = logits.log_softmax(-1)[:, 0]
    torch.testing.assert_close(out.loss, -logps.mean() / 2)


def test_what_a_mean_over_prompts_lacks() -> None:
    step, objective = Step(), hl.dapo().over("prompt_mean")
    with pytest.raises(
        ValueError, match="term dapo: is averaged over batch.prompts, which was not"
    ):
        step.run(objective, prompts=None)
    with pytest.raises(ValueError, match="totals: have no count of prompts, over which term dapo"):
        step.run(objective, totals=hl.Totals(10, 4))
