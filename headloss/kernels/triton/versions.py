"""Functions that tell Triton releases, GPUs and Triton's interpreter apart."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl


class Constant(tl.constexpr):
    """Global constant of kernels. At each launch, Triton compares all globals of the kernel with
    their values at compile time. The comparison of a `tl.constexpr` makes a new object; the
    comparison of a `Constant` makes none."""

    def __ne__(self, other: Any) -> bool:
        return self.value != other.value  # type: ignore[no-any-return]


# True in Triton's interpreter, which runs on a CPU for the tests.
INTERPRETED = Constant(bool(triton.knobs.runtime.interpret))
# True if kernels may contain PTX: AMD's compiler ignores instructions that it does not know.
PTX = Constant(not INTERPRETED.value and torch.version.hip is None)
# Triton releases with which gluon.py compiles. Gluon changes with each Triton release, so that
# Gluon kernels run only with known releases.
GLUON = ("3.6", "3.7", "3.8", "3.9")


def version() -> str:
    """Return Triton's version as "major.minor"."""
    return ".".join(triton.__version__.split(".")[:2])


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return True if the kernels of gluon.py run on this device."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return capability(device) == (9, 0) and version() in GLUON


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; (0, 0) under ROCm, where the numbers stand
    for AMD GPUs."""
    return (0, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)
