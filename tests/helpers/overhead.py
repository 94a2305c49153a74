"""Work of libraries that takes longer than a small test and that no test is about."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.metadata
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def spare() -> None:
    """Torch keeps each seed with the formatted stack of who set it, for every kind of device that
    is not there; accelerate parses a package's description for each module that it meets."""
    if not torch.cuda.is_available():
        for absent in (torch.cuda, torch.xpu, torch.mtia):
            absent.manual_seed_all = lambda seed: None
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)


def freeze() -> None:
    """What is there now stays: a trainer collects garbage after every run, among all objects."""
    gc.enable()
    gc.collect()
    gc.freeze()


def spare_interpreter() -> None:
    """Triton's interpreter looks through its language for what to replace at each call of a device
    function, though the kernel that calls it has replaced all of it; it builds its table of dtypes
    at each look into it; and it finds out whether integers overflow, which only a debugging builder
    would say."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    patched = ("tl", "interpreter_builder", "_patch_lang", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in patched):
        return  # it is not loaded, or of a release that has other names: slower, and as right
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    language, replace = interpreter.tl, interpreter._patch_lang
    of_scalar = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: of_scalar(
        language.uint64 if dtype.scalar.is_ptr() else dtype.scalar
    )

    @functools.cache
    def languages(function: Callable) -> list[Any]:
        modules = (language, language.core)
        return [m for m in modules if any(value is m for value in function.__globals__.values())]

    def replace_once(function: Callable) -> Any:
        functions = [f for m in languages(function) for f in (m.load, m.tensor.__add__)]
        if any(map(language.core.is_builtin, functions)):
            return replace(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once
