"""Adapters check the signatures of the framework functions that they replace, not release numbers.

Stubs with real signatures stand for the frameworks; tests of framework code are in
tests/frameworks.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from typing import Any

import pytest
from framework_stubs import (
    CASES,
    here,
    new_argument,
    no_notice_yet,  # noqa: F401
    place,
    released,
    renamed_argument,
    stubbed,
)

from headloss.integrations import seams
from headloss.integrations.seams import Seams, check_signature, fitted

# ---------------------------------------------------------------------- releases


@pytest.mark.parametrize("release", ["99.0", "0.0.1"])
@pytest.mark.parametrize("adapter", CASES)
def test_an_unknown_release_works_and_is_announced_once(adapter, release, monkeypatch) -> None:
    package, tested = CASES[adapter][:2]
    released(monkeypatch, release, package)
    module, standing = stubbed(monkeypatch, adapter)
    with pytest.warns(UserWarning, match=rf"{package} {release} was not tested.*{tested}.*holds"):
        module.install()
    placed = {inspect.unwrap(getattr(x, "apply", x)) for x in here(standing).values()}
    assert placed == {getattr(x, "apply", x) for x in module.SEAMS.ours.values()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.install()  # a second install changes nothing
        module.uninstall()
        assert here(standing) == standing
        module.install()
    module.uninstall()


@pytest.mark.parametrize("adapter", CASES)
def test_a_tested_release_is_not_announced(adapter, monkeypatch) -> None:
    package, tested = CASES[adapter][:2]
    released(monkeypatch, tested, package)
    module, standing = stubbed(monkeypatch, adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.install()
    module.uninstall()
    assert here(standing) == standing


# ---------------------------------------------------------------------- changed framework functions


@pytest.mark.parametrize("how", ["no function", "no module", "an argument's name", "one more"])
@pytest.mark.parametrize("adapter", CASES)
def test_a_broken_seam(adapter, how, monkeypatch) -> None:
    """If a framework function has changed, the error names the function, the release and a remedy,
    and nothing is replaced."""
    package, tested, _, argument = CASES[adapter]
    change = {
        "an argument's name": lambda f: renamed_argument(f, argument),
        "one more": lambda f: new_argument(f, "wanted"),
    }
    released(monkeypatch, "99.0", package)
    module, standing = stubbed(monkeypatch, adapter, change.get(how, lambda f: f))
    first = next(iter(standing))
    if how == "no function":
        delattr(seams.part("", first[0]), first[1])
        del standing[first]
    if how == "no module":
        monkeypatch.delitem(sys.modules, first[0].partition(":")[0])
        standing = {at: f for at, f in standing.items() if at[0] != first[0]}
    saying = {"no module": r"\.\w+: is not there", "no function": f"has no {first[1]}"}
    match = saying.get(how, rf"{first[1]}: takes \(.*\), want \(")
    with pytest.raises(RuntimeError, match=rf"^{package} 99.0: .*{match}.*{tested}") as error:
        module.install()
    assert "install a release" in str(error.value) and "do without the adapter" in str(error.value)
    assert here(standing) == standing


@pytest.mark.parametrize("adapter", CASES)
def test_a_new_argument_with_a_default(adapter, monkeypatch) -> None:
    """If a framework's function gets a new argument with a default, `install()` works, and a call
    that passes the argument raises an error with its name."""
    package, tested = CASES[adapter][:2]
    released(monkeypatch, tested, package)
    module, standing = stubbed(monkeypatch, adapter, lambda f: new_argument(f, "fresh=False"))
    calls: list[dict[str, Any]] = []
    for at, ours in module.SEAMS.ours.items():
        function = ours.apply if isinstance(ours, type) else ours
        monkeypatch.setitem(module.SEAMS.ours, at, recorded(function, ours, calls))
    module.install()
    try:
        for at, theirs in standing.items():
            replacement = here(standing)[at]
            call = replacement.apply if isinstance(theirs, type) else replacement
            arguments = {n: f"<{n}>" for n in seams.called(theirs) if n != "fresh"}
            by_position = isinstance(theirs, type)  # `Function.apply` takes no keywords
            call(*arguments.values()) if by_position else call(**arguments)
            assert calls.pop() == arguments
            call(*arguments.values(), False) if by_position else call(**arguments, fresh=False)
            assert calls.pop() == arguments
            with pytest.raises(TypeError, match="^fresh: .* does not know it yet"):
                call(*arguments.values(), True) if by_position else call(**arguments, fresh=True)
    finally:
        module.uninstall()
    assert not calls


def recorded(function: Any, ours: Any, calls: list[dict[str, Any]]) -> Any:
    """Return a function with the signature of `ours` that appends its arguments to `calls`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> None:
        calls.append(dict(signature.bind(*args, **kwargs).arguments))

    return (
        type("Recorded", (), {"apply": staticmethod(record)}) if isinstance(ours, type) else record
    )


def test_an_argument_that_moved_reaches_its_name() -> None:
    def ours(hidden, weight, target, chunk=None):
        return hidden, weight, target, chunk

    def moved(weight, hidden, target, chunk=None):
        raise AssertionError("stock")

    def keywords(hidden, weight, *, chunk=None, target):
        raise AssertionError("stock")

    assert fitted(moved, ours, "f")("w", "h", "t") == ("h", "w", "t", None)
    assert fitted(keywords, ours, "f")("h", "w", target="t", chunk=3) == ("h", "w", "t", 3)

    def between(hidden, fresh=None, weight=None, target=None):
        raise AssertionError("stock")

    assert fitted(between, ours, "f")("h", None, "w", "t") == ("h", "w", "t", None)
    for theirs in (moved, between):  # signatures of positional calls
        with pytest.raises(RuntimeError, match=r"^f: takes \(.*\), want \(hidden, weight"):
            check_signature(theirs, ours, "f")


def test_functions_are_replaced_all_or_none(monkeypatch) -> None:
    first, second = (lambda a: a), (lambda a, b: a)
    place(monkeypatch, "a_framework.part", "first", first)
    place(monkeypatch, "a_framework.part", "second", second)
    ours = {("a_framework.part", "first"): lambda a: 1, ("a_framework.part", "second"): lambda a: 1}
    with pytest.raises(RuntimeError, match=r"^a_framework.part.second: takes \(a, b\), want \(a\)"):
        Seams(ours).install()
    assert sys.modules["a_framework.part"].first is first  # type: ignore[attr-defined]
