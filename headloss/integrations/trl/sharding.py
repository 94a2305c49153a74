"""Models whose weights FSDP2 shards: their head, and generation with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...head.head import Head


def whole(head: Head, model: nn.Module, dtype: torch.dtype) -> Head:
    """A head that FSDP2 shards by itself, or tensor parallelism, is of DTensors: gather them.

    Each rank of a data-parallel group then has a gradient of its own, to be averaged; under tensor
    parallelism all have the same, which is their average. What FSDP2 shards gets the `dtype` that
    it computes in, as it would where FSDP2 gathers it itself.
    """

    def gathered(tensor: Any) -> Any:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        from torch.distributed.tensor import Partial

        found = tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)
        return found.to(dtype) if found.dtype != dtype and is_fsdp2(model) else found

    lora = tuple(replace(x, a=gathered(x.a), b=gathered(x.b)) for x in head.lora)
    return replace(head, weight=gathered(head.weight), bias=gathered(head.bias), lora=lora)


def is_fsdp2(model: nn.Module) -> bool:
    """Whether FSDP2 shards a part of it: its root may be PEFT's model, around this one."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextlib.contextmanager
def in_step(model: Any) -> Iterator[None]:
    """`generate` makes as many forwards on each rank as on the others, if FSDP2 shards the model.

    transformers takes care of that only where it has sharded the model itself, and not where
    accelerate has: the first rank whose completions have ended would leave the others waiting.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    mark = "_is_fsdp_managed_module"
    if not is_fsdp2(base) or hasattr(base, mark):
        yield
        return
    setattr(base, mark, True)
    try:
        yield
    finally:
        delattr(base, mark)
