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


def as_head(model: nn.Module, act: Callable[[Tensor], T], hidden: Tensor) -> T:
    """`act(hidden)`, in place of the forward of the model's head where ZeRO-3 shards it.

    DeepSpeed's hooks on that module then gather its parameters here and in the backward pass, and
    send its gradient on its way. PEFT holds adapters in modules of their own, which are not called.
    """
    module: Any = model.get_output_embeddings()  # type: ignore[operator]
    return inside(module, act, hidden) if externals(module) else act(hidden)


def inside(module: Any, act: Callable[[Tensor], T], hidden: Tensor) -> T:
    """`act(hidden)` as the forward of a module, whose hooks gather its parameters around it."""

    def forward(hidden: Tensor) -> T:
        del module.forward  # whoever reads the module finds its own
        return act(hidden)

    with bare(module):
        module.forward = forward
        try:
            return module(hidden)
        finally:
            vars(module).pop("forward", None)


@contextlib.contextmanager
def bare(module: Any) -> Iterator[None]:
    """Inside, the module has no forward on the instance."""
    before = vars(module).pop("forward", None)
    try:
        yield
    finally:
        if before is not None:
            module.forward = before


@contextlib.contextmanager
def in_place_of_head(model: Any, act: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, `act` is the forward of the model's head, once: where its weights are gathered."""
    module = model.get_output_embeddings()
    before = vars(module).get("forward")

    def forward(hidden: Tensor) -> Tensor:
        restore()  # whoever reads the module finds its own
        return act(hidden)

    def restore() -> None:
        vars(module).pop("forward", None)
        if before is not None:
            module.forward = before

    module.forward = forward
    try:
        yield
    finally:
        restore()


def hooked(exact: Tensor, passed: Tensor) -> Tensor:
    """`exact`, value and gradient, tied to what a wrapper made of it, so that its hooks fire."""
    return exact if passed is exact else _Hooked.apply(exact, passed)  # type: ignore[return-value]


class _Hooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, passed: Tensor) -> Tensor:
        ctx.like = torch.empty_like(passed, device="meta")
        ctx.device = passed.device
        return exact.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros_like(ctx.like, device=ctx.device)


class Carried(torch.autograd.Function):
    """Logits of no columns [.., 0] that hang on a loss: what a module may return whose forward
    computed it, so that the module's hooks gather its parameters before the loss's backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, hidden: Tensor) -> Tensor:
        ctx.like = {"dtype": loss.dtype, "device": loss.device}
        return hidden.new_empty((*hidden.shape[:-1], 0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.zeros((), **ctx.like), None


def externals(module: nn.Module) -> bool:
    """Whether ZeRO-3 shards the module; what is below it is gathered around its own forward."""
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
    """Whether FSDP2 shards the module by itself."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def is_fsdp2(model: nn.Module) -> bool:
    """Whether FSDP2 shards a part of it: its root may be PEFT's model, around this one."""
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
