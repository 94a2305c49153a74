"""Triton kernels for a head of small hidden width, built like fused attention: the weight serves as
keys and values, and tiles of logits stay on the chip.

n tokens, v columns of the vocabulary, H hidden width, at most WIDEST, padded to a power of two in
the kernel. In a *sweep* (a pass over tiles of logits) each program owns rows of one matrix and
loops over the rows of the other matrix. The forward pass computes a token's statistics and, on
request, the sum over j of exp(z_j - shift) dz_j/draw_j w_j, where w_j is row j of the weight, and
`shift` is the logit of one column, which the sum leaves out (see product.py). If c_target and
c_prob are the only gradient coefficients, the hidden gradient follows from the sum of exp(z_j -
shift) dz_j/draw_j w_j. The gradient kernel recomputes each tile of logits, turns the tile into its
gradient, and multiplies the gradient at once by the hidden states (for the weight) or by the weight
(for the hidden states).

The vocabulary is cut into PARTS = 16 parts, which different GPU programs handle, so that few tokens
already fill a GPU. The results of the PARTS parts are added in a fixed order, so that a token's
result never depends on other tokens. A table marks the tiles that need a mask: tiles with a token's
shift or target, and tiles at the end of the vocabulary.

For the weight's gradient, a vector of tokens lies along the columns of a tile, and a thread reads
many elements of the vector. If c_target and c_prob are the only gradient coefficients, the kernel
reads d = log2 |c_prob| - log2 sum exp z of each token, and computes |c_prob| p = exp2(z log2 e +
d); tokens with c_prob < 0 come before all tokens with c_prob >= 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...statistics.softmax import SoftmaxCoefficients, SoftmaxState
from ..interface import Backward, Forward, ShiftedSums, partials_of
from .chosen import shift_column, target_gradient_
from .formulas import LN2, LOG2E, coefficient, grad_z, per_row, tanh_and_slope
from .launch import Launcher, TileShape, cdiv
from .merge import Epilogue, parts_of
from .product import LOWEST, accelerated, bias_of, can_fuse, statistics_of
from .records import LogitScaling, matrix_of, scaling

WIDEST = 256  # Largest hidden width.
PARTS = 16  # Parts of the vocabulary.
BLOCK = 128  # Tokens are padded to a multiple of this number, which the rows of every tile divide.
NOTHING = 1e30  # Value of log2 sum exp z for padding tokens, so that their p is 0.


# Numbers to tune on a device (benchmarks/studies/narrow.py), by padded hidden width: rows and
# columns of a tile, warps and stages. Programs own tokens (TOKENS) or columns (COLUMNS).
TOKENS = {64: (128, 64, 4, 3), 128: (64, 128, 4, 3), 256: (128, 64, 8, 3)}
COLUMNS = {64: (64, 128, 4, 3), 128: (64, 64, 4, 3), 256: (64, 64, 4, 2)}
SMALL = (32, 32, 4, 1)  # For float32.


class Cut(NamedTuple):
    """Compile-time tile sizes of a sweep (a pass over tiles of logits that stay on the chip)."""

    h: int
    depth: int  # Padded hidden width.
    stationary: int
    streamed: int
    parts: int
    described: bool  # True: matrices are tensor descriptors, for the tensor memory accelerator.


class Tokens(NamedTuple):
    """Inputs of the gradient kernel, one entry per token, padded to whole tiles."""

    column: Tensor  # Target's column in this vocabulary slice, or -1, [n].
    target: Tensor  # Gradient of the target's raw logit, [n].
    log2_sumexp: Tensor  # Log2 of (sum exp z), or of (sum exp z / |c_prob|) with `border`, [n].
    c: SoftmaxCoefficients  # Coefficients times dz/draw.
    z: LogitScaling
    # Index [] of the first token with c_prob >= 0; None if kernels read the coefficients `c`.
    border: Tensor | None


@triton.jit
def pointers_of(of, first, rows, inside, cut: tl.constexpr):
    """Return pointers to rows of a Matrix [.., h], padded to a power of two, and the mask of
    elements within the matrix."""
    k = tl.arange(0, cut.depth)[None, :]
    pointers = of.data + (first + rows).to(tl.int64)[:, None] * of.stride + k
    return pointers, inside[:, None] & (k < cut.h)


@triton.jit
def lines(of, first, count, SIZE: tl.constexpr, cut: tl.constexpr):
    """Return [SIZE, depth] rows of a matrix [count, h], 0 beyond the last row."""
    if cut.described:
        return of.load([first, 0])
    else:
        rows = tl.arange(0, SIZE)
        pointers, mask = pointers_of(of, first, rows, first + rows < count, cut)
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def place_of(marks, count, length, cut: tl.constexpr):
    """Return a program's first row, its part of the vocabulary, the part's first and last tile, and
    a pointer to the marks of tiles that need a mask."""
    blocks, tiles = tl.cdiv(count, cut.stationary), tl.cdiv(length, cut.streamed)
    part, size = tl.program_id(0) // blocks, tl.cdiv(tiles, cut.parts)
    block = tl.program_id(0) % blocks
    mark = marks.data + block.to(tl.int64) * marks.stride
    return block * cut.stationary, part, part * size, tl.minimum((part + 1) * size, tiles), mark


@triton.jit
def capped(raw, columns, z, v):
    """Return raw logits with bias and soft cap applied, and the derivative of the soft cap."""
    if z.restore is not None:
        raw *= z.restore
    if z.bias is not None:
        raw += tl.load(z.bias + columns, mask=columns < v, other=0.0).to(tl.float32)
    slope = raw
    if z.inner is not None:
        raw, slope = tanh_and_slope(raw * z.inner)
    return raw, slope


@triton.jit(do_not_specialize=["n"])
def narrow_sums_kernel(
    stationary,  # Hidden states x [n, H], a `Matrix` or a tensor descriptor.
    streamed,  # Weight w [v, H].
    marks,  # Matrix of bytes, not 0 for a tile that needs a mask.
    of,  # An `Epilogue`, whose column blocks are the parts of the vocabulary.
    sums,  # Output [parts * n, H] float32, a sum per vocabulary part and token; or None.
    n,
    v,
    cut: tl.constexpr,
):
    ROWS: tl.constexpr = cut.stationary
    DEPTH: tl.constexpr = cut.depth
    LANES: tl.constexpr = 8  # Number of partial sums per row, which are added at the end.
    FOLDED: tl.constexpr = (ROWS, cut.streamed // LANES, LANES)
    first, part, start, stop, mark = place_of(marks, n, v, cut)
    rows = first + tl.arange(0, cut.stationary)
    inside = rows < n
    a = lines(stationary, first, n, cut.stationary, cut)
    mass = tl.zeros((ROWS, LANES), tl.float32)
    entropy_sum, logit_sum, highest = mass, mass, mass + LOWEST
    outer = per_row(of.z.outer, of.z, rows[:, None], inside[:, None])
    shift = tl.load(of.shift + rows, mask=inside, other=0.0)
    column = shift_column(of, rows, inside)[:, None]
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for tile in range(start, stop):
        marked = tl.load(mark + tile)
        b = lines(streamed, tile * cut.streamed, v, cut.streamed, cut)
        columns = (tile * cut.streamed + tl.arange(0, cut.streamed))[None, :]
        z, slope = capped(tl.dot(a, b.T, input_precision="ieee"), columns, of.z, v)
        if of.flags.mean:  # Logits of columns beyond v are 0 and do not change the sum.
            logit_sum += tl.sum(tl.reshape(z * outer, FOLDED), 1)
        below = z * (outer * LOG2E) - (shift * LOG2E)[:, None]
        if marked != 0:
            below = tl.where((columns == column) | (columns >= v), LOWEST, below)
        e = tl.exp2(below)
        mass += tl.sum(tl.reshape(e, FOLDED), 1)
        if of.flags.entropy:
            entropy_sum += tl.sum(tl.reshape(e * below, FOLDED), 1)
        if of.flags.top1:
            highest = tl.maximum(highest, tl.max(tl.reshape(below, FOLDED), 1))
        if sums is not None:
            if of.z.inner is not None:
                e *= slope
            total = tl.dot(e.to(b.dtype), b, total, input_precision="ieee")
    sumexps, entropy_sums, logit_sums, max_logits = parts_of(of)
    place = part.to(tl.int64) * of.pitch + rows
    tl.store(sumexps + place, tl.sum(mass, 1), mask=inside)
    if of.flags.entropy:
        tl.store(entropy_sums + place, tl.sum(entropy_sum, 1) * LN2, mask=inside)
    if of.flags.mean:
        tl.store(logit_sums + place, tl.sum(logit_sum, 1), mask=inside)
    if of.flags.top1:
        tl.store(max_logits + place, tl.max(highest, 1) * LN2 + shift, mask=inside)
    if sums is not None:
        total *= per_row(of.z.factor, of.z, rows[:, None], inside[:, None])
        pointers, mask = pointers_of(sums, part * n, rows, inside, cut)
        tl.store(pointers, total, mask=mask)


@triton.jit
def tile_gradient(raw, tokens, columns, marked, a, v):
    """Return the gradient of the raw logits in a tile. The indices `tokens` run along one dimension
    of the tile, and the indices `columns` run along the other dimension."""
    z, slope = capped(raw, columns, a.z, v)
    log2_p = z * per_row(a.z.outer * LOG2E, a.z, tokens) - tl.load(a.log2_sumexp + tokens)
    g = tl.exp2(log2_p)
    if a.border is None:
        entropy = coefficient(a.c.entropy, tokens) * LN2
        at = coefficient(a.c.prob, tokens), entropy, coefficient(a.c.uniform, tokens)
        g = grad_z(g, log2_p, at, a.c)
    if a.z.inner is not None:
        g *= slope
    if marked != 0:
        of_target = columns == tl.load(a.column + tokens)
        g = tl.where(columns < v, tl.where(of_target, tl.load(a.target + tokens), g), 0.0)
    return g


@triton.jit(do_not_specialize=["count", "length"])
def narrow_gradient_kernel(
    stationary,  # Shape [count, H].
    streamed,  # Shape [length, H].
    marks,
    out,  # Output [parts * count, H], a gradient per vocabulary part; or None.
    bias,  # Output [count] float32, each column's sum of the gradient over tokens; or None.
    factor,  # Scalar that multiplies `out` but not `bias`, or None.
    some,  # Mask [count] of the rows of `out` that are written; None: write all rows.
    a,  # A `Tokens` record.
    count,
    length,
    cut: tl.constexpr,
    WEIGHT: tl.constexpr,  # True: a program owns vocabulary columns and loops over tokens.
):
    STATIONARY: tl.constexpr = cut.stationary
    DEPTH: tl.constexpr = cut.depth
    first, part, start, stop, mark = place_of(marks, count, length, cut)
    mine = first + tl.arange(0, cut.stationary)
    limit = count if WEIGHT else length
    written = mine < count
    if some is not None:
        written = tl.load(some + mine, mask=written, other=0).to(tl.int1)
        stop *= tl.max(written.to(tl.int32), 0)
    left = lines(stationary, first, count, cut.stationary, cut)
    total = tl.zeros((STATIONARY, DEPTH), tl.float32)
    bias_total = tl.zeros((STATIONARY,), tl.float32)
    border = start
    if a.border is not None:
        border = tl.load(a.border).to(tl.int32) // cut.streamed
    for half in range(2):
        for tile in range(tl.where(half == 0, start, border), tl.where(half == 0, border, stop)):
            marked = tl.load(mark + tile)
            right = lines(streamed, tile * cut.streamed, length, cut.streamed, cut)
            raw = tl.dot(left, right.T, input_precision="ieee")
            at = (tile * cut.streamed + tl.arange(0, cut.streamed))[None, :]
            tokens = at if WEIGHT else mine[:, None]
            columns = mine[:, None] if WEIGHT else at
            g = tile_gradient(raw, tokens, columns, marked, a, limit)
            if bias is not None:
                bias_total += tl.sum(g, 1)
            total = tl.dot(g.to(right.dtype), right, total, input_precision="ieee")
        if half == 0:
            total, bias_total = -total, -bias_total
    if factor is not None:
        total *= tl.load(factor).to(tl.float32)
    if out is not None:
        pointers, mask = pointers_of(out, part * count, mine, written, cut)
        tl.store(pointers, total, mask=mask)
    if bias is not None:
        tl.store(bias + mine, bias_total, mask=written)


# ---------------------------------------------------------------------- launches


def can_sweep(w: Tensor) -> bool:
    return w.stride(1) == 1 and w.shape[1] <= WIDEST and accelerated(w)


def _sweep(
    kernel: Any,
    stationary: Tensor,
    streamed: Tensor,
    shapes: dict[int, tuple[int, ...]],
    parts: int,
    pairs: tuple[Tensor, Tensor],
    *arguments: Any,
    **constants: Any,
) -> None:
    """Run a kernel over the tiles of stationary [count, H] @ streamed.T [H, length]; the tile sizes
    depend on the head's shape alone. A tile is marked (computed with a mask) if it ends beyond the
    last row of `streamed`, or contains row i of `stationary` and row j of `streamed` for a pair (i,
    j) in `pairs`. A pair (i, j) with i or j = -1 marks an arbitrary tile, without harm."""
    (count, h), length, described = stationary.shape, len(streamed), can_fuse(stationary, streamed)
    depth = max(16, triton.next_power_of_2(h))
    rows, width, warps, stages = shapes[max(64, depth)] if stationary.element_size() == 2 else SMALL
    blocks, tiles, (mine, others) = cdiv(count, rows), cdiv(length, width), pairs
    marks = mine.new_zeros(blocks, tiles + 1, dtype=torch.uint8)
    tile = mine // rows * (tiles + 1) + others // width
    marks.view(-1).index_fill_(0, tile % marks.numel(), 1)
    if length % width:
        marks[:, tiles - 1] = 1
    shape = {"stationary": TileShape((rows, depth)), "streamed": TileShape((width, depth))}
    run = Launcher(kernel, tiles=shape if described else None, num_warps=warps, num_stages=stages)
    operands = (stationary, streamed) if described else (matrix_of(stationary), matrix_of(streamed))
    more = matrix_of(marks), *arguments, count, length, Cut(h, depth, rows, width, parts, described)
    run(blocks * parts, *operands, *more, **constants)


def _in_order(parts: Tensor) -> Tensor:
    """Return the sum [n, H] of [PARTS, n, H] over vocabulary parts, added in one order for every
    n."""
    while len(parts) > 2:
        parts, half = parts.chunk(2)
        parts += half
    return parts[0] + parts[1]  # A new tensor, so that the memory of `parts` is freed.


def narrow_partials(
    x: Tensor, w: Tensor, forward: Forward, sums: bool = False
) -> tuple[SoftmaxState, ShiftedSums | None]:
    parts = x.new_empty(PARTS * sums, *x.shape, dtype=torch.float32)
    swept: list[tuple[Tensor, ...]] = []

    def sweep(of: Epilogue) -> None:
        column = of.more[1].view(torch.int32).long()
        to = matrix_of(parts.flatten(0, 1)) if sums else None
        pairs = torch.arange(len(x), device=x.device), column
        _sweep(narrow_sums_kernel, x, w, TOKENS, PARTS, pairs, of, to)
        swept.append((of.shift.clone(), column, of.shift))

    state = partials_of(statistics_of(x, w, forward, None, sweep=(PARTS, sweep)), forward.needs)
    if not sums:
        return state, None
    ((before, column, after),) = swept
    return state, ShiftedSums(_in_order(parts), before, column, after != before)


def _at_target(x: Tensor, w: Tensor, backward: Backward) -> Tensor:
    """Return the gradient [n] of the raw logits at the targets."""
    out = torch.zeros_like(backward.logps)
    target_gradient_(out.unsqueeze(1), x, w, backward, torch.zeros_like(backward.targets))
    return out


def _gradient(
    x: Tensor,
    w: Tensor,
    backward: Backward,
    target: Tensor,
    out: Tensor | None,
    weight: bool,
    parts: int = 1,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
    some: Tensor | None = None,
) -> None:
    """Run the gradient kernel, for the weight's gradient [v, H] or for the hidden gradient [parts *
    n, H], one per vocabulary part."""
    n, transform, border = len(x), backward.transform, None
    place = torch.arange(n, device=x.device)
    z, log2_sumexp = scaling(transform, bias_of(x)), sum(backward.normalizer) * LOG2E.value
    slope = transform.scale / transform.temperature
    c = backward.coefficients._replace(target=None).map(lambda t: t * slope)
    if weight and c.prob is not None and c.entropy is c.uniform is None:
        negative = c.prob < 0
        before, border = negative.cumsum(0), -(-negative.sum() // BLOCK) * BLOCK
        place = torch.where(negative, before - 1, border + place - before)
        target = torch.where(negative, -target, target)
        log2_sumexp, c = log2_sumexp - c.prob.abs().log2(), SoftmaxCoefficients()

    def padded(values: Tensor, fill: float) -> Tensor:
        more = values.new_full(((cdiv(n, BLOCK) + 1) * BLOCK, *values.shape[1:]), fill)
        return more.index_copy_(0, place, values)

    if z.temperature is not None:
        z = z._replace(temperature=padded(z.temperature, 1))
    column = backward.targets - backward.first
    column = torch.where((column >= 0) & (column < len(w)), column, -1)
    log2_sumexp, c = padded(log2_sumexp, NOTHING), c.map(lambda t: padded(t, 0))
    a = Tokens(padded(column, -1), padded(target, 0), log2_sumexp, c, z, border)
    of: Any = x, w, TOKENS, parts, (place, column)
    if weight:
        of = w, padded(x, 0), COLUMNS, 1, (column, place)
    to = out if out is None else matrix_of(out)
    _sweep(narrow_gradient_kernel, *of, to, bias, factor, some, a, WEIGHT=weight)


def narrow_hidden(
    x: Tensor, w: Tensor, backward: Backward, sums: ShiftedSums | None = None
) -> Tensor:
    target = _at_target(x, w, backward)
    if sums is None:
        parts = x.new_empty(PARTS, *x.shape, dtype=torch.float32)
        if len(x):
            _gradient(x, w, backward, target, parts.flatten(0, 1), False, PARTS)
        return _in_order(parts)
    # `sums` leave out one column per token: the target, or an arbitrary column if another slice of
    # the vocabulary holds the target.
    c, (max_logit, log_sum) = backward.coefficients, backward.normalizer
    others = (c.prob * (sums.shift - max_logit - log_sum).exp()).unsqueeze(1)
    g = backward.transform.vjp_(others.clone(), sums.shift.unsqueeze(1), is_z=True)[:, 0]
    of_target = sums.column == backward.targets - backward.first
    g = torch.where(of_target, target, g).unsqueeze(1)
    total = (sums.rows * others).addcmul_(g, w[sums.column].to(g.dtype))
    _gradient(x, w, backward, target, total, False, some=sums.far)
    return total


def narrow_weight_(
    x: Tensor,
    w: Tensor,
    backward: Backward,
    out: Tensor | None,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    _gradient(x, w, backward, _at_target(x, w, backward), out, True, 1, bias, factor)
