"""Matmuls of a linear head, with float32 sums for all input dtypes.

n tokens, v columns of the vocabulary, H hidden width. On a GPU, a 16-bit matmul returns its float32
accumulator unrounded. On a CPU, a matmul rounds its output to the inputs' dtype; therefore 16-bit
inputs are converted to float32, one block of the weight at a time. Matmul inputs of two dtypes,
such as a float32 adapter and a bfloat16 weight, are converted to a common dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..kernels.rounding import accumulator_bias

aten = torch.ops.aten
WIDE = torch.float32, torch.float64
# For a hidden gradient of more than LARGE = 2^25 elements, cuBLAS picks slower tiles on Hopper
# GPUs.
LARGE = 1 << 25
BLOCK_ELEMENTS = 1 << 22  # Most elements of a matrix that are converted to a wider dtype at once.
# Chunks have a multiple of 128 tokens, and blocks a multiple of 128 columns, for fast matmuls.
GRAIN = 128
# With a teacher, a block's tokens are split into 8 parts; only one part's logits are in memory at a
# time.
PARTS = 8


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(matrix: Tensor, width: int = 0) -> Iterator[slice]:
    """Yield slices of a matrix's rows, in blocks of at most BLOCK_ELEMENTS elements, where a row
    counts as at least `width` elements."""
    rows = max(1, BLOCK_ELEMENTS // max(1, matrix.shape[1], width))
    for start in range(0, matrix.shape[0], rows):
        yield slice(start, start + rows)


def _even(gradient: Tensor) -> list[slice]:
    """Return slices of the columns of a gradient [n, v] for its matmuls: the first slice has the
    largest multiple of 8 columns, the second slice has the last columns. If v is no multiple of 8,
    cuBLAS computes 16-bit matmuls of all columns up to 5 times slower (benchmarks/NOTES.md)."""
    v = gradient.shape[1]
    even = v - v % 8
    return [slice(even), slice(even, v)] if 0 < even < v else [slice(v)]


class Products:
    """Matmuls with the head's weight, with float32 sums."""

    def logits(
        self,
        features: Tensor,  # Hidden features, [n, H].
        weight: Tensor,  # Weight, [v, H].
        out: Tensor | None = None,
    ) -> Tensor:  # Raw logits [n, v], float32 or float64.
        """Return features @ weight.T, added to `out` if given."""
        if features.dtype in WIDE and features.dtype == weight.dtype:
            if out is None:
                return torch.nn.functional.linear(features, weight)
            return out.addmm_(features.to(out.dtype), weight.to(out.dtype).t())
        dtypes = features.dtype, weight.dtype
        # Splitting a float32 matrix into three bfloat16 matrices makes a product faster only above
        # 2^28 output elements.
        narrow = weight.shape[1] <= 64 and len(features) * len(weight) > 1 << 28
        if features.is_cuda and narrow and dtypes == (torch.float32, torch.bfloat16):
            # Three bfloat16 significands of 8 bits hold a float32 significand of 24 bits.
            high = features.bfloat16()
            middle = (features - high).bfloat16()
            features = torch.cat([high, middle, (features - high - middle).bfloat16()], 1)
            weight = weight.repeat(1, 3)
        beta = 0 if out is None else 1
        if out is None:
            wide = torch.promote_types(torch.promote_types(*dtypes), torch.float32)
            out = features.new_empty(len(features), len(weight), dtype=wide)
        if features.is_cuda and features.dtype == weight.dtype:
            alpha = 1 + accumulator_bias(features.device, features.shape[1])
            operands = (out, features, weight.t(), torch.float32)
            return aten.addmm.dtype_out(*operands, beta=beta, alpha=alpha, out=out)
        features = features.to(out.dtype)
        for block in _blocks(weight):
            out[:, block].addmm_(features, weight[block].to(out.dtype).t(), beta=beta)
        return out

    def input_gradient(
        self,
        gradient: Tensor,  # Gradient with respect to the logits, [n, v].
        weight: Tensor,  # Weight, [v, H].
        dtype: torch.dtype,
        # Tensor [n, H] of `dtype` that the returned gradient may overwrite.
        memory: Tensor | None = None,
    ) -> Tensor:  # Gradient with respect to the features, [n, H].
        """Return gradient @ weight in `dtype`, rounded once."""
        if weight.dtype in WIDE:
            return (gradient.to(weight.dtype) @ weight).to(dtype)
        if gradient.is_cuda and gradient.shape[1] % 8 == 0:
            gradient = gradient.to(weight.dtype)
            if dtype == weight.dtype:
                rows = max(1, LARGE // weight.shape[1])
                out = memory
                if out is None:
                    out = gradient.new_empty(len(gradient), weight.shape[1])
                for part, values in zip(out.split(rows), gradient.split(rows), strict=True):
                    torch.mm(values, weight, out=part)
                return out
            return torch.mm(gradient, weight, out_dtype=torch.float32).to(dtype)
        total = gradient.new_zeros(gradient.shape[0], weight.shape[1], dtype=torch.float32)
        self.add_input_gradient_(total, gradient, weight)
        return total.to(dtype)

    def add_input_gradient_(
        self,
        total: Tensor,  # Accumulator [n, H], float32 or float64.
        gradient: Tensor,  # Gradient with respect to the logits, [n, v].
        weight: Tensor,  # Weight, [v, H].
    ) -> None:
        """total += gradient @ weight."""
        if gradient.is_cuda and weight.dtype not in WIDE:
            gradient = gradient.to(weight.dtype)
            for part in _even(gradient):
                factors = gradient[:, part], weight[part]
                aten.addmm.dtype_out(total, *factors, torch.float32, out=total)
            return
        for block in _blocks(weight):
            total.addmm_(gradient[:, block].to(total.dtype), weight[block].to(total.dtype))


class FixedProducts(Products):
    """Matmuls by `Kernels.fixed_product`, in which the bits of an output row do not depend on any
    other row of the input."""

    def __init__(self, product: Callable[..., Tensor]) -> None:
        self.product = product

    def logits(self, features: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return self.product(features, weight.t(), out=out)

    def input_gradient(
        self, gradient: Tensor, weight: Tensor, dtype: torch.dtype, memory: Tensor | None = None
    ) -> Tensor:
        return self.product(gradient, weight, dtype=dtype)

    def add_input_gradient_(self, total: Tensor, gradient: Tensor, weight: Tensor) -> None:
        self.product(gradient, weight, out=total)


PLAIN = Products()


def add_weight_gradient_(
    total: Tensor,  # Accumulator of the weight gradient, [v, H].
    gradient: Tensor,  # Gradient with respect to the logits, [n, v].
    features: Tensor,  # Hidden features, [n, H].
    fresh: bool = False,  # True if the accumulator `total` holds no sum yet and is overwritten.
) -> None:
    """Add gradient.T @ features, [v, H], to the accumulator `total` in place."""
    if features.is_cuda and not (features.dtype in WIDE and gradient.dtype in WIDE):
        dtype = gradient.dtype if features.dtype in WIDE else features.dtype
        features = features.to(dtype)
        beta = 0 if fresh else 1
        for part in _even(gradient):
            rows = total[part]
            factors = gradient[:, part].to(dtype).t(), features
            if total.dtype == torch.float32:
                aten.addmm.dtype_out(rows, *factors, torch.float32, beta=beta, out=rows)
            elif total.dtype == dtype:
                rows.addmm_(*factors, beta=beta)
            # The matmul's inputs have another dtype than the sum `total`, e.g. bfloat16 inputs and
            # a float16 sum.
            else:
                product = torch.mm(*factors, out_dtype=torch.float32)
                rows.copy_(product) if fresh else rows.add_(product)
        return
    wide = sum_dtype(features.dtype)
    if fresh and total.dtype == wide == features.dtype == gradient.dtype:
        torch.mm(gradient.t(), features, out=total)
        return
    features = features.to(wide)
    for block in _blocks(total, features.shape[0]):
        part = gradient[:, block].to(wide).t()
        rows = total[block]
        if total.dtype == wide:
            rows.addmm_(part, features, beta=0 if fresh else 1)
        elif fresh:
            rows.copy_(part @ features)
        else:
            rows += part @ features


class WideLinear(torch.autograd.Function):
    """x @ weight.T in float32 or float64 for all input dtypes, for the inner product of an
    adapter."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, products: Products | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The default is None, because torch.compile cannot trace a default that is an object.
        ctx.products = products or PLAIN
        return ctx.products.logits(x, weight)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        into_x = into_weight = None
        if ctx.needs_input_grad[0]:
            into_x = ctx.products.input_gradient(gradient, weight, x.dtype)
        if ctx.needs_input_grad[1]:
            total = torch.zeros_like(weight, dtype=sum_dtype(x.dtype))
            # Under a compiled graph, do not iterate over blocks: their number would become a
            # constant.
            fresh = x.shape[0] > 0 and not torch.is_grad_enabled()  # `out=` has no autograd
            add_weight_gradient_(total, gradient, x, fresh)
            into_weight = total.to(weight.dtype)
        return into_x, into_weight, None
