"""The product of beside.py for Hopper, in Gluon: the main loop of gluon.py under another epilogue.

The student's logits come from memory into the registers of those threads that hold the teacher's.
The left half of a tile is asked for before the product, and the warp that loads slices brings the
right half as far as the L2 meanwhile: all programs come to their ends at the same time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import gluon as hopper
from . import tiles
from .formulas import LN2, LOG2E, SURE
from .gluon import LOWEST, OPTIONS, READ, WIDTH, WRITE_WIDE, each_tile
from .launch import Launcher, Tile
from .pair import DEEP, POWER

PIECE = gl.constexpr(32)  # columns that are worked on at once: 128 bytes of a row
AHEAD = gl.constexpr(2)  # pieces that are asked for before the product
SKIP = gl.constexpr(AHEAD.value * PIECE.value)


@gluon.jit
def piece(raw, inside, start, v):
    """The student's logits in the columns from `start` on."""
    at = start + gl.arange(0, PIECE, gl.SliceLayout(0, hopper.accumulator_layout(PIECE)))
    real = inside[:, None] & (at < v)[None, :]
    return gl.load(raw[:, None] + at[None, :], mask=real, other=LOWEST)


@gluon.jit
def word(p, d):
    """p in bfloat16 and d in float16, of two columns at once; see `Differences`."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 a, b; cvt.rn.bf16x2.f32 a, $3, $2; cvt.rn.f16x2.f32 b, $5, $4; "
        "prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632;}",
        "=r,=r,f,f,f,f", [p, d], dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def first_pieces(of, rows, inside, block, v):
    """Pointers to the student's logits in a tile's rows, and the first of its pieces."""
    raw = of.data + rows.to(gl.int64) * of.stride
    waiting = ()
    for i in gl.static_range(AHEAD):
        waiting += (piece(raw, inside, block * WIDTH + i * PIECE, v),)
    return raw, waiting


@gluon.jit
def ask_of_raw(given, first, block, n, v):
    """What a row's formulas take, and the first pieces of the student's logits."""
    of, _ = given
    rows, inside = hopper.rows_of(first, n, PIECE)
    offset = gl.load(of.offset + rows, mask=inside, other=0.0)
    own = hopper.normalizer_of(of.own.normalizer, rows, inside)
    raw, waiting = first_pieces(of.raw, rows, inside, block, v)
    return offset, own, raw, waiting


@gluon.jit
def compare_tile(z, asked, out, words, given, first, block, n, v, WHO: gl.constexpr):
    """Words of a tile, and its sums."""
    of, p = given
    student, apart = p
    offset, normalizer, raw, waiting = asked
    rows, inside = hopper.rows_of(first, n, PIECE)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, hopper.accumulator_layout(WIDTH)))
    start = block * WIDTH
    own = hopper.per_row(gl.zeros_like(offset) + of.own.z.outer, of.own.z, rows, inside)
    lse = normalizer[0] + normalizer[1]
    warmth = of.p.z.outer / own
    depth = lse - DEEP
    if apart is not None:
        depth = lse - gl.minimum(DEEP / warmth, DEEP * POWER)
    depth = depth[:, None]
    scale, warmth, far = own[:, None], warmth[:, None], (lse * LOG2E)[:, None]
    if student is not None:
        at_term = hopper.normalizer_of(student, rows, inside)
        shift = at_term[0] + at_term[1]
    if start + WIDTH > v:
        z = gl.where((columns < v - start)[None, :], z, LOWEST)
    peak = gl.convert_layout(gl.max(z, 1), rows.type.layout, assert_trivial=True) * of.z.outer
    parts = hopper.pieces(z)
    mass, moment = gl.zeros_like(offset), gl.zeros_like(offset)
    for i in gl.static_range(8):
        q, here = parts[i] * of.z.outer, waiting[i]
        d = (q - here * of.p.z.outer) - offset[:, None]
        e = gl.exp2((q - peak[:, None]) * LOG2E)
        weight = e
        if student is not None:
            weight = gl.exp2((here * of.p.z.outer - shift[:, None]) * LOG2E)
        mass += gl.sum(e, 1)  # at once: registers are few
        moment += gl.sum(weight * d, 1)
        if words is not None:
            high = gl.maximum(here * scale, depth)
            d = (q - high * warmth) - offset[:, None]
            log_p = high * LOG2E - far
            if apart is not None:
                deep = log_p < -DEEP * LOG2E
                root = gl.exp2(gl.where(deep, log_p / POWER, log_p))
                kept = gl.where(deep, -root, root)
            else:
                kept = gl.exp2(log_p)
            hopper.write(word(kept, d), words, out, first, block, WHO, i)
        if i + AHEAD < 8:
            waiting += (piece(raw, inside, start + (i + AHEAD) * PIECE, v),)
    place = of.sums + block.to(gl.int64) * of.pitch + rows
    gl.store(place, peak, mask=inside)
    gl.store(place + of.stride, mass, mask=inside)
    gl.store(place + 2 * of.stride, moment, mask=inside)


@gluon.jit(do_not_specialize=["n"])
def overlapping_beside_kernel(x, w, words, of, n, v, h, PROGRAMS: gl.constexpr):
    """Words [n, v] in int32, in the memory of the student's logits, or None; see beside.Beside."""
    student, apart = None, None  # flags, as in gluon.py
    if of.reverse:  # the student's at the term's temperature, for means under it
        student = of.p.normalizer
    if of.apart:
        apart = of.offset
    given = of, (student, apart)
    each_tile(x, w, words, given, n, v, h, PROGRAMS, ask_of_raw, compare_tile, 40, of.raw, SKIP)


@gluon.jit
def side_of(of, rows, inside):
    """Scale and shift of log p in units of log 2, and what that is for a likely column."""
    peak, log_sum = hopper.normalizer_of(of.normalizer, rows, inside)
    return of.z.outer * LOG2E, ((peak + log_sum) * LOG2E)[:, None], (-log_sum * LOG2E)[:, None]


@gluon.jit
def log_2(raw, side):
    """log p as in `formulas.log_softmax`."""
    below = raw * side[0] - side[1]
    return gl.where(below > SURE * LOG2E, side[2], below)


@gluon.jit
def ask_of_sides(given, first, block, n, v):
    """As `ask_of_raw`, for the gradient."""
    raw, of = given
    rows, inside = hopper.rows_of(first, n, PIECE)
    weight = gl.load(of.weight + rows, mask=inside, other=0.0)[:, None] * of.student.z.factor
    p, q = side_of(of.student, rows, inside), side_of(of.teacher, rows, inside)
    raw, waiting = first_pieces(raw, rows, inside, block, v)
    return weight, p, q, raw, waiting


@gluon.jit
def slope_tile(z, asked, out, to, given, first, block, n, v, WHO: gl.constexpr):
    """The gradient of a tile: see pair.py."""
    of, parts = given[1], hopper.pieces(z)
    weight, p, q, raw, waiting = asked
    rows, inside = hopper.rows_of(first, n, PIECE)
    for i in gl.static_range(8):
        log_p, log_q = log_2(waiting[i], p), log_2(parts[i], q)
        g = gl.exp2(log_p)
        if of.pivot is not None:
            pivot = gl.load(of.pivot + rows, mask=inside, other=0.0)[:, None]
            g *= (log_p - log_q) * LN2 - pivot
        else:
            g -= gl.exp2(log_q)
        hopper.write(gl.where(weight == 0, 0.0, g * weight), to, out, first, block, WHO, i)
        if i + AHEAD < 8:
            waiting += (piece(raw, inside, block * WIDTH + (i + AHEAD) * PIECE, v),)


@gluon.jit(do_not_specialize=["n"])
def overlapping_slope_kernel(x, w, to, raw, of, n, v, h, PROGRAMS: gl.constexpr):
    """To a descriptor [n, v]; `raw` is a Matrix of the student's logits, `of` a pair.Part."""
    each_tile(x, w, to, (raw, of), n, v, h, PROGRAMS, ask_of_sides, slope_tile, 40, raw, SKIP)


LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16)
WRITE = Tile((tiles.ROWS // 2, PIECE.value), LAYOUT)
launch_measuring = Launcher(overlapping_beside_kernel, tiles=READ, **OPTIONS)
launch_beside = Launcher(overlapping_beside_kernel, tiles=READ | {"words": WRITE_WIDE}, **OPTIONS)
launch_slope = Launcher(overlapping_slope_kernel, tiles=READ | {"to": WRITE}, **OPTIONS)
