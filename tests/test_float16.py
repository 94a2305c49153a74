"""Float16 logit gradients are scaled to avoid underflow and overflow, and scaled back at the
end."""

from __future__ import annotations

import pytest
import torch
from test_edges import SCHEDULES, options
from triton_cases import DEVICE

import headloss as hl
from headloss.objective.weighted import power_of_two
from headloss.testing import error, plain, trained_looking, within_budget

STEEP = {
    "temperature": {"temperature": 1e-3},
    "temperatures": {"temperature": torch.linspace(1e-3, 1.0, 12)},
    "logit_scale": {"logit_scale": -1e3},
}


@pytest.mark.parametrize("verb", ["one_pass", "held", "frozen", "head_stats", "frozen stats"])
@pytest.mark.parametrize("steep", STEEP)
def test_a_steep_head_does_not_overflow_in_float16(steep, verb):
    """The float16 gradient of a head with a large logit scale is correct, although an intermediate
    result without scaling would overflow float16."""
    weight = (60 * torch.randn(40, 16)).half()
    hidden = (5e-6 * torch.randn(12, 16)).half().requires_grad_()
    batch, frozen = hl.Batch(torch.arange(12)), "frozen" in verb
    head = hl.Head(weight.requires_grad_(not frozen), **STEEP[steep])
    if "stats" in verb:
        found = hl.head_stats(hidden, head, batch, gradients=["logp"])
        assert (found.plan.schedule == "frozen") is frozen
        loss = -found.logp.mean()
    else:
        loss = hl.head_loss(hidden, head, batch, hl.cross_entropy(), options(verb)).loss
    loss.backward()
    want = plain(hidden, head, batch, hl.cross_entropy()).gradients["hidden"]
    assert 1e3 < want.abs().max() < 6e4
    assert within_budget(hidden.grad, want, want.half())


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e6])
def test_a_teacher_in_float16_under_any_temperature_of_the_head(temperature):
    """A distillation term's temperature replaces the head's temperature in float16."""
    hidden = torch.randn(12, 16).half().requires_grad_()
    head = hl.Head((torch.randn(40, 16) / 10).half(), temperature=temperature)
    batch = hl.Batch(torch.arange(12), teacher_logits=3 * torch.randn(12, 40).half())
    hl.head_loss(hidden, head, batch, hl.distillation()).loss.backward()
    x = hidden.detach().double().requires_grad_()
    log_p, log_q = ((x @ head.weight.double().T), batch.teacher_logits.double())
    log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    (log_q.exp() * (log_q - log_p)).sum(-1).mean().backward()
    assert (hidden.grad - x.grad).norm() < 2e-3 * x.grad.norm()


@pytest.mark.parametrize("upstream", [1.0, 256.0])
@pytest.mark.parametrize("schedule", ["one_pass", "held", "recompute"])
def test_tokens_of_one_target_do_not_overflow_in_float16(schedule, upstream):
    """Gradients of many tokens with one target do not overflow, although their undivided sum
    exceeds float16."""
    hidden = (100 + 20 * torch.randn(2048, 8)).half().requires_grad_()
    head = hl.Head((torch.randn(11, 8) / 100).half().requires_grad_())
    batch = hl.Batch(torch.full((2048,), 3))
    out = hl.head_loss(hidden, head, batch, hl.cross_entropy(), options(schedule))
    wide = "weight gradient slab" if schedule == "recompute" else "weight gradient accumulator"
    assert out.plan.bytes[wide] == 4 * head.weight.numel()
    (upstream * out.loss).backward()
    exact = plain(hidden, head, batch, hl.cross_entropy(), upstream=upstream).gradients
    assert exact["weight"].abs().max() > 30 * upstream
    for leaf, want in ((hidden, exact["hidden"]), (head.weight, exact["weight"])):
        assert within_budget(leaf.grad, want, want.half())


@pytest.mark.parametrize("size", [1e-4, 1.0])
@pytest.mark.parametrize("upstream", [None, 65536.0])
def test_large_advantages_and_a_declared_upstream_gradient_stay_within_float16(upstream, size):
    hidden = (size * (1 + torch.randn(2048, 8).abs())).half().requires_grad_()
    head = hl.Head(torch.randn(11, 8).half().requires_grad_())
    batch = hl.Batch(torch.full((2048,), 3), advantages=torch.full((2048,), 2000.0))
    objective = hl.reinforce() / (upstream or 1.0)
    out = hl.head_loss(hidden, head, batch, objective, hl.Options(upstream=upstream))
    (out.loss * (upstream or 1.0)).backward()
    exact = plain(hidden, head, batch, hl.reinforce()).gradients
    for leaf, want in ((hidden, exact["hidden"]), (head.weight, exact["weight"])):
        assert within_budget(leaf.grad, want, want.half())


@pytest.mark.parametrize("margin", [8.0, 12.0, 15.0])
def test_a_frozen_head_keeps_the_digits_of_a_token_near_p_1_in_float16(margin):
    """The `frozen` schedule gives accurate float16 gradients of a token near p = 1, where d logp/dz
    is about 1 - p and unlikelihood's derivative about 1 / (1 - p)."""
    hidden, weight = torch.zeros(2, 16).half(), (torch.eye(16) * 2**-6).half()
    hidden[0, 3], hidden[0, 5] = 64 * margin, -16
    head, batch = hl.Head(weight), hl.Batch(torch.tensor([3, 1]))
    hidden.requires_grad_()
    hl.head_loss(hidden, head, batch, hl.unlikelihood(), options("frozen")).loss.backward()
    exact = plain(hidden, head, batch, hl.unlikelihood()).gradients["hidden"]
    off = (hidden.grad - exact).norm(dim=1)
    assert (off <= 2e-3 * exact.norm(dim=1)).all()


@pytest.mark.parametrize("chunk_tokens", [None, 8])
@pytest.mark.parametrize("upstream", [65536.0, 2.0, 2**-20])
def test_a_declared_upstream_gradient_leaves_float16_its_digits(upstream, chunk_tokens):
    """If the upstream gradient is passed as an option, float16 gradients are accurate even if
    chunks are scaled before all statistics are known."""
    hidden, weight = torch.randn(64, 16).half(), torch.randn(97, 16).half()
    head = hl.Head(weight.requires_grad_())
    batch, objective = hl.Batch(torch.randint(97, (64,))), hl.cross_entropy() / upstream
    hidden.requires_grad_()
    given = hl.Options(schedule="one_pass", chunk_tokens=chunk_tokens, upstream=upstream)
    (hl.head_loss(hidden, head, batch, objective, given).loss * upstream).backward()
    exact = plain(hidden, head, batch, hl.cross_entropy()).gradients
    for leaf, want in ((hidden, exact["hidden"]), (weight, exact["weight"])):
        assert error(leaf.grad, want) <= 1.2 * error(want.half(), want)


SIZES = {
    "small": lambda n: torch.full((n,), 0.01),
    "one": torch.ones,
    "large": lambda n: torch.full((n,), 1e3),
    "falling": lambda n: 10.0 ** torch.linspace(3, -2, n),
    "rising": lambda n: 10.0 ** torch.linspace(-2, 3, n),
    # all advantages in every second chunk are 0
    "gaps": lambda n: 0.01 * (torch.arange(n) // 8 % 2),
}


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["one_pass", "held", "recompute", "frozen"])
@pytest.mark.parametrize("upstream", [1.0, 65536.0, "declared"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["policy", "weighted"])
def test_advantages_from_a_hundredth_to_a_thousand_leave_float16_its_digits(
    kind, size, upstream, schedule
):
    """Advantages between 0.01 and 1000 give gradients of float16's full accuracy, also if their
    size differs from chunk to chunk."""
    hidden, weight, targets = torch.randn(64, 16), torch.randn(97, 16), torch.randint(97, (64,))
    hidden, weight, advantages = hidden.half(), weight.half(), SIZES[size](64)
    logps = plain(hidden, hl.Head(weight), hl.Batch(targets), hl.cross_entropy()).logps.float()
    batch = hl.Batch(targets, advantages=advantages, old_logps=logps + 0.1 * torch.randn(64))
    objective = hl.grpo() if kind == "policy" else hl.cross_entropy().weighted("advantages")
    declared, times = (65536.0, 65536.0) if upstream == "declared" else (None, upstream)
    given = options(schedule, chunk_tokens=8, upstream=declared)
    leaf = hidden.clone().requires_grad_()
    head = hl.Head(weight.requires_grad_(schedule != "frozen"), bias=torch.zeros(97).half())
    head.bias.requires_grad_(schedule != "frozen")
    # For tiny advantages the factor `times` is not divided out, because the exact gradient would
    # underflow in float16.
    owed = 1.0 if declared or size not in ("small", "gaps") else times
    objective = objective * (owed / times)
    (hl.head_loss(leaf, head, batch, objective, given).loss * times).backward()
    exact = plain(leaf, head, batch, objective, upstream=times).gradients
    for name, want in exact.items():
        found = {"hidden": leaf, "weight": weight, "bias": head.bias}[name].grad
        assert within_budget(found, want, want.half()), name


@pytest.mark.parametrize("schedule", ["one_pass", "held", "recompute", "frozen"])
@pytest.mark.parametrize(("far", "digits"), [(1e-5, 0.1), (1e-4, 0.01), (3e4, 1e-3)])
def test_advantages_far_from_one_lose_digits_and_no_more(far, digits, schedule):
    """In float16, advantages far from 1 make gradients less accurate, within the limits stated in
    docs/limits.md. Multiplying a term by a number far from 1 costs no accuracy."""
    hidden, weight, targets = trained_looking(64, 16, 97, torch.float16)
    weight.requires_grad_(schedule != "frozen")
    gradients = {}
    for size in (far, 1.0):
        leaf, weight.grad = hidden.clone().requires_grad_(), None
        batch = hl.Batch(targets, advantages=torch.full((64,), size))
        objective, given = hl.reinforce() * (far / size), options(schedule, chunk_tokens=8)
        (hl.head_loss(leaf, hl.Head(weight), batch, objective, given).loss / far).backward()
        gradients[size] = {"hidden": leaf.grad, "weight": weight.grad}
    exact = plain(leaf, hl.Head(weight), batch, objective, upstream=1 / far).gradients
    for name, want in exact.items():
        assert error(gradients[far][name], want) < digits, name
        assert within_budget(gradients[1.0][name], want, want.half()), name


@pytest.mark.parametrize("schedule", ["one_pass", "held", "recompute"])
@pytest.mark.parametrize("margin", [8.0, 12.0])
def test_a_token_near_p_1_leaves_others_their_digits_in_float16(schedule, margin):
    """In float16, a target with probability p near 1 does not make other tokens' gradients
    inaccurate, although its gradient coefficient p / (1 - p) is large."""
    weight, targets = torch.randn(11, 8).half(), torch.randint(11, (64,))
    hidden = 3 * torch.randn(64, 8)
    hidden[0], targets[0] = torch.linalg.pinv(weight.float())[:, 3], 3
    hidden[0] *= margin / (weight[3].float() @ hidden[0])
    hidden = hidden.half().requires_grad_()
    head, batch = hl.Head(weight.requires_grad_()), hl.Batch(targets)
    hl.head_loss(hidden, head, batch, hl.unlikelihood(), options(schedule)).loss.backward()
    exact = plain(hidden, head, batch, hl.unlikelihood()).gradients["hidden"][1:]
    off = (hidden.grad[1:] - exact).norm(dim=1)
    assert (exact.norm(dim=1) < 1e-3).any()
    assert (off <= 2e-3 * exact.norm(dim=1) + 1e-7).all()


@pytest.mark.parametrize("schedule", ["one_pass", "held", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weight_gradients_are_summed_in_float16(dtype, schedule):
    """With `accumulate_dtype` float16, weight gradients summed over several chunks are accurate for
    hidden states and upstream gradients of any scale."""
    hidden = (2 * torch.randn(1000, 8)).to(dtype).requires_grad_()
    head = hl.Head(torch.randn(11, 8).to(dtype).requires_grad_())
    batch = hl.Batch(torch.arange(1000) % 11)
    how = hl.Options(schedule=schedule, chunk_tokens=200, accumulate_dtype=torch.float16)
    hl.head_loss(hidden, head, batch, hl.cross_entropy(), how).loss.backward()
    exact = plain(hidden, head, batch, hl.cross_entropy()).gradients["weight"]
    assert (head.weight.grad - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.parametrize("upstream", [1.0, 2.0])
@pytest.mark.parametrize("schedule", ["one_pass", "held", "recompute"])
def test_a_float16_adapter_beside_a_wider_weight(schedule, upstream):
    """A float16 LoRA next to a float32 weight gets an accurate gradient, without the scaling that
    float16 heads use."""
    hidden = (10 * torch.randn(300, 8)).requires_grad_()
    a, b = (torch.randn(*shape).half().requires_grad_() for shape in ((4, 8), (11, 4)))
    head = hl.Head(torch.randn(11, 8), lora=(hl.Lora(a=a, b=b, scaling=1.0),))
    batch = hl.Batch(torch.arange(300) % 11)
    out = hl.head_loss(hidden, head, batch, hl.cross_entropy(), options(schedule))
    (upstream * out.loss).backward()
    exact = plain(hidden, head, batch, hl.cross_entropy(), upstream=upstream).gradients
    for leaf, name in ((a, "lora0.a"), (b, "lora0.b")):
        assert within_budget(leaf.grad, exact[name], exact[name].half()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float64_adapter_widens_nothing_else(dtype):
    """A float64 adapter leaves the head's logits in float32."""
    hidden = torch.randn(7, 8, dtype=dtype)
    a, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 8), (11, 4)))
    head = hl.Head(torch.randn(11, 8, dtype=dtype), lora=(hl.Lora(a=a, b=b, scaling=1.0),))
    out = hl.head_loss(hidden, head, hl.Batch(torch.arange(7)), hl.cross_entropy())
    assert out.logps.dtype == torch.float32


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "held"])
def test_small_weights_of_rows_of_their_own(schedule):
    """With `batch_invariant`, small float16 weights give accurate gradients."""
    looking = trained_looking(12, 32, 75, torch.float16)
    hidden, weight, targets = (tensor.to(DEVICE) for tensor in looking)
    batch = hl.Batch(targets, totals=hl.Totals(tokens=16384, segments=1))
    head = hl.Head(weight.requires_grad_())
    chosen = hl.Options(backend="triton", schedule=schedule, batch_invariant=True)
    hl.head_loss(hidden.requires_grad_(), head, batch, hl.cross_entropy(), chosen).loss.backward()
    exact = plain(hidden, head, batch, hl.cross_entropy()).gradients
    for name, leaf in (("hidden", hidden), ("weight", weight)):
        assert within_budget(leaf.grad, exact[name], exact[name].half()), name


@pytest.mark.parametrize("upstream", [1.0, 65536.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_small_weights_do_not_underflow_in_float16(schedule, upstream):
    """Token weights of 1/16384 do not underflow in float16.

    The upstream gradient may be the loss scale of a gradient scaler.
    """
    hidden, weight, targets = trained_looking(12, 64, 301, torch.float16)
    batch = hl.Batch(targets, totals=hl.Totals(tokens=16384, segments=1))
    hidden.requires_grad_()
    weight.requires_grad_(schedule != "frozen")
    head = hl.Head(weight)
    out = hl.head_loss(hidden, head, batch, hl.cross_entropy(), options(schedule, chunk_tokens=5))
    (upstream * out.loss).backward()
    exact = plain(hidden, head, batch, hl.cross_entropy(), upstream=upstream)
    # An error is compared with the error of rounding the exact gradient to float16.
    for name, leaf in (("hidden", hidden), ("weight", weight)):
        if not leaf.requires_grad:
            continue
        want = exact.gradients[name]
        assert leaf.grad.dtype == torch.float16
        rounded = want.half()
        assert rounded.count_nonzero() > 0
        assert within_budget(leaf.grad, want, rounded), name


@pytest.mark.parametrize("chunk_tokens", [4, None])
@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_weight_gradient_is_summed_in_any_dtype(dtype, sums, chunk_tokens):
    looking = trained_looking(12, 32, 75, dtype)
    hidden, weight, targets = (tensor.to(DEVICE) for tensor in looking)
    head, batch = hl.Head(weight.requires_grad_()), hl.Batch(targets)
    how = hl.Options(accumulate_dtype=sums, chunk_tokens=chunk_tokens)
    hl.head_loss(hidden, head, batch, hl.cross_entropy(), how).loss.backward()
    exact = plain(hidden, head, batch, hl.cross_entropy()).gradients["weight"]
    assert error(weight.grad, exact) < 2 * max(torch.finfo(t).eps for t in (dtype, sums))


@pytest.mark.parametrize("verb", ["head_loss", "head_stats"])
def test_nothing_scored_in_float16(verb):
    """A float16 call without scored tokens gives zero gradients, although no gradient coefficient
    exists from which a scale could be chosen."""
    hidden, weight, _ = (tensor.to(DEVICE) for tensor in trained_looking(12, 32, 75, torch.float16))
    targets = torch.full((12,), -100, device=DEVICE)
    hidden, head = hidden.requires_grad_(), hl.Head(weight.requires_grad_())
    if verb == "head_stats":
        hl.head_stats(hidden, head, targets).logp.sum().backward()
    else:
        hl.head_loss(hidden, head, hl.Batch(targets), hl.cross_entropy()).loss.backward()
    assert not hidden.grad.any() and not weight.grad.any()
    assert power_of_two([torch.empty(0, device="meta")]).device.type == "meta"
