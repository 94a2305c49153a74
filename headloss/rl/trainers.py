"""Trainers: each combines an objective with an advantage estimator.

B rows, C completion columns, H hidden width. Each trainer accepts the arguments of
`trl.GRPOTrainer`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from .. import losses
from ..batch.batch import Batch
from ..batch.reduction import Totals
from ..integrations.sharding import whole_head
from ..integrations.trl import GRPOTrainer, Switches
from ..integrations.trl.common import refuse, require
from ..integrations.trl.forward import Unrounded
from ..integrations.trl.grpo_objective import completion_mask, tokens_of_the_step
from ..losses import Term
from .advantages import discounted, generalised, leave_one_out, normalised, rewards_at_tokens
from .config import CISPOConfig, GRPOConfig, GSPOConfig, PPOConfig, REINFORCEConfig, RLConfig


class _Trainer(GRPOTrainer):
    """Base class of the trainers, which sets the fused-loss switches and computes the
    advantages."""

    config: ClassVar[type[RLConfig]]
    args: Any  # an instance of `config`
    model: Any

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, **kwargs: Any):
        args = self.config() if args is None else args
        if not isinstance(args, self.config):
            raise TypeError(
                f"args: got {type(args).__name__}, want headloss.rl.{self.config.__name__}"
            )
        self.switches = Switches(
            use_fused_loss=args.use_fused_loss,
            use_fused_linear_logprobs=args.use_fused_linear_logprobs,
            cast_logprobs_to_fp32=args.cast_logprobs_to_fp32,
        )
        self.sampling_support = args.sampling_support
        seams = "_calculate_rewards", "_generate_and_score_completions"
        require(GRPOTrainer, *seams, ours=_Trainer)
        super().__init__(model=model, reward_funcs=reward_funcs, args=args, **kwargs)

    def advantages(self, batch: dict[str, Any], scores: Tensor) -> dict[str, Tensor]:
        """Return new values of batch fields, by name; "advantages" are [B] or [B, C].

        Args:
            batch: TRL's batch of a generation, with group-relative advantages [B].
            scores: [B] weighted sum of the rewards, NaN where no reward function gave a reward.
        """
        raise NotImplementedError

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        scores = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(1)
        scores[self._rewards.isnan().all(1)] = torch.nan
        return {**batch, **self.advantages(batch, scores[self._own_rows(batch)])}

    def _own_rows(self, batch: dict[str, Any]) -> slice:
        rows = len(batch["completion_ids"])
        first = self.accelerator.process_index * rows
        return slice(first, first + rows)


class GRPO(_Trainer):
    """Group relative policy optimization: Shao et al. 2024, arXiv:2402.03300."""

    config = GRPOConfig

    def advantages(self, batch: dict[str, Any], scores: Tensor) -> dict[str, Tensor]:
        advantages = batch["advantages"]
        if self.args.leave_one_out:
            training = self.model.training
            group: Any = self.num_generations if training else self.num_generations_eval
            counted = torch.where(self._rewards.isnan().all(1), torch.nan, 0.0)
            advantages = advantages * leave_one_out(counted, group)[self._own_rows(batch)]
        return {"advantages": advantages}


class GSPO(GRPO):
    """Group sequence policy optimization: Zheng et al. 2025, arXiv:2507.18071."""

    config = GSPOConfig


class CISPO(GRPO):
    """Clipped importance-sampling weights: MiniMax 2025, arXiv:2506.13585."""

    config = CISPOConfig


class _TokenRewards(_Trainer):
    """Base class of trainers with per-token advantages, whose reward includes the KL divergence
    from the reference."""

    kl_in_reward = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        instead = "use GRPO, GSPO or CISPO"
        refuse(self, multimodal_inputs=(bool(getattr(self, "_is_vlm", False)), instead))

    def _at_tokens(self, batch: dict[str, Any], scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rewards, mask), each [B, C]."""
        mask = completion_mask(batch).bool()
        kl = None
        if self.beta != 0.0:
            kl = batch["old_per_token_logps"] - batch["ref_per_token_logps"]
        return rewards_at_tokens(scores.nan_to_num(nan=0.0), mask, kl, self.beta), mask

    def _normalised(self, values: Tensor, mask: Tensor) -> Tensor:
        return normalised(values, mask, self.accelerator.num_processes > 1)

    def _old_pass(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return log-probs [B, C] of the sampling policy, and values if the model has a critic."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        columns = batch["completion_ids"].shape[1]
        labels = ids.masked_fill(attention == 0, -100)
        labels[:, :-columns] = -100
        size, support = self.args.per_device_train_batch_size, batch.get("support_ids")
        found: dict[str, list[Tensor]] = {"old_per_token_logps": [], "old_values": []}
        rows = zip(ids.split(size), attention.split(size), labels.split(size), strict=True)
        checkpointing = disable_gradient_checkpointing(
            self.model, self.args.gradient_checkpointing_kwargs
        )
        with torch.no_grad(), checkpointing, self.accelerator.autocast():
            model = Unrounded(self.model, support, columns)
            for i, a, y in rows:
                out: Any = model(input_ids=i, attention_mask=a, labels=y, fused_lm_head=True)
                found["old_per_token_logps"].append(out.log_probs[:, -columns:])
                if out.critic is not None:
                    found["old_values"].append(out.critic[:, -columns:])
        return {name: torch.cat(parts) for name, parts in found.items() if parts}


class REINFORCE(_TokenRewards):
    """The policy gradient with normalised returns: Williams 1992, doi:10.1007/BF00992696.

    Normalised returns and the KL from the reference in the reward: Hu et al. 2025 (REINFORCE++),
    arXiv:2501.03262.
    """

    config = REINFORCEConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.num_iterations != 1:
            raise ValueError(
                f"num_iterations: got {self.num_iterations}, want 1: REINFORCE has no ratio that "
                "would correct for samples of an older policy"
            )

    def policy_term(self) -> Term:
        return losses.reinforce()

    def advantages(self, batch: dict[str, Any], scores: Tensor) -> dict[str, Tensor]:
        if self.beta != 0.0 and "old_per_token_logps" not in batch:
            batch = {**batch, **self._old_pass(batch)}
        rewards, mask = self._at_tokens(batch, scores)
        returns = discounted(rewards, mask, self.args.gamma)
        return {"advantages": self._normalised(returns, mask)}


class PPO(_TokenRewards):
    """Proximal policy optimization with a critic: Schulman et al. 2017, arXiv:1707.06347.

    The critic is a linear layer on the backbone's last hidden states, `model.value_head`. The
    critic is trained and saved with the model, but is not saved with an adapter alone.
    """

    config = PPOConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.loss_type != "dapo":
            raise ValueError(f'loss_type: got {self.loss_type!r}, want "dapo"')
        model: Any = self.accelerator.unwrap_model(self.model)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        with whole_head(base):
            width = base.get_output_embeddings().weight.shape[1]
        base.value_head = torch.nn.Linear(width, 1, device=base.device)
        torch.nn.init.zeros_(base.value_head.weight)
        torch.nn.init.zeros_(base.value_head.bias)

    def policy_term(self) -> Term:
        return losses.ppo(
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            dual_clip=self.args.dual_clip,
        )

    def advantages(self, batch: dict[str, Any], scores: Tensor) -> dict[str, Tensor]:
        old = self._old_pass(batch)
        rewards, mask = self._at_tokens({**batch, **old}, scores)
        values = old["old_values"].float()
        advantages, returns = generalised(rewards, values, mask, self.args.gamma, self.args.lam)
        return {"advantages": self._normalised(advantages, mask), "returns": returns, **old}

    def further_loss(self, found: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the value loss, divided by the same number of tokens as the policy loss."""
        mask, steps = completion_mask(inputs).bool(), tokens_of_the_step(self, inputs)
        batch = Batch(
            torch.where(mask, 0, -100),
            returns=inputs["returns"],
            old_values=inputs["old_values"],
            totals=Totals(steps, len(mask)),
        )
        loss = losses.value_loss(found.critic.float(), batch, clip=self.args.value_clip)
        into = self._metrics["train" if self.model.training else "eval"]
        mean = loss.detach() * steps / mask.sum().clamp(min=1)
        into["headloss/value_loss"].append(mean.item())
        return self.args.value_coef * loss + super().further_loss(found, inputs)
