"""The product of beside.py for Hopper, in Gluon: the main loop of gluon.py under another epilogue.

The student's logits come from memory into the registers of those threads that hold the teacher's.
The left half of a tile is asked for before the product, and the warp that loads slices brings the
right half as far as the L2 meanwhile: all programs come to their ends at the same time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..pair import DEEPEST, ROOT
from .formulas import LOG2E
from .gluon import (
    AT_START,
    HALF,
    LOWEST,
    READ,
    ROWS,
    WIDTH,
    WRITE_WIDE,
    accumulator_layout,
    load,
    multiplied,
    new_buffers,
    new_ring,
    pieces,
    place_of,
    write,
)
from .launch import Launcher
from .records import programs_on

MULTIPLYING, LOADING = gl.constexpr(232), gl.constexpr(40)  # as in gluon.py
DEEP = gl.constexpr(DEEPEST)
POWER = gl.constexpr(float(ROOT))

PIECE = gl.constexpr(32)  # columns that are worked on at once: 128 bytes of a row
AHEAD = gl.constexpr(2)  # pieces that are asked for before the product
SKIP = gl.constexpr(AHEAD.value * PIECE.value)


@gluon.jit
def piece(raw, inside, start, v):
    """The student's logits in the columns from `start` on."""
    at = start + gl.arange(0, PIECE, gl.SliceLayout(0, accumulator_layout(PIECE)))
    real = inside[:, None] & (at < v)[None, :]
    return gl.load(raw[:, None] + at[None, :], mask=real, other=LOWEST)


@gluon.jit
def word(p, d):
    """As in beside.py, of two columns at once."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 a, b; cvt.rn.bf16x2.f32 a, $3, $2; cvt.rn.f16x2.f32 b, $5, $4; "
        "prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632;}",
        "=r,=r,f,f,f,f", [p, d], dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def multiply(
    ring,
    out,  # buffers of words on their way out
    words,
    of,  # beside.Beside
    p,  # the student's peak and log-sum at the term's temperature, for means under it
    n, v, h, WHO: gl.constexpr, PROGRAMS: gl.constexpr,
):
    """Four warps: the upper or lower half of the program's tiles, and their epilogues."""
    layout: gl.constexpr = accumulator_layout(WIDTH)
    narrow: gl.constexpr = gl.SliceLayout(1, accumulator_layout(PIECE))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    tiles_m, blocks = gl.cdiv(n, ROWS), gl.cdiv(v, WIDTH)
    stage, phase = 0, 0
    peaks, log_sums = p
    for tile in range(gl.program_id(0), tiles_m * blocks, PROGRAMS):
        m, block = place_of(tile, tiles_m, blocks)
        first = m * ROWS + WHO * HALF
        rows = first + gl.arange(0, HALF, narrow)
        inside, start = rows < n, block * WIDTH
        raw = of.raw.data + rows.to(gl.int64) * of.raw.stride
        offset = gl.load(of.offset + rows, mask=inside, other=0.0)
        own_peak = gl.load(of.own.normalizer.peak + rows, mask=inside, other=0.0)
        own_log_sum = gl.load(of.own.normalizer.log_sum + rows, mask=inside, other=0.0)
        waiting = ()
        for i in gl.static_range(AHEAD):
            waiting += (piece(raw, inside, start + i * PIECE, v),)
        z, stage, phase = multiplied(ring, stage, phase, h, WHO)

        own = gl.zeros_like(offset) + of.own.z.outer
        if of.own.z.temperature is not None:
            own = own / gl.load(of.own.z.temperature + rows, mask=inside, other=1.0)
        lse = own_peak + own_log_sum
        warmth = of.p.z.outer / own
        depth = DEEP
        if of.apart:
            depth = gl.minimum(DEEP / warmth, DEEP * POWER)
        depth = (lse - depth)[:, None]
        scale, warmth, far = own[:, None], warmth[:, None], (lse * LOG2E)[:, None]
        if peaks is not None:
            shift = gl.load(peaks + rows, mask=inside, other=0.0)
            shift += gl.load(log_sums + rows, mask=inside, other=0.0)
        if start + WIDTH > v:
            z = gl.where((columns < v - start)[None, :], z, LOWEST)
        peak = gl.convert_layout(gl.max(z, 1), narrow, assert_trivial=True) * of.z.outer
        parts = pieces(z)
        mass, moment = gl.zeros_like(offset), gl.zeros_like(offset)
        for i in gl.static_range(8):
            q, here = parts[i] * of.z.outer, waiting[i]
            d = (q - here * of.p.z.outer) - offset[:, None]
            e = gl.exp2((q - peak[:, None]) * LOG2E)
            weight = e
            if peaks is not None:
                weight = gl.exp2((here * of.p.z.outer - shift[:, None]) * LOG2E)
            mass += gl.sum(e, 1)  # at once: registers are few
            moment += gl.sum(weight * d, 1)
            high = gl.maximum(here * scale, depth)
            d = (q - high * warmth) - offset[:, None]
            log_p = high * LOG2E - far
            if of.apart:
                deep = log_p < -DEEP * LOG2E
                root = gl.exp2(gl.where(deep, log_p / POWER, log_p))
                kept = gl.where(deep, -root, root)
            else:
                kept = gl.exp2(log_p)
            write(word(kept, d), words, out, first, block, WHO, i)
            if i + AHEAD < 8:
                waiting += (piece(raw, inside, start + (i + AHEAD) * PIECE, v),)
        place = of.sums + block.to(gl.int64) * of.pitch + rows
        gl.store(place, peak, mask=inside)
        gl.store(place + of.stride, mass, mask=inside)
        gl.store(place + 2 * of.stride, moment, mask=inside)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n"])
def overlapping_beside_kernel(
    x,  # descriptor [n, H']
    w,  # descriptor [v, H']
    words,  # descriptor [n, v] of int32, in the memory of the student's logits
    of,  # beside.Beside
    n, v, h, PROGRAMS: gl.constexpr,
):
    ring, out = new_ring(x, w), new_buffers(words)
    peak, log_sum = None, None
    if of.reverse:
        peak, log_sum = of.p.normalizer.peak, of.p.normalizer.log_sum
    p = peak, log_sum
    gl.warp_specialize(
        [
            (multiply, (ring, out, words, of, p, n, v, h, 0, PROGRAMS)),
            (multiply, (ring, out, words, of, p, n, v, h, 1, PROGRAMS)),
            (load, (x, w, ring, n, v, h, PROGRAMS, of.raw, SKIP)),
        ],
        [4, 1],
        [MULTIPLYING, LOADING],
    )


launch_beside = Launcher(
    overlapping_beside_kernel, tiles=READ | {"words": WRITE_WIDE}, num_warps=4, maxnreg=AT_START
)


def launch(x: Tensor, w: Tensor, of: Any) -> None:
    """What beside_kernel writes, without soft caps and for a teacher's scale > 0."""
    programs = programs_on(x.device)
    words = of.raw.data.view(torch.int32)
    launch_beside(programs, x, w, words, of, len(x), len(w), x.shape[1], PROGRAMS=programs)
