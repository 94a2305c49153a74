"""The planner chooses the documented schedule, chunks and bytes, and gives reasons."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import headloss as hl
from headloss import kernels
from headloss.engine.call import call_of
from headloss.engine.checks import Arguments
from headloss.engine.plan import GRAIN, MIB, Chunk, Plan, make_plan
from headloss.engine.plan_inputs import PlanInputs
from headloss.engine.requirements import inputs_of
from headloss.logits.linear import PARTS
from headloss.parallel.vocabulary import VocabShard

BASE = PlanInputs(tokens=1000, width=64, vocabulary=5000, scope="token", lengths=[1000])


def problem(**changes) -> PlanInputs:
    if "lengths" in changes:
        changes.setdefault("tokens", sum(changes["lengths"]))
    elif "tokens" in changes:
        changes["lengths"] = [changes["tokens"]]
    return dataclasses.replace(BASE, **changes)


def planned(changes: dict | None = None, **options) -> Plan:
    return make_plan(problem(**(changes or {})), hl.Options(**options), "reference")


def row(tokens: int, vocabulary: int = 5000) -> int:
    """Return the bytes of the logits of `tokens` tokens."""
    return tokens * vocabulary * 4


# ---------------------------------------------------------------------- chunks


@pytest.mark.parametrize(
    ("asked", "rows"), [(1, 1), (2, 2), (999, 999), (1000, 1000), (1001, 1000)]
)
def test_chunks_have_as_many_tokens_as_asked_for(asked, rows):
    plan = planned(chunk_tokens=asked)
    assert plan.chunk_tokens == rows
    assert [chunk.stop - chunk.start for chunk in plan.chunks][:-1] == [rows] * (999 // rows)


@pytest.mark.parametrize(
    ("width", "vocabulary", "budget", "rows"),
    [(4096, 128256, 1200, 4096), (4096, 128256, 2200, 8192), (2048, 151936, 2200, 6144)],
)
def test_chunks_fill_the_waves_of_a_gpu(width, vocabulary, budget, rows):
    """Chunks fill whole waves of a GPU with 132 multiprocessors and tiles of 128 x 256."""
    plan = planned(
        {
            "tokens": 16384,
            "width": width,
            "vocabulary": vocabulary,
            "row_bytes": 2,
            "element_size": 2,
            "on_gpu": True,
            "multiprocessors": 132,
        },
        memory_budget=budget * MIB,
    )
    assert plan.chunk_tokens == rows


def test_chunks_within_a_budget_are_equal():
    plan = planned({"tokens": 1793}, memory_budget=row(1000))
    assert [chunk.stop - chunk.start for chunk in plan.chunks] == [640, 640, 513]


lengths_of = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def check_cover(plan: Plan, lengths: list[int]) -> None:
    """Check that the plan's chunks are consecutive and cover all tokens, and that each chunk names
    the segments of its tokens."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    assert plan.chunks[0].start == 0 and plan.chunks[-1].stop == sum(lengths)
    for a, b in zip(plan.chunks, plan.chunks[1:], strict=False):
        assert a.stop == b.start
    for chunk in plan.chunks:
        assert starts[chunk.first] <= chunk.start
        assert chunk.stop <= starts[chunk.last]
        assert chunk.stop - chunk.start <= plan.chunk_tokens


@given(lengths_of, st.integers(1, 60))
def test_token_scoped_chunks_cut_anywhere(lengths, chunk):
    if not sum(lengths):
        return
    plan = planned({"lengths": lengths}, chunk_tokens=chunk)
    assert plan.schedule == "one_pass"
    check_cover(plan, lengths)
    assert all(c.stop - c.start == plan.chunk_tokens for c in plan.chunks[:-1])


@given(lengths_of, st.integers(1, 60), st.sampled_from([1, 2]))
def test_segment_scoped_chunks_cut_between_units(lengths, chunk, unit):
    """Every segment (or pair) lies in one chunk of minimal size."""
    lengths = lengths[: len(lengths) // unit * unit]
    if not sum(lengths):
        return
    changes = {"lengths": lengths, "scope": "segment", "segments_per_unit": unit}
    plan = planned(changes, chunk_tokens=chunk)
    assert plan.schedule == "one_pass"
    check_cover(plan, lengths)
    assert [c.first for c in plan.chunks[1:]] == [c.last for c in plan.chunks[:-1]]
    assert plan.chunks[0].first == 0 and plan.chunks[-1].last == len(lengths)
    assert all(c.first % unit == 0 and c.last % unit == 0 for c in plan.chunks)
    for c in plan.chunks:
        units = [sum(lengths[i : i + unit]) for i in range(c.first, c.last, unit)]
        assert c.stop - c.start == sum(units)
        assert sum(units) <= chunk or sum(n > 0 for n in units) == 1


def test_a_chunk_grows_to_hold_its_longest_segment_within_the_budget():
    changes = {"lengths": [100, 700, 200], "scope": "segment"}
    plan = planned(changes, chunk_tokens=150, memory_budget=row(700))
    assert plan.schedule == "one_pass"
    assert plan.chunks == (Chunk(0, 100, 0, 1), Chunk(100, 800, 1, 2), Chunk(800, 1000, 2, 3))
    assert plan.chunk_tokens == 700
    over = planned(changes, chunk_tokens=150, memory_budget=row(699))
    assert over.schedule == "recompute"
    assert "segment-scoped and does not fit" in over.reason


def test_segments_are_cut_into_the_fewest_chunks_of_the_budget():
    """Segments are divided into the fewest chunks within the budget, even if they differ in length;
    a requested chunk size is respected."""
    lengths = [5000, 4900, 300, 280, 5000, 5000]
    changes = {"tokens": 20480, "scope": "segment", "lengths": lengths}
    sizes = [c.stop - c.start for c in planned(changes, memory_budget=row(10560)).chunks]
    assert sizes == [10480, 10000]
    asked = planned(changes, memory_budget=row(10560), chunk_tokens=7168)
    assert [c.stop - c.start for c in asked.chunks] == [5000, 5480, 5000, 5000]


def test_chunks_are_of_equal_size():
    """Chunks have equal sizes: 1000 tokens under a budget of 600 give two chunks of about 500."""
    plan = planned(memory_budget=row(600))
    sizes = [c.stop - c.start for c in plan.chunks]
    assert len(sizes) == 2 and sizes[0] % GRAIN == 0 and sizes[0] == 512


def test_a_batch_scoped_objective_is_one_chunk_or_recompute():
    assert planned({"scope": "batch"}).chunks == (Chunk(0, 1000, 0, 1),)
    plan = planned({"scope": "batch"}, memory_budget=row(999))
    assert plan.schedule == "recompute" and "batch-scoped" in plan.reason


def test_a_group_of_ranks_cannot_finish_a_segment_alone():
    for budget, schedule in ((999, "recompute"), (1000, "held")):
        plan = planned({"scope": "segment", "grouped": True}, memory_budget=row(budget))
        assert plan.schedule == schedule and "segments run across ranks" in plan.reason
    with pytest.raises(ValueError, match="one_pass.*segments run across ranks"):
        planned({"scope": "segment", "grouped": True}, schedule="one_pass")


def test_no_tokens():
    for scope in ("token", "segment", "batch"):
        plan = planned({"lengths": [0, 0], "scope": scope})
        assert plan.chunks == (Chunk(0, 0, 0, 2),) and plan.bytes["logits"] >= 0


def test_static_shapes_know_no_lengths():
    changes = {"lengths": None, "tokens": 1000}
    plan = make_plan(
        dataclasses.replace(BASE, **changes), hl.Options(chunk_tokens=300), "reference"
    )
    assert [c.start for c in plan.chunks] == [0, 300, 600, 900]
    segments = dataclasses.replace(BASE, **changes, scope="segment")
    assert len(make_plan(segments, hl.Options(), "reference").chunks) == 1
    small = hl.Options(memory_budget=row(100))
    assert make_plan(segments, small, "reference").schedule == "recompute"


# ---------------------------------------------------------------------- choice of the schedule


@pytest.mark.parametrize(
    ("changes", "options", "schedule"),
    [
        ({}, {}, "one_pass"),
        ({}, {"schedule": "recompute"}, "recompute"),
        ({"weight_gradient": False, "logp_only": True}, {}, "one_pass"),
        ({"weight_gradient": False, "logp_only": True}, {"schedule": "frozen"}, "frozen"),
        # If the head is frozen and the objective reads only log-probs, segments larger than the
        # memory budget do not need the schedule `recompute`: `frozen` computes logits once.
        (
            {"weight_gradient": False, "logp_only": True, "scope": "segment"},
            {"memory_budget": row(10)},
            "frozen",
        ),
        (
            {"weight_gradient": False, "logp_only": False, "scope": "segment"},
            {"memory_budget": row(10)},
            "recompute",
        ),
        ({"input_gradient": False, "weight_gradient": False}, {}, "statistics"),
        ({"scope": "external"}, {"memory_budget": row(1000)}, "held"),
        ({"scope": "external"}, {"memory_budget": row(999)}, "recompute"),
        ({"scope": "external"}, {"chunk_tokens": 999}, "recompute"),
        ({"scope": "external", "weight_gradient": False}, {}, "held"),
        ({"scope": "external", "weight_gradient": False, "logp_only": True}, {}, "frozen"),
        ({}, {"schedule": "held", "chunk_tokens": 100}, "held"),
        ({"given": True}, {}, "recompute"),
        ({"given": True, "overwrites": True}, {}, "one_pass"),
    ],
)
def test_the_choice(changes, options, schedule):
    plan = planned(changes, **options)
    assert plan.schedule == schedule and plan.reason


@pytest.mark.parametrize(
    ("changes", "schedule", "match"),
    [
        ({}, "frozen", "the head requires a gradient"),
        ({"weight_gradient": False}, "frozen", "more than logp"),
        (
            {"weight_gradient": False, "logp_only": True, "given": True},
            "frozen",
            "the logits are given",
        ),
        ({"scope": "segment", "vocabulary": 1 << 20}, "one_pass", "segment-scoped"),
        ({"scope": "external"}, "one_pass", "the loss lives elsewhere"),
        ({"given": True}, "held", "the logits are given"),
    ],
)
def test_an_explicit_schedule_that_cannot_serve_is_refused(changes, schedule, match):
    with pytest.raises(ValueError, match=f'schedule: got "{schedule}", but .*{match}'):
        planned(changes, schedule=schedule)


def test_held_says_its_bytes():
    """The `held` schedule counts the logits of all tokens as memory, however they are split into
    chunks, and respects the caller's budget."""
    plan = planned(schedule="held", chunk_tokens=300)
    assert plan.bytes["logits"] == row(1000) and len(plan.chunks) == 4 and not plan.single_block
    whole = planned({"scope": "external"}, memory_budget=row(1000))
    size = row(1000) / (1 << 20)
    assert len(whole.chunks) == 1 and whole.single_block
    assert f"the logits of all tokens take {size:.1f} MiB within the budget" in whole.reason
    match = f"logits of all tokens take {size:.1f} MiB, more than the budget"
    with pytest.raises(ValueError, match=match):
        planned(schedule="held", memory_budget=row(999))
    assert match.split(",")[0] in planned({"scope": "external"}, memory_budget=row(999)).reason


def test_teachers_are_held_in_one_block():
    """With a teacher, the `held` schedule uses a single chunk, since it measures all tokens before
    it computes any gradient."""
    plan = planned({"teachers": True}, schedule="held", chunk_tokens=300)
    assert len(plan.chunks) == 1


def test_a_budget_by_default():
    changes = {"tokens": 100_000, "vocabulary": 128_256}
    assert planned(changes).bytes["logits"] <= 256 * MIB
    gpu = planned({**changes, "on_gpu": True})
    assert 512 * MIB < gpu.bytes["logits"] <= 1200 * MIB
    assert "1200.0 MiB  by default" in str(gpu)


GPU = {"element_size": 2, "weight_size": 2, "row_bytes": 2, "exp_tiles": True, "on_gpu": True}
GPU |= {"multiprocessors": 132, "memory": 80 << 30}


@pytest.mark.parametrize(("gib", "mib"), [(0, 1200), (16, 256), (80, 1280), (140, 2240)])
def test_the_budget_of_a_gpu(gib, mib):
    """A GPU's budget is a 64th of its memory, stated in the plan; 1200 MiB if the memory is
    unknown."""
    changes = {**GPU, "tokens": 16384, "width": 2048, "vocabulary": 151936, "memory": gib << 30}
    plan = planned(changes)
    source = f"one part in 64 of the GPU's memory, {gib << 10} MiB" if gib else "by default"
    assert plan.budget == (mib * MIB, source) and plan.bytes["logits"] <= plan.budget[0]
    assert f"budget     {mib:8}.0 MiB  {source}" in str(plan)
    asked = planned(changes, memory_budget=5 << 30)
    assert asked.budget == (5 << 30, "asked for")
    assert asked.single_block and len(asked.chunks) == 1  # one block needs no float32 sum of dW


@pytest.mark.parametrize(
    ("changes", "chunk_tokens", "schedule"),
    [
        ({}, None, "recompute"),
        ({"vocabulary": 1_000_007}, None, "recompute"),
        ({"scope": "segment", "lengths": [500] * 32}, None, "recompute"),
        ({"vocabulary": 500_000}, None, "one_pass"),  # 1,280 tokens a chunk
        ({"tokens": 640}, None, "one_pass"),  # a single chunk
        ({"weight_gradient": False}, None, "one_pass"),
        ({"exp_tiles": False, "row_bytes": 4, "element_size": 4}, None, "one_pass"),
        ({}, 512, "one_pass"),
    ],
)
def test_chunks_of_few_tokens_are_recomputed(changes, chunk_tokens, schedule):
    """On a GPU, 16-bit chunks of at most 640 tokens make `recompute` the default: over a million
    items it takes as long as one pass, and needs no float32 sum of the weight gradient."""
    head = {**GPU, "tokens": 16384, "width": 1024, "vocabulary": 1_000_000, **changes}
    plan = planned(head, chunk_tokens=chunk_tokens)
    assert plan.schedule == schedule
    if schedule == "recompute":
        one_pass = planned(head, schedule="one_pass")
        assert f"over {len(one_pass.chunks)} chunks is slow" in plan.reason
        assert plan.total_bytes < 0.2 * one_pass.total_bytes


HEADS = [(2048, 151936), (4096, 128256)]


@pytest.mark.parametrize(("width", "vocabulary"), HEADS)
def test_memory_on_a_gpu_grows_by_numbers_and_rows_of_hidden_width(width, vocabulary):
    """On a GPU, each further token needs memory for a few numbers and a row of hidden width, not
    for a row of logits.

    The schedule `one_pass` needs at most the memory budget (`plan.budget`) for a chunk of logits, a
    float32 accumulator of the weight gradient, and 64 bytes per token. The schedule `recompute`
    needs a float32 accumulator of the hidden gradient, and logits of a block of vocabulary rows
    that has at most as many rows as the hidden width.
    """
    none = {"input_gradient": False, "weight_gradient": False}
    for tokens in (1 << 14, 1 << 16, 1 << 18):
        sizes = {**GPU, "width": width, "vocabulary": vocabulary, "tokens": tokens}
        one, two = planned(sizes), planned(sizes, schedule="recompute")
        assert one.schedule == "one_pass"
        assert one.total_bytes <= one.budget[0] + vocabulary * width * 4 + tokens * 64
        assert two.bytes["hidden gradient accumulator"] == tokens * width * 4
        slab = max(480 * MIB, tokens * width * 2)
        assert two.total_bytes <= slab + tokens * (64 + width * 4)
        assert planned(sizes | none).total_bytes <= 80 * MIB + tokens * 64


@pytest.mark.parametrize(("width", "vocabulary"), HEADS)
@pytest.mark.parametrize("schedule", ["one_pass", "recompute"])
def test_memory_on_a_cpu_grows_no_more(width, vocabulary, schedule):
    for tokens in (1 << 14, 1 << 16, 1 << 18):
        hidden, weight = (
            torch.empty(n, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for n in (tokens, vocabulary)
        )
        batch = hl.Batch(torch.zeros(tokens, dtype=torch.int64))
        options = hl.Options(schedule=schedule)
        found = hl.plan(hidden, hl.Head(weight), batch, hl.cross_entropy(), options)
        per_token = 64 + (4 * width if schedule == "recompute" else 0)
        constant = 48 * MIB + (vocabulary * width * 4 if schedule == "one_pass" else 0)
        assert found.budget == (256 * MIB, "by default")
        assert found.total_bytes <= found.budget[0] + constant + tokens * per_token


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MEASURED: dict[str, dict[str, Any]] = {
    "headloss, 1200 MiB": {"schedule": "one_pass", "memory_budget": 1200 * MIB},
    "headloss, 2200 MiB": {"schedule": "one_pass", "memory_budget": 2200 * MIB},
    "headloss, 5 GiB": {"schedule": "one_pass", "memory_budget": 5 << 30},
    "headloss, recompute": {"schedule": "recompute"},
    "head_stats": {},
}


def test_the_planned_peak_is_the_measured_one():
    """Planned peaks equal peaks measured by a GPU's allocator, including gradients."""
    rows = json.loads((RESULTS / "table.json").read_text())["rows"]
    works = ("cross-entropy", "GRPO", "log-prob and entropy, no gradient")
    rows = [r for r in rows if r["row"] in works and r["contestant"] in MEASURED and "ms" in r]
    assert len(rows) >= 14
    for row in rows:
        trains = row["work"] != "scores"
        sizes = {name: row[name] for name in ("tokens", "width", "vocabulary")}
        changes = {**GPU, **sizes, "input_gradient": trains, "weight_gradient": trains}
        plan = planned(changes, **MEASURED[row["contestant"]])
        assert plan.peak_bytes == pytest.approx(row["peak_bytes"], rel=0.02), row["case"]


def test_ranks_plan_for_the_smallest_gpu(monkeypatch):
    own = {"rows": 5, "tokens": 4, "weight_gradient": 1, "teacher_columns": -1, "highest id": 3}
    theirs = {fact: [value] * 2 for fact, value in own.items()} | {"memory": [140 << 30, 79 << 30]}
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    found = VocabShard(object(), theirs, None)
    assert found.memory == 79 << 30 and (found.first, found.size, found.vocabulary) == (5, 5, 10)
    head, batch = hl.Head(torch.zeros(10, 3)), hl.Batch(torch.arange(4))
    arguments = torch.zeros(4, 3), head, batch, hl.cross_entropy(), hl.Options()
    arguments = Arguments.of_head("plan", *arguments)
    call = call_of(arguments)
    monkeypatch.setattr(kernels, "memory", lambda device: 140 << 30)
    # the logit budget is a 64th of the GPU's memory
    for places, gib in ((call.shard, 140), (found, 79)):
        inputs = dataclasses.replace(inputs_of(arguments, call.requirements, places), on_gpu=True)
        plan = make_plan(inputs, hl.Options(), "reference")
        assert plan.budget[0] == gib << 24


# ---------------------------------------------------------------------- bytes


@given(st.integers(1, 5000), st.sampled_from([10, 1000, 20_000]))
# With a budget of 1000 rows of logits, 793 tokens are one chunk, and 1793 tokens are three chunks
# of 640.
@example(793, 1000)
def test_a_smaller_budget_never_takes_more(tokens, budget_rows):
    changes = {"tokens": tokens}
    for schedule in ("one_pass", "recompute"):
        small = planned(changes, schedule=schedule, memory_budget=row(budget_rows))
        large = planned(changes, schedule=schedule, memory_budget=row(2 * budget_rows))
        assert small.bytes["logits"] <= large.bytes["logits"]
        assert small.bytes["logits"] <= row(budget_rows)
        more = planned({"tokens": tokens + 1000}, schedule=schedule, memory_budget=row(budget_rows))
        # Equal chunks have at least half of the size that the budget allows.
        assert small.bytes["logits"] <= 2 * more.bytes["logits"] + row(GRAIN)


def test_bytes_by_part():
    plan = planned({"tokens": 512, "element_size": 2, "weight_size": 2}, chunk_tokens=128)
    assert plan.bytes["logits"] == row(128)
    assert plan.bytes["weight gradient accumulator"] == 5000 * 64 * 4
    # The reference backend computes in three float32 blocks of logits and one float32 copy of the
    # weight.
    assert plan.bytes["working blocks"] == 4 * (3 * 128 * 5000 + 5000 * 64)
    assert plan.total_bytes == sum(plan.bytes.values())
    # The logits are freed before the float32 sum of dW is cast to the weight's dtype, so that the
    # peak contains the logits or the returned dW, whichever is larger.
    returned = 2 * 64 * 5000
    parts = plan.total_bytes - plan.bytes["logits"]
    assert plan.peak_bytes == 2 * 64 * 512 + parts + max(plan.bytes["logits"], returned)
    recompute = planned(
        {"tokens": 512, "element_size": 2, "weight_size": 2}, chunk_tokens=128, schedule="recompute"
    )
    assert "weight gradient accumulator" not in recompute.bytes
    assert recompute.bytes["hidden gradient accumulator"] == 512 * 64 * 4
    assert recompute.bytes["logits"] <= row(128)
    frozen = planned(
        {"weight_gradient": False, "logp_only": True}, chunk_tokens=128, schedule="frozen"
    )
    assert set(frozen.bytes) == {"logits", "statistics", "working blocks"}


def test_a_float32_weight_accumulates_in_the_gradient_that_is_returned():
    assert "weight gradient accumulator" not in planned().bytes


@given(st.integers(1, 4000), st.integers(1, 60_000), st.integers(1, 4000))
def test_a_tile_holds_no_more_than_a_chunk(tokens, vocabulary, chunk):
    changes = {"tokens": tokens, "vocabulary": vocabulary}
    plan = planned(changes, schedule="recompute", chunk_tokens=chunk)
    rows, columns = plan.tile
    assert 1 <= rows <= tokens and 1 <= columns <= vocabulary
    assert rows * columns <= plan.chunk_tokens * vocabulary


# ---------------------------------------------------------------------- display


def test_str():
    plan = planned({"element_size": 2, "weight_size": 2}, chunk_tokens=256)
    lines = str(plan).splitlines()
    assert lines[0] == "schedule   one_pass: token-scoped"
    assert lines[1] == "backend    reference"
    assert lines[2] == "steps      4 chunks of at most 256 tokens"
    assert any("logits" in line and "4.9 MiB" in line for line in lines)
    sizes = {"total": plan.total_bytes, "peak": plan.peak_bytes, "plain": plan.plain_bytes}
    want = [f"{name} {size / MIB:.1f} MiB" for name, size in sizes.items()]
    assert [" ".join(line.split()[:3]) for line in lines[-3:]] == want
    # `repr` leaves out the list of chunks, which may be long
    assert "chunks=" not in repr(planned(chunk_tokens=1))
    sweep = str(planned(schedule="recompute"))
    assert "tiles of" in sweep and "asked for" in sweep


def test_plans_compare_and_are_immutable():
    assert planned() == planned() != planned(chunk_tokens=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned().schedule = "frozen"


# ---------------------------------------------------------------------- plans of calls


def test_plan_counts_scored_tokens_alone():
    targets = torch.randint(30, (4, 50))
    targets[:, 20:] = -100
    hidden = torch.zeros(4, 50, 8, requires_grad=True)
    plan = hl.plan(hidden, hl.Head(torch.zeros(30, 8)), hl.Batch(targets), hl.cross_entropy())
    assert plan.chunks[-1].stop == 80 and plan.chunks[-1].last == 4


def test_given_logits_beside_a_teacher_take_no_more_than_a_chunk_of_both():
    logits = torch.randn(40, 300).bfloat16().requires_grad_()
    batch = hl.Batch(torch.arange(40), teacher_logits=torch.randn(40, 300))
    options = hl.Options(schedule="recompute", chunk_tokens=7)
    plan = hl.logits_loss(logits, batch, hl.distillation(), options=options).plan
    assert plan.bytes["logits"] == 7 * 300 * 4 * 2


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("adapters", [0, 1])
def test_softmax_terms_are_of_one_product_that_nothing_rounds(monkeypatch, adapters, rounded):
    monkeypatch.setattr(kernels, "can_write_exp", lambda *_: True)
    lora = (hl.Lora(a=torch.zeros(2, 3), b=torch.zeros(9, 2), scaling=1.0),) * adapters
    head = hl.Head(torch.zeros(9, 3), lora=lora)
    options = hl.Options(logits_dtype=torch.bfloat16 if rounded else None)
    plan = hl.plan(torch.zeros(4, 3), head, hl.Batch(torch.arange(4)), hl.cross_entropy(), options)
    assert plan.exp_tiles is not (rounded or adapters > 0)


def test_plan_of_shipped_objectives():
    """The schedule of a built-in objective follows from the objective's scope and from the
    statistics that the objective differentiates.

    On a frozen head, a policy term with the scope "segment", such as `gspo`, gets the schedule
    `frozen`.
    """
    targets = torch.randint(30, (60,))
    fields = {
        "advantages": torch.zeros(3),
        "old_logps": torch.zeros(60),
        "ref_logps": torch.zeros(60),
    }
    batch = hl.Batch(targets, hl.Segments.from_lengths([20, 20, 20]), **fields)
    hidden, head = torch.zeros(60, 8, requires_grad=True), hl.Head(torch.zeros(30, 8))
    tight = hl.Options(memory_budget=10 * 30 * 4)
    for objective, schedule in {
        hl.grpo(): "one_pass",
        hl.gspo(): "frozen",
        hl.gspo() + hl.kl(estimator="k3"): "frozen",
        hl.gspo() - hl.entropy(): "recompute",
        hl.grpo().top_entropy(quantile=0.5): "frozen",
    }.items():
        assert hl.plan(hidden, head, batch, objective, tight).schedule == schedule
    trained = hl.Head(torch.zeros(30, 8, requires_grad=True))
    assert hl.plan(hidden, trained, batch, hl.gspo(), tight).schedule == "recompute"
    assert hl.plan(hidden, trained, batch, hl.gspo()).schedule == "one_pass"


@pytest.mark.usefixtures("skip_small_rows")
@pytest.mark.parametrize(
    ("objective", "options", "skips"),
    [
        (hl.cross_entropy(label_smoothing=0.1) + 0.1 * hl.entropy(), {}, False),
        (hl.cross_entropy(), {"gradient_tolerance": 0.01}, True),
        (hl.cross_entropy().weighted("old_logps"), {}, True),
        (hl.cross_entropy().where("some"), {}, True),
        (hl.cross_entropy() + hl.grpo(), {}, True),
        (hl.cross_entropy().top_entropy(quantile=0.5), {}, True),
    ],
)
def test_rows_without_a_gradient_are_looked_for_where_there_may_be_some(objective, options, skips):
    """Zero-gradient rows are looked for only if a term can produce them; the search is skipped for
    terms with a constant derivative."""
    some = {"advantages": torch.ones(4), "old_logps": -torch.ones(4)}
    batch = hl.Batch(torch.arange(4), **some, some=torch.arange(4) > 0)
    head = hl.Head(torch.randn(8, 3, requires_grad=True))
    plan = hl.plan(torch.randn(4, 3), head, batch, objective, hl.Options(**options))
    assert plan.skip_rows is skips


def test_slabs_beside_a_teacher_are_whole_waves():
    """In distillation under recompute, blocks of vocabulary rows fill whole waves of GPU tiles,
    and the logits of the first pass over the vocabulary need no more memory than the second
    pass."""
    sizes = {"tokens": 16384, "width": 4096, "vocabulary": 128256, "lengths": [16384]}
    gpu = {"on_gpu": True, "multiprocessors": 132, "memory": 139 << 30, "element_size": 2}
    teacher = {"teachers": True, "row_bytes": 8, "weight_size": 2}
    options = hl.Options(schedule="recompute")
    p = PlanInputs(**sizes, **gpu, **teacher)  # type: ignore[arg-type]
    plan = make_plan(p, options, "triton")
    assert plan.tile == (16384, 33 * 256) and 16384 // PARTS // 128 * 33 % 132 == 0
    # 3 bytes per logit: a 16-bit gradient of all tokens, and float32 logits of student and teacher
    # for an eighth of them.
    assert plan.bytes["logits"] == 16384 * 33 * 256 * 3
    assert plan.total_bytes <= 660 << 20
    rows = {block.stop - block.start for block in plan.blocks}
    assert rows == {640, 16384 % 640}
    assert max(rows) * 128256 * 8 <= plan.total_bytes
    long = make_plan(dataclasses.replace(p, tokens=32768, lengths=None), options, "triton")
    # In tiles of fewer than 4096 columns, adding to dX would take as long as the matmul.
    assert long.tile.columns == 4096
    small = dataclasses.replace(p, tokens=1024, vocabulary=8192, lengths=[1024])
    # A tile spans the whole vocabulary if the whole vocabulary fills less than half of a wave of
    # GPU tiles.
    assert make_plan(small, options, "triton").tile == (1024, 8192)


def test_a_small_call_on_a_cpu_does_not_look_for_rows_without_a_gradient(monkeypatch):
    """A small CPU call does not search for rows without gradient unless requested, since the search
    costs more than it saves."""
    monkeypatch.setattr("headloss.engine.plan.CPU_SKIP_WORTH", 1 << 24)
    p = PlanInputs(tokens=64, width=32, vocabulary=128, lengths=[64])
    assert not make_plan(p, hl.Options(), "reference").skip_rows
    assert make_plan(dataclasses.replace(p, thorough=True), hl.Options(), "reference").skip_rows
    large = dataclasses.replace(p, tokens=4096, lengths=[4096])
    assert make_plan(large, hl.Options(), "reference").skip_rows
