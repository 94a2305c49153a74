"""Triton kernels for the matmul of the logits, whose epilogue computes statistics or the gradient,
so that no logits are written.

The epilogue sums over each tile of float32 logits while the tile is in registers. The shift in e =
exp(z - shift) is the logit of one column per token, computed beforehand: the target's logit if this
slice of the vocabulary holds the target, else the logit of an arbitrary column. The logit `shift`
in exp(z - shift) is known before the matmul, so that the epilogue need not compute the largest
logit of a row. A token's sums leave out the term exp(0) = 1 of the column whose logit is the shift,
so that the log-prob of a likely target keeps its digits.

On Hopper, the kernels of gluon.py overlap a tile's epilogue with the next tile's product.

If the output `exp_tile` is given, the epilogue writes e = exp(z - shift) in bf16. Since bf16 has
the exponent range of float32, e = exp(z - shift) is accurate in bf16 unless the shift is far below
the token's largest logit. A token whose shift in exp(z - shift) is far below the token's largest
logit is summed again, from recomputed logits.

Once the softmax normalizer is known, a second kernel recomputes the logits in a slice of the
vocabulary, and its epilogue writes the gradient of the logits in place of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...statistics.softmax import SoftmaxState
from ..interface import Backward, ExpTile, Forward, Measured, partials_of
from ..rounding import accumulator_bias
from .chosen import TOKENS, Shifts, launch_shifts, shift_column, target_gradient_
from .formulas import (
    LN2,
    LOG2E,
    coefficient,
    grad_z,
    normalizer_of,
    per_row,
    transformed,
    under_cap,
)
from .launch import Launcher, cdiv
from .merge import ROWS, Epilogue, Merge, flags_of, launch_finish, measured, parts_of
from .records import LogitScaling, Matrix, gradient_inputs, programs_on, scaling
from .tiles import (
    BM,
    BN,
    LOADED,
    OPTIONS,
    STORED,
    WIDTH,
    biased,
    each_tile,
    halves,
    has_accelerator,
)
from .versions import Constant, overlaps

# Smallest logit scale for which the kernels of gluon.py are used: these kernels mask logits, by a
# large negative number, before they multiply by the scale.
LEAST_SCALE = 1e-9
# Finite logit of masked columns, whose exp2 is 0: the product 0 * LOWEST is 0, not NaN.
LOWEST = Constant(-1e30)


@triton.jit
def sums(z, log2_shift, ENTROPY: tl.constexpr):
    """Return three results for each row of logits z: e = exp(z - shift), the sum of e, and the sum
    of e (z - shift) / log 2."""
    below = z * LOG2E - log2_shift[:, None]
    e = tl.exp2(below)
    mass = tl.sum(e, 1)
    entropy_sum = mass
    if ENTROPY:
        entropy_sum = tl.sum(e * below, 1)
    return e, mass, entropy_sum


@triton.jit
def sum_tile(z, m, block, exp_tile, of, n, v):
    """Epilogue of the forward matmul: store the sums over the columns of a tile of logits z and, if
    `exp_tile` is given, the values exp(z - shift)."""
    sumexps, entropy_sums, logit_sums, max_logits = parts_of(of)
    rows = m * BM + tl.arange(0, BM)
    inside = rows < n
    width = v - block * BN
    columns = tl.arange(0, BN)
    z = biased(z, of.z, (block * BN + columns)[None, :], v)
    if of.z.same is None:
        z = transformed(z, of.z, per_row(of.z.outer, of.z, rows[:, None], inside[:, None]))
    place = block.to(tl.int64) * of.pitch + rows
    if of.flags.mean:
        real = tl.where((columns < width)[None, :], z, 0.0)
        tl.store(logit_sums + place, tl.sum(real, 1), mask=inside)
    if width < BN:
        z = tl.where((columns < width)[None, :], z, LOWEST)
    column = shift_column(of, rows, inside) - block * BN
    if tl.max(((column >= 0) & (column < BN)).to(tl.int32), 0) > 0:
        z = tl.where(columns[None, :] == column[:, None], LOWEST, z)
    # The maximum leaves out the shift column (the column whose logit is the shift), because the
    # column's logit from the matmul could exceed the shift: the matmul adds products in a different
    # order than the kernel that computed the shift.
    if of.flags.top1:
        tl.store(max_logits + place, tl.max(z, 1), mask=inside)

    log2_shift = tl.load(of.shift + rows, mask=inside, other=0.0) * LOG2E
    # Sum the two halves of a tile separately, whether or not the exponentials are stored in
    # `exp_tile`, so that the bits of the sums do not depend on `exp_tile`.
    left, right = halves(z)
    e, mass, entropy_sum = sums(left, log2_shift, of.flags.entropy)
    if exp_tile is not None:
        exp_tile.store([m * BM, block * BN], e.to(exp_tile.dtype))
    e, more_mass, more_spread = sums(right, log2_shift, of.flags.entropy)
    if exp_tile is not None:
        exp_tile.store([m * BM, block * BN + BN // 2], e.to(exp_tile.dtype))
    mass += more_mass
    entropy_sum += more_spread
    tl.store(sumexps + place, mass, mask=inside)
    if of.flags.entropy:
        tl.store(entropy_sums + place, entropy_sum * LN2, mask=inside)


@triton.jit(do_not_specialize=["n"])
def product_kernel(x, w, exp_tile, of, n, v, h, PROGRAMS: tl.constexpr):
    each_tile(x, w, exp_tile, of, n, v, h, PROGRAMS, sum_tile)


launch_product = Launcher(product_kernel, tiles=LOADED, **OPTIONS)
launch_exp = Launcher(product_kernel, tiles=LOADED | {"exp_tile": STORED}, **OPTIONS)


def in_gluon() -> Any:
    """Import the module gluon.py on demand, because not every Triton release contains Gluon."""
    from . import gluon

    return gluon


def product_of(z: LogitScaling, device: torch.device, holds: bool) -> Launcher:
    """Return the launcher of the forward matmul kernel for a head's statistics; with `holds`, the
    kernel also writes exp(z - shift) of the logits z, where the shift is one logit per token."""
    if z.outer > LEAST_SCALE and overlaps(device):
        return in_gluon().launch_exp if holds else in_gluon().launch_product  # type: ignore
    return launch_exp if holds else launch_product


def accelerated(x: Tensor) -> bool:
    """Return True if the GPU has a tensor memory accelerator and enough shared memory for the
    tiles, or if kernels run in Triton's interpreter."""
    return not x.is_cuda or has_accelerator(x.device)


def bias_of(x: Tensor) -> float:
    """Return the relative rounding error of tensor-core sums of products with x (see
    `accumulator_bias`); 0 for float32, which is multiplied without tensor cores."""
    return accumulator_bias(x.device, x.shape[1]) if x.element_size() == 2 else 0.0


def can_fuse(x: Tensor, w: Tensor) -> bool:
    """Return True if a tensor memory accelerator can read the operands: elements of 16 bits, in
    rows whose size is a multiple of 16 bytes."""
    if not accelerated(x):
        return False
    if x.dtype != w.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    of_x, one_x = x.stride()
    of_w, one_w = w.stride()
    aligned = (x.data_ptr() | w.data_ptr()) % 16 == 0 and (of_x | of_w) % 8 == 0
    return aligned and one_x == one_w == 1


def check_operands(x: Tensor, w: Tensor) -> None:
    """Raise ValueError if `can_fuse` rejects the operands x and w."""
    if not can_fuse(x, w):
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and w {tuple(w.shape)} {w.dtype} need 16-bit elements, "
            "rows of whole 16 bytes and a GPU with a tensor memory accelerator"
        )


def product_partials(
    x: Tensor, w: Tensor, forward: Forward, exp_tile: ExpTile | None = None
) -> SoftmaxState:
    check_operands(x, w)
    return partials_of(statistics_of(x, w, forward, None, exp_tile), forward.needs)


def product_statistics(
    x: Tensor,
    w: Tensor,
    forward: Forward,
    vocabulary: int,
    exp_tile: ExpTile | None = None,
) -> Measured:
    check_operands(x, w)
    return measured(statistics_of(x, w, forward, vocabulary, exp_tile), forward.needs)


def statistics_of(
    x: Tensor,
    w: Tensor,
    forward: Forward,
    vocabulary: int | None,
    exp_tile: ExpTile | None = None,
    sweep: tuple[int, Callable[[Epilogue], None]] | None = None,
) -> Sequence[Tensor]:
    """Return a sequence of tensors [n], one per statistic: final statistics in the order that the
    function `measured` reads or, if `vocabulary` is None, partial sums over the rows of w in the
    order that the function `partials_of` reads. If given, `sweep` replaces the matmul kernel: a
    pair of the number of column blocks and a function that writes the sums over each block's
    columns to an `Epilogue`."""
    targets, first, transform, needs = forward
    n, h = x.shape
    v = w.shape[0]
    flags = flags_of(needs)
    entropy, mean, top1 = [flag or 0 for flag in flags[2:]]
    rows = 3 + entropy + mean if vocabulary is None else 2 + sum(flag or 0 for flag in flags)
    out = x.new_empty(2 + rows, (pitch := cdiv(n, 16) * 16), dtype=torch.float32)[:, :n]
    if n:
        blocks = cdiv(v, WIDTH) if sweep is None else sweep[0]
        parts = x.new_empty(1 + entropy + mean + top1, blocks, pitch, dtype=torch.float32)
        shift = out.new_empty(n) if exp_tile is None else exp_tile.shift
        exp_logits = None if exp_tile is None else exp_tile.exp_logits
        z = scaling(transform)
        unbiased = scaling(transform, bias_of(x))
        of_x = Matrix(x, x.stride(0))
        of_w = Matrix(w, w.stride(0))
        of = Shifts(of_x, of_w, z, shift, out, pitch)
        launch_shifts(cdiv(n, TOKENS), of, targets, first, n, v, h)
        epilogue = Epilogue(shift, out, parts, pitch, blocks * pitch, unbiased, flags)
        if sweep is None:
            programs = programs_on(x.device)
            launch = product_of(unbiased, x.device, holds=exp_logits is not None)
            launch(programs, x, w, exp_logits, epilogue, n, v, h, PROGRAMS=programs)
        else:
            sweep[1](epilogue)
        tile = None if exp_logits is None else Matrix(exp_logits, exp_logits.stride(0))
        partials = 1 if vocabulary is None else None
        merge = Merge(of_x, of_w, tile, partials, epilogue)
        launch_finish(cdiv(n, ROWS), merge, n, v, h, float(vocabulary or 1))
    return out.unbind(0)[2:]


# ---------------------------------------------------------------------- the gradient


@triton.jit
def gradient_of(raw, lse, at, outer, a):
    """Return the gradient of a block of raw logits; the coefficient c_target of the targets is not
    yet included."""
    log_p = transformed(raw, a.z, outer) - lse
    return under_cap(grad_z(tl.exp2(log_p * LOG2E), log_p, at, a.c), raw, a.z)


@triton.jit
def gradient_tile(z, m, block, out, a, n, v):
    """Store the gradient of a tile of logits, as the epilogue of the gradient kernel."""
    rows = m * BM + tl.arange(0, BM)
    inside = rows < n
    outer = per_row(a.z.outer, a.z, rows[:, None], inside[:, None])
    factor = per_row(tl.zeros(rows.shape, tl.float32) + a.z.factor, a.z, rows, inside)
    z = biased(z, a.z, (block * BN + tl.arange(0, BN))[None, :], v)
    max_logit, log_sum = normalizer_of(a.normalizer, rows, inside)
    lse = max_logit + log_sum
    at = (
        (coefficient(a.c.prob, rows, inside) * factor)[:, None],
        (coefficient(a.c.entropy, rows, inside) * factor)[:, None],
        (coefficient(a.c.uniform, rows, inside) * factor)[:, None],
    )
    left, right = halves(z)
    g = gradient_of(left, lse[:, None], at, outer, a)
    out.store([m * BM, block * BN], g.to(out.dtype))
    g = gradient_of(right, lse[:, None], at, outer, a)
    out.store([m * BM, block * BN + BN // 2], g.to(out.dtype))


@triton.jit
def slab_kernel(x, w, out, a, n, v, h, PROGRAMS: tl.constexpr):
    each_tile(x, w, out, a, n, v, h, PROGRAMS, gradient_tile)


launch_slab = Launcher(slab_kernel, tiles=LOADED | {"out": STORED}, **OPTIONS)


def product_gradient(x: Tensor, w: Tensor, backward: Backward) -> Tensor:
    check_operands(x, w)
    n, h = x.shape
    v = len(w)
    out = x.new_empty(n, 8 * cdiv(v, 8))[:, :v]  # Pad each row to a multiple of 16 bytes.
    if n:
        z = scaling(backward.transform, accumulator_bias(x.device, h))
        of = gradient_inputs(backward)._replace(z=z)
        run = in_gluon().launch_slab if overlaps(x.device) else launch_slab
        programs = programs_on(x.device)
        run(programs, x, w, out, of, n, v, h, PROGRAMS=programs)
        target_gradient_(out, x, w, backward)
    return out
