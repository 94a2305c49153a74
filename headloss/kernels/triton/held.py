"""Act two over held softmax terms, e = exp(z - reference) in bf16 [n, v].

Where there are but the first two coefficients and no soft cap, p_j c_prob is a multiple s of e_j
for all columns of a token. Then nothing is done to the terms but to set that of the target, and
the products take the multiples: dX = s (E @ W), dW = E.T @ (s X).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..held import check_held, check_multiple
from ..interface import Backward, Held, Order
from .formulas import coefficient, coefficients, own_gradient, per_row
from .gradient import launch
from .launch import Launcher
from .records import Act, Matrix, act, matrix_of

SMALLEST = tl.constexpr(2.0**-90)  # of |c_target|, for s: what else is in the row weighs nothing


class Multiple(NamedTuple):
    """What the kernel takes."""

    terms: Matrix  # [n, v]
    a: Act
    references: Tensor  # [n]
    order: Order | None
    x: Matrix | None  # [n, H]
    features: Matrix | None  # [n, H]
    multiples: Tensor  # [n]
    least: Tensor | None  # [n]


@triton.jit(do_not_specialize=["first"])
def multiple_rows_kernel(of, first, v, h, BLOCK: tl.constexpr):
    a = of.a
    place = tl.program_id(0).to(tl.int64)
    row = place
    if of.order is not None:
        row = tl.load(of.order.rows + place)
        if place >= tl.load(of.order.count):
            return
    peak = tl.load(a.normalizer.peak + row)
    log_sum = tl.load(a.normalizer.log_sum + row)
    multiple = tl.load(a.c.prob + row)
    multiple *= tl.exp((tl.load(of.references + row) - peak) - log_sum)
    at_target = coefficient(a.c.target, row)
    own = own_gradient(tl.load(a.logps + row), at_target, coefficients(a.c, row), a.c)
    if of.least is not None:
        floor = tl.load(of.least + row) * SMALLEST
        multiple = tl.where(tl.abs(multiple) < floor, floor, multiple)
    if a.c.target is not None:
        floor = tl.abs(at_target) * SMALLEST
        multiple = tl.where(tl.abs(multiple) < floor, floor, multiple)
    own = tl.where(multiple == 0, 0.0, own / tl.where(multiple == 0, 1.0, multiple))
    terms, to = of.terms.data + row * of.terms.stride, of.terms.data + place * of.terms.stride
    own = own.to(terms.dtype.element_ty)
    column = tl.load(a.targets + row) - first
    if row == place:
        if (column >= 0) & (column < v):
            tl.store(terms + column, own)
    else:  # from a place that nobody writes to but to set this same target
        for start in range(0, v, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < v
            value = tl.load(terms + columns, mask=inside)
            value = tl.where(columns == column, own, value)
            tl.store(to + columns, value, mask=inside)
    factor = multiple * per_row(a.z.factor, a.z, row)
    tl.store(of.multiples + place, factor)
    if of.x is not None:
        x, features = of.x.data + row * of.x.stride, of.features.data + place * of.features.stride
        for start in range(0, h, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < h, other=0.0).to(tl.float32) * factor
            tl.store(features + at, value.to(features.dtype.element_ty), mask=at < h)


launch_rows = Launcher(multiple_rows_kernel, num_warps=8)


def held_multiple_(
    held: Held,
    backward: Backward,
    *,
    x: Tensor | None = None,
    order: Order | None = None,
    least: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    check_multiple(backward)
    a, (n, v) = act(backward), held.terms.shape
    multiples = held.reference.new_empty(n)
    features = None if x is None else x.new_empty(n, x.shape[1])
    if n:
        of = Multiple(
            matrix_of(held.terms),
            a,
            held.reference,
            order,
            None if x is None else matrix_of(x),
            None if features is None else matrix_of(features),
            multiples,
            least,
        )
        launch_rows(n, of, backward.first, v, 0 if x is None else x.shape[1], BLOCK=2048)
    return multiples, features


def held_gradient_(held: Held, backward: Backward, *, order: Order | None = None) -> Tensor:
    check_held(backward)
    return launch(held.terms, held.terms, order, backward, held.reference)
