"""Comparison of a term with its formula on materialised float64 logits, under every schedule.

Unscored positions hold NaN and arbitrary ids.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

import headloss as hl
from headloss.batch.batch import IGNORE
from headloss.testing import trained_looking

LENGTHS = (5, 2, 0, 7, 1)
N, H, V = sum(LENGTHS), 6, 31
UNSCORED = (1, 9)
BEYOND = 1 << 40  # id at unscored positions
SCHEDULES = {
    "one pass": hl.Options(schedule="one_pass"),
    "small chunks": hl.Options(schedule="one_pass", chunk_tokens=2),
    "recompute": hl.Options(schedule="recompute"),
    "recompute in slabs": hl.Options(schedule="recompute", chunk_tokens=2),
    "held": hl.Options(schedule="held", chunk_tokens=3),
    "static": hl.Options(static=True),
    "static recompute": hl.Options(static=True, schedule="recompute", chunk_tokens=3),
    "unskipped": hl.Options(skip_rows=False),
}
Formula = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]


@dataclass
class Problem:
    """Hidden states, a head at a temperature, targets, and fields of all positions [N, ..]."""

    fields: dict[str, Tensor]
    temperature: float = 0.7
    seed: int = 0
    hidden: Tensor = field(init=False)
    weight: Tensor = field(init=False)
    targets: Tensor = field(init=False)  # all positions

    def __post_init__(self) -> None:
        hidden, weight, self.targets = trained_looking(N, H, V, torch.float64, seed=self.seed)
        self.hidden, self.weight = hidden.requires_grad_(), weight.requires_grad_()

    @property
    def head(self) -> hl.Head:
        return hl.Head(self.weight, temperature=self.temperature)

    @property
    def scored(self) -> Tensor:
        """Return [N] bool, True at scored positions."""
        scored = torch.ones(N, dtype=torch.bool)
        scored[list(UNSCORED)] = False
        return scored

    @property
    def batch(self) -> hl.Batch:
        fields = {}
        for name, values in self.fields.items():
            poison = math.nan if values.is_floating_point() else BEYOND
            fields[name] = values.clone()
            if values.dtype != torch.bool:
                fields[name][~self.scored] = poison
        targets = self.targets.masked_fill(~self.scored, IGNORE)
        return hl.Batch(targets, hl.Segments.from_lengths(LENGTHS), **fields)  # type: ignore[arg-type]

    def log_p(self) -> Tensor:
        """Return log-probs [T, V] of the scored positions, restricted to a given support."""
        support = self.fields.get("support_ids")
        z = self.hidden @ self.weight.t() / self.temperature
        if support is not None:
            inside = torch.zeros(N, V + 1, dtype=torch.bool)
            inside.scatter_(1, torch.where(support < 0, V, support), True)
            z = z.masked_fill(~inside[:, :-1], -math.inf)
        return z[self.scored].log_softmax(1)

    def want(self, formula: Formula) -> list[Tensor]:
        """Return the mean of a formula of log p [T, V], targets [T] and fields [T, ..], with its
        gradients for hidden states and weight."""
        fields = {name: values[self.scored] for name, values in self.fields.items()}
        loss = formula(self.log_p(), self.targets[self.scored], fields).mean()
        return [loss.detach(), *torch.autograd.grad(loss, [self.hidden, self.weight])]

    def got(self, terms: hl.Term | hl.Objective, options: hl.Options) -> list[Tensor]:
        out = hl.head_loss(self.hidden, self.head, self.batch, terms, options)
        return [out.loss.detach(), *torch.autograd.grad(out.loss, [self.hidden, self.weight])]

    def metrics(self, terms: hl.Term | hl.Objective) -> dict[str, float]:
        return hl.head_loss(self.hidden, self.head, self.batch, terms).metrics.compute()


def agree(
    problem: Problem,
    terms: hl.Term | hl.Objective,
    formula: Formula,
    frozen: bool = True,
    left_out: tuple[str, ...] = (),
) -> None:
    """Check loss, dX and dW to 1e-8 on every schedule not in `left_out`, with a frozen head if
    `frozen`, and for logits passed in by the caller."""
    want = problem.want(formula)
    for name, options in SCHEDULES.items():
        if name not in left_out:
            same(problem.got(terms, options), want, name)
    if frozen:
        head = hl.Head(problem.weight.detach(), temperature=problem.temperature)
        out = hl.head_loss(
            problem.hidden, head, problem.batch, terms, hl.Options(schedule="frozen")
        )
        same([out.loss, *torch.autograd.grad(out.loss, [problem.hidden])], want[:2], "frozen")
    if "support_ids" not in problem.fields:
        z = problem.hidden @ problem.weight.t()
        out = hl.logits_loss(z, problem.batch, terms, temperature=problem.temperature)
        leaves = [problem.hidden, problem.weight]
        same([out.loss, *torch.autograd.grad(out.loss, leaves)], want, "given logits")


def same(got: list[Tensor], want: list[Tensor], name: str) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(
            a.detach(), b, rtol=1e-8, atol=1e-8, msg=lambda m: f"{name}: {m}"
        )


def logps_near(problem: Problem, scale: float, seed: int) -> Tensor:
    """Return [N] random log-probs near the target log-probs of `problem`."""
    z = (problem.hidden @ problem.weight.t()).detach() / problem.temperature
    own = z.log_softmax(1).gather(1, problem.targets[:, None]).squeeze(1)
    generator = torch.Generator().manual_seed(seed)
    return (own + scale * torch.randn(N, generator=generator, dtype=torch.float64)).clamp_max(0)
