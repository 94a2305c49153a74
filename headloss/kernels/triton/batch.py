"""What packing has to know of a batch, and the order that follows from it, in a launch each.

N positions, T of them scored, S segments, K values of a position. Facts start at 0, and integer
atomics give the same numbers in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Compacted, Surveyed
from .launch import Launcher, cdiv

BLOCK = 1024  # positions of a program


@triton.jit
def value_at(values, positions, inner, outer_stride, inner_stride):
    """Element `positions` of a tensor [.., inner], flat, of any strides."""
    return values + (positions // inner) * outer_stride + (positions % inner) * inner_stride


@triton.jit
def bin_of(id, count):
    """0 for ids below 0, then one for each segment, and one for those beyond."""
    return tl.minimum(tl.maximum(id, -1), count) + 1


@triton.jit(do_not_specialize=["ignore"])
def survey_kernel(
    targets,  # [N] as [.., t_inner]
    t_inner,
    t_outer_stride,
    t_stride,
    ids,  # [N] as [.., i_inner]
    i_inner,
    i_outer_stride,
    i_stride,
    positive,  # [N] as [.., p_inner]
    p_inner,
    p_outer_stride,
    p_stride,
    facts,  # [2 + VALUES + POSITIVE + count + 3]
    scored,  # [blocks]
    n,
    count,
    ignore,
    VALUES: tl.constexpr,
    POSITIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    target = tl.load(
        value_at(targets, at, t_inner, t_outer_stride, t_stride), mask=inside, other=ignore
    ).to(tl.int64)
    live = inside & (target != ignore)
    real = tl.where(live, target, 0)
    tl.atomic_min(facts + 1, tl.min(real, 0))
    tl.atomic_max(facts + 2, tl.max(real, 0))
    tl.store(scored + tl.program_id(0), tl.sum(live.to(tl.int32), 0))
    if POSITIVE:
        place = value_at(positive, at, p_inner, p_outer_stride, p_stride)
        value = tl.load(place, mask=live, other=1.0).to(tl.float32)
        bad = live & (((value > 0) & (value < float("inf"))) == 0)
        bad = tl.sum(bad.to(tl.int64), 0)
        if bad > 0:
            tl.atomic_add(facts + 2 + VALUES, bad)

    # Neighbours are found by reading again: they are in the cache.
    before, after = at - 1, at + 1
    of_id = value_at(ids, at, i_inner, i_outer_stride, i_stride)
    id = bin_of(tl.load(of_id, mask=inside, other=0).to(tl.int64), count)
    has_before = inside & (at > 0)
    of_id = value_at(ids, tl.maximum(before, 0), i_inner, i_outer_stride, i_stride)
    id_before = bin_of(tl.load(of_id, mask=has_before, other=0).to(tl.int64), count)
    descents = tl.sum((has_before & (id < id_before)).to(tl.int64), 0)
    if descents > 0:
        tl.atomic_add(facts, descents)
    has_after = after < n
    of_id = value_at(ids, tl.minimum(after, n - 1), i_inner, i_outer_stride, i_stride)
    id_after = bin_of(tl.load(of_id, mask=has_after, other=0).to(tl.int64), count)
    place = value_at(targets, tl.maximum(before, 0), t_inner, t_outer_stride, t_stride)
    live_before = has_before & (tl.load(place, mask=has_before, other=ignore) != ignore)
    place = value_at(targets, tl.minimum(after, n - 1), t_inner, t_outer_stride, t_stride)
    live_after = has_after & (tl.load(place, mask=has_after, other=ignore) != ignore)

    # A run of positions in one bin counts at its two ends.
    out = count + 2
    bin = tl.where(live, id, out)
    bin_before = tl.where(live_before, id_before, out)
    bin_after = tl.where(live_after, id_after, out)
    lane = tl.arange(0, BLOCK)
    begins = inside & ((lane == 0) | (has_before == 0) | (bin != bin_before))
    ends = inside & ((lane == BLOCK - 1) | (has_after == 0) | (bin != bin_after))
    bins = facts + 2 + VALUES + POSITIVE
    tl.atomic_add(bins + bin, -lane.to(tl.int64), mask=begins & (ends == 0))
    tl.atomic_add(bins + bin, (lane + 1).to(tl.int64), mask=ends & (begins == 0))
    tl.atomic_add(bins + bin, tl.full((BLOCK,), 1, tl.int64), mask=begins & ends)


@triton.jit(do_not_specialize=["fact", "ignore"])
def largest_kernel(
    targets,  # [N] as [.., t_inner]
    t_inner,
    t_outer_stride,
    t_stride,
    values,  # [N, K]
    stride,
    k,
    facts,
    fact,  # the place of this one
    n,
    ignore,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = value_at(targets, at, t_inner, t_outer_stride, t_stride)
    live = (at < n) & (tl.load(place, mask=at < n, other=ignore) != ignore)
    largest = tl.zeros((BLOCK,), tl.int64)
    for i in range(k):
        largest = tl.maximum(largest, tl.load(values + at * stride + i, mask=live, other=0))
    tl.atomic_max(facts + fact, tl.max(largest, 0))


@triton.jit(do_not_specialize=["ignore"])
def compact_kernel(
    targets,  # [N] as [.., t_inner]
    t_inner,
    t_outer_stride,
    t_stride,
    ids,  # [N] as [.., i_inner]
    i_inner,
    i_outer_stride,
    i_stride,
    scored,  # [blocks]
    index,  # [T]
    found_ids,  # [T]
    found_targets,  # [T]
    unscored,  # [N - T]
    n,
    ignore,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    found = 0
    for start in range(0, program, BLOCK):
        block = start + tl.arange(0, BLOCK)
        found += tl.sum(tl.load(scored + block, mask=block < program, other=0), 0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    target = tl.load(
        value_at(targets, at, t_inner, t_outer_stride, t_stride), mask=inside, other=ignore
    ).to(tl.int64)
    live = inside & (target != ignore)
    rank = found + tl.cumsum(live.to(tl.int32), 0) - 1  # of the last scored one up to here
    of_id = value_at(ids, at, i_inner, i_outer_stride, i_stride)
    id = tl.load(of_id, mask=live, other=0).to(tl.int64)
    tl.store(index + rank, at, mask=live)
    tl.store(found_ids + rank, id, mask=live)
    tl.store(found_targets + rank, target, mask=live)
    tl.store(unscored + (at - rank - 1), at, mask=inside & (live == 0))


launch_survey = Launcher(survey_kernel)
launch_largest = Launcher(largest_kernel)
launch_compact = Launcher(compact_kernel)


def as_rows(values: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor of one or two dimensions as `value_at` takes it; of others, a flat copy."""
    if values.dim() == 2:
        return values, max(1, values.shape[1]), *values.stride()
    if values.dim() != 1:
        values = values.reshape(-1)
    return values, max(1, len(values)), 0, values.stride(0)


def survey(
    targets: Tensor,
    ids: Tensor,
    count: int,
    ignore: int,
    *,
    id_fields: Sequence[Tensor] = (),
    positive: Tensor | None = None,
) -> Surveyed:
    n, values = targets.numel(), 1 + len(id_fields)
    facts = ids.new_zeros(2 + values + (positive is not None) + count + 3, dtype=torch.int64)
    blocks = cdiv(n, BLOCK)
    scored = ids.new_empty(blocks, dtype=torch.int32)
    if n:
        given = as_rows(targets)
        other = given if positive is None else as_rows(positive)
        launch_survey(
            blocks,
            *(*given, *as_rows(ids), *other, facts, scored, n, count, ignore),
            VALUES=values,
            POSITIVE=positive is not None,
            BLOCK=BLOCK,
        )
        for i, field in enumerate(id_fields):
            rows = field if field.stride(1) == 1 else field.contiguous()
            launch_largest(
                cdiv(n, 128),
                *(*given, rows, rows.stride(0), rows.shape[1], facts, 3 + i, n, ignore),
                BLOCK=128,
            )
    return Surveyed(facts, scored)


def compact(targets: Tensor, ids: Tensor, ignore: int, scored: Tensor, count: int) -> Compacted:
    n = targets.numel()
    found = ids.new_empty(3, count, dtype=torch.int64)
    index, found_ids, found_targets = found.unbind(0)
    unscored = ids.new_empty(n - count, dtype=torch.int64)
    if n:
        launch_compact(
            len(scored),
            *(*as_rows(targets), *as_rows(ids), scored),
            *(index, found_ids, found_targets, unscored, n, ignore),
            BLOCK=BLOCK,
        )
    return Compacted(index, found_ids, found_targets, unscored)
