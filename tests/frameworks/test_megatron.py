"""Megatron-Core's `GPTModel` agrees with and without headloss's output processor, on two gloo
ranks.

The ranks are tensor parallel. The tests bound the relative difference of the losses, and the
largest relative difference of any parameter's gradient.
"""

from __future__ import annotations

import importlib.util

import pytest
from worlds import World, world_of

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed here", allow_module_level=True)

import megatron_ranks as ranks
from megatron_ranks import check


@pytest.fixture(scope="module")
def world():
    with world_of(2) as made:
        yield made


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_token_losses(world: World, size: int, spread: bool, tied: bool) -> None:
    """Token losses and gradients agree with Megatron's under tensor and sequence parallelism."""
    if size == 2 or not spread:
        check(world, ranks.token_losses, size, spread, tied, {})


def test_mup(world: World) -> None:
    """Token losses and gradients agree with Megatron's under MuP, which scales the logits."""
    check(world, ranks.token_losses, 2, False, False, {"use_mup": True, "mup_base_hidden_size": 8})


@pytest.mark.parametrize("size", [1, 2])
def test_statistics(world: World, size: int) -> None:
    """Log-probs and entropies at a temperature agree with those of Megatron's gathered logits."""
    check(world, ranks.statistics, size)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_main_grad(world: World, tied: bool, overlap: bool) -> None:
    """`main_grad` of two micro-batches under Megatron's DDP agrees with gradients of Megatron's
    loss."""
    check(world, ranks.main_grad, tied, overlap)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_packed_objective(world: World, spread: bool, masked: bool) -> None:
    """GSPO on packed sequences agrees with GSPO computed from Megatron's token losses."""
    check(world, ranks.packed, spread, masked)


@pytest.mark.parametrize("spread", [False, True])
def test_a_step_of_its_schedule(world: World, spread: bool) -> None:
    """A training step in Megatron's pipeline schedule gives the same loss within bfloat16
    precision, since Megatron rounds logits to bfloat16."""
    check(world, ranks.a_step, spread, near=1e-2)


def test_refusals(world: World) -> None:
    """Unsupported calls, settings and layers raise an error with the name of the unsupported
    part."""
    found = world.run(ranks.refusals, seconds=300)[0]
    assert found["labels"].startswith("ValueError: labels: got None")
    assert "defer_embedding_wgrad_compute: is not supported here" in found["defer"]
    assert "output_processor_context['segments']: is missing" in found["context"]
    assert "hooks of output_layer: is not supported" in found["hooks"]
    assert "Megatron-FSDP: is not supported" in found["fsdp"]
    assert "output_layer: got Linear without tp_group, sequence_parallel" in found["layer"]
