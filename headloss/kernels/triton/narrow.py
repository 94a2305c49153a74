"""Triton kernels for a head of small hidden width, built like fused attention: the weight serves as
keys and values, and tiles of logits stay on the chip.

n is the number of tokens, v the number of vocabulary columns, and H the hidden width, which is at
most 256 and is padded to a power of two in the kernel. Each GPU program owns rows of one matrix
(hidden states or weight) and loops over the rows of the other matrix. The forward pass computes a
token's statistics and, on request, the sum of exp(z_j - shift) dz_j/draw_j w_j over all columns j
except one column k, where raw_j is the logit of column j before scale and soft cap, z_j is the
logit after both, w_j is row j of the weight, and the shift is the logit z_k of column k (see
product.py). If the loss depends only on the target's logit and the log-sum-exp, the hidden gradient
is computed from the forward pass's sum of weight rows. For gradients the kernel recomputes each
tile of logits, turns the tile into its gradient, and multiplies the gradient at once by the hidden
states (for the weight) or by the weight (for the hidden states).

The vocabulary is cut into PARTS = 16 parts, which different GPU programs handle, so that few tokens
already fill a GPU. The partial sums that GPU programs compute over the 16 parts of the vocabulary
are added in a fixed order, so that a token's result never depends on the batch's other tokens. A
table marks the tiles of logits that need a mask: tiles that contain the column of a token's target
or shift (the logit that exp(z - shift) subtracts), and tiles at the end of the vocabulary.

In the kernel for the weight's gradient, tokens are the columns of a tile, so that each thread reads
many elements of a vector with one element per token. If c_target and c_prob are the only gradient
coefficients, the kernel computes |c_prob| p as exp2(z log2 e + d), with one number d = log2
|c_prob| - log2 sum exp z per token. Tokens with a negative gradient coefficient c_prob come before
all tokens with a positive one, so that the kernel knows the sign from a token's position.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...statistics.softmax import SoftmaxCoefficients, SoftmaxState
from ..interface import Backward, Forward, ShiftedSums, partials_of
from .chosen import target_gradient_
from .formulas import LN2, LOG2E, coefficients, grad_z, per_row, tanh_and_slope
from .launch import Launcher, TileShape, cdiv
from .merge import Epilogue, parts_of
from .product import LOWEST, accelerated, bias_of, can_fuse, statistics_of
from .records import LogitScaling, matrix_of, scaling
from .tiles import biased

WIDEST = 256  # Largest hidden width.
PARTS = 16  # Parts of the vocabulary.
# The number of tokens is padded to a multiple of BLOCK, and thereby to a multiple of the number of
# tokens in any tile.
BLOCK = 128
NOTHING = 1e30  # Value of log2 sum exp z for padding tokens, so that their p is 0.


# Numbers to tune on a device (benchmarks/studies/narrow.py), by padded hidden width: rows and
# columns of a tile, warps and stages. TOKENS is for launches whose programs own tokens, COLUMNS for
# launches whose programs own vocabulary columns.
TOKENS = {64: (128, 64, 4, 3), 128: (64, 128, 4, 3), 256: (128, 64, 8, 3)}
COLUMNS = {64: (64, 128, 4, 3), 128: (64, 64, 4, 3), 256: (64, 64, 4, 2)}
SMALL = (32, 32, 4, 1)  # For float32.


class Cut(NamedTuple):
    """Compile-time constants of `narrow_kernel`."""

    h: int
    depth: int  # Padded hidden width.
    stationary: int  # Rows of a tile.
    streamed: int  # Columns of a tile.
    parts: int
    described: bool  # True: matrices are tensor descriptors, for the tensor memory accelerator.
    # True, for the weight's gradient: a GPU program owns vocabulary columns and loops over tokens.
    weight: bool


class Tokens(NamedTuple):
    """Inputs of `narrow_kernel` with one entry per token; for the weight's gradient, padded to
    whole tiles of tokens."""

    # Column [n] of each token: the target's column or, if the kernel computes statistics, the
    # column k whose logit z_k is the shift in exp(z - shift). A number outside of 0..v - 1 stands
    # for a column in a different slice of the vocabulary.
    column: Tensor
    # Gradient of the raw logit at `column`, [n]; None if the kernel computes statistics.
    target: Tensor | None
    # Vector [n], subtracted from z log2 e before exp2: shift / log 2 for statistics; for gradients
    # log2(sum exp z), or log2(sum exp z / |c_prob|) if the field `border` is given.
    log2_sumexp: Tensor
    c: SoftmaxCoefficients  # Coefficients times dz/draw.
    z: LogitScaling
    # Scalar tensor for tokens sorted by the sign of c_prob (the gradient coefficient of the
    # softmax): the index of the first token with c_prob >= 0. None if the kernel reads every
    # token's gradient coefficients from the field `c`.
    border: Tensor | None = None


@triton.jit
def pointers_of(of, rows, inside, cut: tl.constexpr):
    """Return pointers to `rows` of a `Matrix` [.., h], whose width h is padded to a power of two,
    and the mask of the elements that exist in the matrix."""
    k = tl.arange(0, cut.depth)[None, :]
    return of.data + rows.to(tl.int64)[:, None] * of.stride + k, inside[:, None] & (k < cut.h)


@triton.jit
def lines(of, first, count, SIZE: tl.constexpr, cut: tl.constexpr):
    """Return [SIZE, depth] rows of a matrix [count, h], 0 beyond the last row."""
    if cut.described:
        return of.load([first, 0])
    else:
        rows = first + tl.arange(0, SIZE)
        pointers, mask = pointers_of(of, rows, rows < count, cut)
        return tl.load(pointers, mask, 0.0)


@triton.jit
def differentiated(z, tokens, columns, inside, marked, a, v):
    """Return four values for each logit of a tile: the logit z, log2 p, the summand of row sums (p
    for statistics, else the gradient of the raw logit), and the gradient of the raw logit. The
    indices `tokens` run along one dimension of the tile, and the indices `columns` run along the
    other dimension."""
    z = biased(z, a.z, columns, v)
    slope = 1.0
    if a.z.inner is not None:
        z, slope = tanh_and_slope(z * a.z.inner)
    outer = per_row(a.z.outer, a.z, tokens, inside)
    log2_p = z * (outer * LOG2E) - tl.load(a.log2_sumexp + tokens, inside)
    if a.target is None:
        # Load each token's column before the branch for tiles with a mask, so that the compiler
        # moves the load out of the loop over tiles.
        column = tl.load(a.column + tokens, inside)
        if marked != 0:
            log2_p = tl.where((columns == column) | (columns >= v), LOWEST, log2_p)
    p = tl.exp2(log2_p)
    g = p * slope
    if a.target is not None:
        if a.border is None:
            prob, entropy, uniform = coefficients(a.c, tokens, inside)
            g = grad_z(g, log2_p, (prob, entropy * LN2, uniform * slope), a.c)
        if marked != 0:
            apart = columns == tl.load(a.column + tokens, inside)
            g = tl.where(apart, tl.load(a.target + tokens, inside), tl.where(columns < v, g, 0.0))
        p = g
    return z * outer, log2_p, p, g


@triton.jit(do_not_specialize=["count", "length"])
def narrow_kernel(
    stationary,  # Hidden states or weight [count, H], a `Matrix` or a tensor descriptor.
    streamed,  # Weight or hidden states [length, H].
    marks,  # Matrix of bytes, one byte per tile of logits: not 0 if the tile needs a mask.
    # Output [parts * count, H]: a partial result [count, H] for each part of the vocabulary; or
    # None.
    out,
    # Output [count] float32, the bias gradient: the sum over tokens of each column's gradient; or
    # None.
    bias,
    # Scalar that multiplies the output `out` (the output `bias` is not multiplied); or None.
    factor,
    some,  # Mask [count] of the rows of `out` that are written; None: write all rows.
    a,  # A `Tokens` record.
    # If the kernel computes statistics, an `Epilogue` (operands for the sums over blocks of
    # columns) with one block per part of the vocabulary; if the kernel computes a gradient, None.
    of,
    count,
    length,
    cut: tl.constexpr,
):
    ROWS: tl.constexpr = cut.stationary
    WIDTH: tl.constexpr = cut.streamed
    # Each row of a tile is summed as eight partial sums, which are added at the end.
    FOLDED: tl.constexpr = (ROWS, WIDTH // 8, 8)
    blocks, tiles = tl.cdiv(count, ROWS), tl.cdiv(length, WIDTH)
    part, size = tl.program_id(0) // blocks, tl.cdiv(tiles, cut.parts)
    block, start = tl.program_id(0) % blocks, part * size
    stop = tl.minimum(start + size, tiles)
    mine = block * ROWS + tl.arange(0, ROWS)
    written = mine < count
    if some is not None:
        written = tl.load(some + mine, written, 0).to(tl.int1)
        stop *= tl.max(written.to(tl.int32), 0)
    inside = None if cut.weight else written[:, None]
    left = lines(stationary, block * ROWS, count, ROWS, cut)
    total = tl.zeros_like(left).to(tl.float32)
    mass = tl.zeros((ROWS, 8), tl.float32)
    entropy_sum, logit_sum, highest = mass, mass, mass + LOWEST
    border = start
    if a.border is not None:
        border = tl.load(a.border).to(tl.int32) // WIDTH
    for half in range(1 if a.border is None else 0, 2):
        for tile in range(tl.where(half == 0, start, border), tl.where(half == 0, border, stop)):
            marked = tl.load(marks.data + block.to(tl.int64) * marks.stride + tile)
            right = lines(streamed, tile * WIDTH, length, WIDTH, cut)
            raw = tl.dot(left, right.T, input_precision="ieee")
            at = (tile * WIDTH + tl.arange(0, WIDTH))[None, :]
            tokens, columns = (at, mine[:, None]) if cut.weight else (mine[:, None], at)
            z, log2_p, p, g = differentiated(
                raw, tokens, columns, inside, marked, a, count if cut.weight else length
            )
            mass += tl.sum(tl.reshape(p, FOLDED), 1)
            if a.target is None:
                if of.flags.entropy:
                    entropy_sum += tl.sum(tl.reshape(p * log2_p, FOLDED), 1)
                # Columns beyond the end of the vocabulary (from index v on) have z = 0.
                if of.flags.mean:
                    logit_sum += tl.sum(tl.reshape(z, FOLDED), 1)
                if of.flags.top1:
                    highest = tl.maximum(highest, tl.max(tl.reshape(log2_p, FOLDED), 1))
            if out is not None:
                total = tl.dot(g.to(right.dtype), right, total, input_precision="ieee")
        if half == 0:
            total, mass = -total, -mass
    sums = tl.sum(mass, 1)
    if out is not None:
        if factor is not None:
            total *= tl.load(factor).to(tl.float32)
        if a.target is None:
            total *= per_row(a.z.factor, a.z, mine[:, None], inside)
        pointers, mask = pointers_of(out, part * count + mine, written, cut)
        tl.store(pointers, total, mask)
    if bias is not None:
        tl.store(bias + mine, sums, written)
    if a.target is None:
        sumexps, entropy_sums, logit_sums, max_logits = parts_of(of)
        place = part.to(tl.int64) * of.pitch + mine
        tl.store(sumexps + place, sums, written)
        if of.flags.entropy:
            tl.store(entropy_sums + place, tl.sum(entropy_sum, 1) * LN2, written)
        if of.flags.mean:
            tl.store(logit_sums + place, tl.sum(logit_sum, 1), written)
        if of.flags.top1:
            log2_max = tl.max(highest, 1) + tl.load(a.log2_sumexp + mine, written)
            tl.store(max_logits + place, log2_max * LN2, written)


# ---------------------------------------------------------------------- launches


def can_sweep(w: Tensor) -> bool:
    # Triton's interpreter multiplies the bits of bfloat16 operands as integers.
    exact = w.is_cuda or w.dtype != torch.bfloat16
    return exact and w.stride(1) == 1 and w.shape[1] <= WIDEST and accelerated(w)


def _sweep(
    stationary: Tensor,
    streamed: Tensor,
    a: Tokens,
    parts: int,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
    some: Tensor | None = None,
    of: Epilogue | None = None,  # For statistics.
    # For each of n tokens, the index of the token's hidden state in the matrix `streamed`; passed
    # only if the kernel computes the weight's gradient.
    place: Tensor | None = None,
) -> None:
    """Run the kernel over all tiles of the logits `stationary` [count, H] @ `streamed`.T [H,
    length], where one operand is the hidden states and the second operand is the weight. The tile
    sizes depend on the head's shape alone. A tile of logits needs a mask if the tile contains a
    token's target, contains the column whose logit is subtracted as a token's shift, or ends beyond
    the last row of the matrix `streamed`. A token whose target lies in a different rank's slice of
    the vocabulary causes a needless mask in an arbitrary tile, which costs time and changes no
    result."""
    (count, h), length, described = stationary.shape, len(streamed), can_fuse(stationary, streamed)
    depth = max(16, triton.next_power_of_2(h))
    shapes = TOKENS if place is None else COLUMNS
    rows, width, warps, stages = shapes[max(64, depth)] if stationary.element_size() == 2 else SMALL
    blocks, pitch, column = cdiv(count, rows), length // width + 1, a.column
    mine, others = torch.arange(count, device=column.device), column
    if place is not None:
        mine, others = column[place], place
    marks = column.new_zeros(blocks, pitch, dtype=torch.uint8)
    marks[:, -1] = 1
    marks.view(-1).index_fill_(0, (mine // rows * pitch + others // width) % marks.numel(), 1)
    shape = {"stationary": TileShape((rows, depth)), "streamed": TileShape((width, depth))}
    run = Launcher(
        narrow_kernel,
        tiles=shape if described else None,
        num_warps=warps,
        num_stages=stages,
    )
    operands = [m if described else matrix_of(m) for m in (stationary, streamed)]
    to = None if out is None else matrix_of(out.flatten(0, -2))
    cut = Cut(h, depth, rows, width, parts, described, place is not None)
    more = matrix_of(marks), to, bias, factor, some, a, of, count, length, cut
    run(blocks * parts, *operands, *more)


def narrow_partials(
    x: Tensor, w: Tensor, forward: Forward, sums: bool = False
) -> tuple[SoftmaxState, ShiftedSums | None]:
    parts = x.new_empty(PARTS, *x.shape, dtype=torch.float32) if sums else None
    swept: list[Tensor] = []

    def sweep(of: Epilogue) -> None:
        column = of.more[1].view(torch.int32)
        a = Tokens(column, None, of.shift * LOG2E.value, SoftmaxCoefficients(), of.z)
        _sweep(x, w, a, PARTS, parts, of=of._replace(z=None))
        swept.extend((of.shift.clone(), column.long(), of.shift))

    state = partials_of(statistics_of(x, w, forward, None, sweep=(PARTS, sweep)), forward.needs)
    if parts is None:
        return state, None
    before, column, after = swept
    return state, ShiftedSums(reduce(Tensor.add_, parts).clone(), before, column, after != before)


def _tokens(x: Tensor, w: Tensor, backward: Backward) -> Tokens:
    """Return the kernel inputs for the gradient, with the tokens in their given order."""
    transform = backward.transform
    column = backward.targets - backward.first
    target = torch.zeros_like(backward.logps)
    target_gradient_(target.unsqueeze(1), x, w, backward, torch.zeros_like(column))
    slope = transform.scale / transform.temperature
    c = backward.coefficients._replace(target=None).map(lambda t: t * slope)
    log2_sumexp = sum(backward.normalizer) * LOG2E.value
    return Tokens(column, target, log2_sumexp, c, scaling(transform, bias_of(x)))


def narrow_hidden(
    x: Tensor, w: Tensor, backward: Backward, sums: ShiftedSums | None = None
) -> Tensor:
    a = _tokens(x, w, backward)
    if sums is None:
        parts = x.new_empty(PARTS, *x.shape, dtype=torch.float32)
        if len(x):
            _sweep(x, w, a, PARTS, parts)
        return reduce(Tensor.add_, parts).clone()
    # For each token, `sums.rows` (a weighted sum of the rows of w) leaves out one row of w: the
    # target's row, or an arbitrary row if a different slice of the vocabulary holds the target.
    p = (sums.shift - sum(backward.normalizer)).exp()
    others = (backward.coefficients.prob * p).unsqueeze(1)
    g = backward.transform.vjp_(others.clone(), sums.shift.unsqueeze(1), is_z=True)[:, 0]
    g = torch.where(sums.column == a.column, a.target, g).unsqueeze(1)
    total = (sums.rows * others).addcmul_(g, w[sums.column].to(g.dtype))
    _sweep(x, w, a, 1, total, some=sums.far)
    return total


def narrow_weight_(
    x: Tensor,
    w: Tensor,
    backward: Backward,
    out: Tensor | None,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    a = _tokens(x, w, backward)
    place, c = torch.arange(len(x), device=x.device), a.c
    if c.prob is not None and c.entropy is c.uniform is None:
        negative = c.prob < 0
        before, border = negative.cumsum(0), -(-negative.sum() // BLOCK) * BLOCK
        place = torch.where(negative, before - 1, border + place - before)
        a = Tokens(
            a.column,
            torch.where(negative, -a.target, a.target),
            a.log2_sumexp - c.prob.abs().log2(),
            SoftmaxCoefficients(),
            a.z,
            border,
        )

    def padded(values: Tensor, fill: float = 0) -> Tensor:
        more = values.new_full(((cdiv(len(x), BLOCK) + 1) * BLOCK, *values.shape[1:]), fill)
        return more.index_copy_(0, place, values)

    z = a.z
    if z.temperature is not None:
        z = z._replace(temperature=padded(z.temperature, 1))
    a = Tokens(
        padded(a.column),
        padded(a.target),
        padded(a.log2_sumexp, NOTHING),
        a.c.map(padded),
        z,
        a.border,
    )
    _sweep(w, padded(x), a, 1, out, bias, factor, place=place)
