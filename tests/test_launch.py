"""Kernels are launched through Triton's own `kernel[grid](...)`."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from headloss.kernels.triton import launch  # noqa: E402


class Stub:
    """A kernel that records its launch arguments."""

    arg_names = ("x", "n", "y", "BLOCK")

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((grid, args, kwargs))


def test_arguments_constants_and_options_reach_the_kernel():
    stub, x, y = Stub(), torch.zeros(64), torch.zeros(64)
    launch.Launcher(stub, num_warps=8)(9, x, 5, y, BLOCK=32)
    ((grid, (first, n, last), options),) = stub.launches
    assert grid == (9,) and first is x and n == 5 and last is y
    assert options == {"BLOCK": 32, "num_warps": 8}


def test_tiles_reach_the_kernel_as_descriptors():
    stub, y = Stub(), torch.zeros(40, 64)[:, :56]
    launcher = launch.Launcher(stub, tiles={"y": launch.TileShape((16, 32))})
    launcher(9, torch.zeros(64), 5, y, BLOCK=32)
    ((_, (_, _, described), _),) = stub.launches
    assert type(described).__name__ == "TensorDescriptor" and described.base is y
    assert (*described.shape, *described.strides) == (40, 56, 64, 1)
    assert list(described.block_shape) == [16, 32]


def test_a_launch_is_on_the_device_of_its_first_tensor(monkeypatch):
    """A kernel is launched on the device of its first tensor, also when launch arguments are
    recorded."""
    devices = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda t: devices.append(t) or torch.no_grad())
    x, record = torch.zeros(64), ((torch.zeros(3), 4), None)
    for first in (x, record):
        launch.Launcher(Stub())(1, first, 5, x, BLOCK=32)
    assert devices[0] is x and devices[1] is record[0][0]


def test_a_product_and_a_sum_are_one_instruction():
    @triton.jit
    def kernel(x):
        pass

    fused = isinstance(kernel, triton.runtime.JITFunction)  # not with the interpreter
    assert launch.Launcher(kernel).options == ({"enable_fp_fusion": True} if fused else {})
