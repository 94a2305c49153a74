"""What differs between Tritons, and between a GPU and the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # on a CPU, for the tests
GLUON = "3.6."  # the Triton that gluon.py is written for: Gluon changes with each


def overlaps(device: torch.device) -> bool:
    """Whether gluon.py runs here, for products without a soft cap."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return hopper and triton.__version__.startswith(GLUON)
