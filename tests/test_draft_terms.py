"""Draft-model losses, which read divergences from a teacher, agree with plain formulas.

T tokens, V vocabulary, H and H' hidden widths; q the verifier's distribution, p the draft's,
a = sum min(p, q).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headloss as hl
from headloss.kernels import reference, triton
from headloss.kernels.pair import Distribution, Divergence, Pair
from headloss.kernels.transform import Transform
from headloss.statistics.divergence import ACCEPTANCE, Measure
from headloss.statistics.softmax import Normalizer
from headloss.testing import error, trained_looking

T, V, H, WIDTH = 24, 53, 8, 6
BLOCK = 4  # drafted tokens per block
SCHEDULES = {
    "one_pass": hl.Options(),
    "recompute": hl.Options(schedule="recompute", chunk_tokens=5),
    "held": hl.Options(schedule="held"),
    "static": hl.Options(static=True),
}


class Setting:
    """A draft model's and a verifier's inputs for blocks of drafted tokens, of which some tokens
    are not scored."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        hidden, weight, targets = trained_looking(T, H, V, dtype)
        self.leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        self.states, other = torch.randn(T, WIDTH).to(dtype), torch.randn(V, WIDTH).to(dtype)
        self.verifier = hl.Head(other)
        self.q = (self.states @ other.t()).softmax(-1)
        self.targets = torch.where(torch.arange(T) % 3 > 0, self.q.argmax(-1), targets)
        self.scored = torch.tensor([True] * BLOCK + [True, True, False, True] + [False] * BLOCK)
        self.scored = torch.cat([self.scored, torch.arange(T - len(self.scored)) % 5 != 4])
        self.slots = torch.arange(T) % BLOCK

    def run(self, objective, options: hl.Options | None = None, **more) -> hl.Output:
        states = self.states.masked_fill(~self.scored.unsqueeze(1), math.nan)
        targets = self.targets.masked_fill(~self.scored, -100)
        segments = hl.Segments.rows(T // BLOCK, BLOCK)
        fields = {"teacher_hidden": states, "slots": self.slots} | more
        batch = hl.Batch(targets, segments, **fields)
        hidden, weight = self.leaves
        return hl.head_loss(hidden, hl.Head(weight), batch, objective, options)

    def values(self) -> dict[str, torch.Tensor]:
        """Return the [T] inputs of losses, with an autograd graph."""
        hidden, weight = self.leaves
        log_p, q = (hidden @ weight.t()).log_softmax(-1), self.q
        p, log_q = log_p.exp(), q.log()
        log_m = ((p + q) / 2).log()
        a = torch.minimum(p, q).sum(-1)
        kl, rkl = (q * (log_q - log_p)).sum(-1), (p * (log_p - log_q)).sum(-1)
        js = ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2
        tv, ce = (p - q).abs().sum(-1) / 2, -log_p.gather(1, self.targets.unsqueeze(1)).squeeze(1)
        best = log_p.detach().argmax(-1) == self.targets
        return {"a": a, "kl": kl, "rkl": rkl, "js": js, "tv": tv, "ce": ce, "top1": best.double()}

    def want(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the mean of `values` over scored tokens, and the gradients of this mean."""
        loss = values[self.scored].mean()
        return [loss.detach(), *torch.autograd.grad(loss, self.leaves)]


@hl.term(teacher=hl.teacher())
def own_hybrid(stats, batch, eta=3.0):
    """A user-defined term from the documentation."""
    share = (-eta * stats.acceptance).exp().detach()
    forward = stats.divergence("forward_kl")
    return share * forward + (1 - share) * stats.divergence("total_variation")


def hybrid(v: dict[str, torch.Tensor], a: torch.Tensor, eta: float = 3.0) -> torch.Tensor:
    share = (-eta * a.detach()).exp()
    return share * v["kl"] + (1 - share) * v["tv"]


def step_means(setting: Setting, a: torch.Tensor) -> torch.Tensor:
    rows, scored = a.view(-1, BLOCK), setting.scored.view(-1, BLOCK)
    means = torch.where(scored, rows, 0).sum(1) / scored.sum(1).clamp_min(1)
    return means.repeat_interleave(BLOCK)


def d_pace(setting: Setting, ce: torch.Tensor, floor: float = 0.5) -> torch.Tensor:
    """D-PACE computed by a loop over the tokens of each block; an unscored token counts as accepted
    and has weight 0."""
    rows, scored = ce.detach().view(-1, BLOCK), setting.scored.view(-1, BLOCK)
    weights = torch.zeros_like(rows)
    for block in range(len(rows)):
        reach, prefix = 1.0, []
        for k in range(BLOCK):
            if scored[block, k]:
                reach *= (1 - floor) * math.exp(-rows[block, k]) + floor
            prefix.append(reach if scored[block, k] else 0.0)
        for k in range(BLOCK):
            weights[block, k] = sum(prefix[k:])
    return weights.view(-1)


def losses(s: Setting):
    """Return a dict from the name of a draft loss to a pair: headloss's objective, and the correct
    loss values [T]."""
    v, head = s.values(), s.verifier
    decay = (-s.slots.double() / 4).exp()
    beside = {"teacher_head": head}
    draft_ce = hl.cross_entropy()
    return {
        "kl_div": (hl.distillation(**beside), v["kl"]),
        "rkl": (hl.distillation(divergence="reverse_kl", **beside), v["rkl"]),
        "jsd": (hl.distillation(divergence="js", **beside), v["js"]),
        "tv": (hl.distillation(divergence="total_variation", **beside), v["tv"]),
        "ce": (draft_ce, v["ce"]),
        "nla": (hl.nla(**beside), -v["a"].log()),
        "lk_alpha": (hl.lk_alpha(**beside), -v["a"].log()),
        "lk_hybrid": (hl.lk_hybrid(**beside), hybrid(v, v["a"])),
        "lk_lambda": (hl.lk_hybrid(per="step", **beside), hybrid(v, step_means(s, v["a"]))),
        "dflash": (draft_ce.modified(hl.draft_weights()), v["ce"] * decay),
        "d_pace": (draft_ce.modified(hl.draft_weights("d_pace")), v["ce"] * d_pace(s, v["ce"])),
        "dspark": (hl.dspark(**beside), (0.1 * v["ce"] + 0.9 * v["tv"]) * decay),
        "compound": (
            hl.nla(**beside) + 0.3 * hl.distillation(**beside) + 0.5 * draft_ce,
            -v["a"].log() + 0.3 * v["kl"] + 0.5 * v["ce"],
        ),
    }


NAMES = [*losses(Setting())]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_are_their_formulas(name, schedule):
    s = Setting()
    objective, values = losses(s)[name]
    out = s.run(objective, SCHEDULES[schedule])
    found = [out.loss.detach(), *torch.autograd.grad(out.loss, s.leaves)]
    for mine, theirs in zip(found, s.want(values), strict=True):
        assert error(mine, theirs) <= 1e-12


@pytest.mark.parametrize("name", ["nla", "lk_lambda", "dspark", "compound"])
@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_kernels(name, schedule):
    """Each draft loss agrees with its formula on Triton's kernels in float32."""
    torch.manual_seed(0)
    s = Setting()
    want = s.want(losses(s)[name][1])
    torch.manual_seed(0)
    s = Setting(torch.float32)
    out = s.run(losses(s)[name][0], hl.Options(backend="triton", schedule=schedule))
    found = [out.loss.detach(), *torch.autograd.grad(out.loss, s.leaves)]
    for mine, theirs in zip(found, want, strict=True):
        assert error(mine, theirs) <= 1e-5


def test_a_users_own_term_reads_divergences():
    s = Setting()
    logits = s.q.log().masked_fill(~s.scored.unsqueeze(1), math.nan)
    targets, (hidden, weight) = s.targets.masked_fill(~s.scored, -100), s.leaves
    batch = hl.Batch(targets, teacher_logits=logits)
    found = hl.head_loss(hidden, hl.Head(weight), batch, own_hybrid()).loss
    v = s.values()
    want = s.want(hybrid(v, v["a"]))
    for mine, theirs in zip([found, *torch.autograd.grad(found, s.leaves)], want, strict=True):
        assert error(mine, theirs) <= 1e-12
    logits = (hidden @ weight.t()).detach().requires_grad_()
    given = hl.logits_loss(logits, batch, own_hybrid()).loss
    assert error(given, want[0]) <= 1e-12 and torch.autograd.grad(given, logits)[0].isfinite().all()


def test_metrics():
    s = Setting()
    out, v = s.run(hl.dspark(teacher_head=s.verifier)), s.values()
    a, hits, scored = (t.detach().view(-1, BLOCK) for t in (v["a"], v["top1"], s.scored))
    blocks = scored.any(1)
    lengths = 1 + (a * scored).cumprod(1).sum(1)
    runs = 1 + (hits * scored).cumprod(1).sum(1)
    want = {
        "acceptance": a[scored].mean(),
        "top1": hits[scored].mean(),
        "accept_len": lengths[blocks].mean(),
        "eal": runs[blocks].mean(),
    }
    assert 1 < want["eal"] < 1 + BLOCK and not blocks.all()
    for name, value in want.items():
        torch.testing.assert_close(out.metrics[f"dspark/{name}"].value, value)
    assert not s.run(hl.dspark(teacher_head=s.verifier), hl.Options(metrics=False)).metrics


def test_metrics_of_blocks_in_any_order():
    s, ids, slots = Setting(), torch.arange(T) // BLOCK, torch.arange(T) % BLOCK
    hidden, weight = (t.detach() for t in s.leaves)
    found = []
    for order in torch.arange(T), torch.arange(T).flip(0):
        segments = hl.Segments.from_ids(ids[order], count=T // BLOCK)
        fields = {"teacher_hidden": s.states[order], "slots": slots[order]}
        batch = hl.Batch(s.targets[order], segments, **fields)
        term = hl.dspark(teacher_head=s.verifier)
        out = hl.head_loss(hidden[order], hl.Head(weight), batch, term)
        found.append([out.metrics[f"dspark/{name}"].value for name in ("accept_len", "eal")])
    torch.testing.assert_close(*found)


# ---------------------------------------------------------------------- per token


def test_values_per_token():
    """Values per token have the targets' shape and order, even with unsorted segments, and 0 at
    unscored or left-out tokens."""
    s, names = Setting(), ("top1", "nla/acceptance", "distillation/reverse_kl")
    term = hl.distillation(divergence="reverse_kl", teacher_head=s.verifier).where("kept")
    kept = torch.arange(T) % 4 > 0
    options = hl.Options(per_token=names, metrics=False, chunk_tokens=5)
    out = s.run(hl.nla(teacher_head=s.verifier) + term, options, kept=kept)
    v = s.values()
    want = {"top1": v["top1"], "nla/acceptance": v["a"]}
    want["distillation/reverse_kl"] = torch.where(kept, v["rkl"], 0)
    assert [*out.per_token] == [*names]
    for name, value in want.items():
        assert not out.per_token[name].requires_grad
        torch.testing.assert_close(out.per_token[name], torch.where(s.scored, value.detach(), 0))
    batch = hl.Batch(s.targets, hl.Segments.from_ids(-torch.arange(T) % 3, 3))
    options, (hidden, weight) = hl.Options(per_token=("top1",)), s.leaves
    plain = hl.head_loss(hidden, hl.Head(weight), batch, hl.cross_entropy(), options)
    assert torch.equal(plain.per_token["top1"], v["top1"])
    with pytest.raises(ValueError, match="per_token: got 'nla/tv', want names out of"):
        s.run(hl.nla(teacher_head=s.verifier), hl.Options(per_token=("nla/tv",)))


@pytest.mark.parametrize("schedule", ["held", "recompute"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_divergences_for_a_loss_outside(schedule, backend):
    """A loss outside of headloss can read divergences from `head_stats`, for instance to clamp
    them, and gets correct gradients."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    torch.manual_seed(0)
    s = Setting(dtype)
    targets = s.targets.masked_fill(~s.scored, -100)
    states = s.states.masked_fill(~s.scored.unsqueeze(1), math.nan)
    batch, (hidden, weight) = hl.Batch(targets, teacher_hidden=states), s.leaves
    stats = hl.head_stats(
        hidden,
        hl.Head(weight),
        batch,
        hl.Options(schedule=schedule, backend=backend),
        gradients=("logp", "reverse_kl", "log_acceptance"),
        teacher=hl.teacher(s.verifier),
        divergences=("log_acceptance", "reverse_kl", "total_variation"),
    )
    found = stats.divergences
    assert [*found] == ["log_acceptance", "reverse_kl", "total_variation"]
    assert not found["total_variation"].requires_grad and not found["reverse_kl"][~s.scored].any()
    loss = found["reverse_kl"].clamp(max=1.0).sum() - 0.3 * found["log_acceptance"].sum()
    mine = [loss - stats.logp.sum(), *torch.autograd.grad(loss - stats.logp.sum(), s.leaves)]
    torch.manual_seed(0)
    s = Setting()
    v = {name: torch.where(s.scored, value, 0) for name, value in s.values().items()}
    log_a = torch.where(s.scored, s.values()["a"].log(), 0)
    loss = v["rkl"].clamp(max=1.0).sum() - 0.3 * log_a.sum() + v["ce"].sum()
    want = [loss, *torch.autograd.grad(loss, s.leaves, retain_graph=True)]
    for got, theirs in zip(mine, want, strict=True):
        assert error(got, theirs) <= (1e-12 if backend == "reference" else 1e-5)
    assert error(found["total_variation"], v["tv"]) <= 1e-5


def test_divergences_outside_are_refused():
    s = Setting()
    call = s.leaves[0], hl.Head(s.leaves[1])
    batch = hl.Batch(s.targets, teacher_hidden=s.states)
    teacher = hl.teacher(s.verifier)
    for fields, more, message in [
        (batch, {"teacher": teacher}, r"divergences: got \(\) with teacher=Teacher.*want both"),
        (batch, {"teacher": teacher, "divergences": ("kl",)}, "got 'kl', want .*'log_acc"),
        (batch, {"gradients": ("js",)}, "gradients: got 'js', want names out of"),
        (s.targets, {"teacher": teacher, "divergences": ("js",)}, "teacher: got no teacher in the"),
    ]:
        with pytest.raises(ValueError, match=message):
            hl.head_stats(*call, fields, **more)


# ---------------------------------------------------------------------- one pass


def products(objective, frozen: bool, **fields) -> float:
    """Count the matmuls of [T, H] by [H, V] in forward and backward."""
    hidden, weight = torch.randn(64, 16, requires_grad=True), torch.randn(96, 16)
    batch = hl.Batch(torch.zeros(64).long(), **{"teacher_hidden": torch.randn(64, 16)} | fields)
    head = hl.Head(weight.requires_grad_(not frozen))
    with FlopCounterMode(display=False) as counter:
        hl.head_loss(hidden, head, batch, objective).loss.backward()
    return counter.get_total_flops() / (2 * 64 * 16 * 96)


def test_several_measures_of_one_teacher_take_one_pass():
    """Several divergences are computed in one pass if their teacher heads share weight and
    temperature."""
    weight = torch.randn(96, 16)

    def objective(temperature: float = 1.0):
        one, two = hl.Head(weight), hl.Head(weight)
        tv = {"divergence": "total_variation", "temperature": temperature}
        more = hl.distillation(**tv, teacher_head=two) + hl.nla(teacher_head=one)
        return hl.distillation(teacher_head=one) + more + hl.cross_entropy()

    assert products(objective(), frozen=True) == 3
    assert products(objective(), frozen=False) == 4
    assert products(objective(2.0), frozen=True) == 4


# ---------------------------------------------------------------------- precision


def both_sides(raw, raw_teacher) -> tuple[Distribution, Distribution]:
    def side(logits):
        top = logits.amax(1)
        log_sum = (logits.double() - top.double().unsqueeze(1)).exp().sum(1).log()
        return Distribution(Transform(), Normalizer(top, log_sum.to(logits.dtype)))

    return side(raw), side(raw_teacher)


def acceptance_and_gradient(acts, raw, raw_teacher) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log acceptance probability log a = log sum_v min(p_v, q_v), and its derivative
    with respect to the draft's logits."""
    pair = Pair(*both_sides(raw, raw_teacher), (ACCEPTANCE,))
    log_a, slope = acts.divergence(raw, raw_teacher, pair)[:, 0].t().contiguous()
    part = Divergence(raw_teacher, pair, slope[:, None], torch.ones_like(slope[:, None]), log_a)
    return log_a, acts.part_gradient_(raw, part)


@pytest.mark.parametrize("acts", [reference, triton], ids=["reference", "triton"])
@pytest.mark.parametrize("shift", [4.0, 16.0, 32.0, 60.0])
def test_a_small_acceptance_keeps_its_digits(acts, shift):
    """A small acceptance probability is accurate although the draft gives odd ids about exp(shift)
    times the probability of even ids, and the verifier does the reverse."""
    columns = 3000
    sign = torch.where(torch.arange(columns) % 2 > 0, 0.5, -0.5) * shift
    raw, raw_teacher = torch.randn(3, columns) + sign, torch.randn(3, columns) - sign
    log_a, gradient = acceptance_and_gradient(acts, raw, raw_teacher)
    z = raw.double().requires_grad_()
    log_p, log_q = z.log_softmax(1), raw_teacher.double().log_softmax(1)
    want = torch.minimum(log_p, log_q).logsumexp(1)
    (slopes,) = torch.autograd.grad(want.sum(), z)
    assert (log_a - want).abs().max() <= 1e-4
    assert want.min() >= math.log(1e-27) and (shift < 60 or want.max() <= math.log(1e-24))
    assert error(gradient, slopes) <= 1e-4


@pytest.mark.parametrize("acts", [reference, triton], ids=["reference", "triton"])
@pytest.mark.parametrize("step", [1.0, 1e-2, 1e-3])
def test_a_small_total_variation_keeps_its_digits(acts, step):
    raw = torch.randn(3, 3000)
    raw_teacher = raw + step * torch.randn(3, 3000)
    pair = Pair(*both_sides(raw, raw_teacher), (Measure("total_variation"),))
    found = acts.divergence(raw, raw_teacher, pair)[:, 0, 0]
    want = (raw.double().softmax(1) - raw_teacher.double().softmax(1)).abs().sum(1) / 2
    assert want.max() >= 3e-4 * step / 1e-3 and ((found - want) / want).abs().max() <= 1e-3


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_draft_equal_to_its_verifier_has_no_divergence(backend):
    """For bitwise equal distributions, divergences and their gradients are 0 and the acceptance a
    is 1."""
    s = Setting(torch.float32)
    hidden, weight = s.leaves
    head = hl.Head(weight.detach())
    batch = hl.Batch(s.targets, teacher_hidden=hidden.detach())
    for kind in ("forward_kl", "reverse_kl", "js", "total_variation"):
        term = hl.distillation(divergence=kind, teacher_head=head)
        out = hl.head_loss(hidden, hl.Head(weight), batch, term, hl.Options(backend=backend))
        assert out.loss == 0 and not any(g.any() for g in torch.autograd.grad(out.loss, s.leaves))
    term = hl.nla(teacher_head=head)
    out = hl.head_loss(hidden, hl.Head(weight), batch, term, hl.Options(backend=backend))
    assert 0 <= out.loss <= 1e-6 and abs(out.metrics["nla/acceptance"].value - 1) <= 1e-6
    assert max(g.abs().max() for g in torch.autograd.grad(out.loss, s.leaves)) <= 1e-6


# ---------------------------------------------------------------------- refusals


def test_refusals():
    s = Setting()

    @hl.term
    def without_a_teacher(stats, batch):
        return stats.acceptance

    @hl.term(teacher=hl.teacher())
    def misspelt(stats, batch):
        return stats.divergence("kl")

    for objective, message in {
        without_a_teacher(): "term without_a_teacher: reads stats.acceptance, but has no teacher",
        misspelt(): "kind: got 'kl', want one of 'forward_kl'",
        hl.nla(): "term nla: got batch.teacher_hidden without a teacher_head",
    }.items():
        with pytest.raises(ValueError, match=message):
            s.run(objective)
    with pytest.raises(ValueError, match="term nla: got no teacher in the batch, want one of"):
        hl.head_loss(s.leaves[0], hl.Head(s.leaves[1]), hl.Batch(s.targets), hl.nla())
    with pytest.raises(TypeError, match=r"teacher: got Head, want hl.teacher\(...\)"):
        hl.term(teacher=s.verifier)
    with pytest.raises(ValueError, match="teacher: temperature: got 0, want > 0"):
        hl.teacher(temperature=0)
    with pytest.raises(ValueError, match="lk_hybrid: per: got 'block', want one of"):
        hl.lk_hybrid(per="block")


# ---------------------------------------------------------------------- unrolled steps, verifiers


@pytest.mark.parametrize("schedule", ["one_pass", "small", "recompute", "static"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_positions_share_rows_of_a_teacher(schedule, backend):
    """Several tokens of a draft model's unrolled steps may share one row of teacher hidden states.

    Two positions read each teacher row, unscored positions have arbitrary row indices, and some
    rows of hidden states get no gradient.
    """
    dtype = torch.float64 if backend == "reference" else torch.float32
    options = {
        "one_pass": {},
        "small": {"chunk_tokens": 6},
        "recompute": {"schedule": "recompute", "chunk_tokens": 6},
        "static": {"static": True},
    }[schedule]
    torch.manual_seed(0)
    s = Setting(dtype)
    index = torch.randint(T // 2, (T,))
    weight = (torch.arange(T) % 5 > 1).to(dtype)
    term = hl.nla(teacher_head=s.verifier) + hl.distillation(teacher_head=s.verifier)
    objective = term.parts[0][1].weighted("weight") + term.parts[1][1].weighted("weight")
    found = []
    for shared in (True, False):
        states = s.states[: T // 2]
        fields = {"teacher_hidden": states[index].masked_fill(~s.scored.unsqueeze(1), math.nan)}
        if shared:
            fields = {"teacher_hidden": states, "teacher_index": index.masked_fill(~s.scored, -7)}
        batch = hl.Batch(s.targets.masked_fill(~s.scored, -100), weight=weight, **fields)
        head = hl.Head(s.leaves[1])
        how = hl.Options(backend=backend, **options)
        out = hl.head_loss(s.leaves[0], head, batch, objective, how)
        found.append([out.loss, *torch.autograd.grad(out.loss, s.leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert error(mine, theirs) <= (1e-14 if backend == "reference" else 1e-6)


def test_seven_steps_make_fifteen_products():
    steps, tokens = 7, 64
    index = torch.arange(tokens).repeat_interleave(steps)
    hidden, weight = torch.randn(tokens * steps, 16, requires_grad=True), torch.randn(96, 16)
    verifier = {"teacher_hidden": torch.randn(tokens, 16), "teacher_index": index}
    batch = hl.Batch(torch.zeros(tokens * steps).long(), **verifier)
    objective = hl.nla(teacher_head=hl.Head(torch.randn(96, 16))) + hl.cross_entropy()
    for options in (hl.Options(), hl.Options(chunk_tokens=14 * steps)):
        with FlopCounterMode(display=False) as counter:
            hl.head_loss(hidden, hl.Head(weight), batch, objective, options).loss.backward()
        assert counter.get_total_flops() == 15 * 2 * tokens * 16 * 96


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_verifier_of_a_larger_vocabulary(backend):
    """For a verifier with a larger vocabulary the batch holds its log-sum-exp, so the probabilities
    of the draft's tokens sum to less than 1."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    torch.manual_seed(0)
    s, found = Setting(dtype), []
    larger = torch.cat([s.states @ s.verifier.weight.t(), torch.randn(T, 20).to(dtype) + 1], 1)
    lse = larger.logsumexp(1)
    terms = [hl.lk_hybrid(teacher_head=s.verifier), hl.nla(teacher_head=s.verifier)]
    terms += [
        hl.distillation(divergence=kind, teacher_head=s.verifier) for kind in ("reverse_kl", "js")
    ]
    options = hl.Options(backend=backend, chunk_tokens=7)
    out = s.run(sum(terms), options, teacher_lse=lse.masked_fill(~s.scored, math.nan))
    found = [out.loss.detach(), *torch.autograd.grad(out.loss, s.leaves)]
    q, leaves = larger.double().softmax(1)[:, :V], [t.double() for t in s.leaves]
    leaves = s.leaves = [t.detach().requires_grad_() for t in leaves]
    p = (leaves[0] @ leaves[1].t()).softmax(1)
    a, kl = torch.minimum(p, q).sum(1), (q * (q.log() - p.log())).sum(1)
    share, log_m = (-3 * a.detach()).exp(), ((p + q) / 2).log()
    js = ((p * (p.log() - log_m)).sum(1) + (q * (q.log() - log_m)).sum(1)) / 2
    values = share * kl + (1 - share) * (1 - a) - a.log() + (p * (p.log() - q.log())).sum(1) + js
    assert 0.3 < q.sum(1).mean() < 0.9
    for mine, theirs in zip(found, s.want(values), strict=True):
        assert error(mine, theirs) <= (1e-12 if backend == "reference" else 1e-5)


def test_fields_of_a_teacher_are_refused():
    s = Setting()
    call = s.leaves[0], hl.Head(s.leaves[1])
    term, index = hl.nla(teacher_head=s.verifier), torch.zeros(T).long()
    for fields, message in [
        ({"teacher_hidden": s.states[:3], "teacher_index": index + 3}, "teacher_index: got 3, w"),
        ({"teacher_logits": torch.randn(T, V), "teacher_index": index}, "got rows of no teacher_h"),
        ({"teacher_hidden": s.states, "teacher_lse": torch.zeros(1)}, "teacher_lse: got shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            hl.head_loss(*call, hl.Batch(s.targets, **fields), term)
    for more in {}, {"teacher_index": index}:
        with pytest.raises(ValueError, match="teacher_hidden: got shape .*" + "".join(more)):
            hl.Batch(s.targets, teacher_hidden=s.states[:3, None], **more)
    batch = hl.Batch(s.targets, teacher_hidden=s.states, teacher_lse=torch.zeros(T))
    cooler = hl.nla(teacher_head=s.verifier, temperature=0.5)
    with pytest.raises(ValueError, match="teacher_lse: got 2 teachers"):
        hl.head_loss(*call, batch, term + cooler)


# ---------------------------------------------------------------------- additional columns


@pytest.mark.parametrize("schedule", ["one_pass", "recompute", "held", "frozen"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_columns_beside_a_head(schedule, backend):
    """Extra low-rank columns of a head (`Head(beside=...)`) give the logits and gradients of a head
    with concatenated factors."""
    dtype, rank = (torch.float64 if backend == "reference" else torch.float32), 3
    torch.manual_seed(0)
    s = Setting(dtype)
    hidden, weight = s.leaves
    features, rows = torch.randn(2, T // 2, rank).to(dtype), torch.randn(V, rank).to(dtype)
    frozen = schedule == "frozen"
    features.requires_grad_()
    rows.requires_grad_(not frozen)
    poisoned = torch.where(s.scored.view(2, -1, 1), features, math.nan)
    targets = s.targets.masked_fill(~s.scored, -100).view(2, -1)
    batch = hl.Batch(targets, teacher_hidden=s.states.view(2, -1, WIDTH))
    head = hl.Head(weight.detach(), beside=((poisoned, rows),), softcap=20.0)
    objective = hl.cross_entropy()
    if not frozen:
        objective = objective + hl.nla(teacher_head=s.verifier) - 0.1 * hl.entropy()
    options = hl.Options(backend=backend, schedule=schedule)
    leaves = [hidden, features] if frozen else [hidden, features, rows]
    out = hl.head_loss(hidden.view(2, -1, H), head, batch, objective, options)
    found = torch.autograd.grad(out.loss, leaves)
    both = torch.cat([hidden, features.view(T, rank)], 1), torch.cat([weight.detach(), rows], 1)
    batch = hl.Batch(targets.flatten(), teacher_hidden=s.states)
    plain = hl.Head(both[1], softcap=20.0)
    want = hl.head_loss(both[0], plain, batch, objective)
    assert error(out.loss, want.loss) <= 1e-6
    for mine, theirs in zip(found, torch.autograd.grad(want.loss, leaves), strict=True):
        assert error(mine, theirs) <= (1e-12 if backend == "reference" else 1e-5)
    whole, place = hidden.view(2, -1, H), s.scored.view(2, -1)
    torch.testing.assert_close(head.logits(whole)[place], plain.logits(both[0])[s.scored])
    best = hl.head_topk(whole, head, 2).ids[place]
    assert torch.equal(best, hl.head_topk(both[0], plain, 2).ids[s.scored])


def test_columns_beside_take_their_share_of_the_products():
    """With a frozen head, 16 extra low-rank columns at H = 256 cost at most 3.3 large matmuls in
    all."""
    tokens, width, rank, columns = 64, 256, 16, 96
    hidden = torch.randn(tokens, width, requires_grad=True)
    pair = tuple(torch.randn(n, rank, requires_grad=True) for n in (tokens, columns))
    head = hl.Head(torch.randn(columns, width), beside=(pair,))
    batch = hl.Batch(torch.zeros(tokens).long(), teacher_hidden=torch.randn(tokens, width))
    term = hl.dspark(gamma=None, teacher_head=hl.Head(torch.randn(columns, width)))
    with FlopCounterMode(display=False) as counter:
        hl.head_loss(hidden, head, batch, term).loss.backward()
    assert counter.get_total_flops() / (2 * tokens * width * columns) <= 3.3


def test_columns_beside_are_refused():
    weight, features = torch.randn(V, H), torch.randn(T, 3)
    with pytest.raises(TypeError, match=r"beside\[0\]: got .*, want \(features, weight2\)"):
        hl.Head(weight, beside=(features, weight))
    with pytest.raises(ValueError, match=r"beside\[0\]: got shape \(53, 8\), want \(53, 3\)"):
        hl.Head(weight, beside=((features, weight),))
    head = hl.Head(weight, beside=((features[:2], torch.randn(V, 3)),))
    with pytest.raises(ValueError, match=r"beside\[0\]: got shape \(2, 3\), want a row each"):
        hl.head_loss(torch.randn(T, H), head, hl.Batch(torch.zeros(T).long()), hl.cross_entropy())


# ---------------------------------------------------------------------- checks, micro-batches


@pytest.mark.parametrize("made_of", ["logits", "hidden", "topk"])
def test_terms_of_a_teacher_are_checked(made_of: str) -> None:
    """`check_term` tests terms that read a teacher, and reports the statistics, gradients and
    segments that they need."""
    head = hl.Head(torch.randn(9, 4)) if made_of == "hidden" else None
    stored = {
        "teacher_topk_ids": torch.arange(3).expand(28, 3),
        "teacher_topk_logps": torch.full((28, 3), -1.5, dtype=torch.float64),
    }
    fields = stored if made_of == "topk" else {}
    report = hl.check_term(hl.lk_hybrid(per="step", teacher_head=head), **fields)
    assert report.cuts == ("segment borders", "permuted segments")
    if made_of == "topk":
        assert report.gradients == ("teacher_topk",)
    else:
        assert report.statistics == ("forward_kl", "log_acceptance", "total_variation")
        assert report.gradients == ("forward_kl", "total_variation")

    @hl.term(teacher=hl.teacher(head))
    def mean_over_a_cut(stats, batch):
        return stats.acceptance.mean() - stats.log_acceptance

    with pytest.raises(ValueError, match="differs by .* between the whole batch and segment"):
        hl.check_term(mean_over_a_cut(), **fields)


@pytest.mark.parametrize("name", ["nla", "lk_lambda", "d_pace", "dspark", "compound"])
def test_micro_batches_in_another_order_are_the_whole(name: str) -> None:
    """A batch that is split into four micro-batches, with its blocks of tokens in reversed order,
    gives the loss and gradient of the whole batch, if `totals` counts the tokens of all
    micro-batches."""
    s = Setting()
    objective, values = losses(s)[name]
    want = s.want(values)
    hidden, weight = s.leaves
    targets = s.targets.masked_fill(~s.scored, -100)
    totals = hl.Totals.of(hl.Batch(targets, hl.Segments.rows(T // BLOCK, BLOCK)))
    loss, gradients = torch.zeros((), dtype=torch.float64), [torch.zeros_like(x) for x in s.leaves]
    blocks = torch.arange(T).view(-1, BLOCK).flip(0)
    for part in blocks.split([1, 2, 1, 2]):
        rows = part.flatten()
        fields = {"teacher_hidden": s.states[rows], "slots": s.slots[rows]}
        segments = hl.Segments.rows(len(part), BLOCK)
        batch = hl.Batch(targets[rows], segments, totals=totals, **fields)
        out = hl.head_loss(hidden[rows], hl.Head(weight), batch, objective)
        loss += out.loss.detach()
        for total, own in zip(gradients, torch.autograd.grad(out.loss, s.leaves), strict=True):
            total += own
    for got, value in zip([loss, *gradients], want, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-9, atol=1e-12)
