"""Detection of headloss in verl's configuration."""

from __future__ import annotations

from typing import Any

DIVERGENCE = "headloss_"  # Prefix of a divergence's name in `distillation_loss.loss_mode`.


def asks(config: Any) -> bool:
    """Return whether a model's configuration asks for headloss."""
    options = getattr(config, "fused_kernel_options", None) or {}
    fused = getattr(config, "use_fused_kernels", False)
    return bool(fused) and options.get("impl_backend") == "headloss"
