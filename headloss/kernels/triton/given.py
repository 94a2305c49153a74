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

from ...stats import Coefficients, Partials
from ..interface import Rows, Walk
from .cluster import letter, of_part, open_mail, post
from .statistics import INTERPRETED, merged, multipliers, on_device, row_multiplier
from .walk import (
    LOWEST,
    closed_slope,
    coefficient,
    log1p,
    logit_gradient,
    logits_of,
    part_partials,
    slope_parts,
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


@triton.jit(do_not_specialize=["first", "count"])
def given_kernel(
    raw,
    out,
    offsets,  # [T] of rows in `raw`
    out_offsets,  # [T] of rows in `out`
    live,  # [T] bool: other rows are not read, and their gradient is 0
    targets,  # [T]
    first,
    count,  # T
    v,
    inner,
    outer,
    scale,
    temperature,  # [T], as all below
    peaks,
    rests,
    target_logits,
    spreads,
    totals,
    log_sums,  # in place of rests, without STATISTICS
    c_target,
    c_prob,  # with STATISTICS: at an entropy of 0
    c_entropy,
    c_uniform,
    slopes,  # [SLOPES, 5, T]
    size,  # columns of a part
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    LIVE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    STATISTICS: tl.constexpr,
    SPREAD: tl.constexpr,
    MEAN: tl.constexpr,
    GRADIENT: tl.constexpr,
    TARGET: tl.constexpr,
    PROB: tl.constexpr,
    ENTROPY: tl.constexpr,
    UNIFORM: tl.constexpr,
    SLOPES: tl.constexpr,
):
    part = tl.arange(0, PARTS)
    mail = open_mail() if PARTS > 1 else 0
    turn = 0
    begin = (part * size)[:, None]
    # Programs at work at once have rows close to one another.
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        x = raw + tl.multiple_of(tl.load(offsets + row), ALIGNED)
        z_of = inner, row_multiplier(outer, temperature, row, ROW_TEMPERATURE)
        length = v
        if LIVE:
            length = v * tl.load(live + row).to(tl.int32)  # a multiple of what v is one of
        column = tl.load(targets + row) - first
        mine = (column >= 0) & (column < length)
        target = tl.load(x + column, mask=mine, other=float("-inf"))
        if GRADIENT:  # loaded here, so that they are there when they are needed
            y = out + tl.multiple_of(tl.load(out_offsets + row), ALIGNED)
            at_target = coefficient(c_target, row, TARGET)
            at_prob = coefficient(c_prob, row, PROB)
            at_entropy = coefficient(c_entropy, row, ENTROPY)
            at_uniform = coefficient(c_uniform, row, UNIFORM)
            closed = slope_parts(slopes, row, count, SLOPES)

        if STATISTICS:
            partials = part_partials(
                x, begin, size, length, z_of, WIDTH, GRADIENT, SOFTCAP, SCALED, SPREAD, MEAN
            )
            target_logit = logits_of(target, mine, z_of[0], z_of[1], SOFTCAP, SCALED)
            if LIVE:
                target_logit = tl.where(length > 0, target_logit, 0.0)
            tl.store(target_logits + row, target_logit)
            if PARTS > 1:
                tl.debug_barrier()  # every thread has the target, which another part overwrites
                partials = met(partials, mail, turn, PARTS)
                turn += 1
            if LIVE:
                partials = settled(partials, length)
            peak, rest, spread, _ = partials
            store_partials((peaks, rests, spreads, totals), partials, row, part, SPREAD, MEAN)
            log_sum = log1p(rest)
        else:
            peak = tl.load(peaks + row + part * 0)
            log_sum = tl.load(log_sums + row + part * 0)

        if GRADIENT:
            tl.debug_barrier()  # in place: every thread has read before any of them writes
            at_prob += tl.zeros_like(peak)
            if STATISTICS and ENTROPY:
                at_prob += at_entropy * (log_sum - spread / (1 + rest))
            if SLOPES > 0:
                slope = closed_slope(closed, (target_logit - peak) - log_sum, SLOPES)
                at_prob -= slope
                at_target += slope
            factor = row_multiplier(scale, temperature, row, ROW_TEMPERATURE)
            at_entropy *= factor
            at_uniform *= factor
            c = at_prob * factor, at_entropy, at_uniform
            write_gradient(
                x, y, begin, size, v, length, z_of, (peak, log_sum), c,
                WIDTH, STATISTICS, SOFTCAP, SCALED, ENTROPY, UNIFORM,
            )  # fmt: skip
            if TARGET or SLOPES > 0:
                tl.debug_barrier()  # another thread wrote this element without its own term
                g, bend = logit_gradient(
                    target, mine, z_of, (peak, log_sum), c, SOFTCAP, SCALED, ENTROPY, UNIFORM
                )
                g = (g + at_target * factor * bend).to(y.dtype.element_ty)
                tl.store(y + column + part * 0, g, mask=part == tl.where(mine, column // size, -1))


@triton.jit
def settled(partials, length):
    """Numbers that no objective stumbles over where nothing was read."""
    peak, rest, spread, total = partials
    return tl.where(length > 0, peak, 0.0), tl.where(length > 0, rest, 0.0), spread, total


@triton.jit
def store_partials(to, partials, row, part, SPREAD: tl.constexpr, MEAN: tl.constexpr):
    """The row's, which all parts know, by the first of them."""
    at, first = row + part * 0, part == 0
    tl.store(to[0] + at, partials[0], mask=first)
    tl.store(to[1] + at, partials[1], mask=first)
    if SPREAD:
        tl.store(to[2] + at, partials[2], mask=first)
    if MEAN:
        tl.store(to[3] + at, partials[3], mask=first)


@triton.jit
def joined(a, b):
    """Partial statistics of two pieces."""
    peak, rest, spread = merged(a[0], a[1], a[2], b[0], b[1], b[2])
    return peak, rest, spread, a[3] + b[3]


@triton.jit
def met(partials, mail, turn, PARTS: tl.constexpr):
    """Partial statistics of the row, on each of its parts, joined in the same order."""
    peak, rest, spread, total = partials
    own = tl.maximum(peak, LOWEST), rest, spread, total  # that no difference of peaks is NaN
    if INTERPRETED:
        found = of_part(own, 0, PARTS)
    else:
        box = post(mail, turn, own)
        found = letter(box, 0)
    for i in tl.static_range(1, PARTS):
        found = joined(found, of_part(own, i, PARTS) if INTERPRETED else letter(box, i))
    peak, rest, spread, total = found
    return tl.where(peak == LOWEST, float("-inf"), peak), rest, spread, total


def given_rows(walk: Walk, *, shape: Shape | None = None) -> Partials | None:
    logits, out, live, targets, first, transform, needs, coefficients, slopes, normalizer = walk
    x = logits.tensor
    v, count = x.shape[-1], len(targets)
    partials = None if needs is None else _empty_partials(x, count, needs)
    if count == 0:
        return partials
    some = partials if partials is not None else normalizer
    assert some is not None
    peak = some.peak
    inner, outer, temperature = multipliers(transform, peak)
    by_row = isinstance(transform.temperature, Tensor)
    both = partials is not None and out is not None
    if shape is None:
        shape = next(s for width, s in SHAPES.items() if v >= width) if both else APART
    parts = shape.parts if both else 1
    size = triton.cdiv(triton.cdiv(v, parts), ALIGNMENT) * ALIGNMENT
    c = coefficients or Coefficients()
    with on_device(x):
        given_kernel[(triton.cdiv(count, shape.turns),)](
            x,
            x if out is None else out.tensor,
            logits.offsets,
            logits.offsets if out is None else out.offsets,
            targets if live is None else live,
            targets,
            first,
            count,
            v,
            inner,
            outer,
            transform.scale if by_row else transform.scale / transform.temperature,
            temperature,
            peak,
            *_partial_vectors(partials, peak),
            peak if normalizer is None else normalizer.log_sum,
            *(peak if t is None else t for t in (c.target, c.prob, c.entropy, c.uniform)),
            peak if slopes is None else slopes,
            size,
            PARTS=parts,
            WIDTH=lane_count(size, x.element_size(), shape.warps),
            ALIGNED=16 if logits.aligned and (out is None or out.aligned) else 1,
            LIVE=live is not None,
            SOFTCAP=transform.softcap is not None,
            SCALED=by_row or outer != 1,
            ROW_TEMPERATURE=by_row,
            STATISTICS=partials is not None,
            SPREAD=partials is not None and partials.spread is not None,
            MEAN=partials is not None and partials.total is not None,
            GRADIENT=out is not None,
            TARGET=c.target is not None,
            PROB=c.prob is not None,
            ENTROPY=c.entropy is not None,
            UNIFORM=c.uniform is not None,
            SLOPES=0 if slopes is None else len(slopes),
            num_warps=shape.warps,
            num_ctas=parts,
            maxnreg=shape.registers,
        )
    return partials


def _empty_partials(x: Tensor, count: int, needs: frozenset[str]) -> Partials:
    names = ["peak", "rest", "target"]
    names += ["spread"] * ("entropy" in needs) + ["total"] * ("mean_logit" in needs)
    found = x.new_empty(len(names), count, dtype=torch.float32)
    return Partials(**dict(zip(names, found, strict=True)))


def _partial_vectors(partials: Partials | None, unused: Tensor) -> list[Tensor]:
    if partials is None:
        return [unused] * 4
    found = (partials.rest, partials.target, partials.spread, partials.total)
    return [unused if t is None else t for t in found]


def lane_count(v: int, element_size: int, warps: int) -> int:
    """Lanes of a program: one load of VECTOR bytes per thread, less where a row is short."""
    return min(32 * warps * VECTOR // element_size, max(16, triton.next_power_of_2(v) // 4))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # of the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


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


def scale_rows_(rows: Rows, factor: Tensor) -> None:
    """rows *= factor [], in float32 and rounded once; where it is 1, which the device alone knows,
    nothing is read."""
    x, count = rows.tensor, len(rows.offsets)
    if count == 0:
        return
    with on_device(x):
        scale_kernel[(min(count, PROGRAMS * _processors(x.device)),)](
            x,
            rows.offsets,
            factor.float(),
            count,
            x.shape[-1],
            ALIGNED=16 if rows.aligned else 1,
            BLOCK=min(4096, triton.next_power_of_2(x.shape[-1])),
            num_warps=8,
        )
