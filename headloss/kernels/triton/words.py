"""The two walks of given.py with a part of a row, in bfloat16, in shared memory in between, in
Triton and, where Triton knows no such thing, in PTX; and how blocks of a cluster exchange numbers.

The hardware copies a part in bulk, piece by piece, counted by barriers, so that device memory sees
one read and one write whatever the L2 holds. A piece that the gradient has read makes room for the
next row's. Several blocks are on a multiprocessor: while one waits for its row, or for other parts
of it, the others work. Logits are read, compared and written as words of two: of two words the
larger goes on, half by half, and the smaller is summed, so that a lane's largest logit stays out of
its sum.

A block's room in shared memory is an array of PTX's own. In the interpreter words are read from the
logits themselves.

A launch of `OfClusters` has blocks that are programs of their own. Each sends its numbers into the
shared memory of all of them; arrival is counted by a barrier there, so that nobody waits for stores
to reach memory, and nothing is left to be zeroed. The interpreter has no clusters.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from .formulas import FLOOR, LN2, LOG2E
from .launch import cdiv
from .versions import INTERPRETED
from .walk import LOWEST, join_lanes, smaller

WARPS = 4  # so that five or six blocks are on a multiprocessor
STEP = 32 * WARPS * 8  # columns that a block reads at once: 16 bytes a lane
STRIDE = tl.constexpr(STEP)
NOTHING = tl.constexpr(-8323200)  # a word of two of -inf
# $0: the array, behind which the barriers of its pieces are.
_OPEN = """{
.shared .align 128 .b8 part_of_row[%d]; .reg .pred p; .reg .b32 t, bar;
mov.u32 bar, part_of_row; add.u32 bar, bar, %d; mov.u32 t, %%tid.x; shl.b32 t, t, 3;
setp.lt.u32 p, t, %d; add.u32 bar, bar, t;
@p mbarrier.init.shared::cta.b64 [bar], 1;
@p fence.mbarrier_init.release.cluster; mov.u32 $0, part_of_row;
}"""

# $1: the place in the array; $2: its barrier; $3: where the piece lies; $4: its bytes.
_FETCH = tl.constexpr("""{
.reg .pred p, q; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
setp.gt.and.s32 q, $4, 0, p;
@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], $4;
@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$3], $4, [$2];
mov.b32 $0, $1;
}""")

# $1: an address, which is given back; $2: the barrier; $3: turn.
_WAIT = tl.constexpr("""{
.reg .pred p; .reg .b32 phase; and.b32 phase, $3, 1;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 p, [$2], phase;
@!p bra WAIT; mov.b32 $0, $1;
}""")

_READ = tl.constexpr("ld.volatile.shared.v4.b32 {$0, $1, $2, $3}, [$4];")

_FILL = tl.constexpr("""{
.reg .pred q; .reg .b32 low; setp.ne.s32 q, $2, 0; mov.b32 low, 0xff80ff80;
@q st.volatile.shared.v4.b32 [$1], {low, low, low, low}; mov.b32 $0, 0;
}""")

_WRITE = tl.constexpr("""{
.reg .pred q; setp.ne.s32 q, $2, 0;
@q st.global.v4.b32 [$1], {$3, $4, $5, $6}; mov.b32 $0, 0;
}""")

_SIFT = tl.constexpr("""{
.reg .b32 larger; max.NaN.bf16x2 larger, $2, $3; min.NaN.bf16x2 $1, $2, $3; mov.b32 $0, larger;
}""")


def room_of(columns: int) -> int:
    """The bytes of a part of so many columns."""
    return 2 * STEP * cdiv(columns, STEP)


@functools.cache
def opening(columns: int, pieces: int) -> str:
    """The instructions that make room for it, and for the barriers of its pieces."""
    size, barriers = room_of(columns), 8 * pieces
    return _OPEN % (size + barriers, size, barriers)


@triton.jit
def ptx(CODE: tl.constexpr, FORM: tl.constexpr, given):
    """Instructions of each lane that do more than compute the number that they return."""
    return tl.inline_asm_elementwise(CODE, FORM, given, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def unpacked(word):
    """The two logits of a word."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def packed(low, high):
    """A word of two numbers, rounded."""
    if INTERPRETED:
        a = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        b = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        return a | (b << 16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True,
            pack=1
        )


@triton.jit
def sifted(a, b):
    """The larger and the smaller of two words, half by half. A NaN is in both."""
    if INTERPRETED:
        a_low, a_high = unpacked(a)
        b_low, b_high = unpacked(b)
        larger = packed(tl.maximum(a_low, b_low), tl.maximum(a_high, b_high))
        return larger, packed(tl.minimum(a_low, b_low), tl.minimum(a_high, b_high))
    else:
        return tl.inline_asm_elementwise(
            _SIFT, "=r,=r,r,r", [a, b], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )


@triton.jit
def read(address, x, columns, inside):
    """Eight logits of each lane, as four words."""
    if INTERPRETED:
        at = (x + columns).to(tl.pointer_type(tl.int32))
        a, b = tl.load(at, inside, NOTHING), tl.load(at + 1, inside, NOTHING)
        return a, b, tl.load(at + 2, inside, NOTHING), tl.load(at + 3, inside, NOTHING)
    else:
        return tl.inline_asm_elementwise(
            _READ, "=r,=r,=r,=r,r", [address], (tl.int32, tl.int32, tl.int32, tl.int32), False, 1
        )


@triton.jit
def write(y, columns, inside, words):
    """Eight numbers of each lane."""
    if INTERPRETED:
        for i in tl.static_range(4):
            tl.store((y + columns).to(tl.pointer_type(tl.int32)) + i, words[i], mask=inside)
    else:
        at = (y + columns).to(tl.int64), inside.to(tl.int32)
        ptx(_WRITE, "=r,l,r,r,r,r,r", [at[0], at[1], words[0], words[1], words[2], words[3]])


@triton.jit
def open_room(OPEN: tl.constexpr, begin, size, v):
    """Room: [LANES] addresses of each lane's first words, where it begins, and its barriers;
    columns that no copy reaches are -inf. `OPEN` is `opening(size)`; call once."""
    lanes = tl.arange(0, 128) * 8
    if INTERPRETED:
        return lanes, 0, 0
    else:
        room = ptx(OPEN, "=r,r", [tl.program_id(0)])
        for start in range(0, size, STRIDE):
            at = start + lanes
            beyond = begin + at >= tl.minimum(begin + size, v)
            ptx(_FILL, "=r,r,r", [room + at * 2, beyond.to(tl.int32)])
        tl.debug_barrier()
        return room + lanes * 2, room, room + tl.cdiv(size, STRIDE) * (2 * STRIDE)


@triton.jit
def piece_of(size, PIECES: tl.constexpr):
    """Columns of a piece."""
    return tl.cdiv(size, PIECES * STRIDE) * STRIDE


@triton.jit
def fetch(room, source, columns, size, piece, PIECES: tl.constexpr):
    """Begin to copy a piece of a part, of a row that has `columns` from where the part begins;
    nobody reads its room any more."""
    if not INTERPRETED:
        _, start, arrived = room
        most = piece_of(size, PIECES)
        first = piece * most
        there = tl.minimum(tl.maximum(tl.minimum(columns, size) - first, 0), most)
        to, place = start + first * 2, (source + first).to(tl.int64)
        ptx(_FETCH, "=r,r,r,l,r", [to, arrived + piece * 8, place, there * 2])


@triton.jit
def wait(address, arrived, turn, piece):
    """Until the piece of this turn, counted from 0, is there; the address once more."""
    if INTERPRETED:
        return address
    else:
        return ptx(_WAIT, "=r,r,r,r", [address, arrived + piece * 8, turn])


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


# Two mailboxes, used in turn: 16 blocks x 16 bytes each, and a barrier for each. A block's next
# message but one is sent after all have answered the last, so that no number is overwritten unread.
_OPEN_MAIL = tl.constexpr("""{
.shared .align 16 .b8 mail[528]; .reg .pred p; .reg .b32 t; mov.u32 $0, mail; mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p mbarrier.init.shared::cta.b64 [mail+512], 1;
@p mbarrier.init.shared::cta.b64 [mail+520], 1;
@p fence.mbarrier_init.release.cluster; barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned; mov.b32 t, $1;
}""")

# $0: anything; $1: mailboxes; $2: turn; $3 to $6: the numbers; $7: blocks.
_SEND = tl.constexpr("""{
.reg .pred p, q; .reg .b32 t, n, r, box, bar, phase, to, done; mov.u32 t, %tid.x;
mov.u32 r, %cluster_ctarank; mov.u32 n, %cluster_nctarank; and.b32 box, $2, 1;
shl.b32 bar, box, 3; add.u32 bar, bar, $1; add.u32 bar, bar, 512; shl.b32 box, box, 8;
add.u32 box, box, $1; shr.u32 phase, $2, 1; and.b32 phase, phase, 1; shl.b32 to, n, 4;
setp.eq.u32 p, t, 0;
@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], to; shl.b32 to, r, 4;
add.u32 to, to, box; mapa.shared::cluster.u32 to, to, t; mapa.shared::cluster.u32 done, bar, t;
setp.lt.u32 q, t, n;
@q st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {$3, $4, $5, $6}, [done];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 p, [bar], phase;
@!p bra WAIT; mov.b32 $0, box;
}""")


@triton.jit
def open_mail():
    """Call once; every block must."""
    return ptx(_OPEN_MAIL, "=r,r", [tl.program_id(0)])


@triton.jit
def letter(box, i: tl.constexpr):
    """The four numbers of block `i`."""
    return tl.inline_asm_elementwise(
        _READ, "=f,=f,=f,=f,r", [box + 16 * i], (tl.float32, tl.float32, tl.float32, tl.float32),
        False, 1
    )


@triton.jit
def met(partials, mail, turn, PARTS: tl.constexpr, ENTROPY: tl.constexpr):
    """Partial statistics of the row, on each of its parts, joined in the same order. No part waits
    for the one before it: all are taken against the largest logit, which is found first."""
    peak, rest, spread, total = partials
    peak = tl.maximum(peak, LOWEST)  # that no difference of peaks is NaN
    box = ptx(_SEND, "=r,r,r,f,f,f,f", [mail, turn, peak, rest, spread, total])
    peak, _, _, _ = letter(box, 0)
    for i in tl.static_range(1, PARTS):
        other, _, _, _ = letter(box, i)
        peak = tl.maximum(peak, other)
    all_rest, all_spread, all_total, taken = 0.0, 0.0, 0.0, peak != peak
    for i in tl.static_range(PARTS):
        own_peak, rest, spread, total = letter(box, i)
        top = own_peak == peak
        shift = tl.maximum(own_peak - peak, FLOOR)
        scale, mass = tl.exp2(shift * LOG2E), 1 + rest
        # The largest term stays out of one part's sum alone, also where several hold its equal.
        all_rest += tl.where(top & (taken == 0), rest, mass * scale)
        taken = taken | top
        if ENTROPY:
            all_spread += scale * (spread + mass * shift)
        all_total += total
    return tl.where(peak == LOWEST, float("-inf"), peak), all_rest, all_spread, all_total
