"""verl's Megatron engine with hidden states where its logits processor had logits: packed tokens
and padded rows, a temperature per sample, multi-token prediction, a teacher's top k.

b rows of s positions, this rank's under context parallelism ([1, N] where packed), K ids of each.
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

DOOR = "_headloss_door"  # of an engine whose models end in headloss


def enable_fused_kernels(self: Any) -> None:
    """In place of `MegatronEngine._maybe_enable_fused_kernels`: verl's fused forward stays off, and
    its usual one gets hidden states."""
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
    logits: Tensor,  # [b, s / tp, H] hidden states
    label: Tensor,  # [b, s], shifted
    temperature: Tensor,  # [b, s], 0 at padding
    **settings: Any,
) -> dict[str, Tensor]:
    """In place of `_lm_head_logits_processor`: [b, s] each, 0 at padding."""
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
    """verl's `compute_forward_kl_topk` under Megatron, whose masses are those after the clamp:
    sum over the teacher's k of p (log p - log q), [b, s]."""
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
