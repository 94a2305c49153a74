"""slime's and miles's log-probs and entropies agree from logits and hidden states, on two gloo
ranks.

The frameworks' functions come from their sources and run on Megatron-Core's model.
"""

from __future__ import annotations

import importlib.util

import pytest
from parity import SOURCES
from worlds import World, world_of

if importlib.util.find_spec("megatron") is None or not (SOURCES / "slime").is_dir():
    pytest.skip("megatron-core or slime is not here", allow_module_level=True)

import slime_ranks as ranks

import headloss.integrations.slime as adapter


@pytest.fixture(scope="module")
def world():
    with world_of(2) as made:
        yield made


@pytest.mark.parametrize(
    ("package", "size", "spread", "layout", "replay", "entropy"),
    [
        ("slime", 2, False, "packed", False, 0.01),
        ("slime", 2, True, "packed", True, 0.01),
        ("slime", 1, False, "zigzag", True, 0.0),
        ("slime", 1, False, "contiguous", False, 0.01),
        ("miles", 2, True, "packed", False, 0.0),
        ("miles", 1, False, "zigzag", False, 0.01),
        ("miles", 1, False, "contiguous", False, 0.0),
    ],
)
def test_log_probs(
    world: World, package: str, size: int, spread: bool, layout: str, replay: bool, entropy: float
) -> None:
    """Log-probs and their gradients agree with slime's and miles's from logits, for packed and
    context-parallel layouts."""
    args = package, size, spread, layout, replay, entropy
    for found in world.run(ranks.log_probs, *args, seconds=300):
        assert found["values"] < 1e-6, found
        # miles calls Megatron's fused cross-entropy, which rounds gradients to bfloat16.
        assert found["gradient"] < (1e-6 if package == "slime" else 4e-3), found


@pytest.mark.parametrize("estimator", ["sft", "gspo", "grpo"])
@pytest.mark.parametrize(("size", "layout"), [(2, "packed"), (1, "zigzag"), (1, "contiguous")])
def test_losses(world: World, size: int, layout: str, estimator: str) -> None:
    """Losses and metrics agree with slime's under tensor or context parallelism, also if a rank
    holds no response token of some sample."""
    for found in world.run(ranks.losses, size, layout, estimator, seconds=300):
        assert max(found.values()) < 1e-6, found


def test_refusals() -> None:
    """A custom loss, and `install()` without slime or miles, raise an error with a reason."""
    with pytest.raises(ValueError, match="custom_loss: is not supported here, only by logits"):
        adapter.init(ranks.Namespace(loss_type="custom_loss"))
    with pytest.raises(RuntimeError, match="neither it nor miles is imported in this process"):
        adapter.install()
