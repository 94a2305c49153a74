"""Named tuples of kernel arguments (*records*), and the checks before a launch.

A record is one kernel argument with only the fields that the kernel reads, because every tensor
adds a microsecond to a launch. A field of a named tuple whose value is None or 1 is a compile-time
constant in Triton, at no cost to the launch, while a `tl.constexpr` field would cost two
microseconds. Kernels compare single fields with None, because Triton 3.6 cannot compare a named
tuple that contains None.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...statistics.softmax import Normalizer, SoftmaxCoefficients, SoftmaxState
from ..interface import Backward, Order, partials_of
from ..transform import Transform

BLOCK = 4096  # Largest number of columns that a GPU program handles at once.
WARPS = 8


class Matrix(NamedTuple):
    """A matrix [n, v] or [n, H] of unit stride along the row."""

    data: Tensor
    stride: int  # Row stride in elements.


class Strided(NamedTuple):
    """A matrix of any layout."""

    data: Tensor
    stride: int  # Row stride in elements.
    step: int  # Column stride in elements.


class LogitScaling(NamedTuple):
    """Scaling from raw logits to logits z: z = tanh(raw * inner) * outer with a soft cap, else raw
    * outer; the derivative dz/draw is the field `factor`, multiplied by 1 - tanh(raw * inner)^2 if
    there is a soft cap. See `formulas.transformed`."""

    inner: float | None
    outer: float
    factor: float
    # Temperature of each token, [n]: a kernel divides `outer` and `factor` by the token's
    # temperature. With temperature=None, the fields `outer` and `factor` of the logit scaling are
    # already divided by the single temperature of all tokens.
    temperature: Tensor | None
    same: int | None  # Flag: 1 if z equals the raw logits, else None.
    # Factor by which a matmul's result is multiplied before the bias is added.
    restore: float | None = None
    bias: Tensor | None = None  # Bias [v] of a product.


class GradientInputs(NamedTuple):
    """Kernel arguments for the gradient of the logits, made from a `Backward` (interface.py)."""

    targets: Tensor | None  # Target ids, [n]; every vector of this class has the shape [n].
    z: LogitScaling | None
    normalizer: Normalizer | None
    c: SoftmaxCoefficients
    logps: Tensor | None  # Log-probs of the targets; None if the coefficient c_target is absent.
    to: Matrix | None = None  # The gradient [n, v].
    # Order in which the gradient's rows are stored; None: the order of the tokens.
    order: Order | None = None
    tile: Matrix | None = None  # Raw logits or exp(z - shift), [n, v].
    shifts: Tensor | None = None  # Shift [n] of each row, if `tile` holds exp(z - shift).
    # Factors [n]: later matmuls multiply row i of the matrix that stores the logits' gradient by
    # multiples[i].
    multiples: Tensor | None = None
    columns: Matrix | None = None  # Chosen columns [n, K].
    column_logps: Matrix | None = None
    # Derivative of the loss with respect to each log-prob in `column_logps`; if None, the field
    # `c.target` holds this derivative, one number per token.
    column_slopes: Matrix | None = None
    # Raw logit [n] of each token's chosen column, given only if each token has exactly one chosen
    # column.
    column_raw: Tensor | None = None
    x: Matrix | None = None  # Hidden states [n, H].
    # Output [n, H]: row i is row i of the hidden states times multiples[i].
    features: Tensor | None = None
    # Vector [n]: least[i] is the largest absolute derivative of the loss with respect to a log-prob
    # of row i's chosen columns. |multiples[i]| is at least 2^-90 times least[i].
    least: Tensor | None = None


class BlockedColumns(NamedTuple):
    """K columns of each row of a tile, sorted and grouped by block, for kernels that walk along a
    row block by block."""

    # Column indices [n, K] within the tile, in ascending order; some may lie outside of the tile.
    places: Matrix
    # Bounds [n, blocks + 1]: a row's block b has the columns places[bounds[b]:bounds[b + 1]].
    bounds: Matrix


def blocked_columns(columns: Tensor, v: int, block: int) -> tuple[BlockedColumns, Tensor]:
    """Sort the columns [n, K] of each row of a tile [n, v], and find the columns in each block of
    `block` tile columns. Return the sorted columns as a `BlockedColumns`, and the permutation [n,
    K] that sorts each row's columns."""
    places, order = columns.sort(1)
    borders = torch.arange(0, v + block, block, device=columns.device)
    bounds = torch.searchsorted(places, borders.expand(len(places), -1).contiguous())
    return BlockedColumns(matrix_of(places), matrix_of(bounds)), order


def matrix_of(matrix: Tensor) -> Matrix:
    return Matrix(matrix, matrix.stride(0))


def strided(matrix: Tensor) -> Strided:
    return Strided(matrix, matrix.stride(0), matrix.stride(1))


def scaling(transform: Transform, lost: float = 0.0) -> LogitScaling:
    """Return the `LogitScaling` (kernel arguments) for a transform of raw logits. `lost` is the
    fraction of its size that a logit loses to the rounding of the tensor cores (see
    `accumulator_bias`)."""
    temperature = transform.temperature
    bias = transform.bias
    cap = transform.softcap
    if bias is not None:
        result = scaling(replace(transform, bias=None))
        return result._replace(bias=bias.contiguous(), restore=1 + lost if lost else None)
    number = temperature
    of_rows = None
    if isinstance(temperature, Tensor):
        number = 1.0
        of_rows = temperature.to(torch.float32).contiguous()
        # A slice of a vector of tokens may be unaligned: an aligned copy avoids a recompilation.
        if of_rows.data_ptr() % 16:
            of_rows = of_rows.clone()
    if cap is None:
        inner = None
        outer = transform.scale / number * (1 + lost)
    else:
        inner = transform.scale / cap * (1 + lost)
        outer = cap / number
    same = 1 if of_rows is None and inner is None and outer == 1 else None
    return LogitScaling(inner, outer, transform.scale / number, of_rows, same)


NO_INPUTS = GradientInputs(None, None, None, SoftmaxCoefficients(), None)


def gradient_inputs(backward: Backward) -> GradientInputs:
    targets, _, transform, normalizer, c, logps, *_ = backward
    return GradientInputs(targets, scaling(transform), normalizer, in_rows(c), logps)


def in_rows(c: SoftmaxCoefficients) -> SoftmaxCoefficients:
    """Return the gradient coefficients as contiguous vectors; the coefficients of an objective may
    be columns of a matrix."""
    return SoftmaxCoefficients(*[t if t is None else t.contiguous() for t in c])


def empty_partials(like: Tensor, n: int, needs: frozenset[str]) -> SoftmaxState:
    """Return an uninitialised float32 `SoftmaxState` with the fields named by `needs`."""
    entropy = "entropy" in needs
    mean = "mean_logit" in needs
    room = like.new_empty(3 + entropy + mean, n, dtype=torch.float32)
    return partials_of(room.unbind(), needs)


@functools.cache
def programs_on(device: torch.device) -> int:
    """Return the number of programs of a launch: a GPU's multiprocessors, or 8 in the
    interpreter."""
    cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if cuda else 8


def block_width(v: int, most: int | None = None) -> int:
    return min(most or BLOCK, triton.next_power_of_2(max(v, 16)))


def check_tile(name: str, tile: Tensor) -> Matrix:
    """Return the tile as a `Matrix`; TypeError or ValueError for a tile that kernels do not
    accept."""
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
    return matrix_of(tile)


def narrowed(tile: Tensor, backward: Backward) -> Tensor:
    """Return a view [n, v], of the dtype `backward.dtype`, of the memory of `tile`; row i of the
    view begins at the same address as row i of `tile`."""
    return tile.view(backward.dtype or tile.dtype)[:, : tile.shape[1]]
