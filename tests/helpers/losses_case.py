"""A small ragged batch, as a packed batch for terms and as plain lists for loops of a paper's
formula."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headloss.batch.batch import Batch
from headloss.batch.packing import PackedBatch, pack
from headloss.batch.segments import Segments
from headloss.losses.term import Objective, Term
from headloss.statistics.softmax import Statistics

LENGTHS = (3, 1, 0, 5, 2, 4)  # scored tokens per sequence; the third sequence has none


@dataclass
class Sequence:
    """A sequence of n tokens, as lists of 0-dim float64 tensors."""

    logp: list[Tensor]
    advantages: list[Tensor]
    old: list[Tensor]
    ref: list[Tensor]
    sampling: list[Tensor]

    def __len__(self) -> int:
        return len(self.logp)


@dataclass
class Case:
    """Log-probs and entropies that require gradients, and all batch fields that terms read."""

    logp: Tensor  # [T]
    entropy: Tensor  # [T]
    fields: dict[str, Tensor]
    lengths: tuple[int, ...] = LENGTHS
    dtype: torch.dtype = torch.float64

    @property
    def stats(self) -> Statistics:
        return Statistics(logp=self.logp, entropy=self.entropy)

    @property
    def batch(self) -> PackedBatch:
        targets = torch.zeros(len(self.logp), dtype=torch.int64)
        batch = Batch(targets, Segments.from_lengths(self.lengths), **self.fields)  # type: ignore[arg-type]
        return pack(batch, vocabulary=1, dtype=self.dtype)

    def with_fields(self, **fields: Tensor) -> Case:
        return replace(self, fields={**self.fields, **fields})

    def sequences(self) -> list[Sequence]:
        advantages = self.fields["advantages"]
        if len(advantages) != len(self.logp):
            advantages = advantages.repeat_interleave(torch.tensor(self.lengths))
        names = ("old_logps", "ref_logps", "sampling_logps")
        vectors = [self.logp, advantages, *(self.fields[name] for name in names)]
        columns = [[list(part) for part in v.split(list(self.lengths))] for v in vectors]
        return [Sequence(*row) for row in zip(*columns, strict=True)]


def make(
    per_token: bool = False,
    scale: float = 0.4,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    lengths: tuple[int, ...] = LENGTHS,
) -> Case:
    """Make a small batch with log-ratios of standard deviation `scale`, and with advantages per
    segment or per token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    total = sum(lengths)
    logp = -0.5 - normal(total).abs()
    fields = {
        "advantages": normal(total if per_token else len(lengths)),
        "old_logps": logp + scale * normal(total),
        "ref_logps": logp + scale * normal(total),
        "sampling_logps": logp + scale * normal(total),
    }
    return Case(
        logp=logp.to(dtype).requires_grad_(),
        entropy=normal(total).abs().to(dtype).requires_grad_(),
        fields={name: value.to(dtype) for name, value in fields.items()},
        lengths=lengths,
        dtype=dtype,
    )


def weights(term: Term, batch: PackedBatch) -> Tensor:
    """Return each token's weight [T] under the term's reduction, with this batch's totals."""
    assert term.reduction is not None
    lengths = batch.segments.expand(batch.segments.lengths.double())
    tokens, segments = max(len(batch), 1), max(batch.segments.count, 1)
    totals = torch.tensor([tokens, segments], dtype=torch.float64)
    return term.reduction.weigh(lengths, *totals)


def reduced(objective: Term | Objective, stats: Statistics, batch: PackedBatch) -> Tensor:
    """Return sum_t w_t l_t, summed over all terms."""
    total = torch.zeros((), dtype=torch.float64)
    for coefficient, term in Objective.of(objective).parts:
        total = total + coefficient * (weights(term, batch) * term(stats, batch)).sum()
    return total


def value_and_gradient(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Return the loss and its gradients, which are zeros for tensors that do not influence the
    loss."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [
        loss.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)),
    ]


def assert_same(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)
