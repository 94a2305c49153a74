"""Arguments of a valid call on six tokens, for tests of errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import headloss as hl

T, H, V = 6, 4, 9


def hidden() -> Tensor:
    return torch.randn(T, H, requires_grad=True)


def head(**given: Any) -> hl.Head:
    return hl.Head(torch.randn(V, H, requires_grad=True), **given)


def batch(**fields: Any) -> hl.Batch:
    return hl.Batch(torch.arange(T), **fields)


def term(function: Callable, **given: Any) -> hl.Term:
    return hl.term(function, name="mine", **given)()
