"""How much of a batch a term or modifier needs at once, and what it returns."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

Scope = Literal["token", "segment", "batch", "external"]
Per = Literal["token", "segment"]
SCOPES: tuple[Scope, ...] = ("token", "segment", "batch")  # of terms
TRACING = ContextVar("tracing", default=False)  # no collective runs for the sake of a trace


def wider(a: Scope, b: Scope) -> Scope:
    """The larger of two scopes."""
    order: tuple[Scope, ...] = (*SCOPES, "external")
    return order[max(order.index(a), order.index(b))]
