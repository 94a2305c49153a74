"""Vocabulary shards, segments across ranks and sequence parallelism agree with one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import parallel_cases
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from matrix import AXES, SCHEDULES, Inputs, Row, make_inputs, within
from matrix_cases import CASES
from parallel_cases import Cut
from worlds import World, world_of

import headloss as hl
from headloss import collectives

CUTS = {
    2: [Cut(vocabulary=2), Cut(data=2), Cut(vocabulary=2, spread=True)],
    3: [Cut(data=3), Cut(vocabulary=3, spread=True)],
    4: [Cut(data=2, vocabulary=2, spread=True), Cut(data=2, vocabulary=2)],
}


@pytest.fixture(scope="module", params=[2, 3, 4])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as made:
        yield made


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl,cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:mpi", "cpu"),
        ("cuda:nccl", "cuda:1"),
        ("cpu:nccl,cuda:nccl", "cuda:1"),
    ],
)
def test_host_values_are_exchanged_on_the_cpu_if_the_group_can(monkeypatch, backends, device):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert collectives.device_of(None) == torch.device(device)


def fits(row: dict[str, str], cut: Cut) -> bool:
    """Return True if the test case `row` can be split over ranks as `cut` says."""
    case, schedule = CASES[row["case"]], row["schedule"]
    objective = case.objective(None if case.teacher != "hidden" else hl.Head(torch.ones(2, 2)))
    if schedule == "frozen" and not (case.logp_only and case.teacher != "candidates"):
        return False
    if cut.data > 1:
        # A user's batch-scoped term sees only its rank's tokens; fipo and D-PACE need the token
        # order.
        if objective.scope == "batch" or row["case"] in ("fipo", "draft_blocks"):
            return False
        if objective.scope != "token" and schedule in ("one_pass", "static"):
            return False
    return True


def rows_of(cut: Cut, turn: int) -> list[tuple[Row, Cut]]:
    """Return every objective once, while schedule, dtype, layout and head take their values in
    turn."""
    others = [itertools.cycle(AXES[name][turn % 2 :] + AXES[name][: turn % 2]) for name in AXES]
    found = []
    for number, case in enumerate(CASES):
        values = {name: next(turns) for name, turns in zip(AXES, others, strict=True)}
        values |= {"case": case, "storage": "plain"}
        if values["dtype"] == "float16":
            values["dtype"] = "float32"
        schedules = others[list(AXES).index("schedule")]
        for _ in AXES["schedule"]:
            if fits(values, cut):
                break
            values["schedule"] = next(schedules)
        if not fits(values, cut):
            continue
        found.append((tuple(values[name] for name in AXES), replace(cut, seed=number)))
    return found


def join(name: str, results: list[dict[str, Any]], cut: Cut, total: int, inputs: Any) -> Any:
    """Put an array together from the ranks' parts."""
    grid = [results[i * cut.vocabulary : (i + 1) * cut.vocabulary] for i in range(cut.data)]
    if name in ("logps", "entropies"):
        full = numpy.zeros(total)
        for row in grid:
            full[row[0]["tokens"]] = row[0][name]
        return full
    if name == "gradient hidden":
        if cut.data == 1 and not cut.spread:
            return grid[0][0][name]
        full = numpy.zeros((total, inputs.hidden.shape[-1]))
        for row in grid:
            for rank in row:
                full[rank["positions"]] = rank[name]
        return full.reshape(inputs.hidden.shape)
    if name.startswith("gradient") and not name.endswith(".a"):  # vocabulary rows
        return sum(numpy.concatenate([rank[name] for rank in row]) for row in grid)
    return sum(row[0][name] for row in grid)


def compare(row: Row, cut: Cut, results: list[dict[str, Any]]) -> None:
    options = SCHEDULES[dict(zip(AXES, row, strict=True))["schedule"]]
    compare_inputs(make_inputs(row), options, cut, results)


def compare_inputs(
    inputs: Inputs, options: hl.Options, cut: Cut, results: list[dict[str, Any]]
) -> None:
    """Check results of all ranks against the error allowed on one rank, and that ranks of a
    vocabulary group have the same bits."""
    total = inputs.batch.targets.numel()
    for i in range(cut.data):
        line = results[i * cut.vocabulary : (i + 1) * cut.vocabulary]
        for name, value in line[0].items():
            shared = name in ("gradient hidden", "positions") and not cut.spread
            shared |= name.split()[0] in ("loss", "logps", "entropies", "term", "metric", "tokens")
            shared |= name.endswith(".a")
            for other in line[1:] if shared else ():
                assert numpy.array_equal(value, other[name], equal_nan=True), name
    oracle, coarse = inputs.plain("float64"), inputs.plain("input")
    exact = oracle if inputs.hidden.dtype == torch.float64 else inputs.plain("float32")

    def whole(name: str) -> torch.Tensor:
        return torch.as_tensor(join(name, results, cut, total, inputs))

    def budget(name: str, value: torch.Tensor, want: torch.Tensor, theirs: torch.Tensor) -> None:
        precise = inputs.hidden.dtype == torch.float64
        value = value if precise else value.float()
        within(name, value.reshape(want.shape), want, theirs, inputs.tightest)

    budget("logps", whole("logps"), oracle.logps, exact.logps)
    scalars = {"loss": (oracle.loss, exact.loss)}
    scalars |= {f"term {n}": (oracle.terms[n], exact.terms[n]) for n in oracle.terms}
    for name, (want, theirs) in scalars.items():
        value, precise = whole(name), inputs.hidden.dtype == torch.float64
        tolerance = inputs.tightest if precise else 1e-6
        allowed = 3 * (theirs - want).abs() + tolerance * want.abs().clamp_min(0.5)
        assert (value - want).abs() <= allowed, (name, value, want)
    for name, want in oracle.gradients.items():
        budget(f"{name}.grad", whole(f"gradient {name}"), want, coarse.gradients[name])
    alone, _ = inputs.run(options)
    for name, measured in alone.metrics.items():
        got, want = results[0][f"metric {name}"], float(measured)
        assert numpy.isclose(got, want, rtol=2e-4, atol=2e-5, equal_nan=True), (name, got, want)


def in_turns(size: int) -> list[list[tuple[Row, Cut]]]:
    """Return the test cases for worlds of `size` ranks, each with the way it is split.

    Every objective runs with its tokens split over two ranks or, if it does not support this, with
    its vocabulary split over two, three and four ranks. The objectives
    are spread over all combinations of the number of ranks and sequence parallelism on or off.
    """
    cuttable = {row[0] for row, _ in rows_of(Cut(data=2), 0)}
    chosen = []
    for turn, cut in enumerate(CUTS[size]):
        spread = cut.spread != (size == 2)
        chosen.append([
            (row, numbered)
            for row, numbered in rows_of(cut, turn + size)
            if cut == Cut(data=2)
            or row[0] not in cuttable
            or (spread == numbered.seed // 3 % 2 and size in (2, 3 + numbered.seed // 6 % 2))
        ])  # fmt: skip
    return chosen


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_term(world: World, every: bool) -> None:
    """Each objective gives the loss, metrics and gradients of one rank, with uneven vocabulary
    slices, segments that span ranks, and sequence parallelism."""
    size = world.size
    full = (rows_of(cut, turn + size) for turn, cut in enumerate(CUTS[size]))
    for rows in full if every else in_turns(size):
        results = world.run(parallel_cases.run_all, rows, seconds=300)
        failures = []
        for number, (row, cut) in enumerate(rows):
            try:
                compare(row, cut, [found[number] for found in results])
            except AssertionError as error:
                failures.append((row, cut, str(error)))
        assert not failures, "\n".join(map(str, failures))


def test_answers_to_prompts_that_run_across_ranks(world: World) -> None:
    """A batch-scoped term of segment sums sees all segments on every rank, even if a prompt's
    answers are on several ranks."""
    rows = [
        ((case, layout, schedule, "float64", "plain", "plain", "near"), replace(cut, seed=seed))
        for case in ("real", "over_prompt_mean")
        for cut in CUTS[world.size]
        for seed, (layout, schedule) in enumerate((("packed", "recompute"), ("padded", "held")))
    ]
    results = world.run(parallel_cases.run_all, rows)
    for number, (row, cut) in enumerate(rows):
        compare(row, cut, [found[number] for found in results])


def test_an_order_of_tokens_that_run_across_ranks(world: World) -> None:
    row = ("fipo", "packed", "recompute", "float64", "plain", "plain", "near")
    for cut in (cut for cut in CUTS[world.size] if cut.data > 1):
        with pytest.raises(AssertionError, match="fipo: segments.group: got segments that run"):
            world.run(parallel_cases.run_all, [(row, cut)])


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_cuts(world: World, data: st.DataObject) -> None:
    """Random splits of vocabulary rows, tokens and segments over ranks agree with one rank, under
    every schedule."""
    cut = data.draw(st.sampled_from([*CUTS[world.size], Cut(vocabulary=world.size)]))
    seed = data.draw(st.integers(0, 10_000))
    cut = replace(cut, seed=seed)
    cases = [c for c in CASES if c.startswith("mix") or c in ("dpo", "where_segment_scope")]
    values = {name: data.draw(st.sampled_from(list(values))) for name, values in AXES.items()}
    values |= {"case": data.draw(st.sampled_from(cases)), "storage": "plain"}
    values["dtype"] = data.draw(st.sampled_from(["float32", "float64", "bfloat16"]))
    assume(fits(values, cut))
    row = tuple(values[name] for name in AXES)
    compare(row, cut, [found[0] for found in world.run(parallel_cases.run_all, [(row, cut)])])
