"""The gradient of distillation in Triton: a divergence's part and all others, in one pass.

n tokens, v columns, K stored outcomes. One program per row. The gradient of the rest of the
objective goes through the four coefficients of a token (see `stats`) and is added in the same step,
so that the student's tile is read once and the gradient written once, in its memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...stats import Coefficients
from ..interface import Backward
from ..pair import Side
from ..transform import Transform
from .gradient import _overlap, coefficient, narrowed, softmax_terms, z_gradient
from .statistics import (
    FLOOR,
    WARPS,
    check_tile,
    log,
    multipliers,
    on_device,
    row_multiplier,
    transformed,
)

BLOCK = 2048  # columns a program works on at once, at most: of two tiles
NO_COEFFICIENTS = Coefficients()


@triton.jit
def log_softmax(raw, peak, log_sum, inner, outer, SOFTCAP: tl.constexpr):
    return tl.maximum((transformed(raw, inner, outer, SOFTCAP) - peak) - log_sum, FLOOR)


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0; Taylor's series where the two would cancel."""
    tail = 1 + x * 0.125
    tail = 1 + x * 0.14285714 * tail
    tail = 1 + x * 0.16666667 * tail
    tail = 1 + x * 0.2 * tail
    tail = 1 + x * 0.25 * tail
    tail = 1 + x * 0.33333333 * tail
    tail = 1 + x * 0.5 * tail
    return tl.where(x > -0.5, x * tail, tl.exp(x) - 1)


@triton.jit
def log1p(x):
    """log(1 + x) for -1 < x <= 0; 2 atanh(x / (2 + x)) where 1 + x would lose digits of x."""
    s = x / (2 + x)
    s2 = s * s
    near = 0.11111111 + s2 * (0.09090909 + s2 * 0.07692308)
    near = 1 + s2 * (0.33333333 + s2 * (0.2 + s2 * (0.14285714 + s2 * near)))
    return tl.where(x > -0.5, 2 * s * near, log(1 + x))


@triton.jit
def against_mixture(log_q, log_p, beta):
    """log p/m with m = beta q + (1 - beta) p; exact zeros where p and q agree."""
    d = log_p - log_q
    share = tl.where(d > 0, beta, 1 - beta)
    return tl.where(d > 0, 0.0, d) - log1p(share * expm1(-tl.abs(d)))


@triton.jit
def slope(log_q, log_p, pivot, beta, KIND: tl.constexpr):
    """d divergence / dz of a block."""
    p = tl.exp(log_p)
    if KIND == "forward_kl":
        g = p - tl.exp(log_q)
    elif KIND == "reverse_kl":
        g = p * ((log_p - log_q) - pivot)
    else:
        g = (1 - beta) * p * (against_mixture(log_q, log_p, beta) - pivot)
    return g


@triton.jit(do_not_specialize=["first"])
def pair_gradient_kernel(
    raw,  # [n, v]
    raw_stride,
    teacher,  # [n, v], where there is one
    teacher_stride,
    extra,  # [n, v], where there is one
    extra_stride,
    out,  # [n, v]
    out_stride,
    v,
    inner,  # of the student, then of the teacher
    p_outer,
    p_factor,
    q_inner,
    q_outer,
    p_peaks,  # [n], as all vectors
    p_log_sums,
    q_peaks,
    q_log_sums,
    beta,
    pivots,  # of stored outcomes: the slope at the rest's log-sum-exp
    weights,
    places,  # [n, K] columns of stored outcomes, ascending
    slopes,  # [n, K] d/dz of each
    stored_count,
    bounds,  # [n, blocks + 1] which of them lie in a block
    blocks,
    targets,  # and the rest of the objective
    first,
    outer,
    scale,
    temperature,
    peaks,
    log_sums,
    c_target,
    c_prob,
    c_entropy,
    c_uniform,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,  # of the divergence, or "stored"
    SOFTCAP: tl.constexpr,
    Q_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    OTHERS: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    TARGET: tl.constexpr,
    PROB: tl.constexpr,
    ENTROPY: tl.constexpr,
    UNIFORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    raw += row * raw_stride
    out += row * out_stride
    p_peak, p_log_sum = tl.load(p_peaks + row), tl.load(p_log_sums + row)
    pivot, weight = tl.load(pivots + row), tl.load(weights + row)
    if KIND == "stored":
        places += row * stored_count
        slopes += row * stored_count
        bounds += row * (blocks + 1)
    else:
        teacher += row * teacher_stride
        q_peak, q_log_sum = tl.load(q_peaks + row), tl.load(q_log_sums + row)
    if EXTRA:
        extra += row * extra_stride
    if OTHERS:
        outer = row_multiplier(outer, temperature, row, ROW_TEMPERATURE)
        factor = row_multiplier(scale, temperature, row, ROW_TEMPERATURE)
        peak, log_sum = tl.load(peaks + row), tl.load(log_sums + row)
        at_target = coefficient(c_target, row, TARGET)
        at_prob = coefficient(c_prob, row, PROB)
        at_entropy = coefficient(c_entropy, row, ENTROPY)
        at_uniform = coefficient(c_uniform, row, UNIFORM)
        target = tl.load(targets + row) - first

    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        value = tl.load(raw + columns, mask=inside, other=0.0)
        log_p = log_softmax(value, p_peak, p_log_sum, inner, p_outer, SOFTCAP)
        if KIND == "stored":
            g = pivot * tl.exp(tl.minimum(log_p, 0.0))
            bound = bounds + start // BLOCK
            for k in range(tl.load(bound), tl.load(bound + 1)):
                g = tl.where(columns == tl.load(places + k), tl.load(slopes + k), g)
        else:
            other = tl.load(teacher + columns, mask=inside, other=0.0)
            log_q = log_softmax(other, q_peak, q_log_sum, q_inner, q_outer, Q_SOFTCAP)
            g = slope(log_q, log_p, pivot, beta, KIND)
        g = tl.where(weight == 0, 0.0, g * weight * p_factor)  # such rows may hold anything
        if OTHERS:
            p, log_p = softmax_terms(value, peak, log_sum, inner, outer, SOFTCAP, False)
            h = z_gradient(p, log_p, at_prob, at_entropy, at_uniform, ENTROPY, UNIFORM)
            if TARGET:
                h += tl.where(columns == target, at_target, 0.0)
            g += h * factor
        if SOFTCAP:
            bend = transformed(value, inner, 1.0, SOFTCAP)
            g *= 1 - bend * bend
        if EXTRA:
            g += tl.load(extra + columns, mask=inside, other=0.0)
        if OVERLAP:
            # Rows narrow in place: every thread has read this block before any writes over it.
            tl.debug_barrier()
        tl.store(out + columns, g.to(out.dtype.element_ty), mask=inside)


class Stored(NamedTuple):
    """A tile's stored outcomes, for kernels that walk along its rows in blocks."""

    places: Tensor  # [n, K] columns, ascending; some may lie outside of the tile
    order: Tensor  # [n, K] which of the given columns each one is
    bounds: Tensor  # [n, blocks + 1]: block b holds places[bounds[b]:bounds[b + 1]]

    @classmethod
    def of(cls, columns: Tensor, v: int, block: int) -> Stored:
        places, order = columns.sort(1)
        blocks = triton.cdiv(v, block)
        borders = torch.arange(0, (blocks + 1) * block, block, device=columns.device)
        bounds = torch.searchsorted(places, borders.expand(len(places), -1).contiguous())
        return cls(places, order, bounds)


def block_width(v: int) -> int:
    return min(BLOCK, triton.next_power_of_2(max(v, 16)))


def side(of: Side, like: Tensor) -> tuple[float, float]:
    """(inner, outer) of one side, whose temperature is a number."""
    if isinstance(of.transform.temperature, Tensor):
        raise TypeError("a side of a divergence: got a temperature per token, want a number")
    return multipliers(of.transform, like)[:2]


def launch(
    raw: Tensor,  # [n, v]
    teacher: Tensor | None,  # [n, v]
    p: Side,
    q: Side,
    kind: str,
    beta: float,
    pivot: Tensor,
    weight: Tensor,
    extra: Tensor | None,
    others: Backward | None,
    stored: tuple[Stored, Tensor] | None = None,  # and their slopes [n, K], in the same order
) -> Tensor:
    """The gradient in raw's memory where it is whole, else in that of `extra` or of its own."""
    check_tile("raw", raw)
    n, v = raw.shape
    if others is not None:
        out = raw if others.dtype is None else narrowed(raw, others.dtype)
    else:
        out = torch.empty_like(raw, dtype=torch.float32) if extra is None else extra
    if n == 0:
        return out
    # Without them, any tensor stands in for what the kernel does not read.
    rest = others or Backward(pivot, 0, Transform(), p.normalizer, NO_COEFFICIENTS)
    c = rest.coefficients
    inner, p_outer = side(p, pivot)
    q_inner, q_outer = side(q, pivot)
    _, outer, temperature = multipliers(rest.transform, pivot)
    row_temperature = isinstance(rest.transform.temperature, Tensor)
    scale = rest.transform.scale
    places = (pivot, pivot, 0, pivot, 0)
    if stored is not None:
        found, slopes = stored
        places = (found.places, slopes, slopes.shape[1], found.bounds, found.bounds.shape[1] - 1)
    tiles = (raw, raw if teacher is None else teacher, raw if extra is None else extra, out)
    with on_device(raw):
        pair_gradient_kernel[(n,)](
            *(part for tile in tiles for part in (tile, tile.stride(0))),
            v,
            inner,
            p_outer,
            p.transform.scale / p.transform.temperature,
            q_inner,
            q_outer,
            *p.normalizer,
            *q.normalizer,
            beta,
            pivot,
            weight,
            *places,
            rest.targets,
            rest.first,
            outer,
            scale if row_temperature else scale / rest.transform.temperature,
            temperature,
            *rest.normalizer,
            *(pivot if t is None else t for t in (c.target, c.prob, c.entropy, c.uniform)),
            BLOCK=block_width(v),
            KIND=kind,
            SOFTCAP=p.transform.softcap is not None,
            Q_SOFTCAP=q.transform.softcap is not None,
            EXTRA=extra is not None,
            OTHERS=bool(c.tensors()),
            ROW_TEMPERATURE=row_temperature,
            TARGET=c.target is not None,
            PROB=c.prob is not None,
            ENTROPY=c.entropy is not None,
            UNIFORM=c.uniform is not None,
            OVERLAP=_overlap(raw, out),
            num_warps=WARPS,
        )
    return out
