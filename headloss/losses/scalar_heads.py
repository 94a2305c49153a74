"""Losses of critics and reward models, whose head returns a few numbers per token.

T scored tokens, S segments, C classes. Critics and reward models have no softmax over the
vocabulary; the losses of critics and reward models are therefore plain functions, not terms of
`hl.head_loss`. Reductions (such as "token_mean") and totals work as in `hl.head_loss`, and are
exact under padding, packing, gradient accumulation and several ranks. Sums of 16-bit inputs are
computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..arguments import check_dense, check_device
from ..batch.batch import Batch
from ..batch.packing import PackedBatch, pack
from ..batch.reduction import Reduction, Totals, as_reduction
from ..batch.weights import token_weights
from .arguments import naming, non_negative, with_floats

ANY = torch.inf  # vocabulary size passed to `pack`, which accepts every target below this size


@with_floats
def value_loss(
    values: Tensor,  # [..], the targets' shape
    batch: Batch,
    *,
    clip: float | None = 0.2,
    reduction: Reduction | str = "token_mean",
) -> Tensor:
    """Squared error of a critic, whose values may move by `clip` from the old values.

        1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    Schulman et al. 2016, arXiv:1506.02438. Implementations of PPO commonly clip the critic's value
    V to a range around the old value V_old.

    Args:
        values: [..] the value V at each position, in the shape of the targets.
        batch: a batch with `returns`, and with `old_values` unless clip is None; [..] each.
        clip: largest distance of V from the old value, >= 0; None for the plain squared error.
        reduction: as for a term.

    Returns:
        Tensor: [] the loss, with a gradient to `values`.

    Raises:
        ValueError: for a wrong shape or a missing field.
    """
    _check("value_loss", "values", values, batch)
    if clip is not None:
        with naming("value_loss"):
            non_negative(clip=clip)
    found, v = _at_tokens("value_loss", "values", values, batch)
    error = (v - found.returns).square()
    if clip is not None:
        old = found.old_values
        near = torch.minimum(torch.maximum(v, old - clip), old + clip)
        error = torch.maximum(error, (near - found.returns).square())
    return _reduced(error / 2, found, batch, reduction)


@with_floats
def bradley_terry(
    rewards: Tensor,  # [..] or [S]
    batch: Batch,
    *,
    centre: float = 0.0,
) -> Tensor:
    """Reward-model loss on pairs: segment 2k is the chosen answer, 2k + 1 the rejected answer.

        -log sigmoid(R_chosen - R_rejected - margin) + centre (R_chosen + R_rejected)^2, with rewards R

    Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155. Centring: Eisenstein et al. 2023,
    arXiv:2312.09244. The loss is the mean over the pairs; a batch's totals count two segments per
    pair.

    Args:
        rewards: [S] the reward R of each segment, or [..] a reward at each position, of which the
            reward at a segment's last scored token counts. With rewards [..], a pair has loss 0 if
            either of its two answers has no scored token.
        batch: a batch, optionally with the field `margin` [S], whose values at the chosen answers
            are read.
        centre: weight of (R_chosen + R_rejected)^2, >= 0.

    Returns:
        Tensor: [] the loss, with a gradient to `rewards`.

    Raises:
        ValueError: for a wrong shape or an odd number of segments.
    """  # noqa: E501 (an equation is one line)
    _check("bradley_terry", "rewards", rewards, batch)
    with naming("bradley_terry"):
        non_negative(centre=centre)
    segments = batch.segments
    if segments.count % 2:
        raise ValueError(f"segments: got {segments.count}, want pairs: chosen 2k, rejected 2k + 1")
    rewards, there = _at_segments(rewards, batch)
    chosen, rejected = segments.split_pairs(rewards)
    margin = batch.fields.get("margin")
    lead = chosen - rejected
    if isinstance(margin, Tensor):
        lead = lead - segments.split_pairs(margin.to(lead.dtype))[0]
    loss = centre * (chosen + rejected).square() - logsigmoid(lead)
    both = torch.logical_and(*segments.split_pairs(there))
    pairs = torch.as_tensor(_totals(batch).segments, dtype=torch.float64, device=loss.device) / 2
    loss = loss.where(both, 0).sum(dtype=torch.float64) / pairs.where(pairs > 0, 1)
    return loss.to(rewards.dtype)


def classification(
    logits: Tensor,  # [.., C] or [S, C]: C classes, for each position or for each of S segments
    batch: Batch,
    *,
    reduction: Reduction | str | None = None,
) -> Tensor:
    """Cross-entropy over a few classes, per scored token or per segment.

        -log softmax(logits)[label]

    Args:
        logits: [.., C] at each position, or [S, C] per segment.
        batch: a batch with `labels`, [..] or [S] integers below C.
        reduction: as for a term; defaults to token_mean, and to sequence_mean for [S, C]. With
            logits [S, C], each token of a segment has the segment's loss.

    Returns:
        Tensor: [] the loss, with a gradient to `logits`.

    Raises:
        ValueError: for a wrong shape or a label outside the classes.
    """
    _check("classification", "logits", logits, batch)
    labels = batch.fields.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise ValueError("classification: batch.labels: want [..] or [S] integers")
    if logits.shape[:-1] != labels.shape or not logits.shape[-1]:
        raise ValueError(
            f"classification: logits: got shape {tuple(logits.shape)}, want that of batch.labels, "
            f"{tuple(labels.shape)}, and the classes"
        )
    per_token = batch.per_token("labels")
    if reduction is None:
        reduction = "token_mean" if per_token else "sequence_mean"
    found = pack(batch, ANY, _wide(logits.dtype))
    if per_token:
        flat = logits.reshape(-1, logits.shape[-1])
        rows = flat if found.index is None else flat[found.index]
    else:
        rows = logits[found.segments.ids]
    at = found.labels.long()
    if bool(((at < 0) | (at >= logits.shape[-1])).any()):
        raise ValueError(f"classification: labels: want integers in [0, {logits.shape[-1]})")
    losses = -rows.to(_wide(logits.dtype)).log_softmax(-1).gather(-1, at[:, None])[:, 0]
    return _reduced(losses, found, batch, reduction)


# ---------------------------------------------------------------------- checks and reduction


def _check(name: str, what: str, values: object, batch: object) -> None:
    """Raise TypeError unless `values` is a floating tensor and `batch` a Batch."""
    if not (
        isinstance(values, Tensor) and values.is_floating_point() and values.element_size() > 1
    ):
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name}: {what}: got {got}, want a floating tensor")
    if not isinstance(batch, Batch):
        raise TypeError(f"{name}: batch: got {type(batch).__name__}, want headloss.Batch")
    with naming(name):
        check_dense(what, values)
        check_device(what, values, batch.targets)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _at_tokens(name: str, what: str, values: Tensor, batch: Batch) -> tuple[PackedBatch, Tensor]:
    """Return the packed batch, and the elements of `values` at its T scored tokens, [T]."""
    if values.shape != batch.targets.shape:
        raise ValueError(
            f"{name}: {what}: got shape {tuple(values.shape)}, want that of the targets, "
            f"{tuple(batch.targets.shape)}"
        )
    dtype = _wide(values.dtype)
    found = pack(batch, ANY, dtype)
    flat = values.reshape(-1)
    return found, (flat if found.index is None else flat[found.index]).to(dtype)


def _at_segments(rewards: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the reward of each segment [S], and [S] bool: segments that have a reward."""
    count = batch.segments.count
    if rewards.shape == (count,) and rewards.shape != batch.targets.shape:
        return rewards.to(_wide(rewards.dtype)), torch.ones_like(rewards, dtype=torch.bool)
    found, at_tokens = _at_tokens("bradley_terry", "rewards", rewards, batch)
    lengths = found.segments.lengths
    there = lengths > 0
    last = (lengths.cumsum(0) - 1).clamp_min(0)
    padded = at_tokens if len(at_tokens) else at_tokens.new_zeros(1)
    return padded[last].where(there, 0), there


def _totals(batch: Batch) -> Totals:
    return batch.totals if batch.totals is not None else Totals.of(batch)


def _reduced(losses: Tensor, found: PackedBatch, batch: Batch, over: Reduction | str) -> Tensor:
    """Return sum_t w_t l_t, [], with the token weights w of a term of `hl.head_loss`."""
    weights = token_weights(found, _totals(batch), losses.dtype, as_reduction(over))
    return (weights * losses).sum(dtype=torch.float64).to(losses.dtype)
