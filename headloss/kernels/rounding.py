"""Rounding of sums of products by GPU hardware."""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=64)
def accumulator_bias(device: torch.device, h: int) -> float:
    """Return the relative amount by which a sum of h products of 16-bit numbers is too small.

    A tensor core's accumulator rounds toward zero. On Hopper each product costs a logit 0.8e-9 to
    1.1e-9 of its size, at h = 512 to 8192 and logits up to 60, of random and of trained heads
    (benchmarks/NOTES.md). The result is 0 for a device without measurements.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return 0.0
    return 1e-9 * h if torch.cuda.get_device_capability(device)[0] == 9 else 0.0
