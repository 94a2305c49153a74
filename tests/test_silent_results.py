"""Calls that could silently give a wrong result are correct or raise.

N positions, H hidden width, V vocabulary, S segments. Each case is compared with a formula or with
float64 plain logits.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

import headloss as hl
from headloss.__main__ import main
from headloss.engine import plan

N, H, V = 24, 8, 32
LENGTHS = [5, 1, 8, 10]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def problem(
    dtype: torch.dtype = torch.float32, scored: bool = True
) -> tuple[Tensor, Tensor, dict[str, Tensor], hl.Segments, Tensor]:
    """Return hidden, weight, fields, segments and targets, optionally with unscored positions."""
    hidden, weight = draw(N, H, dtype=dtype), draw(V, H, dtype=dtype)
    targets = torch.randint(V, (N,))
    if not scored:
        targets[[2, 11, 23]] = -100
    logps = ("old_logps", "ref_logps", "sampling_logps")
    fields = {name: -draw(N, dtype=dtype).abs() - 2 for name in logps}
    fields["advantages"] = draw(N, dtype=dtype)
    return hidden, weight, fields, hl.Segments.from_lengths(LENGTHS), targets


# ---------------------------------------------------------------------- second derivatives

NO_SECOND = "second derivatives"
SCHEDULES = {
    "one_pass": hl.Options(schedule="one_pass"),
    "chunks": hl.Options(schedule="one_pass", chunk_tokens=5),
    "recompute": hl.Options(schedule="recompute"),
    "static": hl.Options(static=True),
    "declared": hl.Options(upstream=1.0),
}


def penalised(loss: Tensor, inputs: list[Tensor]) -> None:
    """Backpropagate a gradient penalty (a loss on gradients), as autograd does through logits."""
    gradients = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
    penalty = sum(g.square().sum() for g in gradients if g is not None)
    (loss + penalty).backward()


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_gradient_penalty_is_refused(schedule: str, lora: bool) -> None:
    hidden, weight, fields, segments, targets = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    head, inputs = hl.Head(weight), [hidden, weight]
    if lora:
        a, b = draw(2, H).requires_grad_(), draw(V, 2).requires_grad_()
        head, inputs = hl.Head(weight, lora=(hl.Lora(a=a, b=b, scaling=2.0),)), [hidden, a, b]
    batch = hl.Batch(targets, segments, **fields)
    for of in (inputs, inputs[:1], inputs[1:]):
        out = hl.head_loss(hidden, head, batch, hl.grpo() + hl.entropy(), SCHEDULES[schedule])
        with pytest.raises(RuntimeError, match=NO_SECOND):
            penalised(out.loss, of)


def test_a_gradient_penalty_of_a_frozen_head_is_refused() -> None:
    hidden, weight, fields, segments, targets = problem()
    hidden.requires_grad_()
    batch = hl.Batch(targets, segments, **fields)
    options = hl.Options(schedule="frozen")
    out = hl.head_loss(hidden, hl.Head(weight), batch, hl.grpo(), options)
    with pytest.raises(RuntimeError, match=NO_SECOND):
        penalised(out.loss, [hidden])


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_a_gradient_penalty_of_given_logits_is_refused(inplace: bool) -> None:
    hidden, weight, fields, segments, targets = problem()
    hidden.requires_grad_()
    logits = hidden @ weight.T
    batch = hl.Batch(targets, segments, **fields)
    out = hl.logits_loss(logits, batch, hl.grpo() + hl.entropy(), inplace=inplace)
    with pytest.raises(RuntimeError, match=NO_SECOND):
        penalised(out.loss, [logits])


@pytest.mark.parametrize("of", ["logp", "lse", "entropy"])
def test_a_gradient_penalty_of_statistics_is_refused(of: str) -> None:
    hidden, weight, _, _, targets = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    found = hl.head_stats(hidden, hl.Head(weight), targets)
    with pytest.raises(RuntimeError, match=NO_SECOND):
        penalised(getattr(found, of).sum(), [hidden, weight])


def test_a_hessian_vector_product_is_refused() -> None:
    hidden, weight, _, _, targets = problem()
    weight.requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return hl.head_loss(x, hl.Head(weight), hl.Batch(targets), hl.cross_entropy()).loss

    with pytest.raises(RuntimeError, match=NO_SECOND):
        torch.autograd.functional.hvp(loss, hidden, torch.ones_like(hidden))
    x = hidden.clone().requires_grad_()  # a first derivative works
    (gradient,) = torch.autograd.grad(loss(x), x)
    assert gradient.abs().sum() > 0


def test_the_logits_of_a_head_have_second_derivatives() -> None:
    """`Head.logits` supports second derivatives, with LoRA too, as the error for `head_loss`
    recommends."""
    hidden, weight, _, _, targets = problem(torch.float64)
    a, b = draw(2, H, dtype=torch.float64), draw(V, 2, dtype=torch.float64)
    for tensor in (hidden, weight, a, b):
        tensor.requires_grad_()
    head = hl.Head(weight, lora=(hl.Lora(a=a, b=b, scaling=2.0),))
    plain = hidden @ weight.T + 2.0 * hidden @ a.T @ b.T
    found = []
    for logits in (head.logits(hidden), plain):
        for tensor in (hidden, weight, a, b):
            tensor.grad = None
        loss = torch.nn.functional.cross_entropy(logits, targets)
        penalised(loss, [hidden, a])
        found.append([t.grad for t in (hidden, weight, a, b)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


# ---------------------------------------------------------------------- inference mode


@hl.term
def scaled_by_a_tensor(stats, batch, factor=None):
    return stats.logp * factor * batch.advantages


MADE_INSIDE = {
    "cross_entropy": "hl.cross_entropy(label_smoothing=0.1)",
    "grpo": "hl.grpo()",
    "gspo": "hl.gspo()",
    "gspo_token": "hl.gspo_token()",
    "ppo": "hl.ppo(dual_clip=2.0)",
    "cispo": "hl.cispo()",
    "sapo": "hl.sapo()",
    "gmpo": "hl.gmpo()",
    "vespo": "hl.vespo()",
    "kl": "hl.kl(estimator='k3', bias_corrected=True)",
    "dpo": "hl.dpo()",
    "simpo": "hl.simpo()",
    "unlikelihood": "hl.unlikelihood()",
    "weighted": "hl.reinforce().weighted('mine')",
    "modified": "hl.grpo().corrected('sequence_mask').off_policy_masked(.1).top_entropy(.4)",
    "own": "scaled_by_a_tensor(factor=torch.tensor(2.0))",
    "forward_kl": "hl.distillation()",
    "js": "hl.distillation(divergence='js', temperature=2.0)",
}


def objective_and_batch(name: str, stored: bool = False) -> tuple[hl.Term, hl.Batch]:
    _, _, fields, segments, targets = problem(scored=name in ("grpo", "forward_kl"))
    fields["mine"] = draw(N).abs()
    if name in ("forward_kl", "js") and stored:
        fields["teacher_topk_ids"] = torch.rand(N, V).argsort(-1)[:, :5]
        fields["teacher_topk_logps"] = draw(N, V).log_softmax(-1)[:, :5]
    elif name in ("forward_kl", "js"):
        fields["teacher_logits"] = draw(N, V)
    term = eval(MADE_INSIDE[name], {"hl": hl, "torch": torch, **globals()})
    return term, hl.Batch(targets, segments, **fields)


CASES = [(name, False) for name in MADE_INSIDE] + [("forward_kl", True), ("js", True)]


@pytest.mark.parametrize(("name", "stored"), CASES)
def test_every_term_in_inference_mode(name: str, stored: bool) -> None:
    """Each term in `MADE_INSIDE` works with all public functions in inference mode, and then in a
    training step."""
    hidden, weight = draw(N, H), draw(V, H)
    with torch.inference_mode():
        torch.manual_seed(1)
        term, batch = objective_and_batch(name, stored)
        out = hl.head_loss(hidden, hl.Head(weight), batch, term)
        given = hl.logits_loss(hidden @ weight.T, batch, term)
        static = hl.head_loss(hidden, hl.Head(weight), batch, term, hl.Options(static=True))
        planned = hl.plan(hidden, hl.Head(weight), batch, term)
        if not name.startswith(("forward", "js", "own")):
            assert hl.check_term(term).gradients
    assert planned.schedule == "statistics"
    torch.manual_seed(1)
    term, batch = objective_and_batch(name, stored)
    want = hl.head_loss(hidden, hl.Head(weight), batch, term).loss
    for found in (out, given, static):
        torch.testing.assert_close(found.loss, want)


@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
@pytest.mark.parametrize("name", ["grpo", "sapo", "forward_kl"])
def test_a_batch_of_inference_mode_is_trained_on(name: str, schedule: str) -> None:
    """A batch made in inference mode works in a training step, with and without unscored tokens."""
    with torch.inference_mode():
        torch.manual_seed(1)
        term, batch = objective_and_batch(name)
    torch.manual_seed(1)
    same_term, same_batch = objective_and_batch(name)
    hidden, start, found = draw(N, H), draw(V, H), []
    for objective, data in ((term, batch), (same_term, same_batch)):
        weight = start.clone().requires_grad_()
        options = hl.Options(schedule=schedule)
        hl.head_loss(hidden, hl.Head(weight), data, objective, options).loss.backward()
        found.append(weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


# ---------------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtypes", ["float32", "mixed"])
def test_likeliest_tokens_under_autocast_are_not_rounded(dtypes: str) -> None:
    hidden, weight = draw(64, 64), draw(500, 64)
    if dtypes == "mixed":
        hidden = hidden.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        top = hl.head_topk(hidden, hl.Head(weight), 3)
        logp = hl.head_stats(hidden, hl.Head(weight), top.ids[:, 1]).logp
    logits = hidden.bfloat16().double() @ weight.bfloat16().double().T
    want, _ = logits.log_softmax(-1).topk(3)
    assert top.logps.dtype == torch.float32
    torch.testing.assert_close(top.logps.double(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(top.logps[:, 1], logp, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- static shapes


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("schedule", ["auto", "one_pass", "recompute"])
@pytest.mark.parametrize("teacher", ["", "teacher_logits"])
def test_poison_in_unscored_logits_with_static_shapes(
    teacher: str, schedule: str, inplace: bool
) -> None:
    _, _, fields, segments, targets = problem(scored=False)
    unscored, logits = targets == -100, draw(N, V)
    objective = hl.grpo() + 0.1 * hl.z_loss() + hl.cross_entropy(label_smoothing=0.1)
    if teacher:
        fields[teacher] = draw(N, V)
        objective = objective + hl.distillation(divergence="js")
    found = []
    for poison in (None, math.nan, math.inf):
        x, given = logits.clone(), dict(fields)
        if poison is not None:
            x[unscored] = poison
            given = {name: value.clone() for name, value in fields.items()}
            for value in given.values():
                value[unscored] = poison
        x.requires_grad_()
        batch = hl.Batch(targets, segments, **given)
        options = hl.Options(static=True, schedule=schedule)
        out = hl.logits_loss(x * 1, batch, objective, inplace=inplace, options=options)
        out.loss.backward()
        assert (x.grad[unscored] == 0).all()
        found.append((out.loss.detach(), x.grad, out.logps))
    for got in found[1:]:
        for value, want in zip(got, found[0], strict=True):
            torch.testing.assert_close(value, want, rtol=0, atol=0)


# ---------------------------------------------------------------------- the clamp of log-ratios

FAR = 60.0  # Log-prob of one token minus its log-prob under the old policy.


def far_from_old(by: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, hl.Batch]:
    """Return hidden, weight, float64 log-probs and a batch, in which one token's log-prob is `by`
    above its old log-prob.

    The token with the log-ratio `by` is in a sequence of ten tokens; the log-ratios of the nine
    further tokens sum to about -`by`, so that the sequence's mean log-ratio is small.
    """
    hidden, weight, fields, segments, targets = problem(dtype)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)
    logps = exact.gather(1, targets.unsqueeze(1)).squeeze(1)
    change = 0.02 * torch.randn(N, dtype=torch.float64)
    first = sum(LENGTHS[:3])  # first token of the last sequence, which has 10 tokens
    change[first + 1 : first + 10] = -by / 9 + 0.001
    change[first] = by
    fields["old_logps"] = (logps - change).to(dtype)
    fields["advantages"] = torch.tensor([1.0, -0.5, 0.7, 2.0], dtype=dtype)
    batch = hl.Batch(targets, segments, **fields)
    return hidden, weight, logps, batch


def clamped_exp(x: Tensor) -> Tensor:
    return x.clamp(-20, 20).exp()


def per_sequence(values: Tensor, reduce) -> Tensor:
    return torch.stack([reduce(part) for part in values.split(LENGTHS)])


def sequence_formula(name: str, logps: Tensor, batch: hl.Batch) -> Tensor:
    """Return the loss `name`, computed in float64 by the formula of its paper, with clamped
    exponents."""
    old, advantages = batch.old_logps.double(), batch.advantages.double()
    sampling, ref = batch.sampling_logps.double(), batch.ref_logps.double()
    d, lengths = logps - old, torch.tensor(LENGTHS)
    at_token = advantages.repeat_interleave(lengths)
    mean = clamped_exp(per_sequence(d, torch.mean))
    if name in ("gspo", "luspo"):
        low, high = (3e-4, 4e-4) if name == "gspo" else (0.2, 0.2)
        clipped = mean.clamp(1 - low, 1 + high)
        loss = -torch.minimum(mean * advantages, clipped * advantages)
        return (loss * lengths).mean() if name == "luspo" else loss.mean()
    if name in ("gspo_token", "corrected"):
        ratio = mean.detach().repeat_interleave(lengths) * (logps - logps.detach()).exp()
        clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
        loss = -torch.minimum(ratio * at_token, clipped * at_token)
        if name == "corrected":
            weight = clamped_exp(per_sequence(old - sampling, torch.sum)).clamp(max=3.0)
            loss = loss * weight.repeat_interleave(lengths)
        return per_sequence(loss, torch.mean).mean()
    if name == "gmpo":
        clipped = torch.where(at_token > 0, d.clamp(max=0.4), d.clamp(min=-0.4))
        return -(clamped_exp(per_sequence(clipped, torch.mean)) * advantages).mean()
    if name == "vespo":
        log_w = (d + old - sampling).detach()
        log_w = per_sequence(log_w, torch.sum).clamp(math.log(1e-8), 20)
        k, rate = (torch.where(advantages >= 0, *pair) for pair in ((2.0, 3.0), (3.0, 2.0)))
        phi = (rate + k * log_w - rate * log_w.exp()).exp() * advantages
        return -(phi.repeat_interleave(lengths) * logps).mean()
    if name == "cispo":
        weight = mean.detach().clamp(max=1.28) * advantages
        return -(weight.repeat_interleave(lengths) * logps).mean()
    assert name == "kl"
    return ((logps - ref) * mean.repeat_interleave(lengths)).mean()


SEQUENCE_TERMS = {
    "gspo": hl.gspo(),
    "luspo": hl.luspo(),
    "gspo_token": hl.gspo_token(),
    "corrected": hl.gspo_token().corrected("sequence_truncate"),
    "gmpo": hl.gmpo(),
    "vespo": hl.vespo(),
    "cispo": hl.cispo(importance_sampling_level="sequence"),
    "kl": hl.kl(bias_corrected=True, importance_sampling_level="sequence"),
}


@pytest.mark.parametrize("by", [-FAR, FAR], ids=["below", "above"])
@pytest.mark.parametrize("name", SEQUENCE_TERMS)
def test_one_token_far_from_the_old_policy(name: str, by: float) -> None:
    """The log-ratio of one token far from the old policy enters the sequence's mean or sum
    unclamped, with its gradient."""
    hidden, weight, _, batch = far_from_old(by, torch.float64)
    # The old policy's log-probs minus the sampler's are about -25 and 25.5 at two tokens. Clamping
    # each token's difference to [-20, 20] would change the sum over the sequence.
    if name in ("vespo", "corrected"):
        fields = {n: getattr(batch, n) for n in ("advantages", "old_logps", "ref_logps")}
        sampling = batch.old_logps + 0.01
        sampling[-1] += 25.0
        sampling[-2] -= 25.5
        batch = hl.Batch(batch.targets, batch.segments, **fields, sampling_logps=sampling)
    found = []
    for exact in (False, True):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if exact:
            logps = (x @ w.T).log_softmax(-1).gather(1, batch.targets.unsqueeze(1)).squeeze(1)
            loss = sequence_formula(name, logps, batch)
        else:
            loss = hl.head_loss(x, hl.Head(w), batch, SEQUENCE_TERMS[name]).loss
        loss.backward()
        found.append((loss.detach(), x.grad, w.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_gspo_of_one_token_far_below_by_hand() -> None:
    """One token far below the old policy enters GSPO's ratio of 1000 tokens without a clamp:
    exp(-50 / 1000) = exp(-0.05)."""
    logits = torch.zeros(1000, 2, dtype=torch.float64, requires_grad=True)
    old = torch.full((1000,), -math.log(2), dtype=torch.float64)
    old[17] += 50.0
    batch = hl.Batch(
        torch.zeros(1000, dtype=torch.int64), advantages=torch.tensor([1.0]), old_logps=old
    )
    out = hl.logits_loss(logits, batch, hl.gspo())
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(-math.exp(-0.05), rel=1e-9)
    # The sequence has the ratio s = exp(-0.05) and n = 1000 tokens of probability p = 0.5. Each
    # target logit has the derivative -s (1 - p) / n, also that of token 17 with a large log-ratio.
    assert logits.grad[:, 0].tolist() == pytest.approx([-math.exp(-0.05) * 0.5 / 1000] * 1000)


def test_what_is_exponentiated_is_still_bounded() -> None:
    """Exponents stay bounded: a sequence far above the old policy has ratio exp(20) and finite
    gradients."""
    hidden, weight, fields, segments, targets = problem()
    fields["old_logps"] = torch.full((N,), -500.0)
    batch = hl.Batch(targets, segments, **fields)
    soft = hl.sapo(importance_sampling_level="sequence")
    for term in (hl.gspo(), hl.gspo_token(), hl.grpo(), soft):
        x = hidden.clone().requires_grad_()
        out = hl.head_loss(x, hl.Head(weight), batch, term)
        out.loss.backward()
        largest = float(out.metrics[f"{term.name}/ratio_max"])
        assert largest == pytest.approx(math.exp(20), rel=1e-5)
        assert x.grad.isfinite().all()


# ---------------------------------------------------------------------- the plan of a float16 call


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_command_line_plans_what_a_call_takes(
    dtype: str, frozen: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"tokens": 96, "hidden": 8, "vocab": 50, "dtype": dtype, "device": "cpu"}
    line = [x for name, value in arguments.items() for x in (f"--{name}", str(value))]
    line += ["--segment-length", "96", "--objective", "cross_entropy", "--schedule", "recompute"]
    assert main(["plan", "--json", *line, *(["--frozen-head"] if frozen else [])]) == 0
    shown = json.loads(capsys.readouterr().out)
    kind = getattr(torch, dtype)
    hidden = torch.zeros(96, 8, dtype=kind, requires_grad=True)
    head = hl.Head(torch.zeros(50, 8, dtype=kind, requires_grad=not frozen))
    batch = hl.Batch(torch.zeros(96, dtype=torch.int64))
    options = hl.Options(schedule="recompute")
    found = hl.plan(hidden, head, batch, hl.cross_entropy(), options)
    assert shown["bytes"] == found.bytes


# ---------------------------------------------------------------------- terms that depend on values


@hl.term
def explores_where_asked(stats, batch):
    if (batch.asked > 0).any():
        return -stats.logp - 0.5 * stats.entropy
    return -stats.logp


@pytest.mark.parametrize("asked", [-1.0, 1.0])
def test_a_gradient_that_depends_on_the_values_of_a_batch(asked: float) -> None:
    """A term whose gradient depends on batch values is correct or raises under the `frozen`
    schedule."""
    hidden, weight, _, _, targets = problem(torch.float64)
    batch, head = hl.Batch(targets, asked=torch.full((N,), asked)), hl.Head(weight)
    z = hidden.requires_grad_() @ weight.T
    logp = z.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1) * (asked > 0)
    want = -(logp[torch.arange(N), targets] + 0.5 * entropy).mean()
    (gradient,) = torch.autograd.grad(want, hidden)
    for schedule in ("recompute", "frozen"):
        options = hl.Options(schedule=schedule)
        call = hidden, head, batch, explores_where_asked(), options
        if asked > 0 and schedule == "frozen":
            with pytest.raises(ValueError, match="gradient of more than logp for the values"):
                hl.head_loss(*call)
            continue
        (found,) = torch.autograd.grad(hl.head_loss(*call).loss, hidden)
        torch.testing.assert_close(found, gradient)


# ---------------------------------------------------------------------- excluded tokens


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "held"])
def test_what_a_term_leaves_out_may_be_nan(monkeypatch, schedule: str) -> None:
    """Hidden states of tokens excluded by `.where` may be NaN, also in a call so small that it does
    not skip the rows without a gradient."""
    monkeypatch.setattr(plan, "CPU_SKIP_WORTH", 1 << 24)
    hidden, weight, _, _, targets = problem(torch.float64)
    kept = torch.arange(N) != 1
    batch, found = hl.Batch(targets, kept=kept), []
    for poison in (0.0, math.nan):
        x = torch.where(kept[:, None], hidden, poison).requires_grad_()
        head = hl.Head(weight.clone().requires_grad_())
        objective = hl.cross_entropy().where("kept")
        out = hl.head_loss(x, head, batch, objective, hl.Options(schedule=schedule))
        found.append(torch.autograd.grad(out.loss, (x, head.weight)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_a_reduction_of_what_a_term_leaves_out_may_be_infinite() -> None:
    """A reduction over kept tokens may give an infinite weight to a segment without kept tokens."""
    hidden, weight, _, _, targets = problem(torch.float64)
    kept = torch.arange(N) < N // 2
    batch = hl.Batch(targets, hl.Segments.from_lengths([N // 2, N - N // 2]), kept=kept)
    over = hl.Reduction("pairs", lambda lengths, tokens, segments: 1 / (lengths - 1))
    got = hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy().over(over).where("kept"))
    logp = (hidden @ weight.T).log_softmax(-1)[torch.arange(N), targets]
    torch.testing.assert_close(got.loss, -logp[kept].sum() / (N // 2 - 1))


@pytest.mark.parametrize("own", [hl.token_mean, hl.sequence_sum, hl.fixed_length(7)])
def test_a_reduction_that_is_made_of_the_librarys(own: hl.Reduction) -> None:
    """A custom reduction built from the library's reductions works, since `weigh` is public."""
    hidden, weight, _, _, targets = problem(torch.float64)
    half = hl.Reduction("half", lambda *given: own.weigh(*given) / 2)
    call = hidden, hl.Head(weight), hl.Batch(targets)
    one, two = (hl.head_loss(*call, hl.cross_entropy().over(over)).loss for over in (half, own))
    torch.testing.assert_close(2 * one, two)


# ---------------------------------------------------------------------- integer inputs

POLICY = {
    "reinforce": hl.reinforce, "dapo": hl.dapo, "gspo": hl.gspo, "gmpo": hl.gmpo, "sapo": hl.sapo,
    "cispo": hl.cispo, "vespo": hl.vespo, "fipo": hl.fipo, "cross_entropy": hl.cross_entropy,
    "z_loss": hl.z_loss, "unlikelihood": hl.unlikelihood,
}  # fmt: skip
WHOLE = [torch.int64, torch.int8, torch.bool]


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", POLICY)
def test_advantages_and_weights_that_are_whole_numbers(name: str, default: torch.dtype) -> None:
    """Integer advantages and weights are correct, although a product with integers has torch's
    default dtype."""
    hidden, weight, fields, segments, targets = problem(torch.float64, scored=False)
    whole = torch.randint(-3, 4, (N,))

    def run(advantages: Tensor, weights: Tensor) -> list[Tensor]:
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        data = {**fields, "advantages": advantages, "weights": weights}
        batch = hl.Batch(targets, segments, **data)
        out = hl.head_loss(x, hl.Head(w), batch, POLICY[name]().weighted("weights"))
        out.loss.backward()
        assert x.grad is not None and w.grad is not None
        return [out.loss.detach(), x.grad, w.grad]

    for advantages, dtype in [(a, d) for a in (whole, whole.int()) for d in WHOLE]:
        weights = (whole + 1).to(dtype)
        want = run(advantages.double(), weights.double())
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            got = run(advantages, weights)
        finally:
            torch.set_default_dtype(before)
        torch.testing.assert_close(got, want, atol=1e-14, rtol=1e-12)
