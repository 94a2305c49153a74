"""Divergences from a teacher's stored top k, from log-probs of these outcomes and of the rest.

T scored tokens, K stored outcomes.
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

NOISE = 4  # times eps: 1 - sum of 512 probabilities, from a log-softmax, was off by 3.3 at most


def divergence_of_stored(
    logps: Tensor, batch: PackedBatch, measure: Measure, tail: str, wide: torch.dtype
) -> Tensor:
    """[T] of the teacher's K outcomes and the `tail` from the student's log-probs of these columns
    and of the rest [T, K + 1], with the tail "sampled" [T, K + 2], the target before the rest; in
    `wide`, the dtype of statistics."""
    empty = batch.teacher_topk_ids < 0
    log_q = batch.teacher_topk_logps.double().masked_fill(empty, FLOOR).clamp_min(FLOOR)
    log_p = logps.double()
    if tail == "bucket":
        log_q, least = torch.cat([log_q, log_tail(log_q)], 1), torch.full_like(log_p, FLOOR)
        # A teacher's rest is 1 - sum, and unknown below what its log-probs were rounded by: then
        # both sides have a rounding error's mass at least, as they have where no token is outside.
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
    if tail == "generalized" and measure.kind != "js":  # of which the masses cancel
        more = log_q.exp().sum(1) - log_p.exp().sum(1)
        value = value + (more if measure.kind == "reverse_kl" else -more)
    if tail == "clamped":
        value = value.clamp_min(0)
    if tail == "sampled":
        value = value + of_target(logps, batch)
    return value.to(wide)


def outside(batch: PackedBatch) -> Tensor:
    """Where the target is not stored, [T] bool."""
    return (batch.teacher_topk_ids != batch.targets.unsqueeze(1)).all(1)


def of_target(logps: Tensor, batch: PackedBatch) -> Tensor:
    """What stands for the rest where the target is of it, [T]; `logps` have the target's before the
    rest's."""
    beyond = outside(batch)
    log_p = torch.where(beyond, logps[:, -2].double(), 0).clamp_min(FLOOR)
    log_q = batch.teacher_logps.double().clamp_min(FLOOR)
    return torch.where(beyond, (1 + log_p - log_q).detach() * log_p, 0)


def log_tail(log_p: Tensor) -> Tensor:
    """log(1 - sum exp(log_p)) over the last dimension, [.., K] to [.., 1]: the mass of the rest.

    At least the rounding error of a sum of probabilities in this dtype, so that it stays finite.
    """
    least = torch.finfo(log_p.dtype).eps
    total = log_p.logsumexp(-1, keepdim=True).clamp_max(math.log1p(-least))
    return torch.log(-torch.expm1(total))
