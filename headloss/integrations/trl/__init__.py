"""Trainers of TRL whose log-probs and losses come from headloss.

from headloss.integrations.trl import GRPOTrainer  # in place of `from trl import GRPOTrainer`
"""

from typing import TYPE_CHECKING, Any

from .dpo import DPOTrainer
from .forward import Switches
from .grpo import GRPOTrainer
from .install import check, install, uninstall
from .sft import SFTTrainer

if TYPE_CHECKING:
    from .orpo import CPOTrainer as CPOTrainer
    from .orpo import ORPOTrainer as ORPOTrainer

__all__ = ["DPOTrainer", "GRPOTrainer", "SFTTrainer", "Switches", "check", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    """Import `ORPOTrainer` and `CPOTrainer` on demand: TRL may move or remove its experimental
    modules."""
    if name not in ("CPOTrainer", "ORPOTrainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import orpo

    return getattr(orpo, name)
