"""An error on one rank is raised on all ranks within a time limit, and each call sends one message
to compare arguments between ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import grid_errors
import parallel_agreement
import pytest
from parallel_errors import INVALID_CALLS, INVALID_SEGMENTS, assert_refused
from worlds import World, world_of

import headloss as hl

SECONDS = 10.0


@pytest.fixture(scope="module", params=[2, 3, 4])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as made:
        yield made


@pytest.mark.parametrize("name", INVALID_CALLS)
def test_all_ranks_refuse(world: World, name: str) -> None:
    """A call that is invalid on one rank raises on every rank, and a valid call then works."""
    assert_refused(world, name, seconds=SECONDS)


@pytest.mark.parametrize("name", INVALID_SEGMENTS)
def test_all_ranks_refuse_a_plan(world: World, name: str) -> None:
    """`hl.plan` raises on every rank for segments or gradients that are invalid on one rank."""
    assert_refused(world, name, hl.plan, seconds=SECONDS)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_errors_cross_a_grid(world: World) -> None:
    found = world.run(parallel_agreement.crossed, seconds=SECONDS)
    assert all("targets: differs" in message for _, message in found), found


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_grid_makes_two_records(world: World) -> None:
    """A call on 2 x 2 ranks compares arguments once in each of its two process groups; after an
    error on all ranks the groups stay usable."""
    for found in world.run(grid_errors.on_a_grid, seconds=SECONDS):
        for match, message in zip(grid_errors.GRID_ERRORS, found, strict=True):
            assert match in message, (match, message)
    for seen in world.run(grid_errors.records_on_a_grid, seconds=SECONDS):
        assert seen[:3] == ["record", "record", "product"] and seen.count("record") == 2


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_a_call_makes_one_record(world: World) -> None:
    """Ranks compare their arguments once in each call; they compare tensor values only in the
    first call on a process group and with the option `check_ranks`."""
    for found in world.run(parallel_agreement.one_record, seconds=SECONDS):
        more = [["record", "product", n] for n in ("2", "1", "2")]
        assert found == [*more, ["record", "product", "1"]], found


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_values_are_compared_at_first_and_when_asked(world: World) -> None:
    for found in world.run(parallel_agreement.values_are_compared_when_asked, seconds=SECONDS):
        assert [message.partition(" between")[0] for message in found] == [
            "targets: differs",
            *("", ""),
            *("", "targets: differs"),
        ]


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_bad_values_of_one_rank_are_raised_on_all(world: World) -> None:
    for found in world.run(parallel_agreement.bad_values_of_one, seconds=SECONDS):
        negative = "targets: got -5 at position 2, want -100 or 0 <= target < inf"
        wants = "targets: got (id )?1000000", negative, "candidate_ids: got"
        assert all(map(re.match, wants, found)), found


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_wrong_values_of_one_rank_are_raised_on_all(world: World) -> None:
    for found in world.run(parallel_agreement.wrong_values_of_one, seconds=SECONDS):
        for match, message in zip(parallel_agreement.WRONG_VALUES, found, strict=True):
            assert re.match(match, message), found


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_a_term_that_raises_on_one_rank_raises_on_all(world: World) -> None:
    found = world.run(parallel_agreement.raises_while_traced, seconds=SECONDS)
    assert found[-1] == "KeyError: 'missing'", found
    last = f"RuntimeError: 'missing' (on rank {world.size - 1} of vocab_group)"
    assert found[:-1] == [last] * (world.size - 1), found


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_groups_may_be_made_again_and_play_both_roles(world: World) -> None:
    world.run(parallel_agreement.same_ranks_again, seconds=SECONDS)
    world.run(parallel_agreement.without_tokens, seconds=SECONDS)
    world.run(parallel_agreement.resized, seconds=SECONDS)
    world.run(parallel_agreement.nested, seconds=SECONDS)


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_static_calls_go_by_what_was_learned(world: World) -> None:
    for found in world.run(parallel_agreement.static_goes_by_what_was_learned, seconds=SECONDS):
        assert [len(records) for records in found] == [2, 0, 0, 1, 0], found


@pytest.mark.parametrize("world", [2], indirect=True)
def test_an_error_of_a_static_call_stays_on_its_rank(world: World) -> None:
    found = world.run(parallel_agreement.static_error_of_one, seconds=SECONDS)
    assert found == ["", "batch: got NoneType, want headloss.Batch"]


@pytest.mark.parametrize("world", [2], indirect=True)
def test_ranks_compare_by_name(world: World) -> None:
    first, second = world.run(parallel_agreement.compared_in_any_order, seconds=SECONDS)
    assert first[0].startswith("values: cannot be compared between the ranks of a group")
    assert "sparse" in second[0].lower() and first[1].startswith("one between"), second


@pytest.mark.parametrize("world", [2], indirect=True)
def test_errors_are_whole(world: World) -> None:
    for kind, message in world.run(parallel_agreement.nothing_to_send, seconds=SECONDS):
        assert kind == "ValueError" and "softcap, temperature: differs" in message
    found = world.run(parallel_agreement.long_error, seconds=SECONDS)
    assert found == ["long " * 1000 + "end" + more for more in (" (on rank 1 of a group)", "")]
