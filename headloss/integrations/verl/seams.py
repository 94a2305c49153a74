"""Where headloss goes into verl, and out of it."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from .. import megatron, megatron_mtp
from ..seams import Seams, announce, check_signature, require_arguments
from . import fused, losses
from .asked import asks
from .engine import Engine

MCORE = "verl.models.mcore.model_forward_fused"
MEGATRON = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"


def install() -> None:
    """As the package's."""
    if SEAMS.theirs:
        return
    check()
    SEAMS.install()
    losses.add()


def check() -> str:
    """As the package's."""
    linear, fused_forward = fused.linear_of_verl, "FusedLinearForPPO.forward"
    require_arguments(linear, ("impl_backend",), "FusedLinearForPPO", "verl")
    check_signature(linear.forward, fused.Fused.forward, fused_forward, "verl")
    for name in ("prepare_model_inputs", "prepare_model_outputs", "forward_step"):
        theirs, ours = getattr(FSDPEngineWithLMHead, name), getattr(Engine, name)
        check_signature(theirs, ours, f"FSDPEngineWithLMHead.{name}", "verl")
    return SEAMS.check()


def uninstall() -> None:
    """As the package's."""
    SEAMS.uninstall()
    UNDER_MEGATRON.uninstall()
    megatron_mtp.uninstall()
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
    announce("megatron-core", megatron.check())
    UNDER_MEGATRON.install(quiet=True)  # install() has announced verl
    # Where MTP is on, verl calls no processor: the main logits are made, those of the depths not.
    megatron_mtp.install()


def prepare_model_inputs(self: Any, batch: Any) -> Any:
    """Of the Megatron engine, whose fused forward computes no loss of a teacher."""
    fused = tu.get_non_tensor_data(batch, "use_fused_kernels", False) and asks(self.model_config)
    if fused and tu.get_non_tensor_data(batch, "distillation_use_topk", False):
        raise ValueError(
            "impl_backend: got top-k distillation under strategy 'megatron', want fsdp or fsdp2; "
            "or use_fused_kernels=False"
        )
    return UNDER_MEGATRON.theirs[MEGATRON, "prepare_model_inputs"](self, batch)


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
UNDER_MEGATRON = Seams(
    {
        (MCORE, "fused_output_processor"): fused.output_processor,
        (MEGATRON, "prepare_model_inputs"): prepare_model_inputs,
    },
    "verl",
)
