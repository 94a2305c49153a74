"""Liger-Kernel's fused linear losses, with Liger's names and signatures, computed by headloss.

    from headloss.integrations.liger import LigerFusedLinearCrossEntropyLoss

Import headloss's classes in place of liger_kernel's; liger_kernel need not be installed. B rows, T
positions, H hidden width, V vocabulary. Arguments that choose among Liger's implementations, such
as `compiled` and `chunk_size`, are accepted and have no effect. The losses return the values of
Liger 0.8; gradients reach hidden states, weight and bias.
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
