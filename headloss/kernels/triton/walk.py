"""The two walks of given.py along a row of logits in Triton: its partial statistics, and its
gradient. A NaN stays one.

A row of v logits begins at x and its gradient at y; `length` is v, or 0 where nothing is read. `to`
are the Partials that are wanted, z is a LogitScaling, `normalizer` (peak, log_sum), and `at`
(c_prob, c_entropy, c_uniform), times dz/draw without the soft cap, of which c says what there is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formulas import FLOOR, LOG2E, act_two, transformed, under_cap

LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that no difference of peaks is NaN


@triton.jit
def logits_of(raw, inside, z, outer):
    """z, and -inf outside of the row (where `raw` is that already)."""
    if z.same:
        return raw.to(tl.float32)
    else:
        return tl.where(inside, transformed(raw, z, outer), float("-inf"))


@triton.jit
def logits_at(x, columns, length, z, outer, HINT: tl.constexpr):
    """z of some columns, and which are inside of the row."""
    inside = columns < length
    raw = tl.load(x + columns, mask=inside, other=float("-inf"), eviction_policy=HINT)
    return logits_of(raw, inside, z, outer), inside


@triton.jit
def add_term(z, peak, rest, spread, ENTROPY: tl.constexpr):
    """Add e = exp(z - peak) to `rest`, and e (z - peak) to `spread`. A NaN stays one."""
    shift = z - peak
    if ENTROPY:
        shift = tl.maximum(shift, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(shift * LOG2E)
    rest += e
    if ENTROPY:
        spread += e * shift
    return rest, spread


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def join_lanes(peak, rest, spread, ENTROPY: tl.constexpr):
    """(peak, rest, spread) of a row from those of its lanes."""
    top = tl.max(peak, 0)
    shift = tl.maximum(peak - top, FLOOR)
    scale = tl.exp2(shift * LOG2E)
    # The largest term is left out, once: its equals in other lanes, if any, count one each.
    at_top = peak == top
    others = tl.sum(rest * scale + tl.where(at_top, 0.0, scale), 0)
    all_rest = others + (tl.sum(at_top.to(tl.float32), 0) - 1)
    all_spread = 0.0
    if ENTROPY:
        all_spread = tl.sum(scale * (spread + (rest + 1) * shift), 0)
    empty = top == LOWEST
    all_rest = tl.where(empty, -1.0, all_rest)
    return tl.where(empty, float("-inf"), top), all_rest, all_spread


@triton.jit
def row_partials(x, length, z, outer, to, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """Partial statistics of a row. Each of WIDTH lanes has its own until the end, so
    that nothing is exchanged along the way.

    A lane keeps its largest logit apart: of two values the larger goes on, the smaller is summed.
    """
    ENTROPY: tl.constexpr = to.spread is not None
    lanes = tl.arange(0, WIDTH)
    nothing = tl.zeros((WIDTH,), tl.float32)
    peak, rest, spread, total = nothing + LOWEST, nothing, nothing, nothing
    hint: tl.constexpr = "evict_last" if KEPT else ""
    for start in tl.range(0, length, 4 * WIDTH, num_stages=1):
        a, in_a = logits_at(x, start + lanes, length, z, outer, hint)
        b, in_b = logits_at(x, start + WIDTH + lanes, length, z, outer, hint)
        c, in_c = logits_at(x, start + 2 * WIDTH + lanes, length, z, outer, hint)
        d, in_d = logits_at(x, start + 3 * WIDTH + lanes, length, z, outer, hint)
        if to.total is not None:
            total += tl.where(in_a, a, 0.0) + tl.where(in_b, b, 0.0)
            total += tl.where(in_c, c, 0.0) + tl.where(in_d, d, 0.0)
        ab, cd = tl.maximum(a, b), tl.maximum(c, d)
        four = tl.maximum(ab, cd)
        new = tl.maximum(peak, four)
        shift = tl.maximum(peak - new, FLOOR)
        scale = tl.exp2(shift * LOG2E)
        if ENTROPY:
            spread = (spread + rest * shift) * scale
        rest *= scale
        rest, spread = add_term(smaller(a, b), new, rest, spread, ENTROPY)
        rest, spread = add_term(smaller(c, d), new, rest, spread, ENTROPY)
        rest, spread = add_term(smaller(ab, cd), new, rest, spread, ENTROPY)
        rest, spread = add_term(smaller(peak, four), new, rest, spread, ENTROPY)
        peak = new
    row_peak, row_rest, row_spread = join_lanes(peak, rest, spread, ENTROPY)
    return row_peak, row_rest, row_spread, tl.sum(total, 0)


@triton.jit
def logit_gradient(raw, inside, z, outer, normalizer, at, c):
    """dL/draw of some logits of a row, but for the target's own term; and d(soft cap)."""
    peak, log_sum = normalizer
    logit = logits_of(raw, inside, z, outer)
    if c.entropy is not None:
        log_p = tl.maximum((logit - peak) - log_sum, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp2(log_p * LOG2E)
    else:
        log_p = logit
        p = tl.exp2((logit - peak) * LOG2E - log_sum * LOG2E)
    g = act_two(p, log_p, at, c)
    slope = under_cap(1.0, raw, z)
    return g * slope, slope


@triton.jit
def write_gradient(
    x, y, v, length, z, outer, normalizer, at, c, WIDTH: tl.constexpr, KEPT: tl.constexpr
):
    """The gradient of a row but for the target's own term, last columns first."""
    hint: tl.constexpr = "evict_first" if KEPT else ""
    steps = tl.cdiv(v, 4 * WIDTH)
    for step in range(0, steps):
        columns = (steps - 1 - step) * (4 * WIDTH) + tl.arange(0, 4 * WIDTH)
        inside = columns < length
        value = tl.load(x + columns, mask=inside, other=float("-inf"), eviction_policy=hint)
        g, _ = logit_gradient(value, inside, z, outer, normalizer, at, c)
        tl.store(y + columns, g.to(y.dtype.element_ty), mask=columns < v, eviction_policy=hint)
