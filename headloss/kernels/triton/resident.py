"""Both acts on given logits in bfloat16, on rows that stay in shared memory in between.

A row is cut over the blocks of a cluster, as in given.py; a part is copied into its block's shared
memory by the hardware (a bulk copy, which a barrier counts), so that device memory sees one read
and one write whatever the L2 holds. A block is four warps and a part at most PART_BYTES, so that
several blocks are on a multiprocessor: while one waits for its row, or for the other parts of it,
the others work.

Of two words of two logits (words.py) the larger goes on, half by half, and the smaller is summed,
so that a lane's largest logit stays out of its sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cluster import open_mail
from .formulas import FLOOR, LN2, LOG2E, coefficient, coefficients, log1p, per_row
from .launch import OfClusters, cdiv
from .versions import INTERPRETED, has_clusters
from .walk import (
    LOWEST,
    closed_slope,
    join_lanes,
    logit_gradient,
    logits_of,
    met,
    settled,
    slope_parts,
    store_partials,
)
from .words import (
    fetch,
    fill,
    larger,
    open_room,
    opening,
    packed,
    read,
    sifted,
    unpacked,
    wait,
    write,
)

WARPS = 4  # so that five or six blocks are on a multiprocessor
LANES = 32 * WARPS  # of a block
AT_ONCE = 8  # columns that a lane reads at once: 16 bytes
STEP = LANES * AT_ONCE
UNROLL = tl.constexpr(2)
# A static array may have 48 KiB, of which the barriers and a reduction take some.
PART_BYTES = 46 << 10
LEAST_COLUMNS = 16384  # shorter rows stay in the L2 in any case


class Resident(NamedTuple):
    """How a launch is cut."""

    parts: int  # blocks of a cluster, which share a row
    turns: int  # rows of a cluster, one after another


LEAST = tl.constexpr(-(2.0**99))  # logits below count as -inf
LARGE = tl.constexpr(2.0**24)  # from here on numbers in bfloat16 are 65,536 apart


@triton.jit
def add_word(word, scale, shift, rest, spread, ENTROPY: tl.constexpr):
    """Add e = 2 ** (z scale - shift) of both logits, and e times the exponent."""
    low, high = unpacked(word)
    a, b = tl.fma(low, scale, -shift), tl.fma(high, scale, -shift)
    if ENTROPY:
        a = tl.maximum(a, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        b = tl.maximum(b, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    e, f = tl.exp2(a), tl.exp2(b)
    rest += e
    rest += f
    if ENTROPY:
        spread = tl.fma(e, a, spread)
        spread = tl.fma(f, b, spread)
    return rest, spread


@triton.jit
def resident_partials(
    address,  # [LANES] of each lane's first words
    x,
    first,  # [LANES] columns of these words
    end,  # column at which the part ends
    outer,  # z = raw * outer
    steps,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Partial statistics of the part."""
    STRIDE: tl.constexpr = 1024  # STEP
    least = first * 0 + -8323200  # two of -inf
    top_a, top_b, top_c, top_d = least, least, least, least
    for step in tl.range(0, steps, loop_unroll_factor=UNROLL):
        columns = first + step * STRIDE
        a, b, c, d = read(address + step * (2 * STRIDE), x, columns, columns < end)
        top_a, top_b = larger(top_a, a), larger(top_b, b)
        top_c, top_d = larger(top_c, c), larger(top_d, d)
    low, high = unpacked(larger(larger(top_a, top_b), larger(top_c, top_d)))
    top = tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)
    top = tl.maximum(top, LEAST, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.zeros_like(top) + outer * LOG2E
    # A large product is rounded by more than an exponent holds; one of 16 bits is exact.
    coarse = (scale.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    scale = tl.where(tl.abs(top) < LARGE, scale, coarse)
    shift = top * scale
    rest, spread, total = tl.zeros_like(top), tl.zeros_like(top), tl.zeros_like(top)
    top_a, top_b, top_c, top_d = least, least, least, least
    for step in tl.range(0, steps, loop_unroll_factor=UNROLL):
        columns = first + step * STRIDE
        inside = columns < end
        a, b, c, d = read(address + step * (2 * STRIDE), x, columns, inside)
        if MEAN:
            part = tl.zeros_like(top)
            words = (a, b, c, d)
            for i in tl.static_range(4):
                low, high = unpacked(words[i])
                part += low + high
            total += tl.where(inside, part, 0.0)
        top_a, a = sifted(top_a, a)
        top_b, b = sifted(top_b, b)
        top_c, c = sifted(top_c, c)
        top_d, d = sifted(top_d, d)
        rest, spread = add_word(a, scale, shift, rest, spread, ENTROPY)
        rest, spread = add_word(b, scale, shift, rest, spread, ENTROPY)
        rest, spread = add_word(c, scale, shift, rest, spread, ENTROPY)
        rest, spread = add_word(d, scale, shift, rest, spread, ENTROPY)
    top_a, b = sifted(top_a, top_b)
    top_c, d = sifted(top_c, top_d)
    top_a, c = sifted(top_a, top_c)
    rest, spread = add_word(b, scale, shift, rest, spread, ENTROPY)
    rest, spread = add_word(d, scale, shift, rest, spread, ENTROPY)
    rest, spread = add_word(c, scale, shift, rest, spread, ENTROPY)
    low, high = unpacked(top_a)
    # The larger of the two is the lane's largest logit, which is left out.
    last = tl.fma(tl.minimum(low, high, propagate_nan=tl.PropagateNan.ALL), scale, -shift)
    if ENTROPY:
        last = tl.maximum(last, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    rest += tl.exp2(last)
    # What rounding `shift` did to all terms alike.
    right = tl.exp2(-tl.fma(top, scale, -shift))
    rest *= right
    if ENTROPY:
        spread += tl.exp2(last) * last
        spread *= right * LN2
    peak = tl.where(top == LEAST, LOWEST, top * outer)
    part_peak, part_rest, part_spread = join_lanes(peak, rest, spread, ENTROPY, 0)
    return part_peak, part_rest, part_spread, tl.sum(total, 0) * outer


@triton.jit
def gradient_word(word, scale, shift, at, c):
    """dL/draw of two logits but for the target's own term."""
    low, high = unpacked(word)
    a, b = tl.fma(low, scale, -shift), tl.fma(high, scale, -shift)
    if c.entropy is not None:
        a = tl.maximum(a, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        b = tl.maximum(b, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        g = tl.exp2(a) * (at[0] + at[1] * (a * LN2))
        h = tl.exp2(b) * (at[0] + at[1] * (b * LN2))
    else:
        g = tl.exp2(a) * at[0]
        h = tl.exp2(b) * at[0]
    if c.uniform is not None:
        g += at[2]
        h += at[2]
    return packed(g, h)


@triton.jit
def resident_gradient(
    address, x, y, first, end, outer, normalizer, at, c, keep, steps
):  # fmt: skip
    """Write the gradient of each part but for the target's own term. `keep`: None, or a word of
    ones, and of zeros where the gradient is 0."""
    STRIDE: tl.constexpr = 1024  # STEP
    zeros = (first * 0).to(tl.float32)
    scale = zeros + outer * LOG2E
    shift = zeros + (normalizer[0] * LOG2E + normalizer[1] * LOG2E)
    for step in tl.range(0, steps, loop_unroll_factor=UNROLL):
        columns = first + step * STRIDE
        inside = columns < end
        a, b, c_, d = read(address + step * (2 * STRIDE), x, columns, inside)
        a, b = gradient_word(a, scale, shift, at, c), gradient_word(b, scale, shift, at, c)
        c_, d = gradient_word(c_, scale, shift, at, c), gradient_word(d, scale, shift, at, c)
        if keep is not None:
            a, b, c_, d = a & keep, b & keep, c_ & keep, d & keep
        write(y, columns, inside, (a, b, c_, d))


@triton.jit(do_not_specialize=["first", "count"])
def resident_kernel(
    raw,
    of,  # given.Given
    first,
    count,  # T
    v,
    size,  # columns of a part
    steps,  # in which a block walks along it
    PARTS: tl.constexpr,
    SLOPES: tl.constexpr,
    OPEN: tl.constexpr,
):
    STRIDE: tl.constexpr = 1024  # STEP
    lane = tl.arange(0, 128)
    part, cluster = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    clusters = tl.num_programs(0) // PARTS
    begin = part * size
    own = begin + lane * 8
    end = tl.minimum(begin + size, v)
    room = 0
    if not INTERPRETED:
        room += open_room(OPEN)
        for step in range(steps):  # what no copy reaches
            at = lane * 8 + step * STRIDE
            fill(room + at * 2, begin + at >= end)
        tl.debug_barrier()
    mail = open_mail() if PARTS > 1 else 0
    arrived = room + steps * (2 * STRIDE)
    address = room + lane * 16
    turn = 0
    offset = tl.load(of.offsets + cluster, mask=cluster < count, other=0)
    for row in range(cluster, count, clusters):
        x = raw + tl.multiple_of(offset, 16)
        keep = None
        length = v
        if of.live is not None:
            live = tl.load(of.live + row).to(tl.int32)
            length = v * live
            keep = lane * 0 - live
        if not INTERPRETED:
            fetch(room, arrived, x + begin, tl.maximum(tl.minimum(end, length) - begin, 0))
        outer = per_row(of.z.outer, of.z, row)
        column = tl.load(of.targets + row) - first
        mine = (column >= 0) & (column < length)
        target = tl.load(x + column, mask=mine, other=float("-inf"))
        y = of.out + tl.multiple_of(tl.load(of.out_offsets + row), 16)
        at_target = coefficient(of.c.target, row)
        at_prob, at_entropy, at_uniform = coefficients(of.c, row)
        closed = slope_parts(of.slopes, row, count, SLOPES)
        following = row + clusters
        offset = tl.load(of.offsets + following, mask=following < count, other=0)
        target_logit = logits_of(target, mine, of.z, outer)
        if of.live is not None:
            target_logit = tl.where(length > 0, target_logit, 0.0)
        tl.store(of.to.target + row, target_logit)

        if not INTERPRETED:
            address = wait(address, arrived, turn)
        partials = resident_partials(
            address, x, own, end, outer, steps,
            of.to.spread is not None, of.to.total is not None,
        )  # fmt: skip
        tl.debug_barrier()  # every thread has the target, which another part overwrites
        if PARTS > 1:
            partials = met(partials, mail, turn, PARTS)
        turn += 1  # noqa: SIM113
        if of.live is not None:
            partials = settled(partials, length)
        peak, rest, spread, _ = partials
        store_partials(of.to, partials, row, part)
        log_sum = log1p(rest)

        if of.c.entropy is not None:
            at_prob += at_entropy * (log_sum - spread / (1 + rest))
        if SLOPES > 0:
            slope = closed_slope(closed, (target_logit - peak) - log_sum, SLOPES)
            at_prob -= slope
            at_target += slope
        factor = per_row(of.z.factor, of.z, row)
        at = at_prob * factor, at_entropy * factor, at_uniform * factor
        normalizer = peak, log_sum
        resident_gradient(address, x, y, own, end, outer, normalizer, at, of.c, keep, steps)
        tl.debug_barrier()  # the next row takes the room; another thread wrote the target's place
        if of.c.target is not None or SLOPES > 0:
            g, _ = logit_gradient(target, mine, of.z, outer, normalizer, at, of.c)
            g = (g + at_target * factor).to(y.dtype.element_ty)
            tl.store(y + column, g, mask=part == tl.where(mine, column // size, -1))


launch_resident = {
    parts: OfClusters(resident_kernel, parts, num_warps=WARPS) for parts in (1, 2, 4, 8, 16)
}


def part_of(v: int, parts: int) -> tuple[int, int]:
    """Columns of a part, and the steps in which a block walks along it."""
    size = cdiv(cdiv(v, parts), 64) * 64
    return size, cdiv(size, STEP)


def resident_for(x: Tensor, out: Tensor, aligned: bool, z: Any) -> Resident | None:
    """How to cut rows that can stay in shared memory; None where they cannot."""
    v = x.shape[-1]
    fit = x.dtype == torch.bfloat16 and aligned and v % AT_ONCE == 0 and v >= LEAST_COLUMNS
    if not (fit and z.inner is None and z.outer > 0 and has_clusters(x.device)):
        return None
    if not x.is_cuda or x.data_ptr() % 16 or out.data_ptr() % 16:
        return None
    for parts in launch_resident:
        if 2 * STEP * part_of(v, parts)[1] <= PART_BYTES:
            return Resident(parts, turns=max(2, min(8, parts)))
    return None


def launch(
    shape: Resident, x: Tensor, of: Any, first: int, count: int, slopes: int
) -> None:
    v = x.shape[-1]
    size, steps = part_of(v, shape.parts)
    launch_resident[shape.parts](
        cdiv(count, shape.turns),
        *(x, of, first, count, v, size, steps),
        PARTS=shape.parts,
        SLOPES=slopes,
        OPEN=opening(steps * STEP),
    )
