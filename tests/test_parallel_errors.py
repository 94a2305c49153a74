"""What is wrong on one rank is raised on all of them, within a time limit."""

from __future__ import annotations

import re
from collections.abc import Iterator

import parallel_errors
import pytest
from worlds import World, world_of

import headloss as hl

SECONDS = 10.0


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as made:
        yield made


def test_all_ranks_refuse(world: World) -> None:
    for name, (_, _, match) in parallel_errors.CASES.items():
        for kind, message in world.run(parallel_errors.refuse, name, seconds=SECONDS):
            assert kind and re.search(match, message), (name, match, message)


def test_all_ranks_refuse_a_plan(world: World) -> None:
    for name, (over, _, match) in parallel_errors.CASES.items():
        if over == "segments":
            for kind, message in world.run(parallel_errors.refuse, name, hl.plan, seconds=SECONDS):
                assert kind and re.search(match, message), (name, match, message)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_errors_cross_a_grid(world: World) -> None:
    found = world.run(parallel_errors.crossed, seconds=SECONDS)
    assert all("targets: differs" in message for _, message in found), found


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_grid_goes_by_what_it_knows(world: World) -> None:
    """Both groups' records are read behind the first product; what is wrong anywhere is raised
    everywhere, and the groups stay usable."""
    for found in world.run(parallel_errors.grid_known, seconds=SECONDS):
        for match, message in zip(parallel_errors.GRID_ERRORS, found, strict=True):
            assert match in message, (match, message)
    for first, second in world.run(parallel_errors.grid_read_late, seconds=SECONDS):
        assert first[0] == "read" and first.count("read") == 2, first
        assert second[0] == "product" and second.count("read") == 2, second


@pytest.mark.parametrize("world", [2], indirect=True)
def test_the_host_does_not_wait_for_what_it_knows(world: World) -> None:
    world.run(parallel_errors.resized, seconds=SECONDS)
    world.run(parallel_errors.nested, seconds=SECONDS)
    for seen in world.run(parallel_errors.read_late, seconds=SECONDS):
        assert [names[:2] for names in seen] == [["read", "product"], ["product", "read"], ["read"]]
        assert all(names.count("read") == 1 for names in seen)
    for kind, message in world.run(parallel_errors.nothing_to_send, seconds=SECONDS):
        assert kind == "ValueError" and "softcap, temperature: differs" in message
    found = world.run(parallel_errors.long_error, seconds=SECONDS)
    assert found == ["long " * 1000 + "end" + more for more in (" (on rank 1 of a group)", "")]
    for kind, message, notes in world.run(parallel_errors.bad_target, seconds=SECONDS):
        assert (kind, notes) == ("ValueError", []) and "targets: got 20 at position 2" in message
    for kind, message, notes in world.run(parallel_errors.own_mistake, seconds=SECONDS):
        assert (kind, notes) == ("ValueError", []) and "values of fields: differs" in message
