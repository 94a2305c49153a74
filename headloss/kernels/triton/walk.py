"""The two walks of given.py along a row of logits, or a part of one, in Triton: a block's partial
statistics, and its gradient. A NaN stays one.

A row of v logits begins at x and its gradient at y; `length` is v, or 0 where nothing is read. The
part has `size` columns from `begin` on. `to` are the Partials that are wanted, z is a LogitScaling,
`normalizer` (peak, log_sum), and `at` (c_prob, c_entropy, c_uniform), times dz/draw without the
soft cap, of which c says what there is.

A part in bfloat16 may stay in shared memory in between: the hardware copies it there in bulk, piece
by piece, so that device memory sees one read and one write whatever the L2 holds. A piece that the
gradient has read makes room for the next row's. Several blocks are on a multiprocessor: while one
waits for its row, or for other parts of it, the others work. Of two words of two logits (words.py)
the larger goes on, half by half, and the smaller is summed, so that a lane's largest logit stays
out of its sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formulas import FLOOR, LN2, LOG2E, act_two, tanh, transformed
from .words import (
    LOWEST,
    NOTHING,
    STRIDE,
    fetch,
    packed,
    piece_of,
    read,
    sifted,
    unpacked,
    wait,
    write,
)


@triton.jit
def logits_of(raw, inside, z, outer):
    """z, and -inf outside of the row (where `raw` is that already)."""
    if z.same:
        return raw.to(tl.float32)
    else:
        return tl.where(inside, transformed(raw, z, outer), float("-inf"))


@triton.jit
def logits_at(x, begin, own, size, length, z, outer, HINT: tl.constexpr):
    """z of some columns of a part, and which are inside of it and of the row."""
    inside = (own < size) & (begin + own < length)
    raw = tl.load(x + begin + own, mask=inside, other=float("-inf"), eviction_policy=HINT)
    return logits_of(raw, inside, z, outer), inside


@triton.jit
def add_term(z, peak, rest, spread, ENTROPY: tl.constexpr):
    """Add e = exp(z - peak) to `rest`, and e (z - peak) to `spread`. A NaN stays one."""
    shift = z - peak
    if ENTROPY:
        shift = tl.maximum(shift, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(shift * LOG2E)
    rest += e
    if ENTROPY:
        spread += e * shift
    return rest, spread


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def join_lanes(peak, rest, spread, ENTROPY: tl.constexpr):
    """(peak, rest, spread) of a part from those of its lanes."""
    top = tl.max(peak, 0)
    shift = tl.maximum(peak - top, FLOOR)
    scale = tl.exp2(shift * LOG2E)
    # The largest term is left out, once: its equals in other lanes, if any, count one each.
    at_top = peak == top
    others = tl.sum(rest * scale + tl.where(at_top, 0.0, scale), 0)
    all_rest = others + (tl.sum(at_top.to(tl.float32), 0) - 1)
    all_spread = 0.0
    if ENTROPY:
        all_spread = tl.sum(scale * (spread + (rest + 1) * shift), 0)
    empty = top == LOWEST
    all_rest = tl.where(empty, -1.0, all_rest)
    return tl.where(empty, float("-inf"), top), all_rest, all_spread


@triton.jit
def part_partials(x, begin, size, length, z, outer, to, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """Partial statistics of the part's columns. Each of WIDTH lanes has its own until the end, so
    that nothing is exchanged along the way.

    A lane keeps its largest logit apart: of two values the larger goes on, the smaller is summed.
    """
    ENTROPY: tl.constexpr = to.spread is not None
    lanes = tl.arange(0, WIDTH)
    nothing = tl.zeros((WIDTH,), tl.float32)
    peak, rest, spread, total = nothing + LOWEST, nothing, nothing, nothing
    hint: tl.constexpr = "evict_last" if KEPT else ""
    for start in tl.range(0, size, 4 * WIDTH, num_stages=1):
        a, in_a = logits_at(x, begin, start + lanes, size, length, z, outer, hint)
        b, in_b = logits_at(x, begin, start + WIDTH + lanes, size, length, z, outer, hint)
        c, in_c = logits_at(x, begin, start + 2 * WIDTH + lanes, size, length, z, outer, hint)
        d, in_d = logits_at(x, begin, start + 3 * WIDTH + lanes, size, length, z, outer, hint)
        if to.total is not None:
            total += tl.where(in_a, a, 0.0) + tl.where(in_b, b, 0.0)
            total += tl.where(in_c, c, 0.0) + tl.where(in_d, d, 0.0)
        ab, cd = tl.maximum(a, b), tl.maximum(c, d)
        four = tl.maximum(ab, cd)
        new = tl.maximum(peak, four)
        shift = tl.maximum(peak - new, FLOOR)
        scale = tl.exp2(shift * LOG2E)
        if ENTROPY:
            spread = (spread + rest * shift) * scale
        rest *= scale
        rest, spread = add_term(smaller(a, b), new, rest, spread, ENTROPY)
        rest, spread = add_term(smaller(c, d), new, rest, spread, ENTROPY)
        rest, spread = add_term(smaller(ab, cd), new, rest, spread, ENTROPY)
        rest, spread = add_term(smaller(peak, four), new, rest, spread, ENTROPY)
        peak = new
    part_peak, part_rest, part_spread = join_lanes(peak, rest, spread, ENTROPY)
    return part_peak, part_rest, part_spread, tl.sum(total, 0)


@triton.jit
def logit_gradient(raw, inside, z, outer, normalizer, at, c):
    """dL/draw of some logits of a row, but for the target's own term; and d(soft cap)."""
    peak, log_sum = normalizer
    logit = logits_of(raw, inside, z, outer)
    if c.entropy is not None:
        log_p = tl.maximum((logit - peak) - log_sum, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp2(log_p * LOG2E)
    else:
        log_p = logit
        p = tl.exp2((logit - peak) * LOG2E - log_sum * LOG2E)
    g = act_two(p, log_p, at, c)
    bend = 1.0
    if z.inner is not None:
        capped = tanh(raw.to(tl.float32) * z.inner)
        bend = 1 - capped * capped
        g *= bend
    return g, bend


@triton.jit
def write_gradient(
    x, y, begin, size, v, length, z, outer, normalizer, at, c, WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """The gradient of the part's columns but for the target's own term, last columns first."""
    hint: tl.constexpr = "evict_first" if KEPT else ""
    steps = tl.cdiv(size, 4 * WIDTH)
    for step in range(0, steps):
        own = (steps - 1 - step) * (4 * WIDTH) + tl.arange(0, 4 * WIDTH)
        columns = begin + own
        inside = (own < size) & (columns < length)
        value = tl.load(x + columns, mask=inside, other=float("-inf"), eviction_policy=hint)
        g, _ = logit_gradient(value, inside, z, outer, normalizer, at, c)
        there = (own < size) & (columns < v)
        tl.store(y + columns, g.to(y.dtype.element_ty), mask=there, eviction_policy=hint)


UNROLL = tl.constexpr(4)
LEAST = tl.constexpr(-(2.0**99))  # logits below count as -inf
LARGE = tl.constexpr(2.0**24)  # from here on numbers in bfloat16 are 65,536 apart


@triton.jit
def add_raw(raw, scale, shift, rest, spread, ENTROPY: tl.constexpr):
    """Add e = 2 ** (raw scale - shift), and e times the exponent."""
    a = tl.fma(raw, scale, -shift)
    if ENTROPY:
        a = tl.maximum(a, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(a)
    if ENTROPY:
        spread = tl.fma(e, a, spread)
    return rest + e, spread


@triton.jit
def resident_partials(room, turn, x, begin, size, v, outer, to, PIECES: tl.constexpr):
    """Partial statistics of the part, which begin with its first piece; z = raw * outer, and the
    room is `open_room`'s."""
    ENTROPY: tl.constexpr = to.spread is not None
    address, _, arrived = room
    first, end = begin + tl.arange(0, 128) * 8, tl.minimum(begin + size, v)
    steps = tl.cdiv(size, STRIDE)
    largest = first * 0 + NOTHING
    most = piece_of(size, PIECES) // STRIDE
    for piece in range(PIECES):
        address = wait(address, arrived, turn, piece)
        start = tl.minimum(piece * most, steps)  # an unrolled loop must not end before it starts
        for step in tl.range(start, tl.minimum(start + most, steps), loop_unroll_factor=UNROLL):
            columns = first + step * STRIDE
            words = read(address + step * (2 * STRIDE), x, columns, columns < end)
            for i in tl.static_range(4):
                largest, _smaller = sifted(largest, words[i])
    low, high = unpacked(largest)
    top = tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)
    top = tl.maximum(top, LEAST, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.zeros_like(top) + outer * LOG2E
    # A large product is rounded by more than an exponent holds; one of 16 bits is exact.
    coarse = (scale.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    scale = tl.where(tl.abs(top) < LARGE, scale, coarse)
    shift = top * scale
    rest, spread, total = tl.zeros_like(top), tl.zeros_like(top), tl.zeros_like(top)
    largest = first * 0 + NOTHING
    for step in tl.range(0, steps, loop_unroll_factor=UNROLL):
        columns = first + step * STRIDE
        inside = columns < end
        words = read(address + step * (2 * STRIDE), x, columns, inside)
        for i in tl.static_range(4):
            if to.total is not None:
                low, high = unpacked(words[i])
                total += tl.where(inside, low + high, 0.0)
            largest, word = sifted(largest, words[i])
            low, high = unpacked(word)
            rest, spread = add_raw(low, scale, shift, rest, spread, ENTROPY)
            rest, spread = add_raw(high, scale, shift, rest, spread, ENTROPY)
    low, high = unpacked(largest)
    # The larger of the two is the lane's largest logit, which is left out.
    rest, spread = add_raw(smaller(low, high), scale, shift, rest, spread, ENTROPY)
    # What rounding `shift` did to all terms alike.
    right = tl.exp2(-tl.fma(top, scale, -shift))
    rest *= right
    spread *= right * LN2
    peak = tl.where(top == LEAST, LOWEST, top * outer)
    part_peak, part_rest, part_spread = join_lanes(peak, rest, spread, ENTROPY)
    return part_peak, part_rest, part_spread, tl.sum(total, 0) * outer


@triton.jit
def raw_gradient(raw, scale, shift, at, c):
    """dL/draw of a logit but for the target's own term."""
    a, times = tl.fma(raw, scale, -shift), at[0]
    if c.entropy is not None:
        a = tl.maximum(a, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        times += at[1] * (a * LN2)
    g = tl.exp2(a) * times
    if c.uniform is not None:
        g += at[2]
    return g


@triton.jit
def resident_gradient(
    room, x, y, begin, size, v, outer, normalizer, at, c,
    keep,  # None, or whether it is not 0
    following,  # where the next row's part lies, and how many columns of it
    PIECES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the part but for the target's own term, and fetch that of the next row
    behind it, piece by piece."""
    address, _, _ = room
    source, there = following
    first, end = begin + tl.arange(0, 128) * 8, tl.minimum(begin + size, v)
    steps = tl.cdiv(size, STRIDE)
    zeros = (first * 0).to(tl.float32)
    scale = zeros + outer * LOG2E
    shift = zeros + (normalizer[0] * LOG2E + normalizer[1] * LOG2E)
    most = piece_of(size, PIECES) // STRIDE
    for piece in range(PIECES):
        start = tl.minimum(piece * most, steps)
        for step in tl.range(start, tl.minimum(start + most, steps), loop_unroll_factor=UNROLL):
            columns = first + step * STRIDE
            inside = columns < end
            words = read(address + step * (2 * STRIDE), x, columns, inside)
            written = ()
            for i in tl.static_range(4):
                low, high = unpacked(words[i])
                low = raw_gradient(low, scale, shift, at, c)
                word = packed(low, raw_gradient(high, scale, shift, at, c))
                if keep is not None:
                    word &= first * 0 - keep.to(tl.int32)
                written = written + (word,)  # noqa: RUF005
            write(y, columns, inside, written)
        tl.debug_barrier()  # all have read what is overwritten now
        fetch(room, source, there, size, piece, PIECES)
