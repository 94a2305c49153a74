"""Stubs with the signatures of framework functions, for tests of adapters."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from headloss.integrations import seams


def stub(signature: str) -> Callable[..., Any]:
    """Return a function of the given signature, such as "(x, y=None)", that raises
    AssertionError("stock")."""
    namespace: dict[str, Any] = {}
    exec(f"def function{signature}: raise AssertionError('stock')", namespace)
    return namespace["function"]


NEMO_RL_07 = """(
    tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target,
    vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None,
    chunk_size=None
)"""
nemo_rl_07 = stub(NEMO_RL_07)
nemo_rl_06 = stub(NEMO_RL_07.replace("runtime_gather", "output_weight, runtime_gather"))
skyrl = stub(
    "(backend, hidden, weight, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, "
    "inference_only)"
)
prime_rl_08 = stub("(self, hidden_states, labels=None, temperature=None)")
prime_rl = stub("(self, hidden_states, labels=None, temperature=None, sampling_mask=None)")
agile_head = stub("(self)")
agile_chunked = stub(
    "(hidden, head_w, head_b, target_ids, temperature=1.0, cast_to_fp32=True, *, chunk_rows)"
)


class AgileFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head_w, head_b, target_ids, temperature, cast_to_fp32, chunk_rows):
        raise AssertionError("stock")


def parameters_of(theirs: Any) -> list[inspect.Parameter]:
    function = theirs.forward if isinstance(theirs, type) else theirs
    return list(inspect.signature(function).parameters.values())


def new_argument(theirs: Any, text: str) -> Any:
    """Return a copy of a function with one more argument: `text` is its name, as in "x", or has a
    default, as in "x=None"."""
    parameters = parameters_of(theirs)
    (new,) = parameters_of(stub(f"({text})"))
    at = 2 if parameters[0].name in ("self", "ctx") else 1
    if new.default is not new.empty:  # after all positional arguments
        at = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
    return with_parameters(theirs, [*parameters[:at], new, *parameters[at:]])


def renamed_argument(theirs: Any, before: str) -> Any:
    """Return a copy of a function whose argument `before` has another name."""
    after = f"{before}_of_another_name"
    parameters = [p.replace(name=p.name.replace(before, after)) for p in parameters_of(theirs)]
    return with_parameters(theirs, parameters)


def with_parameters(theirs: Any, parameters: list[inspect.Parameter]) -> Any:
    function = stub(str(inspect.Signature(parameters)))
    if isinstance(theirs, type):
        body = {"forward": staticmethod(function)}
        return type(theirs.__name__, (torch.autograd.Function,), body)
    return function


CASES: dict[str, tuple[str, str, Any, str]] = {
    # adapter: (distribution, a tested release, stub functions, name of an argument)
    "nemo_rl": ("nemo-rl", "0.7.0", nemo_rl_07, "target"),
    "skyrl": ("skyrl", "0.3.0", skyrl, "target"),
    "prime_rl": ("prime-rl", "0.8.0", prime_rl_08, "labels"),
    "agilerl": ("agilerl", "2.58.0", None, "target_ids"),
}


@pytest.fixture(autouse=True)
def no_notice_yet() -> Iterator[None]:
    seams.announce.cache_clear()
    yield
    seams.announce.cache_clear()


def released(monkeypatch: pytest.MonkeyPatch, release: str, *packages: str) -> None:
    real = importlib.metadata.version

    def version(package: str) -> str:
        return release if package in packages else real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)


def place(monkeypatch: pytest.MonkeyPatch, at: str, name: str, value: Any) -> Any:
    """Install a stub module (and class) with the attribute `name`; return the module or class."""
    module, _, holder = at.partition(":")
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        path = ".".join(parts[:n])
        if path not in sys.modules:
            stub = ModuleType(path)
            stub.__path__ = []  # an empty `__path__` marks the stub as a package
            monkeypatch.setitem(sys.modules, path, stub)
    owner: Any = sys.modules[module]
    if holder:
        if not hasattr(owner, holder):
            setattr(owner, holder, type(holder, (), {}))
        owner = getattr(owner, holder)
    setattr(owner, name, value)
    return owner


def stubbed(
    monkeypatch: pytest.MonkeyPatch, adapter: str, changed: Callable[[Any], Any] = lambda f: f
) -> tuple[Any, dict[tuple[str, str], Any]]:
    """Install a stub for each function of the framework that the adapter replaces; the installed
    stub is the result of `changed(stub)`. Return the adapter module, and a dict of the stubs by
    module and name."""
    module = importlib.import_module(f"headloss.integrations.{adapter}")
    standing = {}
    for at, name in module.SEAMS.ours:
        theirs = CASES[adapter][2]
        if adapter == "agilerl":
            theirs = AgileFunction if name.startswith("Fused") else agile_chunked
            theirs = agile_head if name.startswith("_fused") else theirs  # has no tensor arguments
        standing[at, name] = changed(theirs)
        place(monkeypatch, at, name, standing[at, name])
    return module, standing


def here(standing: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    return {at: vars(seams.part("", at[0]))[at[1]] for at in standing}
