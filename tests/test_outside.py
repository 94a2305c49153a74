"""The head outside of what DDP or FSDP2 wraps: right, refused or wrong, as the page says."""

from __future__ import annotations

import outside_ranks
from worlds import world_of


def test_two_ranks_whose_data_differ() -> None:
    with world_of(2) as world:
        world.run(outside_ranks.outside)
