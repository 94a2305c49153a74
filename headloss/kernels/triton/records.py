"""The records that kernels take, and what a launch checks.

A record goes to a kernel as one argument, and has what this kernel reads: a launch takes one
microsecond for each tensor. A field that is None, or 1, is known when the kernel is compiled, at no
cost to the launch; a `tl.constexpr` would cost two microseconds. A kernel asks this of fields:
Triton 3.6 cannot compare a record that has a None in it.
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

BLOCK = 4096  # columns a program works on at once, at most
WARPS = 8


class Matrix(NamedTuple):
    """[n, v], or [n, H]."""

    data: Tensor
    stride: int  # of rows


class Strided(NamedTuple):
    """A matrix of any layout."""

    data: Tensor
    stride: int  # of rows
    step: int  # of columns


class LogitScaling(NamedTuple):
    """z = tanh(raw * inner) * outer under a soft cap, else raw * outer; dz/draw = factor, times the
    soft cap's own slope. See `formulas.transformed`."""

    inner: float | None
    outer: float
    factor: float
    temperature: Tensor | None  # [n]: what outer and factor are still to be divided by
    same: int | None  # 1: z is raw
    restore: float | None = None  # what a product multiplies raw by first, see `scaling`
    bias: Tensor | None = None  # [v]: what it then adds


class GradientInputs(NamedTuple):
    """A `Backward` as kernels read it, and the operands of those that write its gradient."""

    targets: Tensor | None  # [n], as all vectors
    z: LogitScaling | None
    normalizer: Normalizer | None
    c: SoftmaxCoefficients
    logps: Tensor | None  # of the targets; None: their elements have no slope of their own
    to: Matrix | None = None  # [n, v] the gradient
    order: Order | None = None  # the rows of `to`
    tile: Matrix | None = None  # [n, v] raw logits, or exp logits
    shifts: Tensor | None = None  # [n] of exp logits
    multiples: Tensor | None = None  # [n] of the rows of `to`, by which they are to be multiplied
    columns: Matrix | None = None  # [n, K] the chosen ones, with their log-probs and slopes
    column_logps: Matrix | None = None
    column_slopes: Matrix | None = None  # None: the target's alone, from its coefficient
    column_raw: Tensor | None = None  # [n] raw logits, where one column is chosen
    x: Matrix | None = None  # [n, H] hidden states
    features: Tensor | None = None  # [n, H] their rows times the multiples
    least: Tensor | None = None  # [n] size below which a multiple must not be far


class BlockedColumns(NamedTuple):
    """Columns of each row of a tile, for kernels that walk along it in blocks."""

    places: Matrix  # [n, K] ascending; some may lie outside of the tile
    bounds: Matrix  # [n, blocks + 1]: block b holds places[bounds[b]:bounds[b + 1]]


def blocked_columns(columns: Tensor, v: int, block: int) -> tuple[BlockedColumns, Tensor]:
    """Columns [n, K] of a tile that has v, and the order [n, K] in which they ascend."""
    places, order = columns.sort(1)
    borders = torch.arange(0, v + block, block, device=columns.device)
    bounds = torch.searchsorted(places, borders.expand(len(places), -1).contiguous())
    return BlockedColumns(matrix_of(places), matrix_of(bounds)), order


def matrix_of(matrix: Tensor) -> Matrix:
    return Matrix(matrix, matrix.stride(0))


def strided(matrix: Tensor) -> Strided:
    return Strided(matrix, matrix.stride(0), matrix.stride(1))


def scaling(transform: Transform, lost: float = 0.0) -> LogitScaling:
    """Of raw logits; `lost` is the share of its size that a product lacks (`accumulator_bias`)."""
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
        if of_rows.data_ptr() % 16:  # some of the tokens': kernels are the same wherever they begin
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
    """As kernels read them: an objective's slopes may be columns of a matrix."""
    return SoftmaxCoefficients(*[t if t is None else t.contiguous() for t in c])


def empty_partials(like: Tensor, n: int, needs: frozenset[str]) -> SoftmaxState:
    """Room for what `needs` asks for, in float32."""
    entropy = "entropy" in needs
    mean = "mean_logit" in needs
    room = like.new_empty(3 + entropy + mean, n, dtype=torch.float32)
    return partials_of(room.unbind(), needs)


@functools.cache
def programs_on(device: torch.device) -> int:
    """One for each multiprocessor; a few in the interpreter."""
    cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if cuda else 8


def block_width(v: int, most: int | None = None) -> int:
    return min(most or BLOCK, triton.next_power_of_2(max(v, 16)))


def check_tile(name: str, tile: Tensor) -> Matrix:
    """It as kernels take it, where they do."""
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
    """[n, v] of a dtype at most as wide, in the front of each row's own memory."""
    return tile.view(backward.dtype or tile.dtype)[:, : tile.shape[1]]
