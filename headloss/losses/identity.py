"""Tools for the function of a term: pickle by name, comparison by content, and a list of the
attributes that the function reads."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor


class Given(functools.partial):
    """A decorated function with its options, pickled by the name of its factory.

    Pickle stores a function by its module and name, but in the module the name of a decorated
    function refers to the factory that the decorator returned.
    """

    def __reduce__(self):
        factory = getattr(sys.modules.get(self.func.__module__), self.func.__qualname__, None)
        if factory is None or inspect.unwrap(factory) is not self.func:  # another name
            return super().__reduce__()
        return _given, (factory, self.keywords)


def _given(factory: Callable[..., Any], options: dict[str, Any]) -> Given:
    return Given(inspect.unwrap(factory), **options)


class Recorder:
    """Proxy for a `Statistics` or `PackedBatch` object that adds the name of every attribute read
    to the set `seen`."""

    def __init__(self, target: Any, seen: set[str]) -> None:
        self._target, self._seen = target, seen

    def __getattr__(self, name: str) -> Any:
        self._seen.add(name)
        return getattr(self._target, name)

    def __len__(self) -> int:
        return len(self._target)

    def __contains__(self, name: str) -> bool:
        return name in self._target

    def get(self, name: str, default: Any = None) -> Any:
        self._seen.add(name)
        return self._target.get(name, default)


def alike(a: Any, b: Any) -> bool:
    """Return whether two terms, or parts of terms, have equal functions, options and tensors."""
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    same = fingerprint(a, ours) == fingerprint(b, theirs)
    return same and all(x is y or torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def fingerprint(value: Any, tensors: list[Tensor]) -> Any:
    """Return a key of `value` (a term, or one of its functions or arguments), for comparisons.
    `fingerprint` returns equal keys for values that differ only in the contents of their tensors.

    Every tensor found in `value` is appended to the list `tensors`. The key that `fingerprint`
    returns keeps no tensor, function or process group of `value` alive.
    """
    if value is None or isinstance(value, (int, float, str)):
        return type(value), value
    if isinstance(value, FunctionType):
        return weakref.ref(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dtype, value.device, value.shape
    if isinstance(value, functools.partial):
        parts: Any = (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        parts = (value.__func__, value.__self__)
    elif isinstance(value, (tuple, list)):
        parts = value
    elif isinstance(value, dict):
        names = sorted(value, key=str)
        parts = (*names, *map(value.get, names))
    elif is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).values()
    else:
        with contextlib.suppress(TypeError):
            return weakref.ref(value)
        return type(value), value
    return type(value), tuple([fingerprint(part, tensors) for part in parts])


def leaves_of(values: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors that require a gradient and that `values` was computed from."""
    stack, seen = [values.grad_fn], set()
    if values.requires_grad and values.grad_fn is None:
        yield values
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # only AccumulateGrad nodes (of leaf tensors) have the attribute `variable`
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        stack += [parent for parent, _ in node.next_functions]
