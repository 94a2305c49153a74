"""A head outside DDP's or FSDP2's forward is correct, refused or wrong as documented."""

from __future__ import annotations

import outside_ranks
from worlds import world_of


def test_two_ranks_whose_data_differ() -> None:
    with world_of(2) as world:
        world.run(outside_ranks.outside)
