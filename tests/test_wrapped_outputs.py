"""Wrappers such as DDP search the outputs of a forward for tensors; a forward that returns
`Output` or `HeadStats` trains under a wrapper as it does without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import wrapped_outputs
from worlds import World, world_of

KINDS = ["fsdp", "fsdp, nodes", "fsdp, units, nodes", "fsdp, checkpoint, nodes"]
KINDS += ["ddp, unused", "ddp, static", "ddp, checkpoint"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as ranks:
        yield ranks


@pytest.mark.parametrize("returns", wrapped_outputs.RETURNS)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_move_as_without_a_wrapper(world: World, kind: str, returns: str) -> None:
    world.run(wrapped_outputs.trains, kind, returns)
