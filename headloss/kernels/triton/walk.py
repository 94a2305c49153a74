"""Two passes along a row of logits for the kernel of given.py: the first computes the row's
statistics, the second writes the row's gradient. A NaN logit gives a NaN result.

`x` points to a row of v logits, and `y` to the row's gradient; `length` is v, or 0 for a row that
is not read. `to` is a `SoftmaxState` of output memory, with None for a sum that is not wanted; `z`
is a `LogitScaling` (scale, soft cap and temperature); `normalizer` is the pair (max_logit,
log_sum). `at` holds the gradient coefficients (c_prob, c_entropy, c_uniform), each already
multiplied by scale / temperature, which is the derivative of a transformed logit z by its raw logit
if there is no soft cap. `c` is a named tuple of gradient coefficients; a field is None if the loss
lacks this coefficient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formulas import FLOOR, LOG2E, grad_z, transformed, under_cap

# Smallest float32 number, used in place of -inf so that no difference of two maxima is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def logits_of(raw, inside, z, outer):
    """Return the transformed logits (after scale, soft cap and temperature), with -inf at columns
    beyond the end of the row."""
    if z.same is not None:
        return raw.to(tl.float32)
    else:
        return tl.where(inside, transformed(raw, z, outer), float("-inf"))


@triton.jit
def logits_at(x, columns, length, z, outer, HINT: tl.constexpr):
    """Return the transformed logits z of a block of columns, and the mask of columns before the
    row's end."""
    inside = columns < length
    raw = tl.load(x + columns, mask=inside, other=float("-inf"), eviction_policy=HINT)
    return logits_of(raw, inside, z, outer), inside


@triton.jit
def add_term(z, max_logit, sumexp_m1, entropy_sum, ENTROPY: tl.constexpr):
    """Add e = exp(z - max_logit) to `sumexp_m1`, and e (z - max_logit) to `entropy_sum`."""
    below = z - max_logit
    if ENTROPY:
        below = tl.maximum(below, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(below * LOG2E)
    sumexp_m1 += e
    if ENTROPY:
        entropy_sum += e * below
    return sumexp_m1, entropy_sum


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def join_lanes(max_logit, sumexp_m1, entropy_sum, ENTROPY: tl.constexpr):
    """Return (max_logit, sumexp_m1, entropy_sum) of a row of logits, merged from the online-softmax
    states of WIDTH vector lanes."""
    top = tl.max(max_logit, 0)
    log_scale = tl.maximum(max_logit - top, FLOOR)
    scale = tl.exp2(log_scale * LOG2E)
    # Each lane's `sumexp_m1` leaves out the exponential of the lane's largest logit. The row's
    # `sumexp_m1` leaves out only the exponential of the row's largest logit. So add `scale`, which
    # is exp(largest logit of the lane - largest logit of the row), for every lane except one that
    # holds the row's largest logit.
    at_top = max_logit == top
    others = tl.sum(sumexp_m1 * scale + tl.where(at_top, 0.0, scale), 0)
    sumexp_m1_of_row = others + (tl.sum(at_top.to(tl.float32), 0) - 1)
    entropy_sum_of_row = 0.0
    if ENTROPY:
        entropy_sum_of_row = tl.sum(scale * (entropy_sum + (sumexp_m1 + 1) * log_scale), 0)
    empty = top == LOWEST
    sumexp_m1_of_row = tl.where(empty, -1.0, sumexp_m1_of_row)
    return tl.where(empty, float("-inf"), top), sumexp_m1_of_row, entropy_sum_of_row


@triton.jit
def row_partials(x, length, z, outer, to, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """Return the online-softmax state of a row of logits, and the sum of the logits. Each of WIDTH
    vector lanes keeps an online-softmax state until the end of the row, so that lanes exchange no
    values during the pass.

    In each vector lane, the sum of exponentials leaves out the lane's largest logit. When a logit
    arrives, the larger of the logit and the old maximum becomes the new maximum, and the
    exponential of the smaller of the two is added to the sum.
    """
    ENTROPY: tl.constexpr = to.entropy_sum is not None
    lanes = tl.arange(0, WIDTH)
    nothing = tl.zeros((WIDTH,), tl.float32)
    max_logit = nothing + LOWEST
    sumexp_m1 = nothing
    entropy_sum = nothing
    logit_sum = nothing
    hint: tl.constexpr = "evict_last" if KEPT else ""
    for start in tl.range(0, length, 4 * WIDTH, num_stages=1):
        a, in_a = logits_at(x, start + lanes, length, z, outer, hint)
        b, in_b = logits_at(x, start + WIDTH + lanes, length, z, outer, hint)
        c, in_c = logits_at(x, start + 2 * WIDTH + lanes, length, z, outer, hint)
        d, in_d = logits_at(x, start + 3 * WIDTH + lanes, length, z, outer, hint)
        if to.logit_sum is not None:
            logit_sum += tl.where(in_a, a, 0.0) + tl.where(in_b, b, 0.0)
            logit_sum += tl.where(in_c, c, 0.0) + tl.where(in_d, d, 0.0)
        ab = tl.maximum(a, b)
        cd = tl.maximum(c, d)
        four = tl.maximum(ab, cd)
        new = tl.maximum(max_logit, four)
        log_scale = tl.maximum(max_logit - new, FLOOR)
        scale = tl.exp2(log_scale * LOG2E)
        if ENTROPY:
            entropy_sum = (entropy_sum + sumexp_m1 * log_scale) * scale
        sumexp_m1 *= scale
        sumexp_m1, entropy_sum = add_term(smaller(a, b), new, sumexp_m1, entropy_sum, ENTROPY)
        sumexp_m1, entropy_sum = add_term(smaller(c, d), new, sumexp_m1, entropy_sum, ENTROPY)
        sumexp_m1, entropy_sum = add_term(smaller(ab, cd), new, sumexp_m1, entropy_sum, ENTROPY)
        old = smaller(max_logit, four)
        sumexp_m1, entropy_sum = add_term(old, new, sumexp_m1, entropy_sum, ENTROPY)
        max_logit = new
    of_row = join_lanes(max_logit, sumexp_m1, entropy_sum, ENTROPY)
    return of_row[0], of_row[1], of_row[2], tl.sum(logit_sum, 0)


@triton.jit
def logit_gradient(raw, inside, z, outer, normalizer, at, c):
    """Return two tensors for a block of columns of a row: the gradient of the raw logits without
    the coefficient `c.target`, which the caller adds at the target's column, and the derivative of
    the soft cap."""
    max_logit, log_sum = normalizer
    logit = logits_of(raw, inside, z, outer)
    if c.entropy is not None:
        log_p = tl.maximum((logit - max_logit) - log_sum, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp2(log_p * LOG2E)
    else:
        log_p = logit
        p = tl.exp2((logit - max_logit) * LOG2E - log_sum * LOG2E)
    g = grad_z(p, log_p, at, c)
    slope = under_cap(1.0, raw, z)
    return g * slope, slope


@triton.jit
def write_gradient(
    x, y, v, length, z, outer, normalizer, at, c, WIDTH: tl.constexpr, KEPT: tl.constexpr
):
    """Write the gradient of a row of logits, from the last columns to the first. The caller must
    still add the gradient coefficient `c.target` at the target's column."""
    hint: tl.constexpr = "evict_first" if KEPT else ""
    steps = tl.cdiv(v, 4 * WIDTH)
    for step in range(0, steps):
        columns = (steps - 1 - step) * (4 * WIDTH) + tl.arange(0, 4 * WIDTH)
        inside = columns < length
        value = tl.load(x + columns, mask=inside, other=float("-inf"), eviction_policy=hint)
        g, _ = logit_gradient(value, inside, z, outer, normalizer, at, c)
        tl.store(y + columns, g.to(y.dtype.element_ty), mask=columns < v, eviction_policy=hint)
