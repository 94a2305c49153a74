"""Policy terms of 2025 and 2026 agree with their formulas, as plain float64 loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from folds import fold
from losses_case import Case, Sequence, assert_same, make, reduced, value_and_gradient
from matrix import SCHEDULES
from policy_papers import average, kl_paper, over_tokens, ratios, surrogate
from test_prompts import TRAINED, Step, same
from torch import Tensor

import headloss as hl
from headloss.batch.packing import pack
from headloss.losses.term import Term
from headloss.statistics.softmax import Statistics

Rows = Callable[[Sequence], list[Tensor]]


def fixed(x: Tensor) -> float:
    return float(x.detach())


def moved(n: Tensor, o: Tensor, divergence: str) -> float:
    p, q = math.exp(fixed(n)), math.exp(float(o))
    if divergence == "tv":
        return p - q
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return math.copysign(kl, p - q)


def dppo_rows(divergence="tv", low=0.2, high=0.2, cap=20.0, one_sided=True, value="log") -> Rows:
    def of(s: Sequence) -> list[Tensor]:
        found = []
        for n, o, a in zip(s.logp, s.old, s.advantages, strict=True):
            d = moved(n, o, divergence)
            inside = (d <= high if a > 0 else d >= -low) if one_sided else -low <= d <= high
            weight = min(math.exp(fixed(n - o)), cap) if inside else 0.0
            found.append(-weight * a * (n if value == "log" else torch.exp(n - fixed(n))))
        return found

    return of


def icepop_rows(s: Sequence) -> list[Tensor]:
    rows = zip(ratios(s), s.advantages, s.logp, strict=True)
    return [-(fixed(r) if 0.7 <= fixed(r) <= 1.5 else 0.0) * a * n for r, a, n in rows]


def vaco_rows(s: Sequence, delta=0.3) -> list[Tensor]:
    r = ratios(s)
    far = fixed(average([(x.detach() - 1).abs() for x in r])) > delta
    rows = zip(r, s.advantages, strict=True)
    return [0.0 * x if far and (fixed(x) - 1) * a > 0 else -x * a for x, a in rows]


def dro_rows(s: Sequence) -> list[Tensor]:
    rows = zip(s.logp, s.old, s.advantages, strict=True)
    return [-(a * n - 0.3 / 2 * (n - o) ** 2) for n, o, a in rows]


def ce_gppo_rows(s: Sequence) -> list[Tensor]:
    found = []
    for r, a in zip(ratios(s), s.advantages, strict=True):
        if a < 0 and fixed(r) < 0.8:
            found.append(-0.5 * 0.8 / fixed(r) * r * a)
        elif a > 0 and fixed(r) > 1.28:
            found.append(-0.9 * 1.28 / fixed(r) * r * a)
        else:
            found.append(-r * a)
    return found


def aspo_rows(s: Sequence) -> list[Tensor]:
    found = []
    for r, a in zip(ratios(s), s.advantages, strict=True):
        if a > 0:
            weight = min(1 / min(fixed(r), 1.2), 1.3)
            pulls = fixed(r) <= 1.2
        else:
            weight = min(max(fixed(r), 0.8), 1.3)
            pulls = fixed(r) >= 0.8
        found.append(-weight * a * (r / fixed(r) if pulls else torch.ones_like(r)))
    return found


def product_rows(s: Sequence) -> list[Tensor]:
    d = sum((n - o for n, o in zip(s.logp, s.old, strict=True)), torch.zeros(()).double())
    a = average(s.advantages)
    return [surrogate(d.exp(), a, 0.2, 0.2)] * len(s)


def topr_rows(level="sequence_product", pos=1.0, neg=1.0) -> Rows:
    def of(s: Sequence) -> list[Tensor]:
        d = [fixed(n - o) for n, o in zip(s.logp, s.old, strict=True)]
        w = [sum(d) / {"sequence_product": 1, "sequence": max(len(s), 1)}.get(level, 1)] * len(s)
        w = d if level == "token" else w
        rows = zip(w, s.advantages, s.logp, strict=True)
        # The paper divides TOPR's sum over tokens by the number of sequences; the tests average
        # these losses over tokens.
        return [-(pos if a >= 0 else neg * min(math.exp(x), 1)) * a * n for x, a, n in rows]

    return of


PAPERS: dict[str, tuple[Term, Rows]] = {
    "dppo": (hl.dppo(delta_low=0.05, delta_high=0.08), dppo_rows(low=0.05, high=0.08)),
    "dppo kl": (
        hl.dppo(divergence="kl", delta_low=0.01, delta_high=0.02),
        dppo_rows("kl", 0.01, 0.02),
    ),
    "dppo capped": (hl.dppo(ratio_max=1.1), dppo_rows(cap=1.1)),
    "dppo ratio": (
        hl.dppo(delta_low=0.05, delta_high=0.05, ratio_max=None, surrogate="ratio"),
        dppo_rows(low=0.05, high=0.05, cap=math.inf, value="ratio"),
    ),
    "dppo two-sided": (
        hl.dppo(delta_low=0.05, delta_high=0.08, one_sided=False),
        dppo_rows(low=0.05, high=0.08, one_sided=False),
    ),
    "icepop": (hl.icepop(alpha=0.7, beta=1.5), icepop_rows),
    "vaco": (hl.vaco(delta=0.3), vaco_rows),
    "dro": (hl.dro(beta=0.3), dro_rows),
    "ce_gppo": (hl.ce_gppo(beta_high=0.9), ce_gppo_rows),
    "aspo": (hl.aspo(dual_clip=1.3), aspo_rows),
    "topr": (hl.topr().over("token_mean"), topr_rows()),
    "topr sequence": (
        hl.topr(importance_sampling_level="sequence", weight_pos=0.7).over("token_mean"),
        topr_rows("sequence", pos=0.7),
    ),
    "topr token": (
        hl.topr(importance_sampling_level="token", weight_neg=0.3).over("token_mean"),
        topr_rows("token", neg=0.3),
    ),
    "grpo product": (
        hl.grpo(importance_sampling_level="sequence_product").over("token_mean"),
        product_rows,
    ),
}
DROPS = ("dppo", "dppo kl", "dppo ratio", "dppo two-sided", "icepop", "aspo")


@pytest.mark.parametrize("per_token", [False, True], ids=["per_segment", "per_token"])
@pytest.mark.parametrize("name", PAPERS)
def test_paper(name: str, per_token: bool) -> None:
    term, rows = PAPERS[name]
    for seed in range(3):
        case = make(per_token=per_token, seed=seed)
        got = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
        want = value_and_gradient(over_tokens(case.sequences(), rows), case.logp)
        assert_same(got, want)
        assert bool(got[1].any())
        dropped = not bool(got[1].all())
        assert dropped or seed or name not in DROPS
        assert hl.check_term(term).gradients == ("logp",)


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_from_the_old_policy(name: str, dtype: torch.dtype) -> None:
    """Terms are finite far from the old policy, where ratios overflow, also for sequences of one
    token or no token."""
    term, _ = PAPERS[name]
    case = make(dtype=dtype, lengths=(1, 0, 3))
    for by in (-90.0, 90.0):
        far = case.with_fields(old_logps=case.fields["old_logps"].detach() - by)
        value, gradient = value_and_gradient(reduced(term, far.stats, far.batch), far.logp)
        assert value.isfinite() and gradient.isfinite().all() and value.dtype == torch.float64


@pytest.mark.parametrize("schedule", TRAINED)
def test_topr_through_the_head(schedule: str) -> None:
    """`head_loss` with the term `topr` is correct in loss and gradients, and divides by the number
    of all segments, also of segments without tokens."""
    step = Step()

    def loss(rows: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for a, row in zip(step.advantages, rows, strict=True):
            w = math.exp(sum(fixed(n - o) for n, o in row))
            total = total - sum(((1 if a >= 0 else min(w, 1)) * a * n for n, _ in row), 0 * total)
        return total / len(rows)

    same(step.run(hl.topr(), [2, 0, 5, 1, 4, 3], SCHEDULES[schedule]), step.plain(loss))
    assert hl.topr().scope == "segment" and hl.topr().reduction is hl.sequence_sum
    assert hl.topr(importance_sampling_level="token").scope == "token"


def test_topr_by_other_terms() -> None:
    """TOPR equals REINFORCE for positive advantages plus REINFORCE with capped ratios for negative
    advantages."""
    for seed, level in enumerate(("sequence_product", "sequence", "token")):
        case = make(per_token=True, seed=seed)
        up = case.fields["advantages"] >= 0
        case = case.with_fields(pos=up.double(), neg=(~up).double())
        two = hl.reinforce().weighted("pos") + hl.cispo(
            epsilon_high=0.0, importance_sampling_level=level
        ).weighted("neg")
        term = hl.topr(importance_sampling_level=level).over("token_mean")
        assert_same(
            ours(term, case), value_and_gradient(reduced(two, case.stats, case.batch), case.logp)
        )


def test_topr_far_below_and_its_metrics() -> None:
    """A small ratio removes TOPR's gradient for negative advantages, but not for positive
    advantages."""
    case = make(lengths=(2, 2), scale=0.2)
    advantages = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    far = case.with_fields(old_logps=case.fields["old_logps"] + 50, advantages=advantages)
    value, gradient = value_and_gradient(reduced(hl.topr(), far.stats, far.batch), far.logp)
    assert value.isfinite() and gradient[:2].abs().max() < 1e-8
    torch.testing.assert_close(gradient[2:], torch.full((2,), -0.5, dtype=torch.float64))
    case = make(per_token=True, seed=3)
    term = hl.topr(importance_sampling_level="token")
    seen = term.observe(case.stats.map(Tensor.detach), case.batch)  # type: ignore[misc]
    down = [
        fixed(r) > 1
        for s in case.sequences()
        for r, a in zip(ratios(s), s.advantages, strict=True)
        if a < 0
    ]
    assert float(fold(seen["capped"]).value) == pytest.approx(sum(down) / len(down))
    assert 0 < sum(down) < len(down) and "ratio_squared" in seen


# ---------------------------------------------------------------------- covariance


def covariances(case: Case) -> tuple[list[float], list[float], list[float]]:
    """Return for each token the covariance term of Clip-Cov and KL-Cov, the advantage and the
    importance ratio."""
    s = case.sequences()
    a = [float(x) for q in s for x in q.advantages]
    n = [fixed(x) for q in s for x in q.logp]
    r = [fixed(x) for q in s for x in ratios(q)]
    mean_a, mean_n = sum(a) / len(a), sum(n) / len(n)
    return [(x - mean_a) * (y - mean_n) for x, y in zip(a, n, strict=True)], a, r


@pytest.mark.parametrize("share", [1e-6, 0.2, 1.0])
def test_clip_cov(share: float) -> None:
    for seed in range(4):
        case = make(per_token=True, seed=seed)
        draws = torch.rand(len(case.logp), dtype=torch.float64)
        case = case.with_fields(draws=draws)
        c, a, r = covariances(case)
        rows = zip(c, a, r, range(len(c)), strict=True)
        able = [
            i
            for x, y, z, i in rows
            if 0.1 < x < 2 and not (z > 1.2 and y > 0) and not (z < 0.8 and y < 0)
        ]
        drawn = sorted(able, key=lambda i: float(draws[i]))[: max(1, int(share * len(c)))]
        kept = torch.ones(len(c), dtype=torch.float64)
        kept[drawn] = 0
        term = hl.clip_cov(share=share, low=0.1, high=2.0)
        got = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
        losses = torch.stack(
            [
                surrogate(x, y, 0.2, 0.2)
                for q in case.sequences()
                for x, y in zip(ratios(q), q.advantages, strict=True)
            ]
        )
        assert_same(got, value_and_gradient((losses * kept).mean(), case.logp))
        dropped = term.observe(case.stats, case.batch)["dropped"]  # type: ignore[misc]
        assert float(fold(dropped).value) == pytest.approx(len(drawn) / len(c))


@pytest.mark.parametrize("share", [1e-6, 0.2, 1.0])
def test_kl_cov(share: float) -> None:
    for seed in range(4):
        case = make(per_token=True, seed=seed)
        c, _, _ = covariances(case)
        held = sorted(range(len(c)), key=lambda i: -c[i])[: max(1, int(share * len(c)))]
        losses = torch.stack(
            [-x * y for q in case.sequences() for x, y in zip(ratios(q), q.advantages, strict=True)]
        )
        penalty = torch.zeros_like(losses)
        penalty[held] = (case.logp - case.fields["old_logps"]).abs()[held]
        term = hl.kl_cov(share=share, coefficient=0.7)
        got = value_and_gradient(reduced(term, case.stats, case.batch), case.logp)
        assert_same(got, value_and_gradient((losses + 0.7 * penalty).mean(), case.logp))


def test_covariances_need_the_whole_batch() -> None:
    assert hl.clip_cov().scope == hl.kl_cov().scope == "batch"
    lengths = torch.tensor([40, 30, 20])
    torch.manual_seed(0)
    hidden, weight = torch.randn(90, 8).double(), torch.randn(50, 8).double()
    batch = hl.Batch(
        torch.randint(50, (90,)),
        hl.Segments.from_lengths(lengths),
        advantages=torch.randn(90).double(),
        old_logps=-3 + 0.1 * torch.randn(90).double(),
        draws=torch.rand(90),
    )
    found = []
    for options in (hl.Options(), hl.Options(chunk_tokens=16), hl.Options(static=True)):
        leaf = hidden.clone().requires_grad_()
        term = hl.clip_cov(share=0.1, low=0.1) + hl.kl_cov(share=0.1)
        out = hl.head_loss(leaf, hl.Head(weight), batch, term, options)
        out.loss.backward()
        assert leaf.grad is not None
        found.append([out.loss.detach(), leaf.grad])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


# ---------------------------------------------------------------------- KL


def kl_case(seed: int = 0, scale: float = 0.4) -> Case:
    return make(seed=seed, scale=scale, per_token=True)


def rows_of_kl(case: Case, of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Return the token mean of a function of (log-prob, reference, ratio), with its gradient."""
    loss = over_tokens(
        case.sequences(),
        lambda s: [of(*x) for x in zip(s.logp, s.ref, ratios(s), strict=True)],
    )
    return value_and_gradient(loss, case.logp)


def ours(term: Term, case: Case) -> list[Tensor]:
    hl.check_term(term)
    return value_and_gradient(reduced(term, case.stats, case.batch), case.logp)


def test_kl_abs() -> None:
    case = kl_case()
    assert_same(ours(hl.kl(estimator="abs"), case), rows_of_kl(case, lambda n, q, r: (n - q).abs()))


@pytest.mark.parametrize("against", ["old_logps", "sampling_logps"])
def test_kl_against(against: str) -> None:
    case = kl_case()
    turned = case.with_fields(ref_logps=case.fields[against])
    got = ours(hl.kl(estimator="k3", against=against), case)  # type: ignore[arg-type]
    assert_same(got, ours(hl.kl(estimator="k3"), turned))
    assert not torch.equal(got[0], ours(hl.kl(estimator="k3"), case)[0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("corrected", [False, True])
def test_kl_straight_through(estimator: str, corrected: bool) -> None:
    """With `straight_through`, the KL term has the value of the estimator and the gradient (logp -
    ref) grad logp; with importance correction, this gradient is multiplied by the ratio r."""
    case = kl_case()
    options = {"estimator": estimator, "bias_corrected": corrected, "straight_through": True}
    value, gradient = ours(hl.kl(**options), case)  # type: ignore[arg-type]
    plain = kl_paper if estimator != "abs" else None
    want = rows_of_kl(case, lambda n, q, r: (n - q).abs())[0]
    if plain is not None:
        want = plain(case.sequences(), estimator).detach()
    d = (case.logp - case.fields["ref_logps"]).detach()
    r = (case.logp - case.fields["old_logps"]).detach().exp() if corrected else 1.0
    assert_same([value, gradient], [want, r * d / len(d)])


def test_kl_is_unbiased_in_the_mean() -> None:
    """The gradients of the straight-through and of the corrected KL are unbiased; the plain
    gradient of k3 is biased.

    The test averages the gradients over all six tokens of a vocabulary, weighted by the tokens'
    softmax probabilities.
    """
    torch.manual_seed(0)
    z = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(6, dtype=torch.float64).log_softmax(0)
    logp = z.log_softmax(0)
    p = logp.detach().exp()
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), z, retain_graph=True)
    found = {}
    for name, options in {
        "own": {},
        "straight": {"straight_through": True},
        "sampling": {"bias_corrected": True},
    }.items():
        leaf = logp.detach().requires_grad_()
        case = Case(leaf, leaf, {"ref_logps": ref, "old_logps": leaf.detach()}, (6,))
        values = hl.kl(estimator="k3", **options)(case.stats, case.batch)
        (of_logp,) = torch.autograd.grad((p * values).sum(), leaf)
        (found[name],) = torch.autograd.grad(logp, z, of_logp, retain_graph=True)
    torch.testing.assert_close(found["straight"], exact)
    torch.testing.assert_close(found["sampling"], exact)
    assert (found["own"] - exact).norm() > 0.1 * exact.norm()


@pytest.mark.parametrize("corrected", [False, True])
def test_kl_clamps(corrected: bool) -> None:
    case = kl_case(scale=2.0)

    def paper(n: Tensor, q: Tensor, r: Tensor) -> Tensor:
        d = q - n
        held = abs(fixed(d)) > 1.5
        near = torch.full_like(d, math.copysign(1.5, fixed(d))) if held else d
        value = near.exp() - near - 1
        if corrected:
            value = value * (r.detach() if held else r)
        return value if fixed(value) <= 0.9 else torch.full_like(value, 0.9) + 0 * n

    options = {"clamp_difference": 1.5, "clamp": 0.9, "bias_corrected": corrected}
    got = ours(hl.kl(estimator="k3", **options), case)
    assert_same(got, rows_of_kl(case, paper))
    assert bool((got[1] == 0).any()) and bool(got[1].any())


def test_kl_zero_above_and_ratio_max() -> None:
    case = kl_case(scale=1.0)

    def paper(n: Tensor, q: Tensor, r: Tensor) -> Tensor:
        d = q - n
        value = d.exp() - d - 1
        cap = r if fixed(r) < 1.2 else torch.full_like(r, 1.2)
        return 0 * n if fixed(d) > 0 and fixed(value) > 0.3 else value * cap

    term = hl.kl(estimator="k3", zero_above=0.3, bias_corrected=True, ratio_max=1.2)
    assert_same(ours(term, case), rows_of_kl(case, paper))


@pytest.mark.parametrize(
    ("make_term", "message"),
    [
        (lambda: hl.dppo(divergence="js"), r"dppo: divergence: got 'js', want one of 'tv', 'kl'"),
        (lambda: hl.dppo(delta_low=-1), r"dppo: delta_low: got -1, want >= 0"),
        (lambda: hl.dppo(ratio_max=0), r"dppo: ratio_max: got 0, want > 0"),
        (lambda: hl.dppo(surrogate="p"), r"dppo: surrogate: got 'p'"),
        (lambda: hl.icepop(alpha=2, beta=1), r"icepop: beta: got 1, want >= alpha"),
        (lambda: hl.vaco(delta=-1), r"vaco: delta: got -1"),
        (lambda: hl.dro(beta=0), r"dro: beta: got 0, want > 0"),
        (lambda: hl.ce_gppo(beta_low=-1), r"ce_gppo: beta_low: got -1"),
        (lambda: hl.aspo(epsilon_low=1), r"aspo: epsilon_low: got 1, want 0 <= epsilon_low < 1"),
        (lambda: hl.topr(weight_pos=-1), r"topr: weight_pos: got -1, want >= 0"),
        (lambda: hl.topr(weight_neg=math.nan), r"topr: weight_neg: got nan, want >= 0"),
        (
            lambda: hl.topr(importance_sampling_level="sequence_token"),
            r"topr: importance_sampling_level: got 'sequence_token', want one of 'sequence_p",
        ),
        (lambda: hl.aspo(dual_clip=1), r"aspo: dual_clip: got 1, want > 1"),
        (lambda: hl.aspo(dual_clip=0.5), r"aspo: dual_clip: got 0.5, want > 1"),
        (lambda: hl.clip_cov(share=0), r"clip_cov: share: got 0, want 0 < share <= 1"),
        (lambda: hl.clip_cov(low=2, high=1), r"clip_cov: high: got 1, want > low"),
        (lambda: hl.kl_cov(coefficient=-1), r"kl_cov: coefficient: got -1"),
        (lambda: hl.kl(against="logps"), r"kl: against: got 'logps'"),
        (lambda: hl.kl(clamp=0), r"kl: clamp: got 0, want > 0"),
    ],
)
def test_bad_option(make_term: Callable[[], Term], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_term()


def test_clip_cov_asks_for_draws() -> None:
    case = replace(make(), fields={k: v for k, v in make().fields.items() if k != "draws"})
    with pytest.raises(ValueError, match="draws"):
        hl.clip_cov()(case.stats, case.batch)


def test_vaco_knows_the_side_of_a_ratio_that_rounds_to_1() -> None:
    """VACO detects r < 1 for a nearly certain token, although the ratio r rounds to 1 in
    float32."""
    logp = torch.tensor([-1e-12, -5.0])
    batch = hl.Batch(torch.zeros(2).long(), advantages=-torch.ones(2), old_logps=torch.zeros(2))
    packed = pack(batch, vocabulary=1, dtype=torch.float32)
    values = hl.vaco(delta=0.3)(Statistics(logp=logp), packed)
    # The loss is 0 if the sequence's mean |r - 1| exceeds `delta` and (r - 1) * advantage > 0, as
    # for both tokens here.
    assert values.tolist() == [0, 0]
