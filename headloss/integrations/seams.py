"""Where a framework's code gives way to ours: what is replaced is there, and takes what we take."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable
from typing import Any

# Releases that an adapter's whole suite ran with. Others are served where what is checked holds.
TESTED: dict[str, tuple[str, ...]] = {
    "transformers": ("5.20.1", "5.23.0", "5.24.0"),
    "trl": ("1.16.0",),
}


VARIABLE = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def release(package: str) -> str | None:
    """The installed release of a distribution, None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_signature(theirs: Callable[..., Any], ours: Callable[..., Any], seam: str) -> None:
    """RuntimeError where calls that `theirs` takes by position or by name would reach other
    arguments of `ours`. What only `theirs` has is fine where it has a default: it is refused when a
    call passes it; and where `ours` takes any."""
    want, got = (_plain(function) for function in (ours, theirs))
    lacking = [name for name, p in want.items() if name not in got and p.default is p.empty]
    new = [name for name, p in got.items() if name not in want and p.default is p.empty]
    kinds = {p.kind for p in inspect.signature(ours).parameters.values()}
    new = [] if kinds >= VARIABLE else new
    moved = [n for n in want if n in got] != [n for n in got if n in want]
    if lacking or new or moved:
        raise RuntimeError(
            f"{seam}: takes ({', '.join(got)}), want ({', '.join(want)}), which headloss's adapter "
            "takes the place of"
        )


def _plain(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {n: p for n, p in parameters.items() if p.kind not in VARIABLE}


@functools.cache
def announce(package: str, checked: str) -> None:
    """One warning in a process, where `package` is a release that no test ran with."""
    if (installed := release(package)) not in TESTED.get(package, ()):
        tested = ", ".join(TESTED.get(package, ())) or "none"
        warnings.warn(
            f"{package} {installed} was not tested with headloss (tested: {tested}); {checked} "
            "was checked and holds",
            stacklevel=3,
        )


class Seams:
    """Attributes of a framework's modules, or of classes in them, that ours take the place of.

    Args:
        ours: by ("module" or "module:Class", attribute).
    """

    def __init__(self, ours: dict[tuple[str, str], Any]) -> None:
        self.ours = ours
        self.theirs: dict[tuple[str, str], Any] = {}

    def install(self) -> None:
        """RuntimeError, and nothing done, where one of them is not there."""
        if self.theirs:
            return
        found = {}
        for place, name in self.ours:
            owner = _owner(place)
            if name not in vars(owner):
                raise RuntimeError(f"{place}: has no {name}, which headloss's adapter replaces")
            found[place, name] = vars(owner)[name]
        self.theirs = found
        for (place, name), value in self.ours.items():
            setattr(_owner(place), name, value)

    def uninstall(self) -> None:
        for (place, name), value in self.theirs.items():
            setattr(_owner(place), name, value)
        self.theirs = {}


def _owner(place: str) -> Any:
    module, _, name = place.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, name) if name else owner
