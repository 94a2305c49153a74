"""Hopper kernels in Gluon for the matmuls of product.py, with epilogues that overlap matmuls.

One warp loads slices of x and w into a ring buffer in shared memory. Two groups of four warps read
the same slices of w, and each group multiplies half of the rows. The two groups of multiplying
warps synchronise only through the ring buffer of slices in shared memory. While one group of warps
runs its epilogue, the other group multiplies slices that are still in the ring buffer, so that the
tensor cores do not wait. The portable Triton kernel in product.py does not overlap the epilogue
with multiplications: all its warps load, multiply and run the epilogue together.

x [n, H], w [v, H] and the output [n, v] are tensor descriptors.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import chosen, formulas, merge, tiles
from .formulas import LN2, LOG2E
from .launch import Launcher, TileShape
from .versions import Constant

ROWS, WIDTH, DEPTH = tiles.BM, tiles.BN, tiles.BK
STAGES = Constant(tiles.STAGES)
HALF = Constant(tiles.ROWS // 2)  # Rows of one group.
PART = Constant(tiles.WIDTH // 4)  # Columns of one store.
BUFFERS = Constant(2)  # Number of shared-memory buffers for stores, per group of four warps.
# Value of masked logits, which is below all logits and stays finite when it is scaled.
LOWEST = Constant(-1e20)
# Registers of a thread at launch, when 3 x 128 threads share all registers of a multiprocessor.
AT_START = Constant(168)
LOADING = Constant(24)  # Registers per thread of the warp that loads slices of x and w.
# Registers of a thread that multiplies: 128 registers hold the thread's elements of the tile of
# logits.
MULTIPLYING = Constant((3 * AT_START.value - LOADING.value) // 2)

place_of, biased = gluon.jit(tiles.place_of.fn), gluon.jit(tiles.biased.fn)
tanh_and_slope, grad_z = gluon.jit(formulas.tanh_and_slope.fn), gluon.jit(formulas.grad_z.fn)
coefficient = gluon.jit(formulas.coefficient.fn)
per_row, normalizer_of = gluon.jit(formulas.per_row.fn), gluon.jit(formulas.normalizer_of.fn)
parts_of, shift_column = gluon.jit(merge.parts_of.fn), gluon.jit(chosen.shift_column.fn)
# Triton releases have different names for the TMA copy functions.
bring = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
send = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.constexpr_function
def accumulator_layout(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def following(stage, phase):
    """Return the index of the next stage of the ring buffer, and the phase (0 or 1), which flips
    with each turn of the ring buffer."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def new_ring(x, w):
    """Allocate the ring buffer: shared memory for slices of x and w, with two barriers per slice.
    The barrier `full` signals that a slice is loaded; the barrier `empty` signals that a slice may
    be overwritten."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES, WIDTH, DEPTH], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # Both groups must arrive.
    hopper.fence_async_shared()
    return xs, ws, full, empty


@gluon.jit
def load(x, w, ring, n, v, h, PROGRAMS: gl.constexpr):
    """Load the slices of x and w for all tiles of this program; a single warp runs this
    function."""
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
    """Return x @ w.T of half a tile [64, 256]. The memory of a slice is released once the
    multiplication of the next slice runs."""
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
    """Return the left and the right half of the logits tile z, without an exchange of registers
    between threads."""
    width: gl.constexpr = z.shape[1] // 2
    layout: gl.constexpr = accumulator_layout(width)
    left, right = gl.split(gl.permute(gl.reshape(z, (HALF, 2, width)), (0, 2, 1)))
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def write(part, to, out, first, block, WHO: gl.constexpr, PLACE: gl.constexpr):
    """Store a part of a tile's columns, through the next shared-memory buffer of this group of
    warps."""
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
    """Run four warps over the upper or lower half of every tile of logits that this GPU program
    computes. The function `LOAD` loads the inputs of the epilogue before the multiplication of a
    tile. The function `END`, the epilogue, receives a tile of logits and the loaded inputs, and
    writes its results to `to` through the shared-memory buffers `out`."""
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
    """Run all warps of a GPU program: two groups of warps multiply, and one warp loads. `to` is the
    tensor descriptor of the matrix that the epilogue (the function `END`) writes, or None if the
    epilogue writes no matrix."""
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
    """Return the row indices of half a tile, and the mask of the rows below n."""
    rows = first + gl.arange(0, HALF, gl.SliceLayout(1, accumulator_layout(PART)))
    return rows, rows < n


@gluon.jit
def load_for_sums(pointers, first, block, n):
    """Load each row's logit factor, its shift (the logit that exp(z - shift) subtracts), and the
    column of the shift as an index within the block of columns."""
    of, _ = pointers
    rows, inside = rows_of(first, n, PART)
    factor = per_row(gl.zeros_like(rows, dtype=gl.float32) + of.z.outer, of.z, rows, inside)
    shift = gl.load(of.shift + rows, mask=inside, other=0.0)
    return factor, shift, shift_column(of, rows, inside) - block * WIDTH


@gluon.jit
def sum_tile(z, loaded, out, exp_tile, pointers, first, block, n, v, WHO: gl.constexpr):
    """Store each row's sums over a tile's columns (sum of exponentials, entropy sum, sum of logits,
    largest logit) and, with `exp_tile`, exp(z - shift) of the logits z."""
    of, sums = pointers
    sumexps, entropy_sums, logit_sums, max_logits = sums
    factor, shift, column = loaded
    layout: gl.constexpr = accumulator_layout(WIDTH)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    rows, inside = rows_of(first, n, PART)
    place = block.to(gl.int64) * of.pitch + rows
    z = biased(z, of.z, (block * WIDTH + columns)[None, :], v)
    if of.z.inner is not None:
        z, _ = tanh_and_slope(z * of.z.inner)
    # Columns beyond the end of the vocabulary have logits of 0, which do not change the sum of the
    # logits.
    if logit_sums is not None:
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
    """Store softmax statistics and exp(z - shift) of the logits x @ w.T. The matmul of a tile
    overlaps the epilogue of another tile, unlike in `product_kernel`, which computes equal
    results."""
    # Select pointers before the groups of warps start, because a flag passed to a group is no
    # longer a compile-time constant.
    parts = parts_of(of)  # Each [blocks, pitch].
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
    """Load the inputs of each row's gradient: the factor and the offset that turn a logit into log2
    p, and the gradient coefficients."""
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
    """Store the gradient of a tile of logits. The gradient coefficient c_target, which belongs in
    each target's column, is not added here."""
    scale, log2_sumexp, at = loaded
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, accumulator_layout(WIDTH)))
    z = biased(z, a.z, (block * WIDTH + columns)[None, :], v)
    left, right = halves(z)
    parts = halves(left) + halves(right)
    for i in gl.static_range(4):
        capped = parts[i]
        if a.z.inner is not None:
            capped, slope = tanh_and_slope(capped * a.z.inner)
        below = capped * scale - log2_sumexp  # Log p in units of log 2.
        g = grad_z(gl.exp2(below), below, at, a.c)
        if a.z.inner is not None:
            g *= slope
        write(g, to, out, first, block, WHO, i)


@gluon.jit
def overlapping_slab_kernel(x, w, to, a, n, v, h, PROGRAMS: gl.constexpr):
    each_tile(x, w, to, a, n, v, h, PROGRAMS, load_for_gradient, differentiate)


LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
FOR_GLUON = (LAYOUT,), TensorDescriptor
LOADED = {"x": TileShape((tiles.ROWS, tiles.DEPTH), *FOR_GLUON)}
LOADED |= {"w": TileShape((tiles.WIDTH, tiles.DEPTH), *FOR_GLUON)}
STORED = TileShape((tiles.ROWS // 2, tiles.WIDTH // 4), *FOR_GLUON)
OPTIONS = {"num_warps": 4, "maxnreg": AT_START.value}
launch_product = Launcher(overlapping_product_kernel, tiles=LOADED, **OPTIONS)
WITH_EXP = LOADED | {"exp_tile": STORED}
launch_exp = Launcher(overlapping_product_kernel, tiles=WITH_EXP, **OPTIONS)
launch_slab = Launcher(overlapping_slab_kernel, tiles=LOADED | {"to": STORED}, **OPTIONS)
