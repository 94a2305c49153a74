"""Patches that make small tests faster by removing overhead of torch, accelerate, Python's garbage
collector and Triton's interpreter."""

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
    """Remove slow calls in torch and accelerate that the tests do not need.

    Whenever a seed is set, torch formats a stack trace for each kind of device that is absent.
    accelerate parses the metadata of the same packages again and again.
    """
    if not torch.cuda.is_available():
        for absent in (torch.cuda, torch.xpu, torch.mtia):
            absent.manual_seed_all = lambda seed: None
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)


def freeze() -> None:
    """Exclude all existing objects from garbage collection, since trainers collect garbage after
    every run."""
    gc.enable()
    gc.collect()
    gc.freeze()


def spare_interpreter() -> None:
    """Remove overhead of Triton's interpreter.

    Triton's interpreter patches the module `triton.language` again at each call of a device
    function, and rebuilds its table of dtypes at each lookup. The interpreter also checks integers
    for overflow, although it reports an overflow only with the option `debug`.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    patched = ("tl", "interpreter_builder", "_patch_lang", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in patched):
        return  # If Triton's interpreter is missing or has other internals, patch nothing.
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
