"""Triton kernel for statistics and gradient of existing logits, read in place and in their own
dtype.

The packed batch has T rows, the vocabulary slice has v columns starting at `first`, and z =
transform(raw) are the logits after scale, soft cap and temperature. The logits of row t begin
`offsets[t]` elements after the start of the logits tensor, so that padded, shifted and packed
layouts need no copy. Memory between rows, such as padding, is never read.

A GPU program walks along a row of logits once for the statistics and, if coefficients are given, a
second time for the gradient. If one launch makes both passes, the gradient's pass begins at the
columns that the statistics' pass read last, which are still in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...statistics.softmax import Normalizer, SoftmaxCoefficients, SoftmaxState
from ..interface import Walk
from .formulas import coefficient, coefficients, log1p, normalizer_of, per_row, store_partials
from .launch import Launcher, cdiv
from .records import LogitScaling, empty_partials, in_rows, scaling
from .walk import logit_gradient, logits_of, row_partials, write_gradient


class Shape(NamedTuple):
    """Launch configuration of the kernel; the script benchmarks/studies/given.py finds the fastest
    values for a GPU."""

    warps: int  # Warps of a program.
    turns: int = 16  # Rows that a program handles one after another.
    registers: int | None = None  # Largest number of registers per thread.


# Launch configuration by the smallest number v of vocabulary columns that the configuration is used
# for.
SHAPES = {
    98304: Shape(warps=32, turns=4, registers=64),
    16384: Shape(warps=16, turns=4, registers=64),
    0: Shape(warps=4),
}
# Launch configuration for one pass over each row, for the statistics or the gradient alone.
ONE_WALK = Shape(warps=16, turns=1)
VECTOR = 16  # Bytes that a thread loads at once.


# ---------------------------------------------------------------------- the kernel


class Given(NamedTuple):
    """Operands of `given_kernel`; a vector has an element for each of the T rows."""

    offsets: Tensor  # Start of each row in the memory of the logits, in elements.
    out_offsets: Tensor | None  # Start of each row in the memory of the gradient, in elements.
    live: Tensor | None  # Bool mask [T]; a row with False is not read, and its gradient is 0.
    targets: Tensor
    z: LogitScaling
    normalizer: Normalizer | None
    # Memory to which the kernel writes statistics; None if the caller already has the statistics.
    to: SoftmaxState | None
    # Gradient coefficients. If the kernel also computes the statistics, the caller computes the
    # gradient coefficients with an entropy of 0, and the kernel adds the gradient terms that depend
    # on the entropy.
    c: SoftmaxCoefficients
    slopes: Tensor | None  # Shape [SLOPES, 5, T].
    out: Tensor | None  # Output gradient.


@triton.jit
def slope_parts(slopes, row, count, SLOPES: tl.constexpr):
    """Load the five fields (rate, anchor, low, high, sign) of each `softmax.Slope` (closed-form
    derivative of the loss) of a token, and return all fields in one flat tuple."""
    numbers = ()
    for i in tl.static_range(SLOPES):
        part = slopes + i * 5 * count.to(tl.int64) + row
        for k in tl.static_range(5):
            numbers = numbers + (tl.load(part + k * count),)  # noqa: RUF005
    return numbers


@triton.jit
def closed_slope(parts, logp, SLOPES: tl.constexpr):
    """Return the loss's derivative with respect to a token's log-prob `logp`: the sum of SLOPES
    closed-form functions of `logp`, each described by five numbers in the tuple `parts`."""
    slope = 0.0
    for i in tl.static_range(SLOPES):
        rate = parts[5 * i]
        anchor = parts[5 * i + 1]
        low = parts[5 * i + 2]
        high = parts[5 * i + 3]
        sign = parts[5 * i + 4]
        value = rate * tl.exp(sign * (logp - anchor))
        slope += tl.where((logp >= low) & (logp <= high), value, 0.0)
    return slope


@triton.jit
def settled(partials, length):
    """Return partial statistics with 0 for rows that were not read, so that no objective computes a
    NaN."""
    max_logit, sumexp_m1, entropy_sum, logit_sum = partials
    max_logit = tl.where(length > 0, max_logit, 0.0)
    sumexp_m1 = tl.where(length > 0, sumexp_m1, 0.0)
    entropy_sum = tl.where(length > 0, entropy_sum, 0.0)
    return max_logit, sumexp_m1, entropy_sum, tl.where(length > 0, logit_sum, 0.0)


@triton.jit(do_not_specialize=["first", "count"])
def given_kernel(
    raw,
    of,
    first,
    count,  # Number of rows T of the packed batch.
    v,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    SLOPES: tl.constexpr,
):
    STATISTICS: tl.constexpr = of.normalizer is None
    GRADIENT: tl.constexpr = of.out_offsets is not None
    # Programs that run at the same time read rows close to one another.
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        offset = tl.load(of.offsets + row)
        # Triton accepts no alignment hint for a loop variable.
        x = raw + offset // ALIGNED * ALIGNED
        length = v
        if of.live is not None:
            # Multiply the length v by 0 or 1 in place of a branch, so that Triton still knows the
            # divisors of v.
            length = v * tl.load(of.live + row).to(tl.int32)
        outer = per_row(of.z.outer, of.z, row)
        column = tl.load(of.targets + row) - first
        mine = (column >= 0) & (column < length)
        target = tl.load(x + column, mask=mine, other=float("-inf"))
        # Load the gradient's operands before the statistics are computed, because the computation
        # hides the latency of the loads.
        if GRADIENT:
            y = of.out + tl.multiple_of(tl.load(of.out_offsets + row), ALIGNED)
            at_target = coefficient(of.c.target, row)
            at_prob, at_entropy, at_uniform = coefficients(of.c, row)
            closed = slope_parts(of.slopes, row, count, SLOPES)

        if STATISTICS:
            partials = row_partials(x, length, of.z, outer, of.to, WIDTH, GRADIENT)
        # The gradient may be written in place, so that all threads must read the row and the target
        # before any thread writes.
        if GRADIENT:
            tl.debug_barrier()
        if STATISTICS:
            target_logit = logits_of(target, mine, of.z, outer)
            if of.live is not None:
                target_logit = tl.where(length > 0, target_logit, 0.0)
                partials = settled(partials, length)
            tl.store(of.to.target + row, target_logit)
            max_logit, sumexp_m1, entropy_sum, _ = partials
            store_partials(of.to, row, partials, True)
            log_sum = log1p(sumexp_m1)
        else:
            max_logit, log_sum = normalizer_of(of.normalizer, row)

        if GRADIENT:
            if STATISTICS and of.c.entropy is not None:
                at_prob += at_entropy * (log_sum - entropy_sum / (1 + sumexp_m1))
            if SLOPES > 0:
                slope = closed_slope(closed, (target_logit - max_logit) - log_sum, SLOPES)
                at_prob -= slope
                at_target += slope
            factor = per_row(of.z.factor, of.z, row)
            at = at_prob * factor, at_entropy * factor, at_uniform * factor
            normalizer = max_logit, log_sum
            write_gradient(x, y, v, length, of.z, outer, normalizer, at, of.c, WIDTH, STATISTICS)
            # A barrier is needed, because a different thread has written the gradient at the
            # target.
            tl.debug_barrier()
            if of.c.target is not None or SLOPES > 0:
                g, bend = logit_gradient(target, mine, of.z, outer, normalizer, at, of.c)
                g = (g + at_target * factor * bend).to(y.dtype.element_ty)
                tl.store(y + column, g, mask=mine)


launch = Launcher(given_kernel)


def given_rows(walk: Walk, *, shape: Shape | None = None) -> SoftmaxState | None:
    logits, out, live, targets, first, transform, needs, c, slopes, normalizer = walk
    x = logits.tensor
    count = len(targets)
    both = needs is not None and out is not None
    v = x.shape[-1]
    aligned = logits.aligned and (out is None or out.aligned)
    partials = empty_partials(x, count, needs) if needs is not None else None
    if count == 0:
        return partials
    offsets, where = (None, None) if out is None else (out.offsets, out.tensor)
    z = scaling(transform)
    c = in_rows(c or SoftmaxCoefficients())
    of = Given(logits.offsets, offsets, live, targets, z, normalizer, partials, c, slopes, where)
    shape = shape or shape_of(v, both)
    # A short row needs fewer lanes (partial sums per program).
    lanes = 32 * shape.warps * VECTOR // x.element_size()
    options = {"maxnreg": shape.registers} if shape.registers else {}
    launch(
        cdiv(count, shape.turns),
        x,
        of,
        first,
        count,
        v,
        num_warps=shape.warps,
        **options,
        WIDTH=min(lanes, max(16, triton.next_power_of_2(v) // 4)),
        ALIGNED=16 if aligned else 1,
        SLOPES=0 if slopes is None else len(slopes),
    )
    return partials


def shape_of(v: int, both: bool) -> Shape:
    """Return the launch configuration for rows of v columns; with `both`, a launch passes over each
    row twice, for statistics and for the gradient. Only NVIDIA's compilers accept `maxnreg`."""
    shape = next(s for width, s in SHAPES.items() if v >= width) if both else ONE_WALK
    return shape._replace(registers=None) if torch.version.hip is not None else shape
