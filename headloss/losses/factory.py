"""What the library's own terms share: name and options by their signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec

from .arguments import check_names, naming, with_floats
from .term import Term

P = ParamSpec("P")
PLAIN = (int, float, str, bool, type(None))


def factory(function: Callable[P, Term]) -> Callable[P, Term]:
    """The term that `function` makes takes its name and options from the signature; errors name it.

    `function` may leave the name empty. The same plain options give the same term, so that what is
    found out about it once (see `objective.reads`) holds for a loop that makes it anew each step.
    """
    signature = inspect.signature(function)
    name = function.__name__

    @with_floats
    def build(*args: P.args, **kwargs: P.kwargs) -> Term:
        with naming(name):
            check_names(signature.parameters.values(), args, kwargs)
            bound = signature.bind(*args, **kwargs)  # a TypeError that names a missing option
            made = function(*args, **kwargs)
        bound.apply_defaults()
        return replace(made, name=name, options=tuple(bound.arguments.items()))

    remembered = functools.lru_cache(maxsize=64, typed=True)(build)

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> Term:
        given = (*args, *kwargs.values())
        plain = not given or all(type(option) in PLAIN for option in given)
        return (remembered if plain else build)(*args, **kwargs)

    return make
