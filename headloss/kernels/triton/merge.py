"""Triton kernels that merge partial sums into softmax statistics, over the blocks of a matrix
product or over the ranks of a sharded vocabulary.

n tokens, v columns of this slice of the vocabulary, H hidden width, W ranks. One kernel launch adds
up the sums of all column blocks of the matmul x @ w.T, and computes the statistics by the formulas
of `softmax.finish`. If a token's shift (the logit subtracted in exp(z - shift)) is far below the
token's largest logit, the same launch computes the token's sums again from recomputed logits. For
every token whose shift is not far below the token's largest logit, the kernel writes exp(z - shift)
= 1 into the tile of exponentials, at the column whose logit is the shift.

A token's statistics depend neither on the number n of tokens nor on the token's position. The order
in which a Triton reduction adds depends on the register layout, which depends on the divisors of
addresses. The kernels sum each tile in an explicit order, independent of the register layout: the
tile's first half is added to its second half, again and again. No kernel is compiled for a
particular number n of tokens, so that all numbers of tokens run the same instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...statistics.softmax import STATISTICS, Normalizer, Statistics
from ..interface import Measured
from .chosen import shift_column
from .formulas import FLOOR, block_partials, exp, folded, log1p, merged, per_row, transformed
from .launch import Launcher, cdiv
from .records import LogitScaling, Matrix
from .tiles import biased
from .versions import Constant

# Upper limit for a token's sum of exp(z - shift); a larger sum means that the shift is too small.
FAR = Constant(2.0**80)
ROWS = 16  # Tokens of a program.


class Flags(NamedTuple):
    """Flags of the statistics, in the order of `STATISTICS`: 1 for a wanted statistic, else
    None."""

    logp: int | None
    lse: int | None
    entropy: int | None
    mean: int | None
    top1: int | None


class Epilogue(NamedTuple):
    """Arguments of the epilogue that runs after each tile of the matmul x @ w.T and sums
    exponentials of the tile's logits over the columns."""

    # Shift [n]: the logit of one column per token, subtracted from all logits before exp.
    shift: Tensor
    # Two rows, each of one number per token: the target's logit (-inf if this slice of the
    # vocabulary lacks the target), and the index of the column whose logit is `shift` (an int32
    # stored bit for bit as a float32).
    more: Tensor
    # Partial sums of each token over each block of columns, [.., blocks, pitch]; `pitch` is n
    # rounded up to a multiple of 16.
    parts: Tensor
    # Row length of the tensors `parts` and `more`: the number n of tokens, rounded up to a multiple
    # of 16 so that every row is aligned.
    pitch: int
    # Number of elements of each array in `parts` (sums of exp, entropy sums, logit sums, largest
    # logits): the number of column blocks times `pitch`.
    stride: int
    z: LogitScaling
    flags: Flags


class Merge(NamedTuple):
    """Operands of the kernel that merges the partial sums of a matmul's column blocks. The kernel
    writes each result as a row [n] into the buffer of `epilogue.more`, behind the two rows (target
    logits, shift columns) that the matmul's epilogue has written. The functions `measured` and
    `partials_of` make named tuples of the kernel's result rows."""

    x: Matrix  # Shape [n, H].
    w: Matrix  # Shape [v, H].
    exp_tile: Matrix | None  # Tile of exp(z - shift), [n, v].
    # Flag: 1 to store partial sums (an online-softmax state), None to store finished statistics.
    partials: int | None
    epilogue: Epilogue


@triton.jit
def parts_of(of):
    """Return pointers to each block's sums of exp, entropy sums, logit sums and largest logits;
    pointers of statistics that are not wanted are meaningless."""
    entropy_sums = of.parts + of.stride
    logit_sums = entropy_sums + of.stride if of.flags.entropy else entropy_sums
    max_logits = logit_sums + of.stride if of.flags.mean else logit_sums
    return of.parts, entropy_sums, logit_sums, max_logits


@triton.jit
def summed_again(of, rows, far, v, h, ROWS: tl.constexpr):
    """For each token of the mask `far`, whose shift is far below the token's largest logit,
    recompute the logits z, return max_logit, sumexp_m1 and entropy_sum, and store exp(z -
    max_logit) in `of.exp_tile`, if given. One GPU program reads the weight only once for all its
    tokens."""
    COLUMNS: tl.constexpr = 128  # Vocabulary columns in one tile of recomputed logits.
    DEPTH: tl.constexpr = 64  # Elements of the hidden width H that one step of the matmul reads.
    WRITES: tl.constexpr = of.exp_tile is not None
    scaling = of.epilogue.z
    x = (of.x.data + tl.where(far, rows, 0) * of.x.stride)[None, :]
    outer = per_row(scaling.outer, scaling, rows, far)
    none = tl.zeros((ROWS,), tl.float32)
    sums = none + float("-inf"), none - 1, none
    for sweep in range(1 + WRITES):
        for start in range(0, v, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            w = (of.w.data + tl.minimum(columns, v - 1).to(tl.int64) * of.w.stride)[None, :]
            z = tl.zeros((ROWS, COLUMNS), tl.float32)
            for k in range(0, h, DEPTH):
                at = k + tl.arange(0, DEPTH)[:, None]
                a = tl.load(x + at, mask=at < h, other=0.0)
                b = tl.load(w + at, mask=at < h, other=0.0)
                z = tl.dot(a.T, b, z, input_precision="ieee")
            inside = (columns < v)[:, None]
            z = transformed(biased(z, scaling, columns[None, :], v).T, scaling, outer)
            z = tl.where(inside, z, float("-inf"))
            if sweep == 0:
                sums = merged(sums, block_partials(z, inside, of.epilogue.flags.entropy))
            elif WRITES:
                e = tl.exp(tl.maximum(z - sums[0], FLOOR))
                to = of.exp_tile.data + rows * of.exp_tile.stride
                tl.store(to[None, :] + columns[:, None], e, mask=inside & far[None, :])
    return sums


@triton.jit
def write_statistics(out, pitch, rows, inside, highest, sums, vocabulary, flags):
    """Write the normalizer and the statistics, as computed by `softmax.finish`, to rows of `out`.

    `highest` is the pair (max z, sum exp(z - max z) - 1) of each token's logits z, from which the
    softmax normalizer is computed. The statistics are computed from the argument `sums` and not
    from the argument `highest`, so that a request for the statistic top1 changes no bit of another
    statistic.
    """
    top, above = highest
    max_logit, sumexp_m1, entropy_sum, logit_sum, target = sums
    log_sum = log1p(sumexp_m1)
    tl.store(out + rows, top, mask=inside)
    tl.store(out + pitch + rows, log1p(above), mask=inside)
    out += 2 * pitch
    if flags.logp:
        tl.store(out + rows, (target - max_logit) - log_sum, mask=inside)
        out += pitch
    if flags.lse:
        tl.store(out + rows, max_logit + log_sum, mask=inside)
        out += pitch
    if flags.entropy:
        tl.store(out + rows, log_sum - entropy_sum / (1 + sumexp_m1), mask=inside)
        out += pitch
    if flags.mean:
        tl.store(out + rows, logit_sum / vocabulary, mask=inside)
        out += pitch
    if flags.top1:
        tl.store(out + rows, (target >= top).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["n"])
def finish_kernel(of, n, v, h, vocabulary, ROWS: tl.constexpr):
    """Compute softmax statistics from the partial sums of all blocks of columns. The argument `of`
    is a `Merge` record, and `vocabulary` is the number of vocabulary columns of all ranks."""
    HALVES: tl.constexpr = 6
    # One loop iteration adds the partial sums of BLOCKS = 64 blocks of vocabulary columns.
    BLOCKS: tl.constexpr = 1 << HALVES
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    more = of.epilogue.more
    pitch = of.epilogue.pitch
    blocks = of.epilogue.stride // pitch
    ENTROPY: tl.constexpr = of.epilogue.flags.entropy
    MEAN: tl.constexpr = of.epilogue.flags.mean
    TOP1: tl.constexpr = of.epilogue.flags.top1
    sumexps, entropy_sums, logit_sums, max_logits = parts_of(of.epilogue)
    out = more + 2 * pitch
    sumexp_tile = tl.zeros((BLOCKS, ROWS), tl.float32)
    entropy_tile = tl.zeros((BLOCKS, ROWS), tl.float32)
    logit_tile = tl.zeros((BLOCKS, ROWS), tl.float32)
    max_tile = tl.full((BLOCKS, ROWS), float("-inf"), tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        place = block.to(tl.int64)[:, None] * pitch + rows[None, :]
        here = (block < blocks)[:, None] & inside[None, :]
        sumexp_tile += tl.load(sumexps + place, mask=here, other=0.0)
        if ENTROPY:
            entropy_tile += tl.load(entropy_sums + place, mask=here, other=0.0)
        if MEAN:
            logit_tile += tl.load(logit_sums + place, mask=here, other=0.0)
        if TOP1:
            max_tile = tl.maximum(max_tile, tl.load(max_logits + place, here, other=float("-inf")))
    sumexp_m1 = folded(sumexp_tile, ROWS, HALVES)
    entropy_sum = folded(entropy_tile, ROWS, HALVES)
    logit_sum = folded(logit_tile, ROWS, HALVES)
    shift = tl.load(of.epilogue.shift + rows, mask=inside, other=0.0)
    target = tl.load(more + rows, mask=inside, other=0.0)

    column = shift_column(of.epilogue, rows, inside)
    far = inside & ((sumexp_m1 < FAR) == 0)
    if of.exp_tile is not None:
        place = of.exp_tile.data + rows * of.exp_tile.stride + column
        tl.store(place, 1.0, mask=inside & (far == 0))
    if tl.max(far.to(tl.int32), 0) > 0:
        of_far = summed_again(of, rows, far, v, h, ROWS)
        shift = tl.where(far, of_far[0], shift)
        sumexp_m1 = tl.where(far, of_far[1], sumexp_m1)
        entropy_sum = tl.where(far, of_far[2], entropy_sum)
        tl.store(of.epilogue.shift + rows, shift, mask=far)

    max_logit = shift
    above = sumexp_m1
    # Convert the sums of exp(z - shift) to sums of exp(z - largest logit); if the shift is the
    # largest logit, nothing changes.
    if TOP1:
        max_logit = tl.maximum(tl.max(max_tile, 0), shift)
        log_scale = shift - max_logit
        scale = exp(log_scale)
        mass = 1 + sumexp_m1
        above = tl.where(log_scale == 0, sumexp_m1, mass * scale - 1)
    if of.partials:
        tl.store(out + rows, max_logit, mask=inside)
        tl.store(out + pitch + rows, above, mask=inside)
        tl.store(out + 2 * pitch + rows, target, mask=inside)
        if ENTROPY:
            if TOP1:
                entropy_sum = scale * (entropy_sum + mass * log_scale)
            tl.store(out + 3 * pitch + rows, entropy_sum, mask=inside)
        if MEAN:
            tl.store(out + (4 if ENTROPY else 3) * pitch + rows, logit_sum, mask=inside)
    else:
        flags = of.epilogue.flags
        sums = (shift, sumexp_m1, entropy_sum, logit_sum, target)
        write_statistics(out, pitch, rows, inside, (max_logit, above), sums, vocabulary, flags)


@triton.jit(do_not_specialize=["rank_stride", "n"])
def merge_kernel(
    slices,  # Partial statistics of W ranks, [W, fields, n], with the fields of `partials_of`.
    rank_stride,
    ranks,
    n,
    vocabulary,
    flags,  # A `Flags` record.
    out,  # Shape [.., n].
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    max_logit = tl.full((ROWS,), float("-inf"), tl.float32)
    of_rank = slices + rows
    for _ in range(ranks):
        max_logit = tl.maximum(max_logit, tl.load(of_rank, mask=inside, other=0.0))
        of_rank += rank_stride
    sumexp_m1 = tl.zeros((ROWS,), tl.float32)
    entropy_sum = tl.zeros((ROWS,), tl.float32)
    logit_sum = tl.zeros((ROWS,), tl.float32)
    target = tl.full((ROWS,), float("-inf"), tl.float32)
    taken = rows < 0
    of_rank = slices + rows
    for _ in range(ranks):
        max_of_rank = tl.load(of_rank, mask=inside, other=0.0)
        sumexp_m1_of_rank = tl.load(of_rank + n, mask=inside, other=0.0)
        target = tl.maximum(target, tl.load(of_rank + 2 * n, mask=inside, other=0.0))
        top = max_of_rank == max_logit
        log_scale = tl.maximum(tl.where(top, 0.0, max_of_rank - max_logit), FLOOR)
        scale = exp(log_scale)
        mass = 1 + sumexp_m1_of_rank
        # The sum `sumexp_m1` leaves out the term exp(0) = 1 of the largest logit: leave out only
        # one such term, even if the slices of several ranks contain an equal largest logit.
        sumexp_m1 += tl.where(top & (taken == 0), sumexp_m1_of_rank, mass * scale)
        taken = taken | top
        if flags.entropy:
            entropy_sum_of_rank = tl.load(of_rank + 3 * n, mask=inside, other=0.0)
            entropy_sum += scale * (entropy_sum_of_rank + mass * log_scale)
        if flags.mean:
            fields = 3
            if flags.entropy:
                fields = 4
            logit_sum += tl.load(of_rank + fields * n, mask=inside, other=0.0)
        of_rank += rank_stride
    sums = max_logit, sumexp_m1, entropy_sum, logit_sum, target
    write_statistics(out, n, rows, inside, (max_logit, sumexp_m1), sums, vocabulary, flags)


launch_finish = Launcher(finish_kernel, num_warps=4, ROWS=ROWS)
launch_merge = Launcher(merge_kernel, num_warps=4)


def flags_of(needs: frozenset[str]) -> Flags:
    return Flags(*[1 if name in needs else None for name in STATISTICS])


def names(needs: frozenset[str]) -> list[str]:
    """Return the names of the wanted statistics, in their order."""
    return [name for name in STATISTICS if name in needs]


def measured(rows: Sequence[Tensor], needs: frozenset[str]) -> Measured:
    """Return the statistics and the softmax normalizer (a `Measured`) from the rows that
    `write_statistics` wrote."""
    max_logit, log_sum, *statistics = rows
    by_name: Any = dict(zip(names(needs), statistics, strict=True))
    return Measured(Statistics(**by_name), Normalizer(max_logit, log_sum))


def finish(slices: Tensor, needs: frozenset[str], vocabulary: int) -> Measured:
    ranks, _, n = slices.shape
    out = slices.new_empty(2 + len(names(needs)), n)
    if n:
        arguments = slices, slices.stride(0), ranks, n, float(vocabulary), flags_of(needs), out
        launch_merge(cdiv(n, 128), *arguments, ROWS=128)
    return measured(out.unbind(0), needs)
