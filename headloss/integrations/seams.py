"""Checked replacement of a framework's functions by headloss's functions."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

# For each distribution on PyPI, the module in headloss.integrations that adapts it.
ADAPTERS = {
    "transformers": "transformers",
    "trl": "trl",
    "megatron-core": "megatron",
    "verl": "verl",
    "torchtitan": "torchtitan",
    "agilerl": "agilerl",
    "axolotl": "axolotl",
    "prime-rl": "prime_rl",
    "nemo-rl": "nemo_rl",
    "nemo-automodel": "nemo_automodel",
    "skyrl": "skyrl",
    "areal": "areal",
    "openrlhf": "openrlhf",
    "ms-swift": "ms_swift",
    "slime": "slime",
    "miles": "slime",
    "speculators": "speculators",
    "specforge": "specforge",
}
# Framework releases tested with an adapter's whole test suite. An untested release works if the
# signature checks pass.
TESTED: dict[str, tuple[str, ...]] = {
    "transformers": ("5.20.1", "5.23.0", "5.24.0"),
    "trl": ("1.16.0",),
    "megatron-core": ("0.18.0", "0.19.2"),
    "verl": ("0.9.1",),
    "torchtitan": ("0.3.0",),
    "agilerl": ("2.58.0",),
    "axolotl": ("0.21.0",),
    "prime-rl": ("0.8.0",),
    "nemo-rl": ("0.6.0", "0.7.0"),
    "nemo-automodel": ("0.7.0",),
    "skyrl": ("0.3.0", "0.4.0"),
    "areal": ("1.0.4",),
    "openrlhf": ("0.11.2",),
    "ms-swift": ("4.6.0",),
    "slime": ("0.3.1",),
    "miles": ("0.1.0",),
    "speculators": ("0.9.0",),
    "specforge": ("0.2.0",),
}


def release(package: str) -> str | None:
    """Return the installed release of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def misfit(package: str, problem: str) -> RuntimeError:
    """Return the RuntimeError of a failed check, which names the installed release and a remedy."""
    if not package:
        return RuntimeError(problem)
    return RuntimeError(
        f"{package} {release(package)}: {problem}; install a release that headloss's adapter was "
        f"tested with ({_tested(package)}), or do without the adapter"
    )


def _tested(package: str) -> str:
    return ", ".join(TESTED.get(package, ())) or "none"


def part(package: str, place: str, name: str = "") -> Any:
    """Return the attribute `name` of `place`, a "module" or "module:Class"; if `name` is empty, the
    module or class itself.

    Raises:
        RuntimeError: the package lacks the module, class or attribute.
        ImportError: the package is not installed, or cannot be imported.
    """
    module, _, holder = place.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if "." not in missing or not f"{module}.".startswith(f"{missing}."):
            raise  # A whole package is missing: the framework or one of its dependencies.
        raise misfit(package, f"{module}: is not there") from error
    for attribute in filter(None, (holder, name)):
        if not hasattr(value, attribute):
            raise misfit(package, f"{place}: has no {attribute}")
        value = getattr(value, attribute)
    return value


def check_signature(
    theirs: Callable[..., Any],
    ours: Callable[..., Any],
    seam: str,
    package: str = "",
    by_name: bool = False,
) -> None:
    """Check that a call written for the framework's function `theirs` can be served by its
    replacement `ours`: each argument must reach the parameter of the equal name. If not, raise
    RuntimeError.

    An argument that `theirs` has and `ours` lacks is allowed if the argument has a default; a call
    that passes the argument is refused.

    Args:
        package: name of the framework's distribution, used in the error message.
        by_name: whether callers pass all arguments by keyword, so that their order does not matter.
    """
    want, got = called(ours), called(theirs)
    new = unknown(theirs, ours)
    lacking = [name for name, p in want.items() if name not in got and p.default is p.empty]
    required = [name for name in new if got[name].default is inspect.Parameter.empty]
    moved = [n for n in want if n in got] != [n for n in got if n in want]
    places = _places(theirs)
    moved |= any(n in new and set(places[at:]) & set(want) for at, n in enumerate(places))
    if lacking or required or (moved and not by_name):
        raise misfit(package, f"{seam}: takes ({', '.join(got)}), want ({', '.join(want)})")


def require_arguments(
    function: Callable[..., Any], names: Collection[str], seam: str, package: str
) -> None:
    """Raise RuntimeError if `function` lacks an argument of the given names."""
    if missing := [name for name in names if name not in called(function)]:
        raise misfit(package, f"{seam}: takes no {', '.join(missing)}")


def called(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a function; for an autograd function, the parameters of
    `apply`."""
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = _signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind not in variable}


def _signature(function: Any) -> inspect.Signature:
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        # `apply` accepts all parameters of `forward` except autograd's context `ctx`.
        signature = inspect.signature(function.forward)
        parameters = [p for name, p in signature.parameters.items() if name != "ctx"]
        return signature.replace(parameters=parameters)
    # A replacement of an autograd function.
    if isinstance(function, type) and "apply" in vars(function):
        function = vars(function)["apply"]
    return inspect.signature(function)


def unknown(theirs: Callable[..., Any], ours: Callable[..., Any]) -> list[str]:
    """Return the arguments of `theirs` that `ours` does not accept.

    If the replacement `ours` has `**kwargs`, it accepts every keyword-only argument; if it has both
    `*args` and `**kwargs`, it accepts every argument.
    """
    kinds = {p.kind for p in _signature(ours).parameters.values()}
    any_name = inspect.Parameter.VAR_KEYWORD in kinds
    anything = any_name and inspect.Parameter.VAR_POSITIONAL in kinds
    return [
        name
        for name, p in called(theirs).items()
        if name not in called(ours) and not (anything or (any_name and p.kind is p.KEYWORD_ONLY))
    ]


def fitted(theirs: Any, ours: Any, seam: str, package: str = "") -> Any:
    """Return the replacement `ours` in a form that accepts calls written for the function `theirs`.

    Returns:
        the function `ours` itself if its arguments have the same names in the same order as the
        arguments of `theirs`; else a function that calls `ours` by keyword, and raises TypeError if
        a call passes an argument that `ours` does not accept.

    Raises:
        RuntimeError: as from `check_signature`.
    """
    check_signature(theirs, ours, seam, package, by_name=True)
    new = unknown(theirs, ours)
    if not new and _places(ours)[: len(_places(theirs))] == _places(theirs):
        return ours
    function = ours.apply if isinstance(ours, type) else ours
    signature = _signature(theirs)

    @functools.wraps(function)
    def by_name(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        for name in new:
            default = signature.parameters[name].default
            value = arguments.pop(name, default)
            if not (value is default or _same(value, default)):
                raise TypeError(f"{name}: {seam} takes it, headloss's adapter does not know it yet")
        return function(**arguments)

    if isinstance(ours, type):
        return type(ours.__name__, (ours,), {"apply": staticmethod(by_name)})
    return by_name


def _places(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in called(function).items() if p.kind in kinds]


def _same(value: Any, default: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) and value == default


@functools.cache
def announce(package: str, checked: str) -> None:
    """Warn once per process if the installed release of `package` is untested."""
    if (installed := release(package)) not in TESTED.get(package, ()):
        warnings.warn(
            f"{package} {installed} was not tested with headloss (tested: {_tested(package)}); "
            f"{checked} was checked and holds",
            stacklevel=3,
        )


class Watch:
    """Observer that notes whether a framework calls an adapter's functions.

    After the first step of any optimizer in the process, headloss warns if the adapter is
    installed but the framework has called none of the adapter's functions.

    Attributes:
        called: whether the adapter has been called since the last call of `start()`.
    """

    def __init__(self, package: str) -> None:
        self.package, self.called, self.judged = package, False, True
        self._hook: Any = None

    def start(self) -> None:
        self.called = self.judged = False
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._after_step)

    def stop(self) -> None:
        self.judged = True
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def counting(self, ours: Any) -> Any:
        """Return a wrapper of the replacement `ours` that notes in `self.called` that it was
        called."""
        if isinstance(ours, type) and "apply" not in dir(ours):
            return ours
        function = ours.apply if isinstance(ours, type) else ours

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.called = True
            return function(*args, **kwargs)

        if isinstance(ours, type):
            return type(ours.__name__, (ours,), {"apply": staticmethod(noted)})
        return noted

    def _after_step(self, *_: Any) -> None:
        if self.judged:
            return
        self.judged = True  # torch is iterating over its hooks, so do not remove one here.
        if not self.called:
            warnings.warn(
                f"{self.package}: headloss's adapter was put in place, and by the end of this "
                "process's first optimizer step nothing had called it: the loss is not headloss's "
                "(right for a process that trains a critic alone); docs/integrations says which "
                "settings lead to the adapter",
                stacklevel=2,
            )


watch_of = functools.cache(Watch)  # One `Watch` per package.


class Seams:
    """Table of a framework's functions and classes, and of headloss's replacements.

    Args:
        ours: maps ("module" or "module:Class", attribute) to the replacement. If the framework's
            function orders its arguments differently, the replacement is called by keyword.
        package: the framework's distribution; `install` warns of an untested release.
        optional: ("module", attribute) keys that are skipped if the framework lacks the attribute.
        arguments: maps ("module", attribute) to names of arguments that the framework's function
            must have.
    """

    def __init__(
        self,
        ours: dict[tuple[str, str], Any],
        package: str = "",
        optional: Collection[tuple[str, str]] = (),
        arguments: Mapping[tuple[str, str], Collection[str]] | None = None,
    ) -> None:
        self.ours, self.package, self.optional = ours, package, optional
        self.arguments = arguments or {}
        self.theirs: dict[tuple[str, str], Any] = {}

    def check(self) -> str:
        """Return a description of the framework's functions whose signatures were checked.

        RuntimeError if the framework lacks a function that headloss replaces, or if such a function
        has unexpected arguments.
        """
        self._fitted()
        names = dict.fromkeys(name for _, name in self.ours)
        return f"the signature of {', '.join(names)}"

    def install(self, quiet: bool = False) -> None:
        """Install all replacements, or raise RuntimeError and install none; `quiet` omits the
        warning."""
        if self.theirs:
            return
        replaced = self._fitted()
        self.theirs = {at: vars(part(self.package, at[0]))[at[1]] for at in replaced}
        watch = watch_of(self.package)
        for (place, name), value in replaced.items():
            setattr(part(self.package, place), name, watch.counting(value))
        watch.start()
        if self.package and not quiet:
            announce(self.package, self.check())

    def uninstall(self) -> None:
        """Restore the framework's functions and classes."""
        for (place, name), value in self.theirs.items():
            setattr(part(self.package, place), name, value)
        self.theirs = {}
        watch_of(self.package).stop()

    def _fitted(self) -> dict[tuple[str, str], Any]:
        if self.theirs:
            return {}
        fitting = {}
        for (place, name), ours in self.ours.items():
            try:
                owner = part(self.package, place)
                if name not in vars(owner):
                    raise misfit(self.package, f"{place}: has no {name}")
            except RuntimeError:
                if (place, name) in self.optional:
                    continue
                raise
            theirs, seam = getattr(owner, name), f"{place}.{name}"
            require_arguments(theirs, self.arguments.get((place, name), ()), seam, self.package)
            fitting[place, name] = fitted(theirs, ours, seam, self.package)
        return fitting


def fits() -> dict[str, str]:
    """Return, for each installed framework, its release and whether its adapter fits."""
    return {name: _fit(name, installed) for name in ADAPTERS if (installed := release(name))}


def _fit(package: str, installed: str) -> str:
    # The adapter fits a tested release, so skip the check of signatures and the framework's import.
    if installed in TESTED[package]:
        return f"{installed}, tested"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapter = importlib.import_module(f"headloss.integrations.{ADAPTERS[package]}")
            if not hasattr(adapter, "check"):
                return f"{installed}, not tested (tested: {_tested(package)})"
            return f"{installed}, not tested; {adapter.check()} was checked and holds"
    # Signature checks and imports of the framework may raise any exception.
    except Exception as error:
        if isinstance(error, RuntimeError) and str(error).startswith(package):
            return str(error).removeprefix(f"{package} ")
        reason = str(error).partition("\n")[0]
        return f"{installed}, does not import here: {type(error).__name__}: {reason}"
