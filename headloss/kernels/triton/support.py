"""Triton kernels for a softmax over a set of allowed columns per token: logits, statistics, the
gradient of the logits, and the products of this gradient with weight and hidden states.

n tokens, P pairs (token, allowed column), H hidden width. Matrices are passed as `Strided` (pointer
and two strides); raw logits, values and gradients are vectors [P] with one element per pair (token,
allowed column). One GPU program serves one token or, for the weight gradient, one column. For each
pair (token, allowed column), the forward and the backward pass together read a row of the weight
twice and a row of the hidden states once. Reading one row of H 16-bit numbers for each of P pairs
moves 2PH bytes. Each GPU program keeps many loads in flight, so that the bandwidth of GPU memory or
of the L2 cache limits the speed; tensor cores would not make the dot products faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...statistics.softmax import SoftmaxState
from ..interface import Backward, Forward, Support
from .formulas import grad_z, log_softmax, token_of, under_cap
from .launch import Launcher, cdiv
from .records import Matrix, block_width, empty_partials, gradient_inputs, scaling, strided
from .statistics import PartialsInputs, columns_at, partials_kernel

PAIRS = 128  # Number of pairs (token, column) that a program handles at once.
ROWS = 16
DEPTH = 256  # Elements of a weight row that a program holds while it computes logits.
SUMMED = 8
# A program adds SUMMED rows of WIDTH columns at once; each thread holds some of the columns of all
# SUMMED rows.
WIDTH = 1024
# Largest number of pairs (token, column) that one program sums, if some tokens have many pairs; a
# second kernel adds the programs' sums.
PIECE = 512


# ---------------------------------------------------------------------- statistics, gradient


@triton.jit
def logits_kernel(
    x, w, support, out, h, ADD: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    end = tl.load(support.offsets + token + 1)
    for start in range(tl.load(support.offsets + token), end, ROWS):
        at = start + tl.arange(0, ROWS)
        column, present = columns_at(support, at, end)
        total = tl.zeros((ROWS, DEPTH), tl.float32)
        rows = w.data + column[:, None] * w.stride
        # Skip a block of pairs (token, column) without a column in [first, first + size): such a
        # block is padding at the end of a token's pairs.
        for k in range(0, h * tl.max(present.to(tl.int32), 0), DEPTH):
            depth = k + tl.arange(0, DEPTH)
            a = tl.load(x.data + token * x.stride + depth * x.step, mask=depth < h, other=0.0)
            inside = present[:, None] & (depth < h)[None, :]
            b = tl.load(rows + (depth * w.step)[None, :], mask=inside, other=0.0)
            total += a.to(tl.float32)[None, :] * b.to(tl.float32)
        value = tl.sum(total, 1)
        if ADD:
            value += tl.load(out + at, mask=at < end, other=0.0)
        tl.store(out + at, value, mask=at < end)


launch_logits = Launcher(logits_kernel, num_warps=4)


def support_logits(x: Tensor, w: Tensor, support: Support, onto: Tensor | None = None) -> Tensor:
    ids = support.ids
    n = len(support.offsets) - 1
    h = x.shape[1]
    out = torch.zeros(len(ids), dtype=torch.float32, device=x.device) if onto is None else onto
    if n and len(ids):
        arguments = (strided(x), strided(w), support, out, h)
        launch_logits(n, *arguments, ADD=onto is not None, ROWS=ROWS, DEPTH=block_width(h, DEPTH))
    return out


launch_partials = Launcher(partials_kernel, num_warps=1)


def support_partials(raw: Tensor, support: Support, forward: Forward) -> SoftmaxState:
    targets, _, transform, needs = forward
    result = empty_partials(raw, len(targets), needs)
    if len(targets):
        of = PartialsInputs(Matrix(raw, 0), result, targets, None, scaling(transform), support)
        launch_partials(len(targets), of, support.first, 0, BLOCK=PAIRS, ONTO=False)
    return result


@triton.jit
def gradient_kernel(raw, out, support, a, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    outer, factor, normalizer, of_token, target_gradient = token_of(a, token)
    y = tl.load(a.targets + token) - support.first
    end = tl.load(support.offsets + token + 1)
    for start in range(tl.load(support.offsets + token), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        column, present = columns_at(support, at, end)
        logit = tl.load(raw + at, mask=present, other=0.0)
        log_p = log_softmax(logit, a.z, outer, *normalizer)
        g = grad_z(tl.exp(log_p), log_p, of_token, a.c)
        if a.logps is not None:
            g = tl.where(column == y, target_gradient, g)
        g = under_cap(g * factor, logit, a.z)
        tl.store(out + at, tl.where(present, g, 0.0), mask=at < end)


launch_gradient = Launcher(gradient_kernel, num_warps=1)


def support_gradient(raw: Tensor, support: Support, backward: Backward) -> Tensor:
    # Start from zeros: elements of `raw` with an index of offsets[n] or more belong to no token, so
    # that no GPU program writes their gradients.
    out = torch.zeros_like(raw)
    if len(backward.targets) and len(raw):
        a = gradient_inputs(backward)
        launch_gradient(len(backward.targets), raw, out, support, a, BLOCK=PAIRS)
    return out


# ---------------------------------------------------------------------- their products


class Pieces(NamedTuple):
    """Runs (pieces) of at most PIECE consecutive pairs (token, column), into which each token's
    pairs are divided. Token t has the pieces ends[t - 1] to ends[t] - 1, where ends[t] is the
    number of pieces of the tokens up to and including t."""

    # Token to which each of M pieces belongs, [M], where a piece is a run of at most PIECE pairs of
    # one token; an unused entry holds n, the number of tokens.
    tokens: Tensor
    ends: Tensor  # Shape [n].
    # Cumulative sum [n], over the tokens, of the number of pieces (runs of at most PIECE = 512
    # pairs of one token); a token whose pairs fit into one piece counts as 0.
    cut_ends: Tensor
    # Indices [R] of the tokens with more than PIECE = 512 pairs (token, column); an unused entry
    # holds n, the number of tokens.
    cut: Tensor


def pieces_of(starts: Tensor, count: int, every: bool) -> Pieces:
    """Cut each token's pairs (token, column), `count` in all, into pieces of at most PIECE pairs.
    With every=True, a token without any pair gets one empty piece (run of pairs)."""
    n = len(starts) - 1
    device = starts.device
    pieces = (starts.diff() + (PIECE - 1)).div(PIECE, rounding_mode="floor")
    pieces = pieces.clamp_min(1) if every else pieces
    several = pieces > 1
    most = count // PIECE
    ends = pieces.cumsum(0)
    cut_ends = torch.where(several, pieces, 0).cumsum(0)
    at = torch.arange((n if every else min(n, count)) + most, device=device)
    cut = torch.arange(1, most + 1, device=device)
    return Pieces(
        torch.searchsorted(ends, at, right=True),
        ends,
        cut_ends,
        torch.searchsorted(several.cumsum(0), cut),
    )


@triton.jit
def store_row(out, row, depth, h, value, ADD: tl.constexpr):
    """Store a row of a gradient; with `ADD`, add the gradient to the row in memory."""
    to = out.data + row * out.stride + depth * out.step
    if ADD:
        value += tl.load(to, mask=depth < h, other=0.0).to(tl.float32)
    tl.store(to, value.to(out.data.dtype.element_ty), mask=depth < h)


@triton.jit
def count_of(ends, token):
    """Return ends[token] and ends[token] - ends[token - 1], where `ends` are the cumulative numbers
    of pieces (runs of consecutive pairs) of the tokens."""
    end = tl.load(ends + token)
    return end, end - tl.load(ends + token - 1, mask=token > 0, other=0)


@triton.jit
def gathered(
    values,
    support,
    rows,
    begin,
    end,
    depth,
    h,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the sum of values[i] * rows[column_i, depth] over the pairs i (of a token and a
    vocabulary column, column_i) from `begin` to `end`, where `depth` is a range of columns of
    `rows`. If `WINDOW` is True, a pair whose column lies outside of the vocabulary slice [first,
    first + size) adds 0; if `WINDOW` is False, columns are not checked."""
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(begin, end, ROWS):
        at = start + tl.arange(0, ROWS)
        g = tl.load(values + at, mask=at < end, other=0.0)
        column = tl.load(support.ids + at, mask=at < end, other=0)
        if WINDOW:
            column -= support.first
            g = tl.where((column >= 0) & (column < support.size), g, 0.0)
        inside = (g != 0)[:, None] & (depth < h)[None, :]
        place = column[:, None] * rows.stride + (depth * rows.step)[None, :]
        x = tl.load(rows.data + place, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(g[:, None] * x, 0)
    return total


@triton.jit
def sums_kernel(
    values,
    support,
    rows,
    out,
    # `Pieces`, the division of each token's pairs (token, column) into short runs; None: no
    # division.
    pieces,
    # Output with one partial sum [h] per piece, for tokens whose pairs (token, column) are cut into
    # several pieces of at most PIECE pairs.
    sums,
    h,
    n,
    # Number of blocks of columns into which an output row [h] is divided. With `pieces=None`, one
    # GPU program computes one block of columns of one token's output row.
    blocks,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if pieces is None:
        token = program // blocks  # Neighbouring programs read the same rows.
        depth = program % blocks * WIDTH + tl.arange(0, WIDTH)
        begin = tl.load(support.offsets + token)
        end = tl.load(support.offsets + token + 1)
        value = gathered(values, support, rows, begin, end, depth, h, ROWS, WIDTH, True)
        store_row(out, token, depth, h, value, ADD)
    else:
        # One GPU program sums all h columns of a piece (a run of pairs of one token). If several
        # programs shared the h columns of a piece, each program would spend more time on finding
        # the pairs of the piece than on its part of the sum.
        token = tl.load(pieces.tokens + program)
        if token < n:
            last, several = count_of(pieces.ends, token)
            begin = tl.load(support.offsets + token) + (program - (last - several)) * PIECE
            end = tl.minimum(begin + PIECE, tl.load(support.offsets + token + 1))
            slot = tl.load(pieces.cut_ends + token) - (last - program)
            for k in range(0, h, WIDTH):
                depth = k + tl.arange(0, WIDTH)
                value = gathered(values, support, rows, begin, end, depth, h, ROWS, WIDTH, False)
                if several == 1:
                    store_row(out, token, depth, h, value, ADD)
                else:
                    tl.store(sums + slot * h + depth, value, mask=depth < h)


@triton.jit
def pieces_kernel(
    sums,
    pieces,
    out,
    h,
    n,
    # Length R of the tensor `pieces.cut`, which lists the tokens with more than PIECE pairs (token,
    # column).
    count,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    depth = program // count * WIDTH + tl.arange(0, WIDTH)
    token = tl.load(pieces.cut + program % count)
    if token < n:
        end, several = count_of(pieces.cut_ends, token)
        total = tl.zeros((WIDTH,), tl.float32)
        for piece in range(end - several, end):
            total += tl.load(sums + piece * h + depth, mask=depth < h, other=0.0)
        store_row(out, token, depth, h, total, ADD)


launch_sums = Launcher(sums_kernel, num_warps=4)
launch_pieces = Launcher(pieces_kernel, num_warps=4)


def support_sums(
    values: Tensor,
    rows: Tensor,
    support: Support,
    out: Tensor,
    add: bool = False,
    uneven: bool = False,
) -> None:
    n, h = out.shape
    count = len(values)
    width = block_width(h, WIDTH)
    blocks = cdiv(h, width)
    options = {"ADD": add, "ROWS": SUMMED, "WIDTH": width, "PIECE": PIECE}
    operands = values, support, strided(rows), strided(out)
    if not uneven:
        if n:
            launch_sums(n * blocks, *operands, None, None, h, n, blocks, **options)
        return
    pieces = pieces_of(support.offsets, count, every=not add)
    if not len(pieces.tokens):
        return
    # If a token's pairs (token, id) are cut into several pieces of at most PIECE = 512 pairs, at
    # least half of the token's pieces hold exactly PIECE pairs.
    sums = torch.empty(2 * (count // PIECE) + 1, h, dtype=torch.float32, device=out.device)
    launch_sums(len(pieces.tokens), *operands, pieces, sums, h, n, blocks, **options)
    # Since a token's ids are distinct, a token has more than PIECE = 512 pairs (token, id) only if
    # the matrix `rows` has more than PIECE rows.
    if len(pieces.cut) and len(rows) > PIECE:
        arguments = (sums, pieces, strided(out), h, n, len(pieces.cut))
        launch_pieces(len(pieces.cut) * blocks, *arguments, ADD=add, WIDTH=width)
