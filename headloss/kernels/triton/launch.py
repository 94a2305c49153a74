"""Launches of Triton kernels over a one-dimensional grid of programs.

Triton recompiles a kernel when an integer argument becomes 1 or a multiple of 16, or when a
tensor's address becomes a multiple of 16 bytes. So that no number of tokens recompiles a kernel,
kernels list arguments that vary with the number of tokens in `do_not_specialize`, and vectors of
tokens begin at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


def cdiv(n: int, step: int) -> int:
    """Return n / step, rounded up. (`triton.cdiv` can also be called in a kernel, but costs ten
    microseconds in Python.)"""
    return -(-n // step)


class TileShape(NamedTuple):
    """Blocks in which a kernel reads or writes a matrix [n, v] through the tensor memory
    accelerator."""

    block: tuple[int, int]
    layout: tuple[object, ...] = ()  # Layout in shared memory, for Gluon.
    kind: Any = TensorDescriptor  # Class of tensor descriptors, of Triton or of Gluon.

    def descriptor(self, tensor: Tensor) -> object:
        return self.kind.from_tensor(tensor, list(self.block), *self.layout)


class Launcher:
    """A kernel with fixed launch options (num_warps, .., constexprs).

    launcher(programs, *arguments, **constants) is kernel[(programs,)](*arguments, **constants) on
    the device of the first tensor and that device's current stream. Arguments are tensors, numbers
    and named tuples (see `records`); the first argument is a tensor, or a named tuple that begins
    with a tensor.

    Args:
        tiles: block shapes by argument name; the tensors with these names are passed to the kernel
            as tensor descriptors.
    """

    def __init__(self, kernel: Any, *, tiles: dict[str, TileShape] | None = None, **options: Any):
        self.kernel = kernel
        self.options = options
        # Compiler option: fuse a multiplication and an addition into one instruction.
        if isinstance(kernel, JITFunction):
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
