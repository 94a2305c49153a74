"""`head_function` agrees with float64 autograd through materialised logits, under the schedules
`one_pass`, `held` and `recompute`.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.engine import call as calls
from headloss.engine.plan import make_plan
from headloss.head import products
from headloss.testing import trained_looking, within_budget

B, L, H, V = 4, 5, 8, 37
OUT = ([0, 2, 3], [4, 0, 3])  # unscored positions
Loss = Callable[[Tensor, Tensor], Tensor]


def problem(dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets = trained_looking(B * L, H, V, dtype)
    targets = targets.view(B, L)
    targets[OUT] = -100
    hidden = hidden.view(B, L, H)
    hidden[OUT] = float("nan")
    return hidden, weight, targets


def losses() -> dict[str, Loss]:
    """Return losses as frameworks write them, on [B, L] log-probs and entropies with a mask, old
    log-probs and advantages."""
    _, _, targets = problem()
    generator = torch.Generator().manual_seed(2)
    mask = (targets != -100).double()
    old = -torch.rand(B, L, generator=generator, dtype=torch.float64)
    advantages = torch.randn(B, 1, generator=generator, dtype=torch.float64)

    def token(logps: Tensor, entropies: Tensor) -> Tensor:
        ratio = (logps - old.to(logps.dtype)).exp()
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return (-(surrogate + 0.01 * entropies) * mask).sum() / mask.sum()

    def sequence(logps: Tensor, entropies: Tensor) -> Tensor:
        mean = ((logps - old) * mask).sum(1) / mask.sum(1).clamp_min(1)
        bonus = (entropies * mask).sum(1).square().mean()
        return -(mean.exp() * advantages.squeeze(1)).mean() + bonus

    def whole(logps: Tensor, entropies: Tensor) -> Tensor:
        a = entropies.detach() - (entropies.detach() * mask).sum() / mask.sum()
        return -(logps * a * mask).sum() / (logps * mask).std() + entropies.amax()

    return {"token": token, "sequence": sequence, "whole": whole}


def by_logits(hidden: Tensor, weight: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    scored = targets != -100
    x = torch.where(scored.unsqueeze(-1), hidden, 0)
    log_p = hl.Head(weight).logits(x).log_softmax(-1)
    logp = log_p.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return loss(*(torch.where(scored, value, 0) for value in (logp, entropy)))


def run(dtype, verb, trained=("hidden", "weight")):
    hidden, weight, targets = problem(dtype)
    hidden = hidden.requires_grad_("hidden" in trained)
    weight = weight.requires_grad_("weight" in trained)
    loss = verb(hidden, weight, targets)
    loss.backward()
    return loss.detach(), [t.grad for t in (hidden, weight) if t.grad is not None]


def exact(loss: Loss, dtype, source=torch.float64):
    """Compute loss and gradients through materialised logits in `dtype`, from inputs rounded to the
    dtype `source`."""

    def verb(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return by_logits(hidden.to(dtype), weight.to(dtype), targets, loss)

    return run(source, verb)


CASES = [
    ("token", "token", {}, "one_pass"),
    ("token", "token", {"chunk_tokens": 3}, "one_pass"),
    ("token", "token", {"chunk_tokens": 3, "static": True}, "one_pass"),
    ("token", "token", {"schedule": "recompute"}, "recompute"),
    ("token", "sequence", {"chunk_tokens": 6}, "one_pass"),
    ("sequence", "sequence", {"chunk_tokens": 6}, "one_pass"),
    ("sequence", "sequence", {"schedule": "held", "chunk_tokens": 6}, "held"),
    ("sequence", "sequence", {"schedule": "recompute", "chunk_tokens": 2}, "recompute"),
    ("whole", None, {}, "held"),
    ("whole", None, {"schedule": "recompute", "chunk_tokens": 2}, "recompute"),
    ("sequence", None, {"static": True}, "held"),
]


@pytest.mark.parametrize(("name", "separable", "options", "schedule"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_against_float64(monkeypatch, name, separable, options, schedule, dtype):
    loss, ran = losses()[name], []

    def noted(*args):
        ran.append(make_plan(*args))
        return ran[-1]

    monkeypatch.setattr(calls, "make_plan", noted)

    def verb(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        batch, given = hl.Batch(targets), hl.Options(**options)
        return hl.head_function(hidden, hl.Head(weight), batch, loss, separable, given)

    value, gradients = run(dtype, verb)
    want, oracle = exact(loss, torch.float64, dtype)
    wide, _ = exact(loss, torch.float32, dtype)
    _, coarse = exact(loss, dtype, dtype)
    assert value.dim() == 0 and ran[0].schedule == schedule
    assert within_budget(value, want, wide)
    for got, true, other in zip(gradients, oracle, coarse, strict=True):
        assert within_budget(got, true, other)
    assert gradients[0][OUT].eq(0).all()


def test_float16():
    """Float16 gradients are accurate at a loss scale of 1e-7 for a loss declared separable over
    tokens."""
    loss = losses()["token"]

    def verb(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        given = hl.Head(weight), hl.Batch(targets), lambda *s: 1e-7 * loss(*s)
        return hl.head_function(hidden, *given, "token", hl.Options(chunk_tokens=3))

    _, gradients = run(torch.float16, verb)
    _, oracle = exact(lambda *s: 1e-7 * loss(*s), torch.float64, torch.float16)
    rounded = [t.to(torch.float16) for t in oracle]
    for got, true, other in zip(gradients, oracle, rounded, strict=True):
        assert within_budget(got, true, other)


@pytest.mark.parametrize(("separable", "chunks"), [("token", 6), ("sequence", 4), (None, 1)])
def test_the_number_of_products_and_calls(monkeypatch, separable, chunks):
    """`head_function` computes each logit once; it calls the user's loss once per chunk of tokens
    and once on all tokens."""
    count, calls, inner = {"logits": 0}, [], products.PLAIN.logits

    def counted(*args, **options):
        count["logits"] += len(args[0])
        return inner(*args, **options)

    loss = losses()["token"]

    def seen(logps: Tensor, entropies: Tensor) -> Tensor:
        calls.append(int((logps != 0).sum()))
        assert logps.shape == entropies.shape == (B, L)
        return loss(logps, entropies)

    monkeypatch.setattr(products.PLAIN, "logits", counted)
    hidden, weight, targets = problem()
    options = hl.Options(chunk_tokens=3) if separable else None
    args = (hl.Head(weight.requires_grad_()), hl.Batch(targets), seen, separable, options)
    hl.head_function(hidden.requires_grad_(), *args).backward()
    scored = B * L - 3
    assert count["logits"] == scored
    assert calls[-1] == scored and sum(calls[:-1]) == (scored if separable else 0)
    assert len(calls) == chunks + (separable is not None)


def test_what_it_catches():
    """A tensor in the loss function's closure that requires a gradient gets one or raises an error;
    a tensor that requires no gradient is a constant."""
    hidden, weight, targets = problem()
    head, batch = hl.Head(weight), hl.Batch(targets)
    x = hidden.nan_to_num(0).requires_grad_()
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    loss = losses()["token"]

    def scaled(logps: Tensor, entropies: Tensor) -> Tensor:
        return scale.square() * loss(logps, entropies)

    want = torch.autograd.grad(by_logits(x, weight, targets, scaled), (x, scale))
    got = torch.autograd.grad(hl.head_function(x, head, batch, scaled), (x, scale))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    for separable in ("token", "sequence"):
        with pytest.raises(ValueError, match=r"loss_fn: a tensor of shape \(\) that requires"):
            hl.head_function(x, head, batch, scaled, separable)


@pytest.mark.parametrize("separable", [None, "token"])
def test_without_a_gradient_and_of_nothing(separable):
    hidden, weight, targets = problem()
    loss = losses()["token"]
    with torch.no_grad():
        found = hl.head_function(hidden, hl.Head(weight), hl.Batch(targets), loss, separable)
    torch.testing.assert_close(found, by_logits(hidden, weight, targets, loss))
    assert not found.requires_grad
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    batch = hl.Batch(torch.full_like(targets, -100))
    hl.head_function(x, hl.Head(w), batch, loss, separable).backward()
    assert x.grad.eq(0).all() and w.grad.eq(0).all()


@pytest.mark.parametrize("separable", [None, "token"])
def test_upstream_and_main_grad(separable):
    hidden, weight, targets = problem(torch.float32)
    main_grad = torch.ones(V, H)
    given = {} if separable is None else {"upstream": 3.0}
    options = hl.Options(main_grad=main_grad, **given)
    loss = losses()["token"]
    head = hl.Head(weight.requires_grad_())
    found = hl.head_function(hidden, head, hl.Batch(targets), loss, separable, options)
    (3 * found).backward()
    _, (_, want) = exact(loss, torch.float64, torch.float32)
    torch.testing.assert_close(main_grad - 1, 3 * want, rtol=1e-4, atol=1e-5)
    assert weight.grad is None


def test_unsupported_loss_functions_are_refused_by_name():
    hidden, weight, targets = problem()
    x, head, batch = hidden.requires_grad_(), hl.Head(weight), hl.Batch(targets)
    loss = losses()["token"]

    def call(fn: object, separable: object = "token", **options: object) -> Tensor:
        return hl.head_function(x, head, batch, fn, separable, hl.Options(**options))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="separable: got 'segment', want"):
        call(loss, "segment")
    with pytest.raises(TypeError, match="loss_fn: got int, want a function"):
        call(3)
    with pytest.raises(TypeError, match="loss_fn: got type, want a function"):
        call(torch.nn.Linear)
    for separable in ("token", None):
        with pytest.raises(ValueError, match=r"loss_fn: returned \(4, 5\), want a floating scalar"):
            call(lambda logps, entropies: logps, separable)
        with pytest.raises(ValueError, match="loss_fn: returned float"):
            call(lambda logps, entropies: 0.5, separable)
    with pytest.raises(ValueError, match="loss_fn: its value has no gradient"):
        call(lambda logps, entropies: logps.detach().sum())
    with pytest.raises(ValueError, match="frozen"):
        call(loss, schedule="frozen")
    with pytest.raises(ValueError, match="one_pass.*lives elsewhere"):
        call(loss, None, schedule="one_pass")
