"""What the library's own terms share: name and options by their signature, and checks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from numbers import Real
from typing import ParamSpec

from .origin import Origin
from .term import Term

P = ParamSpec("P")
PLAIN = (int, float, str, bool, type(None))


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of a term or modifier before the message of an error about its options."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None


def factory(function: Callable[P, Term]) -> Callable[P, Term]:
    """The term that `function` makes takes its name and options from the signature; errors name it.

    `function` may leave the name empty. The same plain options give the same term, so that what is
    found out about it once (see `objective.reads`) holds for a loop that makes it anew each step.
    """
    signature = inspect.signature(function)
    name = function.__name__

    def build(*args: P.args, **kwargs: P.kwargs) -> Term:
        bound = signature.bind(*args, **kwargs)  # a TypeError that names a wrong option
        bound.apply_defaults()
        with naming(name):
            made = function(*args, **kwargs)
        options = tuple(bound.arguments.items())
        origin = Origin((make, options), made.function, made.observe)
        return replace(made, name=name, options=options, origin=origin)

    remembered = functools.lru_cache(maxsize=64, typed=True)(build)

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> Term:
        plain = all(type(option) in PLAIN for option in (*args, *kwargs.values()))
        return (remembered if plain else build)(*args, **kwargs)

    return make


def number(want: str, accept: Callable[[float], bool], **options: object) -> None:
    """Each option must be a finite number that `accept`s.

    >>> number("> 0", lambda x: x > 0, beta=-1)
    Traceback (most recent call last):
    ValueError: beta: got -1, want > 0
    """
    for option, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{option}: got {value!r}, want a number {want}")
        if not (math.isfinite(value) and accept(float(value))):
            raise ValueError(f"{option}: got {value!r}, want {want}")


def non_negative(**options: object) -> None:
    """Each option must be a number >= 0."""
    number(">= 0", lambda x: x >= 0, **options)


def positive(**options: object) -> None:
    """Each option must be a number > 0."""
    number("> 0", lambda x: x > 0, **options)


def one_of(choices: tuple[str, ...], **options: object) -> None:
    """Each option must be one of the names in `choices`."""
    for option, value in options.items():
        if value not in choices:
            names = ", ".join(map(repr, choices))
            raise ValueError(f"{option}: got {value!r}, want one of {names}")
