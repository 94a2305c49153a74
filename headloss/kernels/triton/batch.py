"""What packing has to know of a batch, and the order that follows from it, in a launch each.

N positions, T of them scored, S segments, K values of a position. Facts start at 0, and integer
atomics give the same numbers in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Compacted, Surveyed
from .launch import Launcher, cdiv
from .records import matrix_of

BLOCK = 1024  # positions of a program


class Grid(NamedTuple):
    """N numbers as [.., inner] of any strides."""

    data: Tensor
    inner: int
    outer_stride: int
    stride: int


class Survey(NamedTuple):
    """What is read of N positions, and where the facts go."""

    targets: Grid
    ids: Grid | None  # None: all in segment 0
    facts: Tensor  # [2 + VALUES + count + 3], and a number of programs where there are several
    host: Tensor | None  # pinned memory, which takes the facts too
    scored: Tensor  # [blocks]


class Compact(NamedTuple):
    """What is read of N positions, and where the T scored ones go."""

    targets: Grid
    ids: Grid
    scored: Tensor  # [blocks]
    index: Tensor  # [T], as the next two
    found_ids: Tensor
    found_targets: Tensor
    unscored: Tensor  # [N - T]


@triton.jit
def numbers_at(grid, at, mask, other):
    """Numbers at some of the N positions."""
    place = (at // grid.inner) * grid.outer_stride + (at % grid.inner) * grid.stride
    return tl.load(grid.data + place, mask=mask, other=other)


@triton.jit
def ids_at(of, at, there, count):
    """0 for ids below 0, then one for each segment, and one for those beyond."""
    id = tl.zeros_like(at)
    if of.ids is not None:
        id = numbers_at(of.ids, at, there, 0).to(tl.int64)
    return tl.minimum(tl.maximum(id, -1), count) + 1


@triton.jit
def bins_at(of, at, there, count, ignore):
    """The bin of each position's segment, and whether it is scored."""
    id = ids_at(of, at, there, count)
    return id, there & (numbers_at(of.targets, at, there, ignore) != ignore)


@triton.jit
def clear(facts, size, BLOCK: tl.constexpr):
    """A function of its own: behind a loop Triton 3.6 no longer knows a field of 1 in a record."""
    for start in range(0, size, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        tl.store(facts + slots, tl.zeros((BLOCK,), tl.int64), mask=slots < size)
    tl.debug_barrier()


@triton.jit
def tell(facts, host, size, BLOCK: tl.constexpr):
    """Past the caches: other multiprocessors have added to these."""
    for start in range(0, size, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        found = tl.load(facts + slots, mask=slots < size, volatile=True)
        tl.store(host + slots, found, mask=slots < size)


@triton.jit(do_not_specialize=["ignore"])
def survey_kernel(
    of, n, count, ignore, VALUES: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    facts = of.facts
    if ALONE:  # nobody else has set the facts to 0
        clear(facts, count + VALUES + 5, BLOCK)
    target = numbers_at(of.targets, at, inside, ignore).to(tl.int64)
    live = inside & (target != ignore)
    real = tl.where(live, target, 0)
    tl.atomic_min(facts + 1, tl.min(real, 0))
    tl.atomic_max(facts + 2, tl.max(real, 0))
    tl.store(of.scored + tl.program_id(0), tl.sum(live.to(tl.int32), 0))
    bins = facts + 2 + VALUES

    # Neighbours are found by reading again: they are in the cache.
    has_before, has_after = inside & (at > 0), at + 1 < n
    id = ids_at(of, at, inside, count)
    id_before, live_before = bins_at(of, tl.maximum(at - 1, 0), has_before, count, ignore)
    id_after, live_after = bins_at(of, tl.minimum(at + 1, n - 1), has_after, count, ignore)
    descents = tl.sum((has_before & (id < id_before)).to(tl.int64), 0)
    if descents > 0:
        tl.atomic_add(facts, descents)

    # A run of positions in one bin counts at its two ends.
    out = count + 2
    bin = tl.where(live, id, out)
    bin_before = tl.where(live_before, id_before, out)
    bin_after = tl.where(live_after, id_after, out)
    lane = tl.arange(0, BLOCK)
    begins = inside & ((lane == 0) | (has_before == 0) | (bin != bin_before))
    ends = inside & ((lane == BLOCK - 1) | (has_after == 0) | (bin != bin_after))
    tl.atomic_add(bins + bin, -lane.to(tl.int64), mask=begins & (ends == 0))
    tl.atomic_add(bins + bin, (lane + 1).to(tl.int64), mask=ends & (begins == 0))
    tl.atomic_add(bins + bin, tl.full((BLOCK,), 1, tl.int64), mask=begins & ends)
    if of.host is not None:
        tl.debug_barrier()
        size, before = count + VALUES + 5, 0
        if not ALONE:  # the program that is done last sees what all have added
            before = tl.atomic_add(facts + size, 1).to(tl.int32)
        if before == tl.num_programs(0) - 1:
            tell(facts, of.host, size, BLOCK)


@triton.jit(do_not_specialize=["fact", "ignore"])
def largest_kernel(
    targets,  # Grid
    values,  # Matrix [N, K]
    k, facts,
    fact,  # the place of this one
    n, ignore, BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = (at < n) & (numbers_at(targets, at, at < n, ignore) != ignore)
    largest = tl.zeros((BLOCK,), tl.int64)
    for i in range(k):
        value = tl.load(values.data + at * values.stride + i, mask=live, other=0)
        largest = tl.maximum(largest, value)
    tl.atomic_max(facts + fact, tl.max(largest, 0))


@triton.jit(do_not_specialize=["ignore"])
def compact_kernel(of, n, ignore, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    # Before the loop: behind one, Triton 3.6 no longer knows a field of 1 in a record of a record.
    target = numbers_at(of.targets, at, inside, ignore).to(tl.int64)
    live = inside & (target != ignore)
    id = numbers_at(of.ids, at, live, 0).to(tl.int64)
    found = 0
    for start in range(0, program, BLOCK):
        block = start + tl.arange(0, BLOCK)
        found += tl.sum(tl.load(of.scored + block, mask=block < program, other=0), 0)
    rank = found + tl.cumsum(live.to(tl.int32), 0) - 1  # of the last scored one up to here
    tl.store(of.index + rank, at, mask=live)
    tl.store(of.found_ids + rank, id, mask=live)
    tl.store(of.found_targets + rank, target, mask=live)
    tl.store(of.unscored + (at - rank - 1), at, mask=inside & (live == 0))


launch_survey = Launcher(survey_kernel)
launch_largest = Launcher(largest_kernel)
launch_compact = Launcher(compact_kernel)


def grid_of(values: Tensor) -> Grid:
    """Of one or two dimensions; of more, a flat copy."""
    if values.dim() == 2:
        return Grid(values, max(1, values.shape[1]), *values.stride())
    if values.dim() != 1:
        values = values.reshape(-1)
    return Grid(values, max(1, values.shape[0]), 0, values.stride(0))


def survey(
    targets: Tensor, ids: Tensor | None, count: int, ignore: int, *,
    id_fields: Sequence[Tensor] = (), host: Tensor | None = None,
) -> Surveyed:  # fmt: skip
    n, values = targets.numel(), 1 + len(id_fields)
    size, blocks = 2 + values + count + 3, cdiv(n, BLOCK)
    if 0 < n <= BLOCK:  # one program sets them to 0 itself
        facts = targets.new_empty(size, dtype=torch.int64)
    else:
        facts = targets.new_zeros(size + 1, dtype=torch.int64)[:size]
    scored = targets.new_empty(blocks, dtype=torch.int32)
    if not n and host is not None:
        host.zero_()
    if n:
        of_ids = None if ids is None else grid_of(ids)
        of = Survey(grid_of(targets), of_ids, facts, host, scored)
        constants = {"VALUES": values, "BLOCK": BLOCK, "ALONE": n <= BLOCK}
        launch_survey(blocks, of, n, count, ignore, **constants)
        for i, field in enumerate(id_fields):
            rows = matrix_of(field if field.stride(1) == 1 else field.contiguous())
            given = (of.targets, rows, field.shape[1], facts, 3 + i, n, ignore)
            launch_largest(cdiv(n, 128), *given, BLOCK=128)
    return Surveyed(facts, scored)


def compact(targets: Tensor, ids: Tensor, ignore: int, scored: Tensor, count: int) -> Compacted:
    n = targets.numel()
    found = ids.new_empty(3, count, dtype=torch.int64).unbind(0)
    unscored = ids.new_empty(n - count, dtype=torch.int64)
    if n:
        of = Compact(grid_of(targets), grid_of(ids), scored, *found, unscored)
        launch_compact(len(scored), of, n, ignore, BLOCK=BLOCK)
    return Compacted(*found, unscored)
