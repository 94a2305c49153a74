"""`sdar` and `rlsd_shaped`: what a teacher's log-probs of sampled tokens weigh, by the formulas of
the papers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from materialised import N, Problem, agree, logps_near
from torch import Tensor

import headloss as hl
from headloss.batch.packing import PackedBatch
from headloss.batch.segments import Segments
from headloss.objective.statistics import Statistics


def problem(scale: float = 0.8) -> Problem:
    made = Problem({})
    generator = torch.Generator().manual_seed(7)
    advantages = torch.randn(N, generator=generator, dtype=torch.float64)
    advantages[::4] = 0
    made.fields |= {
        "teacher_logps": logps_near(made, scale, 1),
        "old_logps": logps_near(made, 0.3, 2),
        "sampling_logps": logps_near(made, 0.2, 3),
        "advantages": advantages,
    }
    return made


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
    """The value and the slope of one token."""
    leaf = torch.tensor([logp], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([gap + logp], dtype=dtype)
    batch = PackedBatch(torch.zeros(1).long(), Segments.rows(1, 1), {"teacher_logps": teacher})
    value = hl.sdar()(Statistics(logp=leaf), batch)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return float(value.detach()), float(slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sdar_of_gaps_of_any_size(dtype: torch.dtype) -> None:
    """A gate of 0 or 1 is a number; so is a gap to what has no mass at all."""
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
    made = problem()
    logp = of_targets(made.log_p().detach(), made.targets[made.scored])
    gap = made.fields["teacher_logps"][made.scored] - logp
    gate = torch.sigmoid(2.0 * gap)
    found = made.metrics(hl.sdar(beta=2.0))
    assert found["sdar/gate"] == pytest.approx(float(gate.mean()))
    assert found["sdar/gate_open"] == pytest.approx(float((gap > 0).double().mean()))
    assert found["sdar/gap"] == pytest.approx(float(gap.mean()))


def test_sdar_is_checked() -> None:
    term = hl.sdar()
    assert (term.scope, term.per, term.reduction.name) == ("token", "token", "token_mean")
    found = hl.check_term(term)
    assert found.fields == ("teacher_logps",) and found.gradients == ("logp",)
    for beta in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="sdar: beta: got"):
            hl.sdar(beta=beta)
