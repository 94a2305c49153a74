"""On two gloo ranks, verl with headloss agrees with verl without headloss, under FSDP2, Ulysses
sequence parallelism and Megatron's vocabulary parallelism."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from worlds import World, world_of

pytest.importorskip("verl", reason="`make test-frameworks` compares with verl")
import verl_ranks as ranks
from verl_case import saved


@pytest.fixture(scope="module")
def world():
    with world_of(2) as made:
        yield made


def check(world: World, function, *args, near: float = 2e-5) -> None:
    for found in world.run(function, *args, seconds=400):
        assert max(found.values()) < near, found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "headloss_vanilla", "headloss_gspo"])
def test_data_parallel(world: World, tmp_path: Path, mode: str, tied: bool) -> None:
    """verl's engine under FSDP2 data parallelism agrees with and without headloss."""
    check(world, ranks.engine, saved(tmp_path, tied=tied), mode, False, tied)


@pytest.mark.parametrize("mode", ["vanilla", "headloss_vanilla", "headloss_gspo"])
def test_sequence_parallel(world: World, tmp_path: Path, mode: str) -> None:
    """Under Ulysses sequence parallelism each rank has half of the packed tokens, and results agree
    with one rank."""
    check(world, ranks.engine, saved(tmp_path), mode, True, False)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("spread", [False, True])
def test_teacher(world: World, tmp_path: Path, spread: bool, alone: bool) -> None:
    """Distillation from a teacher's top k agrees with verl, under data parallelism and under
    Ulysses sequence parallelism."""
    check(world, ranks.teacher, saved(tmp_path), spread, alone)


@pytest.mark.parametrize(("spread", "ceiling"), [(False, 2.0), (True, None)])
def test_whole_vocabulary(
    world: World, tmp_path: Path, spread: bool, ceiling: float | None
) -> None:
    """Full-vocabulary distillation from a teacher's hidden states agrees with verl's top-k loss
    whose k is the vocabulary size, in padded and packed batches."""
    check(world, ranks.whole, saved(tmp_path), spread, ceiling)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="wants megatron-core")
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_megatron(world: World, layout: str) -> None:
    """verl's Megatron path agrees in packed and padded layouts, with temperatures per sample and a
    teacher's top k."""
    check(world, ranks.megatron, False, True, layout, near=2e-6)
    check(world, ranks.megatron, True, False, layout, True, near=2e-6)
    check(world, ranks.megatron, False, False, layout, True, -4.0, near=2e-6)
