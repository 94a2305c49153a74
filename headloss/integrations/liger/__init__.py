"""Liger-Kernel's fused linear losses, by their own names and signatures, computed by headloss.

    from headloss.integrations.liger import LigerFusedLinearCrossEntropyLoss

in place of liger_kernel's, which need not be installed. B rows, T positions, H hidden width, V
vocabulary. `compiled`, `chunk_size` and their like choose among Liger's own implementations: they
are taken and change nothing. What is returned is what Liger 0.8 returns; gradients reach hidden
states, weight and bias.
"""

from .cross_entropy import (
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearScaledCrossEntropyFunction,
    liger_fused_linear_cross_entropy,
)
from .distillation import LigerFusedLinearJSDLoss
from .policy import LigerFusedLinearGRPOLoss
from .preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

__all__ = [
    "liger_fused_linear_cross_entropy",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearSimPOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearKTOLoss",
]
