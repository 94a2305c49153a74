"""Every public argument and result has a type, and `Any` is rare."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator

import pytest
from test_project import PACKAGE, SOURCES

import headloss as hl
from headloss.losses.term import Term

LINES_WITH_ANY = 120
# Folders and files of the package that do not belong to its core; `counts.py` uses the same list.
BESIDE = ("losses", "integrations", "rl", "train", "naive.py")


def hinted(value: object) -> Iterator[tuple[str, object]]:
    """Yield names and types of a function's arguments and result, or of a class's fields and public
    methods."""
    if inspect.isclass(value):
        yield from typing.get_type_hints(value).items()
        for name, method in vars(value).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                yield from hinted(method)
    elif inspect.isfunction(value):
        hints = typing.get_type_hints(value)
        for name in inspect.signature(value).parameters:
            if name not in ("self", "cls"):
                yield name, hints.get(name)
        yield "return", hints.get("return")


@pytest.mark.parametrize("name", [n for n in hl.__all__ if n not in hl.losses.__all__])
def test_public_names_have_types(name: str) -> None:
    value = getattr(hl, name)
    free = {"schedule", "args", "options", "overrides", "fields", "lengths", "tokens", "segments"}
    free |= {"lists", "ids", "counts"}  # arguments of several types, which are checked at run time
    for argument, hint in hinted(value):
        assert hint is not None, (name, argument)
        assert hint is not typing.Any or argument in free, (name, argument)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cross_entropy", "dpo", "kl"])
def test_factories_make_terms(name: str) -> None:
    assert inspect.signature(getattr(hl, name)).return_annotation in (Term, "Term")


def test_any_is_rare() -> None:
    """At most 120 lines of the core package contain `Any`, since the type checker checks nothing
    about a value of type `Any`."""
    lines = 0
    for path in SOURCES:
        if path.relative_to(PACKAGE).parts[0] not in BESIDE:
            lines += sum(bool(re.search(r"\bAny\b", line)) for line in path.open())
    assert lines <= LINES_WITH_ANY
