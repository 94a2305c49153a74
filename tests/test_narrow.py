"""Calls with hidden width at most 256 (the `narrow` schedule) are correct for objectives of any
scope, with PyTorch twins in place of kernels.

T tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import twins

import headloss as hl
from headloss import kernels
from headloss.engine.plan import make_plan
from headloss.engine.plan_inputs import PlanInputs
from headloss.testing import plain, trained_looking

T, V, H = 24, 60, 8
NARROW = hl.Options(schedule="narrow")
OBJECTIVES = {
    "ce": hl.cross_entropy() + 1e-2 * hl.z_loss(),
    "grpo, entropy": hl.grpo() - 0.1 * hl.entropy(),
    "gspo": hl.gspo(epsilon_low=0.2, epsilon_high=0.2),
    "smoothed": hl.cross_entropy(label_smoothing=0.1),
}


@pytest.fixture(autouse=True)
def through_twins(monkeypatch):
    monkeypatch.setattr(kernels, "choose", lambda *_: "triton")
    monkeypatch.setattr(kernels, "load", lambda _: twins)


def problem(dtype: torch.dtype, **options):
    """Return hidden states, a head with padded rows and a bias, and a batch with rows without
    gradient."""
    hidden, weight, targets = trained_looking(T, H, V, dtype, "cpu")
    weight = torch.cat([weight, torch.full((4, H), torch.nan, dtype=dtype)])
    bias = torch.cat([torch.randn(V), torch.full((4,), torch.nan)]).to(dtype).requires_grad_()
    targets[5] = -100
    head = hl.Head(weight.requires_grad_(), bias=bias, vocab_size=V, **options)
    segments = hl.Segments.from_lengths(torch.tensor([10, 9, 5]))
    advantages = torch.tensor([1.0, 0.0, -2.0])
    batch = hl.Batch(targets, segments, advantages, old_logps=torch.randn(T) / 9 - 4)
    return hidden.requires_grad_(), head, batch


def error(mine: torch.Tensor, oracle: torch.Tensor) -> float:
    return float((mine.double() - oracle).norm() / oracle.norm())


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("form", ["plain", "capped", "tokens' temperatures"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_any_objective(dtype, form, name):
    options = {"softcap": 9.0, "logit_scale": 0.7} if form == "capped" else {}
    if form == "tokens' temperatures":
        options = {"temperature": torch.linspace(0.6, 1.5, T)}
    hidden, head, batch = problem(dtype, **options)
    objective = OBJECTIVES[name]
    oracle = plain(hidden, head, batch, objective, "float64")
    coarse = plain(hidden, head, batch, objective, "input")
    out = hl.head_loss(hidden, head, batch, objective, NARROW)
    assert out.plan.schedule == "narrow" and out.plan.on_chip
    assert out.plan.keeps_sums is (name in ("ce", "gspo"))
    out.loss.backward()
    floor = 1e-11 if dtype == torch.float64 else 1e-2
    for key, leaf in {"hidden": hidden, "weight": head.weight, "bias": head.bias}.items():
        want = oracle.gradients[key]
        assert error(leaf.grad, want) <= 3 * error(coarse.gradients[key], want) + floor, key
    assert not head.weight.grad[V:].any() and not hidden.grad[5].any()


@pytest.mark.parametrize("more", [{"static": True}, {"metrics": False}, {"frozen": True}])
def test_options(more):
    """The `narrow` schedule supports static shapes, disabled metrics, and a frozen weight with a
    trained bias."""
    hidden, head, batch = problem(torch.float64)
    if more.pop("frozen", False):
        head = hl.Head(head.weight.detach(), bias=head.bias, vocab_size=V)
    oracle = plain(hidden, head, batch, hl.cross_entropy(), "float64")
    options = hl.Options(schedule="narrow", **more)
    hl.head_loss(hidden, head, batch, hl.cross_entropy(), options).loss.backward()
    for key, leaf in {"hidden": hidden, "weight": head.weight, "bias": head.bias}.items():
        if leaf.requires_grad:
            assert error(leaf.grad, oracle.gradients[key]) <= 1e-11


@pytest.mark.parametrize("gradients", [("logp",), ("logp", "entropy")])
def test_a_loss_elsewhere(gradients):
    hidden, head, batch = problem(torch.float64)
    stats = hl.head_stats(hidden, head, batch, NARROW, gradients)
    scored = batch.targets != -100
    loss = sum((getattr(stats, name)[scored] ** 2).sum() for name in gradients)
    loss.backward()
    leaves = hidden, head.weight[:V], head.bias[:V]
    x, w, b = (t.detach().clone().requires_grad_() for t in leaves)
    logps = (x @ w.t() + b).log_softmax(1)
    by_hand = (logps.gather(1, batch.targets.clamp(min=0)[:, None])[:, 0][scored] ** 2).sum()
    if "entropy" in gradients:
        by_hand = by_hand + ((logps.exp() * logps).sum(1)[scored] ** 2).sum()
    by_hand.backward()
    assert error(hidden.grad, x.grad) <= 1e-10 and error(head.weight.grad[:V], w.grad) <= 1e-10


def test_a_frozen_head_and_no_tokens():
    hidden, head, batch = problem(torch.float64)
    frozen = hl.Head(head.weight.detach(), vocab_size=V)
    out = hl.head_loss(hidden, frozen, batch, hl.cross_entropy(), NARROW)
    out.loss.backward()
    oracle = plain(hidden, frozen, batch, hl.cross_entropy(), "float64")
    assert error(hidden.grad, oracle.gradients["hidden"]) <= 1e-11
    none = hl.Batch(torch.full((T,), -100))
    hl.head_loss(hidden, hl.Head(head.weight), none, hl.cross_entropy(), NARROW).loss.backward()
    assert not head.weight.grad.any()


@hl.term
def first_candidate(stats, batch):
    return -stats.candidate_logps[:, 0]


def test_narrow_with_supports_or_candidates_is_refused():
    hidden, head, batch = problem(torch.float64)
    ids = batch.targets.clamp(min=0)[:, None]
    for field, term in (("support_ids", hl.cross_entropy()), ("candidate_ids", first_candidate())):
        with pytest.raises(ValueError, match='got "narrow", but want a call without candidates'):
            hl.head_loss(hidden, head, batch.with_fields(**{field: ids}), term, NARROW)
    beside = hl.Head(head.weight, beside=((hidden.detach(), head.weight.detach()),))
    with pytest.raises(ValueError, match='got "narrow", but want triton on a GPU, .* beside'):
        hl.head_loss(hidden, beside, batch, hl.cross_entropy(), NARROW)


@pytest.mark.parametrize("aligned", [True, False])
def test_candidates_of_any_head_beside_its_sweeps(monkeypatch, aligned):
    """Candidates work with any head that the `narrow` schedule supports, and log-probs have the
    same bits as without candidates.

    Among the supported heads are float16 heads, for which exp(z) of the logits z is not stored, and
    heads whose hidden width Triton's matmul does not support.
    """
    monkeypatch.setattr(kernels, "can_sweep", lambda *_: (True, True))
    monkeypatch.setattr(twins, "can_fuse", lambda *_: aligned)
    hidden, head, batch = problem(torch.float64)
    alone = hl.head_loss(hidden, head, batch, hl.cross_entropy())
    assert alone.plan.schedule == "narrow"
    ids = (batch.targets.clamp(min=0)[:, None] + torch.arange(1, 4)) % V
    batch = batch.with_fields(candidate_ids=ids)
    objective = hl.cross_entropy() + first_candidate()
    out = hl.head_loss(hidden, head, batch, objective)
    assert (out.plan.schedule, out.plan.exp_tiles, out.plan.on_chip) == ("recompute", False, True)
    assert torch.equal(alone.logps, out.logps)
    out.loss.backward()
    leaves = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    x, w, b = (t.detach()[:V].clone().requires_grad_() for t in leaves.values())
    logps = (x @ w.t() + b).log_softmax(1)
    scored = batch.targets != -100
    loss = -logps.gather(1, batch.targets.clamp(min=0)[:, None]) - logps.gather(1, ids[:, :1])
    loss[scored].mean().backward()
    for leaf, want in zip(leaves.values(), (x, w, b), strict=True):
        assert error(leaf.grad[:V], want.grad) <= 1e-10


def test_the_planner_takes_it_by_the_head_alone():
    """The planner chooses the `narrow` schedule by the head alone, for any number of tokens and any
    budget.

    A call with candidates cannot use the `narrow` schedule, but uses its statistics kernel.
    """
    of = {"width": 64, "vocabulary": 1 << 20, "on_chip": True, "by_sweeps": True, "on_gpu": True}
    of |= {"exp_tiles": True, "row_bytes": 2, "element_size": 2, "weight_size": 2}
    for tokens, scope in ((1, "token"), (1 << 17, "batch"), (4096, "external")):
        inputs = PlanInputs(tokens=tokens, scope=scope, lengths=[tokens], **of)
        plan = make_plan(inputs, hl.Options(memory_budget=1 << 33), "triton")
        assert plan.schedule == "narrow" and "stay on the chip" in plan.reason
        assert plan.total_bytes < 120 << 20
        apart = make_plan(replace(inputs, candidates=4), hl.Options(), "triton")
        assert (apart.schedule, apart.on_chip) == ("recompute", True)
        none = replace(inputs, input_gradient=False, weight_gradient=False)
        scored = make_plan(none, hl.Options(), "triton")
        assert (scored.schedule, scored.on_chip) == ("statistics", True)
