"""Megatron's output layers with LoRA, soft cap or Transformer Engine agree with and without
headloss.

Megatron-Bridge's classes run in Megatron-Core's model on two tensor-parallel gloo ranks.
Transformer Engine needs a GPU, so a stub layer with the same attributes replaces its output layer.
"""

from __future__ import annotations

import importlib.util

import pytest
from worlds import World, world_of

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed here", allow_module_level=True)

import megatron_heads_ranks as ranks
from megatron_ranks import check

of_bridge = pytest.mark.skipif(ranks.bridge() is None, reason="megatron-bridge is not installed")


@pytest.fixture(scope="module")
def world():
    with world_of(2) as made:
        yield made


@pytest.mark.skipif(not ranks.DEV.is_dir(), reason="Megatron's dev branch is not here")
def test_the_dev_branch() -> None:
    """Token losses agree on Megatron's dev branch, whose output layer computes the loss."""
    with world_of(2, ranks.on_dev) as world:
        for size, spread, tied in ((1, False, False), (2, True, True), (2, False, False)):
            check(world, ranks.of_dev, size, spread, tied)


@pytest.mark.parametrize("spread", [False, True])
def test_a_layer_of_another_class(world: World, spread: bool) -> None:
    """An output layer of a class other than `ColumnParallelLinear` is supported only if its logits
    are the product of hidden states and weight."""
    for found in world.run(ranks.of_another_class, spread, seconds=300):
        assert found["alike"] < 2e-6
        off = "output_layer: got Fork, whose logits are off the product of hidden states and weight"
        assert found["scaled"].startswith(f"{off} by 0.1, want ColumnParallelLinear")
        assert found["capped"].startswith(off)
        assert "output_layer: Fork without labels raises AttributeError" in found["none"]


@of_bridge
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_lora(world: World, size: int, spread: bool, frozen: bool) -> None:
    """An output layer with Megatron-Bridge's LoRA gives equal losses and gradients with and without
    headloss."""
    if size == 2 or not spread:
        check(world, ranks.lora, size, spread, frozen)


@of_bridge
def test_the_merged_weight_loses_a_gradient(world: World) -> None:
    assert world.run(ranks.the_merged_weight_loses_a_gradient, seconds=300) == [True, True]


@of_bridge
def test_lora_under_multi_token_prediction(world: World) -> None:
    """An output layer with LoRA gives equal losses and gradients with and without headloss in a
    model with multi-token prediction."""
    check(world, ranks.lora_and_depths)


@of_bridge
@pytest.mark.parametrize("kind", ranks.CAPS)
@pytest.mark.parametrize("tied", [False, True])
def test_softcap(world: World, tied: bool, kind: tuple[str, str]) -> None:
    """An output layer with Megatron-Bridge's soft cap gives equal losses and gradients with and
    without headloss."""
    check(world, ranks.softcap, tied, kind)


@pytest.mark.parametrize("main_grad", [False, True])
def test_the_layer_of_transformer_engine(world: World, main_grad: bool) -> None:
    """A layer with Transformer Engine's attributes gives the same loss and gradients as Megatron's
    output layer with equal weight."""
    check(world, ranks.mxfp8_layer, main_grad)


def test_refusals(world: World) -> None:
    """FP8 parameters and unsupported adapters of an output layer raise an error with the name of
    the unsupported part."""
    found = world.run(ranks.refusals, seconds=300)[0]
    assert found.pop("fp8") == (
        "ValueError: FP8 parameters of output_layer: is not supported here, only by Megatron "
        "without output_processor"
    )
    if ranks.bridge() is not None:
        assert found.pop("adapter").startswith("TypeError: output_layer.adapter: got Identity")
        wants = {
            "post": "dropout_position='post'",
            "activation": "an activation in LoRA",
            "mup": "a soft cap with MuP",
        }
        for name, want in wants.items():
            assert f"{want}: is not supported here" in found.pop(name)
    assert not found
