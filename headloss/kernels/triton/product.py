"""The logits product with act one in its epilogue: partial statistics, and no logits at all.

n tokens, v columns of the vocabulary starting at `first`, H hidden width. A fixed set of programs
computes tiles of x @ w.T, reading through the tensor memory accelerator, and reduces the float32
accumulator of each on the spot. Terms are taken against a reference that is known beforehand, the
logit of one column per token (its target, where that lies in this slice): e = exp(z - reference).
No maximum has to be found first, and the reference's own term, 1, is left out of the sums, which
keeps the digits of a likely target's log-prob.

Where gluon.py can do it (`overlaps`), the epilogue runs under the next tile's product.

With `held` the terms are kept in bf16, which has the exponents of float32, so that any reference
suits that is not far below the largest logit. Tokens for which it is are done again, one by one.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...stats import Partials
from ..interface import Forward, Held, Measured
from .launch import Launcher, Tile
from .merge import BLOCKS, HALVES, flags, launch_finish, measured, room, unpacked
from .merge import ROWS as FINISHED
from .statistics import LN2, multipliers, transformed
from .tokens import launch_reference

ROWS, WIDTH, DEPTH = 128, 256, 64  # a tile, and the slice of H that is in flight
GROUP = 16  # tiles of tokens that share a tile of the vocabulary while it is in the L2
WARPS, STAGES = 8, 4
GLUON = "3.6."  # the Triton that gluon.py is written for: Gluon changes with each
LEAST_SCALE = 1e-9  # of gluon.py, which masks before it scales

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # exp2 of it is 0, and it may be multiplied by that


@triton.jit
def place_of(tile, tiles_m, blocks, GROUP: tl.constexpr):
    """Row and column of a tile, in an order in which GROUP rows share a tile of the vocabulary."""
    group = tile // (GROUP * blocks)
    size = min(tiles_m - group * GROUP, GROUP)
    return group * GROUP + tile % size, (tile % (GROUP * blocks)) // size


@triton.jit
def sums(z, shift, ENTROPY: tl.constexpr):
    """e, sum e and sum e (z - reference) of each row, the last in units of log 2."""
    below = z * LOG2E - shift[:, None]
    e = tl.exp2(below)
    mass = tl.sum(e, 1)
    spread = mass
    if ENTROPY:
        spread = tl.sum(e * below, 1)
    return e, mass, spread


@triton.jit
def product_kernel(
    x,  # descriptor [n, H]
    w,  # descriptor [v, H]
    held,  # descriptor [n, v]
    own,  # [n], column of the reference
    references,  # [n]
    n,
    v,
    h,
    inner,
    outer,
    temperature,  # [n]
    parts,  # [1 + ENTROPY + MEAN, blocks, n]: rests, spreads, totals
    stride,  # blocks * n
    peaks,  # [blocks, n]
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    PEAK: tl.constexpr,
    HELD: tl.constexpr,
):
    tiles_m = tl.cdiv(n, BM)
    blocks = tl.cdiv(v, BN)
    rests, spreads = parts, parts + stride
    totals = spreads
    if ENTROPY:
        totals = spreads + stride
    for tile in tl.range(tl.program_id(0), tiles_m * blocks, PROGRAMS):
        m, block = place_of(tile, tiles_m, blocks, GROUP)
        z = tl.zeros((BM, BN), tl.float32)
        for k in range(0, h, BK):
            z = tl.dot(x.load([m * BM, k]), w.load([block * BN, k]).T, z)

        rows = m * BM + tl.arange(0, BM)
        inside = rows < n
        if SCALED:
            factor = outer
            if ROW_TEMPERATURE:
                factor = outer / tl.load(temperature + rows, mask=inside, other=1.0)[:, None]
            z = transformed(z, inner, factor, SOFTCAP)
        place = block.to(tl.int64) * n + rows
        width = v - block * BN
        columns = tl.arange(0, BN)
        if MEAN:
            real = tl.where((columns < width)[None, :], z, 0.0)
            tl.store(totals + place, tl.sum(real, 1), mask=inside)
        if width < BN:
            z = tl.where((columns < width)[None, :], z, LOWEST)
        column = tl.load(own + rows, mask=inside, other=-1) - block * BN
        if tl.max(((column >= 0) & (column < BN)).to(tl.int32), 0) > 0:
            z = tl.where(columns[None, :] == column[:, None], LOWEST, z)
        if PEAK:  # of the others: the reference itself was summed in another order
            tl.store(peaks + place, tl.max(z, 1), mask=inside)

        shift = tl.load(references + rows, mask=inside, other=0.0) * LOG2E
        if HELD:  # in halves, which take half the shared memory on their way out
            left, right = tl.split(tl.permute(tl.reshape(z, (BM, 2, BN // 2)), (0, 2, 1)))
            e, mass, spread = sums(left, shift, ENTROPY)
            held.store([m * BM, block * BN], e.to(held.dtype))
            e, more_mass, more_spread = sums(right, shift, ENTROPY)
            held.store([m * BM, block * BN + BN // 2], e.to(held.dtype))
            mass += more_mass
            spread += more_spread
        else:
            _, mass, spread = sums(z, shift, ENTROPY)
        tl.store(rests + place, mass, mask=inside)
        if ENTROPY:
            tl.store(spreads + place, spread * LN2, mask=inside)


READ = {"x": Tile((ROWS, DEPTH)), "w": Tile((WIDTH, DEPTH))}
WRITE = {"held": Tile((ROWS, WIDTH // 2))}
options = {"num_warps": WARPS, "num_stages": STAGES}
launch_product = Launcher(product_kernel, tiles=READ | {"held": READ["x"]}, **options)
launch_held = Launcher(product_kernel, tiles=READ | WRITE, **options)


def can_fuse(x: Tensor, w: Tensor) -> bool:
    """Whether the operands suit the tensor memory accelerator: 16 bits wide, rows of whole 16
    bytes, and a GPU that has one (the interpreter has)."""
    if x.is_cuda and not _has_accelerator(x.device):
        return False
    return x.dtype in (torch.bfloat16, torch.float16) and all(
        t.dtype == x.dtype and t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0
        for t in (x, w)
    )


@functools.cache
def _has_accelerator(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def check_operands(x: Tensor, w: Tensor) -> None:
    """ValueError where `can_fuse` does not hold."""
    if not can_fuse(x, w):
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and w {tuple(w.shape)} {w.dtype} need 16-bit elements, "
            "rows of whole 16 bytes and a GPU with a tensor memory accelerator"
        )


@functools.cache
def programs_on(device: torch.device) -> int:
    """One for each multiprocessor; a few in the interpreter."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


def overlaps(device: torch.device) -> bool:
    """Whether gluon.py runs here, for products without a soft cap."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return hopper and triton.__version__.startswith(GLUON)


def product_partials(
    x: Tensor,  # [n, H], bf16 or fp16
    w: Tensor,  # [v, H]
    forward: Forward,
    held: Held | None = None,  # [n, v], filled
) -> Partials:
    return unpacked(_product_act(x, w, forward, None, held), forward.needs)


def product_statistics(
    x: Tensor,
    w: Tensor,
    forward: Forward,
    vocabulary: int,
    held: Held | None = None,
) -> Measured:
    return measured(_product_act(x, w, forward, vocabulary, held), forward.needs)


def _product_act(
    x: Tensor, w: Tensor, forward: Forward, vocabulary: int | None, held: Held | None
) -> Tensor:
    """The rows of `measured`; those of `unpacked` without the size of the vocabulary."""
    check_operands(x, w)
    n, needs = len(x), forward.needs
    entropy, mean, peak = (name in needs for name in ("entropy", "mean_logit", "top1"))
    if vocabulary is None:
        out = x.new_empty(3 + entropy + mean, n, dtype=torch.float32)
    else:
        out = room(x, n, needs)
    if n:
        launch = Launch(x, w, held, forward)
        launch.references()
        blocks = triton.cdiv(len(w), WIDTH)
        parts = x.new_empty(1 + entropy + mean, blocks, n, dtype=torch.float32)
        peaks = x.new_empty(blocks, n, dtype=torch.float32) if peak else parts
        launch.product(parts, peaks)
        launch.finish(parts, peaks, vocabulary, out)
    return out


@functools.lru_cache(maxsize=64)
def _asked(needs: frozenset[str], held: bool) -> dict[str, bool]:
    """What the product has to write, by the names that kernels have for it."""
    asked = flags(needs)
    return {
        "ENTROPY": asked["ENTROPY"],
        "MEAN": asked["MEAN"],
        "PEAK": asked["TOP1"],
        "HELD": held,
    }


class Launch:
    """The three kernels over one pair of operands."""

    def __init__(
        self,
        x: Tensor,  # [n, H]
        w: Tensor,  # [v, H]
        held: Held | None,
        forward: Forward,
    ) -> None:
        self.x, self.w, self.held, self.forward = x, w, held, forward
        self.target = x.new_empty(len(x), dtype=torch.float32)  # z_y
        self.reference = torch.empty_like(self.target) if held is None else held.reference
        self.own = torch.empty_like(forward.targets)  # the column of each reference
        transform = forward.transform
        self.scaling = multipliers(transform, self.reference)
        self.flags = {
            "SOFTCAP": transform.softcap is not None,
            "ROW_TEMPERATURE": isinstance(transform.temperature, Tensor),
        }
        self.asked = _asked(forward.needs, held is not None)

    def references(self) -> None:
        x, w = self.x, self.w
        launch_reference(
            len(x),
            *(x, x.stride(0), w, w.stride(0), self.forward.targets, self.forward.first),
            *(len(w), x.shape[1], *self.scaling, self.own, self.reference, self.target),
            BLOCK=1024,
            **self.flags,
        )

    def product(self, parts: Tensor, peaks: Tensor) -> None:
        x, w, held = self.x, self.w, self.held
        if self.scaling[1] > LEAST_SCALE and not self.flags["SOFTCAP"] and overlaps(x.device):
            from . import gluon  # Gluon is not in every Triton

            gluon.launch(self, parts, peaks)
            return
        programs = programs_on(x.device)
        launch = launch_product if held is None else launch_held
        launch(
            programs,
            *(x, w, x if held is None else held.terms, self.own, self.reference),
            *(len(x), len(w), x.shape[1], *self.scaling, parts, parts.stride(0), peaks),
            PROGRAMS=programs,
            BM=ROWS,
            BN=WIDTH,
            BK=DEPTH,
            GROUP=GROUP,
            SCALED=any(self.flags.values()) or self.scaling[1] != 1.0,
            **self.asked,
            **self.flags,
        )

    def finish(self, parts: Tensor, peaks: Tensor, vocabulary: int | None, out: Tensor) -> None:
        x, w, (_, blocks, n) = self.x, self.w, parts.shape
        terms = x if self.held is None else self.held.terms
        launch_finish(
            triton.cdiv(n, FINISHED),
            *(x, x.stride(0), w, w.stride(0), terms, terms.stride(0), self.own, len(w)),
            *(x.shape[1], *self.scaling, self.reference, self.target),
            *(parts, peaks, parts.stride(0), blocks, n, float(vocabulary or 1), out),
            ROWS=FINISHED,
            BLOCKS=BLOCKS,
            HALVES=HALVES,
            COLUMNS=64,
            DEPTH=128,
            HELD=self.held is not None,
            PARTIALS=vocabulary is None,
            **flags(self.forward.needs),
            **self.flags,
        )
