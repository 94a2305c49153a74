"""Ranks compare the tensors among a term's options whole: their values, and not their text."""

from __future__ import annotations

from collections.abc import Iterator

import parallel_options
import pytest
from worlds import World, world_of


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as made:
        yield made


@pytest.mark.parametrize("form", ["plain", "nested"])
@pytest.mark.parametrize("over", ["vocabulary", "segments"])
def test_tensors_among_options(world: World, over: str, form: str) -> None:
    for spoil, fact in {
        "middle": "options: differs between the ranks",
        "shape": "objective: differs between the ranks",
        "dtype": "objective: differs between the ranks",
    }.items():
        for kind, message in world.run(parallel_options.run, over, form, spoil):
            assert kind == "ValueError"
            assert fact in message
    for kind, value in world.run(parallel_options.run, over, form, ""):
        assert kind == "loss", value
