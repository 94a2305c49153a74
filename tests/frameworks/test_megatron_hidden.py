"""Megatron-Core models whose output layer returns hidden states agree with logits, on two gloo
ranks.

The tests bound the relative difference of the losses, and the largest relative difference of any
parameter's gradient.
"""

from __future__ import annotations

import importlib.util

import pytest
from worlds import World, world_of

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed here", allow_module_level=True)

import megatron_hidden_ranks as ranks
from megatron_heads_ranks import bridge
from megatron_ranks import check


@pytest.fixture(scope="module")
def world():
    with world_of(2) as made:
        yield made


MUP = {"use_mup": True, "mup_base_hidden_size": 8}


@pytest.mark.parametrize(
    ("kind", "size", "spread", "tied", "more"),
    [
        ("gpt", 1, False, True, {}),
        ("gpt", 2, True, False, {}),
        ("gpt", 2, False, True, MUP),
        ("hybrid", 1, False, False, {}),
        ("hybrid", 2, True, True, {}),
        ("hybrid", 2, False, False, MUP),
    ],
)
def test_losses(world: World, kind: str, size: int, spread: bool, tied: bool, more) -> None:
    """Losses and gradients of a model whose output layer returns hidden states agree with the
    model's own from logits."""
    check(world, ranks.losses, kind, size, spread, tied, more)


def test_statistics(world: World) -> None:
    """Log-probs and entropies at one temperature per token agree with those of Megatron's
    logits."""
    check(world, ranks.statistics, 1, False, False)
    check(world, ranks.statistics, 2, True, False)
    check(world, ranks.statistics, 2, False, True, near=1e-2)  # Megatron rounds logits to bfloat16


@pytest.mark.skipif(bridge() is None, reason="megatron-bridge is not installed")
@pytest.mark.parametrize("kind", ["lora", "softcap"])
def test_layers(world: World, kind: str) -> None:
    """An output layer with Megatron-Bridge's LoRA or soft cap gives equal losses and gradients from
    hidden states and from logits."""
    check(world, ranks.layers, kind)


def test_depths(world: World) -> None:
    """A model with multi-token prediction gives equal losses and gradients from hidden states and
    from logits."""
    check(world, ranks.depths)


def test_refusals(world: World) -> None:
    """Unsupported models and calls raise an error with the name of the unsupported part; inference
    returns logits."""
    found = world.run(ranks.refusals, seconds=300)[0]
    assert "mtp_num_layers: is not supported here, only by megatron_mtp.install()" in found["mtp"]
    assert found["twice"].startswith("ValueError: model: got a forward on the instance of its Col")
    assert found["logits"].startswith("ValueError: hidden: got shape (2, 8, 32), want (2, 8, 16)")
    assert found["inference"] == "(2, 8, 64)"
    assert "hooks of output_layer: is not supported" in found["hooks"]
