"""Scopes of terms and modifiers: the smallest part of a batch that a call needs at once."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

Scope = Literal["token", "segment", "batch", "external"]
Per = Literal["token", "segment"]
SCOPES: tuple[Scope, ...] = ("token", "segment", "batch")  # Scopes that a term may have.
TRACING = ContextVar("tracing", default=False)  # True while a term is traced: no collective runs.


def wider(a: Scope, b: Scope) -> Scope:
    """The larger of two scopes."""
    order: tuple[Scope, ...] = (*SCOPES, "external")
    return order[max(order.index(a), order.index(b))]
