"""`sdar` and `rlsd_shaped` weight a teacher's log-probs of sampled tokens by the papers'
formulas."""

from __future__ import annotations

import math

import pytest
import torch
from materialised import N, Problem, agree, logps_near
from torch import Tensor

import headloss as hl
from headloss.batch.packing import PackedBatch
from headloss.batch.segments import Segments
from headloss.statistics.softmax import Statistics


def problem(scale: float = 0.8) -> Problem:
    case = Problem({})
    generator = torch.Generator().manual_seed(7)
    advantages = torch.randn(N, generator=generator, dtype=torch.float64)
    advantages[::4] = 0
    case.fields |= {
        "teacher_logps": logps_near(case, scale, 1),
        "old_logps": logps_near(case, 0.3, 2),
        "sampling_logps": logps_near(case, 0.2, 3),
        "advantages": advantages,
    }
    return case


def of_targets(log_p: Tensor, targets: Tensor) -> Tensor:
    return log_p.gather(1, targets[:, None]).squeeze(1)


# ---------------------------------------------------------------------- sdar


@pytest.mark.parametrize("beta", [5.0, 0.5])
def test_sdar(beta: float) -> None:
    def formula(log_p, targets, fields) -> Tensor:
        gap = fields["teacher_logps"] - of_targets(log_p, targets)
        return (1 / (1 + torch.exp(-beta * gap))).detach() * gap

    agree(problem(), hl.sdar(beta=beta), formula)


def of_gap(gap: float, logp: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return SDAR's loss of one token, and its derivative with respect to the log-prob."""
    leaf = torch.tensor([logp], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([gap + logp], dtype=dtype)
    batch = PackedBatch(torch.zeros(1).long(), Segments.rows(1, 1), {"teacher_logps": teacher})
    value = hl.sdar()(Statistics(logp=leaf), batch)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return float(value.detach()), float(slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sdar_of_gaps_of_any_size(dtype: torch.dtype) -> None:
    """SDAR is finite for gates of 0 and 1, and if teacher or student give a token probability 0."""
    assert of_gap(-800.0, -1.0, dtype) == (0.0, 0.0)
    value, slope = of_gap(799.0, -800.0, dtype)
    assert (value, slope) == (799.0, -1.0)
    assert of_gap(0.0, -1.0, dtype) == (0.0, -0.5)
    assert of_gap(-math.inf, -1.0, dtype) == (0.0, 0.0)
    assert of_gap(-1.0, 0.0, dtype)[1] == pytest.approx(-1 / (1 + math.exp(5.0)))
    leaf = torch.tensor([-math.inf], dtype=dtype, requires_grad=True)  # p = 0
    fields = {"teacher_logps": torch.tensor([-1.0], dtype=dtype)}
    batch = PackedBatch(torch.zeros(1).long(), Segments.rows(1, 1), fields)
    value = hl.sdar()(Statistics(logp=leaf), batch)
    assert (
        float(value.detach()) == 9999.0
        and torch.autograd.grad(value.sum(), leaf)[0].isfinite().all()
    )


def test_sdar_reports_the_gate() -> None:
    case = problem()
    logp = of_targets(case.log_p().detach(), case.targets[case.scored])
    gap = case.fields["teacher_logps"][case.scored] - logp
    gate = torch.sigmoid(2.0 * gap)
    metrics = case.metrics(hl.sdar(beta=2.0))
    assert metrics["sdar/gate"] == pytest.approx(float(gate.mean()))
    assert metrics["sdar/gate_open"] == pytest.approx(float((gap > 0).double().mean()))
    assert metrics["sdar/gap"] == pytest.approx(float(gap.mean()))


def test_sdar_is_checked() -> None:
    term = hl.sdar()
    assert (term.scope, term.per, term.reduction.name) == ("token", "token", "token_mean")
    report = hl.check_term(term)
    assert report.fields == ("teacher_logps",) and report.gradients == ("logp",)
    for beta in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="sdar: beta: got"):
            hl.sdar(beta=beta)


# ---------------------------------------------------------------------- rlsd_shaped


def shaped(fields, old: Tensor, mix: float, epsilon: float, negative_only: bool) -> Tensor:
    """Return the advantages [T] shaped by the formula of the RLSD paper, in a Python loop over
    tokens."""
    values = []
    for a, q, o in zip(fields["advantages"], fields["teacher_logps"], old, strict=True):
        w = math.exp(float(a.sign()) * float(q - o))
        factor = (1 - mix) + mix * min(max(w, 1 - epsilon), 1 + epsilon)
        values.append(a * (1.0 if negative_only and a >= 0 else factor))
    return torch.stack(values)


RLSD = {
    "defaults": {},
    "all of it": {"mix": 1.0, "epsilon": 0.5},
    "none of it": {"mix": 0.0},
    "a wide clip": {"mix": 0.7, "epsilon": 3.0},
    "negative advantages alone": {"negative_only": True},
}


@pytest.mark.parametrize("name", RLSD)
@pytest.mark.parametrize("clipped", [False, True])
def test_rlsd_shaped(name: str, clipped: bool) -> None:
    options = {"mix": 0.5, "epsilon": 0.2, "negative_only": False} | RLSD[name]

    def formula(log_p, targets, fields) -> Tensor:
        logp, old = of_targets(log_p, targets), fields["old_logps"]
        advantages = shaped(fields, old, **options)
        if not clipped:
            return -advantages * logp
        ratio = (logp - old).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    term = hl.dapo(epsilon_high=0.2) if clipped else hl.reinforce()
    agree(problem(), hl.rlsd_shaped(term, **RLSD[name]), formula)


def test_rlsd_shaped_by_the_policy_as_it_is() -> None:
    """With old_logps=CURRENT, RLSD's factor on the advantage is computed from the call's own
    log-probs, which get no gradient through the factor."""

    def formula(log_p, targets, fields) -> Tensor:
        logp = of_targets(log_p, targets)
        return -shaped(fields, logp.detach(), 0.5, 0.2, False) * logp

    case = problem()
    batch = case.batch.with_fields(old_logps=hl.CURRENT)
    out = hl.head_loss(case.hidden, case.head, batch, hl.rlsd_shaped(hl.reinforce()))
    gradients = torch.autograd.grad(out.loss, [case.hidden, case.weight])
    want = case.want(formula)
    torch.testing.assert_close([out.loss.detach(), *gradients], want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("far", [800.0, math.inf])
def test_rlsd_shaped_never_turns_a_sign(far: float) -> None:
    """`rlsd_shaped` multiplies each advantage by a finite positive number, even for extreme teacher
    log-probs, so that the advantage's sign stays, and an advantage of 0 stays 0."""
    case = problem()
    case.fields["teacher_logps"] = case.fields["teacher_logps"].clone()
    case.fields["teacher_logps"][::3] = -far
    for epsilon in (0.0, 0.2, 1.0, 5.0):
        advantages = []

        @hl.term
        def probe(stats, batch, advantages=advantages):
            advantages.append(batch.advantages.clone())
            return -batch.advantages * stats.logp

        term = hl.rlsd_shaped(probe(), mix=1.0, epsilon=epsilon)
        hl.head_loss(case.hidden, case.head, case.batch, term)
        assert torch.equal(advantages[-1].sign(), case.fields["advantages"][case.scored].sign())
        assert advantages[-1].isfinite().all()


def test_rlsd_shaped_keeps_the_term_s_ways() -> None:
    term = hl.rlsd_shaped(hl.gspo().corrected("token_mask", max=2.0).over("token_mean"), mix=0.3)
    assert (term.name, term.scope, term.per) == ("gspo", "segment", "segment")
    assert term.reduction.name == "token_mean" and len(term.modifiers) == 1
    assert "rlsd_shaped" in repr(term) and "mix" in repr(term)
    assert term != hl.rlsd_shaped(term) and term == hl.rlsd_shaped(
        hl.gspo().corrected("token_mask", max=2.0).over("token_mean"), mix=0.3
    )
    assert {"advantages", "old_logps", "teacher_logps"} <= {*hl.check_term(term).fields}
    case = problem()
    metrics = case.metrics(hl.rlsd_shaped(hl.grpo(), negative_only=True))
    advantages, w = case.fields["advantages"], case.fields["teacher_logps"]
    w = (advantages.sign() * (w - case.fields["old_logps"])).exp()
    factor = torch.where(advantages < 0, 0.5 + 0.5 * w.clamp(0.8, 1.2), 1.0)[case.scored]
    outside = ((w - 1).abs() > 0.2) & (advantages < 0)
    assert metrics["grpo/factor"] == pytest.approx(float(factor.mean()))
    assert metrics["grpo/factor_clipped"] == pytest.approx(
        float(outside[case.scored].double().mean())
    )
    assert "grpo/ratio" in metrics and metrics["grpo/advantage"] == pytest.approx(
        float((factor * advantages[case.scored]).mean())
    )
    bare = case.metrics(hl.rlsd_shaped(hl.term(lambda s, b: -s.logp * b.advantages, name="own")()))
    assert "own/factor" in bare


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mix": -0.1}, "mix: got -0.1"),
        ({"mix": 1.1}, "mix: got 1.1"),
        ({"mix": math.nan}, "mix: got nan"),
        ({"epsilon": -1}, "epsilon: got -1"),
        ({"negative_only": 1}, "negative_only: got 1"),
    ],
)
def test_options_of_rlsd_shaped(options, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"rlsd_shaped: {says}"):
        hl.rlsd_shaped(hl.grpo(), **options)
    with pytest.raises(TypeError, match="rlsd_shaped: term: got function, want a Term"):
        hl.rlsd_shaped(hl.grpo)  # type: ignore[arg-type]
