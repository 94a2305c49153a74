"""After `apply(model)`, a model sharded by FSDP2 or ZeRO-3 trains as it does unsharded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import applied_ranks
import torch
from worlds import World, script_on, world_of

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=TWO_GPUS)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(2, backend=request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize("units", ["root", "alone", "group"])
def test_fsdp2(world: World, units: str, adapters: bool) -> None:
    if adapters:
        pytest.importorskip("peft")
    world.run(applied_ranks.trains, units, adapters)


@pytest.mark.parametrize("units", ["root", "alone", "group"])
def test_fsdp2_under_compile(world: World, units: str) -> None:
    world.run(applied_ranks.trains, units, False, True, seconds=100)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install '.[zero3]'",
)
def test_zero3() -> None:
    """After `apply(model)` under DeepSpeed's ZeRO-3, training runs without logits."""
    script = Path(__file__).parent / "helpers" / "applied_zero3.py"
    on_cpus = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    printed = script_on(2, str(script), seconds=300, **on_cpus)
    for adapters in (False, True):
        assert printed.count(f"adapters {adapters}: well on rank") == 2
