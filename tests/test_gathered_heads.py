"""The code that DTensor errors recommend for a sharded head gives the exact gradient, and a plain
`full_tensor` call does not."""

from __future__ import annotations

import gathered_heads
from worlds import world_of


def test_two_ranks_whose_data_differ() -> None:
    with world_of(2) as world:
        world.run(gathered_heads.right_and_wrong)
