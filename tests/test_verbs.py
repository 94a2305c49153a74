"""`logits_loss`, `head_stats`, `head_topk`, `plan` and upstream gradients are correct."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headloss as hl
from headloss.testing import plain, random_batch, trained_looking, within_budget

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
T, H, V = 23, 8, 37
LENGTHS = [5, 9, 2, 7]
OBJECTIVES = [
    hl.gspo() + 0.1 * hl.kl(estimator="k3"),
    hl.grpo() + hl.cross_entropy(label_smoothing=0.1) + 0.01 * hl.z_loss() - 0.1 * hl.entropy(),
    hl.dpo(),
]


def problem(dtype=torch.float64):
    hidden, weight, targets = trained_looking(T, H, V, dtype)
    logps = (hidden.float() @ weight.float().T).log_softmax(-1)
    logps = logps.gather(1, targets.unsqueeze(1)).squeeze(1)
    targets[[2, 15]] = -100
    batch = random_batch(targets, hl.Segments.from_lengths(LENGTHS), logps)
    return hidden, weight, batch


# ---------------------------------------------------------------------- logits_loss


def by_autograd(logits: Tensor, batch, objective, dtype=torch.float64, **transform):
    """Return the objective on logits by plain autograd in `dtype`; the head is an identity
    matrix."""
    leaf = logits.detach().to(dtype).requires_grad_()
    head = hl.Head(torch.eye(logits.shape[-1], dtype=dtype), **transform)
    found = plain(leaf, head, batch, objective, mode="input")
    return found.loss, found.gradients["hidden"]


@pytest.mark.covering
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_loss(dtype, objective, inplace):
    """`logits_loss` agrees with float64 in loss and gradient, with NaN at unscored positions."""
    hidden, weight, batch = problem()
    logits = (hidden @ weight.T).to(dtype).requires_grad_()
    exact = by_autograd(logits, batch, objective)
    rounded = by_autograd(logits, batch, objective, torch.float32)[1].to(dtype)
    unscored = batch.targets == -100
    logits.data[unscored] = torch.nan
    out = hl.logits_loss(logits, batch, objective, inplace=inplace)
    assert out.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.loss.detach().double(), exact[0], rtol=2e-6, atol=1e-7)
    (3.7 * out.loss).backward()
    assert logits.grad.dtype == dtype
    assert within_budget(logits.grad, 3.7 * exact[1], 3.7 * rounded)
    assert logits.grad[unscored].eq(0).all()


@pytest.mark.parametrize("objective", [hl.cross_entropy(), hl.grpo()])
def test_inplace_writes_into_the_logits(objective):
    """`inplace` overwrites the logits, even at tokens without gradient."""
    hidden, weight, batch = problem(torch.float32)
    advantages = batch.advantages.clone()
    advantages[1] = 0
    batch = batch.with_fields(advantages=advantages)
    leaf = hidden.requires_grad_()
    logits = leaf @ weight.T
    address = logits.data_ptr()
    seen = []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    hl.logits_loss(logits, batch, objective, inplace=True).loss.backward()
    assert seen == [address]
    want = plain(hidden, hl.Head(weight), batch, objective)
    assert within_budget(hidden.grad, want.gradients["hidden"], want.gradients["hidden"].float())


@pytest.mark.parametrize("schedule", ["auto", "one_pass", "recompute"])
def test_schedules_of_given_logits(schedule):
    hidden, weight, batch = problem()
    logits = (hidden @ weight.T).requires_grad_()
    loss, gradient = by_autograd(logits, batch, OBJECTIVES[0])
    for chunk in (None, 1, 4, 100):
        options = hl.Options(schedule=schedule, chunk_tokens=chunk)
        out = hl.logits_loss(logits, batch, OBJECTIVES[0], options=options)
        torch.testing.assert_close(out.loss.detach(), loss)
        torch.testing.assert_close(torch.autograd.grad(out.loss, logits)[0], gradient)


@pytest.mark.parametrize("inplace", [False, True])
def test_logits_that_no_view_makes_flat(inplace):
    """Logits without a flat view (logits[:, :-1], a transposed batch) keep their strides."""
    logits = torch.randn(3, 8, V, dtype=torch.float64)
    targets = torch.randint(V, (3, 7))
    targets[1, 2:4] = -100
    batch = hl.Batch(targets, advantages=torch.randn(3), old_logps=-torch.rand(3, 7))
    objective = hl.gspo() + hl.cross_entropy()
    loss, gradient = by_autograd(logits[:, :-1].contiguous(), batch, objective)
    for layout in (lambda t: t[:, :-1], lambda t: t.transpose(0, 1)[:-1].transpose(0, 1)):
        leaf = logits.clone().requires_grad_()
        view = layout(leaf * 1)
        out = hl.logits_loss(view, batch, objective, inplace=inplace)
        torch.testing.assert_close(out.loss.detach(), loss)
        out.loss.backward()
        torch.testing.assert_close(leaf.grad[:, :-1], gradient)
        assert leaf.grad[:, -1].eq(0).all() and leaf.grad[1, 2:4].eq(0).all()


@pytest.mark.parametrize(
    "transform",
    [
        {"temperature": 0.7},
        {"temperature": torch.linspace(0.5, 2, T, dtype=torch.float64)},
        {"softcap": 4.0, "logit_scale": 1.5, "temperature": 1.2},
    ],
    ids=["number", "vector", "all"],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_transforms_of_given_logits(transform, inplace):
    hidden, weight, batch = problem()
    logits = (hidden @ weight.T).requires_grad_()
    loss, gradient = by_autograd(logits, batch, OBJECTIVES[1], **transform)
    out = hl.logits_loss(logits, batch, OBJECTIVES[1], inplace=inplace, **transform)
    torch.testing.assert_close(out.loss.detach(), loss)
    out.loss.backward()
    torch.testing.assert_close(logits.grad, gradient)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_logits_without_a_gradient_are_only_read(backend):
    """`inplace` overwrites nothing if the logits require no gradient."""
    hidden, weight, batch = problem(torch.float32)
    logits = hidden @ weight.T
    before = logits.clone()
    options = hl.Options(backend=backend)
    out = hl.logits_loss(logits, batch, hl.cross_entropy(), inplace=True, options=options)
    assert out.plan.schedule == "statistics" and not out.loss.requires_grad
    assert logits.equal(before)
    want = by_autograd(logits, batch, hl.cross_entropy())[0]
    torch.testing.assert_close(out.loss.double(), want, rtol=2e-6, atol=1e-7)


# ---------------------------------------------------------------------- head_stats


def stats_by_autograd(hidden, head: hl.Head, targets):
    """Return differentiable logp, lse and entropy from materialised logits, 0 at unscored
    positions."""
    z = head.logits(hidden)
    scored = targets != -100
    log_p = z.log_softmax(-1)
    logp = log_p.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    found = logp, z.logsumexp(-1), -(log_p.exp() * log_p).sum(-1)
    return [torch.where(scored, value, 0) for value in found]


def head_of(leaves: dict[str, Tensor], **given) -> hl.Head:
    lora = ()
    if "a" in leaves:
        lora = (hl.Lora(a=leaves["a"], b=leaves["b"], scaling=0.5),)
    return hl.Head(leaves["weight"], leaves.get("bias"), lora=lora, **given)


WIDE = DTYPES[:2]
CASES = [("plain", d) for d in DTYPES] + [("bias", d) for d in DTYPES] + [("lora", d) for d in WIDE]


@pytest.mark.parametrize(("parts", "dtype"), CASES)
def test_head_stats(parts, dtype):
    hidden, weight, batch = problem(dtype)
    leaves = {"hidden": hidden, "weight": weight}
    if parts != "plain":
        leaves["bias"] = torch.randn(V).to(dtype)
    if parts == "lora":
        leaves |= {"a": torch.randn(3, H).to(dtype), "b": torch.randn(V, 3).to(dtype)}
    upstream = torch.randn(3, T, dtype=torch.float64)

    def run(wide: torch.dtype, verb):
        own = {n: t.detach().to(wide).requires_grad_() for n, t in leaves.items()}
        head = head_of(own, softcap=20.0, logit_scale=1.3, temperature=0.8)
        found = verb(own["hidden"], head, batch.targets)
        total = sum((u.to(s.dtype) * s).sum() for u, s in zip(upstream, found, strict=True))
        total.backward()
        return [s.detach() for s in found], {n: t.grad for n, t in own.items()}

    exact, exact_gradients = run(torch.float64, stats_by_autograd)
    _, float32_gradients = run(torch.float32, stats_by_autograd)
    found, gradients = run(dtype, hl.head_stats)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for value, want in zip(found, exact, strict=True):
        assert value.dtype == wide and value.shape == (T,)
        assert value[batch.targets == -100].eq(0).all()
        torch.testing.assert_close(value.double(), want, rtol=3e-6, atol=3e-6)
    for name, want in exact_gradients.items():
        assert gradients[name].dtype == dtype
        assert within_budget(gradients[name], want, float32_gradients[name].to(dtype)), name
    assert gradients["hidden"][batch.targets == -100].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_a_16_bit_adapter_rounds_its_features_and_nothing_else(dtype):
    """With a 16-bit LoRA only scaling * hidden @ a.T is rounded, as in PEFT."""
    hidden, weight, batch = problem(dtype)
    lora = hl.Lora(a=torch.randn(3, H).to(dtype), b=torch.randn(V, 3).to(dtype), scaling=0.5)
    z = hidden.double() @ weight.double().T + lora.features(hidden).double() @ lora.b.double().T
    want = stats_by_autograd(z, hl.Head(torch.eye(V, dtype=torch.float64)), batch.targets)
    found = hl.head_stats(hidden, hl.Head(weight, lora=(lora,)), batch.targets)
    for value, exact in zip(found, want, strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=3e-6, atol=3e-6)


def test_head_stats_in_any_shape_with_a_temperature_per_token():
    hidden, weight, targets = trained_looking(24, H, V, torch.float64)
    hidden, targets = hidden.view(2, 3, 4, H).requires_grad_(), targets.view(2, 3, 4)
    targets[0, 1, 2] = -100
    weight.requires_grad_()
    head = hl.Head(weight, temperature=torch.rand(2, 3, 4, dtype=torch.float64) + 0.5)
    found = hl.head_stats(hidden, head, targets)
    want = stats_by_autograd(hidden, head, targets)
    u = torch.randn(3, 2, 3, 4, dtype=torch.float64)
    for value, exact in zip(found, want, strict=True):
        torch.testing.assert_close(value, exact)
    got = torch.autograd.grad(
        sum((a * b).sum() for a, b in zip(u, found, strict=True)), (hidden, weight)
    )
    ref = torch.autograd.grad(
        sum((a * b).sum() for a, b in zip(u, want, strict=True)), (hidden, weight)
    )
    for a, b in zip(got, ref, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["logp", "lse", "entropy"])
def test_each_statistic_alone(name):
    """A loss that reads only the log-prob, the log-sum-exp or the entropy has the same gradients as
    with PyTorch's autograd on materialised logits."""
    hidden, weight, batch = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    found = hl.head_stats(hidden, hl.Head(weight), batch.targets)
    index = ("logp", "lse", "entropy").index(name)
    want = stats_by_autograd(hidden, hl.Head(weight), batch.targets)[index]
    got = torch.autograd.grad(getattr(found, name).square().sum(), (hidden, weight))
    ref = torch.autograd.grad(want.square().sum(), (hidden, weight))
    for a, b in zip(got, ref, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_head_stats_of_one_trained_part(trained):
    """If only hidden states, weight or bias requires a gradient, `head_stats` gives the gradient
    that it gives when all do."""
    hidden, weight, batch = problem()
    parts = {"hidden": hidden, "weight": weight, "bias": torch.randn(V, dtype=torch.float64)}
    u = torch.randn(T, dtype=torch.float64)
    found = {}
    for names in ([trained], list(parts)):
        own = {n: t.detach().requires_grad_(n in names) for n, t in parts.items()}
        logp = hl.head_stats(own["hidden"], hl.Head(own["weight"], own["bias"]), batch.targets).logp
        (u * logp).sum().backward()
        found[len(names)] = {n: t.grad for n, t in own.items()}
    assert [n for n, g in found[1].items() if g is not None] == [trained]
    torch.testing.assert_close(found[1][trained], found[3][trained])


def test_a_users_own_loss_on_head_stats_equals_head_loss():
    """`head_stats` supports an outside loss: hand-written DPO equals `head_loss`."""
    hidden, weight, batch = problem()
    hidden.requires_grad_()
    logp = hl.head_stats(hidden, hl.Head(weight), batch.targets).logp
    sums = batch.segments.sum(torch.where(batch.targets == -100, 0, logp - batch.ref_logps))
    loss = -torch.nn.functional.logsigmoid(0.1 * (sums[::2] - sums[1::2])).mean()
    (got,) = torch.autograd.grad(loss, hidden)
    out = hl.head_loss(hidden, hl.Head(weight), batch, hl.dpo())
    torch.testing.assert_close(out.loss, loss)
    torch.testing.assert_close(torch.autograd.grad(out.loss, hidden)[0], got)


# ---------------------------------------------------------------------- head_topk


@pytest.mark.parametrize("k", [1, 5, V])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_topk(dtype, k):
    hidden, weight, _ = trained_looking(24, H, V, dtype)
    head = hl.Head(weight, torch.randn(V).to(dtype), softcap=30.0, temperature=0.6)
    want = head.logits(hidden).log_softmax(-1).topk(k)
    found = hl.head_topk(hidden.view(2, 12, H), head, k)
    assert found.ids.shape == found.logps.shape == (2, 12, k)
    assert found.logps.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        found.logps.view(24, k), want.values.to(found.logps.dtype), rtol=1e-5, atol=1e-5
    )
    # Equal logits may be ranked differently, so check each reported log-prob by its id.
    own = head.logits(hidden).log_softmax(-1).gather(1, found.ids.view(24, k))
    torch.testing.assert_close(own, want.values, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == k for row in found.ids.view(24, k).tolist())


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_head_topk_in_tiles(chunk):
    hidden, weight, _ = trained_looking(24, H, V, torch.float64)
    want = (hidden @ weight.T).log_softmax(-1).topk(6)
    found = hl.head_topk(hidden, hl.Head(weight), 6, hl.Options(chunk_tokens=chunk))
    assert found.ids.equal(want.indices)
    torch.testing.assert_close(found.logps, want.values)


def test_head_topk_ranks_the_transformed_logits():
    """`head_topk` ranks logits after scale and temperature, so that a negative scale reverses the
    order."""
    hidden, weight, _ = trained_looking(9, H, V, torch.float64)
    temperature = torch.linspace(0.5, 2, 9, dtype=torch.float64)
    head = hl.Head(weight, logit_scale=-1.0, temperature=temperature, vocab_size=30)
    want = head.logits(hidden).log_softmax(-1).topk(3)
    found = hl.head_topk(hidden, head, 3)
    assert found.ids.equal(want.indices) and found.ids.max() < 30
    torch.testing.assert_close(found.logps, want.values)


def test_head_topk_with_an_adapter_has_no_gradient():
    hidden, weight, _ = trained_looking(9, H, V, torch.float64)
    lora = hl.Lora(a=torch.randn(2, H).double(), b=torch.randn(V, 2).double(), scaling=0.3)
    head = hl.Head(weight.requires_grad_(), lora=(lora,))
    found = hl.head_topk(hidden, head, 4)
    assert not found.logps.requires_grad
    torch.testing.assert_close(
        found.logps, head.logits(hidden).log_softmax(-1).topk(4).values.detach()
    )


def test_head_topk_feeds_distillation():
    """The results of `head_topk` can be stored as a teacher: the divergence of a model from its own
    top k is 0."""
    hidden, weight, batch = problem()
    top = hl.head_topk(hidden, hl.Head(weight), 5)
    data = hl.Batch(batch.targets, teacher_topk_ids=top.ids, teacher_topk_logps=top.logps)
    out = hl.head_loss(hidden, hl.Head(weight), data, hl.distillation())
    assert float(out.loss) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_head_topk_of_one_takes_one_product(backend, softcap, monkeypatch):
    """`head_topk` with k = 1 runs one logit matmul, and returns the first of equal largest logits,
    also with a negative logit scale."""
    monkeypatch.setattr("headloss.kernels.triton.records.BLOCK", 64)
    hidden, weight, _ = trained_looking(7, 8, 300)
    weight[[5, 200]] = 6 * hidden[3]
    head = hl.Head(weight, softcap=softcap, logit_scale=-0.7, temperature=torch.rand(7) + 0.5)
    weight[[70, 201]] = -6 * hidden[4]
    want = head.logits(hidden).log_softmax(1)
    for options in ({}, {"memory_budget": 4 * 90}):
        with FlopCounterMode(display=False) as counter:
            found = hl.head_topk(hidden, head, 1, hl.Options(backend=backend, **options))
        assert counter.get_total_flops() == 2 * 7 * 8 * 300
        assert torch.equal(found.ids[:, 0], want.argmax(1)) and found.ids[4] == 70
        torch.testing.assert_close(found.logps[:, 0], want.amax(1))


# ---------------------------------------------------------------------- plan


def test_plan_on_meta_tensors():
    """`plan` works on meta tensors of any size."""
    targets = torch.zeros(16384, dtype=torch.long)
    hidden = torch.empty(16384, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    batch = hl.Batch(
        targets,
        hl.Segments.from_lengths([4096] * 4),
        advantages=torch.zeros(4),
        old_logps=torch.zeros(16384),
    )
    found = hl.plan(hidden, hl.Head(weight), batch, hl.gspo(), hl.Options(memory_budget=3 << 30))
    assert found.schedule == "one_pass" and len(found.chunks) == 4
    assert found.bytes["weight gradient accumulator"] == 128256 * 4096 * 4
    assert found.bytes["logits"] == 4096 * 128256 * 4
    assert found.plain_bytes > 16384 * 128256 * 4


def test_plan_is_what_runs():
    hidden, weight, batch = problem()
    hidden.requires_grad_()
    for head in (hl.Head(weight), hl.Head(weight.clone().requires_grad_())):
        for options in (hl.Options(), hl.Options(chunk_tokens=4), hl.Options(memory_budget=64)):
            told = hl.plan(hidden, head, batch, OBJECTIVES[0], options)
            assert hl.head_loss(hidden, head, batch, OBJECTIVES[0], options).plan == told
    with torch.no_grad():
        assert hl.plan(hidden, head, batch, OBJECTIVES[0]).schedule == "statistics"


# ---------------------------------------------------------------------- the upstream gradient


def gradients(hidden, weight, batch, options, upstream=1.0, objective=OBJECTIVES[0], **kwargs):
    hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))
    out = hl.head_loss(hidden, hl.Head(weight), batch, objective, options)
    (upstream * out.loss).backward(**kwargs)
    return hidden.grad, weight.grad


SCHEDULES = ["one_pass", "recompute", "static"]


def options_of(schedule, **given):
    if schedule == "static":
        return hl.Options(static=True, **given)
    return hl.Options(schedule=schedule, **given)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("upstream", [3.7, -0.5, 0.0])
def test_the_upstream_gradient_is_honoured(schedule, upstream):
    hidden, weight, batch = problem()
    want = plain(
        hidden.requires_grad_(),
        hl.Head(weight.requires_grad_()),
        batch,
        OBJECTIVES[0],
        upstream=upstream,
    )
    dx, dw = gradients(hidden, weight, batch, options_of(schedule), upstream)
    torch.testing.assert_close(dx, want.gradients["hidden"])
    torch.testing.assert_close(dw, want.gradients["weight"])


def test_the_upstream_gradient_of_a_frozen_head():
    hidden, weight, batch = problem()
    hidden.requires_grad_()
    want = plain(hidden, hl.Head(weight), batch, OBJECTIVES[0], upstream=3.7)
    out = hl.head_loss(hidden, hl.Head(weight), batch, OBJECTIVES[0], hl.Options(schedule="frozen"))
    (3.7 * out.loss).backward()
    torch.testing.assert_close(hidden.grad, want.gradients["hidden"])


def test_a_loss_inside_a_larger_one():
    """The loss can be part of a larger loss: here its square plus a regulariser on the same hidden
    states."""
    hidden, weight, batch = problem()
    hidden.requires_grad_()
    out = hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy())
    (out.loss.square() + hidden.square().sum()).backward()
    want = plain(hidden, hl.Head(weight), batch, hl.cross_entropy())
    expected = 2 * want.loss * want.gradients["hidden"] + 2 * hidden.detach()
    torch.testing.assert_close(hidden.grad, expected)


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "frozen"])
def test_a_second_backward_raises(schedule):
    hidden, weight, batch = problem()
    weight.requires_grad_(schedule != "frozen")
    objective = OBJECTIVES[0]
    out = hl.head_loss(
        hidden.requires_grad_(), hl.Head(weight), batch, objective, hl.Options(schedule=schedule)
    )
    out.loss.backward(retain_graph=True)
    before = hidden.grad.clone()
    with pytest.raises(RuntimeError, match="second time"):
        out.loss.backward()
    assert hidden.grad.equal(before)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_retain_graph_changes_nothing(schedule):
    hidden, weight, batch = problem()
    once = gradients(hidden, weight, batch, options_of(schedule))
    kept = gradients(hidden, weight, batch, options_of(schedule), retain_graph=True)
    assert once[0].equal(kept[0]) and once[1].equal(kept[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("declared", [1.0, 2.0, 0.25])
def test_a_declared_upstream_gradient(schedule, declared):
    hidden, weight, batch = problem()
    want = gradients(hidden, weight, batch, options_of(schedule), declared)
    got = gradients(hidden, weight, batch, options_of(schedule, upstream=declared), declared)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_declared_upstream_gradient_that_is_not_the_real_one(schedule):
    hidden, weight, batch = problem()
    with pytest.raises(RuntimeError, match="upstream gradient differs from 2.0"):
        gradients(hidden, weight, batch, options_of(schedule, upstream=2.0), 3.0)


# ---------------------------------------------------------------------- main_grad


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("upstream", [None, 1.0, 2.0])
def test_main_grad(schedule, upstream, dtype):
    """The weight gradient is added unrounded to `main_grad`, and none is returned."""
    hidden, weight, batch = problem(dtype)
    factor = 3.0 if upstream is None else upstream
    start = torch.randn(V, H)
    total = start.clone()
    options = options_of(schedule, main_grad=total, upstream=upstream, chunk_tokens=9)
    dx, dw = gradients(hidden, weight, batch, options, factor, hl.cross_entropy())
    assert dw is None
    plain_dx, _ = gradients(hidden, weight, batch, options_of(schedule), factor, hl.cross_entropy())
    torch.testing.assert_close(dx, plain_dx)
    want = plain(
        hidden.requires_grad_(),
        hl.Head(weight.requires_grad_()),
        batch,
        hl.cross_entropy(),
        upstream=factor,
    )
    exact = want.gradients["weight"]
    # The float32 buffer `main_grad` is more exact than a gradient rounded to the weight's dtype.
    tolerance = 2e-6 if dtype == torch.float32 else 5e-5
    error = ((total - start).double() - exact).norm() / exact.norm()
    assert float(error) < tolerance


@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_main_grad_is_written_when_it_should_be(schedule):
    """`main_grad` is filled in the backward pass, or already in the forward pass if `one_pass`
    knows the upstream gradient."""
    hidden, weight, batch = problem(torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    for upstream in (None, 1.0, 2.0):
        total = torch.zeros(V, H)
        options = hl.Options(schedule=schedule, main_grad=total, upstream=upstream)
        out = hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy(), options)
        early = schedule == "one_pass" and upstream is not None
        assert bool(total.any()) == early
        ((upstream or 1.0) * out.loss).backward()
        assert total.any() and weight.grad is None


@pytest.mark.parametrize("upstream", [None, 1.0])
@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "frozen"])
def test_main_grad_of_a_frozen_weight_is_refused(schedule, upstream):
    hidden, weight, batch = problem(torch.float32)
    hidden.requires_grad_()
    total = torch.zeros(V, H)
    options = hl.Options(schedule=schedule, main_grad=total, upstream=upstream)
    with pytest.raises(ValueError, match="main_grad: got a tensor, but the weight requires no"):
        hl.head_loss(hidden, hl.Head(weight), batch, hl.reinforce(), options)
    assert not total.any()


def test_micro_batches_add_up_in_main_grad():
    hidden, weight, batch = problem(torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    want = plain(hidden, hl.Head(weight), batch, hl.cross_entropy())
    total, totals = torch.zeros(V, H), hl.Totals.of(batch)
    for rows in (slice(0, 10), slice(10, T)):
        part = hl.Batch(batch.targets[rows], totals=totals)
        options = hl.Options(main_grad=total)
        hl.head_loss(
            hidden[rows], hl.Head(weight), part, hl.cross_entropy(), options
        ).loss.backward()
    torch.testing.assert_close(total.double(), want.gradients["weight"], rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------- a temperature in a tensor


@pytest.mark.parametrize("static", [False, True])
def test_one_temperature_for_all_tokens_may_be_a_tensor(static):
    """A temperature passed as a 0-dim tensor gives the results of the same number in every public
    function, also compiled."""
    hidden, weight, batch = problem()
    hidden, weight, targets = hidden.detach(), weight.detach(), batch.targets
    number, tensor = 0.75, torch.tensor(0.75)
    options = hl.Options(static=static)

    def numbers(temperature) -> list[Tensor]:
        head = hl.Head(weight, temperature=temperature)
        out = hl.head_loss(hidden, head, batch, hl.cross_entropy(), options)
        logits = hidden @ weight.T
        given = hl.logits_loss(logits, batch, hl.cross_entropy(), temperature, options=options)
        stats = hl.head_stats(hidden, head, targets, options)
        foreign = hl.head_function(hidden, head, batch, lambda a, b: (a + b).sum(), "token")
        best = hl.head_topk(hidden, head, 3, options)
        return [out.loss, given.loss, *stats, foreign, *best, head.logits(hidden)]

    for one, two in zip(numbers(tensor), numbers(number), strict=True):
        torch.testing.assert_close(one, two)

    def step(temperature) -> Tensor:
        return hl.head_stats(hidden, hl.Head(weight, temperature=temperature), targets).logp

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tensor), step(number))
    with pytest.raises(ValueError, match="temperature: got 0.0 at position 0, want a finite"):
        hl.head_topk(hidden, hl.Head(weight, temperature=torch.tensor(0.0)), 2)
