"""Masks of the tokens on which trainer and sampler differ most (M2PO), as a modifier of a term and
as a batch field.

T scored tokens; m_t = (old_t - sampling_t)^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..batch.batch import Batch
from ..statistics.metrics import Observed
from ..statistics.softmax import Statistics
from .arguments import flags, naming, positive, with_floats
from .modifiers import Modifier, not_none, sampler_mismatch
from .rejection import field_of

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch


@dataclass(frozen=True, kw_only=True)
class _SecondMoment:
    threshold: float
    live: bool

    def moments(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        """Return the squared mismatch m = (old - sampling)^2 of each token, [T]."""
        return sampler_mismatch(stats, batch, self.live).square()

    def kept(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        """Return [T] bool, True at kept tokens, computed without a synchronisation of host and
        device."""
        moments = self.moments(stats, batch).double()
        if batch.live is not None:  # unscored tokens sort last
            moments = moments.where(batch.live, torch.inf)
        ordered, order = moments.sort(stable=True)
        number = torch.arange(1, len(order) + 1, device=order.device)
        # The mean of the n smallest squared log-ratios rises with n. Binary search, which sets the
        # bits of n from the highest down, finds the largest n for which the mean of the n smallest
        # squared log-ratios is below the threshold.
        count, step = number.new_zeros(()), 1 << len(order).bit_length()
        while step := step // 2:
            more = count + step
            mean = ordered.where(number <= more, 0).sum() / more
            count = torch.where((more <= len(order)) & (mean < self.threshold), more, count)
        kept = number <= count.clamp_min(1)
        return torch.empty_like(kept).scatter_(0, order, kept)

    def factor(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        return self.kept(stats, batch).to(batch.sampling_logps.dtype)

    def observe(self, stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
        moments, kept = self.moments(stats, batch), self.kept(stats, batch)
        return {
            "second_moment": Observed(moments),
            "second_moment_kept": Observed(moments, where=kept),
            "second_moment_dropped": Observed((~kept).to(moments.dtype)),
        }


@with_floats
def second_moment_masked(threshold: float = 0.04, *, live: bool = False) -> Modifier:
    """Mask that drops the tokens of largest trainer-sampler mismatch until the mean is low enough.

        0 for the n tokens of largest m = (old - sampling)^2, else 1; n is the smallest number for which the mean m of the other tokens is below threshold

    Zheng et al. 2025 (M2PO), arXiv:2510.01161, with threshold 0.04, live=True and an unclipped
    ratio; the authors' code derives clip bounds from the threshold instead. If even the smallest
    squared mismatch (old - sampling)^2 is not below threshold, all tokens but the token of smallest
    mismatch are dropped. The mean of (old - sampling)^2 is taken over the tokens of one call on one
    rank. A NaN log-prob of the sampler counts as no mismatch. `second_moment_masked` leaves the
    denominator of the reduction unchanged; `second_moment_mask` counts only the kept tokens in the
    denominator.

    Args:
        threshold: upper bound of the mean of (old - sampling)^2 over the kept tokens, > 0.
        live: use the trained policy's current log-probs in place of the old log-probs.

    Inputs: old_logps, sampling_logps. Metrics: second_moment (the mean squared mismatch of all
    tokens), second_moment_kept (the mean squared mismatch of the kept tokens),
    second_moment_dropped (the fraction of tokens dropped).
    """  # noqa: E501 (an equation is one line)
    with naming("second_moment_masked"):
        made = _made(threshold, live)
    return Modifier(
        name="second_moment_masked",
        factor=made.factor,
        scope="batch",
        observe=made.observe,
        options=(("threshold", threshold), *not_none(live=live)),
    )


def _made(threshold: float, live: bool = False) -> _SecondMoment:
    positive(threshold=threshold)
    flags(live=live)
    return _SecondMoment(threshold=threshold, live=live)


@with_floats
def second_moment_mask(batch: Batch, *, threshold: float = 0.04) -> Tensor:
    """Return the mask of the modifier `.second_moment_masked` as a tensor, to be used as a batch
    field.

    If the mask is the batch field of `.where(field)`, the loss's denominator counts only the tokens
    that the mask keeps, as in AReaL.

        kept = hl.second_moment_mask(batch, threshold=0.04)
        out = hl.head_loss(hidden, head, batch.with_fields(kept=kept), hl.grpo().where("kept"))

    Args:
        batch: a batch with old_logps and sampling_logps; the tokens of this rank are compared.
        threshold: as in `second_moment_masked`.

    Returns:
        Tensor: [..] bool in the targets' shape, False at unscored positions.

    Raises:
        ValueError, TypeError: for a wrong option or a missing field.
    """
    with naming("second_moment_mask"):
        made = _made(threshold)
    return field_of("second_moment_mask", batch, made.factor)
