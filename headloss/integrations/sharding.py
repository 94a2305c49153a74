"""Models whose weights FSDP2 or ZeRO-3 shards: their head, and generation with them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..head.head import Head

T = TypeVar("T")


def whole(head: Head, model: nn.Module, dtype: torch.dtype) -> Head:
    """A head that FSDP2 shards by itself, or tensor parallelism, is of DTensors: gather them.

    Each rank of a data-parallel group then has a gradient of its own, to be averaged; under tensor
    parallelism all have the same, which is their average. What FSDP2 shards gets the `dtype` that
    it computes in, as it would where FSDP2 gathers it itself.
    """

    def computed(tensor: Any) -> Any:
        found = gathered(tensor)
        cast = found is not tensor and found.dtype != dtype and is_fsdp2(model)
        return found.to(dtype) if cast else found

    lora = tuple(replace(x, a=computed(x.a), b=computed(x.b)) for x in head.lora)
    return replace(head, weight=computed(head.weight), bias=computed(head.bias), lora=lora)


def gathered(tensor: Any) -> Any:
    """A DTensor in one piece, whose gradient is the ranks' average; anything else as it is."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Partial

    return tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)


def unsharded(module: nn.Module, act: Callable[[Tensor], T], hidden: Tensor) -> T:
    """`act(hidden)` with the parameters of an FSDP2 unit gathered, and none of its hooks."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, hidden: Tensor) -> T:
            with in_place_of(module):
                return act(hidden)

    parts = {f"module.{n}": gathered(x).to(hidden.dtype) for n, x in module.named_parameters()}
    return torch.func.functional_call(Holder(), parts, (hidden,))


@contextlib.contextmanager
def in_place_of(module: Any, forward: Callable[..., Any] | None = None) -> Iterator[None]:
    """Inside, `forward` is the module's forward on the instance; None: there is none."""
    before = vars(module).pop("forward", None)
    if forward is not None:
        module.forward = forward
    try:
        yield
    finally:
        vars(module).pop("forward", None)
        if before is not None:
            module.forward = before


def inside(module: Any, act: Callable[[Tensor], T], hidden: Tensor) -> T:
    """`act(hidden)` as the forward of a module, whose hooks gather its parameters around it."""

    def forward(hidden: Tensor) -> T:
        with in_place_of(module):  # whoever reads the module finds its own
            return act(hidden)

    with in_place_of(module, forward):
        return module(hidden)


def hooked(exact: Tensor, passed: Tensor, zeros: bool = True) -> Tensor:
    """`exact`, value and gradient, tied to what a wrapper made of it, so that its hooks fire: with
    zeros, or with None."""
    if passed is exact or not exact.requires_grad:
        return exact
    return _Hooked.apply(exact, passed, zeros)  # type: ignore[return-value]


class _Hooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, passed: Tensor, zeros: bool) -> Tensor:
        ctx.like = torch.empty_like(passed, device="meta") if zeros else None
        ctx.device = passed.device
        return exact.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        zeros = None if ctx.like is None else torch.zeros_like(ctx.like, device=ctx.device)
        return grads[0], zeros, None


def externals(module: nn.Module) -> bool:
    """Tell whether ZeRO-3 shards the module; its submodules are gathered around its own forward."""
    parts = _zero3(module)
    for part in parts:
        _deepspeed().register_external_parameter(module, part)
    return bool(parts)


def whole_head(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, a head that ZeRO-3 shards can be read outside of a forward. All ranks must enter."""
    parts = _zero3(getattr(model, "get_output_embeddings", lambda: None)())
    return _deepspeed().GatheredParameters(parts) if parts else contextlib.nullcontext()


def _deepspeed() -> Any:
    return importlib.import_module("deepspeed").zero  # an extra, which type checkers may lack


def _zero3(module: Any) -> list[nn.Parameter]:
    """The parameters that DeepSpeed has taken over."""
    return [] if module is None else [p for p in module.parameters() if hasattr(p, "ds_id")]


def is_unit(module: Any) -> bool:
    """Tell whether FSDP2 shards the module by itself."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def is_fsdp2(model: nn.Module) -> bool:
    """Tell whether FSDP2 shards a part of it: its root may be PEFT's model, around this one."""
    return any(is_unit(module) for module in model.modules())


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
