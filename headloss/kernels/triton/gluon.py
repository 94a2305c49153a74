"""The products of product.py for Hopper, in Gluon, with epilogues that overlap.

One warp brings slices of x and w into a ring in shared memory. Two groups of four warps read the
same slices of w, and each multiplies half of the rows. Only the ring ties them together: while one
group is in its epilogue the other multiplies what the ring still holds, so that the tensor cores do
not wait. Triton's own kernel, whose warps do all steps together, runs everywhere.

x [n, H], w [v, H] and what is written [n, v] are descriptors.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from . import chosen, formulas, merge, tiles
from .formulas import LN2, LOG2E
from .launch import Launcher, TileShape

ROWS, WIDTH, DEPTH = tiles.BM, tiles.BN, tiles.BK
STAGES = gl.constexpr(tiles.STAGES)
HALF = gl.constexpr(tiles.ROWS // 2)  # rows of one group
PART = gl.constexpr(tiles.WIDTH // 4)  # columns that leave together
BUFFERS = gl.constexpr(2)  # of each group, for parts on their way out
LOWEST = gl.constexpr(-1e20)  # for what is left out: below all logits, finite under any scale
AT_START = gl.constexpr(168)  # registers of a thread: 3 x 128 threads start with all there are
LOADING = gl.constexpr(24)  # of one that loads
MULTIPLYING = gl.constexpr((3 * AT_START.value - LOADING.value) // 2)  # 128 of them hold z

place_of, biased = gluon.jit(tiles.place_of.fn), gluon.jit(tiles.biased.fn)
tanh_and_slope, grad_z = gluon.jit(formulas.tanh_and_slope.fn), gluon.jit(formulas.grad_z.fn)
coefficient = gluon.jit(formulas.coefficient.fn)
per_row, normalizer_of = gluon.jit(formulas.per_row.fn), gluon.jit(formulas.normalizer_of.fn)
parts_of, shift_column = gluon.jit(merge.parts_of.fn), gluon.jit(chosen.shift_column.fn)
bring = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # as 3.7 names it
send = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.constexpr_function
def accumulator_layout(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def following(stage, phase):
    """Where the ring goes on; the phase of its barriers flips with each turn."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def new_ring(x, w):
    """Slices of x and w in shared memory, and the barriers that say which are there and which are
    done with."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES, WIDTH, DEPTH], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # the groups
    hopper.fence_async_shared()
    return xs, ws, full, empty


@gluon.jit
def load(x, w, ring, n, v, h, PROGRAMS: gl.constexpr):
    """One warp: the slices of all tiles of this program."""
    xs, ws, full, empty = ring
    tiles_m, blocks = gl.cdiv(n, ROWS), gl.cdiv(v, WIDTH)
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), tiles_m * blocks, PROGRAMS):
        m, block = place_of(tile, tiles_m, blocks)
        for k in range(0, h, DEPTH):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, x.block_type.nbytes + w.block_type.nbytes)
            bring(x, [m * ROWS, k], ready, xs.index(stage))
            bring(w, [block * WIDTH, k], ready, ws.index(stage))
            stage, phase = following(stage, phase)


@gluon.jit
def multiplied(ring, stage, phase, h, WHO: gl.constexpr):
    """x @ w.T of half a tile [64, 256]. A slice is given back when the next one is under way."""
    xs, ws, full, empty = ring
    z = gl.zeros((HALF, WIDTH), gl.float32, accumulator_layout(WIDTH))
    for k in range(0, h, DEPTH):
        mbarrier.wait(full.index(stage), phase)
        a = xs.index(stage).slice(WHO * HALF, HALF)
        b = ws.index(stage).permute((1, 0))
        z = hopper.warpgroup_mma(a, b, z, use_acc=k > 0, is_async=True)
        z = hopper.warpgroup_mma_wait(1, deps=(z,))
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), pred=k > 0)
        stage, phase = following(stage, phase)
    z = hopper.warpgroup_mma_wait(0, deps=(z,))
    mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES))
    return z, stage, phase


@gluon.jit
def halves(z):
    """Left and right: the registers of a thread, split in two."""
    width: gl.constexpr = z.shape[1] // 2
    layout: gl.constexpr = accumulator_layout(width)
    left, right = gl.split(gl.permute(gl.reshape(z, (HALF, 2, width)), (0, 2, 1)))
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def write(part, to, out, first, block, WHO: gl.constexpr, PLACE: gl.constexpr):
    """A share of the columns, by way of the next of this group's buffers."""
    buffer = out.index(WHO * BUFFERS + PLACE % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    buffer.store(part.to(to.dtype))
    hopper.fence_async_shared()
    send(to, [first, block * WIDTH + PLACE * part.shape[1]], buffer)


@gluon.jit
def each_half(
    ring,
    out,
    to,
    of,
    n,
    v,
    h,
    WHO: gl.constexpr,
    PROGRAMS: gl.constexpr,
    LOAD: gl.constexpr,
    END: gl.constexpr,
):
    """Four warps: the upper or lower half of the program's tiles. What `LOAD` loads before a tile's
    product is there when `END` takes the product, and writes it to `to` by way of buffers `out`."""
    tiles_m, blocks = gl.cdiv(n, ROWS), gl.cdiv(v, WIDTH)
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), tiles_m * blocks, PROGRAMS):
        m, block = place_of(tile, tiles_m, blocks)
        first = m * ROWS + WHO * HALF
        loaded = LOAD(of, first, block, n)
        z, stage, phase = multiplied(ring, stage, phase, h, WHO)
        END(z, loaded, out, to, of, first, block, n, v, WHO)
    tma.store_wait(0)


@gluon.jit
def each_tile(
    x,
    w,
    to,
    of,
    n,
    v,
    h,
    PROGRAMS: gl.constexpr,
    LOAD: gl.constexpr,
    END: gl.constexpr,
):
    """All warps of a program. `to` is a descriptor of what END writes in parts, or None."""
    ring = new_ring(x, w)
    out = ring[0]
    if to is not None:
        shape: gl.constexpr = [2 * BUFFERS, to.block_type.shape[0], to.block_type.shape[1]]
        out = gl.allocate_shared_memory(to.dtype, shape, to.layout)
    gl.warp_specialize(
        [
            (each_half, (ring, out, to, of, n, v, h, 0, PROGRAMS, LOAD, END)),
            (each_half, (ring, out, to, of, n, v, h, 1, PROGRAMS, LOAD, END)),
            (load, (x, w, ring, n, v, h, PROGRAMS)),
        ],
        [4, 1],
        [MULTIPLYING, LOADING],
    )


@gluon.jit
def rows_of(first, n, PART: gl.constexpr):
    """Of half a tile, and which of them there are."""
    rows = first + gl.arange(0, HALF, gl.SliceLayout(1, accumulator_layout(PART)))
    return rows, rows < n


@gluon.jit
def load_for_sums(pointers, first, block, n):
    """Each row's factor, its shift, and the column of the block whose logit that is."""
    of, _ = pointers
    rows, inside = rows_of(first, n, PART)
    factor = per_row(gl.zeros_like(rows, dtype=gl.float32) + of.z.outer, of.z, rows, inside)
    shift = gl.load(of.shift + rows, mask=inside, other=0.0)
    return factor, shift, shift_column(of, rows, inside) - block * WIDTH


@gluon.jit
def sum_tile(z, loaded, out, exp_tile, pointers, first, block, n, v, WHO: gl.constexpr):
    """Statistics: sums over a tile's columns; exp logits are written."""
    of, sums = pointers
    sumexps, entropy_sums, logit_sums, max_logits = sums
    factor, shift, column = loaded
    layout: gl.constexpr = accumulator_layout(WIDTH)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    rows, inside = rows_of(first, n, PART)
    place = block.to(gl.int64) * of.pitch + rows
    z = biased(z, of.z, block * WIDTH + columns, v)
    if of.z.inner is not None:
        z, _ = tanh_and_slope(z * of.z.inner)
    if logit_sums is not None:  # columns beyond the last were read as 0
        logit_sum = gl.convert_layout(gl.sum(z, 1), rows.type.layout, assert_trivial=True)
        gl.store(logit_sums + place, logit_sum * factor, mask=inside)
    if gl.max(((column >= 0) & (column < WIDTH)).to(gl.int32), 0) > 0:
        of_z = gl.convert_layout(column, gl.SliceLayout(1, layout), assert_trivial=True)
        z = gl.where(columns[None, :] == of_z[:, None], LOWEST, z)
    if (block + 1) * WIDTH > v:
        z = gl.where((columns < v - block * WIDTH)[None, :], z, LOWEST)
    if max_logits is not None:
        max_logit = gl.convert_layout(gl.max(z, 1), rows.type.layout, assert_trivial=True)
        gl.store(max_logits + place, max_logit * factor, mask=inside)

    scale, log2_shift = (factor * LOG2E)[:, None], (shift * LOG2E)[:, None]
    left, right = halves(z)
    parts = halves(left) + halves(right)
    for i in gl.static_range(4):
        below = parts[i] * scale - log2_shift
        e = gl.exp2(below)
        if i == 0:
            mass, entropy_sum = e, e * below
        else:
            mass, entropy_sum = mass + e, entropy_sum + e * below
        if exp_tile is not None:
            write(e, exp_tile, out, first, block, WHO, i)
    gl.store(sumexps + place, gl.sum(mass, 1), mask=inside)
    if entropy_sums is not None:
        gl.store(entropy_sums + place, gl.sum(entropy_sum, 1) * LN2, mask=inside)


@gluon.jit(do_not_specialize=["n"])
def overlapping_product_kernel(x, w, exp_tile, of, n, v, h, PROGRAMS: gl.constexpr):
    """As product_kernel."""
    # Told apart here: on their way into a group of warps flags cease to be constants.
    parts = parts_of(of)  # [blocks, pitch] each
    entropy_sums, logit_sums, max_logits = None, None, None
    if of.flags.entropy:
        entropy_sums = parts[1]
    if of.flags.mean:
        logit_sums = parts[2]
    if of.flags.top1:
        max_logits = parts[3]
    pointers = of, (parts[0], entropy_sums, logit_sums, max_logits)
    each_tile(x, w, exp_tile, pointers, n, v, h, PROGRAMS, load_for_sums, sum_tile)


@gluon.jit
def load_for_gradient(a, first, block, n):
    """Each row's scale and shift of log p in units of log 2, and its coefficients."""
    rows, inside = rows_of(first, n, PART)
    none = gl.zeros_like(rows, dtype=gl.float32)
    outer = per_row(none + a.z.outer, a.z, rows, inside)
    factor = per_row(none + a.z.factor, a.z, rows, inside)
    max_logit, log_sum = normalizer_of(a.normalizer, rows, inside)
    prob = (coefficient(a.c.prob, rows, inside) * factor)[:, None]
    entropy = (coefficient(a.c.entropy, rows, inside) * (factor * LN2))[:, None]
    uniform = (coefficient(a.c.uniform, rows, inside) * factor)[:, None]
    scale = (outer * LOG2E)[:, None]
    log2_sumexp = ((max_logit + log_sum) * LOG2E)[:, None]
    return scale, log2_sumexp, (prob, entropy, uniform)


@gluon.jit
def differentiate(z, loaded, out, to, a, first, block, n, v, WHO: gl.constexpr):
    """The gradient, but for the targets' slopes."""
    scale, log2_sumexp, at = loaded
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, accumulator_layout(WIDTH)))
    z = biased(z, a.z, block * WIDTH + columns, v)
    left, right = halves(z)
    parts = halves(left) + halves(right)
    for i in gl.static_range(4):
        capped = parts[i]
        if a.z.inner is not None:
            capped, slope = tanh_and_slope(capped * a.z.inner)
        below = capped * scale - log2_sumexp  # log p in units of log 2
        g = grad_z(gl.exp2(below), below, at, a.c)
        if a.z.inner is not None:
            g *= slope
        write(g, to, out, first, block, WHO, i)


@gluon.jit
def overlapping_slab_kernel(x, w, to, a, n, v, h, PROGRAMS: gl.constexpr):
    each_tile(x, w, to, a, n, v, h, PROGRAMS, load_for_gradient, differentiate)


LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
LOADED = {"x": TileShape((tiles.ROWS, tiles.DEPTH), LAYOUT)}
LOADED |= {"w": TileShape((tiles.WIDTH, tiles.DEPTH), LAYOUT)}
STORED = TileShape((tiles.ROWS // 2, tiles.WIDTH // 4), LAYOUT)
OPTIONS = {"num_warps": 4, "maxnreg": AT_START.value}
launch_product = Launcher(overlapping_product_kernel, tiles=LOADED, **OPTIONS)
WITH_EXP = LOADED | {"exp_tile": STORED}
launch_exp = Launcher(overlapping_product_kernel, tiles=WITH_EXP, **OPTIONS)
launch_slab = Launcher(overlapping_slab_kernel, tiles=LOADED | {"to": STORED}, **OPTIONS)
