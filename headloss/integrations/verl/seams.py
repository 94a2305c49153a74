"""Installation of headloss in verl, and its removal."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from .. import megatron_mtp
from ..seams import Seams, check_signature, require_arguments
from . import fused, losses
from .asked import asks
from .engine import Engine


def install() -> None:
    """Install the replacements, for the package's `install`."""
    if SEAMS.theirs:
        return
    check()
    SEAMS.install()
    losses.add()


def check() -> str:
    """Compare verl's signatures, for the package's `check`."""
    linear, fused_forward = fused.linear_of_verl, "FusedLinearForPPO.forward"
    require_arguments(linear, ("impl_backend",), "FusedLinearForPPO", "verl")
    check_signature(linear.forward, fused.Fused.forward, fused_forward, "verl")
    for name in ("prepare_model_inputs", "prepare_model_outputs", "forward_step"):
        theirs, ours = getattr(FSDPEngineWithLMHead, name), getattr(Engine, name)
        check_signature(theirs, ours, f"FSDPEngineWithLMHead.{name}", "verl")
    return SEAMS.check()


def uninstall() -> None:
    """Restore verl's classes and functions, for `headloss.integrations.verl.uninstall`."""
    SEAMS.uninstall()
    for seams in under_megatron:
        seams.uninstall()
    megatron_mtp.uninstall()
    losses.remove()


def _new(theirs: Any) -> Any:
    def new(model_type: str, backend: str, *args: Any, **kwargs: Any) -> Any:
        """Return headloss's engine for models that ask for headloss, in place of
        `EngineRegistry.new`."""
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
    """Let Megatron models return hidden states in place of logits, whether or not verl's fused
    kernels would serve the model. `megatron_mtp` also computes the losses of multi-token
    prediction."""
    from . import megatron  # Imported on demand, since the FSDP engine does not need Megatron-Core.

    # `install()` has already warned of an untested verl release.
    megatron.SEAMS.install(quiet=True)
    megatron_mtp.install()
    if megatron.SEAMS not in under_megatron:
        under_megatron.append(megatron.SEAMS)


under_megatron: list[Seams] = []
SEAMS = Seams(
    {
        ("verl.utils.experimental.torch_functional", "FusedLinearForPPO"): fused.fused_linear,
        ("verl.models.transformers.monkey_patch", "patch_forward_with_backends"): (
            fused.patch_forward
        ),
        ("verl.workers.engine.base:EngineRegistry", "new"): staticmethod(_new(EngineRegistry.new)),
    },
    "verl",
)
