"""Both acts on given logits in bfloat16, on rows that stay in shared memory in between.

A row is cut over the blocks of a cluster, as in given.py; a part is copied into its block's shared
memory by the hardware (a bulk copy, which a barrier counts), so that device memory sees one read
and one write whatever the L2 holds. A block is four warps and a part at most 46 KiB, so that
several blocks are on a multiprocessor: while one waits for its row, or for the other parts of it,
the others work.

Of two words of two logits (words.py) the larger goes on, half by half, and the smaller is summed,
so that a lane's largest logit stays out of its sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formulas import FLOOR, LN2, LOG2E
from .walk import LOWEST, join_lanes
from .words import STRIDE, larger, packed, read, sifted, unpacked, write

UNROLL = tl.constexpr(2)
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
def columns_of(begin, size, v):
    """[LANES] columns of each lane's first words, the column at which the part ends, and steps."""
    return begin + tl.arange(0, 128) * 8, tl.minimum(begin + size, v), tl.cdiv(size, STRIDE)


@triton.jit
def resident_partials(
    address,  # [LANES] of each lane's first words
    x, begin, size, v,
    outer,  # z = raw * outer
    to,  # Partials that are wanted
):
    """Partial statistics of the part."""
    ENTROPY: tl.constexpr = to.spread is not None
    first, end, steps = columns_of(begin, size, v)
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
        if to.total is not None:
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
    part_peak, part_rest, part_spread = join_lanes(peak, rest, spread, ENTROPY)
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
def resident_gradient(address, x, y, begin, size, v, outer, normalizer, at, c, keep):  # fmt: skip
    """Write the gradient of the part but for the target's own term. `keep`: None, or whether it is
    not 0."""
    first, end, steps = columns_of(begin, size, v)
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
            bits = first * 0 - keep.to(tl.int32)
            a, b, c_, d = a & bits, b & bits, c_ & bits, d & bits
        write(y, columns, inside, (a, b, c_, d))
