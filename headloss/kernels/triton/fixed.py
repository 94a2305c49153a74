"""Matrix product in Triton whose tile and summation order over k are the same for every number of
rows.

A vendor's library (cuBLAS) chooses a kernel by the number of rows, and every kernel adds in a
different order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher, cdiv
from .records import matrix_of, strided
from .tiles import place_of

ROWS = 128
COLUMNS = 128
# Bytes of each row of `a` [n, k] that one step of the loop over the inner dimension k reads.
BYTES = 128
# Number of row tiles that are computed one after another with each column tile, so that the columns
# of `b` stay in the L2 cache.
GROUP = tl.constexpr(8)


@triton.jit(do_not_specialize=["n"])
def fixed_product_kernel(
    a,  # Matrix [n, k].
    b,  # Strided [k, m].
    out,  # Matrix [n, m].
    n,
    m,
    k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE: tl.constexpr,  # True if blocks of `a` and `b` are converted to float32.
    PRECISION: tl.constexpr,
    ADD: tl.constexpr,
):
    row, column = place_of(tl.program_id(0), tl.cdiv(n, ROWS), tl.cdiv(m, COLUMNS), GROUP)
    rows = row * ROWS + tl.arange(0, ROWS)
    columns = column * COLUMNS + tl.arange(0, COLUMNS)
    row_inside = (rows < n)[:, None]
    column_inside = (columns < m)[None, :]
    left = a.data + rows.to(tl.int64)[:, None] * a.stride
    right = b.data + columns.to(tl.int64)[None, :] * b.step
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        at = start + tl.arange(0, DEPTH)
        x = tl.load(left + at[None, :], mask=row_inside & (at < k)[None, :], other=0.0)
        lines = right + at.to(tl.int64)[:, None] * b.stride
        w = tl.load(lines, mask=column_inside & (at < k)[:, None], other=0.0)
        if WIDE:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    place = out.data + rows.to(tl.int64)[:, None] * out.stride + columns[None, :]
    if ADD:
        total += tl.load(place, mask=row_inside & column_inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.data.dtype.element_ty), mask=row_inside & column_inside)


launch = Launcher(fixed_product_kernel, num_warps=8, num_stages=3)


def fixed_product(
    a: Tensor, b: Tensor, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    n, k = a.shape
    m = b.shape[1]
    add = out is not None
    # Copy an operand whose address is not a multiple of 16 bytes, because Triton compiles a
    # separate kernel for such pointers.
    if a.stride(1) != 1 or a.data_ptr() % 16:
        a = a.clone(memory_format=torch.contiguous_format)
    out = a.new_empty(n, m, dtype=dtype) if out is None else out
    if n and m:
        # `tl.dot` sums float64 operands in float64, and Triton's interpreter multiplies the bits of
        # bfloat16 operands as integers.
        narrow = (torch.float32, torch.float16) + (torch.bfloat16,) * a.is_cuda
        wide = a.dtype != b.dtype or a.dtype not in narrow
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32" and not wide
        rows = ROWS
        columns = COLUMNS
        # A small number m of columns, such as the rank of a LoRA adapter, needs no wide tile. (On
        # tensor cores, the shape of a tile decides the order in which the k products of a dot
        # product are added.)
        if m <= COLUMNS // 2 and not tf32 and (wide or a.dtype == torch.float32):
            rows = ROWS // 4
            columns = max(16, triton.next_power_of_2(m))
        launch(
            cdiv(n, rows) * cdiv(m, columns),
            *(matrix_of(a), strided(b), matrix_of(out), n, m, k),
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=BYTES // (4 if wide else a.element_size()),
            WIDE=wide,
            PRECISION="tf32" if tf32 else "ieee",
            ADD=add,
        )
    return out
