"""Trainers of TRL whose log-probs and losses come from headloss.

from headloss.integrations.trl import GRPOTrainer  # in place of `from trl import GRPOTrainer`
"""

from .dpo import DPOTrainer
from .forward import Switches
from .grpo import GRPOTrainer
from .install import check, install, uninstall
from .sft import SFTTrainer

__all__ = ["DPOTrainer", "GRPOTrainer", "SFTTrainer", "Switches", "check", "install", "uninstall"]
