"""The two walks along a row of logits in Triton, and what stands between them.

P parts of a row, side by side. The first walk gives the partial statistics of the row, the second
its gradient; `given.py` puts them together. A NaN stays one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .cluster import letter, of_part, post
from .formulas import FLOOR, LOG2E, act_two, merged, tanh, transformed
from .versions import INTERPRETED

LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that no difference of peaks is NaN


@triton.jit
def logits_of(raw, inside, z, outer):
    """z, and -inf outside of the row (where `raw` is that already)."""
    if z.same:
        return raw.to(tl.float32)
    else:
        return tl.where(inside, transformed(raw, z, outer), float("-inf"))


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
def join_lanes(peak, rest, spread, ENTROPY: tl.constexpr, AXIS: tl.constexpr = 1):
    """(peak, rest, spread) of the parts from those of their lanes: [P] from [P, n], or of one part
    from [n]."""
    top = tl.max(peak, AXIS)
    of_lanes = top[:, None] if AXIS == 1 else top
    shift = tl.maximum(peak - of_lanes, FLOOR)
    scale = tl.exp2(shift * LOG2E)
    # The largest term is left out, once: its equals in other lanes, if any, count one each.
    at_top = peak == of_lanes
    others = tl.sum(rest * scale + tl.where(at_top, 0.0, scale), AXIS)
    all_rest = others + (tl.sum(at_top.to(tl.float32), AXIS) - 1)
    all_spread = tl.zeros_like(top)
    if ENTROPY:
        all_spread = tl.sum(scale * (spread + (rest + 1) * shift), AXIS)
    empty = top == LOWEST
    all_rest = tl.where(empty, -1.0, all_rest)
    return tl.where(empty, float("-inf"), top), all_rest, all_spread


@triton.jit
def part_partials(
    x,
    begin,  # [P, 1] first column of each part
    size,  # of a part
    length,  # of the row
    z,  # LogitScaling
    outer,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Partial statistics [P] of each part's columns. Each of WIDTH lanes has its own
    until the end, so that nothing is exchanged along the way.

    A lane keeps its largest logit apart: of two values the larger goes on, the smaller is summed.
    """
    lanes = tl.arange(0, WIDTH)[None, :]
    nothing = tl.zeros_like(begin).to(tl.float32) + tl.zeros_like(lanes).to(tl.float32)
    peak, rest, spread, total = nothing + LOWEST, nothing, nothing, nothing
    hint: tl.constexpr = "evict_last" if KEPT else ""
    none = float("-inf")
    for start in tl.range(0, size, 4 * WIDTH, num_stages=1):
        a_at, b_at = start + lanes, start + WIDTH + lanes
        c_at, d_at = start + 2 * WIDTH + lanes, start + 3 * WIDTH + lanes
        in_a = (a_at < size) & (begin + a_at < length)
        in_b = (b_at < size) & (begin + b_at < length)
        in_c = (c_at < size) & (begin + c_at < length)
        in_d = (d_at < size) & (begin + d_at < length)
        a = tl.load(x + begin + a_at, mask=in_a, other=none, eviction_policy=hint)
        b = tl.load(x + begin + b_at, mask=in_b, other=none, eviction_policy=hint)
        c = tl.load(x + begin + c_at, mask=in_c, other=none, eviction_policy=hint)
        d = tl.load(x + begin + d_at, mask=in_d, other=none, eviction_policy=hint)
        a = logits_of(a, in_a, z, outer)
        b = logits_of(b, in_b, z, outer)
        c = logits_of(c, in_c, z, outer)
        d = logits_of(d, in_d, z, outer)
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
    part_peak, part_rest, part_spread = join_lanes(peak, rest, spread, ENTROPY)
    return part_peak, part_rest, part_spread, tl.sum(total, 1)


@triton.jit
def logit_gradient(
    raw,
    inside,
    z,  # LogitScaling
    outer,
    normalizer,  # (peak, log_sum)
    at,  # (c_prob, c_entropy, c_uniform), times dz/draw without the soft cap
    c,  # Four
):
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
    bend = 1.0
    if z.inner is not None:
        capped = tanh(raw.to(tl.float32) * z.inner)
        bend = 1 - capped * capped
        g *= bend
    return g, bend


@triton.jit
def write_gradient(
    x,
    y,
    begin,  # [P, 1] first column of each part
    size,  # of a part
    v,
    length,  # v, or 0: nothing is read
    z,  # LogitScaling
    outer,
    normalizer,  # [P] each
    at,  # c_prob [P]
    c,  # Four
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
):
    """The gradient of each part's columns but for the target's own term, last columns first."""
    hint: tl.constexpr = "evict_first" if KEPT else ""
    normalizer = normalizer[0][:, None], normalizer[1][:, None]
    at = at[0][:, None], at[1], at[2]
    steps = tl.cdiv(size, 4 * WIDTH)
    for step in range(0, steps):
        own = (steps - 1 - step) * (4 * WIDTH) + tl.arange(0, 4 * WIDTH)[None, :]
        columns = begin + own
        inside = (own < size) & (columns < length)
        value = tl.load(x + columns, mask=inside, other=float("-inf"), eviction_policy=hint)
        g, _ = logit_gradient(value, inside, z, outer, normalizer, at, c)
        there = (own < size) & (columns < v)
        tl.store(y + columns, g.to(y.dtype.element_ty), mask=there, eviction_policy=hint)


@triton.jit
def slope_parts(slopes, row, count, SLOPES: tl.constexpr):
    """A token's `stats.Slope` parts, (rate, anchor, low, high, sign) each."""
    found = ()
    for i in tl.static_range(SLOPES):
        part = slopes + i * 5 * count.to(tl.int64) + row
        rate, anchor = tl.load(part), tl.load(part + count)
        low, high = tl.load(part + 2 * count), tl.load(part + 3 * count)
        found = found + (rate, anchor, low, high, tl.load(part + 4 * count))  # noqa: RUF005
    return found


@triton.jit
def closed_slope(parts, logp, SLOPES: tl.constexpr):
    """dL/dlogp of a token from its `slope_parts`."""
    found = 0.0
    for i in tl.static_range(SLOPES):
        rate, anchor = parts[5 * i], parts[5 * i + 1]
        low, high, sign = parts[5 * i + 2], parts[5 * i + 3], parts[5 * i + 4]
        value = rate * tl.exp(sign * (logp - anchor))
        found += tl.where((logp >= low) & (logp <= high), value, 0.0)
    return found


@triton.jit
def settled(partials, length):
    """Numbers that no objective stumbles over where nothing was read."""
    peak, rest, spread, total = partials
    peak, rest = tl.where(length > 0, peak, 0.0), tl.where(length > 0, rest, 0.0)
    return peak, rest, tl.where(length > 0, spread, 0.0), tl.where(length > 0, total, 0.0)


@triton.jit
def store_partials(to, partials, row, part):
    """The row's, which all parts know, by the first of them."""
    at, first = row + part * 0, part == 0
    tl.store(to.peak + at, partials[0], mask=first)
    tl.store(to.rest + at, partials[1], mask=first)
    if to.spread is not None:
        tl.store(to.spread + at, partials[2], mask=first)
    if to.total is not None:
        tl.store(to.total + at, partials[3], mask=first)


@triton.jit
def joined(a, b):
    """Partial statistics of two pieces."""
    peak, rest, spread = merged((a[0], a[1], a[2]), (b[0], b[1], b[2]))
    return peak, rest, spread, a[3] + b[3]


@triton.jit
def met(partials, mail, turn, PARTS: tl.constexpr):
    """Partial statistics of the row, on each of its parts, joined in the same order."""
    peak, rest, spread, total = partials
    own = tl.maximum(peak, LOWEST), rest, spread, total  # that no difference of peaks is NaN
    if INTERPRETED:
        all_parts = of_part(own, 0, PARTS)
    else:
        box = post(mail, turn, own)
        all_parts = letter(box, 0)
    for i in tl.static_range(1, PARTS):
        other = of_part(own, i, PARTS) if INTERPRETED else letter(box, i)
        all_parts = joined(all_parts, other)
    peak, rest, spread, total = all_parts
    return tl.where(peak == LOWEST, float("-inf"), peak), rest, spread, total
