"""Building blocks of the changes that make a random call invalid; `fuzz_bad` lists the changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Spoil:
    """A modification that makes a call invalid: `apply` changes the call, and `says` is a regex for
    the error text."""

    apply: Callable[[Any], None]
    says: str
    verbs: tuple[str, ...] = ("head_loss",)
    needs: Callable[[Any], bool] = lambda call: True

    def fits(self, call: Any) -> bool:
        return call.verb in self.verbs and self.needs(call)


class Spoils(dict[str, Spoil]):
    """Invalid changes by name."""

    def add(self, name: str, says: str, apply: Callable[[Any], None], **scope: Any) -> None:
        self[name] = Spoil(apply=apply, says=says, **scope)


def put(where: str, key: str, value: Any) -> Callable[[Any], None]:
    """Return a function that sets entry `key` of the call's dict `where` to a value, which may be
    computed from the call."""

    def apply(call: Any) -> None:
        getattr(call, where)[key] = value(call) if callable(value) else value

    return apply


def attribute(name: str, value: Any) -> Callable[[Any], None]:
    """Return a function that sets attribute `name` of the call to a value, which may be computed
    from the call."""
    return lambda call: setattr(call, name, value(call) if callable(value) else value)


def one_term(term: dict[str, Any]) -> Callable[[Any], None]:
    """Return a function that replaces all terms of a call by a single term."""
    defaults = {"options": {}, "modifiers": [], "over": None, "weighted": False, "where": False}

    def apply(call: Any) -> None:
        call.terms, call.teacher = [(1.0, {**defaults, **term})], None

    return apply


def targets(call: Any) -> Any:
    return call.batch["targets"]


def positions(call: Any) -> int:
    return targets(call).numel()


def changed(tensor: Any, value: Any) -> Any:
    """Return a copy of a tensor with one changed element."""
    tensor = tensor.clone()
    tensor.view(-1)[tensor.numel() // 2] = value
    return tensor
