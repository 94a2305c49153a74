"""Formulas that the Triton kernels share: the transform from raw logits to logits z, log p = log
softmax(z), and the gradient dL/dz as a function of log p. The types of kernel arguments are defined
in records.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ...statistics import softmax
from .versions import PTX, Constant

FLOOR = Constant(softmax.FLOOR)
SURE = Constant(softmax.SURE)
LN2 = Constant(0.6931471805599453)
LOG2E = Constant(1.4426950408889634)
LOG2E_LOW = Constant(1.925963033500e-08)  # The part of log2(e) that float32 rounds off.


@triton.jit
def tanh_and_slope(x):
    """Return tanh(x) in float32 and its derivative 1 - tanh(x)^2, which is accurate also where
    tanh(x) rounds to 1. With e = exp(2|x|), tanh(|x|) is 1 - 2/(1 + e), or a Taylor series where
    the difference would cancel, and the derivative is 4e/(1 + e)^2. (Since x and -x are rounded
    alike, errors cancel in a mean.)"""
    s = x * x
    near = 1 + s * (-0.3333333333 + s * (0.1333333333 + s * (-0.05396825397 + s * 0.02186948854)))
    e = tl.exp2(tl.abs(x) * (2 * LOG2E))
    share = 1 + e
    if PTX:  # An instruction for an approximate 1 / x is faster than a division.
        share = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [share], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        share = 1 / share
    far = 1 - 2 * share
    # If exp(2|x|) overflows to inf, `share` = 1 / (1 + exp(2|x|)) is 0, and `tl.minimum` avoids the
    # product inf * 0 = NaN.
    slope = 4 * share * (tl.minimum(e, 1e30) * share)
    return tl.where(s < 0.0625, x * near, tl.where(x < 0, -far, far)), slope


@triton.jit
def log2(x):
    """Return log2(x) to 22 bits, by NVIDIA's `lg2.approx` instruction. The logarithm of CUDA's
    library would take ten times as long as `lg2.approx`, and longer than loading the logits from
    memory."""
    if not PTX:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def log(x):
    """Return the natural logarithm of x to 22 bits."""
    return log2(x) * LN2


@triton.jit
def exp(x):
    """Return exp(x) with all digits of float32; the GPU's own exp loses digits where x is large."""
    high = x * LOG2E
    low = tl.fma(x, tl.zeros_like(x) + LOG2E, -high) + x * LOG2E_LOW
    return tl.exp2(high) * (1 + low * LN2)


@triton.jit
def expm1(x):
    """Return exp(x) - 1, by Taylor's series where the difference would cancel."""
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
    """Return log(1 + x), to the last digits of x where x is small."""
    u = 1 + x
    near = tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1))
    return tl.where(u == 1, x, tl.where(x < 1, near, tl.log(u)))


@triton.jit
def folded(tile, ROWS: tl.constexpr, HALVES: tl.constexpr):
    """Return the [ROWS] sums of a tile [2 ** HALVES, ROWS] over dimension 0, added in the same
    binary tree for every layout."""
    for i in tl.static_range(HALVES):
        tile = tl.sum(tl.reshape(tile, (2, 1 << (HALVES - 1 - i), ROWS)), 0)
    return tl.reshape(tile, (ROWS,))


@triton.jit
def per_row(value, z, row, inside=None):
    """Return `value` (the field `outer` or `factor` of a `LogitScaling`), divided by each token's
    temperature if temperatures are per token. If given, `inside` is the mask of the rows that
    exist."""
    if z.temperature is not None:
        value = value / tl.load(z.temperature + row, inside, None if inside is None else 1.0)
    return value


@triton.jit
def transformed(raw, z, outer):
    """Return the logits after scale, soft cap and temperature, from raw logits; `z` is a
    `LogitScaling`, and `outer` is `z.outer` divided by the token's temperature if each token has
    its own temperature."""
    x = raw.to(tl.float32)
    if z.inner is not None:
        x, _ = tanh_and_slope(x * z.inner)
    if z.same is None:
        x = x * outer
    return x


@triton.jit
def dots(x, w, column, inside, z, h, WIDTH: tl.constexpr):
    """Return [WIDTH] dot products of a row of x and a row of w, of H elements each, plus the bias
    of each column; the dot product is 0 where `inside` is False. `w` is a vector of pointers to
    rows; `x` is a vector of pointers to rows too, or a pointer to a single row that is multiplied
    by every row of w. The products of elements are exact in float32, and are added in a fixed
    order, 256 elements of H at once, so that each result depends on its two rows alone."""
    DEPTH: tl.constexpr = 256
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    for start in range(0, h, DEPTH):
        at = (start + tl.arange(0, DEPTH))[:, None]
        a = tl.load(x[None, :] + at, mask=at < h, other=0.0)
        b = tl.load(w[None, :] + at, mask=(at < h) & inside[None, :], other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)
    raw = folded(total, WIDTH, 8)
    if z.bias is not None:
        raw += tl.load(z.bias + column, mask=inside, other=0.0).to(tl.float32)
    return raw


@triton.jit
def log_softmax(raw, z, outer, max_logit, log_sum):
    """Return log p of raw logits, clamped to at least FLOOR (-1e4). A logit with log p above SURE =
    -0.5 is the largest logit of its row. For such a logit, return -log_sum, where log_sum = log
    sum_j exp(z_j - max_logit) comes from the forward pass, because the backward pass may round the
    recomputed logit differently."""
    log_p = tl.maximum((transformed(raw, z, outer) - max_logit) - log_sum, FLOOR)
    return tl.where(log_p > SURE, -log_sum, log_p)


@triton.jit
def coefficient(pointer, row, inside=None):
    """Return a gradient coefficient of a token, or 0 if `pointer` is None."""
    value = 0.0
    if pointer is not None:
        value = tl.load(pointer + row, inside, None if inside is None else 0.0).to(tl.float32)
    return value


@triton.jit
def grad_z(p, log_p, at, c):
    """Return the gradient dL/dz of a column from p and log p; the caller adds the coefficient
    c_target at the target's column. `at` holds the gradient coefficients (c_prob, c_entropy,
    c_uniform). `c` holds the gradient coefficients (a `SoftmaxCoefficients`); a field is None if
    the loss lacks this coefficient."""
    if c.entropy is not None:
        g = p * (at[0] + at[1] * log_p)
    else:
        g = p * at[0]
    if c.uniform is not None:
        g += at[2]
    return g


@triton.jit
def under_cap(g, raw, z):
    """Return the gradient `g` times the derivative of the logits' soft cap, evaluated at the raw
    logits `raw`."""
    if z.inner is not None:
        _, slope = tanh_and_slope(raw.to(tl.float32) * z.inner)
        g *= slope
    return g


@triton.jit
def under_cap_at(g, z, cap):
    """Return the gradient `g` times the derivative of the soft cap, computed from capped logits z
    where raw logits are not available. The derivative of the soft cap loses digits where |z| is
    close to the soft cap."""
    size = tl.abs(z)
    return g * (tl.maximum(cap - size, 0.0) * (cap + size) / (cap * cap))


@triton.jit
def gradient_from_logp(log_p, slope, at, c):
    """Return the gradient dL/dz of a column from its log-prob, with the loss's derivative `slope`
    with respect to this log-prob. The returned gradient keeps all digits of the column's softmax
    probability p or, near p = 1, all digits of 1 - p."""
    log_p = tl.minimum(tl.maximum(log_p, FLOOR), 0.0)
    p = tl.exp(log_p)
    g = tl.where(log_p > SURE, at[0] * expm1(log_p) + (at[0] + slope), at[0] * p + slope)
    if c.entropy is not None:
        g += at[1] * p * log_p
    if c.uniform is not None:
        g += at[2]
    return g


@triton.jit
def coefficients(c, row, inside=None):
    """Load the gradient coefficients (c_prob, c_entropy, c_uniform) of one or several tokens; the
    mask `inside` is False for a row beyond the last token."""
    prob, entropy = coefficient(c.prob, row, inside), coefficient(c.entropy, row, inside)
    return prob, entropy, coefficient(c.uniform, row, inside)


@triton.jit
def normalizer_of(normalizer, row, inside=None):
    """Return the softmax normalizer (max_logit, log_sum) of one or several tokens; `inside`, if
    given, is the mask of the tokens that exist."""
    max_logit = tl.load(normalizer.max_logit + row, inside, None if inside is None else 0.0)
    return max_logit, tl.load(normalizer.log_sum + row, inside, None if inside is None else 0.0)


@triton.jit
def token_of(a, row):
    """Return what the gradient of one token needs from the `GradientInputs` a: `outer` and `factor`
    of the logit scaling, the normalizer (max_logit, log_sum), the gradient coefficients (c_prob,
    c_entropy, c_uniform), and the gradient at the target (0 if `a.logps`, the targets' log-probs,
    is None)."""
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
    """Return the online-softmax state (max_logit, sumexp_m1, entropy_sum) of a block of logits. If
    all logits of a block are -inf, the sum of exponentials is 0, and `sumexp_m1` (the sum minus 1)
    is -1."""
    max_logit = tl.max(z, 0)
    shifted = tl.maximum(z - tl.where(max_logit == float("-inf"), 0.0, max_logit), FLOOR)
    e = tl.exp(shifted)
    top = (z == max_logit) & inside
    # `sumexp_m1` is the sum of exp(z - max_logit) over the block, minus 1. Of the columns whose
    # logit equals max_logit, one adds 0 to `sumexp_m1`, and each further column adds 1.
    sumexp_m1 = tl.sum(tl.where(top, 0.0, e), 0) + (tl.sum(top.to(tl.float32), 0) - 1)
    sumexp_m1 = tl.where(max_logit == float("-inf"), -1.0, sumexp_m1)
    entropy_sum = 0.0
    if ENTROPY:
        entropy_sum = tl.sum(e * shifted, 0)
    return max_logit, sumexp_m1, entropy_sum


@triton.jit
def merged(a, b):
    """Return `softmax.merge` of two online-softmax states a and b, each a tuple (max_logit,
    sumexp_m1, entropy_sum); the state with the larger max_logit is not rescaled, even if max_logit
    is -inf in a and in b."""
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
    """Store (max_logit, sumexp_m1, entropy_sum, logit_sum) of a token; None fields of `to` are
    skipped."""
    tl.store(to.max_logit + row, partials[0], mask)
    tl.store(to.sumexp_m1 + row, partials[1], mask)
    if to.entropy_sum is not None:
        tl.store(to.entropy_sum + row, partials[2], mask)
    if to.logit_sum is not None:
        tl.store(to.logit_sum + row, partials[3], mask)
