"""Logits of an output that are computed when somebody reads them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.utils.generic import ModelOutput

from ...head.head import Head
from ...private import refuse_to_be_written

# What is asked of a tensor that needs no values.
OF_NO_VALUES = {
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "size",
    "dim",
    "numel",
    "nelement",
    "stride",
    "element_size",
    "itemsize",
    "nbytes",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "get_device",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "grad",
    "register_hook",
    "__len__",
    "__hash__",
}


class LazyLogits(Tensor):
    """[B, L, V] logits of hidden states, which are computed with the first operation on them.

    Operations see a plain tensor in its place, through which gradients flow to the hidden states
    and the head. An autograd function that is given it by itself would lose them: then the
    backward pass raises RuntimeError.

    Attributes:
        plainly: whether an output that is gone through hands on the computed logits.
    """

    head: Head
    hidden: Tensor
    plainly: bool
    computed: Tensor | None

    @staticmethod
    def __new__(cls, head: Head, hidden: Tensor, plainly: bool = False) -> LazyLogits:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        of_head = (head.weight, head.bias, *(x for lora in head.lora for x in (lora.a, lora.b)))
        attached = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (hidden, *of_head)
        )
        logits: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (*hidden.shape[:-1], head.vocabulary),
            dtype=wide,
            device=hidden.device,
            requires_grad=attached,
        )
        refuse_to_be_written(logits)
        logits.head, logits.hidden, logits.computed = head, hidden, None
        logits.plainly = plainly and attached
        if attached:
            logits.register_hook(_lost)
        return logits

    def make(self) -> Tensor:
        """The logits, with a gradient where one is recorded both now and when the model ran."""
        attached = self.requires_grad and torch.is_grad_enabled()
        if self.computed is None or (attached and not self.computed.requires_grad):
            with torch.set_grad_enabled(attached):
                self.computed = self.head.logits(self.hidden)
        return self.computed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "__get__":  # of an attribute
            name = getattr(func.__self__, "__name__", "")
        if name in OF_NO_VALUES:
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.clone:  # which DDP does to outputs when it looks for unused parameters
            return cls(args[0].head, args[0].hidden, args[0].plainly)
        args, kwargs = tree_map(_made, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_made, (args, kwargs or {}))
        return func(*args, **kwargs)


def _lost(gradient: Tensor | None) -> None:
    if gradient is not None:
        raise RuntimeError(
            "logits: an autograd function was given them as they lie in the output; give it "
            "output.logits, whose gradient reaches the model"
        )


def _made(value: Any) -> Any:
    return value.make() if isinstance(value, LazyLogits) else value


def _listed(value: Any) -> Any:
    return value.make() if isinstance(value, LazyLogits) and value.plainly else value


def with_logits(output: ModelOutput, logits: Tensor | None) -> ModelOutput:
    """`output` with these logits, or without any, in place of its own.

    `output.logits` computes `LazyLogits`. All else hands them on as they are: `output["logits"]`,
    `get`, slices, and whoever goes through the output, as wrappers do in each step and `Trainer`
    in evaluation; there they are computed when something is done with them.
    """
    kind = type(output)
    if not isinstance(logits, LazyLogits):
        return kind(**{**dict(output.items()), "logits": logits})
    changed = _lazily(kind)(**dict(output.items()))  # some releases read all fields in here
    changed["logits"] = logits
    return changed


@functools.cache
def _lazily(kind: Any) -> Any:
    class Lazily(kind):
        @property
        def logits(self) -> Tensor | None:
            """[B, L, V] in float32 (float64 of float64 hidden states)."""
            return _made(vars(self).get("logits"))

        @logits.setter
        def logits(self, value: Tensor | None) -> None:
            self.__dict__["logits"] = value

        def items(self) -> Any:
            return {name: _listed(value) for name, value in super().items()}.items()

        def values(self) -> Any:
            return dict(self.items()).values()

        def to_tuple(self) -> tuple[Any, ...]:
            return tuple(self.values())

        def get(self, key: str, default: Any = None) -> Any:
            return dict(self.items()).get(key, default)

        def __getitem__(self, key: Any) -> Any:
            if not isinstance(key, str):
                return self.to_tuple()[key]
            return _listed(dict(super().items())[key])

        def __reduce__(self) -> Any:
            return _plain, (kind, {name: _made(value) for name, value in super().items()})

    Lazily.__name__ = Lazily.__qualname__ = kind.__name__
    return Lazily


def _plain(kind: Any, fields: dict[str, Any]) -> Any:
    return kind(**fields)
