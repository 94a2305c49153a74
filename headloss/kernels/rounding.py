"""What the hardware's own rounding does to a sum of products."""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=64)
def accumulator_bias(device: torch.device, h: int) -> float:
    """Share of its size by which a sum of h products of 16-bit numbers is too small.

    A tensor core's accumulator rounds toward zero. On Hopper that takes 0.8e-9 to 1.1e-9 of a
    logit's size for each product, at h = 512 to 8192 and logits up to 60, of random and of trained
    heads (benchmarks/NOTES.md). 0 where it was not measured."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0.0
    return 1e-9 * h if torch.cuda.get_device_capability(device)[0] == 9 else 0.0
