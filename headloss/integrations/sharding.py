"""Models whose weights are sharded by FSDP2 or ZeRO-3: reading their head, and generating
tokens."""

from __future__ import annotations

import contextlib
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..head.head import Head

T = TypeVar("T")
# A lock for each module whose forward is replaced: if the blocks of two threads overlapped, the
# second block would restore the first block's replacement.
LOCKS = weakref.WeakKeyDictionary[nn.Module, Any]()


def whole(head: Head, model: nn.Module, dtype: torch.dtype) -> Head:
    """Return a head with the DTensors of FSDP2 or tensor parallelism gathered.

    Under data parallelism each rank has its own gradient, and the ranks' gradients are averaged.
    Under tensor parallelism all ranks have equal gradients, and averaging does not change the
    gradient. A weight sharded by FSDP2 is cast to `dtype`, the dtype that FSDP2 computes in.
    """

    tensors = (head.weight, head.bias, *(t for x in head.lora for t in (x.a, x.b)))
    if not any(hasattr(tensor, "full_tensor") for tensor in tensors):
        return head

    def computed(tensor: Any) -> Any:
        found = gathered(tensor)
        cast = found is not tensor and found.dtype != dtype and is_fsdp2(model)
        return found.to(dtype) if cast else found

    lora = tuple(replace(x, a=computed(x.a), b=computed(x.b)) for x in head.lora)
    return replace(head, weight=computed(head.weight), bias=computed(head.bias), lora=lora)


def gathered(tensor: Any) -> Any:
    """Return a DTensor as one plain tensor, whose gradient is the ranks' average; return other
    tensors as is."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Partial

    return tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)


def unsharded(module: nn.Module, act: Callable[[Tensor], T], hidden: Tensor) -> T:
    """Return the result of the function `act` at `hidden`, with the parameters of an FSDP2 unit
    gathered, without running FSDP2's hooks."""

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
    """Set `forward` as the instance's forward while the `with` block runs; with `forward=None`,
    remove the instance's forward. Blocks of one thread nest; a block of another thread waits."""
    attributes = vars(module)  # Writing to `vars(module)` is ten times faster than `setattr`.
    with LOCKS.setdefault(module, threading.RLock()):
        before = attributes.pop("forward", None)
        if forward is not None:
            attributes["forward"] = forward
        try:
            yield
        finally:
            attributes.pop("forward", None)
            if before is not None:
                attributes["forward"] = before


def inside(module: Any, act: Callable[[Tensor], T], hidden: Tensor) -> T:
    """Return `act(hidden)`, run as a module's forward so that the module's hooks gather
    parameters."""

    def forward(hidden: Tensor) -> T:
        with in_place_of(module):  # The callable `act` may call the module's original forward.
            return act(hidden)

    with in_place_of(module, forward):
        return module(hidden)


def hooked(exact: Tensor, passed: Tensor, zeros: bool = True) -> Tensor:
    """Return a tensor with the values of `exact`, tied by autograd to the tensor `passed`, so that
    a wrapper's backward hooks on `passed` run.

    The tensor `passed` is a rounded copy of `exact` made by a wrapper such as FSDP2. In the
    backward pass the gradient with respect to `passed` is zeros, or None with `zeros=False`.
    """
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
    """Register a module's parameters with ZeRO-3, and return whether ZeRO-3 shards the module.

    ZeRO-3 gathers the parameters of submodules around the submodules' own forwards.
    """
    parts = _zero3(module)
    for part in parts:
        _deepspeed().register_external_parameter(module, part)
    return bool(parts)


def whole_head(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a head sharded by ZeRO-3 has gathered weights; all ranks must enter
    the context."""
    parts = _zero3(getattr(model, "get_output_embeddings", lambda: None)())
    return _deepspeed().GatheredParameters(parts) if parts else contextlib.nullcontext()


def _deepspeed() -> Any:
    # deepspeed is an extra, which a type checker may lack.
    return importlib.import_module("deepspeed").zero


def _zero3(module: Any) -> list[nn.Parameter]:
    """Return the parameters that DeepSpeed's ZeRO-3 has sharded."""
    return [] if module is None else [p for p in module.parameters() if hasattr(p, "ds_id")]


def is_unit(module: Any) -> bool:
    """Return whether FSDP2 shards the module as a unit of its own."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def is_fsdp2(model: nn.Module) -> bool:
    """Return whether FSDP2 shards any module of the model; under PEFT, FSDP2's root module may be
    the model that contains the given model."""
    return any(is_unit(module) for module in model.modules())


@contextlib.contextmanager
def in_step(model: Any) -> Iterator[None]:
    """Let `generate` run equally many forwards on all ranks, if FSDP2 shards the model.

    transformers synchronises `generate` only for models sharded by transformers, not by accelerate.
    Without this context manager, a rank whose completions end early would leave the remaining ranks
    waiting in FSDP2's collectives.
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
