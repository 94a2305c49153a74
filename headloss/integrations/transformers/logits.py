"""Logits of an output that are computed when somebody asks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.utils.generic import ModelOutput

from ...head.head import Head


class LazyLogits(Tensor):
    """[B, L, V] logits of hidden states, which are computed with the first operation on them."""

    make: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, head: Head, hidden: Tensor) -> LazyLogits:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        place = {"dtype": wide, "device": hidden.device}
        shape = (*hidden.shape[:-1], head.vocabulary)
        found: Any = Tensor._make_wrapper_subclass(cls, shape, **place)  # type: ignore[attr-defined]
        torch._C._set_throw_on_mutable_data_ptr(found)  # where C would read address 0
        attached = torch.is_grad_enabled()

        @functools.cache
        def make() -> Tensor:
            with torch.set_grad_enabled(attached and torch.is_grad_enabled()):
                return head.logits(hidden)

        found.make = make
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_made, (args, kwargs or {}))
        return func(*args, **kwargs)


def _of_made(name: str) -> Any:
    """A method that reads memory past the operations."""
    return lambda self, *args, **kwargs: getattr(self.make(), name)(*args, **kwargs)


for _name in (
    "numpy", "tolist", "data_ptr", "untyped_storage", "share_memory_", "__dlpack__",
    "__dlpack_device__", "__deepcopy__", "__reduce_ex__",
):  # fmt: skip
    setattr(LazyLogits, _name, _of_made(_name))


def _made(value: Any) -> Any:
    return value.make() if isinstance(value, LazyLogits) else value


def with_logits(output: ModelOutput, logits: Tensor | None, training: bool) -> ModelOutput:
    """`output` with logits that are computed when they are asked for by name. In evaluation whoever
    goes through all there is finds them too, as `Trainer` does; without gradients they are computed
    when something is done with them, as it does for `compute_metrics` alone."""
    rest: dict[str, Any] = {k: v for k, v in output.items() if k != "logits"}
    if logits is None:
        return type(output)(**rest)
    made = _lazily(type(output))(**rest)
    vars(made).update(_logits=logits, _all=not training)
    return made


@functools.cache
def _lazily(kind: Any) -> Any:
    class Lazily(kind):
        @property
        def logits(self) -> Tensor | None:
            """[B, L, V] in float32 (float64 of float64 hidden states)."""
            self._fill()
            return _made(vars(self).get("logits"))

        @logits.setter
        def logits(self, value: Tensor | None) -> None:
            self.__dict__["logits"] = value

        def _fill(self, later: bool = False) -> None:
            logits = self.__dict__.pop("_logits", None)
            if logits is not None:
                self["logits"] = logits if later else _made(logits)
                for name in self.__dataclass_fields__:  # in the order of the model's own
                    if name in self:
                        self.move_to_end(name)

        def items(self) -> Any:
            if vars(self).get("_all"):
                self._fill(later=not torch.is_grad_enabled())
            return super().items()

        def to_tuple(self) -> tuple[Any, ...]:
            return tuple(value for _, value in self.items())

        def __getitem__(self, key: Any) -> Any:
            if key == "logits":
                return self.logits
            if not isinstance(key, str):
                return self.to_tuple()[key]
            return dict(super().items())[key]

        def __reduce__(self) -> Any:
            return _plain, (kind, {name: _made(value) for name, value in super().items()})

    Lazily.__name__ = Lazily.__qualname__ = kind.__name__
    return Lazily


def _plain(kind: Any, found: dict[str, Any]) -> Any:
    return kind(**found)
