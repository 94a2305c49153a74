"""Both acts in Triton on logits that exist already, where they lie and in their own dtype.

T rows of the packed batch, v columns of the vocabulary starting at `first`, z = transform(raw). Row
t begins `offsets[t]` elements behind the first logit, so that padded, shifted and packed layouts
need no copy; rows that are not named are never read.

A program walks along a row once for its statistics and, where the coefficients are there, a second
time for its gradient. In one launch the second walk starts with the columns that were read last:
together the rows at work fit into the L2 cache, and DRAM sees one read and one write. A wide row is
cut into parts, one for each block of a cluster, so that a multiprocessor works on several rows and
one's memory traffic covers another's waits; the blocks meet once, between the walks.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...objective.statistics import Normalizer, Partials
from ..walk import Rows, Walk
from .cluster import open_mail
from .formulas import coefficient, coefficients, log1p, per_row
from .launch import Launcher, cdiv
from .records import (
    NOT_FOUND,
    Found,
    Four,
    LogitScaling,
    empty_partials,
    found,
    four,
    power_of_2,
    programs_on,
    scaling,
)
from .resident import Resident, resident_for
from .resident import launch as launch_resident
from .versions import has_clusters
from .walk import (
    closed_slope,
    logit_gradient,
    logits_of,
    met,
    part_partials,
    settled,
    slope_parts,
    store_partials,
    write_gradient,
)


class Shape(NamedTuple):
    """How a launch is cut: the numbers to tune on a device (benchmarks/given.py)."""

    warps: int  # of a block
    parts: int = 1  # blocks of a cluster, which share a row
    turns: int = 16  # rows of a cluster, one after another
    registers: int | None = None  # of a thread, at most


# By columns: the first row that is wide enough.
SHAPES = {
    196608: Shape(warps=8, parts=8, registers=64),
    140000: Shape(warps=8, parts=4, registers=64),
    98304: Shape(warps=16, parts=2, registers=64),
    49152: Shape(warps=8, parts=2, registers=64),
    16384: Shape(warps=8, registers=64),
    0: Shape(warps=4),
}
APART = Shape(warps=16, turns=1)  # of one walk alone
VECTOR = 16  # bytes that a thread loads at once
ALIGNMENT = 64  # columns that parts begin at multiples of
PROGRAMS = 8  # of a multiprocessor, where rows are scaled


# ---------------------------------------------------------------------- the kernel


class Given(NamedTuple):
    """What the kernel takes; [T] each."""

    offsets: Tensor  # of rows in the logits
    out_offsets: Tensor | None  # of rows where the gradient goes
    live: Tensor | None  # bool: other rows are not read, and their gradient is 0
    targets: Tensor
    z: LogitScaling
    normalizer: Normalizer | None
    to: Found  # the statistics, where there is no normalizer
    c: Four  # with statistics: at an entropy of 0
    slopes: Tensor | None  # [SLOPES, 5, T]
    out: Tensor | None  # where the gradient goes


@triton.jit(do_not_specialize=["first", "count"])
def given_kernel(
    raw,
    of,  # Given
    first,
    count,  # T
    v,
    size,  # columns of a part
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    SLOPES: tl.constexpr,
):
    STATISTICS: tl.constexpr = of.to.rest is not None
    GRADIENT: tl.constexpr = of.out_offsets is not None
    part = tl.arange(0, PARTS)
    mail = open_mail() if PARTS > 1 else 0
    turn = 0
    begin = (part * size)[:, None]
    # Programs at work at once have rows close to one another.
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        x = raw + tl.multiple_of(tl.load(of.offsets + row), ALIGNED)
        outer = per_row(of.z.outer, of.z, row)
        length = v
        if of.live is not None:
            length = v * tl.load(of.live + row).to(tl.int32)  # a multiple of what v is one of
        column = tl.load(of.targets + row) - first
        mine = (column >= 0) & (column < length)
        target = tl.load(x + column, mask=mine, other=float("-inf"))
        if GRADIENT:  # loaded here, so that they are there when they are needed
            y = of.out + tl.multiple_of(tl.load(of.out_offsets + row), ALIGNED)
            at_target = coefficient(of.c.target, row)
            at_prob, at_entropy, at_uniform = coefficients(of.c, row)
            closed = slope_parts(of.slopes, row, count, SLOPES)

        if STATISTICS:
            partials = part_partials(
                x, begin, size, length, of.z, outer, WIDTH, GRADIENT,
                of.to.spread is not None, of.to.total is not None,
            )  # fmt: skip
            target_logit = logits_of(target, mine, of.z, outer)
            if of.live is not None:
                target_logit = tl.where(length > 0, target_logit, 0.0)
            tl.store(of.to.target + row, target_logit)
            if PARTS > 1:
                tl.debug_barrier()  # every thread has the target, which another part overwrites
                partials = met(partials, mail, turn, PARTS)
                turn += 1
            if of.live is not None:
                partials = settled(partials, length)
            peak, rest, spread, _ = partials
            store_partials(of.to, partials, row, part)
            log_sum = log1p(rest)
        else:
            peak = tl.load(of.normalizer.peak + row + part * 0)
            log_sum = tl.load(of.normalizer.log_sum + row + part * 0)

        if GRADIENT:
            tl.debug_barrier()  # in place: every thread has read before any of them writes
            at_prob += tl.zeros_like(peak)
            if STATISTICS and of.c.entropy is not None:
                at_prob += at_entropy * (log_sum - spread / (1 + rest))
            if SLOPES > 0:
                slope = closed_slope(closed, (target_logit - peak) - log_sum, SLOPES)
                at_prob -= slope
                at_target += slope
            factor = per_row(of.z.factor, of.z, row)
            at = at_prob * factor, at_entropy * factor, at_uniform * factor
            normalizer = peak, log_sum
            write_gradient(
                x, y, begin, size, v, length, of.z, outer, normalizer, at, of.c, WIDTH, STATISTICS
            )
            if of.c.target is not None or SLOPES > 0:
                tl.debug_barrier()  # another thread wrote this element without its own term
                g, bend = logit_gradient(target, mine, of.z, outer, normalizer, at, of.c)
                g = (g + at_target * factor * bend).to(y.dtype.element_ty)
                tl.store(y + column + part * 0, g, mask=part == tl.where(mine, column // size, -1))


def given_rows(walk: Walk, *, shape: Shape | Resident | None = None) -> Partials | None:
    logits, out, live, targets, first, transform, needs, c, slopes, normalizer = walk
    x, count = logits.tensor, len(targets)
    v, statistics = x.shape[-1], needs is not None
    partials = empty_partials(x, count, needs) if needs is not None else None
    if count == 0:
        return partials
    offsets = None if out is None else out.offsets
    to = NOT_FOUND if partials is None else found(partials)
    where = None if out is None else out.tensor
    z, c = scaling(transform), four(c)
    of = Given(logits.offsets, offsets, live, targets, z, normalizer, to, c, slopes, where)
    closed = 0 if slopes is None else len(slopes)
    if shape is None and statistics and out is not None:
        shape = resident_for(x, out.tensor, logits.aligned and out.aligned, z)
    if isinstance(shape, Resident):
        launch_resident(shape, x, of, first, count, closed)
        return partials
    if shape is None:
        shape = shape_of(v, statistics and out is not None, x.device)
    parts = shape.parts if statistics and out is not None else 1
    size = cdiv(cdiv(v, parts), ALIGNMENT) * ALIGNMENT
    launcher(shape.warps, parts, shape.registers)(
        cdiv(count, shape.turns),
        *(x, of, first, count, v, size),
        PARTS=parts,
        WIDTH=lane_count(size, x.element_size(), shape.warps),
        ALIGNED=16 if logits.aligned and (out is None or out.aligned) else 1,
        SLOPES=closed,
    )
    return partials


def shape_of(v: int, both: bool, device: torch.device) -> Shape:
    """For rows of v columns; `both`: two walks. Without clusters one block takes a row, and only
    NVIDIA's compilers are told how many registers to take."""
    shape = next(s for width, s in SHAPES.items() if v >= width) if both else APART
    if not has_clusters(device):
        shape = shape._replace(parts=1)
    return shape._replace(registers=None) if torch.version.hip is not None else shape


@functools.cache
def launcher(warps: int, parts: int, registers: int | None) -> Launcher:
    options = {} if registers is None else {"maxnreg": registers}
    return Launcher(given_kernel, num_warps=warps, num_ctas=parts, **options)


def lane_count(v: int, element_size: int, warps: int) -> int:
    """Lanes of a program: one load of VECTOR bytes per thread, less where a row is short."""
    return min(32 * warps * VECTOR // element_size, max(16, power_of_2(v) // 4))


# ---------------------------------------------------------------------- the upstream gradient


@triton.jit(do_not_specialize=["count"])
def scale_kernel(x, offsets, factor, count, v, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    times = tl.load(factor)
    if times != 1:
        for row in range(tl.program_id(0), count, tl.num_programs(0)):
            y = x + tl.multiple_of(tl.load(offsets + row), ALIGNED)
            for start in range(0, v, BLOCK):
                at = start + tl.arange(0, BLOCK)
                value = tl.load(y + at, mask=at < v, other=0.0).to(tl.float32) * times
                tl.store(y + at, value.to(x.dtype.element_ty), mask=at < v)


launch_scale = Launcher(scale_kernel, num_warps=8)


def scale_rows_(rows: Rows, factor: Tensor) -> None:
    # Whether it is 1, where nothing is read, the device alone knows.
    x, count = rows.tensor, len(rows.offsets)
    if count:
        launch_scale(
            min(count, PROGRAMS * programs_on(x.device)),
            *(x, rows.offsets, factor.float(), count, x.shape[-1]),
            ALIGNED=16 if rows.aligned else 1,
            BLOCK=min(4096, power_of_2(x.shape[-1])),
        )
