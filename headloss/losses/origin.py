"""Which terms may be written down once, and what makes two of them compute the same."""

from __future__ import annotations

from typing import Any

from .term import Term


def key_of(term: Term) -> tuple[Any, ...] | None:
    """What decides all that a term computes; None where that cannot be said."""
    made, over = term.origin, term.reduction
    if made is None or made.function is not term.function or made.observe is not term.observe:
        return None
    modifiers = tuple(modifier.key for modifier in term.modifiers)
    if over is None or over.key is None or None in modifiers:
        return None
    return term.name, made.key, over.key, modifiers, term.weight_fields, term.kept_field
