"""A head that is called outside of the forward of DDP or FSDP2 gives correct gradients, raises an
error, or gives wrong gradients in the cases that the docs describe."""

from __future__ import annotations

import outside_ranks
from worlds import world_of


def test_two_ranks_whose_data_differ() -> None:
    with world_of(2) as world:
        world.run(outside_ranks.outside)
