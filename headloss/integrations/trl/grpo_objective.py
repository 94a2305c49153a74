"""TRL's GRPO settings as an objective of headloss.

B rows, C completion columns. TRL's GRPO settings are attributes of the trainer, with TRL's names.
The loss equals TRL's `_compute_loss` without the routers' auxiliary loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from ... import losses
from ...batch.batch import CURRENT, IGNORE, Batch
from ...batch.reduction import Reduction, Totals, fixed_length, sequence_mean, sequence_sum
from ...losses import Objective, Term, term
from ...losses.importance import LEVELS
from ...losses.modifiers import top_entropy
from ..shared import per, raw_cispo
from .support import pairs

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
# Loss types whose sum over tokens is divided by the number of tokens in the optimizer step.
OVER_THE_STEP = ("cispo", "dapo", "vespo")


def check_settings(trainer: Any) -> None:
    """Raise ValueError for a TRL setting that headloss has no objective for."""
    for name, value, known in (
        ("loss_type", trainer.args.loss_type, LOSS_TYPES),
        ("importance_sampling_level", trainer.args.importance_sampling_level, tuple(LEVELS)),
    ):
        if value not in known:
            raise ValueError(f"{name}: got {value!r}, want one of {known}")


def completion_mask(inputs: dict[str, Any]) -> Tensor:
    """Return the mask [B, C]: 1 where a token was sampled and is scored."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def make_batch(trainer: Any, inputs: dict[str, Any]) -> Batch:
    """Return the batch [B, C] for the objective of `make_objective`."""
    advantages = inputs["advantages"]
    if advantages.dim() == 2 and trainer.args.importance_sampling_level == "sequence":
        raise ValueError(
            f"advantages: got shape {tuple(advantages.shape)} with importance_sampling_level="
            f'"sequence", want ({len(advantages)},), or the level "sequence_token"'
        )
    scored = completion_mask(inputs).bool()
    fields: dict[str, Tensor] = {}
    if trainer.beta != 0.0:
        fields["ref_logps"] = inputs["ref_per_token_logps"]
    if trainer.off_policy_mask_threshold is not None and "sampling_per_token_logps" in inputs:
        fields["sampling_logps"] = inputs["sampling_per_token_logps"]
    if _corrects(trainer):
        ratio = inputs["importance_sampling_ratio"]
        fields["importance_sampling_ratio"] = ratio.squeeze(1) if ratio.shape[1] == 1 else ratio
    elif trainer.loss_type == "vespo" and "sampling_logps" in fields:
        fields["importance_sampling_ratio"] = torch.ones_like(fields["sampling_logps"])
    old, rows = inputs.get("old_per_token_logps"), inputs.get("support_ids")
    support = None if rows is None else pairs(rows, scored.shape[1])
    return Batch(
        torch.where(scored, inputs["completion_ids"], IGNORE),
        advantages=advantages,
        old_logps=CURRENT if old is None else old,
        support_ids=support,
        totals=_totals(trainer, inputs),
        **fields,  # type: ignore[arg-type]
    )


def make_objective(trainer: Any, inputs: dict[str, Any]) -> Objective:
    """Return the objective of policy, reference and entropy terms, each divided as in TRL.

    TRL's means over the tokens of a micro-batch ("bnpo", the entropy) are averaged over the
    micro-batches of a step; every other mean of TRL has a total of the whole optimizer step as its
    denominator.
    """
    reduction = _reduction(trainer, inputs)
    objective = Objective.of(_modified(trainer.policy_term(), trainer).over(reduction))
    if trainer.beta != 0.0 and not trainer.kl_in_reward:
        reference = losses.kl(
            estimator="k3",
            bias_corrected=trainer.args.use_bias_correction_kl,
            importance_sampling_level=trainer.args.importance_sampling_level,
        )
        objective += trainer.beta * reference.over(reduction)
    coefficient = _entropy_coefficient(trainer)
    if coefficient:
        objective -= coefficient * _entropy(trainer, inputs)
    return objective


def policy_term(trainer: Any) -> Term:
    """Return the term of a TRL loss type; `make_objective` sets the term's reduction."""
    args, kind = trainer.args, trainer.loss_type
    level = args.importance_sampling_level
    if kind in CLIPPED:
        return getattr(losses, kind)(
            epsilon_low=trainer.epsilon_low,
            epsilon_high=trainer.epsilon_high,
            delta=args.delta,
            importance_sampling_level=level,
        )
    if kind == "cispo":
        return raw_cispo(trainer.epsilon_high, level)
    if kind == "sapo":
        return losses.sapo(
            temperature_pos=args.sapo_temperature_pos,
            temperature_neg=args.sapo_temperature_neg,
            importance_sampling_level=level,
        )
    return losses.vespo(
        k_pos=args.vespo_k_pos,
        lambda_pos=args.vespo_lambda_pos,
        k_neg=args.vespo_k_neg,
        lambda_neg=args.vespo_lambda_neg,
    )


def _corrects(trainer: Any) -> bool:
    return trainer.use_vllm and trainer.vllm_importance_sampling_correction


def _modified(policy: Term, trainer: Any) -> Term:
    if trainer.off_policy_mask_threshold is not None:
        policy = policy.off_policy_masked(trainer.off_policy_mask_threshold)
    if trainer.top_entropy_quantile < 1.0:
        policy = policy.top_entropy(quantile=trainer.top_entropy_quantile, group=_group(trainer))
    # The vespo loss already includes vLLM's importance ratio in its weight.
    if _corrects(trainer) and trainer.loss_type != "vespo":
        policy = policy.weighted("importance_sampling_ratio")
    return policy


def _group(trainer: Any) -> Any:
    return distributed.group.WORLD if trainer.accelerator.num_processes > 1 else None


def tokens_of_the_step(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    """Return a rank's share [] of the tokens of an optimizer step.

    `num_items_in_batch` of TRL counts the tokens of a whole generation, on all ranks.
    """
    count = inputs["num_items_in_batch"].clamp(min=1) / trainer.accelerator.num_processes
    if not trainer.model.training:
        return count
    return count * _parts(trainer) / trainer.args.steps_per_generation


def _parts(trainer: Any) -> int:
    """Return the number of micro-batches in a step."""
    return trainer.current_gradient_accumulation_steps if trainer.model.training else 1


def _totals(trainer: Any, inputs: dict[str, Any]) -> Totals | None:
    """Return this rank's part of an optimizer step's totals (numbers of tokens and rows), the
    denominators of terms that a user adds; None in an evaluation, which has no optimizer step.

    The number of rows is one micro-batch's rows times the number of micro-batches, because all
    micro-batches of TRL have an equal size.
    """
    if not trainer.model.training:
        return None
    rows = len(inputs["completion_ids"])
    return Totals(tokens_of_the_step(trainer, inputs), rows * _parts(trainer))


def _of_micro_batch(trainer: Any, inputs: dict[str, Any]) -> Reduction:
    """Return the mean over a micro-batch's tokens, averaged over the micro-batches of a step."""
    return per(completion_mask(inputs).sum().clamp(min=1) * _parts(trainer))


def _reduction(trainer: Any, inputs: dict[str, Any]) -> Reduction:
    kind = trainer.loss_type
    if kind in OVER_THE_STEP:
        return per(tokens_of_the_step(trainer, inputs))
    return {
        "grpo": sequence_mean,
        "sapo": sequence_mean,
        "bnpo": _of_micro_batch(trainer, inputs),
        "luspo": sequence_sum,
        "dr_grpo": fixed_length(trainer.max_completion_length),
    }[kind]


# ---------------------------------------------------------------------- entropy


def _entropy_coefficient(trainer: Any) -> float:
    """Return the entropy coefficient of this step; TRL's controller changes the
    coefficient at the end of a step."""
    if not trainer._entropy_bonus_enabled:
        return 0.0
    over = trainer._last_world_entropy > getattr(trainer.args, "entropy_target", 0.0)
    return 0.0 if trainer.use_adaptive_entropy and over else trainer.entropy_coef


def _entropy(trainer: Any, inputs: dict[str, Any]) -> Term:
    """Return the mean entropy over the policy term's tokens in this micro-batch."""
    if trainer.top_entropy_quantile == 1.0:
        return losses.entropy().over(_of_micro_batch(trainer, inputs))
    kept = top_entropy(quantile=trainer.top_entropy_quantile, group=_group(trainer))

    def entropy(stats, batch):
        factor = kept.factor(stats, batch)
        return stats.entropy * factor / factor.sum().clamp_min(1)

    return term(entropy, scope="batch", reduction=per(_parts(trainer)))()
