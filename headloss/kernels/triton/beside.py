"""A teacher's logits product beside a student's raw logits: what a KL divergence needs of it.

n tokens, v columns, H' the teacher's hidden width. The float32 accumulator of each tile meets the
student's logits in the epilogue, so that the divergence is as exact as of float32 logits on both
sides. What stays for the gradient takes the place of the student's logits: `Differences`, of which
d = z_q - z_p - offset. It is small where the two are near, and then p - q = -p expm1(log q/p) keeps
its digits. The offset is that of one column, the token's target.

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
from ..rounding import lost
from .chosen import chosen_logits
from .formulas import LOG2E, normalizer_of, per_row, transformed
from .launch import Launcher, cdiv
from .pair import DEEP, POWER, Softmax, softmax
from .product import LOWEST, check_operands
from .records import LogitScaling, Matrix, constant, matrix_of, over_tiles, scaling
from .tiles import BM, BN, OPTIONS, READ, WIDTH, each_tile

BLOCKS = 64  # that a program adds at once


class Beside(NamedTuple):
    """What the product reads of each token, and writes of each block of columns."""

    raw: Matrix  # [n, v], the student's, and then words
    offset: Tensor  # [n]
    z: LogitScaling  # the teacher's
    p: Softmax  # the student's, at the term's temperature
    own: Softmax  # and at its head's own
    sums: Tensor  # [3, blocks, pitch]: peaks, masses, and sums of d under q or p
    pitch: int
    stride: int  # blocks * pitch
    reverse: tl.constexpr  # under p
    apart: tl.constexpr  # the two temperatures of the student's differ
    keep: tl.constexpr  # words are written


@triton.jit
def pair_tile(z, m, block, out, of, n, v):
    """The epilogue of the teacher's product."""
    rows, columns = m * BM + tl.arange(0, BM), block * BN + tl.arange(0, BN)
    inside = rows < n
    real = inside[:, None] & (columns < v)[None, :]
    raw = (of.raw.data + rows.to(tl.int64) * of.raw.stride)[:, None] + columns[None, :]
    offset = tl.load(of.offset + rows, mask=inside, other=0.0)
    q, outer = transformed(z, of.z, of.z.outer), of.p.z.outer
    p = tl.load(raw, mask=real, other=0.0)
    d = tl.where(real, (q - p * outer) - offset[:, None], 0.0)
    masked = tl.where(real, q, LOWEST)
    peak = tl.max(masked, 1)
    e = tl.exp2((masked - peak[:, None]) * LOG2E)
    mass = tl.sum(e, 1)
    if of.reverse:
        p_peak, p_log_sum = normalizer_of(of.p.normalizer, rows, inside)
        e = tl.exp2(((p * outer - p_peak[:, None]) - p_log_sum[:, None]) * LOG2E)
    moment = tl.sum(tl.where(real, e * d, 0.0), 1)
    place = of.sums + block.to(tl.int64) * of.pitch + rows
    tl.store(place, peak, mask=inside)
    tl.store(place + of.stride, mass, mask=inside)
    tl.store(place + 2 * of.stride, moment, mask=inside)
    if of.keep:
        own = per_row(of.own.z.outer, of.own.z, rows, inside)
        own_peak, own_log_sum = normalizer_of(of.own.normalizer, rows, inside)
        own += tl.zeros_like(own_peak)
        lse = (own_peak + own_log_sum)[:, None]
        warmth = (outer / own)[:, None]
        depth = DEEP
        if of.apart:
            depth = tl.minimum(DEEP / warmth, DEEP * POWER)
        high = tl.maximum(p * own[:, None], lse - depth)
        d = (q - high * warmth) - offset[:, None]
        far = (high - lse) * LOG2E
        if of.apart:
            deep = far < -DEEP * LOG2E
            root = tl.exp2(tl.where(deep, far / POWER, far))
            p = tl.where(deep, -root, root)
        else:
            p = tl.exp2(far)
        low = p.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = d.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        tl.store(raw.to(tl.pointer_type(tl.uint32), bitcast=True), low | high, mask=real)


@triton.jit(do_not_specialize=["n"])
def beside_kernel(x, w, of, n, v, h, PROGRAMS: tl.constexpr):
    each_tile(x, w, None, of, n, v, h, PROGRAMS, pair_tile)


@triton.jit(do_not_specialize=["n"])
def beside_finish_kernel(
    of,  # Beside
    out,  # [4, n]: the divergence, log q - log p where d is 0, and the teacher's normalizer
    blocks, n, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
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
        if of.reverse:  # under p, which is what it is
            before, now = 1.0, 1.0
        moments = moments * before + moment * now
        peaks = peak
    peak = tl.max(peaks, 0)
    shift = tl.exp2((peaks - peak[None, :]) * LOG2E)
    mass = tl.sum(masses * shift, 0)
    if of.reverse:
        moment = tl.sum(moments, 0)
    else:
        moment = tl.sum(moments * shift, 0) / mass
    p_peak, p_log_sum = normalizer_of(of.p.normalizer, rows, inside)
    offset = tl.load(of.offset + rows, mask=inside, other=0.0)
    # Differences of numbers that are near each other come first: they are exact.
    log_sum = tl.log(mass)
    ratio = (offset - (peak - p_peak)) - (log_sum - p_log_sum)
    value = moment + ratio
    if of.reverse:
        value = -value
    tl.store(out + rows, value, mask=inside)
    tl.store(out + n + rows, ratio, mask=inside)
    tl.store(out + 2 * n + rows, peak, mask=inside)
    tl.store(out + 3 * n + rows, log_sum, mask=inside)


launch_beside = Launcher(beside_kernel, tiles=READ, **OPTIONS)
launch_finish = Launcher(beside_finish_kernel, num_warps=4)


def teacher_product(x: Tensor, w: Tensor, raw: Tensor, to: Compared) -> Differences:
    check_operands(x, w)
    student, teacher, targets, kind, own, keep = to
    (n, h), v = x.shape, w.shape[0]
    out = x.new_empty(4, n, dtype=torch.float32)
    value, ratio, *normalizer = out.unbind()
    found = Differences(ratio, value, Normalizer(*normalizer), own)
    if not n:
        return found
    own_column = (targets % v).unsqueeze(1)
    offset = chosen_logits(x, w, own_column, teacher)
    offset = (offset - student.transform(raw.gather(1, own_column))).squeeze(1)
    z = scaling(teacher, lost(x.device, h))
    blocks, wide = cdiv(v, WIDTH), 16 * cdiv(n, 16)
    sums = x.new_empty(3, blocks, wide, dtype=torch.float32)
    p = softmax(student)
    sides = z, p, p if own is None else softmax(own)
    reverse = constant(kind != "forward_kl")
    flags = constant(own is not None), constant(keep)
    of = Beside(matrix_of(raw), offset, *sides, sums, wide, blocks * wide, reverse, *flags)
    over_tiles(launch_beside, x, w, of)
    launch_finish(cdiv(n, 16), of, out, blocks, n, ROWS=16, BLOCKS=BLOCKS)
    return found
