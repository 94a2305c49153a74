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
from .statistics import FLOOR, multipliers, on_device, tanh

ROWS = 128  # of a program
SMALLEST = tl.constexpr(2.0**-90)  # of |c_target|, for s: what else is in the row weighs nothing


@triton.jit(do_not_specialize=["first"])
def multiple_kernel(
    terms,  # [n, v]
    stride,
    targets,  # [n], as all vectors
    first,
    n,
    v,
    scale,
    temperature,
    references,
    peaks,
    log_sums,
    c_target,
    c_prob,
    target_logits,
    multiples,
    BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = row < n
    peak = tl.load(peaks + row, mask=real, other=0.0)
    log_sum = tl.load(log_sums + row, mask=real, other=0.0)
    at_prob = tl.load(c_prob + row, mask=real, other=0.0)
    reference = tl.load(references + row, mask=real, other=0.0)
    multiple = at_prob * tl.exp((reference - peak) - log_sum)
    log_p = tl.load(target_logits + row, mask=real, other=0.0)
    log_p = tl.maximum((log_p - peak) - log_sum, FLOOR)
    half = tanh(log_p * 0.5)
    own = at_prob * (2 * half / (1 - half))  # at_prob expm1(log_p)
    if TARGET:
        at_target = tl.load(c_target + row, mask=real, other=0.0)
        floor = tl.abs(at_target) * SMALLEST
        multiple = tl.where(tl.abs(multiple) < floor, floor, multiple)
        # c_target + c_prob p_y, to the last digit of 1 - p_y where the two cancel
        own += at_target + at_prob
    else:
        own += at_prob
    own = tl.where(multiple == 0, 0.0, own / tl.where(multiple == 0, 1.0, multiple))
    column = tl.load(targets + row, mask=real, other=-1) - first
    here = real & (column >= 0) & (column < v)
    tl.store(terms + row * stride + column, own.to(terms.dtype.element_ty), mask=here)
    if ROW_TEMPERATURE:
        scale = scale / tl.load(temperature + row, mask=real, other=1.0)
    tl.store(multiples + row, multiple * scale, mask=real)


def held_multiple_(
    held: Held,
    backward: Backward,
    target_logits: Tensor,  # [n], z_y of the merged partials
) -> Tensor:
    targets, first, transform, normalizer, coefficients, _ = backward
    if not is_multiple(transform, coefficients):
        raise ValueError("a soft cap or such coefficients need held_gradient_")
    peak, log_sum = normalizer
    c_target, c_prob = coefficients.target, coefficients.prob
    multiples = torch.empty_like(peak)
    _, _, temperature = multipliers(transform, peak)
    own_temperature = isinstance(transform.temperature, Tensor)
    n, v = held.terms.shape
    if n:
        with on_device(peak):
            multiple_kernel[(triton.cdiv(n, ROWS),)](
                held.terms,
                held.terms.stride(0),
                targets,
                first,
                n,
                v,
                transform.scale if own_temperature else transform.scale / transform.temperature,
                temperature,
                held.reference,
                peak,
                log_sum,
                peak if c_target is None else c_target,
                c_prob,
                target_logits,
                multiples,
                BLOCK=ROWS,
                TARGET=c_target is not None,
                ROW_TEMPERATURE=own_temperature,
            )
    return multiples


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
