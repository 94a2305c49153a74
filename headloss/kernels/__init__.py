"""Backends: the acts over a tile of logits. Each is a module; none imports another."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch


def choose(backend: str, device: torch.device) -> str:
    """The backend's name; ValueError where an explicit one cannot run on this device."""
    if backend == "auto":
        return "triton" if device.type == "cuda" and _has_triton() else "reference"
    if backend == "triton":
        if not _has_triton():
            raise ValueError('backend: got "triton", but triton cannot be imported here')
        if device.type != "cuda" and not _interprets():
            raise ValueError(f'backend: got "triton", which needs a GPU, for tensors on {device}')
    return backend


def load(backend: str) -> tuple[ModuleType, ModuleType]:
    """The acts of a backend, and its acts of full-distribution distillation."""
    from . import reference, reference_divergence

    return reference, reference_divergence


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)  # type: ignore[attr-defined]
