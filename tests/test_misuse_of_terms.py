"""A term that has no gradient or returns wrong values raises an error, and so does a mask in the
batch that no term reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_calls import H, T, V, batch, head, hidden, term

import headloss as hl

# ---------------------------------------------------------------------- objectives


DEAD = {
    "detached": lambda stats, batch: stats.logp.detach(),
    "constant": lambda stats, batch: torch.ones(len(batch)),
    "top1": lambda stats, batch: stats.top1,
}
SCHEDULES = [{}, {"schedule": "one_pass"}, {"schedule": "recompute"}, {"chunk_tokens": 2}]


@pytest.mark.parametrize("options", [*SCHEDULES, {"static": True}, {"metrics": False}], ids=str)
@pytest.mark.parametrize("name", DEAD)
def test_an_objective_without_gradient_is_refused_by_name(name: str, options: dict) -> None:
    match = r"objective: 1 \* mine\(\) has no gradient with respect to any statistic"
    with pytest.raises(ValueError, match=match):
        hl.head_loss(hidden(), head(), batch(), term(DEAD[name]), hl.Options(**options))
    with pytest.raises(ValueError, match=match):
        hl.logits_loss(torch.randn(T, V, requires_grad=True), batch(), term(DEAD[name]))
    x, w = hidden().detach(), head()
    with torch.no_grad():  # a term without gradient is an error only if gradients are needed
        out = hl.head_loss(x, w, batch(), term(DEAD[name]), hl.Options(**options))
    stats = hl.head_stats(x, w, torch.arange(T))
    want = {"detached": stats.logp.mean(), "constant": torch.ones(())}.get(name)
    if want is not None:
        torch.testing.assert_close(out.loss, want)


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_a_dead_term_beside_a_live_one(options: dict) -> None:
    x, h, b = hidden(), head(), batch()
    both = term(DEAD["detached"]) + hl.cross_entropy()
    got = hl.head_loss(x, h, b, both, hl.Options(**options))
    want = hl.head_loss(x, h, b, hl.cross_entropy(), hl.Options(**options))
    gradients = (torch.autograd.grad(out.loss, (x, h.weight)) for out in (got, want))
    for a, c in zip(*gradients, strict=True):
        torch.testing.assert_close(a, c)
    assert float(got.loss.detach()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_a_gradient_that_depends_on_the_batch_may_be_zero(options: dict) -> None:
    """A term whose gradient is zero for this batch raises no error if the gradient is nonzero on
    the made-up tokens with which headloss tries a new term."""

    def sometimes(stats, batch):
        return stats.logp if bool((batch.advantages < 0).any()) else stats.logp.detach()

    x, h, b = hidden(), head(), batch(advantages=torch.ones(T))
    out = hl.head_loss(x, h, b, term(sometimes), hl.Options(**options))
    out.loss.backward()
    assert not x.grad.any() and not h.weight.grad.any()
    torch.testing.assert_close(out.loss.detach(), out.logps.mean())


# ---------------------------------------------------------------------- observed values


def seen(values: Any = None, **given: Any) -> Callable:
    def observe(stats, batch):
        return {"x": hl.Observed(stats.logp if values is None else values(batch), **given)}

    return observe


WRONG: dict[str, tuple[type, Any, str]] = {
    "float": (TypeError, lambda s, b: {"x": 1.0}, "'x': got float, want .* headloss.Observed"),
    "mean": (
        TypeError,
        lambda s, b: {"x": hl.Mean(s.logp.sum(), torch.ones(()))},
        "'x': got Mean, want .* headloss.Observed",
    ),
    "tensor": (TypeError, lambda s, b: {"x": s.logp}, "'x': got Tensor, want"),
    "list": (TypeError, lambda s, b: [hl.Observed(s.logp)], "returned list, want a dict"),
    "nothing": (TypeError, lambda s, b: None, "returned NoneType, want a dict"),
    "number for a name": (TypeError, lambda s, b: {3: hl.Observed(s.logp)}, "3: got Observed"),
    "kind's name": (TypeError, seen(kind="mean"), "'x': kind: got 'mean', want Mean"),
    "kind": (TypeError, seen(kind=hl.Metrics), "'x': kind: got .*Metrics.*, want Mean"),
    "per": (ValueError, seen(per="row"), "'x': per: got 'row', want \"token\" or \"segment\""),
    "a number": (TypeError, seen(lambda b: 2.0), "'x': values: got .*float.*, want a tensor"),
    "complex": (
        TypeError,
        seen(lambda b: torch.ones(len(b), dtype=torch.complex64)),
        "'x': values: got torch.complex64",
    ),
    "0-dim": (ValueError, seen(lambda b: torch.ones(())), r"'x': values: got shape \(\), want"),
    "columns": (ValueError, seen(lambda b: torch.ones(len(b), 2)), "'x': values: got shape"),
    "length": (ValueError, seen(lambda b: torch.ones(len(b) + 1)), "'x': values: got shape"),
    # headloss first tries a term on a sample batch of two tokens, and accepts two returned values.
    # For the caller's batch of six tokens, two returned values are too few.
    "a fixed length": (ValueError, seen(lambda b: torch.ones(2)), r"got shape \(2,\), want \(6,\)"),
    "of segments": (ValueError, seen(lambda b: torch.ones(len(b)), per="segment"), "got shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_observe_returns_is_checked(name: str) -> None:
    kind, observe, match = WRONG[name]
    objective = term(lambda stats, batch: -stats.logp, observe=observe)
    with pytest.raises(kind, match=f"term mine: observe: .*{match}|term mine: observe: {match}"):
        hl.head_loss(hidden(), head(), batch(), objective)
    out = hl.head_loss(hidden(), head(), batch(), objective, hl.Options(metrics=False))
    assert out.loss.isfinite() and not out.metrics


def test_observe_is_a_function() -> None:
    with pytest.raises(TypeError, match="observe: got int, want a function"):
        hl.term(observe=3)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- unread fields

ZERO = ("mask", "attention_mask", "loss_mask", "completion_mask", "weights")
ZERO += ("labels_mask", "Mask_of_answers")


@pytest.mark.parametrize("name", [*ZERO, "labels"])
def test_a_mask_that_no_term_reads(name: str) -> None:
    """A mask that no term reads raises an error only if it excludes a scored token."""
    x, h, objective = hidden(), head(), hl.cross_entropy()
    out = -100 if name == "labels" else 0
    values = torch.tensor([2, 1, out, 5, 1, out])
    kept = values != out
    for given in (values, values.double()) if name == "labels" else (values, values.double(), kept):
        wrong = batch(**{name: given})
        match = rf"{name}: got {out} at position 2, which is scored, as no term reads {name}; .*100"
        for metrics in (True, False):  # call twice: the error must not depend on an earlier call
            with pytest.raises(ValueError, match=match):
                hl.head_loss(x, h, wrong, objective, hl.Options(metrics=metrics))
        with pytest.raises(ValueError, match=match):
            hl.logits_loss(torch.randn(T, V), wrong, objective)
        # `head_stats` and `head_function` have no term, so they raise no error for a mask in the
        # batch: their caller may apply the mask to the statistics.
        hl.head_stats(x, h, wrong)
        hl.head_function(x, h, wrong, lambda logps, entropies: -logps.mean(), separable="token")
        targets = torch.arange(T).masked_fill(~kept, -100)
        agrees = hl.Batch(targets, **{name: given})
        got = hl.head_loss(x, h, agrees, objective).loss
        assert torch.equal(got, hl.head_loss(x, h, hl.Batch(targets), objective).loss)
    rows = hl.Batch(torch.arange(T).view(2, 3), **{name: values.view(2, 3)})
    with pytest.raises(ValueError, match=rf"{name}: got {out} at position 2"):
        hl.head_loss(x.view(2, 3, H), h, rows, objective)


def test_a_mask_that_a_term_reads() -> None:
    x, h = hidden(), head()
    kept = torch.tensor([True, True, False, True, True, False])
    both = batch(mask=kept, weights=kept.float())
    read = hl.cross_entropy().where("mask") + hl.z_loss().weighted("weights")
    # The term `entropy` reads neither `mask` nor `weights`, but the objective's other terms do.
    hl.head_loss(x, h, both, read + hl.entropy())
    # No error: the batch's fields were read by the previous call's objective.
    hl.head_loss(x, h, both, hl.entropy())
    hl.head_loss(x, h, both.with_fields(old_logps=hl.CURRENT), hl.entropy())
    with pytest.raises(ValueError, match="mask: got 0"):
        hl.head_loss(x, h, batch(mask=kept), hl.entropy())
    segments = hl.Segments.from_lengths([4, 2])
    given = hl.Batch(torch.arange(T), segments, weights=torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="weights: got 0 at position 4"):
        hl.head_loss(x, h, given, hl.entropy())
    hl.head_loss(x, h, given, hl.entropy().weighted("weights"))
    wide = batch(mask=torch.zeros(T, 2))  # not a per-token mask
    hl.head_loss(x, h, wide, hl.entropy())


# ---------------------------------------------------------------------- means inside a term

PARTS = {
    "logp": lambda stats, batch: stats.logp - stats.logp.mean(),
    "entropy": lambda stats, batch: stats.logp * stats.entropy.sum(),
    "field": lambda stats, batch: stats.logp * (batch.w - batch.w.mean()),
    "count": lambda stats, batch: stats.logp / len(batch),
    "mask": lambda stats, batch: stats.logp * batch.kept / batch.kept.sum(),
    "neighbour": lambda stats, batch: stats.logp - stats.logp.roll(1).detach(),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_mean_inside_a_term_is_noticed(name: str) -> None:
    given = batch(w=torch.rand(T), kept=torch.ones(T, dtype=torch.bool))
    match = 'term mine: differs by .* scope is "{}", .* another position .*'
    match += ' as a field of the batch, or declare scope="batch"'
    for options in (hl.Options(), hl.Options(chunk_tokens=2)):
        with pytest.raises(ValueError, match=match.format("token")):
            hl.head_loss(hidden(), head(), given, term(PARTS[name]), options)
    with pytest.raises(ValueError, match=match.format("segment")):
        hl.head_loss(hidden(), head(), given, term(PARTS[name], scope="segment"))
    x, h = hidden(), head()
    whole, cut = (
        hl.head_loss(x, h, given, term(PARTS[name], scope="batch"), options).loss
        for options in (hl.Options(), hl.Options(chunk_tokens=2))
    )
    torch.testing.assert_close(whole, cut)


def test_terms_of_ones_own_that_may_be_cut() -> None:
    """User-defined terms of scope "token" or "segment" are tried once on made-up tokens, and then
    give correct losses."""
    calls = []

    def mine(stats, batch, tau=1.0):
        calls.append(len(batch))
        return -tau * stats.logp * batch.advantages

    def per_segment(stats, batch):
        return -batch.segments.mean(stats.logp)

    x, h, given = hidden(), head(), batch(advantages=torch.rand(T))
    for _ in range(3):
        out = hl.head_loss(x, h, given, hl.term(mine)(tau=2.0), hl.Options(metrics=False))
    torch.testing.assert_close(out.loss, -2 * (out.logps * given.advantages).mean())
    # A new term is tried on two made-up tokens, one at a time, and only in the first call.
    assert calls.count(1) == 2
    segments = hl.Segments.from_lengths([4, 2])
    out = hl.head_loss(
        x, h, hl.Batch(torch.arange(T), segments), term(per_segment, scope="segment", per="segment")
    )
    torch.testing.assert_close(out.loss, -segments.mean(out.logps).mean())
