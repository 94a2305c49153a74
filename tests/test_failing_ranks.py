"""If a rank raises or is killed in the middle of a call, the surviving rank ends with an
explanation."""

from __future__ import annotations

from collections.abc import Iterator

import failing_ranks
import pytest
from failing_ranks import SECONDS, Met
from worlds import World, world_of

LATE = 5.0  # seconds allowed beyond the collectives' timeout, since the test machine may be busy


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as made:
        yield made


def says_what_happened(met: Met, seconds: float) -> None:
    assert met.kind == "RankError", met
    assert "rank 0 waited in vain for the other ranks of its group (global ranks [0, 1])" in (
        met.message
    )
    assert "one was killed, raised, or made another call" in met.message
    assert "the group cannot be used any more" in met.message
    assert met.seconds < seconds + LATE, met


@pytest.mark.parametrize("over", ["vocabulary", "spread", "segments"])
def test_a_term_that_raises_on_one_rank(world: World, over: str) -> None:
    (first, again), (raised, gone_on) = world.run(failing_ranks.fails, over, "raises")
    says_what_happened(first, SECONDS)
    # A user's exception in a term gets a note on what it means for the other ranks.
    assert (raised.kind, raised.message) == ("KeyError", '"a bug of the user\'s"')
    (note,) = raised.notes
    assert "the others wait for this one" in note and "cannot be used any more" in note
    assert raised.seconds < 1
    # After a rank's error was caught, further calls on the same process group raise on both ranks.
    assert again.kind == gone_on.kind == "RankError", (again, gone_on)
    assert max(again.seconds, gone_on.seconds) < SECONDS + LATE


def test_a_rank_that_never_comes_to_its_backward(world: World) -> None:
    (met,), _ = world.run(failing_ranks.fails_before_backward)
    says_what_happened(met, SECONDS)


@pytest.mark.parametrize("over", ["vocabulary", "segments"])
def test_a_rank_that_is_killed(over: str) -> None:
    with world_of(2) as world:
        for pipe in world.pipes:
            pipe.send((failing_ranks.fails, (over, "killed")))
        assert world.pipes[0].poll(60)
        failed, found = world.pipes[0].recv()
        assert not failed, found
        says_what_happened(found[0], SECONDS)
        world.processes[1].join(10)
        assert world.processes[1].exitcode == -9
