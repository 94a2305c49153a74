"""Names in verl's configuration that ask for headloss."""

from __future__ import annotations

from typing import Any

DIVERGENCE = "headloss_"  # before a kind of divergence: `distillation_loss.loss_mode`


def asks(config: Any) -> bool:
    """Tell whether a model's configuration asks for headloss."""
    options = getattr(config, "fused_kernel_options", None) or {}
    fused = getattr(config, "use_fused_kernels", False)
    return bool(fused) and options.get("impl_backend") == "headloss"
