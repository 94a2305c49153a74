"""Decorator that gives a term factory's result its name and options from the signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec

from .arguments import check_names, naming, with_floats
from .term import Term

P = ParamSpec("P")


def factory(function: Callable[P, Term]) -> Callable[P, Term]:
    """Wrap a term factory: set the term's name and options from the signature, and name the term in
    errors.

    `function` may return a term with an empty name, because the term's name is set to the name of
    `function`.
    """
    signature = inspect.signature(function)
    name = function.__name__
    defaults = {p.name: p.default for p in signature.parameters.values()}

    @functools.wraps(function)
    @with_floats
    def make(*args: P.args, **kwargs: P.kwargs) -> Term:
        with naming(name):
            check_names(signature.parameters.values(), args, kwargs)
            made = function(*args, **kwargs)
        options = ((option, kwargs.get(option, default)) for option, default in defaults.items())
        # Ranks compare the options of their terms. Leave the option `teacher_head` out of the
        # options that ranks compare: if the teacher's head is sharded, each rank's `teacher_head`
        # holds different weight rows.
        plain = tuple(option for option in options if option[0] != "teacher_head")
        return replace(made, name=name, options=plain)

    return make
