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

from ..interface import Backward, Held, Order, is_multiple
from .gradient import launch
from .launch import Launcher
from .statistics import FLOOR, multipliers, tanh

SMALLEST = tl.constexpr(2.0**-90)  # of |c_target|, for s: what else is in the row weighs nothing


@triton.jit(do_not_specialize=["first"])
def multiple_rows_kernel(
    terms,  # [n, v]
    stride,
    targets,  # [n], as all vectors
    first,
    v,
    scale,
    temperature,
    references,
    peaks,
    log_sums,
    c_target,
    c_prob,
    target_logits,
    x,  # [n, H]
    x_stride,
    h,
    rows,
    count,  # [1]
    multiples,
    features,  # [n, H]
    TARGET: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    ORDER: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = place
    if ORDER:
        row = tl.load(rows + place)
        if place >= tl.load(count):
            return
    peak = tl.load(peaks + row)
    log_sum = tl.load(log_sums + row)
    at_prob = tl.load(c_prob + row)
    multiple = at_prob * tl.exp((tl.load(references + row) - peak) - log_sum)
    log_p = tl.maximum((tl.load(target_logits + row) - peak) - log_sum, FLOOR)
    half = tanh(log_p * 0.5)
    own = at_prob * (2 * half / (1 - half))  # at_prob expm1(log_p)
    if TARGET:
        at_target = tl.load(c_target + row)
        floor = tl.abs(at_target) * SMALLEST
        multiple = tl.where(tl.abs(multiple) < floor, floor, multiple)
        # c_target + c_prob p_y, to the last digit of 1 - p_y where the two cancel
        own += at_target + at_prob
    else:
        own += at_prob
    own = tl.where(multiple == 0, 0.0, own / tl.where(multiple == 0, 1.0, multiple))
    own = own.to(terms.dtype.element_ty)
    column = tl.load(targets + row) - first
    if row == place:
        if (column >= 0) & (column < v):
            tl.store(terms + row * stride + column, own)
    else:  # from a place that nobody writes to but to set this same target
        for start in range(0, v, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < v
            value = tl.load(terms + row * stride + columns, mask=inside)
            value = tl.where(columns == column, own, value)
            tl.store(terms + place * stride + columns, value, mask=inside)
    if ROW_TEMPERATURE:
        scale = scale / tl.load(temperature + row)
    factor = multiple * scale
    tl.store(multiples + place, factor)
    if FEATURES:
        for start in range(0, h, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + row * x_stride + at, mask=at < h, other=0.0).to(tl.float32)
            value = (value * factor).to(features.dtype.element_ty)
            tl.store(features + place * h + at, value, mask=at < h)


launch_rows = Launcher(multiple_rows_kernel, num_warps=8)


def held_multiple_(
    held: Held,
    backward: Backward,
    target_logits: Tensor,  # [n], z_y of the merged partials
    *,
    x: Tensor | None = None,
    order: Order | None = None,
) -> tuple[Tensor, Tensor | None]:
    targets, first, transform, (peak, log_sum), coefficients, _ = backward
    if not is_multiple(transform, coefficients):
        raise ValueError("a soft cap or such coefficients need held_gradient_")
    c_target, c_prob = coefficients.target, coefficients.prob
    n, v = held.terms.shape
    multiples = torch.empty_like(peak)
    features = None if x is None else x.new_empty(n, x.shape[1])
    if not n:
        return multiples, features
    _, _, temperature = multipliers(transform, peak)
    own_temperature = isinstance(transform.temperature, Tensor)
    scale = transform.scale if own_temperature else transform.scale / transform.temperature
    hidden = held.terms if x is None else x
    launch_rows(
        n,
        *(held.terms, held.terms.stride(0), targets, first, v, float(scale), temperature),
        *(held.reference, peak, log_sum, peak if c_target is None else c_target, c_prob),
        *(target_logits, hidden, hidden.stride(0), hidden.shape[1]),
        *((targets, targets) if order is None else order),
        *(multiples, multiples if features is None else features),
        TARGET=c_target is not None,
        ROW_TEMPERATURE=own_temperature,
        ORDER=order is not None,
        FEATURES=x is not None,
        BLOCK=2048,
    )
    return multiples, features


def held_gradient_(
    held: Held,
    backward: Backward,
    target_logits: Tensor,  # [n], z_y of the merged partials
    *,
    order: Order | None = None,
) -> Tensor:
    if backward.transform.softcap is not None and backward.coefficients.uniform is not None:
        raise ValueError(
            "held softmax terms cannot give the gradient of the mean logit under a soft cap; "
            "keep the logits (logit_gradient_)"
        )
    return launch(
        held.terms,
        held.terms,
        order,
        backward,
        (target_logits, held.reference),
    )
