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
from triton.tools.tensor_descriptor import TensorDescriptor

from ...stats import Partials
from ..interface import Forward, Held
from ..transform import Transform
from .statistics import LN2, multipliers, on_device, transformed
from .tokens import far_row_kernel, reference_kernel

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
    rests,  # [blocks, n], as the three below
    spreads,
    totals,
    peaks,
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


def _rereferenced(partials: Partials, peak: Tensor) -> Partials:
    """The same sums against the largest logit; untouched where that is the reference itself."""
    peak = torch.maximum(peak, partials.peak)
    shift = partials.peak - peak
    scale, mass = shift.exp(), 1 + partials.rest
    rest = torch.where(shift == 0, partials.rest, mass * scale - 1)
    spread = None if partials.spread is None else scale * (partials.spread + mass * shift)
    return Partials(
        peak=peak, rest=rest, target=partials.target, spread=spread, total=partials.total
    )


def product_partials(
    x: Tensor,  # [n, H], bf16 or fp16
    w: Tensor,  # [v, H]
    forward: Forward,
    held: Held | None = None,  # [n, v], filled
) -> Partials:
    """Partial statistics of x @ w.T, in float32 from the float32 accumulator.

    `peak` is the reference that rest and spread are taken against: the largest logit where `top1`
    is needed, else the target's, or one near enough. `stats.merge` and `stats.finish` take any.

    Raises:
        ValueError: the operands do not suit the hardware (`can_fuse`).
    """
    check_operands(x, w)
    n, v = len(x), len(w)
    targets, first, transform, needs = forward
    entropy, mean, peak = (name in needs for name in ("entropy", "mean_logit", "top1"))
    reference = x.new_empty(n, dtype=torch.float32) if held is None else held.reference
    target, own = torch.empty_like(reference), torch.empty_like(targets)
    launch = Launch(x, w, held, transform, reference, own, entropy)
    with on_device(x):
        if n:
            launch.references(targets, first, target)
        blocks = triton.cdiv(v, WIDTH)
        parts = x.new_empty(1 + entropy + mean, blocks, n, dtype=torch.float32)
        peaks = x.new_empty(blocks, n, dtype=torch.float32) if peak else parts[0]
        if n:
            launch.product(parts, peaks, mean, peak)
        found = parts.sum(1)
        if n:
            launch.far_rows(found)
    result = Partials(
        peak=reference,
        rest=found[0],
        target=target,
        spread=found[1] if entropy else None,
        total=found[-1] if mean else None,
    )
    return _rereferenced(result, peaks.max(0).values) if peak else result


class Launch:
    """The three kernels over one pair of operands."""

    def __init__(
        self,
        x: Tensor,  # [n, H]
        w: Tensor,  # [v, H]
        held: Held | None,
        transform: Transform,
        reference: Tensor,  # [n]
        own: Tensor,  # [n], the column of each reference
        entropy: bool,
    ) -> None:
        self.x, self.w, self.held, self.entropy = x, w, held, entropy
        self.reference, self.own = reference, own
        self.scaling = multipliers(transform, reference)
        self.flags = {
            "SOFTCAP": transform.softcap is not None,
            "ROW_TEMPERATURE": isinstance(transform.temperature, Tensor),
        }

    def references(self, targets: Tensor, first: int, target_logits: Tensor) -> None:
        x, w = self.x, self.w
        reference_kernel[(len(x),)](
            x,
            x.stride(0),
            w,
            w.stride(0),
            targets,
            first,
            len(w),
            x.shape[1],
            *self.scaling,
            self.own,
            self.reference,
            target_logits,
            BLOCK=1024,
            **self.flags,
        )

    def product(self, parts: Tensor, peaks: Tensor, mean: bool, peak: bool) -> None:
        x, w, held = self.x, self.w, self.held
        if self.scaling[1] > LEAST_SCALE and not self.flags["SOFTCAP"] and overlaps(x.device):
            from . import gluon  # Gluon is not in every Triton

            gluon.launch(self, parts, peaks, mean, peak)
            return
        out, out_tile = (x, DEPTH) if held is None else (held.terms, WIDTH // 2)
        programs = programs_on(x.device)
        product_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
            TensorDescriptor.from_tensor(w, [WIDTH, DEPTH]),
            TensorDescriptor.from_tensor(out, [ROWS, out_tile]),
            self.own,
            self.reference,
            len(x),
            len(w),
            x.shape[1],
            *self.scaling,
            parts[0],
            parts[int(self.entropy)],
            parts[-1],
            peaks,
            PROGRAMS=programs,
            BM=ROWS,
            BN=WIDTH,
            BK=DEPTH,
            GROUP=GROUP,
            SCALED=any(self.flags.values()) or self.scaling[1] != 1.0,
            ENTROPY=self.entropy,
            MEAN=mean,
            PEAK=peak,
            HELD=held is not None,
            num_warps=WARPS,
            num_stages=STAGES,
            **self.flags,
        )

    def far_rows(self, found: Tensor) -> None:
        x, w, held = self.x, self.w, self.held
        terms = x if held is None else held.terms
        far_row_kernel[(len(x),)](
            x,
            x.stride(0),
            w,
            w.stride(0),
            terms,
            terms.stride(0),
            self.own,
            len(w),
            x.shape[1],
            *self.scaling,
            self.reference,
            found[0],
            found[int(self.entropy)],
            BLOCK=64,
            DEPTH=128,
            ENTROPY=self.entropy,
            HELD=held is not None,
            **self.flags,
        )
