"""Megatron-Core's and headloss's `process_mtp_loss` agree in `GPTModel`, on two gloo ranks.

The model is split over the two ranks by tensor parallelism. Compared are relative differences of
the main losses, of the logged depth losses, and of the gradient that differs most; counts of
correct predictions must be equal.
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
    if size == 2 or not spread:
        check(world, ranks.depths, size, spread, tied, False, {})


MORE = {
    "per token": {"calculate_per_token_loss": True},
    "detached": {"mtp_detach_heads": True},
    "mup": {"use_mup": True, "mup_base_hidden_size": 8},
}


@pytest.mark.parametrize("more", MORE)
def test_settings(world: World, more: str) -> None:
    check(world, ranks.depths, 2, False, False, True, MORE[more])


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_one_call(world: World, size: int, spread: bool, policy: bool) -> None:
    if size == 2 or not spread:
        check(world, ranks.one_call, size, spread, policy, policy and spread)


@pytest.mark.parametrize("more", MORE)
def test_two_calls(world: World, more: str) -> None:
    check(world, ranks.two_calls, {} if more == "mup" else MORE[more], more == "mup")


@pytest.mark.parametrize("context_parallel", [False, True])
def test_packed(world: World, context_parallel: bool) -> None:
    check(world, ranks.packed, context_parallel)


def test_under_verl(world: World) -> None:
    pytest.importorskip("verl")
    check(world, ranks.under_verl)


def test_without_labels(world: World) -> None:
    check(world, ranks.without_labels)


@pytest.mark.parametrize("processor", [False, True])
def test_main_grad(world: World, processor: bool) -> None:
    check(world, ranks.main_grad, processor)


@pytest.mark.parametrize("processor", [False, True])
def test_a_step_of_its_schedule(world: World, processor: bool) -> None:
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
    check(dev, ranks.depths, 2, more == "none", more == "none", True, MORE.get(more, {}))


@pytest.mark.parametrize("context_parallel", [False, True])
def test_packed_on_the_dev_branch(dev: World, context_parallel: bool) -> None:
    check(dev, ranks.packed, context_parallel)


def test_without_labels_on_the_dev_branch(dev: World) -> None:
    check(dev, ranks.without_labels)


def test_one_call_on_the_dev_branch(dev: World) -> None:
    check(dev, ranks.one_call, 2, True, True, True)


def test_modules_that_imported_a_function_by_name_get_headlosss(world: World) -> None:
    for found in world.run(ranks.bound, seconds=300):
        assert all(found.values()), found
