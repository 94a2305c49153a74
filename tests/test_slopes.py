"""Closed-form derivatives of terms with respect to the statistics of a token equal autograd's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headloss as hl
from headloss.batch.packing import pack
from headloss.batch.reduction import Totals
from headloss.losses.term import Objective
from headloss.objective.reads import has_slopes
from headloss.objective.weighted import bind
from headloss.statistics.softmax import Slope, Statistics

T = 400


def packed(dtype=torch.float64):
    old = -3 * torch.rand(T, dtype=dtype)
    batch = hl.Batch(
        torch.randint(10, (T,)),
        hl.Segments.from_lengths([100, 150, 50, 100]),
        advantages=torch.randn(T, dtype=dtype),
        old_logps=old,
        ref_logps=old + 0.1,
        sampling_logps=old - 0.1,
        w=torch.rand(T, dtype=dtype),
        keep=torch.rand(T) > 0.3,
    )
    return batch, pack(batch, 10, dtype)


CONSTANT = [
    (hl.cross_entropy(), {"logp": -1}),
    (
        hl.cross_entropy(label_smoothing=0.1),
        {"logp": -0.9, "lse": 0.1, "mean_logit": -0.1},
    ),
    (hl.entropy(), {"entropy": 1}),
    (hl.kl(), {"logp": 1}),
]
WITHOUT = [
    hl.z_loss(),
    hl.gspo(),
    hl.cispo(),
    hl.sapo(),
    hl.unlikelihood(),
    hl.kl(estimator="k2"),
    hl.kl(estimator="k3"),
    hl.kl(bias_corrected=True),
    hl.reinforce().top_entropy(threshold=0.5),
]


@pytest.mark.parametrize(("term", "slopes"), CONSTANT, ids=repr)
def test_constant_slopes(term, slopes):
    _, inside = packed()
    found = {slope.of: (slope.rate, slope.sign) for slope in term.slopes(inside)}
    assert found == {name: (pytest.approx(rate), 0) for name, rate in slopes.items()}


@pytest.mark.parametrize("term", WITHOUT, ids=repr)
def test_terms_without_closed_form_slopes(term):
    assert not has_slopes(term._objective(), {})
    assert not has_slopes(hl.grpo() + term, {})


@hl.term(slopes=lambda batch, tau: (Slope(tau * batch.w, sign=0),))
def declared(stats, batch, tau=2.0):
    return tau * batch.w * stats.logp


@hl.term(slopes=lambda batch: (Slope(-batch.w, batch.old_logps, sign=-1.0),))
def inverse_ratio(stats, batch):
    return batch.w * (batch.old_logps - stats.logp).exp()


@hl.term(slopes=lambda batch: (Slope(batch.w, low=-2.0, sign=0.0),))
def no_lower(stats, batch):
    return batch.w * stats.logp.clamp_min(-2.0)


CLIPPED = [
    hl.grpo(),
    hl.grpo(epsilon_low=0.0, epsilon_high=0.0),
    hl.grpo(epsilon_low=1.5),
    hl.grpo(delta=1.5),
    hl.grpo(delta=1.1),
    hl.grpo(delta=0.7),
    hl.dapo(),
    hl.ppo(dual_clip=3.0),
    hl.ppo(dual_clip=1.1),
    hl.bnpo().weighted("w").where("keep"),
    hl.grpo() + 0.3 * hl.dapo() - 0.1 * hl.entropy() + hl.reinforce(),
    hl.cross_entropy(label_smoothing=0.1).where("keep") + hl.cross_entropy().weighted("w"),
    hl.reinforce() - 0.2 * hl.kl(),
    declared(tau=3.0),
    inverse_ratio() + no_lower(),
]


@pytest.mark.parametrize("objective", CLIPPED, ids=repr)
def test_closed_form_slopes_equal_autograd(objective):
    """The closed-form derivatives of policy terms equal autograd's, for ratios on both sides of
    each clip bound, at 1, and beyond the clamp."""
    batch, inside = packed()
    objective = Objective.of(objective)
    assert has_slopes(objective, inside.kinds())
    logp = batch.old_logps + 0.6 * torch.randn(T, dtype=torch.float64)
    logp[:20] = batch.old_logps[:20]
    bound = torch.ones((), requires_grad=True)
    bound.clamp(max=1.0).backward()
    if "epsilon_low=0.0" in repr(objective) and not bound.grad:
        logp[:20] += 1e-3  # since torch 2.14 a clamp has no gradient at its bound
    logp[20:30] += 30
    logp[30:40] -= 30
    stats = Statistics(
        logp=logp,
        lse=torch.rand_like(logp),
        entropy=torch.rand_like(logp),
        mean_logit=torch.rand_like(logp),
    )
    bound = bind(objective, inside, Totals.of(batch), 10, torch.float64)
    want = bound.coefficients(stats, inside, None).softmax
    closed = replace(bound, closed=True).coefficients(stats, inside, None).softmax
    for name, value in want.tensors().items():
        torch.testing.assert_close(getattr(closed, name), value, rtol=1e-12, atol=1e-15)
    (c, *_), slopes = replace(bound, upstream=2.0).beforehand(inside, frozenset(stats.tensors()))
    slope = torch.zeros_like(logp)
    for rate, anchor, low, high, sign in () if slopes is None else slopes:
        slope += torch.where(
            (logp >= low) & (logp <= high), rate * (sign * (logp - anchor)).exp(), 0
        )
    zero = torch.zeros_like(logp)
    entropy = zero if c.entropy is None else c.entropy
    found = {
        "target": slope + (zero if c.target is None else c.target),
        "prob": (zero if c.prob is None else c.prob) + entropy * stats.entropy - slope,
        "entropy": entropy,
        "uniform": zero if c.uniform is None else c.uniform,
    }
    for name, value in found.items():
        other = getattr(want, name)
        other = zero if other is None else 2 * other
        torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-15)
