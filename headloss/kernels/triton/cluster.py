"""Blocks of a cluster exchange a few numbers in Triton, on GPUs that have clusters (Hopper on).

A launch with num_ctas=P cuts tensors [P, ..] into P parts, one for each block. Every block sends
its numbers into the shared memory of all of them; arrival is counted by a barrier there, so that
nobody waits for stores to reach memory, and nothing is left to be zeroed. The interpreter has the
whole tensor at hand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .versions import INTERPRETED

# Two mailboxes, used in turn: 16 blocks x 16 bytes each, and a barrier for each. A block's next
# message but one is sent after all have answered the last, so that no number is overwritten unread.
_OPEN = tl.constexpr("""{
.shared .align 16 .b8 mail[528];
.reg .pred p;
.reg .b32 t;
mov.u32 $0, mail;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p mbarrier.init.shared::cta.b64 [mail+512], 1;
@p mbarrier.init.shared::cta.b64 [mail+520], 1;
@p fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.b32 t, $1;
}""")

# $0: anything; $1: mailboxes; $2: turn; $3 to $6: the numbers; $7: blocks.
_SEND = tl.constexpr("""{
.reg .pred p, q;
.reg .b32 t, n, r, box, bar, phase, to, done;
mov.u32 t, %tid.x;
mov.u32 r, %cluster_ctarank;
mov.u32 n, %cluster_nctarank;
and.b32 box, $2, 1;
shl.b32 bar, box, 3;
add.u32 bar, bar, $1;
add.u32 bar, bar, 512;
shl.b32 box, box, 8;
add.u32 box, box, $1;
shr.u32 phase, $2, 1;
and.b32 phase, phase, 1;
shl.b32 to, n, 4;
setp.eq.u32 p, t, 0;
@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], to;
shl.b32 to, r, 4;
add.u32 to, to, box;
mapa.shared::cluster.u32 to, to, t;
mapa.shared::cluster.u32 done, bar, t;
setp.lt.u32 q, t, n;
@q st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {$3, $4, $5, $6}, [done];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 p, [bar], phase;
@!p bra WAIT;
mov.b32 $0, box;
}""")

_READ = tl.constexpr("ld.volatile.shared.v4.f32 {$0, $1, $2, $3}, [$4];")


@triton.jit
def open_mail():
    """Call once; every block must."""
    if INTERPRETED:
        return 0
    else:
        return tl.inline_asm_elementwise(
            _OPEN, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def post(mail, turn, numbers):
    """Send four numbers [P] to every block, and wait for theirs; `turn` counts from 0.

    Returns the mailbox [P] that `letter` reads.
    """
    a, b, c, d = numbers
    where = tl.zeros_like(a).to(tl.int32) + mail
    return tl.inline_asm_elementwise(
        _SEND, "=r,r,r,f,f,f,f", [where, turn, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def letter(box, i: tl.constexpr):
    """The four numbers of block `i`, [P] each: alike in all of them."""
    return tl.inline_asm_elementwise(
        _READ,
        "=f,=f,=f,=f,r",
        [box + 16 * i],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def of_part(numbers, i: tl.constexpr, PARTS: tl.constexpr):
    """What `letter` gives, from a whole tensor."""
    a, b, c, d = numbers
    own = tl.arange(0, PARTS) == i
    return (
        tl.zeros_like(a) + tl.sum(tl.where(own, a, 0.0), 0),
        tl.zeros_like(b) + tl.sum(tl.where(own, b, 0.0), 0),
        tl.zeros_like(c) + tl.sum(tl.where(own, c, 0.0), 0),
        tl.zeros_like(d) + tl.sum(tl.where(own, d, 0.0), 0),
    )
