"""verl's Megatron engine with hidden states passed to the logits processor in place of logits.

Packed tokens, padded rows, a temperature per sample, multi-token prediction and distillation from a
teacher's top k are supported.

b rows of s positions of this context-parallel rank ([1, N] if packed), K teacher ids per token.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine

from ...batch.batch import IGNORE
from ...options import Options
from ..megatron_hidden import Door, hand_on
from ..seams import Seams
from ..shared import refuse
from .asked import DIVERGENCE, asks
from .teacher import distillation_of

# Name of the attribute that `enable_fused_kernels` sets on verl's Megatron engines.
DOOR = "_headloss_door"


def enable_fused_kernels(self: Any) -> None:
    """Switch verl's fused forward off, and let the models return hidden states.

    Replaces `MegatronEngine._maybe_enable_fused_kernels`.
    """
    if self.is_value_model or not asks(self.model_config):
        SEAMS.theirs[ENGINE, "_maybe_enable_fused_kernels"](self)
        return
    self.engine_config.use_fused_kernels = False
    options = dict(self.model_config.fused_kernel_options)
    options.pop("impl_backend")
    doors = [hand_on(module, Options(**options)) for module in self.module]
    setattr(self, DOOR, next((door for door in doors if door is not None), None))


def process(
    self: Any,
    logits: Tensor,  # [b, s / tp, H], hidden states.
    label: Tensor,  # The shifted labels [b, s].
    temperature: Tensor,  # The temperature of each position, [b, s]; 0 at padding.
    **settings: Any,
) -> dict[str, Tensor]:
    """Return log-probs, entropies and distillation losses, [b, s] each, 0 at padding.

    Replaces `_lm_head_logits_processor`.
    """
    if (door := getattr(self, DOOR, None)) is None:
        theirs = SEAMS.theirs[LM_HEAD, "_lm_head_logits_processor"]
        return theirs(self, logits, label, temperature, **settings)
    return _values(door, logits, label, temperature, **settings)


def _values(
    door: Door,
    hidden: Tensor,
    label: Tensor,
    temperature: Tensor,
    *,
    calculate_sum_pi_squared: bool,
    calculate_entropy: bool,
    distillation_use_topk: bool,
    distillation_only: bool,
    logits_processor_func: Any,
    batch: Any,
    data_format: str,
) -> dict[str, Tensor]:
    refuse("use_fused_kernels=False", calculate_sum_pi_squared=calculate_sum_pi_squared)
    wanted = {
        "logp": not distillation_only,
        "entropy": calculate_entropy,
        "candidate_logps": distillation_use_topk,
    }
    fields, teacher, floor = {}, None, None
    if distillation_use_topk:
        if (settings := distillation_of(logits_processor_func)) is None:
            raise ValueError(
                "impl_backend: got top-k distillation with another loss function, want verl's "
                "distillation_ppo_loss; or use_fused_kernels=False"
            )
        whole = settings.loss_mode.startswith(DIVERGENCE)
        refuse("the FSDP engine", **{f"{settings.loss_mode} under Megatron": whole})
        floor = settings.log_prob_min_clamp
        pack = preprocess_thd_engine if data_format == "thd" else preprocess_bshd_engine
        names = ("teacher_ids", "teacher_logprobs")
        ids, teacher = (pack(batch[name], pre_process=True)[0] for name in names)
        fields["candidate_ids"] = ids.long()
    stats = door.stats(
        hidden,
        label.long().masked_fill(temperature <= 0, IGNORE),
        temperature.clamp_min(1e-8),
        gradients=tuple(name for name, on in wanted.items() if on),
        **fields,
    )
    values = {"log_probs": stats.logp} if wanted["logp"] else {}
    if calculate_entropy:
        values["entropy"] = stats.entropy
    if teacher is not None:
        values |= _forward_kl(stats.candidate_logps, teacher, floor)
    return values


def _forward_kl(log_q: Any, log_p: Tensor, floor: float | None) -> dict[str, Tensor]:
    """Return verl's top-k forward KL and the two models' masses of the top k, [b, s] each.

    The loss is sum p (log p - log q) over the teacher's k ids. As in `compute_forward_kl_topk`
    under Megatron, the returned mass of the k ids is a sum of clamped probabilities.
    """
    log_p = log_p.float()
    if floor is not None:
        log_q, log_p = log_q.clamp_min(floor), log_p.clamp_min(floor)
    return {
        "distillation_losses": (log_p.exp() * (log_p - log_q)).sum(-1),
        "student_mass": log_q.detach().exp().sum(-1),
        "teacher_mass": log_p.exp().sum(-1),
    }


ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"
LM_HEAD = f"{ENGINE}WithLMHead"
SEAMS = Seams(
    {
        (ENGINE, "_maybe_enable_fused_kernels"): enable_fused_kernels,
        (LM_HEAD, "_lm_head_logits_processor"): process,
    },
    "verl",
)
