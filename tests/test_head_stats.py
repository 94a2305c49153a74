"""`head_stats` agrees with float64 plain logits in all schedules, and supports autograd's features.

N positions, T of them scored, H hidden width, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton_cases import DEVICE, EPS  # import this first: turns on Triton's interpreter

import headloss as hl
from headloss import kernels
from headloss.head import products
from headloss.testing import error, trained_looking, within_budget

N, H, V = 20, 8, 37
OUT = [2, 3, 15]  # unscored positions
NAMES = ("logp", "lse", "entropy")
SCHEDULES = {
    "recompute": {"schedule": "recompute", "chunk_tokens": 3},
    "held": {"schedule": "held"},
    "held in blocks": {"schedule": "held", "chunk_tokens": 6},
    "held, static": {"schedule": "held", "static": True},
    "frozen": {"schedule": "frozen", "chunk_tokens": 6},
    "frozen, static": {"schedule": "frozen", "static": True},
    "recompute, static": {"schedule": "recompute", "static": True},
    "all rows": {"schedule": "held", "skip_rows": False},
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def problem(dtype=torch.float64, device="cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states (NaN at unscored positions), weight, targets and advantages."""
    hidden, weight, targets = trained_looking(N, H, V, dtype, device)
    targets[OUT] = -100
    hidden[OUT] = float("nan")
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(N, generator=generator, dtype=torch.float64).to(device)
    advantages[5] = 0  # a row without gradient
    return hidden, weight, targets, advantages


def foreign(logp: Tensor, lse: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
    """A user's own loss of log-probs, log-sum-exps and entropies, with sums over the whole
    batch."""
    a = advantages.to(logp.dtype)
    ratio = (logp - logp.detach().sub(0.1)).exp()
    return -(ratio * a).sum() / 7 + 1e-2 * lse.square().sum() / entropy.detach().sum() - (
        (a != 0) * entropy
    ).mean()


def of_logp(logp: Tensor, lse: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
    return -(logp.exp() * advantages.to(logp.dtype)).sum()


def by_logits(hidden: Tensor, head: hl.Head, targets: Tensor) -> list[Tensor]:
    """Return logp, lse and entropy from materialised logits."""
    scored = targets != -100
    log_p = head.logits(torch.where(scored.unsqueeze(-1), hidden, 0)).log_softmax(-1)
    z = head.logits(torch.where(scored.unsqueeze(-1), hidden, 0))
    logp = log_p.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    found = logp, z.logsumexp(-1), -(log_p.exp() * log_p).sum(-1)
    return [torch.where(scored, value, 0) for value in found]


def run(dtype, verb, loss, trained=("hidden", "weight"), given=None, **of_head):
    """Call `verb`, a function of the public API, with parameters cast to `dtype`; return its
    statistics and the gradients of `loss`, a function of the statistics."""
    hidden, weight, targets, advantages = problem() if given is None else given
    leaves = {"hidden": hidden, "weight": weight}
    leaves = {n: t.detach().to(dtype).requires_grad_(n in trained) for n, t in leaves.items()}
    found = verb(leaves["hidden"], hl.Head(leaves["weight"], **of_head), targets)
    loss(*found, advantages).backward()
    return [t.detach() for t in found], {n: leaves[n].grad for n in trained}, found


def check(dtype, options, loss=foreign, gradients=NAMES, trained=("hidden", "weight"), **of_head):
    given = problem(dtype)
    widths = (torch.float64, torch.float32)
    oracle, exact, coarse = (
        run(d, by_logits, loss, trained, given, **of_head) for d in (*widths, dtype)
    )

    def verb(hidden, head, targets):
        return hl.head_stats(hidden, head, targets, hl.Options(**options), gradients)

    values, found, stats = run(dtype, verb, loss, trained, given, **of_head)
    assert stats.plan.schedule == options["schedule"]
    for value, want, wide in zip(values, oracle[0], exact[0], strict=True):
        assert within_budget(value, want, wide) and value[OUT].eq(0).all()
    for name in trained:
        assert within_budget(found[name], oracle[1][name], coarse[1][name]), name
    assert found["hidden"][OUT].eq(0).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(dtype, schedule):
    transform = {"softcap": 20.0, "temperature": 0.8} if "blocks" in schedule else {}
    if "frozen" in schedule:
        check(dtype, SCHEDULES[schedule], of_logp, ("logp",), ("hidden",), **transform)
    else:
        check(dtype, SCHEDULES[schedule], **transform)


@pytest.mark.parametrize("schedule", ["recompute", "held", "frozen"])
@pytest.mark.parametrize("count", [0, 1])
def test_few_tokens(schedule, count):
    hidden, weight, targets, advantages = problem()
    targets[:] = -100
    targets[7 : 7 + count] = 3
    trained = ("hidden",) if schedule == "frozen" else ("hidden", "weight")
    given = (hidden, weight, targets, advantages)
    want, into, _ = run(torch.float64, by_logits, of_logp, trained, given)

    def verb(hidden, head, targets):
        options = hl.Options(schedule=schedule)
        return hl.head_stats(hidden, head, targets, options, ("logp",))

    values, found, stats = run(torch.float64, verb, of_logp, trained, given)
    assert stats.plan.schedule == schedule
    for got, exact in zip([*values, *found.values()], [*want, *into.values()], strict=True):
        torch.testing.assert_close(got, exact)


# ---------------------------------------------------------------------- Triton's interpreter


@pytest.mark.covering
@pytest.mark.parametrize("form", ["terms", "logits"])
@pytest.mark.parametrize("loss", [foreign, of_logp])
@pytest.mark.parametrize("schedule", ["held", "held in blocks", "frozen", "recompute"])
def test_on_triton(monkeypatch, schedule, loss, form):
    """`head_stats` is correct on Triton's kernels for any loss on its outputs, whether exp(z) or
    logits are stored until the backward pass."""
    held = form == "terms"
    monkeypatch.setattr(kernels, "can_write_exp", lambda backend, *_: held and backend == "triton")
    sixteen = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    frozen = schedule == "frozen"
    trained = ("hidden",) if frozen else ("hidden", "weight")
    loss = of_logp if frozen else loss
    given = problem(sixteen, DEVICE)
    oracle, coarse = (run(d, by_logits, loss, trained, given) for d in (torch.float64, sixteen))

    def verb(hidden, head, targets):
        options = hl.Options(backend="triton", **SCHEDULES[schedule])
        return hl.head_stats(hidden, head, targets, options, ("logp",) if frozen else NAMES)

    hl.clear_cache()  # forgets the other form
    values, found, stats = run(sixteen, verb, loss, trained, given)
    hl.clear_cache()
    assert stats.plan.exp_tiles == (form == "terms")
    if stats.plan.schedule == "held":
        assert stats.plan.bytes["logits"] == 17 * V * (2 if form == "terms" else 4)
    for value, want in zip(values, oracle[0], strict=True):
        torch.testing.assert_close(value.double(), want, rtol=1e-5, atol=1e-5)
    for name, got in found.items():
        want, other = oracle[1][name], coarse[1][name]
        assert error(got, want) <= 3 * error(other, want) + 4 * EPS[torch.bfloat16], name


# ---------------------------------------------------------------------- schedules


def test_the_choice():
    """The planner chooses `frozen` for a frozen head and a loss of log-probs, `held` if all logits
    fit the budget, and else `recompute`."""
    hidden, weight, targets, _ = problem()
    size, t = V * 8, N - len(OUT)

    def planned(trained=True, gradients=NAMES, **options):
        head = hl.Head(weight.detach().requires_grad_(trained))
        x = hidden.detach().requires_grad_()
        return hl.head_stats(x, head, targets, hl.Options(**options), gradients).plan

    assert planned().schedule == "held" and planned().bytes["logits"] == t * size
    assert "all tokens take 0.0 MiB within the budget" in planned().reason
    over = planned(memory_budget=t * size - 1)
    assert over.schedule == "recompute" and "more than the budget" in over.reason
    assert planned(chunk_tokens=4).schedule == "recompute"
    assert planned(trained=False, gradients=("logp",)).schedule == "frozen"
    assert planned(trained=False).schedule == "held"
    assert planned(gradients=()).schedule == "statistics"
    with pytest.raises(ValueError, match="frozen.*the head requires a gradient"):
        planned(schedule="frozen", gradients=("logp",))
    with pytest.raises(ValueError, match="one_pass.*the loss lives elsewhere"):
        planned(schedule="one_pass")
    with pytest.raises(ValueError, match="held.*more than the budget"):
        planned(schedule="held", memory_budget=t * size - 1)
    x, head = hidden.requires_grad_(), hl.Head(weight.requires_grad_())
    for options in (hl.Options(), hl.Options(memory_budget=t * size - 1)):
        want = hl.head_stats(x, head, targets, options).plan
        assert hl.plan(x, head, hl.Batch(targets), None, options) == want


@pytest.mark.parametrize(("schedule", "logits"), [("held", 1), ("frozen", 1), ("recompute", 2)])
def test_the_number_of_products(monkeypatch, schedule, logits):
    count = {"logits": 0}
    inner = products.PLAIN.logits

    def counted(*args, **options):
        count["logits"] += 1
        return inner(*args, **options)

    monkeypatch.setattr(products.PLAIN, "logits", counted)
    hidden, weight, targets, _ = problem()
    head = hl.Head(weight.requires_grad_(schedule != "frozen"))
    options = hl.Options(schedule=schedule)
    found = hl.head_stats(hidden.requires_grad_(), head, targets, options, ("logp",))
    found.logp.sum().backward()
    assert count["logits"] == logits


# ---------------------------------------------------------------------- gradients


def test_statistics_outside_gradients_are_detached():
    hidden, weight, targets, _ = problem()
    head = hl.Head(weight.requires_grad_())
    found = hl.head_stats(hidden.requires_grad_(), head, targets, None, ("entropy",))
    assert [t.requires_grad for t in found] == [False, False, True]
    (found.logp * found.entropy).sum().backward()
    want = by_logits(hidden, head, targets)
    (into,) = torch.autograd.grad((want[0].detach() * want[2]).sum(), weight)
    torch.testing.assert_close(weight.grad, into)
    for gradients in ((), []):
        assert not hl.head_stats(hidden, head, targets, None, gradients).logp.requires_grad


@pytest.mark.parametrize(
    ("gradients", "kind", "match"),
    [
        ("logp", TypeError, "gradients: got 'logp', want a tuple"),
        (("logps",), ValueError, "gradients: got 'logps', want names out of"),
        (3, TypeError, "gradients: got 3"),
    ],
)
def test_wrong_names(gradients, kind, match):
    hidden, weight, targets, _ = problem()
    with pytest.raises(kind, match=match):
        hl.head_stats(hidden, hl.Head(weight), targets, None, gradients)


def test_upstream_is_refused():
    hidden, weight, targets, _ = problem()
    with pytest.raises(ValueError, match="upstream: got 1.0, want None"):
        hl.head_stats(hidden, hl.Head(weight), targets, hl.Options(upstream=1.0))
    with pytest.raises(ValueError, match="upstream: got 1.0, want None"):  # `plan` refuses it, too
        hl.plan(hidden, hl.Head(weight), hl.Batch(targets), None, hl.Options(upstream=1.0))


@pytest.mark.parametrize("schedule", ["held", "frozen", "recompute"])
def test_a_second_backward(schedule):
    """A second backward pass raises, except under recompute with retain_graph."""
    hidden, weight, targets, _ = problem()
    head = hl.Head(weight.requires_grad_(schedule != "frozen"))
    options = hl.Options(schedule=schedule)

    def loss():
        return hl.head_stats(hidden.requires_grad_(), head, targets, options, ("logp",)).logp.sum()

    once = loss()
    (want,) = torch.autograd.grad(once, hidden, retain_graph=True)
    if schedule == "recompute":
        assert torch.equal(torch.autograd.grad(once, hidden)[0], want)
    else:
        with pytest.raises(RuntimeError, match=f"a second time.*{schedule}, has used up"):
            torch.autograd.grad(once, hidden)
    freed = loss()
    freed.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        freed.backward()
    with pytest.raises(RuntimeError, match="head_stats with create_graph=True"):
        torch.autograd.grad(loss(), hidden, create_graph=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["held", "frozen", "recompute"])
def test_checkpointing_recomputes_once(schedule, use_reentrant):
    hidden, weight, targets, advantages = problem()
    x = hidden.nan_to_num(0)
    trained = schedule != "frozen"
    calls = []

    def loss(x: Tensor) -> Tensor:
        calls.append(None)
        options, head = hl.Options(schedule=schedule), hl.Head(weight)
        found = hl.head_stats(2 * x, head, targets, options, ("logp",))
        return of_logp(*found, advantages)

    weight.requires_grad_(trained)
    leaves = (x.requires_grad_(), weight) if trained else (x.requires_grad_(),)
    whole = of_logp(*by_logits(2 * x, hl.Head(weight), targets), advantages)
    want = torch.autograd.grad(whole, leaves)
    checkpoint(loss, x, use_reentrant=use_reentrant).backward()
    assert len(calls) == 2
    for leaf, exact in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, exact)


def test_outputs_may_be_changed_in_place():
    """Outputs may be changed in place, since they share no memory with saved tensors."""
    hidden, weight, targets, _ = problem()
    targets = targets.clamp_min(0)
    x = hidden.nan_to_num(0).requires_grad_()
    for schedule in ("held", "recompute"):
        found = hl.head_stats(x, hl.Head(weight), targets, hl.Options(schedule=schedule))
        loss = found.entropy.mul_(2).sum() + found.logp.mul_(3).sum()
        logp, _, entropy = by_logits(x, hl.Head(weight), targets)
        want = torch.autograd.grad(2 * entropy.sum() + 3 * logp.sum(), x)
        torch.testing.assert_close(torch.autograd.grad(loss, x), want)


@pytest.mark.parametrize("schedule", ["held", "held in blocks", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_main_grad(schedule, dtype):
    hidden, weight, targets, advantages = problem(dtype)
    want = run(torch.float64, by_logits, foreign, given=(hidden, weight, targets, advantages))
    main_grad = torch.full((V, H), 2.0)
    options = hl.Options(main_grad=main_grad, **SCHEDULES[schedule])
    head = hl.Head(weight.requires_grad_())
    found = hl.head_stats(hidden.requires_grad_(), head, targets, options)
    assert main_grad.eq(2).all()
    foreign(*found, advantages).backward()
    assert weight.grad is None
    assert error(main_grad - 2, want[1]["weight"]) < (1e-6 if dtype == torch.float32 else 1e-3)


# ---------------------------------------------------------------------- batches


def test_a_batch_shares_its_packing():
    hidden, weight, targets, _ = problem()
    x, head = hidden.requires_grad_(), hl.Head(weight.requires_grad_())
    batch = hl.Batch(targets.view(4, 5), advantages=torch.randn(4, dtype=torch.float64))
    x = x.view(4, 5, H)
    found = hl.head_stats(x, head, batch)
    packing = batch._survey().packing
    assert packing is not None and found.logp.shape == (4, 5)
    ready = batch.with_fields(old_logps=found.logp.detach())
    assert ready._survey().packing is packing
    out = hl.head_loss(x, head, ready, hl.grpo())
    torch.testing.assert_close(out.logps, found.logp.detach())
    for got, want in zip(found, hl.head_stats(x, head, batch.targets), strict=True):
        assert torch.equal(got, want)


def test_head_stats_unpack_to_three_tensors():
    hidden, weight, targets, _ = problem()
    found = hl.head_stats(hidden, hl.Head(weight), targets)
    logp, lse, entropy = found
    assert isinstance(found, hl.HeadStats) and len(found) == 3
    assert (found.logp, found.lse, found.entropy) == (logp, lse, entropy)
    assert found.plan is not None and found.plan.schedule == "statistics"


@pytest.mark.parametrize("schedule", ["held", "held in blocks", "recompute", "frozen"])
@pytest.mark.parametrize("tail", [False, True])
def test_candidates(schedule, tail):
    hidden, weight, targets, _ = problem()
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(V, generator=generator)[:5] for _ in range(N)])
    ids[::3, 1] = -1
    trained = schedule != "frozen"
    x, w = hidden.requires_grad_(), weight.requires_grad_(trained)
    batch, options = hl.Batch(targets, candidate_ids=ids), hl.Options(**SCHEDULES[schedule])
    names = ("logp", "candidate_logps", "candidate_tail")[: 2 + tail]
    if schedule == "frozen" and tail:
        with pytest.raises(ValueError, match="frozen"):
            hl.head_stats(x, hl.Head(w), batch, options, names)
        return
    found = hl.head_stats(x, hl.Head(w), batch, options, names)
    scored = (targets != -100).unsqueeze(1)
    log_p = hl.Head(w).logits(torch.where(scored, x, 0)).log_softmax(-1)
    want = torch.where(scored & (ids >= 0), log_p.gather(1, ids.clamp_min(0)), 0)
    rest = torch.ones(N, V + 1, dtype=torch.bool).scatter_(1, ids % (V + 1), False)[:, :V]
    other = torch.where(scored[:, 0], log_p.masked_fill(~rest, -torch.inf).logsumexp(1), 0)
    torch.testing.assert_close(found.candidate_logps, want)
    upstream = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    loss, exact = ((t * upstream).sum() for t in (found.candidate_logps, want))
    assert len(found) == 3 and not found.entropy.requires_grad
    if tail:
        torch.testing.assert_close(found.candidate_tail, other)
        loss, exact = loss + found.candidate_tail.square().sum(), exact + other.square().sum()
    else:
        assert found.candidate_tail is None
    leaves = (x, w) if trained else (x,)
    for got, true in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(exact, leaves), strict=True
    ):
        torch.testing.assert_close(got, true)
    assert not hl.head_stats(x, hl.Head(w), batch).candidate_logps.requires_grad
    with pytest.raises(ValueError, match="candidate_logps', want a batch with candidate_ids"):
        hl.head_stats(x, hl.Head(w), targets, None, names[:2])


# ---------------------------------------------------------------------- compiled graphs


def test_options_in_a_compiled_graph():
    hidden, weight, targets, advantages = problem()
    batch, weight = hl.Batch(targets), weight.requires_grad_()
    x = hidden.nan_to_num(0).requires_grad_()

    def step(x: Tensor, options: hl.Options, temperature: float = 1.0) -> Tensor:
        head = hl.Head(weight, temperature=temperature)
        logp, lse, entropy = hl.head_stats(x, head, batch, options, ("logp", "entropy"))
        return foreign(logp, lse, entropy, advantages)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    # Options and temperatures that change from call to call must not be compiled in as constants.
    for given, t in (
        ({"chunk_tokens": 3}, 1.0),
        ({"chunk_tokens": 5, "gradient_tolerance": 0.5}, 0.9),
        ({"static": True}, 0.8),
    ):
        logp, lse, entropy = by_logits(x, hl.Head(weight, temperature=t), targets)
        loss = foreign(logp, lse.detach(), entropy, advantages)
        exact = torch.autograd.grad(loss, (x, weight))
        options = hl.Options(schedule="recompute", **given)
        want = torch.autograd.grad(step(x, options, t), (x, weight))
        got = torch.autograd.grad(compiled(x, options, t), (x, weight))
        for a, b, c in zip(got, want, exact, strict=True):
            torch.testing.assert_close(a, b)
            assert torch.allclose(a, c) is ("gradient_tolerance" not in given)
    for options, match in (
        (hl.Options(schedule="held"), 'got "held", but a compiled graph'),
        (hl.Options(logits_dtype=torch.bfloat16), "logits_dtype: .* no compiled graph"),
    ):
        with pytest.raises(Exception, match=match):
            compiled(x, options)
    torch._dynamo.reset()


def test_a_compiled_graph_serves_any_number_of_tokens():
    """A compiled graph that reads a module's parameters serves any number of tokens without
    recompilation."""
    from torch._dynamo.testing import CompileCounter

    linear, counter = torch.nn.Linear(H, V).double(), CompileCounter()
    a, b = (torch.randn(*s, dtype=torch.float64).requires_grad_() for s in ((3, H), (V, 3)))

    def step(x: Tensor, targets: Tensor, ids: Tensor) -> Tensor:
        batch = hl.Batch(targets, candidate_ids=ids)
        head = hl.Head.of(linear, lora=(hl.Lora(a=a, b=b, scaling=0.5),))
        found = hl.head_stats(x, head, batch, None, ("logp", "candidate_logps"))
        assert found.candidate_logps is not None
        return found.logp.sum() + found.candidate_logps.exp().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for n in (5, 7):
        x = torch.randn(2, n, H, dtype=torch.float64, requires_grad=True)
        targets = torch.randint(V, (2, n))
        ids = (targets.unsqueeze(-1) + torch.arange(3)) % V
        log_p = (linear(x) + 0.5 * x @ a.T @ b.T).log_softmax(-1)
        want = log_p.gather(-1, targets.unsqueeze(-1)).sum() + log_p.gather(-1, ids).exp().sum()
        got = compiled(x, targets, ids)
        torch.testing.assert_close(got, want)
        found = [torch.autograd.grad(t, (x, linear.weight, a, b)) for t in (got, want)]
        for mine, true in zip(*found, strict=True):
            torch.testing.assert_close(mine, true)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_gradients_in_a_graph_lie_in_rows_as_it_was_told():
    """The operators' gradients are row-major, as their fake implementations declare, whatever the
    strides of the inputs."""
    from headloss.engine import operator

    x, w = (torch.randn(H, n, dtype=torch.float64).t() for n in (N, V))
    targets = torch.arange(N) % V
    call = [x, w], [targets, None, None], [V, 0, 0], [1.0, 0.0, 1.0, 0.0]
    call = *call, "False, ['auto', False, True]"
    measured = operator._head_stats(*call)
    slopes = [torch.randn(N, dtype=torch.float64) for _ in range(3)]
    for op, arguments in (
        (operator._head_stats, call),
        (operator._head_stats_backward, (*call, measured, slopes, [True, True])),
    ):
        torch.library.opcheck(op, arguments, test_utils="test_faketensor")
