"""Divergences from a teacher's stored top-k log-probs and the probability mass outside of the top
k.

T scored tokens, K ids that the teacher stores per token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..statistics.divergence import Measure, phi
from ..statistics.softmax import FLOOR

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

# bound of the rounding error of (1 - sum of 512 softmax probabilities), in units of the dtype's
# epsilon; the largest measured error is 3.3
NOISE = 4


def divergence_of_stored(
    logps: Tensor, batch: PackedBatch, measure: Measure, tail: str, wide: torch.dtype
) -> Tensor:
    """Return the divergence [T], of dtype `wide`, over the teacher's K stored ids and the mass
    outside the K ids; the option `tail` says how the mass is treated.

    Args:
        logps: the student's log-probs [T, K + 1]: K columns for the teacher's K stored ids, and one
            column for the log of the student's probability mass outside the K ids. If `tail` is
            "sampled", `logps` is [T, K + 2], and the last column but one is the student's log-prob
            of the target.
    """
    empty = batch.teacher_topk_ids < 0
    log_q = batch.teacher_topk_logps.double().masked_fill(empty, FLOOR).clamp_min(FLOOR)
    log_p = logps.double()
    if tail == "bucket":
        log_q, least = torch.cat([log_q, log_tail(log_q)], 1), torch.full_like(log_p, FLOOR)
        # The probability mass outside the teacher's K stored ids, 1 - sum of K probabilities, is
        # only rounding error if it is below the machine epsilon; the logs of the teacher's and of
        # the student's mass outside the ids are therefore raised to at least log(epsilon).
        dtypes = [t for t in (wide, batch.teacher_topk_logps.dtype) if t.is_floating_point]
        noise = NOISE * max(torch.finfo(t).eps for t in dtypes)
        unknown = (log_q[:, -1] <= math.log(noise)) | log_p[:, -1].isneginf()
        least[:, -1].masked_fill_(unknown, math.log(torch.finfo(wide).eps))
    else:
        log_p = log_p[:, : empty.shape[1]].masked_fill(empty, FLOOR)
        least = torch.full_like(log_q[:1], FLOOR)
    if tail == "renormalized":
        log_q, log_p = log_q.log_softmax(1), log_p.log_softmax(1)
    log_q, log_p = log_q.clamp_min(least), log_p.clamp_min(least)
    value, _ = phi(log_q, log_p, measure)
    # "js" needs no correction by sum(q) - sum(p): the corrections of its two KL divergences cancel
    # out.
    if tail == "generalized" and measure.kind != "js":
        more = log_q.exp().sum(1) - log_p.exp().sum(1)
        value = value + (more if measure.kind == "reverse_kl" else -more)
    if tail == "clamped":
        value = value.clamp_min(0)
    if tail == "sampled":
        value = value + of_target(logps, batch)
    return value.to(wide)


def outside(batch: PackedBatch) -> Tensor:
    """Return [T] bool: tokens whose target is not among the teacher's stored top-k ids."""
    return (batch.teacher_topk_ids != batch.targets.unsqueeze(1)).all(1)


def of_target(logps: Tensor, batch: PackedBatch) -> Tensor:
    """Return the summand [T] that `hl.distillation(tail="sampled")` adds to the loss at targets
    outside the teacher's stored top k; 0 at targets in the top k.

    The argument `logps` holds the student's log-probs; its last two columns are the log-prob of the
    target and the log of the probability mass outside the teacher's stored top k.
    """
    beyond = outside(batch)
    log_p = torch.where(beyond, logps[:, -2].double(), 0).clamp_min(FLOOR)
    log_q = batch.teacher_logps.double().clamp_min(FLOOR)
    return torch.where(beyond, (1 + log_p - log_q).detach() * log_p, 0)


def log_tail(log_p: Tensor) -> Tensor:
    """Return log(1 - sum exp(log_p)) over the last dimension, [.., K] to [.., 1].

    The value 1 - sum exp(log_p) is at least the dtype's epsilon, so that its log stays finite.
    """
    least = torch.finfo(log_p.dtype).eps
    total = log_p.logsumexp(-1, keepdim=True).clamp_max(math.log1p(-least))
    return torch.log(-torch.expm1(total))
