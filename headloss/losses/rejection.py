"""Masks of tokens or sequences on which trainer and sampler disagree, as a modifier of a term and
as a batch field.

T scored tokens, S segments; d_t = old_t - sampling_t within [-20, 20], p = exp(old), q =
exp(sampling).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..batch.batch import Batch, Current
from ..batch.packing import packing_of
from ..statistics.metrics import Observed
from ..statistics.softmax import Statistics
from .arguments import bounds, flags, naming, one_of, with_floats
from .importance import MAX_LOG_RATIO, estimate
from .modifiers import Factor, Modifier, not_none, sampler_mismatch

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

MEASURES = ("ratio", "k2", "k3", "tv", "kl")
LEVELS = ("token", "sequence_sum", "sequence_mean", "sequence_max")
NEAR_ONE = 1e-6  # probabilities are clamped to [1e-6, 1 - 1e-6] in the KL divergence


@dataclass(frozen=True, kw_only=True)
class _Rejection:
    measure: str
    level: str
    minimum: float
    maximum: float
    live: bool

    def statistic(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        """Return the measure of the mismatch between trainer and sampler, per token [T] or per
        sequence [S]; for the measure "ratio", return the log of the ratio of trainer to sampler."""
        values = self._of_tokens(stats, batch)
        if self.level == "token":
            return values
        if self.level == "sequence_max":
            return _largest(values, batch)
        return (batch.segments.sum if self.level == "sequence_sum" else batch.segments.mean)(values)

    def _of_tokens(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        d = sampler_mismatch(stats, batch, self.live).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if self.measure == "ratio":
            return d
        if self.measure in ("k2", "k3"):
            return estimate(d, self.measure)
        sampling = batch.sampling_logps
        q = sampling.exp().nan_to_num(nan=0.5)
        p = (sampling + d).exp().nan_to_num(nan=0.5)
        if self.measure == "tv":
            return (p - q).abs()
        p, q = (x.clamp(NEAR_ONE, 1 - NEAR_ONE) for x in (p, q))
        return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()

    def kept(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        """Return [T] or [S] bool: True for tokens or sequences whose measure of the mismatch
        between trainer and sampler is between the fields `minimum` and `maximum`."""
        low, high = self.minimum, self.maximum
        if self.measure == "ratio":
            low, high = (math.log(x) if x > 0 else -math.inf for x in (low, high))
        # With "sequence_max", compare each token's ratio with the lower and the upper bound.
        of_each = self.measure == "ratio" and self.level == "sequence_max"
        values = self._of_tokens(stats, batch) if of_each else self.statistic(stats, batch)
        inside = (values >= low) & (values <= high)
        return batch.segments.sum((~inside).to(values.dtype)) == 0 if of_each else inside

    def factor(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        kept = self.kept(stats, batch).to(batch.sampling_logps.dtype)
        return kept if self.level == "token" else batch.segments.expand(kept)

    def observe(self, stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
        dropped = (~self.kept(stats, batch)).to(batch.sampling_logps.dtype)
        return {"rejected": Observed(dropped, per="token" if self.level == "token" else "segment")}


def _largest(values: Tensor, batch: PackedBatch) -> Tensor:
    """Return the largest value of each segment, [S]; 0 for an empty segment."""
    if batch.segments.group is not None:
        raise ValueError(
            "rejected: level: got 'sequence_max' with segments that run across ranks, want another"
        )
    found = values.new_full((batch.segments.count,), -math.inf)
    found = found.scatter_reduce(0, batch.segments.ids, values, "amax")
    return found.where(batch.segments.lengths > 0, 0)


@with_floats
def rejected(
    measure: str,
    *,
    level: str = "token",
    minimum: float | None = None,
    maximum: float | None = None,
    live: bool = False,
) -> Modifier:
    """Mask of the tokens or sequences on which trainer and sampler disagree too much.

        1 where min <= m <= max, else 0; the mismatch m is exp(d), d^2 / 2, exp(d) - 1 - d, |p - q| or KL(q, p); d = old - sampling, p = exp(old), q = exp(sampling)

    KL(q, p) is the KL divergence between two distributions over two outcomes (the target, and any
    other token), which give the target the probability q and p. Li et al. 2025, "When speed kills
    stability", https://richardli.xyz/rl-collapse. The log-ratio d = old - sampling is clamped to
    [-20, 20], and is 0 where the sampling log-prob is NaN. `rejected` leaves the denominator of the
    reduction unchanged; `rejection_mask` counts only the kept tokens in the denominator.

    Args:
        measure: "ratio", "k2", "k3", "tv" or "kl".
        level: "token", or one measure per sequence: the "sequence_sum", "sequence_mean" or
            "sequence_max" of the token measures. For the measure "ratio", "sequence_sum" is the
            product and "sequence_mean" the geometric mean of the token ratios, and "sequence_max"
            keeps a sequence if the ratios of all its tokens are within the bounds (SkyRL's outlier
            mask, with bounds 1e-4 and 100).
        minimum, maximum: bounds of the token's measure with level="token", else of the sequence's
            measure, each >= 0 or None.
        live: use the trained policy's current log-probs in place of the old log-probs.

    Inputs: old_logps, sampling_logps. Metrics: rejected (the fraction of tokens or of sequences
    that the mask drops).
    """  # noqa: E501 (an equation is one line)
    with naming("rejected"):
        made = _made(measure, level, minimum, maximum, live)
    return Modifier(
        name="rejected",
        factor=made.factor,
        scope="token" if level == "token" else "segment",
        observe=made.observe,
        options=not_none(measure=measure, level=level, min=minimum, max=maximum, live=live),
    )


def _made(
    measure: str, level: str, minimum: float | None, maximum: float | None, live: bool
) -> _Rejection:
    one_of(MEASURES, measure=measure)
    one_of(LEVELS, level=level)
    flags(live=live)
    if minimum is None and maximum is None:
        raise ValueError("got min=None and max=None, want one")
    low, high = bounds(">= 0", lambda x: x >= 0, minimum, maximum)
    return _Rejection(measure=measure, level=level, minimum=low, maximum=high, live=live)


@with_floats
def rejection_mask(
    batch: Batch,
    measure: str,
    *,
    level: str = "token",
    min: float | None = None,
    max: float | None = None,
) -> Tensor:
    """Return the mask of the modifier `.rejected` as a tensor, to be used as a batch field.

    If the mask is the batch field of `.where(field)`, the loss's denominator counts only the tokens
    that the mask keeps.

        kept = hl.rejection_mask(batch, "k3", level="sequence_mean", max=0.01)
        out = hl.head_loss(hidden, head, batch.with_fields(kept=kept), hl.grpo().where("kept"))

    Args:
        batch: a batch with old_logps and sampling_logps.
        measure, level, min, max: as in `rejected`.

    Returns:
        Tensor: [..] bool in the targets' shape, False at unscored positions.

    Raises:
        ValueError, TypeError: for a wrong option or a missing field.
    """
    with naming("rejection_mask"):
        made = _made(measure, level, min, max, live=False)
    return field_of("rejection_mask", batch, made.factor)


def field_of(name: str, batch: Batch, factor: Factor) -> Tensor:
    """Return [..] bool: positions whose token the modifier's function `factor` keeps; `factor`
    must read no statistics.

    Errors start with `name`, the name of the calling function.
    """
    if not isinstance(batch, Batch):
        raise TypeError(f"{name}: batch: got {type(batch).__name__}, want headloss.Batch")
    if isinstance(batch.fields.get("old_logps"), Current):
        raise ValueError(f"{name}: old_logps: got CURRENT, want the trainer's log-probs")
    packing = packing_of(batch)
    with naming(name):
        kept = factor(Statistics(), packing.view(batch, torch.float64))
    return packing.scatter(kept).bool()
