"""Triton kernels for the gradient, from a tile [n, v] of logits or of e = exp(z - shift) in bf16.

The GPU programs of a launch, in ascending order of their index, read ascending addresses of the
tile. An `Order` (a permutation of rows) moves the rows with a gradient to the front: row i is
computed from row order.rows[i], so that later products read dense rows. Rows may be reordered in
the tile's memory, because no program reads a row that is already overwritten.

If c_target and c_prob are the only gradient coefficients and there is no soft cap, the gradient in
a column j other than the target is p_j c_prob = s e_j, where e_j = exp(z_j - shift), and the factor
s is equal for all columns of a token. The kernel keeps e_j = exp(z_j - shift) in the tile, and
changes e_j only in the target's column. Let E be the tile of the numbers e_j = exp(z_j - shift),
with one factor s per token: the gradients are dX = s (E @ W) for the hidden states X, and dW = E.T
@ (s X) for the weight W.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..interface import Backward, ExpTile, Order
from . import records
from .formulas import (
    FLOOR,
    LN2,
    coefficient,
    coefficients,
    grad_z,
    gradient_from_logp,
    log,
    log2,
    log_softmax,
    normalizer_of,
    per_row,
    token_of,
    under_cap,
    under_cap_at,
)
from .launch import Launcher, cdiv
from .records import Matrix, gradient_inputs, matrix_of
from .versions import Constant

# Smallest e = exp(z - shift) whose logarithm is taken, so that the logarithm is finite.
LEAST = Constant(1e-37)


@triton.jit(do_not_specialize=["first"])
def gradient_kernel(
    a,  # A `GradientInputs` record.
    first,
    v,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Number of GPU programs per row of the tile; one program per row would make the kernel a tenth
    # slower.
    programs = tl.cdiv(v, SPAN)
    place = (tl.program_id(0) // programs).to(tl.int64)
    begin = tl.program_id(0) % programs * SPAN
    end = tl.minimum(v, begin + SPAN)
    row = place
    if a.order is not None:
        if place >= tl.load(a.order.count):
            return
        row = tl.load(a.order.rows + place)
    x = a.tile.data + row * a.tile.stride
    out = a.to.data + place * a.to.stride
    outer, factor, normalizer, at, target_gradient = token_of(a, row)
    max_logit, log_sum = normalizer
    target = tl.load(a.targets + row) - first
    if a.shifts is not None:
        offset = (max_logit - tl.load(a.shifts + row)) + log_sum
        if a.logps is not None:
            target_log_p = tl.maximum(tl.load(a.logps + row), FLOOR)

    if a.shifts is not None and a.z.inner is None:
        # If the tile holds e = exp(z - shift), the gradient of a logit is e * (level + slope *
        # log2(e)), where `level` and `slope` are two numbers per row. Later code overwrites the
        # gradient at the target's column with a value that includes the loss's derivative with
        # respect to the target's log-prob.
        scale = tl.exp(-offset) * factor
        level = (at[0] - at[1] * offset) * scale
        slope = at[1] * scale * LN2
        for start in range(begin, end, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < end
            e = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
            if a.c.entropy is not None:
                g = e * (level + slope * log2(tl.maximum(e, LEAST)))
            else:
                g = e * level
            if a.c.uniform is not None:
                g += at[2] * factor
            tl.store(out + columns, g.to(out.dtype.element_ty), mask=inside)
        if a.logps is not None:
            # A barrier is needed, because a different thread has written the gradient at the
            # target.
            tl.debug_barrier()
            in_span = (target >= begin) & (target < end)
            g = target_gradient * factor
            tl.store(out + target, g.to(out.dtype.element_ty), mask=in_span)
    else:
        for start in range(begin, end, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < end
            value = tl.load(x + columns, mask=inside, other=0.0)
            if a.shifts is not None:
                p = value * tl.exp(-offset)
                log_p = tl.where(value > 0, log(value.to(tl.float32)) - offset, FLOOR)
            else:
                log_p = log_softmax(value, a.z, outer, max_logit, log_sum)
                p = tl.exp(log_p)
            g = grad_z(p, log_p, at, a.c)
            if a.logps is not None:
                g = tl.where(columns == target, target_gradient, g)
            if a.z.inner is not None:
                if a.shifts is not None:
                    # Compute the target's logit z from the target's log-prob, because exp(z -
                    # shift) of the target may underflow to 0, which loses z.
                    if a.logps is not None:
                        log_p = tl.where(columns == target, target_log_p, log_p)
                    g = under_cap_at(g, max_logit + (log_p + log_sum), outer)
                else:
                    g = under_cap(g, value, a.z)
            g *= factor
            # In-place conversion to a narrower dtype: threads read a block before any thread
            # overwrites it.
            if OVERLAP:
                tl.debug_barrier()
            tl.store(out + columns, g.to(out.dtype.element_ty), mask=inside)


launch_gradient = Launcher(gradient_kernel, num_warps=4)


def logit_gradient_(
    raw: Tensor, backward: Backward, *, order: Order | None = None, shifts: Tensor | None = None
) -> Tensor:
    """Return the gradient of the raw logits in the tile `raw`; with `shifts`, `raw` holds exp(z -
    shift) in place of the logits."""
    records.check_tile("raw", raw)
    n, v = raw.shape
    out = records.narrowed(raw, backward)
    if n:
        a = gradient_inputs(backward)
        a = a._replace(tile=matrix_of(raw), to=matrix_of(out), order=order, shifts=shifts)
        block = records.block_width(v, 2048)
        overlap = out.dtype != raw.dtype
        # A single GPU program handles a row that is converted in place to a narrower dtype.
        span = 1 << 30 if overlap else 2 * block
        options = {"BLOCK": block, "SPAN": span, "OVERLAP": overlap}
        launch_gradient(n * cdiv(v, span), a, backward.first, v, **options)
    return out


# Smallest ratio |s| / |c_target| in a gradient s exp(z - shift) + c_target [column = target]; with
# a ratio this small, s exp(z - shift) is negligible next to c_target.
SMALLEST = Constant(2.0**-90)


@triton.jit(do_not_specialize=["first"])
def multiple_rows_kernel(a, first, v, h, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = place
    if a.order is not None:
        row = tl.load(a.order.rows + place)
        if place >= tl.load(a.order.count):
            return
    max_logit, log_sum = normalizer_of(a.normalizer, row)
    multiple = tl.load(a.c.prob + row)
    multiple *= tl.exp((tl.load(a.shifts + row) - max_logit) - log_sum)
    at_target = coefficient(a.c.target, row)
    log_p = tl.load(a.logps + row)
    of_token = coefficients(a.c, row)
    target_value = gradient_from_logp(log_p, at_target, of_token, a.c)
    if a.least is not None:
        floor = tl.load(a.least + row) * SMALLEST
        multiple = tl.where(tl.abs(multiple) < floor, floor, multiple)
    if a.c.target is not None:
        floor = tl.abs(at_target) * SMALLEST
        multiple = tl.where(tl.abs(multiple) < floor, floor, multiple)
    divisor = tl.where(multiple == 0, 1.0, multiple)
    target_value = tl.where(multiple == 0, 0.0, target_value / divisor)
    exp_logits = a.tile.data + row * a.tile.stride
    target_value = target_value.to(exp_logits.dtype.element_ty)
    column = tl.load(a.targets + row) - first
    if row == place:
        if (column >= 0) & (column < v):
            tl.store(exp_logits + column, target_value)
    else:  # Copy row `row` of the tile to row `place`.
        to = a.tile.data + place * a.tile.stride
        for start in range(0, v, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < v
            value = tl.load(exp_logits + columns, mask=inside)
            value = tl.where(columns == column, target_value, value)
            tl.store(to + columns, value, mask=inside)
    factor = multiple * per_row(a.z.factor, a.z, row)
    tl.store(a.multiples + place, factor)
    if a.x is not None:
        x = a.x.data + row * a.x.stride
        features = a.features + place * h
        for start in range(0, h, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < h, other=0.0).to(tl.float32) * factor
            tl.store(features + at, value.to(features.dtype.element_ty), mask=at < h)


launch_rows = Launcher(multiple_rows_kernel, num_warps=8)


def exp_multiple_(
    exp_tile: ExpTile,
    backward: Backward,
    *,
    x: Tensor | None = None,
    order: Order | None = None,
    least: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    n, v = exp_tile.exp_logits.shape
    h = 0
    rows = None
    features = None
    multiples = exp_tile.shift.new_empty(n)
    if x is not None:
        rows = Matrix(x, x.stride(0))
        features = x.new_empty(n, h := x.shape[1])
    if n:
        a = gradient_inputs(backward)._replace(
            tile=matrix_of(exp_tile.exp_logits),
            order=order,
            shifts=exp_tile.shift,
            multiples=multiples,
            x=rows,
            features=features,
            least=least,
        )
        launch_rows(n, a, backward.first, v, h, BLOCK=2048)
    return multiples, features


def exp_gradient_(exp_tile: ExpTile, backward: Backward, *, order: Order | None = None) -> Tensor:
    plain = backward._replace(dtype=None)
    return logit_gradient_(exp_tile.exp_logits, plain, order=order, shifts=exp_tile.shift)
