"""`score_centering` agrees with its formula on materialised logits, also over `support_ids`.

T scored tokens, V vocabulary, K candidates; p is the trainer's distribution, q the sampler's.
"""

from __future__ import annotations

import math

import pytest
import torch
from materialised import SCHEDULES, N, Problem, V, agree, same
from torch import Tensor

import headloss as hl

K = 6
BOUNDS: dict[str, dict] = {
    "no mode": {},
    "truncated": {"mode": "token_truncate", "min": 0.7, "max": 1.3},
    "truncated above": {"mode": "token_truncate", "max": 1.2},
    "masked": {"mode": "token_mask", "min": 0.5, "max": 2.0},
    "masked below": {"mode": "token_mask", "min": 0.8},
}


def problem(k: int = K, apart: float = 0.5, seed: int = 0) -> Problem:
    """Return a problem whose candidates are the sampler's k likeliest tokens, in random order, with
    some of them removed."""
    case = Problem({}, seed=seed)
    generator = torch.Generator().manual_seed(20 + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    z = (case.hidden @ case.weight.t()).detach() / case.temperature
    log_q = (0.9 * z + apart * normal(N, V)).log_softmax(1)
    logps, ids = log_q.topk(k, 1)
    at = torch.rand(N, k, generator=generator).argsort(1)  # random order
    ids, logps = ids.gather(1, at), logps.gather(1, at)
    if k < V:
        ids[::3, 2], logps[::3, 2] = -1, math.nan  # unused entries of `candidate_ids`
        ids[6], logps[6] = -5, 0.0  # A token without candidates.
        logps[8, 0] = -math.inf  # A candidate with sampler probability 0.
    case.fields |= {
        "advantages": normal(N),
        "candidate_ids": ids,
        "candidate_sampling_logps": logps,
        "sampling_logps": log_q.gather(1, case.targets[:, None]).squeeze(1),
        "old_logps": torch.full((N,), -1.0, dtype=torch.float64),
    }
    return case


def weight_of(w: float, mode: str | None = None, min: float = 0.0, max: float = math.inf) -> float:
    w = math.exp(20) if w > math.exp(20) else w if w > math.exp(-20) else math.exp(-20)
    if mode is None:
        return 1.0
    if mode == "token_mask":
        return w if min <= w <= max else 0.0
    return min if w < min else max if w > max else w


def centering(log_p: Tensor, fields, **options) -> Tensor:
    """Return score centering's [T] values, by a loop over tokens and candidates."""
    values = []
    for t, ids in enumerate(fields["candidate_ids"].tolist()):
        slots = [(k, j) for k, j in enumerate(ids) if j >= 0]
        p = [math.exp(float(log_p[t, j].detach())) for _, j in slots]
        q = [math.exp(float(fields["candidate_sampling_logps"][t, k])) for k, _ in slots]
        rho = max(1 - sum(q), 1e-6) / max(1 - sum(p), 1e-6)
        alpha = rho * weight_of(1 / rho, **options)
        total = log_p.new_zeros(())
        for (_, j), p_k, q_k in zip(slots, p, q, strict=True):
            drawn = q_k * weight_of(p_k / q_k, **options) if q_k else 0.0
            total = total + (drawn - alpha * p_k) * log_p[t, j]
        values.append(fields["advantages"][t] * total)
    return torch.stack(values)


def of_targets(log_p: Tensor, targets: Tensor) -> Tensor:
    return log_p.gather(1, targets[:, None]).squeeze(1)


# ---------------------------------------------------------------------- the formula


@pytest.mark.parametrize("name", BOUNDS)
def test_formula(name: str) -> None:
    options = BOUNDS[name]
    agree(
        problem(),
        hl.score_centering(**options),
        lambda log_p, targets, fields: centering(log_p, fields, **options),
    )


@pytest.mark.parametrize("name", ["no mode", "truncated", "masked"])
def test_beside_the_policy_term(name: str) -> None:
    """Score centering plus a policy term agrees with a loop, if both use the same bounds of the
    importance ratio."""
    options = BOUNDS[name]

    def formula(log_p, targets, fields) -> Tensor:
        logp = of_targets(log_p, targets)
        ratio = (logp.detach() - fields["sampling_logps"]).exp()
        w = ratio.new_tensor([weight_of(float(r), **options) for r in ratio])
        return -w * fields["advantages"] * logp + centering(log_p, fields, **options)

    policy = hl.reinforce()
    if options:
        how = {"min": options.get("min"), "max": options.get("max")}
        policy = policy.corrected(options["mode"], **how, live=True)
    agree(problem(), policy + hl.score_centering(**options), formula)


@pytest.mark.parametrize("name", BOUNDS)
def test_all_of_the_vocabulary(name: str) -> None:
    """With the whole vocabulary as candidates the sum over tokens is exact, since no probability is
    left outside."""
    options, case = BOUNDS[name], problem(k=V)
    agree(
        case,
        hl.score_centering(**options),
        lambda log_p, targets, fields: centering(log_p, fields, **options),
    )

    def exact(log_p, targets, fields) -> Tensor:
        ids = fields["candidate_ids"]
        q, log_of = fields["candidate_sampling_logps"].exp(), log_p.gather(1, ids)
        ratio = log_of.detach().exp() / q
        w = q.new_tensor([[weight_of(float(r), **options) for r in row] for row in ratio])
        return fields["advantages"] * (q * w * log_of).sum(1)

    want = case.want(exact)[1:]
    same(case.got(hl.score_centering(**options), hl.Options())[1:], want, "gradients")
    assert case.metrics(hl.score_centering(**options))["score_centering/rho"] == 1


def test_the_mean_over_what_the_sampler_draws_is_zero() -> None:
    """At a constant advantage the centred policy gradient, averaged over the sampler's draws, is
    0."""
    case = problem(k=V)
    q = torch.zeros(N, V, dtype=torch.float64)
    q.scatter_(1, case.fields["candidate_ids"], case.fields["candidate_sampling_logps"].exp())
    case.fields["advantages"] = torch.ones(N, dtype=torch.float64)

    def mean_score(log_p, targets, fields) -> Tensor:
        return -(q[case.scored] * log_p).sum(1)

    drawn, centred = case.want(mean_score), case.got(hl.score_centering(), hl.Options())
    for a, b in zip(drawn[1:], centred[1:], strict=True):
        torch.testing.assert_close(a, -b, rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------------- edges


def value_and_slopes(
    log_p: list[float], log_q: list[float], ids: list[int], dtype: torch.dtype, **options
) -> tuple[float, list[float]]:
    """Return the value of `score_centering` at one token with advantage 1, and the value's
    derivatives with respect to the candidates' log-probs."""
    from headloss.batch.packing import PackedBatch
    from headloss.batch.segments import Segments
    from headloss.statistics.softmax import CANDIDATES, Statistics

    leaf = torch.tensor([[*log_p, -1.0]], dtype=dtype, requires_grad=True)
    fields = {
        "advantages": torch.ones(1, dtype=dtype),
        "candidate_ids": torch.tensor([ids]),
        "candidate_sampling_logps": torch.tensor([log_q], dtype=dtype),
    }
    batch = PackedBatch(torch.zeros(1).long(), Segments.rows(1, 1), fields)
    value = hl.score_centering(**options)(Statistics(extras={CANDIDATES: leaf}), batch)
    (slopes,) = torch.autograd.grad(value.sum(), leaf)
    assert value.isfinite().all() and slopes.isfinite().all()
    return float(value.detach()), slopes[0, :-1].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BOUNDS)
def test_edges(dtype: torch.dtype, name: str) -> None:
    options, near = BOUNDS[name], {"rel": 1e-5, "abs": 1e-9}
    # Unused entries of `candidate_ids` add 0, whatever their values.
    value, slopes = value_and_slopes([0.0, 0.0], [math.nan, 3.0], [-1, -7], dtype, **options)
    assert value == 0 and slopes == [0, 0]
    # A candidate with sampler probability 0 and trainer probability p has the coefficient
    # -alpha * p, where alpha is computed from the probabilities outside the candidates.
    p, q = (0.25, 0.5), (0.0, 0.4)
    value, slopes = value_and_slopes(
        [math.log(x) for x in p], [-math.inf, math.log(q[1])], [3, 5], dtype, **options
    )
    rho = 0.6 / 0.25
    alpha = rho * weight_of(1 / rho, **options)
    want = [-alpha * p[0], q[1] * weight_of(p[1] / q[1], **options) - alpha * p[1]]
    assert slopes == pytest.approx(want, **near)
    assert value == pytest.approx(
        sum(c * math.log(x) for c, x in zip(want, p, strict=True)), **near
    )
    # A candidate with student probability 0 has a clamped log-ratio, which passes no gradient.
    _, slopes = value_and_slopes([-math.inf, math.log(0.5)], [-3.0, -2.0], [3, 5], dtype, **options)
    assert slopes[0] == 0
    value_and_slopes([-800.0, -1.0], [-1.0, -800.0], [3, 5], dtype, **options)
    value_and_slopes([-math.inf, -1.0], [-math.inf, -1.0], [3, 5], dtype, **options)
    # If student and sampler put all probability on one candidate, both probabilities outside of
    # the candidates are clamped to the same minimum.
    value, slopes = value_and_slopes([0.0], [0.0], [3], dtype, **options)
    assert value == 0 and slopes == pytest.approx([0.0], abs=1e-12)


def test_small_tails_keep_their_digits() -> None:
    """Score centering is accurate if the sampler's probability outside the candidates, 1 - sum of
    float32 probabilities, is as small as 6e-5."""
    log_p, log_q = [math.log1p(-3e-5), math.log(1e-5)], [math.log1p(-8e-5), math.log(2e-5)]
    _, got = value_and_slopes(log_p, log_q, [3, 5], torch.float32)
    rho = 6e-5 / 2e-5
    want = [(1 - 8e-5) - rho * (1 - 3e-5), 2e-5 - rho * 1e-5]
    assert got == pytest.approx(want, rel=2e-2, abs=1e-7)


# ---------------------------------------------------------------------- a replayed support


def replayed(seed: int = 0) -> Problem:
    """Return a problem whose candidates are the ids that the sampler kept, which also are the
    `support_ids`, with the sampler's log-probs."""
    case = problem(seed=seed)
    generator = torch.Generator().manual_seed(5 + seed)
    ids = torch.rand(N, V, generator=generator).argsort(1)[:, :K]
    first = case.targets[:, None]
    ids = torch.where(ids == first, ids[:, :1], ids)
    ids[:, :1] = first
    ids[::4, 3:] = -1  # smaller sets
    logits = torch.randn(N, K, generator=generator, dtype=torch.float64)
    log_q = logits.masked_fill(ids < 0, -math.inf).log_softmax(1)
    case.fields |= {
        "support_ids": ids,
        "candidate_ids": ids,
        "candidate_sampling_logps": log_q.masked_fill(ids < 0, math.nan),
        "sampling_logps": log_q[:, 0],
    }
    return case


@pytest.mark.parametrize("name", BOUNDS)
def test_over_a_replayed_support(name: str) -> None:
    """If the candidates are exactly the `support_ids`, the probabilities of trainer and sampler
    each sum to 1."""
    options = BOUNDS[name]
    case = replayed()
    agree(
        case,
        hl.reinforce() + hl.score_centering(**options),
        lambda log_p, targets, fields: (
            centering(log_p, fields, **options) - fields["advantages"] * of_targets(log_p, targets)
        ),
        frozen=False,
    )
    metrics = case.metrics(hl.reinforce() + hl.score_centering(**options))
    assert metrics["score_centering/sampler_mass"] == pytest.approx(1)
    assert metrics["score_centering/trainer_mass"] == pytest.approx(1)
    assert metrics["score_centering/rho"] == pytest.approx(1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_replayed_support_s_gradient_is_the_exact_sum(schedule: str) -> None:
    """With the sampler's kept ids as `support_ids` and candidates, the gradient is that of
    prime-rl's -A (log p_y - sum_k q_k log p_k), where q is constant."""
    case = replayed(1)

    def exact(log_p, targets, fields) -> Tensor:
        ids, q = fields["candidate_ids"], fields["candidate_sampling_logps"].exp().nan_to_num(0)
        log_of = log_p.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0)
        mean = (q * log_of).sum(1)
        return -fields["advantages"] * (of_targets(log_p, targets) - mean)

    terms = hl.reinforce() + hl.score_centering()
    same(case.got(terms, SCHEDULES[schedule])[1:], case.want(exact)[1:], schedule)


def test_what_the_support_does_not_hold_counts_for_nothing() -> None:
    """A candidate outside of `support_ids` has probability 0 in student and sampler, and changes no
    loss and no gradient."""
    case = replayed()
    want = case.got(hl.score_centering(), hl.Options())
    support = case.fields["support_ids"]
    outside = [next(j for j in range(V) if j not in row) for row in support.tolist()]
    more = torch.tensor(outside)[:, None]
    ids, logps = case.fields["candidate_ids"], case.fields["candidate_sampling_logps"]
    case.fields["candidate_ids"] = torch.cat([more, ids], 1)
    nothing = torch.full((N, 1), -math.inf, dtype=torch.float64)
    case.fields["candidate_sampling_logps"] = torch.cat([nothing, logps], 1)
    same(case.got(hl.score_centering(), hl.Options()), want, "an outsider")


# ---------------------------------------------------------------------- metrics, options


@pytest.mark.parametrize("name", BOUNDS)
def test_metrics(name: str) -> None:
    case, options = problem(), BOUNDS[name]
    log_p, (masses, rhos, sizes) = case.log_p().detach(), ([], [], [])
    rows = [case.fields[n][case.scored] for n in ("candidate_ids", "candidate_sampling_logps")]
    for t, (ids, logps) in enumerate(zip(*rows, strict=True)):
        inside = ids >= 0
        p, q = log_p[t, ids[inside]].exp(), logps[inside].exp()
        rho = max(1 - float(q.sum()), 1e-6) / max(1 - float(p.sum()), 1e-6)
        alpha = rho * weight_of(1 / rho, **options)
        pairs = zip(p.tolist(), q.tolist(), strict=True)
        c = [(b and b * weight_of(a / b, **options)) - alpha * a for a, b in pairs]
        masses.append((float(q.sum()), float(p.sum())))
        rhos.append(rho)
        sizes.append(sum(map(abs, c)))
    metrics = case.metrics(hl.score_centering(**options))
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    assert metrics["score_centering/sampler_mass"] == pytest.approx(mean([q for q, _ in masses]))
    assert metrics["score_centering/trainer_mass"] == pytest.approx(mean([p for _, p in masses]))
    assert metrics["score_centering/rho"] == pytest.approx(mean(rhos))
    assert metrics["score_centering/abs_c"] == pytest.approx(mean(sizes))


def test_check_term_reports_fields_and_gradients() -> None:
    term = hl.score_centering()
    assert (term.scope, term.per, term.reduction.name) == ("token", "token", "token_mean")
    report = hl.check_term(term, candidate_sampling_logps=-torch.rand(28, 4) - 2)
    assert report.gradients == ("candidate_logps",)
    assert report.fields == ("advantages", "candidate_ids", "candidate_sampling_logps")
    assert term == hl.score_centering() != hl.score_centering(mode="token_mask", max=2.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "token"}, "mode: got 'token', want one of 'token_truncate', 'token_mask'"),
        ({"mode": "sequence_mask"}, "mode: got 'sequence_mask'"),
        ({"max": 2.0}, "got min=None and max=2.0 without a mode"),
        ({"min": 0.5}, "got min=0.5 and max=None without a mode"),
        ({"mode": "token_mask", "min": 0}, "min: got 0, want a number > 0|min: got 0, want > 0"),
        ({"mode": "token_mask", "max": -1.0}, "max: got -1"),
        ({"mode": "token_truncate", "min": 2, "max": 1}, "min: got 2, want <= max, 1"),
        ({"mode": "token_truncate", "max": math.nan}, "max: got nan"),
    ],
)
def test_bad_options(options, says: str) -> None:
    with pytest.raises(ValueError, match=f"score_centering: (?:{says})"):
        hl.score_centering(**options)


def test_a_field_of_another_width() -> None:
    case = problem()
    case.fields["candidate_sampling_logps"] = case.fields["candidate_sampling_logps"][:, :3]
    with pytest.raises(ValueError, match=rf"candidate_sampling_logps: got \(3,\).*want \({K},\)"):
        case.metrics(hl.score_centering())
    del case.fields["candidate_sampling_logps"]
    with pytest.raises(ValueError, match=r"reads batch.candidate_sampling_logps, which was not"):
        case.metrics(hl.score_centering())
