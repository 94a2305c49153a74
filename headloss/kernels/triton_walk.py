"""The two walks along a row of logits in Triton, and what stands between them.

z = transform(raw). The first walk gives the partial statistics of the row, the second its gradient;
`triton_given.py` puts them together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_partials import FLOOR, tanh

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that no difference of peaks is NaN


@triton.jit
def logits_of(raw, inside, inner, outer, SOFTCAP: tl.constexpr, SCALED: tl.constexpr):
    """z, and -inf outside of the row (where `raw` is that already)."""
    z = raw.to(tl.float32)
    if SOFTCAP:
        z = tanh(z * inner)
    if SOFTCAP or SCALED:
        z = tl.where(inside, z * outer, float("-inf"))
    return z


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
    row_rest = others + (tl.sum(at_top.to(tl.float32), 0) - 1)
    row_spread = 0.0
    if ENTROPY:
        row_spread = tl.sum(scale * (spread + (rest + 1) * shift), 0)
    empty = top == LOWEST
    row_rest = tl.where(empty, -1.0, row_rest)
    return tl.where(empty, float("-inf"), top), row_rest, row_spread


@triton.jit
def row_partials(
    x,
    length,
    inner,
    outer,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    KEPT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Partial statistics of a row. Each of WIDTH lanes has its own until the end of the row, so
    that nothing is exchanged along the way.

    A lane keeps its largest logit apart: of two values the larger goes on, the smaller is summed.
    """
    peak = tl.full((WIDTH,), LOWEST, tl.float32)
    rest = tl.zeros((WIDTH,), tl.float32)
    spread = tl.zeros((WIDTH,), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    hint: tl.constexpr = "evict_last" if KEPT else ""
    for start in tl.range(0, length, 4 * WIDTH, num_stages=STAGES):
        at = start + tl.arange(0, WIDTH)
        in_a, in_b = at < length, at + WIDTH < length
        in_c, in_d = at + 2 * WIDTH < length, at + 3 * WIDTH < length
        none = float("-inf")
        a = tl.load(x + at, mask=in_a, other=none, eviction_policy=hint)
        b = tl.load(x + at + WIDTH, mask=in_b, other=none, eviction_policy=hint)
        c = tl.load(x + at + 2 * WIDTH, mask=in_c, other=none, eviction_policy=hint)
        d = tl.load(x + at + 3 * WIDTH, mask=in_d, other=none, eviction_policy=hint)
        a = logits_of(a, in_a, inner, outer, SOFTCAP, SCALED)
        b = logits_of(b, in_b, inner, outer, SOFTCAP, SCALED)
        c = logits_of(c, in_c, inner, outer, SOFTCAP, SCALED)
        d = logits_of(d, in_d, inner, outer, SOFTCAP, SCALED)
        if MEAN:
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
def logit_gradient(
    raw,
    inside,
    z_of,  # (inner, outer), see `logits_of`
    normalizer,  # (peak, log_sum)
    c,  # (c_prob, c_entropy, c_uniform), times dz/draw without the soft cap
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """dL/draw of some logits of a row, but for the target's own term; and d(soft cap)."""
    inner, outer = z_of
    peak, log_sum = normalizer
    at_prob, at_entropy, at_uniform = c
    z = logits_of(raw, inside, inner, outer, SOFTCAP, SCALED)
    if ENTROPY:
        log_p = tl.maximum((z - peak) - log_sum, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        g = tl.exp2(log_p * LOG2E) * (at_prob + at_entropy * log_p)
    else:
        g = tl.exp2((z - peak) * LOG2E - log_sum * LOG2E) * at_prob
    if UNIFORM:
        g += at_uniform
    bend = 1.0
    if SOFTCAP:
        capped = tanh(raw.to(tl.float32) * inner)
        bend = 1 - capped * capped
        g *= bend
    return g, bend


@triton.jit
def write_gradient(
    x,
    y,
    v,
    length,  # v, or 0: nothing is read
    z_of,
    normalizer,
    c,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """The gradient of a row but for the target's own term, last columns first."""
    hint: tl.constexpr = "evict_first" if KEPT else ""
    steps = tl.cdiv(v, 4 * WIDTH)
    for step in range(0, steps):
        at = (steps - 1 - step) * (4 * WIDTH) + tl.arange(0, 4 * WIDTH)
        inside = at < length
        value = tl.load(x + at, mask=inside, other=float("-inf"), eviction_policy=hint)
        g, _ = logit_gradient(value, inside, z_of, normalizer, c, SOFTCAP, SCALED, ENTROPY, UNIFORM)
        tl.store(y + at, g.to(y.dtype.element_ty), mask=at < v, eviction_policy=hint)


@triton.jit
def log1p(x):
    """log(1 + x): the rounding of 1 + x is divided out."""
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def coefficient(pointer, row, PRESENT: tl.constexpr):
    value = 0.0
    if PRESENT:
        value = tl.load(pointer + row).to(tl.float32)
    return value


@triton.jit
def closed_slope(slopes, row, count, logp, SLOPES: tl.constexpr):
    """dL/dlogp of a token from `stats.Slope` parts."""
    found = 0.0
    for i in tl.static_range(SLOPES):
        part = slopes + i * 5 * count.to(tl.int64) + row
        rate = tl.load(part)
        anchor = tl.load(part + count)
        low = tl.load(part + 2 * count)
        high = tl.load(part + 3 * count)
        sign = tl.load(part + 4 * count)
        value = rate * tl.exp(sign * (logp - anchor))
        found += tl.where((logp >= low) & (logp <= high), value, 0.0)
    return found
