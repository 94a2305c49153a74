"""A teacher's logits beside a student's in Triton; see `kernels.pair` for the formulas.

n tokens, v columns. The acts work on a pair of tiles row by row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Backward
from ..pair import Differences, Pair
from .formulas import log_softmax
from .launch import Launcher
from .pair import NO_SIDE, Part, against_mixture, block_width, launch, softmax, tilt
from .records import WARPS, check_tile, matrix_of


@triton.jit
def shares(log_q, log_p, beta, KIND: tl.constexpr):
    """What each column of a block adds to the divergence, and to the pivot of its gradient."""
    if KIND == "forward_kl":
        value = tl.exp(log_q) * (log_q - log_p)
        pivot = tl.zeros_like(value)
    else:
        p = tl.exp(log_p)
        pivot = p * tilt(log_q, log_p, beta, KIND)
        value = pivot  # of reverse_kl
        if KIND == "total_variation":
            value = tl.abs(p - tl.exp(log_q)) / 2
        elif KIND != "reverse_kl":
            p_to_m = against_mixture(log_q, log_p, beta)
            q_to_m = tl.exp(log_q) * (p_to_m - (log_p - log_q))
            if KIND == "js":
                value = beta * q_to_m + pivot
            elif KIND == "skew_forward_kl":
                value = q_to_m
            else:
                value = p * p_to_m
    return value, pivot


@triton.jit
def divergence_kernel(
    raw,  # Matrix
    teacher_raw,  # Matrix
    student,  # Softmax
    teacher,  # Softmax
    beta,
    to,  # Matrix [2, n]: values and pivots
    v, BLOCK: tl.constexpr, KIND: tl.constexpr, ONTO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x, y = raw.data + row * raw.stride, teacher_raw.data + row * teacher_raw.stride
    p_peak = tl.load(student.normalizer.peak + row)
    p_log_sum = tl.load(student.normalizer.log_sum + row)
    q_peak = tl.load(teacher.normalizer.peak + row)
    q_log_sum = tl.load(teacher.normalizer.log_sum + row)
    value = tl.full((), 0.0, tl.float32)
    pivot = tl.full((), 0.0, tl.float32)
    if ONTO:
        value, pivot = tl.load(to.data + row), tl.load(to.data + to.stride + row)
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        mine = tl.load(x + columns, mask=inside, other=0.0)
        other = tl.load(y + columns, mask=inside, other=0.0)
        log_p = log_softmax(mine, student.z, student.z.outer, p_peak, p_log_sum)
        log_q = log_softmax(other, teacher.z, teacher.z.outer, q_peak, q_log_sum)
        add_value, add_pivot = shares(log_q, log_p, beta, KIND)
        value += tl.sum(tl.where(inside, add_value, 0.0), 0)
        pivot += tl.sum(tl.where(inside, add_pivot, 0.0), 0)
    tl.store(to.data + row, value)
    tl.store(to.data + to.stride + row, pivot)


launch_divergence = Launcher(divergence_kernel, num_warps=WARPS)


def readable(tile: Tensor, dtype: torch.dtype) -> Tensor:
    if tile.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        tile = tile.to(dtype)
    return tile if tile.shape[1] < 2 or tile.stride(1) == 1 else tile.contiguous()


def divergence(
    raw: Tensor, raw_teacher: Tensor, pair: Pair, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    check_tile("raw", raw)
    check_tile("raw_teacher", raw_teacher)
    student, teacher, kind, beta = pair
    n, v = raw.shape
    out = raw.new_empty(2, n, dtype=torch.float32) if onto is None else onto
    if n:
        tiles = (matrix_of(raw), matrix_of(raw_teacher))
        sides = (softmax(student), softmax(teacher))
        options = {"BLOCK": block_width(v), "KIND": kind, "ONTO": onto is not None}
        launch_divergence(n, *tiles, *sides, beta, matrix_of(out), v, **options)
    return out


def divergence_gradient_(
    raw: Tensor, raw_teacher: Tensor | Differences, pair: Pair, pivot: Tensor, weight: Tensor,
    extra: Tensor | None = None, others: Backward | None = None
) -> Tensor:
    student, teacher, kind, beta = pair
    tile, side, ratio, own = None, None, None, NO_SIDE
    if isinstance(raw_teacher, Differences):
        ratio, own = raw_teacher.ratio, softmax(raw_teacher.own) if raw_teacher.own else NO_SIDE
    else:
        check_tile("raw_teacher", raw_teacher)
        tile, side = matrix_of(raw_teacher), softmax(teacher)
    extras = None if extra is None else matrix_of(extra)
    part = Part(softmax(student), side, tile, ratio, own, None, pivot, weight, beta, extras)
    return launch(raw, part, kind, extra, others)
