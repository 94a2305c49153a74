"""Several sums to the dtypes of their gradients, times one number, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Scaling
from .launch import Launcher, cdiv

BLOCK = 4096
AT_ONCE = 3  # tensors of a launch
PROGRAMS = 132 * 8  # at most: where nothing is to be done, few of them find that out


@triton.jit
def scaled_blocks(
    program, programs, value, out, count, factor,
    FACTOR: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every `programs`-th block of a tensor; nothing where nothing changes."""
    if IN_PLACE:
        count = tl.where(factor == 1, 0, count)
    for block in range(program, tl.cdiv(count, BLOCK), programs):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(value + at, mask=at < count, other=0.0).to(tl.float32)
        if FACTOR:
            x *= factor
        tl.store(out + at, x.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def scaled_kernel(
    factor,  # []
    a,
    a_out,
    a_count,
    b,
    b_out,
    b_count,
    c,
    c_out,
    c_count,
    FACTORS: tl.constexpr,  # which of them are multiplied
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    number = 1.0
    if FACTORS:
        number = tl.load(factor).to(tl.float32)
    scaled_blocks(
        program, programs, a, a_out, a_count, number, FACTORS & 1, IN_PLACE & 1, BLOCK
    )  # fmt: skip
    scaled_blocks(
        program, programs, b, b_out, b_count, number, FACTORS & 2, IN_PLACE & 2, BLOCK
    )  # fmt: skip
    scaled_blocks(
        program, programs, c, c_out, c_count, number, FACTORS & 4, IN_PLACE & 4, BLOCK
    )  # fmt: skip


launch = Launcher(scaled_kernel, num_warps=8)


def scaled(values: Sequence[Scaling], factor: Tensor | None) -> list[Tensor]:
    found, work = [], []
    for value, dtype, multiply in values:
        multiply = multiply and factor is not None
        if value.dtype == dtype and (not multiply or not value.numel()):
            found.append(value)
            continue
        out = value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)
        found.append(out)
        if value.numel():
            work.append((value, out, multiply))
    for start in range(0, len(work), AT_ONCE):
        _launch(work[start : start + AT_ONCE], factor)
    return found


def _launch(work: list[tuple[Tensor, Tensor, bool]], factor: Tensor | None) -> None:
    first = work[0][0]
    arguments: list[Tensor | int] = []
    factors = in_place = 0
    for i, (value, out, multiply) in enumerate(work):
        arguments += (value, out, value.numel())
        factors |= multiply << i
        in_place |= (value is out) << i
    for _ in range(AT_ONCE - len(work)):
        arguments += (first, first, 0)
    most = max(value.numel() for value, *_ in work)
    launch(
        min(PROGRAMS, cdiv(most, BLOCK)),
        first if factor is None else factor,
        *arguments,
        FACTORS=factors,
        IN_PLACE=in_place,
        BLOCK=BLOCK,
    )
