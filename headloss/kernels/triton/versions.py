"""What differs between Tritons, between GPUs, and between a GPU and the interpreter."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # on a CPU, for the tests
# Whether instructions may be written out: AMD's compiler takes what it does not know for nothing.
PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)
# The Tritons for which gluon.py was compiled. Gluon changes with each: an unknown one is not used.
GLUON = ("3.6", "3.7", "3.8", "3.9")


def version() -> str:
    """Triton's, to two numbers."""
    return ".".join(triton.__version__.split(".")[:2])


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether gluon.py runs here."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return capability(device) == (9, 0) and version() in GLUON


def capability(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA GPU. ROCm counts its own generations with the same numbers: there (0, 0)."""
    return (0, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)
