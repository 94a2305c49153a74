"""A teacher's logits product beside a student's raw logits: what a KL divergence needs of it.

n tokens, v columns, H' the teacher's hidden width. The float32 accumulator of each tile meets the
student's logits in the epilogue, so that the divergence is as exact as of float32 logits on both
sides. What stays for the gradient are differences d = z_q - z_p - offset in float16: they are small
where the two are near, and then p - q = -p expm1(log q/p) keeps its digits. The offset is that of
one column, the token's target.

Sums of a block of columns are taken against the teacher's largest logit in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...objective.statistics import Normalizer
from ..pair import Compared, Differences
from .formulas import LOG2E, transformed
from .launch import Launcher, cdiv
from .product import check_operands
from .records import LogitScaling, Matrix, constant, matrix_of, programs_on, scaling
from .tiles import BM, BN, OPTIONS, READ, WIDTH, WRITE, each_tile, halves
from .tokens import ROWS, Reference, launch_reference
from .versions import overlaps

LOWEST = tl.constexpr(-1e30)  # exp2 of it is 0, and it may be multiplied by that
LARGEST = tl.constexpr(60000.0)  # of a difference in float16
BLOCKS = 64  # that a program adds at once


class Beside(NamedTuple):
    """What the product reads of each token, and writes of each block of columns."""

    raw: Matrix  # [n, v], the student's
    own: Tensor  # [n] column of the offset
    logit: Tensor  # [n] the teacher's there
    z: LogitScaling  # the teacher's
    p_z: LogitScaling  # the student's, at the term's temperature
    p: Normalizer  # [n], the student's
    sums: Tensor  # [3, blocks, pitch]: peaks, masses, and sums of d under q or p
    pitch: int
    stride: int  # blocks * pitch
    reverse: tl.constexpr  # under p


@triton.jit
def pair_tile(z, m, block, held, of, n, v):
    """The epilogue of the teacher's product."""
    rows, columns = m * BM + tl.arange(0, BM), block * BN + tl.arange(0, BN)
    inside = rows < n
    real = inside[:, None] & (columns < v)[None, :]
    raw = of.raw.data + rows.to(tl.int64) * of.raw.stride
    own = tl.load(of.own + rows, mask=inside, other=0)
    q, p_outer = transformed(z, of.z, of.z.outer), of.p_z.outer
    offset = tl.load(of.logit + rows, mask=inside, other=0.0)
    at_own = tl.load(raw + own, mask=inside, other=0.0)
    offset -= transformed(at_own, of.p_z, p_outer)
    p = tl.load(raw[:, None] + columns[None, :], mask=real, other=0.0)
    p = transformed(p, of.p_z, p_outer)
    d = tl.where(real, (q - p) - offset[:, None], 0.0)
    q = tl.where(real, q, LOWEST)
    peak = tl.max(q, 1)
    e = tl.exp2((q - peak[:, None]) * LOG2E)
    mass = tl.sum(e, 1)
    if of.reverse:
        p_peak = tl.load(of.p.peak + rows, mask=inside, other=0.0)
        p_log_sum = tl.load(of.p.log_sum + rows, mask=inside, other=0.0)
        e = tl.exp2(((p - p_peak[:, None]) - p_log_sum[:, None]) * LOG2E)
    moment = tl.sum(e * d, 1)
    place = of.sums + block.to(tl.int64) * of.pitch + rows
    tl.store(place, peak, mask=inside)
    tl.store(place + of.stride, mass, mask=inside)
    tl.store(place + 2 * of.stride, moment, mask=inside)
    left, right = halves(tl.minimum(tl.maximum(d, -LARGEST), LARGEST))
    held.store([m * BM, block * BN], left.to(held.dtype))
    held.store([m * BM, block * BN + BN // 2], right.to(held.dtype))


@triton.jit(do_not_specialize=["n"])
def beside_kernel(x, w, held, of, n, v, h, PROGRAMS: tl.constexpr):
    each_tile(x, w, held, of, n, v, h, PROGRAMS, pair_tile)


@triton.jit(do_not_specialize=["n"])
def beside_finish_kernel(
    of,  # Beside
    out,  # [3, n]: the divergence, log q_y - log p_y, and what log q_y is less than z_q,y
    blocks,
    n,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    peaks = tl.full((BLOCKS, ROWS), LOWEST, tl.float32)
    masses = tl.zeros((BLOCKS, ROWS), tl.float32)
    moments = tl.zeros((BLOCKS, ROWS), tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        place = of.sums + block.to(tl.int64)[:, None] * of.pitch + rows[None, :]
        here = (block < blocks)[:, None] & inside[None, :]
        found = tl.load(place, mask=here, other=LOWEST)
        mass = tl.load(place + of.stride, mask=here, other=0.0)
        moment = tl.load(place + 2 * of.stride, mask=here, other=0.0)
        peak = tl.maximum(peaks, found)
        before, now = tl.exp2((peaks - peak) * LOG2E), tl.exp2((found - peak) * LOG2E)
        masses = masses * before + mass * now
        if of.reverse:
            moments += moment
        else:
            moments = moments * before + moment * now
        peaks = peak
    peak = tl.max(peaks, 0)
    shift = tl.exp2((peaks - peak[None, :]) * LOG2E)
    mass = tl.sum(masses * shift, 0)
    if of.reverse:
        moment = tl.sum(moments, 0)
    else:
        moment = tl.sum(moments * shift, 0) / mass
    p_peak = tl.load(of.p.peak + rows, mask=inside, other=0.0)
    p_log_sum = tl.load(of.p.log_sum + rows, mask=inside, other=0.0)
    own = tl.load(of.own + rows, mask=inside, other=0)
    raw = of.raw.data + rows * of.raw.stride
    p_own = transformed(tl.load(raw + own, mask=inside, other=0.0), of.p_z, of.p_z.outer)
    q_own = tl.load(of.logit + rows, mask=inside, other=0.0)
    # log q - log p at the column of the offset; elsewhere d more. Differences of numbers that are
    # near each other come first: they are exact.
    ratio = ((q_own - p_own) - (peak - p_peak)) - (tl.log(mass) - p_log_sum)
    value = moment + ratio
    if of.reverse:
        value = -value
    tl.store(out + rows, value, mask=inside)
    tl.store(out + n + rows, ratio, mask=inside)


launch_beside = Launcher(beside_kernel, tiles=READ | {"held": WRITE}, **OPTIONS)
launch_finish = Launcher(beside_finish_kernel, num_warps=4)


def teacher_product(x: Tensor, w: Tensor, raw: Tensor, to: Compared) -> Differences:
    check_operands(x, w)
    student, teacher, targets, kind = to
    (n, h), v = x.shape, w.shape[0]
    pitch = -(-v // 8) * 8  # rows of whole 16 bytes
    held = x.new_empty(n, pitch, dtype=torch.float16)[:, :v]
    out = x.new_empty(2, n, dtype=torch.float32)
    if not n:
        return Differences(held, out[1], out[0])
    own, logit, z = torch.empty_like(targets), torch.empty_like(out[0]), scaling(teacher)
    reference = Reference(own, logit, torch.empty_like(logit))
    pair = matrix_of(x), matrix_of(w)
    given = (*pair, targets, z, reference, 0, n, v, h)
    launch_reference(cdiv(n, ROWS), *given, ROWS=ROWS, HALVES=8)
    blocks, wide = cdiv(v, WIDTH), 16 * cdiv(n, 16)
    sums = x.new_empty(3, blocks, wide, dtype=torch.float32)
    sides, reverse = (z, scaling(student.transform), student.normalizer), kind != "forward_kl"
    of = Beside(
        matrix_of(raw), own, logit, *sides, sums, wide, blocks * wide, constant(reverse)
    )
    programs = programs_on(x.device)
    if of.z.inner is None and of.p_z.inner is None and overlaps(x.device):
        from . import gluon_beside  # Gluon is not in every Triton

        gluon_beside.launch(x, w, held, of)
    else:
        launch_beside(programs, x, w, held, of, n, v, h, PROGRAMS=programs)
    launch_finish(cdiv(n, 16), of, out, blocks, n, ROWS=16, BLOCKS=BLOCKS)
    return Differences(held, out[1], out[0])
