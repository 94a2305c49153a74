"""Megatron-Core's and headloss's `process_mtp_loss` agree in `GPTModel`, on two gloo ranks.

The model is split over the two ranks by tensor parallelism. The tests bound the relative
differences of the main losses, of the logged losses per prediction depth, and of the gradient that
differs most. Counts of correct predictions must be equal.
"""

from __future__ import annotations

import importlib.util

import pytest
from worlds import World, world_of

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed here", allow_module_level=True)

import megatron_heads_ranks as heads
import megatron_mtp_ranks as ranks
from megatron_ranks import check


@pytest.fixture(scope="module")
def world():
    with world_of(2) as made:
        yield made


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_depths(world: World, size: int, spread: bool, tied: bool) -> None:
    """Multi-token-prediction losses, logged values and gradients agree with Megatron's under tensor
    and sequence parallelism."""
    if size == 2 or not spread:
        check(world, ranks.depths, size, spread, tied, False, {})


MORE = {
    "per token": {"calculate_per_token_loss": True},
    "detached": {"mtp_detach_heads": True},
    "mup": {"use_mup": True, "mup_base_hidden_size": 8},
}


@pytest.mark.parametrize("more", MORE)
def test_settings(world: World, more: str) -> None:
    """Multi-token-prediction losses agree with Megatron's for losses per token, detached heads, and
    MuP."""
    check(world, ranks.depths, 2, False, False, True, MORE[more])


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_one_call(world: World, size: int, spread: bool, policy: bool) -> None:
    """One `head_loss` call for the main prediction and all further depths agrees with Megatron's
    two losses."""
    if size == 2 or not spread:
        check(world, ranks.one_call, size, spread, policy, policy and spread)


@pytest.mark.parametrize("more", MORE)
def test_two_calls(world: World, more: str) -> None:
    """A separate `head_loss` call for the further depths agrees with Megatron's two losses in cases
    that one call cannot serve."""
    check(world, ranks.two_calls, {} if more == "mup" else MORE[more], more == "mup")


@pytest.mark.parametrize("context_parallel", [False, True])
def test_packed(world: World, context_parallel: bool) -> None:
    """Packed documents agree with Megatron's losses, without a prediction across the documents'
    borders."""
    check(world, ranks.packed, context_parallel)


def test_under_verl(world: World) -> None:
    """Multi-token-prediction losses agree with Megatron's after verl has patched the model."""
    pytest.importorskip("verl")
    check(world, ranks.under_verl)


def test_without_labels(world: World) -> None:
    """Training of a model called without labels agrees with Megatron's, with labels of the depths
    from the input ids."""
    check(world, ranks.without_labels)


@pytest.mark.parametrize("processor", [False, True])
def test_main_grad(world: World, processor: bool) -> None:
    """`main_grad` of two micro-batches under Megatron's DDP agrees with gradients of Megatron's
    losses."""
    check(world, ranks.main_grad, processor)


@pytest.mark.parametrize("processor", [False, True])
def test_a_step_of_its_schedule(world: World, processor: bool) -> None:
    """A training step in Megatron's pipeline schedule, which sets the loss scale, agrees with
    Megatron's."""
    check(world, ranks.a_step, processor)


@pytest.fixture(scope="module")
def dev():
    """Yield two ranks with Megatron's dev branch in place of the installed release."""
    if not heads.DEV.is_dir():
        pytest.skip("Megatron's dev branch is not here")
    with world_of(2, heads.on_dev) as made:
        yield made


# Megatron's dev branch fails with MuP.
@pytest.mark.parametrize("more", ["none", "per token", "detached"])
def test_the_dev_branch(dev: World, more: str) -> None:
    """Multi-token-prediction losses agree with Megatron's on the dev branch of Megatron."""
    check(dev, ranks.depths, 2, more == "none", more == "none", True, MORE.get(more, {}))


@pytest.mark.parametrize("context_parallel", [False, True])
def test_packed_on_the_dev_branch(dev: World, context_parallel: bool) -> None:
    """Packed documents agree with Megatron's losses on the dev branch of Megatron."""
    check(dev, ranks.packed, context_parallel)


def test_without_labels_on_the_dev_branch(dev: World) -> None:
    """Training of a model called without labels agrees with Megatron's on the dev branch of
    Megatron."""
    check(dev, ranks.without_labels)


def test_one_call_on_the_dev_branch(dev: World) -> None:
    """One `head_loss` call for the main prediction and all further depths agrees with Megatron's
    losses on the dev branch of Megatron."""
    check(dev, ranks.one_call, 2, True, True, True)


def test_modules_that_imported_a_function_by_name_get_headlosss(world: World) -> None:
    """`install()` replaces `process_mtp_loss` in each module that imported the function, and
    `uninstall()` restores Megatron's function in these modules."""
    for found in world.run(ranks.bound, seconds=300):
        assert all(found.values()), found
