"""Ranks compare their inputs, and only inputs that must be equal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from parallel_compared import CHANGED_INPUTS, captured, compared
from worlds import World, world_of

SECONDS = 300.0


@pytest.fixture(scope="module", params=[2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as made:
        yield made


@pytest.mark.parametrize("name", CHANGED_INPUTS)
def test_all_ranks_say_what_differs(world: World, name: str) -> None:
    """Every rank raises an error about an input that differs on one rank, unless it may differ."""
    if "head_stats" in name and world.size > 2:
        pytest.skip("the first call of head_stats imports torch's compiler on every rank: slow")
    _, _, match = CHANGED_INPUTS[name]
    for message in world.run(compared, name, seconds=SECONDS):
        assert (match in message) if match else not message, message


def test_a_capture_without_a_warm_up_says_so(world: World) -> None:
    """Capturing a CUDA graph without an earlier equal call raises an error on every rank."""
    for message in world.run(captured, seconds=SECONDS):
        assert message.startswith("vocab_group: a CUDA graph is being captured"), message
