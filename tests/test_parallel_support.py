"""`support_ids` agree with one rank and with masked logits, under vocabulary slices, sequence
parallelism and segments that span ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import parallel_support
import pytest
from parallel_cases import Cut
from parallel_support import OPTIONS, Call, inputs_of
from test_parallel import compare_inputs
from worlds import World, world_of

CUTS = (Cut(vocabulary=2), Cut(vocabulary=2, spread=True), Cut(data=2))
KINDS = ("padded", "mixed", "flat", "mixed flat")
HEADS = ("plain", "everything", "lora", "bias", "padded_vocabulary")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as made:
        yield made


def calls() -> list[Call]:
    """Return one call for every supported combination of a form of `support_ids`, options, and a
    split over ranks. The calls use the heads of `HEADS` one after another."""
    heads, found = itertools.cycle(HEADS), []
    for number, (cut, kind, name) in enumerate(itertools.product(CUTS, KINDS, OPTIONS)):
        if "flat" in kind and (cut.data > 1 or name == "static"):
            continue
        if name == "static" and "mixed" in kind:
            continue
        if cut.data > 1 and name in ("one_pass", "small_chunks", "static"):
            name = "recompute"
        found.append((kind, next(heads), name, Cut(**{**vars(cut), "seed": number})))
    return found


def test_every_kind_and_cut(world: World) -> None:
    made = calls()
    results = world.run(parallel_support.run_all, made)
    failures = []
    for number, call in enumerate(made):
        try:
            inputs = inputs_of(call)
            compare_inputs(inputs, OPTIONS[call[2]], call[3], [found[number] for found in results])
        except AssertionError as error:
            failures.append((call, str(error)))
    assert not failures, "\n".join(map(str, failures))


def test_other_supports_are_an_error_on_all_ranks(world: World) -> None:
    world.run(parallel_support.other_supports)
