"""Act one in Triton: a tile of logits to its partial statistics, one program per token.

n tokens, v columns of the vocabulary starting at `first`, z = transform(raw). A program walks along
its row block by block: the peak of a block, the terms e = exp(z - peak) and their sums, joined to
what the row has so far by the rule of `stats.merge`. With `onto`, that is what earlier tiles left.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...stats import FLOOR as _FLOOR
from ...stats import Partials
from ..interface import Forward
from ..transform import Transform

FLOOR = tl.constexpr(_FLOOR)
LN2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # on a CPU, for the tests

BLOCK = 4096  # columns a program works on at once, at most
WARPS = 8


@triton.jit
def tanh(x):
    """tanh in float32; the series where 1 - 2/(exp(2x) + 1) would cancel."""
    s = x * x
    near = 1 + s * (-0.3333333333 + s * (0.1333333333 + s * (-0.05396825397 + s * 0.02186948854)))
    size = tl.abs(x)
    far = 1 - 2 / (tl.exp(2 * size) + 1)
    return tl.where(size < 0.25, x * near, tl.where(x < 0, -far, far))


@triton.jit
def log(x):
    """Natural logarithm to 22 bits, by the GPU's own instruction: a library's would take ten times
    as long, and outlast the memory."""
    if INTERPRETED:
        return tl.log(x)
    found = tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return found * LN2


@triton.jit
def row_multiplier(outer, temperature, row, ROW_TEMPERATURE: tl.constexpr):
    """The factor of one token: `outer` over its own temperature, if tokens have their own."""
    if ROW_TEMPERATURE:
        outer = outer / tl.load(temperature + row)
    return outer


@triton.jit
def transformed(raw, inner, outer, SOFTCAP: tl.constexpr):
    """z = tanh(raw * inner) * outer under a soft cap, else raw * outer."""
    z = raw.to(tl.float32)
    if SOFTCAP:
        z = tanh(z * inner)
    return z * outer


@triton.jit
def block_partials(z, inside, ENTROPY: tl.constexpr):
    """Peak, rest and spread of a block. Where all is -inf there is no mass."""
    peak = tl.max(z, 0)
    shifted = tl.maximum(z - tl.where(peak == float("-inf"), 0.0, peak), FLOOR)
    e = tl.exp(shifted)
    top = (z == peak) & inside
    # The largest term is left out, once: its equals, if any, count one each.
    rest = tl.sum(tl.where(top, 0.0, e), 0) + (tl.sum(top.to(tl.float32), 0) - 1)
    rest = tl.where(peak == float("-inf"), -1.0, rest)
    spread = 0.0
    if ENTROPY:
        spread = tl.sum(e * shifted, 0)
    return peak, rest, spread


@triton.jit
def merged(peak_a, rest_a, spread_a, peak_b, rest_b, spread_b):
    """`stats.merge`: the side that holds the peak is not shifted, also where both are -inf."""
    peak = tl.maximum(peak_a, peak_b)
    shift_a = tl.maximum(tl.where(peak_a == peak, 0.0, peak_a - peak), FLOOR)
    shift_b = tl.maximum(tl.where(peak_b == peak, 0.0, peak_b - peak), FLOOR)
    scale_a, scale_b = tl.exp(shift_a), tl.exp(shift_b)
    mass_a, mass_b = 1 + rest_a, 1 + rest_b
    rest = tl.where(peak_a == peak, rest_a + mass_b * scale_b, rest_b + mass_a * scale_a)
    spread = scale_a * (spread_a + mass_a * shift_a) + scale_b * (spread_b + mass_b * shift_b)
    return peak, rest, spread


@triton.jit(do_not_specialize=["first"])
def partials_kernel(
    raw,  # [n, v]
    raw_stride,
    targets,  # [n]
    first,
    v,
    inner,
    outer,
    temperature,  # [n]
    peaks,  # [n], as the four below
    rests,
    target_logits,
    spreads,
    totals,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    ONTO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    raw += row * raw_stride
    outer = row_multiplier(outer, temperature, row, ROW_TEMPERATURE)

    target_logit = tl.full((), float("-inf"), tl.float32)
    peak = tl.full((), float("-inf"), tl.float32)
    rest = tl.full((), -1.0, tl.float32)
    spread = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if ONTO:
        target_logit = tl.load(target_logits + row)
        peak = tl.load(peaks + row)
        rest = tl.load(rests + row)
        if ENTROPY:
            spread = tl.load(spreads + row)
        if MEAN:
            total = tl.load(totals + row)

    column = tl.load(targets + row) - first
    if (column >= 0) & (column < v):
        target_logit = transformed(tl.load(raw + column), inner, outer, SOFTCAP)

    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < v
        z = transformed(tl.load(raw + columns, mask=inside, other=0.0), inner, outer, SOFTCAP)
        if MEAN:
            total += tl.sum(tl.where(inside, z, 0.0), 0)
        z = tl.where(inside, z, float("-inf"))
        block_peak, block_rest, block_spread = block_partials(z, inside, ENTROPY)
        peak, rest, spread = merged(peak, rest, spread, block_peak, block_rest, block_spread)

    tl.store(peaks + row, peak)
    tl.store(rests + row, rest)
    tl.store(target_logits + row, target_logit)
    if ENTROPY:
        tl.store(spreads + row, spread)
    if MEAN:
        tl.store(totals + row, total)


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_tile(name: str, tile: Tensor) -> None:
    if tile.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"{name} must be float32, bfloat16 or float16 for the triton backend, "
            f"got {tile.dtype}; float64 needs backend='reference'"
        )
    if tile.dim() != 2 or (tile.shape[1] > 1 and tile.stride(1) != 1):
        raise ValueError(
            f"{name} must be [n, v] with unit stride along v, "
            f"got shape {tuple(tile.shape)} and strides {tile.stride()}"
        )


def multipliers(transform: Transform, like: Tensor) -> tuple[float, float, Tensor]:
    """(inner, outer, temperature of each token): see `transformed` and `row_multiplier`."""
    cap, scale, temperature = transform.softcap, transform.scale, transform.temperature
    inner, outer = (1.0, scale) if cap is None else (scale / cap, cap)
    if isinstance(temperature, Tensor):
        return inner, outer, temperature.to(torch.float32).contiguous()
    return inner, outer / temperature, like


def block_width(v: int) -> int:
    return min(BLOCK, triton.next_power_of_2(max(v, 16)))


def partials(raw: Tensor, forward: Forward, onto: Partials | None = None) -> Partials:
    check_tile("raw", raw)
    targets, first, transform, needs = forward
    n, v = raw.shape
    entropy, mean = "entropy" in needs, "mean_logit" in needs
    if onto is None:
        count = 3 + entropy + mean
        found = list(raw.new_empty(count, n, dtype=torch.float32))
        result = Partials(
            peak=found[0],
            rest=found[1],
            target=found[2],
            spread=found[3] if entropy else None,
            total=found[-1] if mean else None,
        )
    else:
        result = onto
    if n == 0:
        return result
    inner, outer, temperature = multipliers(transform, result.peak)
    block = block_width(v)
    with on_device(raw):
        partials_kernel[(n,)](
            raw,
            raw.stride(0),
            targets,
            first,
            v,
            inner,
            outer,
            temperature,
            result.peak,
            result.rest,
            result.target,
            result.peak if result.spread is None else result.spread,
            result.peak if result.total is None else result.total,
            BLOCK=block,
            SOFTCAP=transform.softcap is not None,
            ROW_TEMPERATURE=isinstance(transform.temperature, Tensor),
            ENTROPY=entropy,
            MEAN=mean,
            ONTO=onto is not None,
            num_warps=WARPS,
        )
    return result
