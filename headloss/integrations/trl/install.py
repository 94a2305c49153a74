"""headloss in TRL's other trainers: replacement of TRL's chunked log-probs and chunked divergence.

After `install()` TRL's RLOO, KTO, GRPO, SFT, DPO, async GRPO and distillation trainers get their
log-probs or divergences from headloss. `uninstall()` restores TRL's functions.

TRL still computes the losses, so that log-probs and gradients need more than one pass. headloss's
own trainers (`GRPOTrainer`, `SFTTrainer`, `DPOTrainer`) are faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl.trainer import distillation_trainer, utils

from ... import losses
from ...batch.batch import IGNORE, Batch
from ...head.head import Head
from ...head_loss import head_loss
from ...head_stats import head_stats
from ..seams import announce, watch_of
from ..shared import per
from .common import CHECKED, of_probe, probe, require
from .install_check import check_divergence, check_log_probs

SEAMS = ((utils, "_ChunkedLogProbFunction"), (distillation_trainer, "_chunked_divergence_loss"))
_replaced: list[tuple[Any, Any]] = []  # Pairs of a TRL function and headloss's replacement.


def install() -> None:
    """Replace TRL's chunked log-probs and chunked divergence in this process, until `uninstall()`.

    The replacements are set in every TRL module that has imported TRL's functions. First, TRL's
    functions are called with three rows, seven columns, a soft cap, a scale and a temperature, and
    their results compared with headloss's formula.

    Raises:
        RuntimeError: a TRL function is missing, has unexpected arguments or returns other numbers
            than headloss's formula.
    """
    if _replaced:
        return
    check()
    theirs, watch = [getattr(owner, name) for owner, name in SEAMS], watch_of("trl")
    _replaced.extend(zip(theirs, map(watch.counting, (LogProbs, divergence_loss)), strict=True))
    for function, ours in _replaced:
        _replace(function, ours)
    watch.start()
    announce("trl", CHECKED)


def check() -> str:
    """Return a text that says which TRL code was checked. RuntimeError as from `install()`."""
    for owner, name in SEAMS:
        require(owner, name)
    log_probs, divergence = (getattr(owner, name) for owner, name in SEAMS)
    check_log_probs(log_probs, LogProbs.apply)
    check_divergence(divergence, divergence_loss)
    return CHECKED


def uninstall() -> None:
    """Undo `install()`."""
    for function, ours in _replaced:
        _replace(ours, function)
    _replaced.clear()
    watch_of("trl").stop()


def _replace(before: Any, after: Any) -> None:
    """Replace a function in each imported module of TRL, under any name."""
    for module in [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "trl"]:
        for name in [name for name, value in vars(module).items() if value is before]:
            setattr(module, name, after)


def _sharded(*weights: Tensor) -> bool:
    # `ds_id` marks a parameter sharded by ZeRO-3.
    return any(hasattr(weight, "ds_id") for weight in weights)


class Regathered(torch.autograd.Function):
    """Apply the function `act` to hidden states, weight and bias of a head sharded by ZeRO-3, which
    TRL has gathered for the forward.

    The backward pass gathers the head again by TRL's own function, and runs the argument `act` (the
    function applied to hidden states, weight and bias) once more.
    """

    @staticmethod
    def forward(ctx: Any, act: Callable[..., Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.act = act
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return act(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        with utils.maybe_gather_lm_head_ctx(*tensors[1:]), torch.enable_grad():
            copies = [
                None if x is None else x.detach().requires_grad_(needed)
                for x, needed in zip(tensors, ctx.needs_input_grad[1:], strict=True)
            ]
            pairs = zip(ctx.act(*copies), grads, strict=True)
            outputs, slopes = zip(*((x, g) for x, g in pairs if g is not None), strict=True)
            leaves = [x for x in copies if x is not None and x.requires_grad]
            gradients = iter(torch.autograd.grad(outputs, leaves, slopes))
        wanted = [x is not None and x.requires_grad for x in copies]
        return None, *(next(gradients) if is_wanted else None for is_wanted in wanted)


def _call(act: Callable[..., Any], *tensors: Any) -> Any:
    return act(*tensors)


class LogProbs:
    """Replacement of `ChunkedLogProbFunction`; log-probs and entropies have a gradient."""

    @staticmethod
    def apply(
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,
        targets: Tensor,  # [N]
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[Tensor | None, ...]:
        """Return log-probs, entropies, log of the sum of p^2, mean logits and top-1 hits, [N]
        each."""

        def act(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            head = Head(weight, bias, temperature, final_logit_softcapping, logit_scale)
            stats = head_stats(hidden, head, targets)
            return stats.logp, stats.entropy

        sharded = _sharded(weight) and torch.is_grad_enabled()
        logp, entropy = (Regathered.apply if sharded else _call)(act, hidden, weight, bias)
        names = {"log_sum_sq_probs": "sum_p_squared", "mean_logits": "mean_logit"}
        names["is_top1"] = "top1"
        asked = {name: at for name, at in names.items() if name in outputs}
        found: dict[str, Tensor] = {}
        if asked:
            with torch.no_grad():
                head = Head(weight, bias, temperature, final_logit_softcapping, logit_scale)
                out = head_loss(hidden, head, Batch(targets), probe(names=tuple(asked.values())))
            found = {name: of_probe(out, at) for name, at in asked.items()}
        squares, top1 = found.get("log_sum_sq_probs"), found.get("is_top1")
        return (
            logp,
            entropy if "entropy" in outputs else None,
            None if squares is None else squares.log(),
            found.get("mean_logits"),
            None if top1 is None else top1.bool(),
        )


def divergence_loss(
    student_hidden_states: Tensor,  # The student's hidden states [B, K, H].
    teacher_hidden_states: Tensor,  # The teacher's hidden states [B, K, H'].
    student_lm_head_weight: Tensor,  # The student's head, a weight [V, H].
    teacher_lm_head_weight: Tensor,  # The teacher's head, a weight [V, H'].
    completion_mask: Tensor,  # The completion mask [B, K].
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, sum of entropies and token count, in place of TRL's student-teacher loss.

    The student-teacher loss and its gradient need one pass. The temperature divides logits after
    scale and soft cap, without a factor T^2.
    """
    if _sharded(student_lm_head_weight, teacher_lm_head_weight):
        raise ValueError(
            "headloss.integrations.trl.install: distillation with a head that ZeRO-3 shards is not "
            "supported; call uninstall()"
        )
    if any(type(w).__name__ == "DTensor" for w in (student_lm_head_weight, teacher_lm_head_weight)):
        raise ValueError(
            "headloss.integrations.trl.install: distillation with a head that FSDP2 shards is not "
            "supported; call uninstall()"
        )
    scored = completion_mask != 0
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), "js")
    teacher = Head(
        teacher_lm_head_weight.detach(),
        teacher_lm_head_bias,
        softcap=teacher_final_logit_softcapping,
        logit_scale=teacher_logit_scale,
    )
    term = losses.distillation(
        divergence=kind,  # type: ignore[arg-type]
        beta=beta if kind == "js" else 0.5,
        temperature=temperature,
        teacher_head=teacher,
    )
    if num_items_in_batch is not None:
        term = term.over(per(num_items_in_batch))
    head = Head(
        student_lm_head_weight,
        student_lm_head_bias,
        softcap=student_final_logit_softcapping,
        logit_scale=student_logit_scale,
    )
    targets = torch.zeros_like(completion_mask, dtype=torch.int64).masked_fill(~scored, IGNORE)
    batch = Batch(targets, teacher_hidden=teacher_hidden_states.detach())  # type: ignore[arg-type]
    out = head_loss(student_hidden_states, head, batch, term)
    entropies = out.entropies
    if temperature != 1.0 or entropies is None:
        with torch.no_grad():
            warm = Head(head.weight, head.bias, temperature, head.softcap, head.logit_scale)
            entropies = head_stats(student_hidden_states, warm, targets).entropy
    return out.loss, entropies.sum(), scored.sum()
