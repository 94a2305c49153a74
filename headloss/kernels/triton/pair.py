"""Triton kernels for full-distribution distillation: divergences of student and teacher, and the
part of the gradient that comes from divergences. The module `kernels.pair` documents the formulas
of the divergences.

n tokens, v columns, K stored columns of a top-k teacher. One program per row. One launch computes
the gradient of a divergence and adds the gradient of all further terms of the objective, which
follows from the gradient coefficients (`SoftmaxCoefficients`). The student's tile is read once, and
the gradient is written once, in the tile's memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...statistics.divergence import LOG_ACCEPTANCE, Measure
from ...statistics.softmax import Normalizer
from ..interface import Backward
from ..pair import Distribution, Divergence, Pair, StoredTopk
from . import records
from .formulas import (
    FLOOR,
    expm1,
    grad_z,
    log,
    log_softmax,
    normalizer_of,
    per_row,
    token_of,
    under_cap,
)
from .launch import Launcher
from .records import NO_INPUTS, BlockedColumns, LogitScaling, Matrix

# A program handles at most BLOCK columns of each of two tiles at once, with WARPS warps. On an
# H100, the divergence kernels take 1.18 times as long with BLOCK = 2048 and WARPS = 8 as with BLOCK
# = 1024 and WARPS = 4.
BLOCK = 1024
WARPS = 4


class Softmax(NamedTuple):
    """Kernel arguments of a student's or teacher's softmax, by which log p is computed from raw
    logits."""

    z: LogitScaling | None
    normalizer: Normalizer | None  # Shape [n].


NO_SIDE = Softmax(None, None)


class Kind(NamedTuple):
    """Compile-time description of a divergence: its name and its beta."""

    name: tl.constexpr
    beta: float


class Teacher(NamedTuple):
    """Operands that describe the teacher of a divergence."""

    softmax: Softmax
    tile: Matrix
    # Teacher row of each student row, [n]; None: row i of the student has row i of the teacher.
    rows: Tensor | None


class Part(NamedTuple):
    """Operands of the kernel for the gradient of divergences or of stored top-k teacher
    log-probs."""

    # Softmax of the student over all columns or, with stored top-k teacher log-probs, over all
    # columns that are not stored.
    student: Softmax
    # For each of K divergences D, the sum over columns j of p_j dD/dp_j, [n, K], where p_j is the
    # student's probability of column j. With stored top-k teacher log-probs, the derivative [n] of
    # the loss with respect to the log-sum-exp over the columns that are not stored.
    mean_slope: Tensor
    weight: Tensor | None = None  # Weights [n, K] of K divergences.
    log_acceptance: Tensor | None = None  # Shape [n].
    teacher: Teacher | None = None
    stored: BlockedColumns | None = None
    # Derivatives [n, K] of the loss with respect to the logits z of the K columns of stored top-k
    # teacher log-probs.
    slopes: Tensor | None = None
    # Contiguous gradient [n, v] of an earlier launch, which the kernel adds to its own gradient.
    extra: Tensor | None = None


@triton.jit
def log_1_plus(x):
    """Return log(1 + x) for -1 < x <= 0, by 2 atanh(x / (2 + x)) where 1 + x would lose digits of
    x."""
    s = x / (2 + x)
    s2 = s * s
    near = 0.11111111 + s2 * (0.09090909 + s2 * 0.07692308)
    near = 1 + s2 * (0.33333333 + s2 * (0.2 + s2 * (0.14285714 + s2 * near)))
    return tl.where(x > -0.5, 2 * s * near, log(1 + x))


@triton.jit
def against_mixture(log_q, log_p, beta):
    """Return log(p / m) with m = beta q + (1 - beta) p; the result is exactly 0 where p = q."""
    d = log_p - log_q
    share = tl.where(d > 0, beta, 1 - beta)
    return tl.where(d > 0, 0.0, d) - log_1_plus(share * expm1(-tl.abs(d)))


@triton.jit
def slope_in_p(log_q, log_p, beta, KIND: tl.constexpr):
    """Return the derivative of a divergence with respect to p, up to a constant, for a block of
    columns and any kind but forward_kl."""
    if KIND == "total_variation":
        s = tl.where(log_p > log_q, 0.5, tl.where(log_p < log_q, -0.5, 0.0))
    elif KIND == "reverse_kl":
        s = log_p - log_q
    else:
        s = against_mixture(log_q, log_p, beta)
        if KIND == "js":
            s = (1 - beta) * s
        elif KIND == "skew_forward_kl":
            s = (beta - 1) * expm1(s - (log_p - log_q))
        else:
            s = s - (1 - beta) * expm1(s)
    return s


@triton.jit
def shares(log_q, log_p, beta, KIND: tl.constexpr):
    """Return each column's summand of a divergence and of the divergence's mean slope (the sum of p
    times the derivative in p), for a block of columns."""
    if KIND == "forward_kl":
        value = tl.exp(log_q) * (log_q - log_p)
        mean_slope = tl.zeros_like(value)
    else:
        p = tl.exp(log_p)
        mean_slope = p * slope_in_p(log_q, log_p, beta, KIND)
        value = mean_slope  # The value for reverse_kl.
        if KIND == "total_variation":
            value = tl.abs(p - tl.exp(log_q)) / 2
        elif KIND != "reverse_kl":
            p_to_m = against_mixture(log_q, log_p, beta)
            q_to_m = tl.exp(log_q) * (p_to_m - (log_p - log_q))
            if KIND == "js":
                value = beta * q_to_m + mean_slope
            elif KIND == "skew_forward_kl":
                value = q_to_m
            else:
                value = p * p_to_m
    return value, mean_slope


@triton.jit
def accepted(log_q, log_p, e):
    """Return `e` where p < q, half of `e` where p = q, and 0 where p > q."""
    return tl.where(log_p < log_q, e, tl.where(log_p == log_q, 0.5 * e, 0.0))


@triton.jit
def teacher_row(teacher, row):
    """Return a pointer to the teacher's raw logits for a row of the student."""
    if teacher.rows is not None:
        row = tl.load(teacher.rows + row)
    return teacher.tile.data + row * teacher.tile.stride


@triton.jit
def divergence_kernel(
    raw,  # Raw logits, a `Matrix`.
    teacher,  # A `Teacher`.
    student,  # A `Softmax`.
    kinds,  # K compile-time descriptions (`Kind`), one per divergence.
    # Output [n, K, 2]: the value of each divergence, and the sum over columns k of the student's
    # probability p_k times the divergence's derivative with respect to p_k.
    to,
    v,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,  # Number of sums per row (2 per divergence), padded to a power of two.
    # Index of the log-acceptance among the K divergences; K if the call has no log-acceptance.
    ACCEPTANCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x = raw.data + row * raw.stride
    y = teacher_row(teacher, row)
    p = normalizer_of(student.normalizer, row)
    q = normalizer_of(teacher.softmax.normalizer, row)
    lanes = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), tl.float32)
    # Online log-sum-exp of min(log p, log q): the maximum, and sums relative to exp(maximum).
    top = tl.full((), 2 * FLOOR, tl.float32)
    mass = tl.full((), 0.0, tl.float32)
    below = tl.full((), 0.0, tl.float32)
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        mine = tl.load(x + columns, mask=inside, other=0.0)
        other = tl.load(y + columns, mask=inside, other=0.0)
        log_p = log_softmax(mine, student.z, student.z.outer, *p)
        log_q = log_softmax(other, teacher.softmax.z, teacher.softmax.z.outer, *q)
        for k in tl.static_range(K):
            if k != ACCEPTANCE:
                value, slope = shares(log_q, log_p, kinds[k].beta, kinds[k].name)
                value = tl.sum(tl.where(inside, value, 0.0), 0)
                slope = tl.sum(tl.where(inside, slope, 0.0), 0)
                added = tl.where(lanes == 2 * k + 1, slope, 0.0)
                sums += tl.where(lanes == 2 * k, value, added)
        if ACCEPTANCE < K:
            least = tl.where(inside, tl.minimum(log_p, log_q), 2 * FLOOR)
            peak = tl.maximum(top, tl.max(least, 0))
            scale = tl.exp(top - peak)
            e = tl.exp(least - peak)
            mass = mass * scale + tl.sum(e, 0)
            below = below * scale + tl.sum(accepted(log_q, log_p, e), 0)
            top = peak
    if ACCEPTANCE < K:
        added = tl.where(lanes == 2 * ACCEPTANCE + 1, below / mass, 0.0)
        sums += tl.where(lanes == 2 * ACCEPTANCE, top + tl.log(mass), added)
    tl.store(to + row * (2 * K) + lanes, sums, mask=lanes < 2 * K)


launch_divergence = Launcher(divergence_kernel, num_warps=WARPS)


def softmax(side: Distribution | None) -> Softmax:
    """Return the `Softmax` (kernel arguments) of a distribution, or the placeholder NO_SIDE if the
    argument `side` is None."""
    return NO_SIDE if side is None else Softmax(records.scaling(side.transform), side.normalizer)


def teacher_of(raw: Tensor, pair: Pair) -> Teacher:
    """Return the kernel argument `Teacher` for a teacher's raw logits."""
    return Teacher(softmax(pair.teacher), records.check_tile("raw_teacher", raw), pair.rows)


def of_measures(measures: tuple[Measure, ...]) -> tuple[tuple[Kind, ...], dict[str, int]]:
    """Return a `Kind` for each divergence, and two kernel constants: K, the number of divergences,
    and ACCEPTANCE, the index of the log-acceptance among the divergences (K if it is absent)."""
    names = [measure.kind for measure in measures]
    place = names.index(LOG_ACCEPTANCE) if LOG_ACCEPTANCE in names else len(names)
    kinds = tuple(Kind(tl.constexpr(kind), beta) for kind, beta in measures)
    return kinds, {"K": len(names), "ACCEPTANCE": place}


def divergence(raw: Tensor, raw_teacher: Tensor, pair: Pair) -> Tensor:
    tile = records.check_tile("raw", raw)
    teacher = teacher_of(raw_teacher, pair)
    n, v = raw.shape
    kinds, constants = of_measures(pair.measures)
    out = raw.new_empty(n, constants["K"], 2, dtype=torch.float32)
    if n:
        constants["LANES"] = triton.next_power_of_2(2 * constants["K"])
        block = records.block_width(v, BLOCK)
        of = tile, teacher, softmax(pair.student), kinds, out, v
        launch_divergence(n, *of, BLOCK=block, **constants)
    return out


# ---------------------------------------------------------------------- the gradient


@triton.jit(do_not_specialize=["first"])
def pair_gradient_kernel(
    tile,  # Raw logits, a `Matrix`.
    to,  # Gradient, a `Matrix`.
    d,  # A `Part`.
    # `GradientInputs` (normalizer, gradient coefficients, log-probs) of the loss terms that need no
    # teacher; NO_INPUTS if every loss term needs the teacher.
    a,
    # K compile-time descriptions (`Kind`), one per divergence; none for stored top-k teacher
    # log-probs.
    kinds,
    first,
    v,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACCEPTANCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x = tile.data + row * tile.stride
    out = to.data + row * to.stride
    p_z = d.student.z
    p_outer = per_row(p_z.outer, p_z, row)
    p_factor = per_row(p_z.factor, p_z, row)
    p_peak, p_log_sum = normalizer_of(d.student.normalizer, row)
    if d.slopes is not None:
        mean_slope = tl.load(d.mean_slope + row)
        places = d.stored.places.data + row * d.stored.places.stride
        slopes = d.slopes + row * d.stored.places.stride
        bounds = d.stored.bounds.data + row * d.stored.bounds.stride
    else:
        teacher = teacher_row(d.teacher, row)
        q = normalizer_of(d.teacher.softmax.normalizer, row)
        alive = tl.full((), 0.0, tl.float32)
        for k in tl.static_range(K):
            alive += tl.abs(tl.load(d.weight + row * K + k))
        if ACCEPTANCE < K:
            log_a = tl.load(d.log_acceptance + row)
    if a.targets is not None:
        outer, factor, normalizer, at, target_gradient = token_of(a, row)
        target = tl.load(a.targets + row) - first

    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        value = tl.load(x + columns, mask=inside, other=0.0)
        log_p = log_softmax(value, p_z, p_outer, p_peak, p_log_sum)
        if d.slopes is not None:
            g = mean_slope * tl.exp(tl.minimum(log_p, 0.0))
            bound = bounds + start // BLOCK
            for k in range(tl.load(bound), tl.load(bound + 1)):
                g = tl.where(columns == tl.load(places + k), tl.load(slopes + k), g)
            g *= p_factor
        else:
            other = tl.load(teacher + columns, mask=inside, other=0.0)
            log_q = log_softmax(other, d.teacher.softmax.z, d.teacher.softmax.z.outer, *q)
            p = tl.exp(log_p)
            g = tl.zeros((BLOCK,), tl.float32)
            for k in tl.static_range(K):
                weight = tl.load(d.weight + row * K + k) * p_factor
                pivot = tl.load(d.mean_slope + row * K + k)
                if k == ACCEPTANCE:
                    share = tl.exp(tl.minimum(log_p, log_q) - log_a)
                    g += weight * (accepted(log_q, log_p, share) - p * pivot)
                elif kinds[k].name == "forward_kl":
                    g += weight * (p * (1 + pivot) - tl.exp(log_q))
                else:
                    slope = slope_in_p(log_q, log_p, kinds[k].beta, kinds[k].name)
                    g += weight * (p * (slope - pivot))
            # The logits of a row may be NaN if the weights of all its divergences are 0.
            g = tl.where(alive == 0, 0.0, g)
        if a.targets is not None:
            # All terms of a loss have the same soft cap, so that the tanh of a logit is computed
            # once, for the divergence and for the terms without a teacher.
            if p_z.inner is not None:
                log_p_of_others = log_softmax(value, p_z, outer, *normalizer)
            else:
                log_p_of_others = log_softmax(value, a.z, outer, *normalizer)
            h = grad_z(tl.exp(log_p_of_others), log_p_of_others, at, a.c)
            if a.logps is not None:
                h = tl.where(columns == target, target_gradient, h)
            g += h * factor
        g = under_cap(g, value, p_z)
        if d.extra is not None:
            g += tl.load(d.extra + row * v + columns, mask=inside, other=0.0)
        # In-place conversion to a narrower dtype: threads read a block before any thread overwrites
        # it.
        if OVERLAP:
            tl.debug_barrier()
        tl.store(out + columns, g.to(to.data.dtype.element_ty), mask=inside)


launch_gradient = Launcher(pair_gradient_kernel, num_warps=WARPS)


def part_gradient_(
    raw: Tensor,
    part: Divergence | StoredTopk,
    extra: Tensor | None = None,
    others: Backward | None = None,
) -> Tensor:
    records.check_tile("raw", raw)
    n, v = raw.shape
    if others is not None:
        out = records.narrowed(raw, others)
    else:
        out = torch.empty_like(raw, dtype=torch.float32) if extra is None else extra
    if n == 0:
        return out
    block = records.block_width(v, BLOCK)
    overlap = others is not None and out.dtype != raw.dtype
    kinds: tuple[Kind, ...] = ()
    constants = {"K": 0, "ACCEPTANCE": 0}
    if isinstance(part, StoredTopk):
        stored, order = records.blocked_columns(part.columns, v, block)
        slopes = part.slope_stored.gather(1, order)
        of = Part(softmax(part.tail), part.slope_tail, stored=stored, slopes=slopes)
    else:
        kinds, constants = of_measures(part.pair.measures)
        slopes_and_weights = part.mean_slope.contiguous(), part.weight.contiguous()
        of = Part(softmax(part.pair.student), *slopes_and_weights, part.log_acceptance)
        of = of._replace(teacher=teacher_of(part.teacher, part.pair))
    of = of._replace(extra=extra)
    has_others = others is not None and others.coefficients.tensors()
    a, first = (records.gradient_inputs(others), others.first) if has_others else (NO_INPUTS, 0)
    tiles = records.matrix_of(raw), records.matrix_of(out)
    constants |= {"BLOCK": block, "OVERLAP": overlap}
    launch_gradient(n, *tiles, of, a, kinds, first, v, **constants)
    return out
