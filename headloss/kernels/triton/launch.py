"""Launching kernels: by Triton's own `kernel[grid](...)`, over one row of programs.

Triton compiles a kernel anew where a number becomes 1 or a multiple of 16, or a vector's address
one of 16 bytes. Kernels therefore name what varies with the number of tokens in
`do_not_specialize`, and vectors of tokens begin at whole 16 bytes: no number of tokens compiles a
kernel again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


def cdiv(n: int, step: int) -> int:
    """n / step, rounded up. (Triton's own also runs in kernels, and takes ten microseconds.)"""
    return -(-n // step)


class TileShape(NamedTuple):
    """How a kernel cuts a matrix [n, v] that it reads or writes through the tensor memory
    accelerator."""

    block: tuple[int, int]
    layout: object = None  # in shared memory, for Gluon

    def descriptor(self, tensor: Tensor) -> object:
        """What Triton takes."""
        if self.layout is None:
            return TensorDescriptor.from_tensor(tensor, list(self.block))
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as OfGluon

        return OfGluon.from_tensor(tensor, list(self.block), self.layout)


class Launcher:
    """A kernel under fixed options (num_warps, .., constexprs).

    launcher(programs, *arguments, **constants) is kernel[(programs,)](*arguments, **constants) on
    the device of the first tensor and that device's current stream. Arguments are tensors, numbers
    and records (`records`); the first one is a tensor, or begins with one.

    Args:
        tiles: which arguments are given as tensors and reach the kernel as descriptors.
    """

    def __init__(self, kernel: Any, *, tiles: dict[str, TileShape] | None = None, **options: Any):
        self.kernel = kernel
        self.options = options
        if isinstance(kernel, JITFunction):  # a multiplication and an addition are one instruction
            options["enable_fp_fusion"] = True
        names = tiles or {}
        self.tiles = {i: names[name] for i, name in enumerate(kernel.arg_names) if name in names}

    def __call__(self, programs: int, *arguments: object, **constants: object) -> None:
        first = arguments[0]
        while isinstance(first, tuple):
            first = first[0]
        tiles = self.tiles
        described = [tiles[i].descriptor(a) if i in tiles else a for i, a in enumerate(arguments)]
        with torch.cuda.device_of(first):
            self.send(programs, described, constants)

    def send(self, programs: int, arguments: list[object], constants: dict[str, object]) -> None:
        self.kernel[(programs,)](*arguments, **constants, **self.options)
