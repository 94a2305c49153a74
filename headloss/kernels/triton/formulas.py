"""The formulas that kernels share: from raw logits to z and log p, and from there to the gradient,
as `interface` writes it. Records are those of `records`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...statistics import softmax
from .versions import PTX

FLOOR = tl.constexpr(softmax.FLOOR)
SURE = tl.constexpr(softmax.SURE)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500e-08)  # what float32 leaves of it


@triton.jit
def tanh_and_slope(x):
    """tanh(x) in float32, and its slope 1 - tanh(x)^2, also where tanh is 1: with e = exp(2|x|)
    they are +-(1 - 2/(1 + e)), a series where that would cancel, and 4e/(1 + e)^2. (As x and -x
    are rounded alike, errors cancel in a mean.)"""
    s = x * x
    near = 1 + s * (-0.3333333333 + s * (0.1333333333 + s * (-0.05396825397 + s * 0.02186948854)))
    e = tl.exp2(tl.abs(x) * (2 * LOG2E))
    share = 1 + e
    if PTX:  # a division would take several instructions
        share = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [share], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        share = 1 / share
    far = 1 - 2 * share
    slope = 4 * share * (tl.minimum(e, 1e30) * share)  # e may be inf, share is then 0
    return tl.where(s < 0.0625, x * near, tl.where(x < 0, -far, far)), slope


@triton.jit
def log2(x):
    """Logarithm to 22 bits, by NVIDIA's own instruction: a library's would take ten times as
    long, and outlast the memory."""
    if not PTX:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def log(x):
    """The natural logarithm, likewise."""
    return log2(x) * LN2


@triton.jit
def exp(x):
    """exp with all digits of float32: the GPU's own loses some where x is large."""
    high = x * LOG2E
    low = tl.fma(x, tl.zeros_like(x) + LOG2E, -high) + x * LOG2E_LOW
    return tl.exp2(high) * (1 + low * LN2)


@triton.jit
def expm1(x):
    """exp(x) - 1; Taylor's series where the two would cancel."""
    tail = 1 + x * 0.125
    tail = 1 + x * 0.14285714 * tail
    tail = 1 + x * 0.16666667 * tail
    tail = 1 + x * 0.2 * tail
    tail = 1 + x * 0.25 * tail
    tail = 1 + x * 0.33333333 * tail
    tail = 1 + x * 0.5 * tail
    return tl.where(tl.abs(x) < 0.5, x * tail, tl.exp(x) - 1)


@triton.jit
def log1p(x):
    """log(1 + x), to the last digits of x where it is small."""
    u = 1 + x
    near = tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1))
    return tl.where(u == 1, x, tl.where(x < 1, near, tl.log(u)))


@triton.jit
def folded(tile, ROWS: tl.constexpr, HALVES: tl.constexpr):
    """[ROWS] sums of a tile [2 ** HALVES, ROWS], the same tree whatever the layout."""
    for i in tl.static_range(HALVES):
        tile = tl.sum(tl.reshape(tile, (2, 1 << (HALVES - 1 - i), ROWS)), 0)
    return tl.reshape(tile, (ROWS,))


@triton.jit
def per_row(value, z, row, inside=None):
    """`outer` or `factor` of a scaling, over the token's own temperature if tokens have their own;
    of several rows, which are there."""
    if z.temperature is not None:
        value = value / tl.load(z.temperature + row, inside, None if inside is None else 1.0)
    return value


@triton.jit
def transformed(raw, z, outer):
    """z of raw logits; `outer` is `per_row(z.outer, ..)`."""
    x = raw.to(tl.float32)
    if z.inner is not None:
        x, _ = tanh_and_slope(x * z.inner)
    if z.same is None:
        x = x * outer
    return x


@triton.jit
def dots(x, w, column, inside, z, h, WIDTH: tl.constexpr, HALVES: tl.constexpr = 8):
    """[WIDTH] products of rows of x and w [H], from pointers to them (of x, one may serve all), and
    the bias of each column; 0 where not `inside`. Exact to float32, and summed in one order,
    2 ** HALVES of H at once, so that they depend on the two rows alone."""
    DEPTH: tl.constexpr = 1 << HALVES
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    for start in range(0, h, DEPTH):
        at = (start + tl.arange(0, DEPTH))[:, None]
        a = tl.load(x[None, :] + at, mask=at < h, other=0.0)
        b = tl.load(w[None, :] + at, mask=(at < h) & inside[None, :], other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)
    raw = folded(total, WIDTH, HALVES)
    if z.bias is not None:
        raw += tl.load(z.bias + column, mask=inside, other=0.0).to(tl.float32)
    return raw


@triton.jit
def log_softmax(raw, z, outer, max_logit, log_sum):
    """log p of raw logits, at least FLOOR; its plain twin says why it is -log_sum near 1."""
    log_p = tl.maximum((transformed(raw, z, outer) - max_logit) - log_sum, FLOOR)
    return tl.where(log_p > SURE, -log_sum, log_p)


@triton.jit
def coefficient(pointer, row, inside=None):
    """A token's coefficient, 0 where no token has it."""
    value = 0.0
    if pointer is not None:
        value = tl.load(pointer + row, inside, None if inside is None else 0.0).to(tl.float32)
    return value


@triton.jit
def grad_z(p, log_p, at, c):
    """dL/dz but for the target's own term; `at` is (c_prob, c_entropy, c_uniform), of which `c`, a
    `SoftmaxCoefficients`, says what there is."""
    if c.entropy is not None:
        g = p * (at[0] + at[1] * log_p)
    else:
        g = p * at[0]
    if c.uniform is not None:
        g += at[2]
    return g


@triton.jit
def under_cap(g, raw, z):
    """A gradient times the soft cap's own slope at raw logits."""
    if z.inner is not None:
        _, slope = tanh_and_slope(raw.to(tl.float32) * z.inner)
        g *= slope
    return g


@triton.jit
def under_cap_at(g, z, cap):
    """The same at capped logits, where these are all there is: to the digits of cap - |z|."""
    size = tl.abs(z)
    return g * (tl.maximum(cap - size, 0.0) * (cap + size) / (cap * cap))


@triton.jit
def gradient_from_logp(log_p, slope, at, c):
    """dL/dz of a column that has a slope of its own, to the last digit of p, or of 1 - p near 1."""
    log_p = tl.minimum(tl.maximum(log_p, FLOOR), 0.0)
    p = tl.exp(log_p)
    g = tl.where(log_p > SURE, at[0] * expm1(log_p) + (at[0] + slope), at[0] * p + slope)
    if c.entropy is not None:
        g += at[1] * p * log_p
    if c.uniform is not None:
        g += at[2]
    return g


@triton.jit
def coefficients(c, row):
    """(c_prob, c_entropy, c_uniform) of a token, for `grad_z`."""
    return coefficient(c.prob, row), coefficient(c.entropy, row), coefficient(c.uniform, row)


@triton.jit
def normalizer_of(normalizer, row, inside=None):
    """(max_logit, log_sum) of a token, or of several, of which those `inside` exist."""
    max_logit = tl.load(normalizer.max_logit + row, inside, None if inside is None else 0.0)
    return max_logit, tl.load(normalizer.log_sum + row, inside, None if inside is None else 0.0)


@triton.jit
def token_of(a, row):
    """What the gradient needs of a token: `outer` and `factor` of its scaling, its normalizer, its
    coefficients for `grad_z`, and the target's own gradient, 0 where it is as others."""
    outer = per_row(a.z.outer, a.z, row)
    factor = per_row(a.z.factor, a.z, row)
    at = coefficients(a.c, row)
    target_gradient = 0.0
    if a.logps is not None:
        log_p = tl.load(a.logps + row)
        slope = coefficient(a.c.target, row)
        target_gradient = gradient_from_logp(log_p, slope, at, a.c)
    return outer, factor, normalizer_of(a.normalizer, row), at, target_gradient


@triton.jit
def block_partials(z, inside, ENTROPY: tl.constexpr):
    """max_logit, sumexp_m1 and entropy_sum of a block. Where all is -inf there is no mass."""
    max_logit = tl.max(z, 0)
    shifted = tl.maximum(z - tl.where(max_logit == float("-inf"), 0.0, max_logit), FLOOR)
    e = tl.exp(shifted)
    top = (z == max_logit) & inside
    # The largest term is left out, once: its equals, if any, count one each.
    sumexp_m1 = tl.sum(tl.where(top, 0.0, e), 0) + (tl.sum(top.to(tl.float32), 0) - 1)
    sumexp_m1 = tl.where(max_logit == float("-inf"), -1.0, sumexp_m1)
    entropy_sum = 0.0
    if ENTROPY:
        entropy_sum = tl.sum(e * shifted, 0)
    return max_logit, sumexp_m1, entropy_sum


@triton.jit
def merged(a, b):
    """`softmax.merge` of (max_logit, sumexp_m1, entropy_sum): the side that holds the largest logit
    is not scaled, also where both are -inf."""
    max_a, sumexp_m1_a, entropy_a = a
    max_b, sumexp_m1_b, entropy_b = b
    max_logit = tl.maximum(max_a, max_b)
    log_scale_a = tl.maximum(tl.where(max_a == max_logit, 0.0, max_a - max_logit), FLOOR)
    log_scale_b = tl.maximum(tl.where(max_b == max_logit, 0.0, max_b - max_logit), FLOOR)
    scale_a = tl.exp(log_scale_a)
    scale_b = tl.exp(log_scale_b)
    mass_a = 1 + sumexp_m1_a
    mass_b = 1 + sumexp_m1_b
    others_of_a = sumexp_m1_a + mass_b * scale_b
    others_of_b = sumexp_m1_b + mass_a * scale_a
    sumexp_m1 = tl.where(max_a == max_logit, others_of_a, others_of_b)
    entropy_a = scale_a * (entropy_a + mass_a * log_scale_a)
    entropy_b = scale_b * (entropy_b + mass_b * log_scale_b)
    return max_logit, sumexp_m1, entropy_a + entropy_b


@triton.jit
def store_partials(to, row, partials, mask=None):
    """(max_logit, sumexp_m1, entropy_sum, logit_sum) of a token, of which `to` has some."""
    tl.store(to.max_logit + row, partials[0], mask)
    tl.store(to.sumexp_m1 + row, partials[1], mask)
    if to.entropy_sum is not None:
        tl.store(to.entropy_sum + row, partials[2], mask)
    if to.logit_sum is not None:
        tl.store(to.logit_sum + row, partials[3], mask)
