"""Several sums to the dtypes of their gradients, times one number, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import Scaling
from .launch import Launcher, cdiv
from .records import constant

BLOCK = 4096
AT_ONCE = 3  # tensors of a launch
PROGRAMS = 132 * 8  # at most: where nothing is to be done, few of them find that out


class Cast(NamedTuple):
    """A sum on its way to a gradient."""

    value: Tensor
    out: Tensor
    count: int
    times: tl.constexpr  # it is multiplied by the factor
    in_place: tl.constexpr


@triton.jit
def scaled_blocks(of, factor, BLOCK: tl.constexpr):
    """Every `programs`-th block of a tensor; nothing where nothing changes."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    count = of.count
    number = 1.0
    if of.times:
        number = tl.load(factor).to(tl.float32)
    if of.in_place:
        count = tl.where(number == 1, 0, count)
    for block in range(program, tl.cdiv(count, BLOCK), programs):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(of.value + at, mask=at < count, other=0.0).to(tl.float32) * number
        tl.store(of.out + at, x.to(of.out.dtype.element_ty), mask=at < count)


@triton.jit
def scaled_kernel(
    factor,  # []
    a,  # Cast, as the next two
    b,
    c,
    BLOCK: tl.constexpr,
):
    scaled_blocks(a, factor, BLOCK)
    scaled_blocks(b, factor, BLOCK)
    scaled_blocks(c, factor, BLOCK)


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
            flags = constant(multiply), constant(value is out)
            work.append(Cast(value, out, value.numel(), *flags))
    for start in range(0, len(work), AT_ONCE):
        some = work[start : start + AT_ONCE]
        programs = min(PROGRAMS, cdiv(max(cast.count for cast in some), BLOCK))
        some += [some[0]._replace(count=0)] * (AT_ONCE - len(some))
        launch(programs, some[0].value if factor is None else factor, *some, BLOCK=BLOCK)
    return found
