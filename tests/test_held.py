"""Calls that store exp(z) in 16 bits are correct; on a CPU the kernels run in Triton's interpreter.

T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import twins
from triton_cases import DEVICE, EPS  # import this first: turns on Triton's interpreter

import headloss as hl
from headloss import kernels
from headloss.head.products import PLAIN
from headloss.kernels import triton as triton_backend
from headloss.logits.accumulators import HiddenGradient
from headloss.logits.rows import LogitGradient
from headloss.testing import error, plain, trained_looking, within_budget

T, H, V = 40, 64, 300
# The interpreter multiplies the bits of bf16 operands as integers, so bf16 needs a GPU.
SIXTEEN = torch.bfloat16 if DEVICE == "cuda" else torch.float16
LENGTHS = (9, 0, 14, 17)


@pytest.fixture(autouse=True)
def terms(monkeypatch):
    monkeypatch.setattr(kernels, "can_write_exp", lambda backend, *_: backend == "triton")


def setting(quiet: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor, hl.Batch]:
    hidden, weight, targets = trained_looking(T, H, V, SIXTEEN, DEVICE)
    generator = torch.Generator().manual_seed(3)
    advantages = torch.randn(T, generator=generator).to(DEVICE)
    advantages[list(quiet)] = 0
    with torch.no_grad():
        logps = hl.head_stats(hidden, hl.Head(weight), targets).logp.float()
    batch = hl.Batch(
        targets,
        hl.Segments.from_lengths(torch.tensor(LENGTHS, device=DEVICE)),
        advantages=advantages,
        old_logps=logps + 0.05 * torch.randn(T, generator=generator).to(DEVICE),
    )
    return hidden, weight, batch


OBJECTIVES = {
    "multiples": lambda: hl.grpo() + 1e-3 * hl.z_loss(),
    "coefficients": lambda: hl.gspo() - 0.01 * hl.entropy(),
}
SCHEDULES = {
    "one pass": {"schedule": "one_pass"},
    "chunks": {"schedule": "one_pass", "memory_budget": 24 * V * 2},
    "dense": {"schedule": "one_pass", "skip_rows": False},
    "static": {"static": True},
    "recompute": {"schedule": "recompute"},
    "held": {"schedule": "held"},
    "held in blocks": {"schedule": "held", "chunk_tokens": 24},
}
QUIET = {"none": (), "few": (5,), "most": tuple(i for i in range(T) if i % 4), "all": range(T)}


def check(hidden, weight, batch, objective, **options) -> hl.Plan:
    """Check a call against a float64 reference: errors are at most three times those of plain
    PyTorch, plus the interpreter's rounding."""
    head = hl.Head(weight)
    oracle, exact, coarse = (
        plain(hidden, head, batch, objective, mode) for mode in ("float64", "float32", "input")
    )
    out = hl.head_loss(hidden, head, batch, objective, hl.Options(backend="triton", **options))
    assert out.plan.exp_tiles
    out.loss.backward()
    assert within_budget(out.logps, oracle.logps, exact.logps)
    assert error(out.loss, oracle.loss) <= 1e-5 or not oracle.loss
    for name, leaf in (("hidden", hidden), ("weight", weight)):
        if leaf.requires_grad:
            want, other = oracle.gradients[name], coarse.gradients[name]
            budget = 3 * error(other, want) + 4 * EPS[torch.bfloat16]
            assert error(leaf.grad, want) <= (budget if want.norm() else 0)
    return out.plan


CASES = [(objective, "one pass", quiet) for objective in OBJECTIVES for quiet in QUIET]
CASES += [("multiples", schedule, "most") for schedule in SCHEDULES]
CASES += [("coefficients", "recompute", "most"), ("coefficients", "static", "few")]
CASES += [("coefficients", "held in blocks", "most")]


@pytest.mark.parametrize(("objective", "schedule", "quiet"), sorted(set(CASES)))
def test_against_the_oracle(objective, schedule, quiet):
    hidden, weight, batch = setting(QUIET[quiet])
    given = (hidden.requires_grad_(), weight.requires_grad_(), batch)
    check(*given, OBJECTIVES[objective](), **SCHEDULES[schedule])


def test_frozen():
    hidden, weight, batch = setting()
    plan = check(hidden.requires_grad_(), weight, batch, hl.gspo(), schedule="frozen")
    assert plan.schedule == "frozen"


@hl.term
def with_mean_logit(stats, batch):
    return 0.1 * stats.mean_logit - stats.logp


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_under_a_soft_cap_logits_are_kept_for_the_gradient_of_their_mean(softcap):
    """With a soft cap and a loss on the mean logit, raw logits are stored instead of exp(z): an
    exp(z) that underflowed to 0 does not determine z."""
    hidden, weight, batch = setting()
    head = hl.Head(weight.requires_grad_(), softcap=softcap)
    options, objective = hl.Options(backend="triton"), with_mean_logit()
    out = hl.head_loss(hidden.requires_grad_(), head, batch, objective, options)
    assert out.plan.exp_tiles == (softcap is None)
    out.loss.backward()
    oracle, coarse = (plain(hidden, head, batch, objective, m) for m in ("float64", "input"))
    for name, leaf in (("hidden", hidden), ("weight", weight)):
        want = oracle.gradients[name]
        budget = 3 * error(coarse.gradients[name], want) + 4 * EPS[torch.bfloat16]
        assert error(leaf.grad, want) <= budget


@pytest.mark.parametrize("schedule", ["one pass", "chunks"])
@pytest.mark.parametrize("quiet", QUIET)
def test_rows_left_out_whatever_memory_holds(fresh_memory_is_nan, schedule, quiet):
    hidden, weight, batch = setting(QUIET[quiet])
    given = (hidden.requires_grad_(), weight.requires_grad_(), batch)
    check(*given, hl.grpo(), **SCHEDULES[schedule])
    assert hidden.grad is not None and hidden.grad[list(QUIET[quiet])].eq(0).all()


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "frozen"])
def test_hidden_states_in_columns(schedule):
    """Column-major hidden states give correct results: matmul kernels read 16-byte-aligned rows,
    and other layouts are copied."""
    hidden, weight, batch = setting()
    hidden = hidden.t().contiguous().t()
    if schedule != "frozen":
        weight.requires_grad_()
    check(hidden.requires_grad_(), weight, batch, hl.grpo(), schedule=schedule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("v", [V, 5 << 20] if DEVICE == "cuda" else [V])
def test_an_adapters_product_keeps_the_digits_of_float32(v, scale, dtype):
    """The product with a LoRA factor has float32 accuracy, whatever the dtype of that factor."""
    inner = scale * torch.randn(60, 16, device=DEVICE)
    outer = torch.randn(v, 16, device=DEVICE).to(dtype)
    want = inner.double() @ outer.double().T
    narrow = inner @ outer.float().T
    assert error(PLAIN.logits(inner, outer), want) <= 3 * error(narrow, want) + 1e-7
    onto = torch.randn(60, v, device=DEVICE)
    want += onto.double()
    assert error(PLAIN.logits(inner, outer, onto), want) <= 1e-6


HEADS = {
    "plain": {},
    "scaled": {"bias": (V,), "logit_scale": -0.5, "temperature": 0.7},
    "temperatures": {"temperature": (T,)},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("schedule", [*SCHEDULES, "frozen"])
def test_float16_takes_raw_logits(monkeypatch, schedule, kind):
    """With float16 inputs raw logits are stored instead of exp(z), and errors are no larger than
    PyTorch's."""
    monkeypatch.undo()
    hl.clear_cache()
    hidden, weight, targets = trained_looking(T, H, V, torch.float16, DEVICE)
    frozen, options = schedule == "frozen", SCHEDULES.get(schedule, {"schedule": schedule})
    given = {n: torch.rand(v) + 0.5 if isinstance(v, tuple) else v for n, v in HEADS[kind].items()}
    given = {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    head = hl.Head(weight.requires_grad_(not frozen), **given)
    advantages = torch.linspace(-1, 1, T, device=DEVICE).where(targets % 3 > 0, 0)
    batch = hl.Batch(targets, advantages=advantages, old_logps=torch.full_like(advantages, -1.0))
    objective = hl.grpo() if frozen else hl.grpo() - 0.01 * hl.entropy() + 1e-3 * hl.z_loss()
    options = hl.Options(backend="triton", **options)
    out = hl.head_loss(hidden.requires_grad_(), head, batch, objective, options)
    assert not out.plan.exp_tiles
    out.loss.backward()
    oracle, exact, coarse = (
        plain(hidden, head, batch, objective, mode) for mode in ("float64", "float32", "input")
    )
    assert within_budget(out.logps, oracle.logps, exact.logps)
    for name, leaf in (("hidden", hidden), ("weight", weight)):
        if leaf.requires_grad:
            assert within_budget(leaf.grad, oracle.gradients[name], coarse.gradients[name]), name


@pytest.mark.parametrize("schedule", ["one_pass", "held"])
def test_float16_targets_far_below_very_large_logits(monkeypatch, schedule):
    """In float16, targets far below very large logits are correct: their statistics are recomputed
    from the stored logits."""
    monkeypatch.undo()
    hl.clear_cache()
    generator = torch.Generator().manual_seed(0)
    hidden = (20 * torch.randn(48, 64, generator=generator)).half().to(DEVICE).requires_grad_()
    weight = (torch.randn(257, 64, generator=generator) / 2).half()
    weight[0] = -30 * weight[1]
    head = hl.Head(weight.to(DEVICE).requires_grad_(), logit_scale=10.0)
    targets = torch.randint(257, (48,), generator=generator).to(DEVICE)
    options = hl.Options(backend="triton", schedule=schedule)
    objective = hl.cross_entropy(label_smoothing=0.1)
    hl.head_loss(hidden, head, hl.Batch(targets), objective, options).loss.backward()
    exact = plain(hidden, head, hl.Batch(targets), objective).gradients["hidden"]
    assert error(hidden.grad, exact) < 5e-4


@pytest.mark.parametrize("rows", [slice(20, 25), torch.tensor([24, 20, 23])])
@pytest.mark.parametrize("scaled", [True, False])
def test_all_rows_of_a_chunk_from_those_with_a_gradient(rows, scaled):
    """The gradients of the rows `rows` of a chunk are scaled and written to their places in the
    chunk, and all other rows of the chunk are set to 0."""
    chunk = slice(20, 25)
    places = torch.arange(20, 25) if isinstance(rows, slice) else rows
    part = torch.randn(len(places), 7, device=DEVICE)
    multiple = torch.randn(len(places), device=DEVICE) if scaled else None
    want = torch.zeros(5, 7, device=DEVICE)
    want[places - 20] = part if multiple is None else part * multiple[:, None]
    rows = rows if isinstance(rows, slice) else rows.to(DEVICE)
    features, head = torch.empty(30, 7, device=DEVICE), torch.eye(7, device=DEVICE)
    for acts in (triton_backend, twins):
        context = SimpleNamespace(shard=SimpleNamespace(group=None))
        source = SimpleNamespace(
            features=[features], weights=[head], products=PLAIN, acts=acts, context=context
        )
        hidden = HiddenGradient(source, [True], [SimpleNamespace(rows=chunk), None])
        hidden.add(LogitGradient(part, rows, multiple=multiple))
        torch.testing.assert_close(hidden.totals[0][chunk], want)
