"""Act two in Triton: a tile of logits, or of held softmax terms, to the gradient of the loss.

    dL/dz_j = c_target [j = y] + p_j (c_prob + c_entropy log p_j) + c_uniform

One program per row. With an `Order` program i reads row order.rows[i] and writes row i, so that the
products that follow see dense rows; this is safe in the tile's own memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Backward, Order
from .statistics import (
    FLOOR,
    WARPS,
    block_width,
    check_tile,
    log,
    multipliers,
    on_device,
    row_multiplier,
    transformed,
)


def narrowed(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, v] of a dtype at most as wide, in the front of each row's own memory."""
    if tile.dtype == dtype:
        return tile
    return tile.view(dtype)[:, : tile.shape[1]]


@triton.jit
def softmax_terms(
    x,
    shift,
    log_sum,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
    HELD: tl.constexpr,
):
    """p and log p of a block of raw logits (shift = peak), or of held terms e (shift = peak less
    their reference)."""
    if HELD:
        e = x.to(tl.float32)
        offset = shift + log_sum
        p = e * tl.exp(-offset)
        log_p = tl.where(e > 0, log(e) - offset, FLOOR)
    else:
        log_p = tl.maximum((transformed(x, inner, outer, SOFTCAP) - shift) - log_sum, FLOOR)
        p = tl.exp(log_p)
    return p, log_p


@triton.jit
def coefficient(pointer, row, PRESENT: tl.constexpr):
    value = 0.0
    if PRESENT:
        value = tl.load(pointer + row).to(tl.float32)
    return value


@triton.jit
def z_gradient(
    p, log_p, at_prob, at_entropy, at_uniform, ENTROPY: tl.constexpr, UNIFORM: tl.constexpr
):
    """dL/dz of a block, but for the target's own term."""
    if ENTROPY:
        g = p * (at_prob + at_entropy * log_p)
    else:
        g = p * at_prob
    if UNIFORM:
        g += at_uniform
    return g


@triton.jit(do_not_specialize=["first"])
def gradient_kernel(
    x,  # [n, v]: raw logits, or held terms
    x_stride,
    out,  # [n, v]
    out_stride,
    rows,  # [n], or unused, as the next
    count,  # [1]
    targets,  # [n], as all vectors below
    first,
    v,
    inner,
    outer,
    scale,
    temperature,
    peaks,
    log_sums,
    c_target,
    c_prob,
    c_entropy,
    c_uniform,
    target_logits,  # held only, as the next
    references,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    TARGET: tl.constexpr,
    PROB: tl.constexpr,
    ENTROPY: tl.constexpr,
    UNIFORM: tl.constexpr,
    HELD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = place
    if ROWS:
        if place >= tl.load(count):
            return
        row = tl.load(rows + place)
    x += row * x_stride
    out += place * out_stride
    outer = row_multiplier(outer, temperature, row, ROW_TEMPERATURE)
    factor = row_multiplier(scale, temperature, row, ROW_TEMPERATURE)
    peak = tl.load(peaks + row)
    log_sum = tl.load(log_sums + row)
    at_target = coefficient(c_target, row, TARGET)
    at_prob = coefficient(c_prob, row, PROB)
    at_entropy = coefficient(c_entropy, row, ENTROPY)
    at_uniform = coefficient(c_uniform, row, UNIFORM)
    target = tl.load(targets + row) - first
    shift = peak
    if HELD:
        shift = peak - tl.load(references + row)
        # 1 - p of a likely target must not be left to the 16 bits of a held term.
        target_log_p = tl.maximum((tl.load(target_logits + row) - peak) - log_sum, FLOOR)
        target_p = tl.exp(target_log_p)

    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        value = tl.load(x + columns, mask=inside, other=0.0)
        p, log_p = softmax_terms(value, shift, log_sum, inner, outer, SOFTCAP, HELD)
        if HELD:
            log_p = tl.where(columns == target, target_log_p, log_p)
            p = tl.where(columns == target, target_p, p)
        g = z_gradient(p, log_p, at_prob, at_entropy, at_uniform, ENTROPY, UNIFORM)
        if TARGET:
            g += tl.where(columns == target, at_target, 0.0)
        if SOFTCAP:
            if HELD:
                bend = (log_p + (peak + log_sum)) / outer
            else:
                bend = transformed(value, inner, 1.0, SOFTCAP)
            g *= 1 - bend * bend
        g *= factor
        if OVERLAP:
            # Rows narrow in place: every thread has read this block before any writes over it.
            tl.debug_barrier()
        tl.store(out + columns, g.to(out.dtype.element_ty), mask=inside)


def _overlap(x: Tensor, out: Tensor) -> bool:
    """Whether `out` lies in x's own rows with another element size; other overlaps are refused."""
    if out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        return False
    same_rows = x.data_ptr() == out.data_ptr() and (
        x.stride(0) * x.element_size() == out.stride(0) * out.element_size()
    )
    if not same_rows or out.element_size() > x.element_size():
        raise ValueError("out must be separate memory, or the front of each row of the tile")
    return out.element_size() != x.element_size()


def launch(
    x: Tensor,
    out: Tensor,
    order: Order | None,
    backward: Backward,
    held: tuple[Tensor, Tensor] | None = None,  # target logits and references
) -> Tensor:
    check_tile("tile", x)
    check_tile("out", out)
    out = out[: len(x)]
    if len(x) == 0:
        return out
    targets, first, transform, (peak, log_sum), c, _ = backward
    inner, outer, temperature = multipliers(transform, peak)
    row_temperature = isinstance(transform.temperature, Tensor)
    scale = transform.scale if row_temperature else transform.scale / transform.temperature
    with on_device(x):
        gradient_kernel[(len(x),)](
            x,
            x.stride(0),
            out,
            out.stride(0),
            *((targets, targets) if order is None else order),
            targets,
            first,
            x.shape[1],
            inner,
            outer,
            scale,
            temperature,
            peak,
            log_sum,
            *(peak if t is None else t for t in (c.target, c.prob, c.entropy, c.uniform)),
            *((peak, peak) if held is None else held),
            BLOCK=block_width(x.shape[1]),
            ROWS=order is not None,
            SOFTCAP=transform.softcap is not None,
            ROW_TEMPERATURE=row_temperature,
            TARGET=c.target is not None,
            PROB=c.prob is not None,
            ENTROPY=c.entropy is not None,
            UNIFORM=c.uniform is not None,
            HELD=held is not None,
            OVERLAP=_overlap(x, out),
            num_warps=WARPS,
        )
    return out


def logit_gradient_(
    raw: Tensor,  # [n, v], fp32, bf16 or fp16; any row stride
    backward: Backward,
    *,
    out: Tensor | None = None,  # [>= n, v]; default: raw itself. narrowed(raw, dtype) works too
    order: Order | None = None,
) -> Tensor:
    if backward.dtype is not None:
        out = narrowed(raw, backward.dtype)
    return launch(raw, raw if out is None else out, order, backward)
