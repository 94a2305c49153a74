"""What stands behind a term: its function by name, its content, and what it reads and came from."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor


class Given(functools.partial):
    """A decorated function with its options. Pickle finds a function by its name, which belongs to
    the factory that the decorator has made of it: so the factory travels in its place."""

    def __reduce__(self):
        factory = getattr(sys.modules.get(self.func.__module__), self.func.__qualname__, None)
        if factory is None or inspect.unwrap(factory) is not self.func:  # it has another name
            return super().__reduce__()
        return _given, (factory, self.keywords)


def _given(factory: Callable[..., Any], options: dict[str, Any]) -> Given:
    return Given(inspect.unwrap(factory), **options)


class Recorder:
    """Stands before statistics or a batch and notes which attributes are read."""

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
    """Whether two parts of a term say the same: functions with their options, records, tensors."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, functools.partial):
        return alike((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and alike(a.__self__, b.__self__)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if is_dataclass(a):
        return all(alike(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def leaves_of(values: Tensor) -> Iterator[Tensor]:
    """The leaf tensors that a value was computed from, where they require a gradient."""
    stack, seen = [values.grad_fn], set()
    if values.requires_grad and values.grad_fn is None:
        yield values
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of a node that accumulates into a leaf
        if leaf is not None:
            yield leaf
        stack += [parent for parent, _ in node.next_functions]
