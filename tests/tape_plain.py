"""The twin in PyTorch of the kernel that runs tapes, on any device and in any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headloss.batch.packing import PackedBatch
from headloss.batch.segments import Chunk, Segments
from headloss.kernels.opcodes import ELEMENTWISE, Op
from headloss.objective.recording import COMPUTE, SEGMENTS, TOKENS, Constant
from headloss.objective.tape import LAUNCH, SEGMENT, TOKEN, Column, Tape


def run_plain(tape: Tape, launch: tuple) -> tuple[list[Tensor], Tensor, Tensor]:
    """Vectors, measurements and the loss, in PyTorch, on any device and in any dtype."""
    (batch, chunk, inputs, numbers), dtype = launch, tape.dtype
    segments = batch.segments.slice(chunk)
    device = segments.ids.device
    every = torch.ones_like(segments.ids, dtype=torch.bool)
    live = every if batch.live is None else batch.live[chunk.rows]
    real = torch.arange(chunk.first, chunk.last, device=device) < batch._count
    shapes = (len(segments.ids), segments.count)
    registers: tuple[list[Any], list[Any]] = tuple([None] * n for n in tape.registers)  # type: ignore[assignment]
    measured: list[Tensor | None] = [None] * len(tape.kinds)
    for row in (row for phase in tape.phases for row in phase):
        own, op = registers[row.kind], row.op
        if op is Op.LOAD:
            column = inputs[row.operands[0]]  # type: ignore[index]
            own[row.out] = _read(column, batch, chunk, live, row.kind == SEGMENTS).to(dtype)
            continue
        if op is Op.NUMBER:
            number = numbers[row.operands[0]]  # type: ignore[index]
            number = torch.as_tensor(number, dtype=dtype, device=device)
            own[row.out] = number.expand(shapes[row.kind])
            continue
        source = registers[1 - row.kind] if op in (Op.EXPAND, Op.TOTAL) else own
        values = [
            torch.full((shapes[row.kind],), o.value, dtype=dtype, device=device)
            if isinstance(o, Constant)
            else source[o]
            for o in row.operands
        ]
        if op in (Op.SUM, Op.LARGEST, Op.SMALLEST, Op.COUNT):
            kept = real if row.kind == SEGMENTS else live
            found = _measure(op, values, kept, batch._count)
            before = measured[row.out]
            measured[row.out] = found if before is None else before + found
        elif op in ELEMENTWISE:
            own[row.out] = COMPUTE[op](*values)
        elif op is Op.OUT:
            own[row.out] = torch.where(live, values[0], 0)
        else:
            own[row.out] = _of_segments(op, values, segments)
    sums = torch.stack([m for m in measured if m is not None])
    return registers[TOKENS][: len(tape.vectors)], sums, sums[tape.terms].to(dtype)


def _read(
    column: Column, batch: PackedBatch, chunk: Chunk, live: Tensor, of_segments: bool
) -> Tensor:
    """An input at the tokens of a chunk, or its segments; 0 at tokens that are not scored."""
    (values, way), rows = column, chunk.rows
    if of_segments:
        return values[chunk.first : chunk.last]
    if way == LAUNCH:
        return values
    index: Any = batch.segments.ids if way == SEGMENT else batch.index
    if way == TOKEN:
        values = values[rows]
    elif len(values):
        values = values[index[rows].masked_fill(~live, 0)]
    return torch.where(live, values, 0)


def _measure(op: Op, values: list[Tensor], kept: Tensor, segments: int) -> Tensor:
    if op is Op.COUNT:
        return values[0].new_full((), segments, dtype=torch.float64)
    value, factor, mask = (v.double() for v in values)
    kept = kept & (mask != 0)
    if op is Op.SUM:
        return torch.where(kept, value * factor, 0).sum()
    sign = 1 if op is Op.LARGEST else -1
    rows = torch.where(kept, sign * value, -torch.inf)
    return sign * torch.cat([rows, rows.new_full((1,), -torch.inf)]).amax()


def _of_segments(op: Op, values: list[Tensor], segments: Segments) -> Tensor:
    """EXPAND, TOTAL and pairs, which stand at both of their segments."""
    if op is Op.EXPAND:
        return segments.expand(values[0])
    if op is Op.TOTAL:
        return segments.sum(values[0])
    at = torch.arange(segments.count, device=values[0].device)
    first, second = at & ~1, at | 1
    paired = second < segments.count
    if op is Op.FIRST:
        return values[0][first]
    if op is Op.SECOND:
        return values[0][torch.where(paired, second, at)]
    return torch.where(paired, torch.where(at == first, *values), 0)
