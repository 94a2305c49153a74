"""The acts of full-distribution distillation in Triton; see `pair.py` for their formulas.

n tokens, v columns. Both work on a pair of tiles, student and teacher, row by row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Backward
from ..pair import Pair
from .pair import against_mixture, block_width, launch, log_softmax, side
from .statistics import WARPS, check_tile, on_device
from .stored import sparse_gradient_, tail_partials

__all__ = ["divergence", "divergence_gradient_", "readable", "sparse_gradient_", "tail_partials"]


@triton.jit
def shares(log_q, log_p, beta, KIND: tl.constexpr):
    """What each column of a block adds to the divergence, and to the pivot of its gradient."""
    if KIND == "forward_kl":
        value = tl.exp(log_q) * (log_q - log_p)
        pivot = tl.zeros_like(value)
    elif KIND == "reverse_kl":
        value = tl.exp(log_p) * (log_p - log_q)
        pivot = value
    else:
        p_to_m = against_mixture(log_q, log_p, beta)
        q_to_m = p_to_m - (log_p - log_q)
        pivot = tl.exp(log_p) * p_to_m
        value = beta * (tl.exp(log_q) * q_to_m) + (1 - beta) * pivot
    return value, pivot


@triton.jit
def divergence_kernel(
    raw,  # [n, v]
    raw_stride,
    teacher,  # [n, v]
    teacher_stride,
    v,
    p_inner,
    p_outer,
    q_inner,
    q_outer,
    p_peaks,  # [n], as all vectors
    p_log_sums,
    q_peaks,
    q_log_sums,
    beta,
    values,
    pivots,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    P_SOFTCAP: tl.constexpr,
    Q_SOFTCAP: tl.constexpr,
    ONTO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    raw += row * raw_stride
    teacher += row * teacher_stride
    p_peak, p_log_sum = tl.load(p_peaks + row), tl.load(p_log_sums + row)
    q_peak, q_log_sum = tl.load(q_peaks + row), tl.load(q_log_sums + row)
    value = tl.full((), 0.0, tl.float32)
    pivot = tl.full((), 0.0, tl.float32)
    if ONTO:
        value, pivot = tl.load(values + row), tl.load(pivots + row)
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        mine = tl.load(raw + columns, mask=inside, other=0.0)
        other = tl.load(teacher + columns, mask=inside, other=0.0)
        log_p = log_softmax(mine, p_peak, p_log_sum, p_inner, p_outer, P_SOFTCAP)
        log_q = log_softmax(other, q_peak, q_log_sum, q_inner, q_outer, Q_SOFTCAP)
        add_value, add_pivot = shares(log_q, log_p, beta, KIND)
        value += tl.sum(tl.where(inside, add_value, 0.0), 0)
        pivot += tl.sum(tl.where(inside, add_pivot, 0.0), 0)
    tl.store(values + row, value)
    tl.store(pivots + row, pivot)


def readable(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """A teacher's tile in a form that these acts read, with the tile's memory where it serves."""
    if tile.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        tile = tile.to(dtype)
    return tile if tile.shape[1] < 2 or tile.stride(1) == 1 else tile.contiguous()


def divergence(
    raw: Tensor,  # [n, v], fp32, bf16 or fp16; any row stride
    raw_teacher: Tensor,  # [n, v], likewise
    pair: Pair,
    onto: Tensor | None = None,  # [2, n] float32, updated in place
) -> Tensor:
    student, teacher, kind, beta = pair
    check_tile("raw", raw)
    check_tile("raw_teacher", raw_teacher)
    n, v = raw.shape
    out = raw.new_empty(2, n, dtype=torch.float32) if onto is None else onto
    if n == 0:
        return out
    with on_device(raw):
        divergence_kernel[(n,)](
            raw,
            raw.stride(0),
            raw_teacher,
            raw_teacher.stride(0),
            v,
            *side(student, out),
            *side(teacher, out),
            *student.normalizer,
            *teacher.normalizer,
            beta,
            out[0],
            out[1],
            BLOCK=block_width(v),
            KIND=kind,
            P_SOFTCAP=student.transform.softcap is not None,
            Q_SOFTCAP=teacher.transform.softcap is not None,
            ONTO=onto is not None,
            num_warps=WARPS,
        )
    return out


def divergence_gradient_(
    raw: Tensor,  # [n, v], fp32, bf16 or fp16; any row stride
    raw_teacher: Tensor,  # [n, v], likewise
    pair: Pair,
    pivot: Tensor,  # [n]
    weight: Tensor,  # [n]
    extra: Tensor | None = None,  # [n, v] float32, another part of d/draw
    others: Backward | None = None,
) -> Tensor:
    student, teacher, kind, beta = pair
    check_tile("raw_teacher", raw_teacher)
    return launch(raw, raw_teacher, student, teacher, kind, beta, pivot, weight, extra, others)
