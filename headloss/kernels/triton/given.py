"""Both acts in Triton on logits that exist already, where they lie and in their own dtype.

T rows of the packed batch, v columns of the vocabulary starting at `first`, z = transform(raw). Row
t begins `offsets[t]` elements behind the first logit, so that padded, shifted and packed layouts
need no copy; rows that are not named are never read.

A block walks along a row once for its statistics and, where the coefficients are there, a second
time for its gradient. In one launch the second walk starts with the columns that were read last:
together the rows at work fit into the L2 cache, and DRAM sees one read and one write. A wide row is
cut into parts, one for each block of a cluster, so that a multiprocessor works on several rows and
one's memory traffic covers another's waits; the blocks meet once, between the walks. Logits in
bfloat16 stay in the blocks' shared memory in between (words.py).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...objective.statistics import Coefficients, Normalizer, Partials
from ..interface import Walk
from . import words
from .formulas import coefficient, coefficients, log1p, normalizer_of, per_row, store_partials
from .launch import Launcher, OfClusters, cdiv
from .records import LogitScaling, empty_partials, power_of_2, scaling
from .versions import has_clusters
from .walk import logit_gradient, logits_of, part_partials, write_gradient


class Shape(NamedTuple):
    """How a launch is cut: the numbers to tune on a device (benchmarks/given.py)."""

    warps: int  # of a block
    parts: int = 1  # blocks of a cluster, which share a row
    turns: int = 16  # rows of a cluster, one after another
    registers: int | None = None  # of a thread, at most
    resident: bool = False  # parts stay in shared memory


# By columns: the first row that is wide enough.
SHAPES = {
    196608: Shape(warps=8, parts=8, registers=64), 140000: Shape(warps=8, parts=4, registers=64),
    98304: Shape(warps=16, parts=2, registers=64), 49152: Shape(warps=8, parts=2, registers=64),
    16384: Shape(warps=8, registers=64), 0: Shape(warps=4)
}
APART = Shape(warps=16, turns=1)  # of one walk alone
LEAST_COLUMNS = 16384  # shorter rows stay in the L2 in any case
# A static array may have 48 KiB, of which the barriers and a reduction take some.
PART_BYTES = 46 << 10
REGISTERS = 80  # six blocks of four warps on a multiprocessor, which then holds 192 KiB of rows
VECTOR = 16  # bytes that a thread loads at once
ALIGNMENT = 64  # columns that parts begin at multiples of


# ---------------------------------------------------------------------- the kernel


class Given(NamedTuple):
    """What the kernel takes; [T] each."""

    offsets: Tensor  # of rows in the logits
    out_offsets: Tensor | None  # of rows where the gradient goes
    live: Tensor | None  # bool: other rows are not read, and their gradient is 0
    targets: Tensor
    z: LogitScaling
    normalizer: Normalizer | None
    to: Partials | None  # the statistics, where there is no normalizer
    c: Coefficients  # with statistics: at an entropy of 0
    slopes: Tensor | None  # [SLOPES, 5, T]
    out: Tensor | None  # where the gradient goes


@triton.jit
def columns_there(of, row, count, v):
    """How many columns of a row are read."""
    there = tl.where(row < count, v, 0)
    if of.live is not None:
        there *= tl.load(of.live + row, mask=row < count, other=0).to(tl.int32)
    return there


@triton.jit
def slope_parts(slopes, row, count, SLOPES: tl.constexpr):
    """A token's `stats.Slope` parts, (rate, anchor, low, high, sign) each."""
    found = ()
    for i in tl.static_range(SLOPES):
        part = slopes + i * 5 * count.to(tl.int64) + row
        for k in tl.static_range(5):
            found = found + (tl.load(part + k * count),)  # noqa: RUF005
    return found


@triton.jit
def closed_slope(parts, logp, SLOPES: tl.constexpr):
    """dL/dlogp of a token from its `slope_parts`."""
    found = 0.0
    for i in tl.static_range(SLOPES):
        rate, anchor = parts[5 * i], parts[5 * i + 1]
        low, high, sign = parts[5 * i + 2], parts[5 * i + 3], parts[5 * i + 4]
        value = rate * tl.exp(sign * (logp - anchor))
        found += tl.where((logp >= low) & (logp <= high), value, 0.0)
    return found


@triton.jit
def settled(partials, length):
    """Numbers that no objective stumbles over where nothing was read."""
    peak, rest, spread, total = partials
    peak, rest = tl.where(length > 0, peak, 0.0), tl.where(length > 0, rest, 0.0)
    return peak, rest, tl.where(length > 0, spread, 0.0), tl.where(length > 0, total, 0.0)


@triton.jit(do_not_specialize=["first", "count"])
def given_kernel(
    raw, of, first,
    count,  # T
    v,
    size,  # columns of a part
    PARTS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SLOPES: tl.constexpr,
    OPEN: tl.constexpr,  # how room for a part is made in shared memory; None: it is read again
    PIECES: tl.constexpr,  # of such a part, each copied by itself
):
    STATISTICS: tl.constexpr = of.normalizer is None
    GRADIENT: tl.constexpr = of.out_offsets is not None
    part, cluster = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    clusters = tl.num_programs(0) // PARTS
    begin = part * size
    turn = 0
    offset = tl.load(of.offsets + cluster, mask=cluster < count, other=0)
    if OPEN is not None:
        room = words.open_room(OPEN, begin, size, v)
        there = columns_there(of, cluster, count, v)
        for piece in range(PIECES):
            words.fetch(room, raw + offset + begin, there - begin, size, piece, PIECES)
    mail = words.open_mail() if PARTS > 1 else 0
    # Blocks at work at once have rows close to one another.
    for row in range(cluster, count, clusters):
        x = raw + offset // ALIGNED * ALIGNED  # a loop's variable takes no hint
        length = v
        if of.live is not None:
            length = v * tl.load(of.live + row).to(tl.int32)  # a multiple of what v is one of
        outer = per_row(of.z.outer, of.z, row)
        column = tl.load(of.targets + row) - first
        mine = (column >= 0) & (column < length)
        target = tl.load(x + column, mask=mine, other=float("-inf"))
        if GRADIENT:  # loaded here, so that they are there when they are needed
            y = of.out + tl.multiple_of(tl.load(of.out_offsets + row), ALIGNED)
            at_target = coefficient(of.c.target, row)
            at_prob, at_entropy, at_uniform = coefficients(of.c, row)
            closed = slope_parts(of.slopes, row, count, SLOPES)
        following = row + clusters
        offset = tl.load(of.offsets + following, mask=following < count, other=0)
        if OPEN is not None:
            there = columns_there(of, following, count, v)

        if STATISTICS:
            if OPEN is not None:
                partials = words.resident_partials(
                    room, turn, x, begin, size, v, outer, of.to, PIECES
                )
            else:
                partials = part_partials(
                    x, begin, size, length, of.z, outer, of.to, WIDTH, GRADIENT
                )
        if GRADIENT:  # in place: all threads have read, the target too, before any of a part writes
            tl.debug_barrier()
        if STATISTICS:
            target_logit = logits_of(target, mine, of.z, outer)
            if of.live is not None:
                target_logit = tl.where(length > 0, target_logit, 0.0)
            tl.store(of.to.target + row, target_logit)
            if PARTS > 1:
                partials = words.met(partials, mail, turn, PARTS, of.to.spread is not None)
            if of.live is not None:
                partials = settled(partials, length)
            peak, rest, spread, _ = partials
            store_partials(of.to, row, partials, part == 0)  # all parts know them
            log_sum = log1p(rest)
        else:
            peak, log_sum = normalizer_of(of.normalizer, row)
        turn += 1  # noqa: SIM113

        if GRADIENT:
            if STATISTICS and of.c.entropy is not None:
                at_prob += at_entropy * (log_sum - spread / (1 + rest))
            if SLOPES > 0:
                slope = closed_slope(closed, (target_logit - peak) - log_sum, SLOPES)
                at_prob -= slope
                at_target += slope
            factor = per_row(of.z.factor, of.z, row)
            at = at_prob * factor, at_entropy * factor, at_uniform * factor
            normalizer = peak, log_sum
            if OPEN is not None:
                keep = None
                if of.live is not None:
                    keep = length > 0
                words.resident_gradient(
                    room, x, y, begin, size, v, outer, normalizer, at, of.c, keep,
                    (raw + offset + begin, there - begin), PIECES
                )  # fmt: skip
            else:
                write_gradient(
                    x, y, begin, size, v, length, of.z, outer, normalizer, at, of.c, WIDTH,
                    STATISTICS,
                )  # fmt: skip
            # Another thread wrote the target's element.
            tl.debug_barrier()
            if of.c.target is not None or SLOPES > 0:
                g, bend = logit_gradient(target, mine, of.z, outer, normalizer, at, of.c)
                g = (g + at_target * factor * bend).to(y.dtype.element_ty)
                tl.store(y + column, g, mask=part == tl.where(mine, column // size, -1))


def given_rows(walk: Walk, *, shape: Shape | None = None) -> Partials | None:
    logits, out, live, targets, first, transform, needs, c, slopes, normalizer = walk
    x, count, both = logits.tensor, len(targets), needs is not None and out is not None
    v, aligned = x.shape[-1], logits.aligned and (out is None or out.aligned)
    partials = empty_partials(x, count, needs) if needs is not None else None
    if count == 0:
        return partials
    offsets, where = (None, None) if out is None else (out.offsets, out.tensor)
    z, c = scaling(transform), c or Coefficients()
    measured = normalizer, partials, c, slopes
    of = Given(logits.offsets, offsets, live, targets, z, *measured, where)
    if shape is None and both and aligned:
        shape = resident_for(x, where, z)
    shape = shape or shape_of(v, both, x.device)
    parts = shape.parts if both else 1
    size = part_of(v, parts)
    lanes = 32 * shape.warps * VECTOR // x.element_size()  # fewer where a row is short
    pieces = 8 if parts < 4 else 4
    launcher(shape.warps, parts, shape.registers)(
        cdiv(count, shape.turns), *(x, of, first, count, v, size), PARTS=parts,
        WIDTH=min(lanes, max(16, power_of_2(size) // 4)), ALIGNED=16 if aligned else 1,
        SLOPES=0 if slopes is None else len(slopes),
        OPEN=words.opening(size, pieces) if shape.resident else None, PIECES=pieces
    )
    return partials


def part_of(v: int, parts: int) -> int:
    """Columns of a part."""
    return cdiv(cdiv(v, parts), ALIGNMENT) * ALIGNMENT


def resident_for(x: Tensor, out: Tensor, z: LogitScaling) -> Shape | None:
    """How to cut rows that can stay in shared memory; None where they cannot."""
    v = x.shape[-1]
    fits = x.dtype == torch.bfloat16 and v >= LEAST_COLUMNS and z.inner is None and z.outer > 0
    aligned = not (v % 8 or x.data_ptr() % 16 or out.data_ptr() % 16)
    if not (fits and aligned and x.is_cuda and has_clusters(x.device)):
        return None
    for parts in (1, 2, 4, 8, 16):
        if words.room_of(part_of(v, parts)) <= PART_BYTES:
            return Shape(words.WARPS, parts, max(4, min(8, parts)), REGISTERS, resident=True)
    return None


def shape_of(v: int, both: bool, device: torch.device) -> Shape:
    """For rows of v columns; `both`: two walks. Only NVIDIA's compilers take `maxnreg`."""
    shape = next(s for width, s in SHAPES.items() if v >= width) if both else APART
    shape = shape if has_clusters(device) else shape._replace(parts=1)
    return shape._replace(registers=None) if torch.version.hip is not None else shape


@functools.cache
def launcher(warps: int, parts: int, registers: int | None) -> Launcher:
    options = {"maxnreg": registers} if registers else {}
    if parts == 1:
        return Launcher(given_kernel, num_warps=warps, **options)
    return OfClusters(given_kernel, parts, num_warps=warps, **options)
