"""Configurations of the trainers: TRL's options, the options of headloss, and each algorithm's
defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl.trainer import grpo_config


def _option(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class RLConfig(grpo_config.GRPOConfig):
    """TRL's `GRPOConfig`, with switches that make a forward pass avoid the logits."""

    use_fused_loss: bool | None = _option(
        None, "None: on where the head can be read. False: materialise the logits."
    )
    use_fused_linear_logprobs: bool | None = _option(
        None, "Of the old and reference passes, without gradient. None: as use_fused_loss."
    )
    cast_logprobs_to_fp32: bool | None = _option(
        None, "True: log-probs of float32 logits. False: of bf16 logits. None: as use_fused_loss."
    )
    sampling_support: bool | None = _option(
        None, "Log-probs over the ids that a sampler kept. None: where a filter takes ids away."
    )


@dataclass
class GRPOConfig(RLConfig):
    """GRPO's group-relative advantages, scaled by `scale_rewards`: "group", "batch" or "none"."""

    loss_type: str = _option("grpo", "How tokens are clipped and averaged; see TRL.")
    leave_one_out: bool = _option(False, "Compare a reward with the mean of the group's others.")


@dataclass
class GSPOConfig(GRPOConfig):
    """GSPO's ratio per sequence, clipped per sequence or per token."""

    importance_sampling_level: str = _option("sequence", '"sequence" or "sequence_token".')
    epsilon: float = _option(3e-4, "How far the ratio may fall below 1.")
    epsilon_high: float | None = _option(4e-4, "How far the ratio may rise above 1.")


@dataclass
class CISPOConfig(GRPOConfig):
    """CISPO's capped weight per token; a capped token keeps its gradient."""

    loss_type: str = _option("cispo", "How tokens are weighted and averaged.")
    epsilon_high: float | None = _option(
        1.28, "The cap of the ratio itself, >= 1; headloss.cispo takes its distance from 1."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        cap = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if cap < 1:
            raise ValueError(
                f"epsilon_high: got {cap}, want the cap of the ratio itself, >= 1, as TRL has it "
                "(1.28 where headloss.cispo takes the distance from 1, 0.28)"
            )


@dataclass
class PPOConfig(RLConfig):
    """PPO's critic on the backbone; `beta` weighs the KL from the reference in the reward."""

    loss_type: str = _option("dapo", "The policy loss is PPO's; this names its denominator.")
    dual_clip: float | None = _option(None, "Bound of the loss of a negative advantage, > 1.")
    gamma: float = _option(1.0, "Discount.")
    lam: float = _option(0.95, "Lambda of generalised advantage estimation.")
    value_coef: float = _option(0.1, "Weight of the value loss.")
    value_clip: float | None = _option(0.2, "How far a value may move from its old one.")


@dataclass
class REINFORCEConfig(RLConfig):
    """REINFORCE's normalised returns; `beta` weighs the KL from the reference in the reward."""

    loss_type: str = _option("dapo", "The policy loss is -A log p; this names its denominator.")
    gamma: float = _option(1.0, "Discount.")
