"""The kernel that runs tapes, against its twin; without a GPU in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from triton_cases import DEVICE

from tape_case import NEEDS, Case, measured_of, objectives  # isort: skip
from tape_plain import run_plain  # isort: skip
from headloss import losses as h
from headloss.batch.reduction import Totals
from headloss.batch.segments import Chunk
from headloss.kernels.opcodes import Op
from headloss.kernels.triton import tape as triton_tape
from headloss.losses.term import Objective
from headloss.objective import tape as taped
from headloss.objective.bound import Gradient
from headloss.objective.recording import Constant
from headloss.objective.statistics import Statistics
from headloss.objective.tape import Row, Tape
from headloss.objective.taping import record

OBJECTIVES = objectives()
RAGGED = (3, 1, 0, 5, 2, 4)
# In the interpreter an instruction takes milliseconds: together these hold every one of them.
FEW = ("grpo", "mixed pairs", "modified twice")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_tape, "BLOCK", 8)
        monkeypatch.setattr(triton_tape, "FOLD", 2)


def tape_for(case: Case, **options: bool) -> Tape:
    tape = record(case.objective, NEEDS, case.kinds, case.dtype, **options)
    assert tape is not None
    return tape


def run(case: Case, tape: Tape, backend: str, chunk: Chunk | None = None, **options) -> Gradient:
    coefficients = [c for c, _ in case.objective.parts]
    stats = case.stats if chunk is None else case.stats.map(lambda t: t[chunk.rows])
    given = stats, case.view, case.totals, coefficients
    with pytest.MonkeyPatch.context() as patch:
        if backend == "reference":
            patch.setattr(taped, "runner", lambda: run_plain)
        return tape.run(*given, vocabulary=case.vocabulary, chunk=chunk, **options)


def assert_same(case: Case, tape: Tape, chunk: Chunk | None = None, **options) -> Gradient:
    found = run(case, tape, "triton", chunk, **options)
    want = run(case, tape, "reference", chunk, **options)
    got, expected = (
        {
            **{("coefficient", n): v for n, v in e.coefficients.tensors().items()},
            **{("divergence", i): v for i, v in enumerate(e.divergences.values())},
        }
        for e in (found, want)
    )
    assert list(got) == list(expected)
    assert all(vector.data_ptr() % 16 == 0 for vector in got.values())
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=3e-6, atol=1e-7, equal_nan=True, msg=lambda m, n=name: f"{n} {m}"
        )
    numbers = measured_of(found), measured_of(want)
    torch.testing.assert_close(*numbers, rtol=3e-6, atol=1e-6, equal_nan=True)
    return found


def case_of(name: str, lengths: tuple[int, ...] = RAGGED, **options) -> Case:
    return Case(OBJECTIVES[name], lengths, torch.float32, device=DEVICE, **options)


@pytest.mark.parametrize("name", OBJECTIVES if DEVICE == "cuda" else FEW)
def test_every_objective(name: str) -> None:
    case = case_of(name)
    assert_same(case, tape_for(case))


SIZES = [(0, 0), (10, 0, 0, 3)] if DEVICE == "cpu" else [(0, 0), (1, 0), (40, 0, 3000, 57)]


@pytest.mark.parametrize("name", ["grpo", "mixed pairs"])
@pytest.mark.parametrize("lengths", SIZES, ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_any_size(name: str, lengths: tuple[int, ...], static: bool) -> None:
    """No token, one, several blocks; empty segments; static shapes."""
    case = case_of(name, lengths, static=static)
    assert_same(case, tape_for(case, observe=DEVICE == "cuda" or sum(lengths) == 0))


@pytest.mark.parametrize("options", [{"unscored": False}, {"current": True}])
def test_ways_to_a_field(options: dict) -> None:
    case = case_of("grpo", **options)
    assert_same(case, tape_for(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_decides_nothing(dtype: torch.dtype) -> None:
    """Scripts set it for their models."""
    case = case_of("entropy")
    tape, before = tape_for(case, observe=False), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = assert_same(case, tape)
    finally:
        torch.set_default_dtype(before)
    vectors = [*found.coefficients.tensors().values(), found.loss]
    assert {v.dtype for v in vectors if v is not None} == {torch.float32}


def test_pieces_and_numbers_on_the_device() -> None:
    kept = {"keep": (2.5, 3), "keep_segment": (1, 1)}
    totals = Totals(torch.tensor(0, device=DEVICE), torch.tensor(3.5, device=DEVICE), kept)
    case = case_of("mixed", totals=totals)
    tape, factor = tape_for(case, observe=False), torch.tensor(4.0, device=DEVICE)
    for chunk in (Chunk(0, 4, 0, 3), Chunk(4, 15, 3, 6)):
        assert_same(case, tape, chunk, factor=factor)
    case = Case(Objective.of(h.entropy().where("keep")), RAGGED, torch.float32, device=DEVICE)
    assert_same(case, tape_for(case), Chunk(5, 8, 3, 4))


def test_programs_take_several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_tape, "PROGRAMS", 2)
    case = case_of("mixed pairs")
    assert_same(case, tape_for(case, observe=False))


def test_a_poisoned_token_shows() -> None:
    case = Case(Objective.of(h.grpo()), (9, 9), torch.float32, device=DEVICE)
    assert case.stats.logp is not None
    case.stats.logp[3] = math.nan
    found = assert_same(case, tape_for(case))
    assert math.isnan(found.values[0]) and math.isnan(float(found.metrics()["grpo/ratio_max"]))


LOGS = (1e-9, 3e-6, 0.3, 1.0, 1 + 1e-6, 7.0, 3e8)
SMALL = (-20.0, -1.0, -1e-4, -3e-6, -1e-9, 0.0, 1e-9, 3e-6, 1e-4, 1.0, 20.0)
FUNCTIONS = {
    Op.EXP: (torch.exp, SMALL),
    Op.EXPM1: (torch.expm1, SMALL),
    Op.SIGMOID: (torch.sigmoid, (-80.0, *SMALL, 80.0)),
    Op.LOG: (torch.log, LOGS),
    Op.LOG1P: (torch.log1p, (-0.5, -1e-4, -1e-9, 0.0, *LOGS)),
}


@pytest.mark.parametrize("op", FUNCTIONS, ids=lambda op: op.name)
def test_functions(op: Op) -> None:
    """Small and large arguments, against float64."""
    function, values = FUNCTIONS[op]
    x = torch.tensor(values, device=DEVICE)
    load = Row(Op.LOAD, 1, (0,), 0)
    rows = (load, Row(op, 2, (1,), 0), Row(Op.OUT, 0, (2, Constant(0.0)), 0))
    tape = Tape(
        phases=(rows,),
        registers=(3, 0),
        inputs=(("statistic", "logp"),),
        numbers=(),
        vectors=(("coefficient", "target"),),
        kinds=(Op.SUM, Op.SUM),
        terms=1,
        reported=(),
        dtype=torch.float32,
        segments_per_unit=1,
    )
    case = Case(Objective.of(h.entropy()), (len(x),), device=DEVICE)
    found = tape.run(Statistics(logp=x), case.view, case.totals, [1.0], vocabulary=1)
    want = function(x.double())
    assert found.coefficients.target is not None
    torch.testing.assert_close(found.coefficients.target.double(), want, rtol=2e-7, atol=0)


def test_two_runs_give_the_same_bits() -> None:
    case = case_of("off policy", (9, 0, 8))
    tape = tape_for(case, observe=False)
    first, second = run(case, tape, "triton"), run(case, tape, "triton")
    assert torch.equal(measured_of(first), measured_of(second))
    for name, vector in first.coefficients.tensors().items():
        assert torch.equal(vector, getattr(second.coefficients, name))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_in_a_graph() -> None:
    """Captured after one call; the graph's replays read what the inputs hold then."""
    case = case_of("mixed", (40, 0, 57))
    tape = tape_for(case)
    run(case, tape, "triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case, tape, "triton")
    assert case.stats.logp is not None
    case.stats.logp.mul_(1.1)
    graph.replay()
    again = run(case, tape, "triton")
    assert torch.equal(measured_of(captured), measured_of(again))
    for name, vector in again.coefficients.tensors().items():
        assert torch.equal(vector, getattr(captured.coefficients, name))
