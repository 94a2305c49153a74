"""Tapes: what an objective comes to, from its instructions, against autograd on each term."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tape_case import NEEDS, Case, measured_of, objectives
from tape_plain import run_plain

from headloss import losses as h
from headloss.batch.reduction import Reduction, Totals
from headloss.batch.segments import Chunk
from headloss.losses.term import Objective, term
from headloss.objective import tape as taped
from headloss.objective.bound import Gradient
from headloss.objective.statistics import Coefficients
from headloss.objective.tape import Tape
from headloss.objective.taping import record, tape_of

OBJECTIVES = objectives()
RAGGED = (3, 1, 0, 5, 2, 4)
MIXED = ("grpo", "mixed", "mixed pairs", "modified twice", "where token_mean")


@pytest.fixture(autouse=True)
def in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taped, "runner", lambda: run_plain)


def tape_for(case: Case, **options: bool) -> Tape:
    tape = record(case.objective, NEEDS, case.kinds, case.dtype, **options)
    assert tape is not None
    return tape


def run(case: Case, tape: Tape, chunk: Chunk | None = None, **options) -> Gradient:
    return tape.run(
        case.stats,
        case.view,
        case.totals,
        [c for c, _ in case.objective.parts],
        vocabulary=case.vocabulary,
        chunk=chunk,
        **options,
    )


def assert_close(got: dict, want: dict, tolerance: float) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(
            got[name].double(),
            value.double(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m, name=name: f"{name}: {m}",
        )


def assert_evaluated(found: Gradient, case: Case, tolerance: float, needed: bool = True) -> None:
    gradient, metrics = case.eager(needed)
    assert_close(found.coefficients.tensors(), gradient.coefficients.tensors(), tolerance)
    assert_close(found.divergences, gradient.divergences, tolerance)
    values = found.values[: len(case.objective.parts)]
    assert_close({"": values}, {"": gradient.values}, tolerance)
    loss = sum(c * v for (c, _), v in zip(case.objective.parts, gradient.values, strict=True))
    assert_close({"loss": found.loss}, {"loss": loss}, tolerance)
    assert found.metrics is not None
    measured = found.metrics()
    assert list(measured) == list(metrics)
    for name, measurement in metrics.items():
        assert type(measured[name]) is type(measurement)
        assert_close(vars(measured[name]), vars(measurement), tolerance)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_every_objective(name: str, dtype: torch.dtype, tolerance: float) -> None:
    case = Case(OBJECTIVES[name], RAGGED, dtype)
    assert_evaluated(run(case, tape_for(case)), case, tolerance)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("lengths", [(0, 0), (1, 0), (97, 0), (40, 0, 0, 57)], ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_any_size(name: str, lengths: tuple[int, ...], static: bool) -> None:
    """No token, one, many; empty segments; static shapes, where unscored tokens stand last."""
    case = Case(OBJECTIVES[name], lengths, static=static)
    assert_evaluated(run(case, tape_for(case)), case, 1e-11)


@pytest.mark.parametrize("name", ["grpo", "mixed", "corrected sequence_mask"])
@pytest.mark.parametrize("options", [{"unscored": False}, {"current": True}])
def test_ways_to_a_field(name: str, options: dict) -> None:
    case = Case(OBJECTIVES[name], RAGGED, **options)
    assert_evaluated(run(case, tape_for(case)), case, 1e-12)


def test_one_tape_for_all_numbers() -> None:
    """Coefficients, totals (numbers, tensors, zero) and a factor are arguments."""
    first = 0.5 * h.grpo() + h.entropy().where("keep")
    second = -2.0 * h.grpo() + 3e-4 * h.entropy().where("keep")
    tape = record(first, NEEDS, Case(first).kinds, torch.float64)
    assert tape is not None
    kept = {"keep": (torch.tensor(0), torch.tensor(2.5)), "keep_segment": (1, 1)}
    for totals in (None, Totals(700, 9, kept), Totals(torch.tensor(0), torch.tensor(3.5), kept)):
        case = Case(second, (4, 0, 1), totals=totals)
        assert_evaluated(run(case, tape), case, 1e-12)
    for factor in (4.0, torch.tensor(4.0)):
        scaled, plain = run(case, tape, factor=factor), run(case, tape)
        assert_close(
            scaled.coefficients.tensors(),
            plain.coefficients.map(lambda t: 4 * t).tensors(),
            1e-12,
        )
        assert torch.equal(measured_of(scaled), measured_of(plain))


def test_pieces_of_a_batch_add_up() -> None:
    case = Case(OBJECTIVES["mixed"], RAGGED)
    tape = tape_for(case)
    whole = run(case, tape)
    pieces = [Chunk(0, 4, 0, 3), Chunk(4, 15, 3, 6)]
    found = []
    for chunk in pieces:
        part = case.stats.map(lambda t, chunk=chunk: t[chunk.rows])
        found.append(
            tape.run(
                part,
                case.view,
                case.totals,
                [c for c, _ in case.objective.parts],
                vocabulary=case.vocabulary,
                chunk=chunk,
            )
        )
    joined = Coefficients(
        **{
            name: torch.cat([getattr(f.coefficients, name) for f in found])
            for name in whole.coefficients.tensors()
        }
    )
    assert_close(joined.tensors(), whole.coefficients.tensors(), 1e-12)
    k = len(case.objective.parts)
    values = sum(f.values for f in found)[:k]
    torch.testing.assert_close(values, whole.values[:k], rtol=1e-12, atol=0)
    named = case.objective.parts
    total = sum(c * value for (c, _), value in zip(named, values, strict=True))
    torch.testing.assert_close(whole.loss.double(), total, rtol=1e-6, atol=1e-9)


def test_token_terms_may_be_cut_anywhere() -> None:
    case = Case(OBJECTIVES["where token_mean"], RAGGED)
    case = Case(Objective.of(h.grpo().where("keep")), RAGGED)
    tape = tape_for(case, observe=False)
    assert len(tape.phases) == 1
    whole, chunk = run(case, tape).coefficients.target, Chunk(5, 8, 3, 4)
    rows = chunk.rows
    part = case.stats.map(lambda t: t[rows])
    found = tape.run(
        part, case.view, case.totals, [1.0], vocabulary=1, chunk=chunk
    ).coefficients.target
    assert found is not None and whole is not None
    torch.testing.assert_close(found, whole[rows], rtol=1e-14, atol=0)


def test_values_alone() -> None:
    for name in ("grpo", "mixed"):
        case = Case(OBJECTIVES[name], RAGGED)
        found = run(case, tape_for(case, gradients=False))
        assert found.coefficients.tensors() == {}
        assert_evaluated(found, case, 1e-12, needed=False)
    assert list(run(case, tape_for(case, observe=False)).metrics()) == []


def test_a_poisoned_token_shows() -> None:
    """NaN at a scored token reaches the values and the extremes, as it does by autograd."""
    case = Case(Objective.of(h.grpo()), RAGGED)
    assert case.stats.logp is not None
    case.stats.logp[3] = math.nan
    found = run(case, tape_for(case))
    assert_evaluated(found, case, 1e-12)
    assert math.isnan(found.values[0]) and math.isnan(float(found.metrics()["grpo/ratio_max"]))


def test_what_is_not_recorded() -> None:
    """What may depend on more than its arguments, or needs the whole batch, is left to autograd."""
    own = term(lambda stats, batch: -stats.logp, name="own")()
    per = Reduction("per", lambda lengths, tokens, segments: lengths / 3)
    grpo = h.grpo()
    left = {
        "own": own,
        "beside own": grpo + own,
        "own reduction": grpo.over(per),
        "quantile": grpo.top_entropy(quantile=0.5),
        "sorted": h.kl_cov(),
        "function replaced": replace(grpo, function=lambda stats, batch: -stats.logp),
        "observer replaced": replace(grpo, observe=lambda stats, batch: {}),
    }
    kinds = Case(Objective.of(grpo)).kinds
    for name, objective in left.items():
        assert record(Objective.of(objective), NEEDS, kinds, torch.float64) is None, name
        assert tape_of(Objective.of(objective), NEEDS, kinds, torch.float64) is None, name


def test_tapes_are_found_again() -> None:
    """By the structure of the objective: not by its coefficients, nor by the terms' identity."""
    kinds = Case(Objective.of(h.grpo())).kinds

    def tape(objective, **options) -> object:
        return tape_of(Objective.of(objective), NEEDS, kinds, torch.float32, **options)

    first = tape(h.grpo().over("token_mean") + 0.1 * h.distillation())
    assert tape(0.3 * h.grpo().over("token_mean") - h.distillation()) is first is not None
    others = [
        h.grpo().over("sequence_sum") + 0.1 * h.distillation(),
        h.grpo(epsilon_high=0.3).over("token_mean") + h.distillation(),
        h.grpo().over("token_mean").where("keep") + h.distillation(),
        h.grpo().over("token_mean").weighted("weight") + h.distillation(),
        h.grpo().corrected("token_mask").over("token_mean") + h.distillation(),
    ]
    assert len({id(tape(o)) for o in others} | {id(first)}) == len(others) + 1
    assert tape(others[0], gradients=False) is not tape(others[0])
