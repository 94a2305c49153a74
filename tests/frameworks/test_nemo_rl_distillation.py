"""NeMo-RL's distillation losses agree from logits and from hidden states, on two gloo ranks.

The ranks are tensor or context parallel, with packed rows and a padded tail.
"""

from __future__ import annotations

import importlib.util

import pytest
from parity import SOURCES, file_of
from worlds import World, world_of

if importlib.util.find_spec("megatron") is None or not (SOURCES / "nemo-rl").is_dir():
    pytest.skip("megatron-core or NeMo-RL is not here", allow_module_level=True)

import nemo_distillation_ranks as ranks
from megatron_ranks import check


@pytest.fixture(scope="module")
def world():
    with world_of(2) as made:
        yield made


@pytest.mark.parametrize(
    ("tree", "size", "spread"),
    [
        ("nemo_rl", 2, True),
        ("nemo_rl", 1, False),
        ("nemo_rl_06", 2, False),
        ("nemo_rl_07", 1, False),
    ],
)
def test_topk(world: World, tree: str, size: int, spread: bool) -> None:
    """NeMo-RL's forward, reverse and mixed top-k losses agree in metrics and gradients, with and
    without `zero_outside_topk`."""
    check(world, ranks.topk, tree, size, spread, near=2e-6)


@pytest.mark.parametrize(
    ("size", "spread", "level", "payload", "penalty"),
    [
        (2, True, "TOKEN_LEVEL", "hidden_states", 0.1),
        (1, False, "SEQUENCE_LEVEL", "hidden_states", 0.1),
        (2, False, "SEQUENCE_LEVEL", "logits", 0.0),
    ],
)
def test_full(
    world: World, size: int, spread: bool, level: str, payload: str, penalty: float
) -> None:
    """Full-vocabulary on-policy distillation agrees with NeMo-RL's `opd_full` in all metrics and
    gradients."""
    file_of(ranks.OPD, "nemo_rl/algorithms/loss/loss_input.py")  # skips without sources
    check(world, ranks.full, size, spread, level, payload, penalty, near=2e-6)
