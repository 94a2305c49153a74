"""The short readable implementation `headloss/naive.py` agrees with the library in loss, dX and dW,
in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss import naive

LENGTHS = torch.tensor([5, 1, 9, 8])
# the sequence number of each of T = 23 tokens
SEQUENCES = torch.arange(4).repeat_interleave(LENGTHS)
T, H, V = 23, 7, 29


@hl.term
def soft_policy_gradient(stats, batch, tau=1.0):
    ratio = (stats.logp - batch.old_logps).exp()
    return -torch.sigmoid(tau * (ratio - 1)) * batch.advantages


def soft(stats: naive.Statistics, batch: naive.Batch) -> Tensor:
    ratio = (stats.logp - batch["old_logps"]).exp()
    return -torch.sigmoid(2 * (ratio - 1)) * batch["advantages"]


def smoothed(stats: naive.Statistics, batch: naive.Batch) -> Tensor:
    return 0.9 * -stats.logp + 0.1 * (stats.lse - stats.mean_logit)


def per_token(loss: naive.Objective) -> naive.Objective:
    return lambda stats, batch: batch["token_mean"] * loss(stats, batch)


def per_sequence(loss: naive.Objective) -> naive.Objective:
    return lambda stats, batch: batch["sequence_mean"] * loss(stats, batch)


def added(stats: naive.Statistics, batch: naive.Batch) -> Tensor:
    values = naive.gspo(stats, batch) * batch["sequence_mean"]
    return values + (1e-2 * stats.lse**2 - 0.1 * stats.entropy) * batch["token_mean"]


CASES = {
    "cross_entropy": (hl.cross_entropy(), per_token(lambda s, _: -s.logp)),
    "label_smoothing": (hl.cross_entropy(label_smoothing=0.1), per_token(smoothed)),
    "entropy": (hl.entropy(), per_token(lambda s, _: s.entropy)),
    "z_loss": (hl.z_loss(), per_token(lambda s, _: s.lse**2)),
    "grpo": (hl.grpo(), per_sequence(naive.grpo)),
    "own": (soft_policy_gradient(tau=2.0), per_token(soft)),
    "gspo": (hl.gspo(), per_sequence(naive.gspo)),
    "sum": (hl.gspo() + 1e-2 * hl.z_loss() - 0.1 * hl.entropy(), added),
}
SEGMENT_SCOPED = ("gspo", "sum")


def inputs() -> tuple[Tensor, Tensor, naive.Batch]:
    """Return inputs with logits up to 20, and with ratios inside and outside of the clip ranges of
    GRPO and GSPO; GSPO's ratios are at least 1e-4 away from the clip bounds."""
    x = torch.randn(T, H, dtype=torch.float64) * 2
    weight = torch.randn(V, H, dtype=torch.float64)
    targets = torch.randint(V, (T,))
    logps = (x @ weight.T).log_softmax(1).gather(1, targets[:, None])[:, 0]
    shift = torch.tensor([6e-4, -5e-4, 1e-4, -2e-4], dtype=torch.float64)[SEQUENCES]
    noise = torch.randn(T, dtype=torch.float64) / 2
    means = torch.zeros(4, dtype=torch.float64).index_add(0, SEQUENCES, noise) / LENGTHS
    batch = {
        "targets": targets,
        "segment_ids": SEQUENCES,
        "advantages": torch.tensor([1.0, -1.0, -0.5, 2.0], dtype=torch.float64)[SEQUENCES],
        "old_logps": logps - (noise - means[SEQUENCES] + shift),
        "token_mean": torch.full((T,), 1 / T, dtype=torch.float64),
        "sequence_mean": (1 / (4 * LENGTHS.double()))[SEQUENCES],
    }
    return x, weight, batch


def of_library(
    x: Tensor, weight: Tensor, batch: naive.Batch, objective: hl.Objective, schedule: str
) -> naive.Result:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    fields = {name: batch[name] for name in ("advantages", "old_logps")}
    packed = hl.Batch(batch["targets"], hl.Segments.from_lengths(LENGTHS), **fields)
    options = hl.Options(schedule=schedule)
    loss = hl.head_loss(x, hl.Head(weight), packed, objective, options=options).loss
    return (loss.detach(), *torch.autograd.grad(loss, (x, weight)))


def close(a: naive.Result, b: naive.Result) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("slab", [V, 10, 1])
def test_recompute(name: str, slab: int) -> None:
    x, weight, batch = inputs()
    objective, plain = CASES[name]
    library = of_library(x, weight, batch, objective, "recompute")
    assert all(part.abs().max() > 1e-3 for part in library)
    close(naive.recompute(x, weight, batch, plain, slab), library)


WHOLE = [(name, chunk) for name in CASES for chunk in (T, 15)]  # chunks of whole sequences
CUT = [(name, 4) for name in CASES if name not in SEGMENT_SCOPED]


@pytest.mark.parametrize(("name", "chunk"), WHOLE + CUT)
def test_one_pass(name: str, chunk: int) -> None:
    x, weight, batch = inputs()
    objective, plain = CASES[name]
    close(
        naive.one_pass(x, weight, batch, plain, chunk),
        of_library(x, weight, batch, objective, "one_pass"),
    )


@pytest.mark.parametrize("loss", [naive.grpo, naive.gspo])
def test_clips_on_both_sides(loss: Callable[..., Tensor]) -> None:
    """The test inputs have clipped and unclipped tokens with positive and with negative
    advantages."""
    x, weight, batch = inputs()
    columns = torch.arange(V)
    stats = naive.finish(naive.measure(x @ weight.T, columns, batch["targets"]), V)
    _, c = naive.coefficients(loss, stats, batch, V)
    clipped, positive = c[0] == 0, batch["advantages"] > 0
    assert (clipped & positive).any() and (clipped & ~positive).any() and (~clipped).any()


def test_merging_keeps_large_logits() -> None:
    """Merging slices with very different maxima gives the entropy of logits near 1e6."""
    z = torch.randn(5, 12, dtype=torch.float64) + 1e6
    z[:, :4] -= 700
    columns, targets = torch.arange(12), torch.tensor([0, 3, 4, 8, 11])
    parts = [naive.measure(z[:, c], c, targets) for c in columns.split(4)]
    stats = naive.finish(naive.merge(naive.merge(parts[0], parts[1]), parts[2]), 12)
    log_p = z.log_softmax(1)
    expected = -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(stats.entropy, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(stats.logp, log_p[torch.arange(5), targets], rtol=1e-9, atol=1e-9)


def test_naive_has_at_most_150_lines() -> None:
    assert len(Path(naive.__file__).read_text().splitlines()) <= 150
