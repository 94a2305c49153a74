"""Modifiers that multiply each token's loss by a factor without gradient: a correction for the
sampler's mismatch, and masks.

T scored tokens, S segments. A modifier's factor multiplies the loss of each token and leaves the
denominator of the reduction unchanged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..collectives import check_group, together
from ..statistics.metrics import Max, Observed
from ..statistics.softmax import Statistics
from .arguments import (
    bounds,
    call_text,
    flags,
    naming,
    non_negative,
    number,
    one_of,
    with_floats,
)
from .importance import bounded, bounded_exp
from .scope import TRACING, Per, Scope

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..batch.packing import PackedBatch

NO_WEIGHT = 1e-8  # do not divide by a mean importance weight of at most NO_WEIGHT
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


Factor = Callable[[Statistics, "PackedBatch"], Tensor]  # [T], without a gradient


def _nothing(stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Modifier:
    """A per-token `factor` on the losses of a term, with the metrics that `observe` reports.

    `options` holds the arguments of the method call that added the modifier to a term, e.g. of
    `term.corrected(...)`.
    """

    name: str
    factor: Factor
    scope: Scope
    observe: Callable[[Statistics, PackedBatch], dict[str, Observed]] = _nothing
    options: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        return call_text(self.name, self.options)


def not_none(**options: Any) -> tuple[tuple[str, Any], ...]:
    """Return the options of a modifier that are neither None nor False."""
    return tuple((n, x) for n, x in options.items() if x is not None and x is not False)


# ---------------------------------------------------------------------- sampler and trainer


@dataclass(frozen=True, kw_only=True)
class _Correction:
    """Importance weight in [minimum, maximum]: per segment [S] if `sequence`, else per token."""

    sequence: bool
    mask: bool
    minimum: float
    maximum: float
    live: bool
    normalized: bool

    def weight(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        mismatch = sampler_mismatch(stats, batch, self.live)
        if self.sequence:
            mismatch = batch.segments.sum(mismatch)
        return bounded_exp(mismatch)

    def factor(self, stats: Statistics, batch: PackedBatch) -> Tensor:
        kept = bounded(self.weight(stats, batch), self.minimum, self.maximum, self.mask)
        if self.normalized:
            counted = torch.ones_like(batch.old_logps) if batch.live is None else batch.live
            if self.sequence:
                counted = batch.segments.sum(counted.to(kept.dtype)) > 0
            mean = (kept * counted).sum() / counted.sum().clamp_min(1)
            kept = kept / mean.where(mean > NO_WEIGHT, 1)
        return batch.segments.expand(kept) if self.sequence else kept

    def observe(self, stats: Statistics, batch: PackedBatch) -> dict[str, Observed]:
        weight = self.weight(stats, batch)
        per: Per = "segment" if self.sequence else "token"
        outside = ((weight < self.minimum) | (weight > self.maximum)).to(weight.dtype)
        return {
            "mismatch": Observed(weight, per=per),
            "mismatch_max": Observed(weight, Max, per=per),
            "masked" if self.mask else "truncated": Observed(outside, per=per),
        }


def sampler_mismatch(stats: Statistics, batch: PackedBatch, live: bool) -> Tensor:
    """Return log p_trainer - log p_sampler, [T]; 0 where the sampler's log-prob is NaN."""
    trainer = stats.logp.detach() if live else batch.old_logps
    return (trainer - batch.sampling_logps).nan_to_num(nan=0.0)


@with_floats
def corrected(
    mode: str = "token_truncate",
    *,
    minimum: float | None = None,
    maximum: float | None = 3.0,
    live: bool = False,
    normalized: bool = False,
) -> Modifier:
    """Importance weight of the trainer's old policy over the sampler's, truncated or masked.

        w = sg(exp(old - sampling)) of a token, or sg(exp(sum_t (old_t - sampling_t))) of a sequence, for log-probs old of the old policy and sampling of the sampler; the modes "token_truncate" and "sequence_truncate" clamp w to [min, max], the modes "token_mask" and "sequence_mask" set w to 0 outside of [min, max]

    Truncation: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl. Masks: Ling Team 2025
    (IcePop), arXiv:2510.18855. The log of the importance weight is clamped to [-20, 20], both per
    token and summed over a sequence. A token whose sampling log-prob is NaN has importance weight
    1.

    Args:
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        minimum, maximum: bounds of the importance weight w, each > 0 or None.
        live: use the trained policy's current log-probs in place of the old log-probs.
        normalized: divide by the mean of the truncated or masked weights over the tokens or
            sequences of the call; makes the term batch-scoped.

    Inputs: old_logps, sampling_logps. Metrics: mismatch, mismatch_max, truncated or masked (per
    token or per segment).
    """  # noqa: E501 (an equation is one line)
    with naming("corrected"):
        one_of(MODES, mode=mode)
        flags(live=live, normalized=normalized)
        low, high = bounds("> 0", lambda x: x > 0, minimum, maximum)
    level, action = mode.split("_")
    correction = _Correction(
        sequence=level == "sequence",
        mask=action == "mask",
        minimum=low,
        maximum=high,
        live=live,
        normalized=normalized,
    )
    scope: Scope = "segment" if correction.sequence else "token"
    return Modifier(
        name="corrected",
        factor=correction.factor,
        scope="batch" if normalized else scope,
        observe=correction.observe,
        options=(
            *not_none(mode=mode, min=minimum),
            ("max", maximum),
            *not_none(live=live, normalized=normalized),
        ),
    )


# ---------------------------------------------------------------------- dropping sequences


def _on_policy(stats: Statistics, batch: PackedBatch, *, threshold: float) -> Tensor:
    sampling = batch.sampling_logps if "sampling_logps" in batch else batch.old_logps
    drift = batch.segments.mean((sampling - stats.logp.detach()).nan_to_num(nan=0.0))
    kept = (batch.advantages >= 0) | batch.segments.expand(drift <= threshold)
    return kept.to(stats.logp.dtype)


@with_floats
def off_policy_masked(threshold: float) -> Modifier:
    """Mask of negative-advantage tokens in sequences that the policy has moved away from.

        1 where A >= 0 or mean_t(sampling_t - logp_t) <= threshold, else 0

    DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556. If all tokens of a sequence have the same
    advantage, `off_policy_masked` keeps or drops the sequence as a whole. A NaN sampling log-prob
    counts as a log-ratio of 0.

    Args:
        threshold: upper bound of a sequence's mean of sampling_logps - logps, above which its
            tokens with negative advantage are masked.

    Inputs: advantages; sampling_logps, or old_logps where the batch has none.
    """
    with naming("off_policy_masked"):
        number("a finite number", lambda x: True, threshold=threshold)
    return Modifier(
        name="off_policy_masked",
        factor=functools.partial(_on_policy, threshold=threshold),
        scope="segment",
        options=(("threshold", threshold),),
    )


# ---------------------------------------------------------------------- tokens of high entropy


def _above(stats: Statistics, batch: PackedBatch, *, threshold: float) -> Tensor:
    entropy = stats.entropy.detach()
    return (entropy >= threshold).to(entropy.dtype)


def _among_top(
    stats: Statistics, batch: PackedBatch, *, quantile: float, group: ProcessGroup | None
) -> Tensor:
    entropy = stats.entropy.detach()
    # Unscored tokens sort last as inf; `number_of` counts the scored tokens alone.
    counted = entropy if batch.live is None else torch.where(batch.live, entropy, math.inf)
    number_of = counted.new_full((), len(counted)) if batch.live is None else batch.live.sum()
    if group is not None and not TRACING.get():
        counted, number_of = _gather(counted, number_of, group)
    cut = _quantile(counted, number_of, 1 - quantile)
    return (entropy >= cut).to(entropy.dtype)


def _quantile(
    values: Tensor,  # [N] numbers; an entry inf is padding.
    count: Tensor,  # Number of entries of `values` that are not padding, a 0-dimensional tensor.
    q: float,
) -> Tensor:
    """Return the q-quantile by linear interpolation, [], without a device read; inf if empty.

    torch.quantile refuses more than 16M values.
    """
    ordered = torch.cat([values, values.new_full((1,), math.inf)]).sort().values
    last = (count.double() - 1).clamp_min(0)
    # Round the quantile's position among the sorted values, because floating-point error may move
    # an integer position below the integer.
    rank = (q * last).round(decimals=9)
    low = rank.floor()
    # Indexing by a 0-dim tensor would make the CPU wait for the GPU.
    below, above = ordered[torch.stack([low, torch.minimum(low + 1, last)]).long()].unbind()
    return torch.where(above > below, torch.lerp(below, above, (rank - low).to(below.dtype)), below)


def _gather(values: Tensor, count: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the values of all ranks, padded with inf to equal length, and the number of values
    that are not padding."""
    from torch import distributed

    own = torch.stack([count.long(), torch.full_like(count, len(values)).long()])
    sizes = own.new_empty(distributed.get_world_size(group), 2)
    what = "the entropies of all ranks"
    together(what, group, lambda: distributed.all_gather(list(sizes.unbind()), own, group=group))
    longest = int(sizes[:, 1].max())
    padded = values.new_full((longest,), math.inf)
    padded[: len(values)] = values
    gathered = values.new_empty(len(sizes), longest)
    parts = list(gathered.unbind())
    together(what, group, lambda: distributed.all_gather(parts, padded, group=group))
    return gathered.flatten(), sizes[:, 0].sum()


@with_floats
def top_entropy(
    *,
    quantile: float | None = None,
    threshold: float | None = None,
    group: ProcessGroup | None = None,
) -> Modifier:
    """Mask that keeps the tokens of highest prediction entropy.

        1 where entropy >= threshold, or >= the (1 - quantile) quantile of all scored tokens; else 0

    Wang et al. 2025, arXiv:2506.01939. The quantile interpolates linearly.

    Args:
        quantile: share of tokens to keep, in (0, 1]; makes the term batch-scoped.
        threshold: entropy in nats, >= 0; the alternative to `quantile`.
        group: process group whose ranks hold tokens of one batch. The quantile is over the
            entropies of the tokens of all ranks; before the entropies are gathered, the ranks
            exchange their numbers of tokens, so that the CPU waits once for the GPU.

    Inputs: none.
    """
    with naming("top_entropy"):
        if (quantile is None) == (threshold is None):
            raise ValueError(f"got quantile={quantile!r} and threshold={threshold!r}, want one")
        if quantile is not None:
            number("0 < quantile <= 1", lambda x: 0 < x <= 1, quantile=quantile)
            check_group("group", group)
            top = functools.partial(_among_top, quantile=quantile, group=group)
            share = (("quantile", quantile),)
            return Modifier(name="top_entropy", factor=top, scope="batch", options=share)
        assert threshold is not None
        non_negative(threshold=threshold)
        above = functools.partial(_above, threshold=threshold)
        options = (("threshold", threshold),)
        return Modifier(name="top_entropy", factor=above, scope="token", options=options)
