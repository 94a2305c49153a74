"""The product of beside.py for Hopper, in Gluon: the main loop of gluon.py under another epilogue.

The student's logits come straight from memory into the registers that hold the teacher's; the first
quarter of them is asked for before the product.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .formulas import LOG2E
from .gluon import (
    AT_START,
    BUFFERS,
    HALF,
    LOADING,
    LOWEST,
    MULTIPLYING,
    PART,
    READ,
    ROWS,
    WIDTH,
    WRITE,
    accumulator_layout,
    halves,
    load,
    multiplied,
    new_ring,
    place_of,
    write,
)
from .launch import Launcher
from .records import programs_on


@gluon.jit
def quarter(raw, columns, inside, start, v, scale):
    """z of the student's logits in the columns from `start` on."""
    at = start + columns
    real = inside[:, None] & (at < v)[None, :]
    return gl.load(raw[:, None] + at[None, :], mask=real, other=LOWEST) * scale


@gluon.jit
def multiply(
    ring,
    out,  # buffers of differences on their way out
    held,
    of,  # beside.Beside
    p,  # the student's peak and log-sum, for means under it
    n,
    v,
    h,
    WHO: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Four warps: the upper or lower half of the program's tiles, and their epilogues."""
    layout: gl.constexpr = accumulator_layout(WIDTH)
    narrow: gl.constexpr = gl.SliceLayout(1, accumulator_layout(PART))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    of_part = gl.arange(0, PART, gl.SliceLayout(0, accumulator_layout(PART)))
    tiles_m, blocks = gl.cdiv(n, ROWS), gl.cdiv(v, WIDTH)
    stage, phase = 0, 0
    peaks, log_sums = p
    for tile in range(gl.program_id(0), tiles_m * blocks, PROGRAMS):
        m, block = place_of(tile, tiles_m, blocks)
        first = m * ROWS + WHO * HALF
        rows = first + gl.arange(0, HALF, narrow)
        inside = rows < n
        raw = of.raw.data + rows.to(gl.int64) * of.raw.stride
        own = gl.load(of.own + rows, mask=inside, other=0)
        offset = gl.load(of.logit + rows, mask=inside, other=0.0)
        offset -= gl.load(raw + own, mask=inside, other=0.0) * of.p_z.outer
        if peaks is not None:
            shift = gl.load(peaks + rows, mask=inside, other=0.0)
            shift += gl.load(log_sums + rows, mask=inside, other=0.0)
        start = block * WIDTH
        other = quarter(raw, of_part, inside, start, v, of.p_z.outer)
        z, stage, phase = multiplied(ring, stage, phase, h, WHO)

        if start + WIDTH > v:
            z = gl.where((columns < v - start)[None, :], z, LOWEST)
        peak = gl.convert_layout(gl.max(z, 1), narrow, assert_trivial=True) * of.z.outer
        left, right = halves(z)
        parts = halves(left) + halves(right)
        for i in gl.static_range(4):
            here = other
            if i < 3:
                other = quarter(raw, of_part, inside, start + (i + 1) * PART, v, of.p_z.outer)
            q = parts[i] * of.z.outer
            d = (q - here) - offset[:, None]
            e = gl.exp2((q - peak[:, None]) * LOG2E)
            weight = e
            if peaks is not None:
                weight = gl.exp2((here - shift[:, None]) * LOG2E)
            if i == 0:
                mass, moment = e, weight * d
            else:
                mass, moment = mass + e, moment + weight * d
            write(d, held, out, first, block, WHO, i)
        place = of.sums + block.to(gl.int64) * of.pitch + rows
        gl.store(place, peak, mask=inside)
        gl.store(place + of.stride, gl.sum(mass, 1), mask=inside)
        gl.store(place + 2 * of.stride, gl.sum(moment, 1), mask=inside)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n"])
def overlapping_beside_kernel(
    x,  # descriptor [n, H']
    w,  # descriptor [v, H']
    held,  # descriptor [n, v]
    of,  # beside.Beside
    n,
    v,
    h,
    PROGRAMS: gl.constexpr,
):
    ring = new_ring(x, w)
    out = gl.allocate_shared_memory(held.dtype, [2 * BUFFERS, HALF, PART], held.layout)
    peak, log_sum = None, None
    if of.reverse:
        peak, log_sum = of.p.peak, of.p.log_sum
    p = peak, log_sum
    gl.warp_specialize(
        [
            (multiply, (ring, out, held, of, p, n, v, h, 0, PROGRAMS)),
            (multiply, (ring, out, held, of, p, n, v, h, 1, PROGRAMS)),
            (load, (x, w, ring, n, v, h, PROGRAMS)),
        ],
        [4, 1],
        [MULTIPLYING, LOADING],
    )


launch_beside = Launcher(
    overlapping_beside_kernel, tiles=READ | {"held": WRITE}, num_warps=4, maxnreg=AT_START
)


def launch(x: Tensor, w: Tensor, held: Tensor, of: Any) -> None:
    """What beside_kernel writes, without soft caps and for scales > 0."""
    programs = programs_on(x.device)
    launch_beside(programs, x, w, held, of, len(x), len(w), x.shape[1], PROGRAMS=programs)
