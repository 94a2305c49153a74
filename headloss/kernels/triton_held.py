"""Act two over held softmax terms, e = exp(z - reference) in bf16 [n, v].

    dL/dz_j = c_target [j = y] + p_j (c_prob + c_entropy log p_j) + c_uniform

Where there are but the first two coefficients and no soft cap, p_j c_prob is a multiple s of e_j
for all columns of a token. Then nothing is done to the terms but to set that of the target, and
the products take the multiples: dX = s (E @ W), dW = E.T @ (s X).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..stats import Coefficients, Normalizer
from .transform import Transform
from .triton_gradient import launch
from .triton_partials import on_device
from .triton_product import Held

SMALLEST = 2.0**-90  # of |c_target|, for s: what else is in the row then weighs nothing


def is_multiple(transform: Transform, coefficients: Coefficients) -> bool:
    """Whether the gradient of a token is a multiple of its terms, the target's apart."""
    return (
        transform.softcap is None
        and coefficients.prob is not None
        and coefficients.entropy is None
        and coefficients.uniform is None
    )


def held_multiple_(
    held: Held,
    targets: Tensor,  # [n]
    first: int,
    transform: Transform,
    normalizer: Normalizer,  # [n]
    coefficients: Coefficients,  # [n]
    target_logits: Tensor,  # [n], z_y of the merged partials
) -> Tensor:
    """Set the terms of the targets, and return s [n] so that dL/draw = s e. See `is_multiple`."""
    if not is_multiple(transform, coefficients):
        raise ValueError("a soft cap or such coefficients need held_gradient_")
    c_prob = coefficients.prob
    assert c_prob is not None
    c_target = torch.zeros_like(c_prob) if coefficients.target is None else coefficients.target
    peak, log_sum = normalizer
    multiple = c_prob * ((held.reference - peak) - log_sum).exp()
    floor = c_target.abs() * SMALLEST
    multiple = torch.where(multiple.abs() < floor, floor, multiple)
    # c_target + c_prob p_y, to the last digit of 1 - p_y where the two cancel
    log_p = (target_logits - peak) - log_sum
    own = (c_target + c_prob) + c_prob * torch.expm1(log_p)
    own = torch.where(multiple == 0, 0.0, own / multiple)
    column = targets - first
    inside = (column >= 0) & (column < held.terms.shape[1])
    column = torch.where(inside, column, 0).unsqueeze(1)
    before = held.terms.gather(1, column).squeeze(1)
    own = torch.where(inside, own.to(before.dtype), before)
    held.terms.scatter_(1, column, own.unsqueeze(1))
    return multiple * (transform.scale / transform.temperature)


def held_gradient_(
    held: Held,
    targets: Tensor,  # [n]
    first: int,
    transform: Transform,
    normalizer: Normalizer,  # [n]
    coefficients: Coefficients,  # [n]
    target_logits: Tensor,  # [n], z_y of the merged partials
    *,
    rows: Tensor | None = None,  # from dense_rows
) -> Tensor:
    """dL/draw, [rows, v] bf16, over the held terms: for any coefficients.

    z is read off log p, and a term of 0 no longer tells its z: with a soft cap, a coefficient of
    the mean logit is refused.
    """
    if transform.softcap is not None and coefficients.uniform is not None:
        raise ValueError(
            "held softmax terms cannot give the gradient of the mean logit under a soft cap; "
            "keep the logits (logit_gradient_)"
        )
    return launch(
        held.terms,
        held.terms,
        rows,
        targets,
        first,
        transform,
        normalizer,
        coefficients,
        (target_logits, held.reference),
    )


@triton.jit
def move_rows_kernel(tile, stride, rows, v, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    if row != place:
        for start in range(0, v, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < v
            value = tl.load(tile + row * stride + columns, mask=inside)
            tl.store(tile + place * stride + columns, value, mask=inside)


def move_rows_(tile: Tensor, rows: Tensor) -> Tensor:
    """[n, v] -> [rows, v] in the front of the same memory; rows from `dense_rows`."""
    if len(rows):
        with on_device(tile):
            move_rows_kernel[(len(rows),)](
                tile, tile.stride(0), rows, tile.shape[1], BLOCK=4096, num_warps=8
            )
    return tile[: len(rows)]
