"""Divergences from a teacher's logits, head or stored top k agree with their plain formulas.

T tokens, V vocabulary, K stored outcomes; q is the teacher's distribution, p the student's.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from live_tensors import LiveTensors
from torch import Tensor

import headloss as hl
from headloss import losses
from headloss.testing import error, trained_looking

T, V, H = 13, 37, 6
LENGTHS = (4, 2, 0, 7)
KINDS = ("forward_kl", "reverse_kl", "js")
MORE_KINDS = ("skew_forward_kl", "skew_reverse_kl", "total_variation")
FORMS = ("logits", "hidden", "topk")
SCHEDULES = {
    "one_pass": hl.Options(schedule="one_pass"),
    "small_chunks": hl.Options(schedule="one_pass", chunk_tokens=2),
    "recompute": hl.Options(schedule="recompute", chunk_tokens=2),
    "recompute_rows": hl.Options(schedule="recompute", memory_budget=1),
    "static": hl.Options(static=True),
    "unskipped": hl.Options(skip_rows=False),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A student and a teacher in float64."""

    hidden: Tensor
    head: hl.Head
    teacher_hidden: Tensor
    teacher: hl.Head
    targets: Tensor

    def student_logits(self) -> Tensor:
        """Return logits [T, V] after scale and soft cap; a term's temperature replaces the
        head's."""
        return replace(self.head, temperature=1.0).logits(self.hidden)

    def teacher_logits(self) -> Tensor:
        return replace(self.teacher, temperature=1.0).logits(self.teacher_hidden)

    def batch(self, **fields: Tensor) -> hl.Batch:
        return hl.Batch(self.targets, hl.Segments.from_lengths(LENGTHS), **fields)

    def given(self, form: str, temperature: float = 1.0, k: int = 5) -> dict[str, Tensor]:
        """Return the batch fields of a teacher: its logits if `form` is "logits", its hidden
        states if `form` is "hidden", else its top-k log-probs."""
        if form == "logits":
            return {"teacher_logits": self.teacher_logits()}
        if form == "hidden":
            return {"teacher_hidden": self.teacher_hidden}
        logps, ids = (self.teacher_logits() / temperature).log_softmax(-1).topk(k)
        return {"teacher_topk_ids": ids, "teacher_topk_logps": logps}

    def run(
        self, objective: hl.Term | hl.Objective, options: hl.Options | None = None, **fields: Tensor
    ) -> tuple[hl.Output, Tensor, Tensor]:
        """Return the output, and the gradients of hidden and weight."""
        out = hl.head_loss(self.hidden, self.head, self.batch(**fields), objective, options)
        return out, *torch.autograd.grad(out.loss, [self.hidden, self.head.weight])


@pytest.fixture
def setting() -> Setting:
    hidden, weight, targets = trained_looking(T, H, V, torch.float64)
    other = torch.randn(V, 4, dtype=torch.float64)
    return Setting(
        hidden=hidden.requires_grad_(),
        head=hl.Head(weight.requires_grad_(), temperature=0.5, softcap=9.0, logit_scale=0.8),
        teacher_hidden=torch.randn(T, 4, dtype=torch.float64),
        teacher=hl.Head(other, temperature=3.0, softcap=7.0, logit_scale=1.5),
        targets=targets,
    )


def formula(log_q: Tensor, log_p: Tensor, kind: str, beta: float) -> Tensor:
    """Return a divergence [T] of log-probs [T, n]; F.kl_div(a, b) is KL(b || a)."""

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    if kind == "forward_kl":
        return kl(log_q, log_p)
    if kind == "reverse_kl":
        return kl(log_p, log_q)
    if kind == "total_variation":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    if kind == "skew_reverse_kl":
        return kl(log_p, (beta * log_p.exp() + (1 - beta) * log_q.exp()).log())
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    if kind == "skew_forward_kl":
        return kl(log_q, log_m)
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def coarse(log_p: Tensor, ids: Tensor) -> Tensor:
    """Return log-probs [T, K + 1]: the stored outcomes, and all other columns as one outcome."""
    inside = torch.zeros_like(log_p, dtype=torch.bool).scatter_(1, ids, True)
    rest = log_p.masked_fill(inside, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(1, ids), rest], 1)


def make(setting: Setting, form: str, kind: str, temperature: float = 1.0, beta: float = 0.3):
    head = setting.teacher if form == "hidden" else None
    return hl.distillation(divergence=kind, beta=beta, temperature=temperature, teacher_head=head)


# ---------------------------------------------------------------------- formulas


@pytest.mark.covering
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS + MORE_KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_is_its_formula(setting, form, kind, schedule, temperature):
    fields = setting.given(form, temperature)
    log_p = (setting.student_logits() / temperature).log_softmax(-1)
    log_q = (setting.teacher_logits() / temperature).log_softmax(-1)
    if form == "topk":
        ids = fields["teacher_topk_ids"]
        log_p, log_q = coarse(log_p, ids), coarse(log_q, ids)
    values = formula(log_q, log_p, kind, beta=0.3)
    want = torch.autograd.grad(values.mean(), [setting.hidden, setting.head.weight])
    term = make(setting, form, kind, temperature)
    out, *found = setting.run(term, SCHEDULES[schedule], **fields)
    torch.testing.assert_close(out.loss, values.mean())
    torch.testing.assert_close(out.metrics[f"distillation/{kind}"].value, values.mean())
    torch.testing.assert_close(found, list(want))


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_the_vocabulary_stored_equals_logits(setting, kind):
    dense = setting.run(make(setting, "logits", kind), **setting.given("logits"))
    stored = setting.run(make(setting, "topk", kind), **setting.given("topk", k=V))
    torch.testing.assert_close(stored[0].loss, dense[0].loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(stored[1:], dense[1:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_slots_are_ignored(setting, kind):
    fields = setting.given("topk")
    want = setting.run(make(setting, "topk", kind), **fields)
    ids, logps = fields["teacher_topk_ids"], fields["teacher_topk_logps"]
    for garbage in (0.0, math.nan, -math.inf):
        wider = {
            "teacher_topk_ids": torch.cat([ids[:, :2], ids.new_full((T, 1), -1), ids[:, 2:]], 1),
            "teacher_topk_logps": torch.cat(
                [logps[:, :2], logps.new_full((T, 1), garbage), logps[:, 2:]], 1
            ),
        }
        got = setting.run(make(setting, "topk", kind), **wider)
        torch.testing.assert_close(got[0].loss, want[0].loss)
        torch.testing.assert_close(got[1:], want[1:])


@pytest.mark.covering
@pytest.mark.parametrize("form", FORMS)
# total variation |p - q| is left out: it has a kink at p = q
@pytest.mark.parametrize("kind", KINDS + MORE_KINDS[:2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_divergence_from_oneself(setting, form, kind, dtype):
    head = replace(setting.head, weight=setting.head.weight.detach().to(dtype).requires_grad_())
    hidden = setting.hidden.detach().to(dtype).requires_grad_()
    student = replace(
        setting, hidden=hidden, head=head, teacher_hidden=hidden.detach(), teacher=head
    )
    fields = {name: value.detach() for name, value in student.given(form).items()}
    out, *gradients = student.run(make(student, form, kind), **fields)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert abs(out.loss) < tolerance
    assert all(g.abs().max() < tolerance for g in gradients)


# ---------------------------------------------------------------------- teachers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_teacher_head_equals_its_logits(setting, kind, schedule):
    """A teacher head gives the same distillation loss and gradients as the teacher's logits, with
    logit scale, soft cap and temperature."""
    options = SCHEDULES[schedule]
    made = setting.run(make(setting, "hidden", kind, 1.7), options, **setting.given("hidden"))
    given = setting.run(make(setting, "logits", kind, 1.7), options, **setting.given("logits"))
    torch.testing.assert_close(made[0].loss, given[0].loss)
    torch.testing.assert_close(made[1:], given[1:])


def test_teacher_head_may_hold_padded_rows_and_a_bias(setting):
    rows = torch.randn(V + 3, 4, dtype=torch.float64)
    bias = torch.randn(V + 3, dtype=torch.float64)
    teacher = hl.Head(rows, bias, vocab_size=V)
    term = hl.distillation(teacher_head=teacher)
    made, *_ = setting.run(term, teacher_hidden=setting.teacher_hidden)
    logits = setting.teacher_hidden @ rows[:V].t() + bias[:V]
    given, *_ = setting.run(hl.distillation(), teacher_logits=logits)
    torch.testing.assert_close(made.loss, given.loss)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_teacher_gets_no_gradient(setting, schedule):
    weight = setting.teacher.weight.clone().requires_grad_()
    teacher = replace(setting.teacher, weight=weight)
    term = hl.distillation(teacher_head=teacher)
    out = hl.head_loss(
        setting.hidden,
        setting.head,
        setting.batch(teacher_hidden=setting.teacher_hidden),
        term,
        SCHEDULES[schedule],
    )
    out.loss.backward()
    assert weight.grad is None
    assert setting.head.weight.grad is not None


@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_logits_of_student_and_teacher_are_never_materialised(form, schedule):
    """No tensor is larger than a chunk of logits, for student and teacher."""
    tokens, vocabulary, rows = 96, 512, 8
    hidden, weight, targets = trained_looking(tokens, 4, vocabulary)
    teacher = hl.Head(torch.randn(vocabulary, 4))
    states = torch.randn(tokens, 4)
    fields = (
        {"teacher_hidden": states}
        if form == "hidden"
        else {"teacher_logits": teacher.logits(states)}
    )
    batch = hl.Batch(targets, **fields)
    term = hl.distillation(divergence="js", teacher_head=teacher if form == "hidden" else None)
    head = hl.Head(weight.requires_grad_())
    options = hl.Options(schedule=schedule, chunk_tokens=rows)
    with LiveTensors() as meter:
        hl.head_loss(hidden.requires_grad_(), head, batch, term, options).loss.backward()
    assert meter.largest <= rows * vocabulary


@pytest.mark.parametrize("kind", KINDS)
def test_ruled_out_tokens(setting, kind):
    """A teacher logit of -inf means a teacher probability of 0; the loss uses a teacher log-prob of
    -10000 in place of -inf."""
    logits = setting.teacher_logits()
    logits[:, ::3] = -math.inf
    log_q = logits.log_softmax(-1).clamp_min(-1e4)
    log_p = setting.student_logits().log_softmax(-1)
    values = formula(log_q, log_p, kind, beta=0.5)
    out, *gradients = setting.run(hl.distillation(divergence=kind), teacher_logits=logits)
    torch.testing.assert_close(out.loss, values.mean())
    assert all(g.isfinite().all() for g in gradients)


# at larger logits, the JS divergence is below float64's precision
@pytest.mark.parametrize("most", [18.0, 28.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tail_of_a_confident_student_keeps_its_digits(kind, most):
    """The tail of a confident student keeps its digits, because the remaining probability is summed
    directly and not as 1 - sum."""
    logits = torch.randn(4, V)
    logits[:, 0] = most
    head = hl.Head(torch.eye(V).requires_grad_())
    teacher = torch.randn(4, V)
    teacher[:, 0] = 3.0
    logps, ids = teacher.log_softmax(-1).topk(4)
    hidden = logits.requires_grad_()
    targets = torch.zeros(4, dtype=torch.int64)
    batch = hl.Batch(targets, teacher_topk_ids=ids, teacher_topk_logps=logps)
    out = hl.head_loss(hidden, head, batch, hl.distillation(divergence=kind))
    (found,) = torch.autograd.grad(out.loss, hidden)
    exact = logits.detach().double().requires_grad_()
    stored = logps.double()
    rest = torch.log(-torch.expm1(stored.logsumexp(-1, keepdim=True)))
    log_q = torch.cat([stored, rest], 1)
    value = formula(log_q, coarse(exact.log_softmax(-1), ids), kind, beta=0.5).mean()
    (want,) = torch.autograd.grad(value, exact)
    assert error(out.loss, value) < 1e-5
    assert error(found, want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("depth", [20.0, 1000.0])
def test_rounding_of_stored_log_probs_is_no_tail(dtype, depth):
    """If stored teacher probabilities sum to slightly less than 1 because of rounding, the
    remaining tokens count as having no probability.

    The teacher's stored probabilities sum to 1 up to rounding, and an equal student has almost no
    probability elsewhere.
    """
    logps = (3 * torch.randn(64, 8)).log_softmax(-1)
    hidden, ids = torch.full((64, V), -depth), torch.arange(8).expand(64, 8).contiguous()
    hidden[:, :8] = logps
    batch = hl.Batch(ids[:, 0], teacher_topk_ids=ids, teacher_topk_logps=logps.to(dtype))
    out = hl.head_loss(hidden.requires_grad_(), hl.Head(torch.eye(V)), batch, hl.distillation())
    (found,) = torch.autograd.grad(out.loss, hidden)
    assert out.loss.abs() <= 2 * torch.finfo(dtype).eps
    assert found[:, 8:].abs().max() <= 1e-9  # the loss is a mean over 64 tokens


@pytest.mark.parametrize("size", [V, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_teachers_tail_below_rounding_adds_nothing(kind, size):
    """A teacher's remaining probability below the rounding error of its stored log-probs adds
    nothing to the loss, however little probability the student has there."""
    logps, ids = torch.tensor([[0.7, 0.2, 0.1]] * 2).log(), torch.tensor([[0, 1, 2]] * 2)
    hidden, weight = torch.full((2, V), -40.0), torch.eye(V)[:size]
    hidden[:, :3] = logps.flip(1)
    batch = hl.Batch(ids[:, 0], teacher_topk_ids=ids, teacher_topk_logps=logps)
    term = hl.distillation(divergence=kind)
    out = hl.head_loss(hidden.requires_grad_(), hl.Head(weight), batch, term)
    (found,) = torch.autograd.grad(out.loss, hidden)
    exact = hidden.detach().double().requires_grad_()
    log_p = (exact @ weight.double().t()).log_softmax(-1)[:, :3]
    value = formula(logps.double(), log_p, kind, beta=0.5).mean()
    (want,) = torch.autograd.grad(value, exact)
    assert error(out.loss, value) < 1e-6 and error(found, want) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [0, None])
def test_a_students_empty_tail_gives_a_finite_loss(kind, missing):
    """If only the student has no probability outside the teacher's top k, its probability there
    counts as float32 epsilon, so that the loss is finite."""
    logps, ids = torch.tensor([[0.6, 0.2, 0.1]] * 2).log(), torch.tensor([[0, 1, 2]] * 2)
    logits = torch.tensor([[0.3, -0.2, 0.5], [1.0, 0.0, -1.0]])
    if missing is not None:
        logits[:, missing] = -math.inf
    batch = hl.Batch(ids[:, 1], teacher_topk_ids=ids, teacher_topk_logps=logps)
    term = hl.distillation(divergence=kind)
    loss = hl.logits_loss(logits, batch, term).loss
    eps = torch.finfo(torch.float32).eps
    log_q = torch.cat([logps, torch.full((2, 1), 0.1).log()], 1).double()
    log_p = logits.double().log_softmax(-1).clamp_min(-1e4)
    log_p = torch.cat([log_p, torch.full((2, 1), math.log(eps)).double()], 1)
    assert error(loss, formula(log_q, log_p, kind, beta=0.5).mean()) < 1e-6


@pytest.mark.parametrize("tail", ["bucket", "clamped"])
def test_stored_log_probs_that_add_up_to_more_than_one(tail):
    """Stored teacher probabilities whose sum exceeds 1 by rounding are used unchanged, so the
    divergence may be negative."""
    logps, ids = torch.tensor([[0.6, 0.3, 0.108]] * 2).log(), torch.tensor([[0, 1, 2]] * 2)
    hidden = torch.full((2, V), -40.0)
    hidden[:, :3] = logps
    batch = hl.Batch(ids[:, 0], teacher_topk_ids=ids, teacher_topk_logps=logps)
    term = hl.distillation(divergence="reverse_kl", tail=tail)
    loss = hl.head_loss(hidden, hl.Head(torch.eye(V)), batch, term).loss
    want = -math.log(1.008) if tail == "bucket" else 0.0
    torch.testing.assert_close(loss, torch.tensor(want), atol=2e-6, rtol=0)


# ---------------------------------------------------------------------- combinations


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_mixed_with_other_terms_is_the_sum_of_them(setting, form, schedule):
    options = SCHEDULES[schedule]
    fields = setting.given(form, 1.3) | {
        "advantages": torch.randn(len(LENGTHS)),
        "old_logps": torch.full((T,), -1.0),
    }
    distill, policy = make(setting, form, "js", 1.3), hl.gspo()
    bonus = hl.entropy()
    mixed = setting.run(policy + 0.5 * distill - 0.01 * bonus, options, **fields)
    alone = [setting.run(term, options, **fields) for term in (policy, distill, bonus)]
    for i in range(3):
        parts = [found[i].loss if i == 0 else found[i] for found in alone]
        whole = mixed[i].loss if i == 0 else mixed[i]
        torch.testing.assert_close(whole, parts[0] + 0.5 * parts[1] - 0.01 * parts[2])
    assert set(mixed[0].terms) == {"gspo", "distillation", "entropy"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_divergences_of_one_teacher(setting, schedule):
    """Several divergences of one teacher, two of them equal, give the sum of the separate calls."""
    options, fields = SCHEDULES[schedule], setting.given("logits")
    terms = [
        hl.distillation(divergence=kind, temperature=t)
        for kind, t in zip(KINDS, (1, 2, 0.7), strict=True)
    ]
    terms.append(terms[0])
    mixed = setting.run(sum(terms), options, **fields)
    alone = [setting.run(term, options, **fields) for term in terms]
    torch.testing.assert_close(mixed[0].loss, sum(found[0].loss for found in alone))
    torch.testing.assert_close(mixed[1], sum(found[1] for found in alone))
    torch.testing.assert_close(mixed[2], sum(found[2] for found in alone))
    assert list(mixed[0].terms) == ["distillation", *(f"distillation_{i}" for i in (2, 3, 4))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_poison_in_the_teacher_of_unscored_and_left_out_tokens(setting, form, schedule):
    """NaN in a teacher's values of unscored or left-out tokens has no effect."""
    kept = torch.arange(T) % 4 != 1
    targets = setting.targets.clone()
    targets[::5] = -100
    setting = replace(setting, targets=targets)
    clean = setting.given(form) | {"kept": kept}
    out_of_play = ~kept | (targets == -100)
    dirty = {
        name: value.masked_fill(out_of_play.unsqueeze(1), math.nan)
        if value.is_floating_point()
        else value
        for name, value in clean.items()
    }
    term = make(setting, form, "js").where("kept")
    options = SCHEDULES[schedule]
    want, got = setting.run(term, options, **clean), setting.run(term, options, **dirty)
    assert torch.equal(got[0].loss, want[0].loss)
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
    assert not got[1][out_of_play].any()


def test_reductions_apply(setting):
    fields = setting.given("logits")
    log_p = setting.student_logits().log_softmax(-1)
    values = formula(setting.teacher_logits().log_softmax(-1), log_p, "forward_kl", 0.5)
    means = [part.mean() if len(part) else part.sum() for part in values.split(LENGTHS)]
    out, *_ = setting.run(hl.distillation().over("sequence_mean"), **fields)
    torch.testing.assert_close(out.loss, torch.stack(means).mean())


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((), "no teacher"),
        (("teacher_logits", "teacher_hidden"), "teacher_hidden"),
        (("teacher_logits", "teacher_topk_ids", "teacher_topk_logps"), "teacher_logits"),
        (("teacher_topk_ids",), "teacher_topk_ids"),
        (("teacher_topk_logps",), "teacher_topk_logps"),
        (("teacher_hidden",), r"teacher_head"),
    ],
)
def test_a_batch_holds_one_complete_form_of_a_teacher(setting, fields, message):
    given = setting.given("logits") | setting.given("hidden") | setting.given("topk")
    with pytest.raises(ValueError, match=message):
        setting.run(hl.distillation(), **{name: given[name] for name in fields})


def test_vocabularies_must_match(setting):
    with pytest.raises(ValueError, match=f"teacher_logits.*{V + 1}.*{V}"):
        setting.run(hl.distillation(), teacher_logits=torch.zeros(T, V + 1, dtype=torch.float64))
    wide = hl.Head(torch.zeros(V + 1, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=f"teacher_head.*{V + 1}.*{V}"):
        setting.run(hl.distillation(teacher_head=wide), teacher_hidden=setting.teacher_hidden)


@pytest.mark.parametrize(
    ("form", "name", "change", "error", "match"),
    [
        ("hidden", "hidden", lambda x: x.new_zeros(T, 5), ValueError, "teacher_hidden.*5.*4"),
        ("logits", "logits", lambda x: x.requires_grad_(), ValueError, "_logits.*gradient"),
        ("topk", "topk_logps", lambda x: x[:, :3], ValueError, "teacher_topk_logps"),
        ("topk", "topk_ids", lambda x: x + V, ValueError, rf"teacher_topk_ids: got \d+.* {V}"),
        ("topk", "topk_ids", lambda x: x[:, 0], ValueError, "_topk_ids: got shape .* want .*'K'"),
        ("topk", "topk_ids", lambda x: x[:, :0], ValueError, "_topk_ids: got shape .*K >= 1"),
        ("topk", "topk_ids", lambda x: x[..., None], ValueError, "teacher_topk_ids: got shape"),
        ("topk", "topk_ids", lambda x: x.float(), TypeError, "_ids: got torch.float32, want integ"),
    ],
)
def test_malformed_teacher_inputs_are_refused_by_name(setting, form, name, change, error, match):
    fields = setting.given(form)
    fields[f"teacher_{name}"] = change(fields[f"teacher_{name}"].detach())
    term = hl.distillation(teacher_head=setting.teacher if form == "hidden" else None)
    with pytest.raises(error, match=match):
        setting.run(term, **fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "kl"}, "divergence: got 'kl'"),
        ({"beta": 0.0}, "beta: got 0"),
        ({"beta": 1.0}, "beta: got 1"),
        ({"temperature": 0.0}, "temperature: got 0"),
        ({"temperature": math.inf}, "temperature: got inf"),
        ({"temperature": "2"}, "temperature: got '2', want a number > 0"),
        ({"temperature": torch.tensor(2.0)}, r"temperature: got tensor\(2.\), want a number"),
        ({"beta": None}, "beta: got None, want a number between 0 and 1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises((ValueError, TypeError), match=f"distillation: {message}"):
        hl.distillation(**options)


def options_of(name: str) -> set[str]:
    return {*inspect.signature(getattr(hl, name)).parameters}


@pytest.mark.parametrize("bad", [torch.nn.Linear(4, 5), torch.ones(5, 4), "head"])
@pytest.mark.parametrize(
    "name", [n for n in ("teacher", *losses.__all__) if {"head", "teacher_head"} & options_of(n)]
)
def test_a_teacher_head_of_another_type(name, bad):
    option = "head" if name == "teacher" else "teacher_head"
    got = f"^{name}: {option}: got {type(bad).__name__}, want headloss.Head or Head.of"
    with pytest.raises(TypeError, match=got):
        getattr(hl, name)(**{option: bad})


def test_a_frozen_schedule_is_refused(setting):
    head = replace(setting.head, weight=setting.head.weight.detach())
    with pytest.raises(ValueError, match="schedule"):
        hl.head_loss(
            setting.hidden,
            head,
            setting.batch(**setting.given("logits")),
            hl.distillation(),
            hl.Options(schedule="frozen"),
        )


@pytest.fixture
def events(monkeypatch):
    """Record in order: numbered copies to the CPU ("copy 1"), the CPU's reads of a copy ("read
    1"), and calls of gradient kernels ("gradient")."""
    from headloss.kernels import reference
    from headloss.logits import linear

    log, copies = [], []

    class Copy(linear.HostCopy):
        def __init__(self, values):
            copies.append(self)
            log.append(f"copy {len(copies)}")
            super().__init__(values)

        def tolist(self):
            log.append(f"read {1 + copies.index(self)}")
            return super().tolist()

    def gradient(*arguments):
        log.append("gradient")
        return part_gradient_(*arguments)

    part_gradient_ = reference.part_gradient_
    monkeypatch.setattr(linear, "HostCopy", Copy)
    monkeypatch.setattr(reference, "part_gradient_", gradient)
    monkeypatch.setattr("headloss.engine.plan.CPU_SKIP_WORTH", 0)
    return SimpleNamespace(log=log, copies=copies)


def weighted_gradient(weights):
    """Return the hidden gradient of a distillation loss in chunks of 4 tokens."""
    torch.manual_seed(0)
    states = torch.randn(len(weights), 4)
    head = hl.Head(torch.randn(50, 4))
    batch = hl.Batch(torch.arange(len(weights)), teacher_hidden=states, share=weights)
    hidden = torch.randn(len(weights), 4, requires_grad=True)
    objective = hl.distillation(teacher_head=head).weighted("share")
    hl.head_loss(hidden, head, batch, objective, hl.Options(chunk_tokens=4)).loss.backward()
    return hidden.grad


def test_the_cpu_reads_the_share_of_rows_once_their_gradient_is_queued(events):
    """A chunk's gradient kernels are queued before the CPU waits for the share of rows with a
    gradient, so that the GPU is never idle."""
    gradient = weighted_gradient(torch.tensor([0.0, 1] * 4))
    assert events.log == ["copy 1", "gradient", "read 1", "copy 2", "gradient", "read 2"]
    assert gradient[::2].count_nonzero() == 0 and gradient[1::2].all()


def test_after_a_dense_chunk_the_cpu_does_not_wait(events, monkeypatch):
    """On a GPU, the CPU reads a chunk's fraction of rows with a gradient one chunk later, without
    waiting; so the chunk after a chunk without skipped rows skips no rows."""
    from headloss.logits import linear

    weights = torch.tensor([1.0] * 4 + [0, 1, 0, 1] + [1] * 8)
    want = weighted_gradient(weights)
    events.log.clear()
    events.copies.clear()
    # On a GPU, the CPU reads `LogitSource.share` (the fraction of rows with a gradient) from an
    # asynchronous copy to CPU memory that was started in the previous chunk.
    previous = property(lambda source: (None, *events.copies)[-2], lambda source, share: None)
    monkeypatch.setattr(linear.LogitSource, "share", previous)
    torch.testing.assert_close(weighted_gradient(weights), want)
    reads = [event for event in events.log if event.startswith("read")]
    assert reads == ["read 1", "read 1", "read 2", "read 3", "read 3"]
    assert events.log.index("copy 2") < events.log.index("read 1", 3)
