"""Calls work inside a trainer's features: autocast, checkpointing, compile, accumulation,
copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headloss as hl
from headloss.testing import error, plain, random_batch, trained_looking

T, H, V = 20, 8, 33


def problem(dtype=torch.float64, tokens=T):
    hidden, weight, targets = trained_looking(tokens, H, V, dtype)
    logps = (hidden.float() @ weight.float().T).log_softmax(-1)
    logps = logps.gather(1, targets.unsqueeze(1)).squeeze(1)
    targets[[2, 15]] = -100
    return hidden, weight, random_batch(targets, hl.Segments.from_lengths([4, 7, 3, 6]), logps)


OBJECTIVE = hl.gspo() + hl.cross_entropy() - 0.1 * hl.entropy()


class Model(nn.Module):
    """A model with an embedding, two layers and a head; `tied` shares the embedding's weight."""

    def __init__(self, tied: bool = False, dtype=torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(H, H, dtype=dtype) for _ in range(2))
        self.head = nn.Linear(H, V, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight

    def body(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.named_parameters()}


def ids_and_batch(rows: int = 2, length: int = 9) -> tuple[Tensor, hl.Batch]:
    ids = torch.randint(V, (rows, length))
    return ids, hl.Batch.from_labels(ids)


def plain_loss(model: Model, ids: Tensor, batch: hl.Batch) -> Tensor:
    logits = model.head(model.body(ids))
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


def by_plain_autograd(model: Model, ids: Tensor, batch: hl.Batch):
    model.zero_grad()
    loss = plain_loss(model, ids, batch)
    loss.backward()
    found = model.gradients()
    model.zero_grad()
    return loss.detach(), found


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], **tolerance) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


# ---------------------------------------------------------------------- a model


@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model(schedule, tied):
    """A model's gradients are correct; with tied embeddings the head's gradient adds to the
    embedding's."""
    model = Model(tied)
    ids, batch = ids_and_batch()
    want = by_plain_autograd(model, ids, batch)
    options = hl.Options(schedule=schedule, chunk_tokens=5)
    head = hl.Head.of(model.embed if tied else model.head)
    out = hl.head_loss(model.body(ids), head, batch, hl.cross_entropy(), options)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want[0])
    assert_same(model.gradients(), want[1])


def test_gradient_accumulation_over_micro_batches():
    """Gradient accumulation with global totals is exact for micro-batches of any lengths."""
    model = Model()
    ids, _ = ids_and_batch(4, 9)
    labels = ids.clone()
    labels[0, 3:], labels[2, 5:] = -100, -100
    whole = hl.Batch.from_labels(labels)
    want = by_plain_autograd(model, ids, whole)
    parts = [(ids[rows], hl.Batch.from_labels(labels[rows])) for rows in ([0], [1, 2], [3])]
    totals = sum(hl.Totals.of(batch) for _, batch in parts)
    assert int(totals.tokens) == int((whole.targets != -100).sum()) and int(totals.segments) == 4
    loss = 0.0
    for part_ids, batch in parts:
        batch.totals = totals
        head = hl.Head.of(model.head)
        out = hl.head_loss(model.body(part_ids), head, batch, hl.cross_entropy())
        out.loss.backward()
        loss += out.loss.detach()
    torch.testing.assert_close(loss, want[0])
    assert_same(model.gradients(), want[1])


def test_the_same_hidden_states_under_two_losses():
    """Two losses on common hidden states add their gradients."""
    hidden, weight, batch = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    head = hl.Head(weight)
    first = hl.head_loss(hidden, head, batch, hl.cross_entropy())
    second = hl.head_loss(hidden, head, batch, hl.gspo())
    (first.loss + 2 * second.loss).backward()
    want = plain(hidden, head, batch, hl.cross_entropy() + 2 * hl.gspo())
    torch.testing.assert_close(hidden.grad, want.gradients["hidden"])
    torch.testing.assert_close(weight.grad, want.gradients["weight"])


def test_weights_that_changed_between_forward_and_backward():
    """Under the schedule `recompute`, changing the head's weight between forward and backward
    raises, as PyTorch's autograd does."""
    hidden, weight, batch = problem()
    weight.requires_grad_()
    out = hl.head_loss(
        hidden, hl.Head(weight), batch, hl.cross_entropy(), hl.Options(schedule="recompute")
    )
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


# ---------------------------------------------------------------------- autocast


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "static"])
def test_autocast(schedule):
    """Under autocast, fp32 parameters are multiplied in bf16, and their fp32 gradients are at least
    as accurate as plain autocast's."""
    hidden, weight, batch = problem(torch.float32)
    exact = plain(
        hidden.requires_grad_(), hl.Head(weight.requires_grad_()), batch, hl.cross_entropy()
    )
    options = hl.Options(static=True) if schedule == "static" else hl.Options(schedule=schedule)
    with torch.autocast("cpu", torch.bfloat16):
        out = hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy(), options)
        logits = F.linear(hidden, weight)
        assert logits.dtype == torch.bfloat16
        eager = F.cross_entropy(logits.float(), batch.targets)
    assert out.loss.dtype == torch.float32
    want = torch.autograd.grad(eager, (hidden, weight))
    out.loss.backward()
    assert error(out.loss, exact.loss) <= 3 * error(eager, exact.loss) + 1e-6
    for leaf, plain_autocast, name in zip(
        (hidden, weight), want, ("hidden", "weight"), strict=True
    ):
        assert leaf.grad.dtype == torch.float32
        oracle = exact.gradients[name]
        assert error(leaf.grad, oracle) <= 1.5 * error(plain_autocast, oracle) + 1e-6, name


def test_autocast_with_mixed_dtypes():
    """Autocast supports bf16 hidden states with fp32 weights."""
    hidden, weight, batch = problem(torch.float32)
    exact = plain(hidden, hl.Head(weight.requires_grad_()), batch, hl.cross_entropy())
    with torch.autocast("cpu", torch.bfloat16):
        out = hl.head_loss(hidden.bfloat16(), hl.Head(weight), batch, hl.cross_entropy())
        found = hl.head_stats(hidden.bfloat16(), hl.Head(weight), batch.targets)
    out.loss.backward()
    assert weight.grad.dtype == torch.float32
    assert error(weight.grad, exact.gradients["weight"]) < 0.02
    torch.testing.assert_close(found.logp, out.logps, rtol=1e-5, atol=1e-5)


def test_autocast_and_head_stats():
    hidden, weight, batch = problem(torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = hl.head_stats(hidden, hl.Head(weight), batch.targets)
        out = hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy())
    assert found.logp.dtype == torch.float32
    torch.testing.assert_close(found.logp, out.logps, rtol=1e-5, atol=1e-5)
    count = int((batch.targets != -100).sum())
    want = torch.autograd.grad(out.loss, (hidden, weight))
    got = torch.autograd.grad(-found.logp.sum() / count, (hidden, weight))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert error(a, b) < 0.01


def test_float64_ignores_autocast():
    hidden, weight, batch = problem()
    want = hl.head_loss(hidden, hl.Head(weight), batch, OBJECTIVE).loss
    with torch.autocast("cpu", torch.bfloat16):
        out = hl.head_loss(hidden, hl.Head(weight), batch, OBJECTIVE)
    assert out.loss.dtype == torch.float64 and out.loss.equal(want)


# ---------------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_checkpointing_around_the_model(use_reentrant, schedule):
    model = Model()
    ids, batch = ids_and_batch()
    want = by_plain_autograd(model, ids, batch)

    def body(x: Tensor) -> Tensor:
        for layer in model.layers:
            x = x + layer(x).tanh()
        return x

    hidden = checkpoint(body, model.embed(ids), use_reentrant=use_reentrant)
    out = hl.head_loss(
        hidden, hl.Head.of(model.head), batch, hl.cross_entropy(), hl.Options(schedule=schedule)
    )
    out.loss.backward()
    assert_same(model.gradients(), want[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_checkpointing_around_the_loss(use_reentrant, schedule):
    """Under activation checkpointing the loss call runs twice, but each gradient is counted
    once."""
    model = Model()
    ids, batch = ids_and_batch()
    want = by_plain_autograd(model, ids, batch)
    options = hl.Options(schedule=schedule, chunk_tokens=4)

    def loss(hidden: Tensor) -> Tensor:
        return hl.head_loss(hidden, hl.Head.of(model.head), batch, hl.cross_entropy(), options).loss

    value = checkpoint(loss, model.body(ids), use_reentrant=use_reentrant)
    (2 * value).backward()
    torch.testing.assert_close(value.detach(), want[0])
    assert_same(model.gradients(), {name: 2 * g for name, g in want[1].items()})


# ---------------------------------------------------------------------- no gradient


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient(mode):
    hidden, weight, batch = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    want = hl.head_loss(hidden, hl.Head(weight), batch, OBJECTIVE)
    with mode():
        out = hl.head_loss(hidden, hl.Head(weight), batch, OBJECTIVE)
        found = hl.head_stats(hidden, hl.Head(weight), batch.targets)
        top = hl.head_topk(hidden, hl.Head(weight), 2)
        given = hl.logits_loss(hidden @ weight.T, batch, OBJECTIVE)
    assert out.plan.schedule == given.plan.schedule == "statistics"
    assert not any(value.requires_grad for value in (out.loss, given.loss, *found))
    torch.testing.assert_close(out.loss, want.loss.detach())
    torch.testing.assert_close(given.loss, want.loss.detach())
    torch.testing.assert_close(found.logp, want.logps)
    assert top.ids.shape == (T, 2)
    assert out.metrics.compute() == pytest.approx(want.metrics.compute())
    assert given.metrics.compute() == pytest.approx(want.metrics.compute())


def test_everything_made_in_inference_mode():
    """All inputs may be inference tensors, as in a rollout worker."""
    with torch.inference_mode():
        hidden, weight, batch = problem()
        out = hl.head_loss(hidden, hl.Head(weight), batch, OBJECTIVE)
        found = hl.head_stats(hidden, hl.Head(weight), batch.targets)
    want = hl.head_loss(*_outside(hidden, weight, batch), OBJECTIVE)
    torch.testing.assert_close(out.loss, want.loss)
    torch.testing.assert_close(found.logp, want.logps)


def _outside(hidden, weight, batch):
    fields = {name: value.clone() for name, value in batch.fields.items()}
    segments = hl.Segments.from_ids(batch.segments.ids.clone(), count=batch.segments.count)
    return (
        hidden.clone(),
        hl.Head(weight.clone()),
        hl.Batch(batch.targets.clone(), segments, **fields),
    )


def test_fields_from_a_rollout_in_inference_mode():
    """Old log-probs made in inference mode work in a training step."""
    hidden, weight, batch = problem()
    weight.requires_grad_()
    with torch.inference_mode():
        old = hl.head_loss(hidden, hl.Head(weight), batch, hl.entropy()).logps
    data = hl.Batch(batch.targets, batch.segments, advantages=batch.advantages, old_logps=old)
    out = hl.head_loss(hidden, hl.Head(weight), data, hl.grpo())
    out.loss.backward()
    assert float(out.metrics["grpo/ratio"]) == pytest.approx(1)
    assert weight.grad.abs().sum() > 0


# ---------------------------------------------------------------------- torch.compile


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_function_that_calls_head_loss():
    """A compiled function may call head_loss, with a graph break."""
    hidden, weight, batch = problem()
    hidden.requires_grad_(), weight.requires_grad_()

    def step(x: Tensor, w: Tensor) -> Tensor:
        return 2 * hl.head_loss(x.tanh(), hl.Head(w), batch, OBJECTIVE).loss

    want = step(hidden, weight)
    compiled = torch.compile(step, backend="eager")
    got = compiled(hidden, weight)
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(got, (hidden, weight)),
        torch.autograd.grad(want, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("temperature", ["number", "tensor"])
def test_head_stats_does_not_break_the_graph(temperature):
    hidden, weight, batch = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    t = 0.7 if temperature == "number" else torch.linspace(0.5, 1, T, dtype=torch.float64)

    def step(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        found = hl.head_stats(x.tanh(), hl.Head(w, temperature=t), targets)
        return (found.logp.exp() * found.entropy + 1e-3 * found.lse.square()).sum()

    want = step(hidden, weight, batch.targets)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    got = compiled(hidden, weight, batch.targets)
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(got, (hidden, weight)),
        torch.autograd.grad(want, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


# Text of the registered operator's last arguments: `candidate_tail` is False, and the options have
# their defaults.
AS_USUAL = "False, ['auto', False, True]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_operator_is_registered_well(dtype, with_bias):
    hidden, weight, batch = problem(dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    bias = torch.randn(V).to(dtype).requires_grad_() if with_bias else None
    factors, constants = [hidden, weight, *([] if bias is None else [bias])], [batch.targets, None]
    numbers = [1.0, 0.0, 1.0, 0.0]
    arguments = (factors, [*constants, None], [V, 0, 0], numbers, AS_USUAL)
    torch.library.opcheck(
        torch.ops.headloss.head_stats.default,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_the_operator_under_dynamic_shapes():
    hidden, weight, batch = problem(torch.float32)
    hidden.requires_grad_()
    constants, numbers = [batch.targets, None, None], [1.0, 30.0, 1.0, 0.0]
    torch.library.opcheck(
        torch.ops.headloss.head_stats.default,
        ([hidden, weight], constants, [V, 0, 0], numbers, AS_USUAL),
        test_utils=("test_aot_dispatch_dynamic",),
    )


# ---------------------------------------------------------------------- copies


def test_options_and_plans_copy_and_pickle():
    hidden, weight, batch = problem()
    options = hl.Options(chunk_tokens=7, schedule="recompute", logits_dtype=torch.bfloat16)
    plan = hl.plan(hidden.requires_grad_(), hl.Head(weight), batch, OBJECTIVE, options)
    for value in (options, plan, hl.Totals(3, 4), hl.token_mean, hl.fixed_length(7)):
        assert copy.deepcopy(value) == value
        assert pickle.loads(pickle.dumps(value)) == value


def test_outputs_pickle():
    """Outputs can be pickled, to send metrics to another process."""
    hidden, weight, batch = problem()
    out = hl.head_loss(hidden, hl.Head(weight), batch, OBJECTIVE)
    again = pickle.loads(pickle.dumps(out.metrics))
    assert type(again) is hl.Metrics and again.compute() == out.metrics.compute()


@pytest.mark.parametrize("term", [hl.gspo(), hl.grpo().corrected("token_mask"), hl.kl() + hl.dpo()])
def test_shipped_objectives_copy_and_pickle(term):
    hidden, weight, batch = problem()
    want = hl.head_loss(hidden, hl.Head(weight), batch, term).loss
    for other in (copy.deepcopy(term), pickle.loads(pickle.dumps(term))):
        assert hl.head_loss(hidden, hl.Head(weight), batch, other).loss.equal(want)


# ---------------------------------------------------------------------- static shapes


STATIC = [
    hl.cross_entropy(label_smoothing=0.1) + hl.z_loss(),
    hl.grpo() + hl.kl(estimator="k3"),
    hl.gspo() - 0.1 * hl.entropy(),
    hl.gmpo() + hl.vespo(),
    hl.dpo(),
    hl.grpo().top_entropy(quantile=0.5),
    hl.grpo().corrected("sequence_truncate"),
    hl.grpo().where("keep").weighted("sampling_logps"),
    hl.distillation(divergence="js"),
]


@pytest.mark.parametrize("objective", STATIC, ids=repr)
@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 6}, {"schedule": "recompute"}], ids=str)
def test_static_shapes_change_nothing(objective, options):
    hidden, weight, batch = problem()
    fields = {**batch.fields, "keep": torch.rand(T) > 0.3}
    if objective is STATIC[-1]:
        fields["teacher_logits"] = torch.randn(T, V, dtype=torch.float64)
    batch = hl.Batch(batch.targets, batch.segments, **fields)
    found = []
    for static in (False, True):
        x, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        out = hl.head_loss(x, hl.Head(w), batch, objective, hl.Options(static=static, **options))
        out.loss.backward()
        found.append((out, x.grad, w.grad))
    (want, dx, dw), (got, static_dx, static_dw) = found
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(static_dx, dx)
    torch.testing.assert_close(static_dw, dw)
    torch.testing.assert_close(got.logps, want.logps)
    torch.testing.assert_close(got.entropies, want.entropies)
    for name, value in want.terms.items():
        torch.testing.assert_close(got.terms[name], value)
    assert got.metrics.compute() == pytest.approx(want.metrics.compute(), nan_ok=True)


def test_static_shapes_with_a_temperature_per_token():
    hidden, weight, batch = problem()
    head = hl.Head(weight, temperature=torch.linspace(0.5, 2, T, dtype=torch.float64))
    losses = [
        hl.head_loss(hidden, head, batch, OBJECTIVE, hl.Options(static=static)).loss
        for static in (False, True)
    ]
    torch.testing.assert_close(*losses)
