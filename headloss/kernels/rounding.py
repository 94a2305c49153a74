"""Rounding error of sums of products that the tensor cores of a GPU compute."""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=64)
def accumulator_bias(device: torch.device, h: int) -> float:
    """Return the relative amount by which a GPU's sum of h products of 16-bit numbers is too small.

    A tensor core's accumulator rounds toward zero. On a Hopper GPU, a logit that is a sum of h
    products comes out too small by a fraction of 0.8e-9 h to 1.1e-9 h (measured with h = 512 to
    8192 and logits up to 60, of random and of trained heads; see benchmarks/NOTES.md). For a device
    that is not a Hopper GPU, `accumulator_bias` returns 0, because the rounding of no other GPU was
    measured.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return 0.0
    return 1e-9 * h if torch.cuda.get_device_capability(device)[0] == 9 else 0.0
