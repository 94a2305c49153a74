"""A head that is called outside of DDP's or FSDP2's forward gives correct gradients, an error, or
the wrong gradients that the docs describe."""

from __future__ import annotations

import outside_ranks
from worlds import world_of


def test_two_ranks_whose_data_differ() -> None:
    with world_of(2) as world:
        world.run(outside_ranks.outside)
