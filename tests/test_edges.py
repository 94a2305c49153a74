"""Calls are correct for empty batches, odd chunk sizes, and numbers at the ends of their range."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.testing import error, plain, trained_looking

H, V = 6, 21
SCHEDULES = ["one_pass", "recompute", "frozen", "static"]


def options(schedule: str, **given) -> hl.Options:
    if schedule == "static":
        return hl.Options(static=True, **given)
    return hl.Options(schedule=schedule, **given)


def run(schedule, hidden, weight, batch, objective, **given):
    """Return the output and the gradients of hidden and weight (None for a frozen head)."""
    hidden = hidden.detach().requires_grad_()
    weight = weight.detach().requires_grad_(schedule != "frozen")
    out = hl.head_loss(hidden, hl.Head(weight), batch, objective, options(schedule, **given))
    out.loss.backward()
    return out, hidden.grad, weight.grad


def policy_fields(shape, dtype=torch.float32) -> dict[str, Tensor]:
    return {
        "advantages": torch.randn(shape, dtype=dtype),
        "old_logps": -torch.rand(shape, dtype=dtype) - 1,
        "ref_logps": -torch.rand(shape, dtype=dtype) - 1,
        "sampling_logps": -torch.rand(shape, dtype=dtype) - 1,
    }


# Objectives of every scope; the `frozen` schedule supports only losses of log-probs.
OBJECTIVES = [
    hl.cross_entropy(),
    hl.grpo() + hl.kl(estimator="k3"),
    hl.gspo(),
    hl.gmpo() + hl.vespo(),
    hl.dpo(),
    hl.grpo().top_entropy(quantile=0.5),
    hl.grpo().corrected("sequence_mask"),
]


def zero(gradient: Tensor | None) -> bool:
    """Return True if the gradient is a tensor of zeros, and not None."""
    return gradient is not None and bool(gradient.eq(0).all())


# ---------------------------------------------------------------------- empty batches


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_empty_batch(schedule, objective):
    batch = hl.Batch(
        torch.zeros(0, dtype=torch.long), hl.Segments.from_lengths([]), **policy_fields(0)
    )
    out, dx, dw = run(schedule, torch.zeros(0, H), torch.randn(V, H), batch, objective)
    assert out.loss.item() == 0 and out.logps.shape == (0,)
    assert dx is not None and dx.shape == (0, H)
    assert schedule == "frozen" or zero(dw)
    assert out.metrics.compute()["tokens"] == 0


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_scored(schedule, objective):
    """Without scored tokens the loss and all gradients are 0, even with NaN at unscored
    positions."""
    batch = hl.Batch(torch.full((2, 5), -100), **policy_fields((2, 5)))
    hidden = torch.full((2, 5, H), math.nan)
    out, dx, dw = run(schedule, hidden, torch.randn(V, H), batch, objective)
    assert out.loss.item() == 0
    assert all(value.item() == 0 for value in out.terms.values())
    assert zero(dx) and (schedule == "frozen" or zero(dw))
    assert zero(out.logps) and (out.entropies is None or zero(out.entropies))
    figures = out.metrics.compute()
    assert figures["tokens"] == 0 and figures["segments"] == 2


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "held"])
@pytest.mark.parametrize("given", ["logits", "hidden"])
def test_nothing_scored_beside_a_teacher(given, schedule):
    term = hl.distillation(teacher_head=hl.Head(torch.randn(V, H)) if given == "hidden" else None)
    teacher = {f"teacher_{given}": torch.randn(5, H if given == "hidden" else V)}
    batch = hl.Batch(torch.full((5,), -100), **teacher)  # type: ignore[arg-type]
    out, dx, dw = run(schedule, torch.zeros(5, H), torch.randn(V, H), batch, term)
    assert out.loss.item() == 0 and zero(dx) and zero(dw)
    assert hl.head_loss(torch.zeros(5, H), hl.Head(torch.zeros(V, H)), batch, term).loss == 0


def test_nothing_scored_without_a_gradient():
    batch = hl.Batch(torch.full((5,), -100))
    out = hl.head_loss(torch.zeros(5, H), hl.Head(torch.zeros(V, H)), batch, hl.cross_entropy())
    assert out.loss.item() == 0 and out.plan.schedule == "statistics"


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_empty_and_unscored_segments(schedule, objective):
    """Empty and unscored segments count in the reduction, and change nothing else."""
    hidden, weight, targets = trained_looking(11, H, V, torch.float64)
    targets[4:7] = -100  # all of segment 3
    targets[0] = -100
    segments = hl.Segments.from_lengths([0, 4, 0, 3, 4, 0])
    hidden[4:7] = math.nan
    fields = policy_fields(11, torch.float64)
    for value in fields.values():
        value[4:7] = math.nan
    batch = hl.Batch(targets, segments, **fields)
    out, dx, dw = run(schedule, hidden, weight, batch, objective)
    clean = hidden.nan_to_num().requires_grad_()  # the reference's matmul would spread NaN
    want = plain(clean, hl.Head(weight.requires_grad_()), batch, objective)
    torch.testing.assert_close(out.loss.detach(), want.loss)
    assert dx is not None and dx[4:7].eq(0).all() and dx[0].eq(0).all()
    kept = [1, 2, 3, 7, 8, 9, 10]
    torch.testing.assert_close(dx[kept], want.gradients["hidden"][kept])
    if dw is not None:
        torch.testing.assert_close(dw, want.gradients["weight"])
    torch.testing.assert_close(out.logps, want.logps)
    assert out.logps[targets == -100].eq(0).all()


def test_an_unscored_sequence_still_counts():
    hidden, weight, targets = trained_looking(8, H, V, torch.float64)
    half = hl.head_loss(
        hidden[:4], hl.Head(weight), hl.Batch(targets[:4]), hl.cross_entropy().over("sequence_mean")
    )
    targets[4:] = -100
    batch = hl.Batch(targets.view(2, 4))
    out = hl.head_loss(
        hidden.view(2, 4, H), hl.Head(weight), batch, hl.cross_entropy().over("sequence_mean")
    )
    torch.testing.assert_close(out.loss, half.loss / 2)


def test_the_loss_of_an_empty_segment_is_zero():
    """The loss of an empty segment is zero, whatever its field contains."""
    hidden, weight, targets = trained_looking(3, H, V, torch.float64)
    fields = {"old_logps": torch.full((3,), -1.0)}
    alone = hl.Batch(targets, hl.Segments.from_lengths([3]), advantages=torch.ones(1), **fields)
    both = hl.Batch(
        targets, hl.Segments.from_lengths([3, 0]), advantages=torch.tensor([1.0, 9.0]), **fields
    )
    for term in (hl.gspo(), hl.gmpo(), hl.luspo(), hl.sapo(importance_sampling_level="sequence")):
        one, two = (hl.head_loss(hidden, hl.Head(weight), b, term).loss for b in (alone, both))
        torch.testing.assert_close(two, one / 2)


# ---------------------------------------------------------------------- small sizes


@pytest.mark.parametrize("objective", [o for o in OBJECTIVES if o is not OBJECTIVES[4]], ids=repr)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_token(schedule, objective):
    hidden, weight, targets = trained_looking(1, H, V, torch.float64)
    batch = hl.Batch(targets, **policy_fields(1, torch.float64))
    out, dx, dw = run(schedule, hidden, weight, batch, objective)
    want = plain(hidden.requires_grad_(), hl.Head(weight.requires_grad_()), batch, objective)
    torch.testing.assert_close(out.loss.detach(), want.loss)
    torch.testing.assert_close(dx, want.gradients["hidden"])
    if dw is not None:
        torch.testing.assert_close(dw, want.gradients["weight"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_vocabulary_of_one(schedule):
    """A vocabulary of one token has log-prob 0, entropy 0 and no gradient."""
    batch = hl.Batch(torch.zeros(4, dtype=torch.long))
    objective = hl.cross_entropy() - hl.entropy() if schedule != "frozen" else hl.cross_entropy()
    out, dx, dw = run(schedule, torch.randn(4, H), torch.randn(1, H), batch, objective)
    assert out.loss.item() == 0
    assert zero(dx) and (dw is None or zero(dw))


@pytest.mark.covering
@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 1000])
@pytest.mark.parametrize("schedule", ["auto", "recompute", "frozen"])
@pytest.mark.parametrize("objective", [OBJECTIVES[1], OBJECTIVES[2], OBJECTIVES[4]], ids=repr)
def test_any_number_of_tokens_per_chunk(objective, schedule, chunk):
    """Every number of tokens per chunk is correct: one, fewer than a segment, more than the
    batch."""
    hidden, weight, targets = trained_looking(17, H, V, torch.float64)
    targets[3] = -100
    batch = hl.Batch(
        targets, hl.Segments.from_lengths([6, 2, 1, 8]), **policy_fields(17, torch.float64)
    )
    want = plain(hidden.requires_grad_(), hl.Head(weight.requires_grad_()), batch, objective)
    out, dx, dw = run(schedule, hidden, weight, batch, objective, chunk_tokens=chunk)
    torch.testing.assert_close(out.loss.detach(), want.loss)
    torch.testing.assert_close(dx, want.gradients["hidden"])
    torch.testing.assert_close(out.logps, want.logps)
    if dw is not None:
        torch.testing.assert_close(dw, want.gradients["weight"])


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_chunks_of_a_batch_scoped_objective(chunk):
    hidden, weight, targets = trained_looking(17, H, V, torch.float64)
    objective = OBJECTIVES[5] - 0.1 * hl.entropy()
    batch = hl.Batch(targets, **policy_fields(17, torch.float64))
    want = plain(hidden.requires_grad_(), hl.Head(weight.requires_grad_()), batch, objective)
    for budget in (None, 8 * V):
        out, dx, dw = run(
            "auto", hidden, weight, batch, objective, chunk_tokens=chunk, memory_budget=budget
        )
        torch.testing.assert_close(out.loss.detach(), want.loss)
        torch.testing.assert_close(dx, want.gradients["hidden"])
        torch.testing.assert_close(dw, want.gradients["weight"])


# ---------------------------------------------------------------------- shapes and dtypes


@pytest.mark.parametrize("shape", [(24,), (2, 12), (2, 3, 4), (1, 24, 1), (4, 2, 3, 1)])
def test_hidden_of_any_number_of_dimensions(shape):
    """Hidden states may have any number of dimensions; outputs have the targets' shape."""
    hidden, weight, targets = trained_looking(24, H, V, torch.float64)
    targets[5] = -100
    hidden, targets = hidden.view(*shape, H), targets.view(shape)
    batch = hl.Batch(targets, **policy_fields(shape, torch.float64))
    assert batch.segments.count == 24 // shape[-1]
    objective = hl.gspo() + hl.cross_entropy()
    out, dx, _ = run("one_pass", hidden, weight, batch, objective)
    want = plain(hidden.requires_grad_(), hl.Head(weight.requires_grad_()), batch, objective)
    assert out.logps.shape == out.entropies.shape == shape and dx.shape == hidden.shape
    torch.testing.assert_close(out.logps, want.logps)
    torch.testing.assert_close(out.entropies, want.entropies)
    torch.testing.assert_close(dx, want.gradients["hidden"])


def test_hidden_that_is_not_contiguous():
    hidden, weight, targets = trained_looking(12, H, V, torch.float64)
    strided = hidden.view(3, 4, H).transpose(0, 1)
    wide = torch.randn(V, 2 * H, dtype=torch.float64)[:, ::2]
    batch = hl.Batch(targets.view(3, 4).t())
    for w in (weight, wide):
        out, dx, dw = run("one_pass", strided, w, batch, hl.cross_entropy())
        want = plain(
            strided.detach().requires_grad_(),
            hl.Head(w.detach().requires_grad_()),
            batch,
            hl.cross_entropy(),
        )
        torch.testing.assert_close(out.loss.detach(), want.loss)
        torch.testing.assert_close(dx, want.gradients["hidden"])
        torch.testing.assert_close(dw, want.gradients["weight"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padded_rows_of_a_weight(schedule):
    """Padded rows of a weight are no tokens, and have a gradient of 0."""
    hidden, weight, targets = trained_looking(9, H, V)
    batch = hl.Batch(targets)
    want, dx, dw = run(schedule, hidden, weight, batch, hl.cross_entropy())
    leaf = hidden.detach().requires_grad_()
    padded = torch.cat([weight.detach(), torch.ones(3, H)]).requires_grad_(schedule != "frozen")
    head = hl.Head(padded, vocab_size=V)
    loss = hl.head_loss(leaf, head, batch, hl.cross_entropy(), options(schedule)).loss
    loss.backward()
    torch.testing.assert_close(loss, want.loss)
    torch.testing.assert_close(leaf.grad, dx)
    if dw is not None:
        torch.testing.assert_close(padded.grad[:V], dw)
        assert zero(padded.grad[V:])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_int32_targets(schedule):
    hidden, weight, targets = trained_looking(9, H, V)
    targets[2] = -100
    found = [
        run(schedule, hidden, weight, hl.Batch(targets.to(dtype)), hl.cross_entropy())
        for dtype in (torch.int64, torch.int32)
    ]
    assert found[0][0].loss.equal(found[1][0].loss) and found[0][1].equal(found[1][1])


def test_fields_of_another_dtype():
    """Fields of bf16 log-probs and integer advantages are used at their exact values."""
    hidden, weight, targets = trained_looking(9, H, V)
    fields = {"old_logps": -torch.rand(9).bfloat16(), "advantages": torch.arange(9) - 4}
    out = run("one_pass", hidden, weight, hl.Batch(targets, **fields), hl.grpo())
    same = {name: value.float() for name, value in fields.items()}
    want = run("one_pass", hidden, weight, hl.Batch(targets, **same), hl.grpo())
    assert out[0].loss.dtype == torch.float32
    torch.testing.assert_close(out[0].loss, want[0].loss)
    torch.testing.assert_close(out[1], want[1])


# ---------------------------------------------------------------------- extreme numbers


@pytest.mark.covering
@pytest.mark.parametrize("old", [-math.inf, -1e30, -200.0])
@pytest.mark.parametrize("objective", [hl.grpo(), hl.gspo(), hl.gspo_token(), hl.gmpo()], ids=repr)
@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_an_infinite_ratio_on_the_clipped_branch(schedule, objective, old):
    """With A > 0 the clip bounds an infinite importance ratio, so its gradient is 0 and not NaN."""
    hidden, weight, targets = trained_looking(6, H, V)
    fields = {"old_logps": torch.full((6,), old), "advantages": torch.ones(6)}
    out, dx, dw = run(schedule, hidden, weight, hl.Batch(targets, **fields), objective)
    assert out.loss.isfinite()
    assert zero(dx) and zero(dw)


@pytest.mark.parametrize(
    "objective", [hl.grpo(), hl.gspo(), hl.cispo(), hl.sapo(), hl.vespo()], ids=repr
)
def test_a_ratio_of_zero(objective):
    hidden, weight, targets = trained_looking(6, H, V)
    fields = {"old_logps": torch.full((6,), 300.0), "advantages": torch.tensor([1.0, -1] * 3)}
    out, dx, dw = run("one_pass", hidden, weight, hl.Batch(targets, **fields), objective)
    assert out.loss.isfinite() and dx.isfinite().all() and dw.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("objective", [hl.z_loss(), hl.entropy(), hl.z_loss() + hl.cross_entropy()])
def test_an_unlikely_target_keeps_its_digits(objective, backend):
    """The gradient of an unlikely target's logit is accurate, even for z-loss and entropy, where
    it is proportional to the target's tiny probability p(y)."""
    # Triton kernels need a GPU or the interpreter.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, targets = torch.zeros(3, 16, device=device), torch.tensor([1, 2, 7], device=device)
    hidden[:, 5] = torch.tensor([19.0, 24.0, 60.0])
    head, given = hl.Head(torch.eye(16, device=device)), hl.Options(backend=backend)
    hidden.requires_grad_()
    hl.head_loss(hidden, head, hl.Batch(targets), objective, given).loss.backward()
    exact = plain(hidden, head, hl.Batch(targets), objective).gradients["hidden"]
    off, own = (hidden.grad - exact).abs(), targets.unsqueeze(1)
    assert (off.gather(1, own) <= 2e-5 * exact.gather(1, own).abs()).all()


@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_the_sum_over_chunks_does_not_round_to_bfloat16(schedule):
    """Summing bfloat16 gradients over 64 chunks costs no more accuracy than rounding the exact
    gradient to bfloat16 once."""
    hidden, weight, targets = trained_looking(64, 16, 40, torch.bfloat16)
    hidden.requires_grad_(), weight.requires_grad_()
    head, batch = hl.Head(weight), hl.Batch(targets)
    out = hl.head_loss(hidden, head, batch, hl.cross_entropy(), options(schedule, chunk_tokens=1))
    out.loss.backward()
    want = plain(hidden, head, batch, hl.cross_entropy())
    for leaf, name in ((hidden, "hidden"), (weight, "weight")):
        exact = want.gradients[name]
        once = (leaf.grad.double() - exact).norm() / (exact.bfloat16().double() - exact).norm()
        assert once < 1.05


CAPPED = {
    "logp": hl.cross_entropy(),
    "entropy": hl.cross_entropy() - 0.1 * hl.entropy(),
    "forward_kl": hl.distillation(divergence="forward_kl"),
    "js": hl.distillation(divergence="js"),
}


@pytest.mark.covering
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("schedule", "objective"),
    [("frozen", "logp"), *itertools.product(["one_pass", "recompute"], CAPPED)],
)
def test_what_a_soft_cap_leaves_of_large_logits(schedule, objective, seed):
    """For logits far beyond the soft cap, the derivative 1 - tanh^2 is as accurate as PyTorch's
    tanh in float32."""
    torch.manual_seed(seed)
    hidden = (60 * torch.randn(12, 16)).requires_grad_()
    weight = torch.randn(31, 16).requires_grad_(schedule != "frozen")
    head = hl.Head(weight, softcap=30.0, logit_scale=-1.5, temperature=0.7)
    batch = hl.Batch(torch.randint(31, (12,)), teacher_logits=3 * torch.randn(12, 31))
    given = hidden, head, batch, CAPPED[objective]
    hl.head_loss(*given, options(schedule)).loss.backward()
    exact, coarse = plain(*given).gradients, plain(*given, "float32").gradients
    for name, want in exact.items():
        found = {"hidden": hidden, "weight": weight}[name].grad
        assert error(found, want) <= error(coarse[name], want) + 1e-6, name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_large_logits(schedule):
    """Hidden states of 1e4 concentrate the softmax on one token without overflow."""
    hidden, weight, targets = trained_looking(8, H, V)
    objective = hl.cross_entropy() if schedule == "frozen" else hl.cross_entropy() + hl.entropy()
    batch = hl.Batch(targets)
    out, dx, dw = run(schedule, hidden * 1e4, weight, batch, objective)
    assert out.loss.isfinite() and dx.isfinite().all()
    assert dw is None or dw.isfinite().all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_in_unscored_positions(schedule, poison):
    hidden, weight, targets = trained_looking(14, H, V)
    fields = policy_fields(14)
    unscored = torch.tensor([0, 3, 4, 13])
    targets[unscored] = -100
    segments = hl.Segments.from_lengths([5, 9])
    objective = hl.gspo() + hl.kl(estimator="k3") + hl.grpo().corrected("token_mask")
    clean = run(schedule, hidden, weight, hl.Batch(targets, segments, **fields), objective)
    hidden, fields = hidden.clone(), {n: v.clone() for n, v in fields.items()}
    hidden[unscored] = poison
    for value in fields.values():
        value[unscored] = poison
    out = run(schedule, hidden, weight, hl.Batch(targets, segments, **fields), objective)
    assert out[0].loss.equal(clean[0].loss)
    assert out[1].equal(clean[1]) and out[1][unscored].eq(0).all()
    assert (out[2] is None) == (clean[2] is None)
    assert out[2] is None or out[2].equal(clean[2])
    assert out[0].logps.equal(clean[0].logps)
    assert out[0].metrics.compute() == clean[0].metrics.compute()


@pytest.mark.parametrize("tokens", [12, V])  # 12 tokens, or V for V vocabulary entries
@pytest.mark.parametrize("chunk", [5, None])
@pytest.mark.parametrize("rows", [[], [0, 5, 6], list(range(12))])
def test_rows_without_a_gradient_whatever_memory_holds(fresh_memory_is_nan, rows, chunk, tokens):
    """The hidden gradient is exactly 0 at tokens with advantage 0, also if newly allocated memory
    contains NaN."""
    hidden, weight, targets = trained_looking(tokens, H, V)
    advantages = torch.randn(tokens)
    advantages[rows] = 0
    batch = hl.Batch(targets, advantages=advantages, old_logps=-torch.rand(tokens) - 1)
    want = run("one_pass", hidden, weight, batch, hl.grpo(), skip_rows=False, chunk_tokens=chunk)
    got = run("one_pass", hidden, weight, batch, hl.grpo(), chunk_tokens=chunk)
    assert got[1][rows].eq(0).all() and got[1].isfinite().all()
    torch.testing.assert_close(got[1:], want[1:])


@pytest.mark.usefixtures("skip_small_rows")
def test_rows_without_a_gradient_never_reach_the_products(monkeypatch):
    """Tokens with zero advantages are left out of the matmuls, under `one_pass` and `recompute`."""
    from headloss.head import products

    seen: list[int] = []

    def spy_on(name):
        inner = getattr(products.PLAIN, name)

        def spy(first, *args):
            seen.append(len(first))
            return inner(first, *args)

        monkeypatch.setattr(products.PLAIN, name, spy)

    spy_on("input_gradient")
    spy_on("add_input_gradient_")
    hidden, weight, targets = trained_looking(40, H, V)
    advantages = torch.zeros(40)
    advantages[[3, 17, 18, 30]] = 1.0
    batch = hl.Batch(targets, advantages=advantages)
    for schedule in ("one_pass", "recompute"):
        seen.clear()
        _, dx, _ = run(schedule, hidden, weight, batch, hl.reinforce())
        assert sum(seen) == 4
        assert dx.abs().sum(-1).nonzero().flatten().tolist() == [3, 17, 18, 30]
        dense = run(schedule, hidden, weight, batch, hl.reinforce(), skip_rows=False)
        torch.testing.assert_close(dense[1], dx)


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "static"])
def test_two_runs_give_the_same_bits(schedule):
    hidden, weight, targets = trained_looking(60, H, V)
    ids = torch.randint(5, (60,))
    batch = hl.Batch(targets, hl.Segments.from_ids(ids, count=5), **policy_fields(60))
    objective = hl.gspo() + hl.gmpo() - hl.entropy()
    first, second = (run(schedule, hidden, weight, batch, objective) for _ in range(2))
    assert first[0].loss.equal(second[0].loss)
    assert first[1].equal(second[1]) and first[2].equal(second[2])


@pytest.mark.parametrize("changed", ["targets", "temperature"])
def test_what_a_later_sweep_reads_may_not_change(changed):
    """A schedule that recomputes logits in the backward pass raises if an input was changed in
    between; `one_pass` does not read inputs again."""
    hidden, weight, targets = trained_looking(8, H, V, torch.float32)
    given = {"targets": targets.clone(), "temperature": torch.linspace(0.5, 2, 8)}
    for schedule in ("one_pass", "recompute"):
        leaf = hidden.detach().requires_grad_()
        head = hl.Head(weight.detach().requires_grad_(), temperature=given["temperature"])
        batch = hl.Batch(given["targets"])
        out = hl.head_loss(leaf, head, batch, hl.cross_entropy(), options(schedule))
        given[changed].add_(1).remainder_(V)
        if schedule == "one_pass":
            out.loss.backward()
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.loss.backward()


# ---------------------------------------------------------------------- a default device


def test_the_default_device_decides_nothing(tmp_path) -> None:
    """Internal tensors are on the call's device, whatever the default device."""
    hidden, weight = torch.randn(6, H), torch.randn(V, H, requires_grad=True)
    targets = torch.tensor([3, -100, 5, 1, 0, 2])
    fields = policy_fields(6)

    def run(group=None) -> list[Tensor]:
        batch, found = hl.Batch(targets, **fields), []
        for given in ({"gradient_tolerance": 0.3}, {"sequence_parallel": group is not None}):
            head = hl.Head(weight, vocab_group=group)
            out = hl.head_loss(hidden, head, batch, hl.gspo() + hl.z_loss(), hl.Options(**given))
            (gradient,) = torch.autograd.grad(out.loss, weight)
            figures = list(out.metrics.compute().values())
            found += [out.loss.detach(), gradient, torch.tensor(figures, device="cpu")]
        frozen = hl.Options(gradient_tolerance=0.3, schedule="frozen")
        x = hidden.clone().requires_grad_()
        out = hl.head_loss(x, hl.Head(weight.detach()), batch, hl.grpo(), frozen)
        assert {m.value.device.type for m in out.metrics.values()} == {"cpu"}
        return found

    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        for group in (None, torch.distributed.group.WORLD):
            want = run(group)
            hl.clear_cache()
            with torch.device("meta"):
                found = run(group)
            for got, expected in zip(found, want, strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    finally:
        torch.distributed.destroy_process_group()
    with torch.device("meta"):
        for term in (hl.gspo(), hl.any_of(), hl.grpo().where("kept")):
            hl.check_term(term)
        hl.check_term(
            hl.soft_cross_entropy(), candidate_probs=torch.ones(28, 4, device="cpu")
        )


def test_a_plan_of_temperatures_without_values() -> None:
    hidden, weight = (torch.empty(n, H, device="meta", requires_grad=True) for n in (6, V))
    head = hl.Head(weight, temperature=torch.ones(6, device="meta"))
    batch = hl.Batch(torch.tensor([3, -100, 5, 1, 0, 2]))
    found = hl.plan(hidden, head, batch, hl.cross_entropy())
    assert (found.schedule, found.tokens) == ("one_pass", 5)
