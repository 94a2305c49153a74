"""What blocks of a GPU do in PTX, unknown to Triton: logits in bfloat16 are brought into
shared memory, read, compared and written as words of two; blocks of a cluster exchange numbers.

A block that has words is four warps. Its room in shared memory is an array of PTX's own, and copies
are the hardware's (bulk copies, counted by a barrier behind the array). In the interpreter words
are read from the logits themselves.

A launch of `OfClusters` has blocks that are programs of their own. Each sends its numbers into the
shared memory of all of them; arrival is counted by a barrier there, so that nobody waits for stores
to reach memory, and nothing is left to be zeroed. The interpreter has no clusters.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from .launch import cdiv
from .versions import INTERPRETED

WARPS = 4  # so that five or six blocks are on a multiprocessor
STEP = 32 * WARPS * 8  # columns that a block reads at once: 16 bytes a lane
STRIDE = tl.constexpr(STEP)
# $0: the array, behind which its barrier is.
_OPEN = """{
.shared .align 128 .b8 part_of_row[%d]; .reg .pred p; .reg .b32 t, bar;
mov.u32 bar, part_of_row; add.u32 bar, bar, %d; mov.u32 t, %%tid.x; setp.eq.u32 p, t, 0;
@p mbarrier.init.shared::cta.b64 [bar], 1;
@p fence.mbarrier_init.release.cluster; mov.u32 $0, part_of_row;
}"""

# $1: the array; $2: its barrier; $3: where the part lies; $4: its bytes.
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
def opening(columns: int) -> str:
    """The instructions that make room for it."""
    size = room_of(columns)
    return _OPEN % (size + 16, size)


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
def larger(a, b):
    """The larger of two words, half by half."""
    if INTERPRETED:
        return sifted(a, b)[0]
    else:
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def word_at(x, columns, inside):
    low = tl.load(x + columns, mask=inside, other=float("-inf"))
    high = tl.load(x + columns + 1, mask=inside, other=float("-inf"))
    return packed(low.to(tl.float32), high.to(tl.float32))


@triton.jit
def read(address, x, columns, inside):
    """Eight logits of each lane, as four words."""
    if INTERPRETED:
        return (
            word_at(x, columns, inside), word_at(x, columns + 2, inside),
            word_at(x, columns + 4, inside), word_at(x, columns + 6, inside)
        )
    else:
        return tl.inline_asm_elementwise(
            _READ, "=r,=r,=r,=r,r", [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1
        )


@triton.jit
def write(y, columns, inside, words):
    """Eight numbers of each lane."""
    if INTERPRETED:
        for i in tl.static_range(4):
            low, high = unpacked(words[i])
            tl.store(y + columns + 2 * i, low.to(tl.bfloat16), mask=inside)
            tl.store(y + columns + 2 * i + 1, high.to(tl.bfloat16), mask=inside)
    else:
        place = (y + columns).to(tl.int64)
        tl.inline_asm_elementwise(
            _WRITE, "=r,l,r,r,r,r,r",
            [place, inside.to(tl.int32), words[0], words[1], words[2], words[3]], dtype=tl.int32,
            is_pure=False, pack=1
        )


@triton.jit
def fill(address, there):
    """Eight times -inf in a lane's place."""
    tl.inline_asm_elementwise(
        _FILL, "=r,r,r", [address, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def open_room(OPEN: tl.constexpr, begin, size, v):
    """[LANES] addresses of each lane's first words, the room, and its barrier; columns that no copy
    reaches are -inf. `OPEN` is `opening(size)`; call once."""
    lanes = tl.arange(0, 128) * 8
    if INTERPRETED:
        return lanes, 0, 0
    else:
        room = tl.inline_asm_elementwise(
            OPEN, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )
        for start in range(0, size, STRIDE):
            at = start + lanes
            fill(room + at * 2, begin + at >= tl.minimum(begin + size, v))
        tl.debug_barrier()
        return room + lanes * 2, room, room + tl.cdiv(size, STRIDE) * (2 * STRIDE)


@triton.jit
def fetch(room, arrived, source, columns):
    """Begin to copy a part; nobody reads the room any more."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            _FETCH, "=r,r,r,l,r", [room, arrived, source.to(tl.int64), tl.maximum(columns, 0) * 2],
            dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait(address, arrived, turn):
    """Until the part of this turn, counted from 0, is there; the address once more."""
    if INTERPRETED:
        return address
    else:
        return tl.inline_asm_elementwise(
            _WAIT, "=r,r,r,r", [address, arrived, turn], dtype=tl.int32, is_pure=False, pack=1
        )


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
    return tl.inline_asm_elementwise(
        _OPEN_MAIL, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def post(mail, turn, numbers):
    """Send four numbers to every block, and wait for theirs; `turn` counts from 0.

    Returns the mailbox that `letter` reads.
    """
    a, b, c, d = numbers
    return tl.inline_asm_elementwise(
        _SEND, "=r,r,r,f,f,f,f", [mail, turn, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def letter(box, i: tl.constexpr):
    """The four numbers of block `i`."""
    return tl.inline_asm_elementwise(
        _READ, "=f,=f,=f,=f,r", [box + 16 * i],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1
    )
