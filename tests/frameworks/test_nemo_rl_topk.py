"""NeMo-RL's top-k log-probs of a student, by its own function of logits and from hidden states, on
two gloo ranks of tensor or of context parallelism, packed with a padded tail.
"""

from __future__ import annotations

import importlib.util

import pytest
from parity import SOURCES
from worlds import World, world_of

if importlib.util.find_spec("megatron") is None or not (SOURCES / "nemo-rl").is_dir():
    pytest.skip("megatron-core or NeMo-RL is not here", allow_module_level=True)

import nemo_topk_ranks as ranks
from megatron_ranks import check


@pytest.fixture(scope="module")
def world():
    with world_of(2) as made:
        yield made


@pytest.mark.parametrize(
    ("tree", "size", "spread", "outside", "entropy"),
    [
        ("nemo_rl", 2, True, True, True),
        ("nemo_rl", 1, False, True, True),
        ("nemo_rl_06", 2, False, False, False),
        ("nemo_rl_07", 1, False, False, False),
    ],
)
def test_topk(
    world: World, tree: str, size: int, spread: bool, outside: bool, entropy: bool
) -> None:
    """Both of its ways, from which its loss makes forward, reverse and mixed divergences."""
    check(world, ranks.topk, tree, size, spread, outside, entropy, near=1e-6)
