"""A narrow head is attention whose keys and values are the weight: sweeps over tiles of logits that
never leave the chip.

n tokens, v columns of the vocabulary, H hidden width, at most WIDEST, padded to a power of two in
the kernel. The forward sweep gives a token's statistics, and on request

    sums = sum_j exp(z_j - shift) dz_j/draw_j w_j    over all columns but the shift's own,

of which the hidden gradient is made where only c_target and c_prob are there. The gradient's sweep
makes each tile again, as its gradient, and multiplies it on the spot: by hidden states for the
weight's gradient, by the weight for the hidden gradient of any coefficients.

The shift is the logit of one column per token, as in product.py. The vocabulary has PARTS, whose
sums are added in one order: few tokens fill a GPU, and a token's bits depend on no other token. A
table says which tiles hold a column treated apart, or the end: no other tile needs a mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...statistics.softmax import Normalizer, SoftmaxCoefficients, SoftmaxState
from ..interface import Backward, Forward, ShiftedSums, partials_of
from .formulas import (
    LN2,
    LOG2E,
    coefficient,
    exp,
    grad_z,
    gradient_from_logp,
    per_row,
    tanh_and_slope,
    token_of,
    under_cap_at,
)
from .launch import Launcher, TileShape, cdiv
from .merge import Epilogue, parts_of, shift_column
from .product import LOWEST, accelerated, bias_of, can_fuse, statistics_of
from .records import GradientInputs, Matrix, gradient_inputs, matrix_of, scaling
from .tiles import biased

WIDEST = 256  # hidden width
PARTS = 16  # of the vocabulary


class Shape(NamedTuple):  # the numbers to tune on a device (benchmarks/studies/narrow.py)
    rows: int  # of a tile
    width: int
    warps: int
    stages: int


# Of a sweep whose programs own tokens, or columns, at a padded hidden width.
TOKENS = {64: Shape(64, 128, 4, 4), 128: Shape(128, 64, 4, 3), 256: Shape(128, 64, 8, 3)}
COLUMNS = {64: Shape(64, 64, 4, 3), 128: Shape(64, 64, 4, 3), 256: Shape(64, 64, 4, 2)}
SMALL = Shape(32, 32, 4, 1)  # of float32, and of a GPU with less shared memory


class Cut(NamedTuple):
    """What a sweep is compiled for."""

    h: int
    depth: int  # h, padded
    rows: int
    width: int
    parts: int
    described: bool  # x and w are descriptors, for the tensor memory accelerator


@triton.jit
def pointers_of(of, at, count, cut: tl.constexpr):
    """To rows of a Matrix [count, h], padded, and which of their elements there are."""
    k = tl.arange(0, cut.depth)[None, :]
    mask = (at < count)[:, None] & (k < cut.h)
    return of.data + at.to(tl.int64)[:, None] * of.stride + k, mask


@triton.jit
def lines(of, start, count, SIZE: tl.constexpr, cut: tl.constexpr):
    """[SIZE, depth] rows of a matrix, 0 beyond."""
    if cut.described:
        return of.load([start, 0])
    else:
        pointers, mask = pointers_of(of, start + tl.arange(0, SIZE), count, cut)
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def place_of(n, v, cut: tl.constexpr):
    """Of a program that owns tokens: its block of rows and its part, from tile to tile."""
    blocks, tiles = tl.cdiv(n, cut.rows), tl.cdiv(v, cut.width)
    part, size = tl.program_id(0) // blocks, tl.cdiv(tiles, cut.parts)
    start, stop = tl.minimum(part * size, tiles), tl.minimum((part + 1) * size, tiles)
    return tl.program_id(0) % blocks, part, start, stop


@triton.jit
def capped(raw, columns, z, v):
    """Raw logits with their bias, under the soft cap, and the cap's slope."""
    raw = biased(raw, z, columns, v)
    slope = raw
    if z.inner is not None:
        raw, slope = tanh_and_slope(raw * z.inner)
    return raw, slope


@triton.jit(do_not_specialize=["n"])
def narrow_sums_kernel(
    x,  # [n, H], as `lines` takes it
    w,  # [v, H]
    of,  # Epilogue, whose blocks are the vocabulary's parts
    sums,  # Matrix [parts * n, H] float32, or None
    marks,  # Matrix [blocks of rows, tiles + 1]
    n,
    v,
    cut: tl.constexpr,
):
    ROWS: tl.constexpr = cut.rows
    DEPTH: tl.constexpr = cut.depth
    block, part, start, stop = place_of(n, v, cut)
    rows = block * cut.rows + tl.arange(0, cut.rows)
    inside = rows < n
    a = lines(x, block * cut.rows, n, cut.rows, cut)
    mass = tl.zeros((ROWS,), tl.float32)
    entropy_sum, logit_sum, highest = mass, mass, mass + LOWEST
    outer = per_row(mass + of.z.outer, of.z, rows, inside)
    shift = tl.load(of.shift + rows, mask=inside, other=0.0)
    column = shift_column(of, rows, inside)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    mark = marks.data + block.to(tl.int64) * marks.stride
    marked = tl.load(mark + start)
    for tile in range(start, stop):
        following = tl.load(mark + tile + 1)
        b = lines(w, tile * cut.width, v, cut.width, cut)
        columns = tile * cut.width + tl.arange(0, cut.width)
        z, slope = capped(tl.dot(a, b.T, input_precision="ieee"), columns, of.z, v)
        if of.flags.mean:  # columns beyond the last were read as 0
            logit_sum += tl.sum(z, 1)
        below = z * (outer * LOG2E)[:, None] - (shift * LOG2E)[:, None]
        if marked != 0:
            apart = (columns[None, :] == column[:, None]) | (columns >= v)[None, :]
            below = tl.where(apart, LOWEST, below)
        e = tl.exp2(below)
        mass += tl.sum(e, 1)
        if of.flags.entropy:
            entropy_sum += tl.sum(e * below, 1)
        if of.flags.top1:
            highest = tl.maximum(highest, tl.max(below, 1))
        if sums is not None:
            if of.z.inner is not None:
                e *= slope
            total = tl.dot(e.to(b.dtype), b, total, input_precision="ieee")
        marked = following
    sumexps, entropy_sums, logit_sums, max_logits = parts_of(of)
    place = part.to(tl.int64) * of.pitch + rows
    tl.store(sumexps + place, mass, mask=inside)
    if of.flags.entropy:
        tl.store(entropy_sums + place, entropy_sum * LN2, mask=inside)
    if of.flags.mean:
        tl.store(logit_sums + place, logit_sum * outer, mask=inside)
    if of.flags.top1:
        tl.store(max_logits + place, highest * LN2 + shift, mask=inside)
    if sums is not None:
        total *= per_row(mass * 0 + of.z.factor, of.z, rows, inside)[:, None]
        pointers, mask = pointers_of(sums, part * n + rows, (part + 1) * n, cut)
        tl.store(pointers, total, mask=mask)


@triton.jit
def tile_gradient(raw, rows, columns, marked, a, first, n, v):
    """dL/draw of a tile; `a` is GradientInputs whose normalizer is (log2 sum exp z,)."""
    inside = rows < n
    none = tl.zeros(rows.shape, tl.float32)
    z, slope = capped(raw, columns, a.z, v)
    outer = per_row(none + a.z.outer, a.z, rows, inside) * LOG2E
    factor = per_row(none + a.z.factor, a.z, rows, inside)
    log2_sumexp = tl.load(a.normalizer[0] + rows, mask=inside, other=0.0)
    below = z * outer[:, None] - log2_sumexp[:, None]  # log p in units of log 2
    prob = coefficient(a.c.prob, rows, inside) * factor
    entropy = coefficient(a.c.entropy, rows, inside) * factor
    uniform = coefficient(a.c.uniform, rows, inside) * factor
    at = prob[:, None], (entropy * LN2)[:, None], uniform[:, None]
    g = grad_z(tl.exp2(below), below, at, a.c)
    if marked != 0:
        column = tl.load(a.targets + rows, mask=inside, other=-1) - first
        chosen = columns[None, :] == tl.where(inside, column, -1)[:, None]
        log_p = tl.load(a.logps + rows, mask=inside, other=0.0)
        target = coefficient(a.c.target, rows, inside) * factor
        of_target = gradient_from_logp(log_p, target, (prob, entropy, uniform), a.c)
        g = tl.where((columns < v)[None, :], tl.where(chosen, of_target[:, None], g), 0.0)
    if a.z.inner is not None:
        g *= slope
    return g


@triton.jit(do_not_specialize=["first", "n"], do_not_specialize_on_alignment=["some"])
def narrow_gradient_kernel(
    x,
    w,
    out,  # Matrix [v, H], or [parts * n, H] float32
    bias,  # [v] float32: the sums of columns, or None
    factor,  # [] of the result but for the bias, or None
    some,  # [n] bool: the rows that are written, of hidden states; None: all
    marks,
    a,
    first,
    n,
    v,
    cut: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    block, part, start, stop = place_of(n, v, cut)
    SIZE: tl.constexpr = cut.width if WEIGHT else cut.rows
    DEPTH: tl.constexpr = cut.depth
    if WEIGHT:
        part, start, stop = tl.program_id(0), 0, tl.cdiv(n, cut.rows)
        place, last = part * cut.width + tl.arange(0, cut.width), v
        mine = lines(w, part * cut.width, v, cut.width, cut)
    else:
        rows = block * cut.rows + tl.arange(0, cut.rows)
        place, last = part * n + rows, (part + 1) * n
        mine = lines(x, block * cut.rows, n, cut.rows, cut)
    written = place < last
    if some is not None:
        written = tl.load(some + rows, mask=rows < n, other=0).to(tl.int1)
        stop = tl.where(tl.max(written.to(tl.int32), 0) > 0, stop, start)
    total = tl.zeros((SIZE, DEPTH), tl.float32)
    bias_total = tl.zeros((SIZE,), tl.float32)
    for step in range(start, stop):
        row = (step if WEIGHT else block) * cut.rows
        column = (part if WEIGHT else step) * cut.width
        marked = tl.load(marks.data + row // cut.rows * marks.stride + column // cut.width)
        rows, columns = row + tl.arange(0, cut.rows), column + tl.arange(0, cut.width)
        if WEIGHT:
            theirs = lines(x, row, n, cut.rows, cut)
            raw = tl.dot(theirs, mine.T, input_precision="ieee")
        else:
            theirs = lines(w, column, v, cut.width, cut)
            raw = tl.dot(mine, theirs.T, input_precision="ieee")
        g = tile_gradient(raw, rows, columns, marked, a, first, n, v)
        if bias is not None:
            bias_total += tl.sum(g, 0)
        g = g.to(theirs.dtype)
        total = tl.dot(g.T if WEIGHT else g, theirs, total, input_precision="ieee")
    if factor is not None:
        total *= tl.load(factor).to(tl.float32)
    if out is not None:
        pointers, mask = pointers_of(out, place, last, cut)
        tl.store(pointers, total, mask=mask & written[:, None])
    if bias is not None:
        tl.store(bias + place, bias_total, mask=written)


@triton.jit(do_not_specialize=["first"])
def narrow_rows_kernel(sums, shift, column, w, a, first, h, DEPTH: tl.constexpr):
    """A token's hidden gradient, over its sums [n, H]."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, DEPTH)
    outer, factor, normalizer, at, of_target = token_of(a, row)
    max_logit, log_sum = normalizer
    z, at_column = tl.load(shift + row), tl.load(column + row)
    others = at[0] * exp((z - max_logit) - log_sum)
    inside = k < h
    value = tl.load(sums + row * h + k, mask=inside, other=0.0) * others
    if at_column >= 0:  # left out: the target, or a stand-in for one of another slice
        g = others
        if at_column == tl.load(a.targets + row) - first:
            z, g = max_logit + (tl.load(a.logps + row) + log_sum), of_target
        if a.z.inner is not None:
            g = under_cap_at(g, z, outer)
        of_column = tl.load(w.data + at_column * w.stride + k, mask=inside, other=0.0)
        value += of_column.to(tl.float32) * (g * factor)
    tl.store(sums + row * h + k, value, mask=inside)


launch_rows = Launcher(narrow_rows_kernel, num_warps=1)

# ---------------------------------------------------------------------- launches


def can_sweep(x: Tensor, w: Tensor) -> bool:
    plain = x.stride(1) == w.stride(1) == 1 and x.dtype == w.dtype
    return plain and x.dtype.itemsize <= 4 and x.shape[1] <= WIDEST and accelerated(w)


class Sweep:
    """A kernel over the tiles of x [n, H] @ w.T [H, v], cut as the head alone says."""

    def __init__(self, kernel: Any, x: Tensor, w: Tensor, shapes: dict[int, Shape]) -> None:
        (n, h), v, described = x.shape, len(w), can_fuse(x, w)
        depth = max(16, triton.next_power_of_2(h))
        large = x.element_size() == 2 and accelerated(x)
        self.shape = rows, width, warps, stages = shapes[max(64, depth)] if large else SMALL
        self.blocks, self.tiles, self.sizes = cdiv(n, rows), cdiv(v, width), (n, v)
        tiles = {"x": TileShape((rows, depth)), "w": TileShape((width, depth))}
        options = {"num_warps": warps, "num_stages": stages}
        self.launch = Launcher(kernel, tiles=tiles if described else None, **options)
        self.operands = (x, w) if described else (matrix_of(x), matrix_of(w))
        self.cut = Cut(h, depth, rows, width, PARTS, described)

    def __call__(self, programs: int, *arguments: Any, **constants: Any) -> None:
        self.launch(programs, *self.operands, *arguments, *self.sizes, self.cut, **constants)

    def marks(self, columns: Tensor) -> Matrix:
        """[blocks + 1, tiles + 1] uint8: 1 where a tile holds a column [n] of its rows or ends
        beyond the last one. Columns may lie elsewhere."""
        (rows, width, *_), (n, v), tiles = self.shape, self.sizes, self.tiles
        marks = columns.new_zeros(self.blocks + 1, tiles + 1, dtype=torch.uint8)
        tile = torch.where((columns >= 0) & (columns < v), columns // width, tiles)
        tile += torch.arange(n, device=columns.device) // rows * (tiles + 1)
        marks.view(-1).index_fill_(0, tile, 1)
        if v % width:
            marks[:, tiles - 1] = 1
        return matrix_of(marks)


def _parts(x: Tensor, n: int) -> Matrix:
    return matrix_of(x.new_empty(PARTS * n, x.shape[1], dtype=torch.float32))


def _in_order(parts: Matrix) -> Tensor:
    """[n, H] the sum of the parts, in one order whatever n is."""
    total = parts.data
    for _ in range(PARTS.bit_length() - 1):
        total, half = total.chunk(2)
        total += half
    return total


def narrow_partials(
    x: Tensor, w: Tensor, forward: Forward, sums: bool = False
) -> tuple[SoftmaxState, ShiftedSums | None]:
    run, parts = Sweep(narrow_sums_kernel, x, w, TOKENS), _parts(x, len(x) if sums else 0)
    swept: list[tuple[Epilogue, Tensor, Tensor]] = []

    def sweep(_: int, *arguments: Any, PROGRAMS: int) -> None:
        of = arguments[4].epilogue
        column = of.more[1].view(torch.int32).long()
        run(run.blocks * PARTS, of, parts if sums else None, run.marks(column))
        swept.append((of, of.shift.clone(), column))

    state = partials_of(statistics_of(x, w, forward, None, sweep=(PARTS, sweep)), forward.needs)
    if not (sums and swept):
        return state, None
    # Again where a token's shift is far below its largest logit.
    ((of, before, column),) = swept
    far, zeros = of.shift != before, torch.zeros_like(before)
    column = torch.where(far & of.more[0].isneginf(), -1, column)
    c = SoftmaxCoefficients(target=zeros - 1, prob=zeros + 1)
    normalizer = Normalizer(of.shift, zeros)
    again = Backward(column, 0, forward.transform, normalizer, c, zeros)
    _into_hidden(x, w, again, parts, far)
    return state, ShiftedSums(_in_order(parts), of.shift, column)


def _inputs(x: Tensor, backward: Backward) -> GradientInputs:
    z, log2_sumexp = scaling(backward.transform, bias_of(x)), sum(backward.normalizer) * LOG2E.value
    return gradient_inputs(backward)._replace(z=z, normalizer=(log2_sumexp,))  # type: ignore


def _into_hidden(
    x: Tensor, w: Tensor, backward: Backward, parts: Matrix, some: Tensor | None = None
) -> None:
    run = Sweep(narrow_gradient_kernel, x, w, TOKENS)
    marks, first = run.marks(backward.targets - backward.first), backward.first
    more = some, marks, _inputs(x, backward), first
    run(run.blocks * PARTS, parts, None, None, *more, WEIGHT=False)


def narrow_hidden(
    x: Tensor, w: Tensor, backward: Backward, sums: ShiftedSums | None = None
) -> Tensor:
    if sums is not None:
        total, (n, h) = sums.rows.clone(), x.shape
        more = matrix_of(w), gradient_inputs(backward), backward.first, h
        launch_rows(n, total, *sums[1:], *more, DEPTH=max(16, triton.next_power_of_2(h)))
        return total
    parts = _parts(x, len(x))
    if len(x):
        _into_hidden(x, w, backward, parts)
    return _in_order(parts)


def narrow_weight_(
    x: Tensor,
    w: Tensor,
    backward: Backward,
    out: Tensor | None,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    run = Sweep(narrow_gradient_kernel, x, w, COLUMNS)
    marks, first = run.marks(backward.targets - backward.first), backward.first
    more = bias, factor, None, marks, _inputs(x, backward), first
    run(run.tiles, out if out is None else matrix_of(out), *more, WEIGHT=True)
