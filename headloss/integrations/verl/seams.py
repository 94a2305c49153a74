"""Where headloss goes into verl, and out of it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
from typing import Any

from verl.models.transformers import monkey_patch
from verl.utils.experimental import torch_functional
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from ..megatron import KNOWN
from ..shared import require_version
from . import fused, losses
from .asked import asks
from .engine import Engine

_before: list[tuple[Any, str, Any]] = []


def install() -> None:
    """As the package's."""
    if _before:
        return
    losses.add()
    seams: list[tuple[Any, str, Any]] = [
        (torch_functional, "FusedLinearForPPO", fused.fused_linear),
        (monkey_patch, "patch_forward_with_backends", fused.patch_forward),
        (EngineRegistry, "new", staticmethod(_new(EngineRegistry.new))),
    ]
    for seam in seams:
        _replace(*seam)


def _replace(owner: Any, name: str, ours: Any) -> None:
    _before.append((owner, name, vars(owner)[name]))
    setattr(owner, name, ours)


def uninstall() -> None:
    """As the package's."""
    for owner, name, theirs in _before:
        setattr(owner, name, theirs)
    _before.clear()
    losses.remove()


def _new(theirs: Any) -> Any:
    def new(model_type: str, backend: str, *args: Any, **kwargs: Any) -> Any:
        """In place of `EngineRegistry.new`."""
        config = kwargs.get("model_config", args[0] if args else None)
        if not asks(config) or model_type != "language_model":
            return theirs(model_type, backend, *args, **kwargs)
        if backend == "megatron":
            _under_megatron()
            return theirs(model_type, backend, *args, **kwargs)
        if EngineRegistry.get_engine_cls(model_type, backend) is not FSDPEngineWithLMHead:
            raise ValueError(
                f"impl_backend: headloss under strategy {backend!r} is not supported, want fsdp, "
                "fsdp2 or megatron; or use_fused_kernels=False"
            )
        return Engine(*args, **kwargs)

    return new


def _under_megatron() -> None:
    """By Megatron's own hook; with a release that has none verl would go on with its kernels."""
    require_version("megatron-core", *KNOWN)
    module = importlib.import_module("verl.models.mcore.model_forward_fused")
    if module.fused_output_processor is not fused.output_processor:
        _replace(module, "fused_output_processor", fused.output_processor)
