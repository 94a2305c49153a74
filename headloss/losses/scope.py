"""Scopes of terms and modifiers: "token", "segment" or "batch" is the smallest part of a batch that
a term's function needs at once."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

Scope = Literal["token", "segment", "batch", "external"]
Per = Literal["token", "segment"]
# The smallest part of a batch on which a term can be computed.
SCOPES: tuple[Scope, ...] = ("token", "segment", "batch")
# `TRACING` is True during a trial run of a term. A trial run finds the inputs that the term reads,
# or checks that splitting the batch leaves the term's values unchanged.
TRACING = ContextVar("tracing", default=False)


def wider(a: Scope, b: Scope) -> Scope:
    """Return the larger of two scopes (token < segment < batch)."""
    order: tuple[Scope, ...] = (*SCOPES, "external")
    return order[max(order.index(a), order.index(b))]
