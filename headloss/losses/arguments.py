"""Checks of the options of terms and modifiers."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from ..arguments import brief, check_number, did_you_mean, plain_number

P = ParamSpec("P")
T = TypeVar("T")


def with_floats(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap `function` so that numeric options of any type arrive as plain Python numbers."""

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        named = {name: plain_number(value) for name, value in kwargs.items()}
        return function(*map(plain_number, args), **named)  # type: ignore[arg-type]

    return made


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix the message of an error about options with the name of the term or modifier."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None


def check_names(
    taken: Collection[inspect.Parameter], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Raise TypeError for positional options and for option names that the term does not accept."""
    names = [p.name for p in taken if p.kind is not inspect.Parameter.VAR_KEYWORD]
    if args:
        want = f"want them by name: {', '.join(names)}" if names else "want none"
        raise TypeError(f"got {len(args)} options by position, {want}")
    for name in options if len(names) == len(taken) else ():
        if name not in names:
            want = did_you_mean(name, names) if names else "want none"
            raise TypeError(f"got an unexpected option {name!r}, {want}")


def call_text(name: str, options: Iterable[tuple[str, Any]]) -> str:
    """Return a call as source code, for example `gspo(epsilon_low=0.1)`."""
    return f"{name}({', '.join(f'{option}={brief(value)}' for option, value in options)})"


def number(want: str, accept: Callable[[float], bool], **options: object) -> None:
    """Check that each option is a finite number for which `accept` is True.

    >>> number("> 0", lambda x: x > 0, beta=-1)
    Traceback (most recent call last):
    ValueError: beta: got -1, want > 0
    """
    for option, value in options.items():
        kind = want if want.startswith("a ") else f"a number {want}"
        check_number(option, value, kind, want, accept)


def non_negative(**options: object) -> None:
    """Check that each option is a number >= 0."""
    number(">= 0", lambda x: x >= 0, **options)


def positive(**options: object) -> None:
    """Check that each option is a number > 0."""
    number("> 0", lambda x: x > 0, **options)


def bounds(
    want: str, accept: Callable[[float], bool], minimum: float | None, maximum: float | None
) -> tuple[float, float]:
    """Return the bounds after a check that `min` <= `max`, and that each bound is None (no bound)
    or a number for which `accept` is True."""
    limits = {"min": minimum, "max": maximum}
    number(want, accept, **{name: x for name, x in limits.items() if x is not None})
    if minimum is not None and maximum is not None and minimum > maximum:
        raise ValueError(f"min: got {minimum!r}, want <= max, {maximum!r}")
    return -math.inf if minimum is None else minimum, math.inf if maximum is None else maximum


def one_of(choices: tuple[str, ...], **options: object) -> None:
    """Check that each option is one of the names in `choices`."""
    for option, value in options.items():
        if not (isinstance(value, str) and value in choices):
            names = ", ".join(map(repr, choices))
            raise ValueError(f"{option}: got {value!r}, want one of {names}")


def flags(**options: object) -> None:
    """Check that each option is True or False."""
    for option, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{option}: got {value!r}, want True or False")


def counts(**options: object) -> None:
    """Check that each option is an integer >= 1."""
    for option, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{option}: got {value!r}, want an integer >= 1")
