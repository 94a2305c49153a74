"""Ranks compare their inputs, and only inputs that must be equal."""

from __future__ import annotations

from collections.abc import Iterator

import parallel_compared
import pytest
from worlds import World, world_of

SECONDS = 300.0


@pytest.fixture(scope="module", params=[2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as made:
        yield made


def test_all_ranks_say_what_differs(world: World) -> None:
    for name, (_, _, match) in parallel_compared.CASES.items():
        # the first `head_stats` call imports torch's compiler, which takes long
        if "head_stats" in name and world.size > 2:
            continue
        for message in world.run(parallel_compared.compared, name, seconds=SECONDS):
            assert (match in message) if match else not message, (name, message)


def test_a_capture_without_a_warm_up_says_so(world: World) -> None:
    for message in world.run(parallel_compared.captured, seconds=SECONDS):
        assert message.startswith("vocab_group: a CUDA graph is being captured"), message
