"""Reinforcement learning on TRL's trainer: one name per algorithm.

from headloss import rl
rl.GSPO(model="Qwen/Qwen3-0.6B", reward_funcs=reward, train_dataset=prompts).train()
"""

from .advantages import discounted, generalised, leave_one_out, normalised, rewards_at_tokens
from .config import CISPOConfig, GRPOConfig, GSPOConfig, PPOConfig, REINFORCEConfig, RLConfig
from .trainers import CISPO, GRPO, GSPO, PPO, REINFORCE

__all__ = [
    "CISPO",
    "GRPO",
    "GSPO",
    "PPO",
    "REINFORCE",
    "CISPOConfig",
    "GRPOConfig",
    "GSPOConfig",
    "PPOConfig",
    "REINFORCEConfig",
    "RLConfig",
    "discounted",
    "generalised",
    "leave_one_out",
    "normalised",
    "rewards_at_tokens",
]
