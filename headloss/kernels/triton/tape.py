"""Launching a tape: its instructions for inputs of some layout, with little work of the host."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..opcodes import DTYPES, INPUTS, MEASUREMENTS, NUMBERS, WIDTH, Op, Way
from .instructions import fold_kernel, tape_kernel
from .launch import Known, OfNumbers

Layout = tuple[tuple[int, torch.dtype] | None, ...]  # of inputs, numbers; None: an argument
Tape = Row = Launch = Any  # of objective.tape, which stands above the kernels

BLOCK = 1024  # tokens at once
FOLD = 256  # programs whose shares are added at once
PROGRAMS = 2048  # at most, where a program takes whole segments
_SCALAR, _SEGMENT = int(Way.SCALAR), int(Way.SEGMENT)


def linked(tape: Tape, layout: Layout, device: torch.device) -> tuple[Tensor, int, int, bool]:
    """The phases' heads, the instructions, and the kinds of measurements as one vector of int32,
    its address and that of the kinds; and whether tokens ask for their segments."""
    heads: list[list[int]] = []
    rows: list[list[int]] = []
    begin = len(tape.phases)
    for phase, instructions in enumerate(tape.phases):
        heads.append([int(Op.PHASE), phase % 2, begin, begin := begin + len(instructions), 0, 0])
        rows += [_encoded(row, len(tape.inputs), layout) for row in instructions]
    kinds = [int(kind) for kind in tape.kinds] + [0] * (MEASUREMENTS - len(tape.kinds))
    table = [number for row in (*heads, *rows, kinds) for number in row]
    code = torch.tensor(table, dtype=torch.int32, device="cpu").to(device)
    by_id = len(tape.phases) > 1 or _SEGMENT in [form[0] for form in layout if form is not None]
    return code, code.data_ptr(), code.data_ptr() + 4 * WIDTH * begin, by_id


def _encoded(row: Row, inputs: int, layout: Layout) -> list[int]:
    op, out, operands, _ = row
    if op in (Op.LOAD, Op.NUMBER):
        (at,) = operands
        at = at if op is Op.LOAD else inputs + at  # type: ignore[operator]
        found = layout[at]  # type: ignore[index]
        if found is None:  # numbers have slots of their own
            return [int(Op.NUMBER), out, at - inputs, 0, 0, 0]  # type: ignore[operator]
        slot = sum(form is not None for form in layout[:at])  # type: ignore[misc]
        return [int(Op.LOAD), out, slot, found[0], DTYPES[found[1]], 0]
    constant = next((o for o in operands if not isinstance(o, int)), (0.0,))[0]
    bits = struct.unpack("<i", struct.pack("<f", constant))[0]
    places = [o if isinstance(o, int) else -1 for o in operands]
    return [int(op), out, *places, *[-1] * (3 - len(places)), bits]


def run(tape: Tape, launch: Launch) -> tuple[Sequence[Tensor], Tensor, Tensor]:
    """Vectors, measurements and the loss; registers are in float32."""
    scratch, pitch, results, loss = start(tape, launch)
    n = launch[1].stop - launch[1].start
    vectors = [scratch[k * pitch : k * pitch + n] for k in range(len(tape.vectors))]
    return vectors, results, loss


def start(
    tape: Tape, launch: Launch, known: Known | None = None, stream: int = 0
) -> tuple[Tensor, int, Tensor, Tensor]:
    """The registers, at a pitch, the measurements, and the loss: two launches, or one for few
    tokens. Inputs may be addresses of float32. `known`: what earlier runs sent, on its stream."""
    batch, (first, stop, first_segment, last), inputs, numbers = launch
    segments, live, index = batch.segments, batch.live, batch.index
    layout, addresses, floats = list[Any](), list[int](), list[float]()
    for values, way in inputs:
        address = type(values) is int
        layout.append((way, torch.float32 if address else values.dtype))
        addresses.append(values if address else values.data_ptr())
    for number in numbers:
        tensor = isinstance(number, Tensor)
        layout.append((_SCALAR, number.dtype) if tensor else None)
        floats.append(0.0 if tensor else float(number))
        if tensor:
            addresses.append(number.data_ptr())
    key = batch.targets.device, *layout
    program = tape.linked.get(key)
    if program is None:
        program = tape.linked[key] = linked(tape, tuple(layout), key[0])
    _, code, kinds, by_id = program
    n, size = stop - first, last - first_segment
    ids = segments.ids if by_id else segments._given
    by_segment, per, count = len(tape.phases) > 1, 1, -(-n // BLOCK) or 1
    if by_segment:
        per = tape.segments_per_unit * max(1, -(-size // (tape.segments_per_unit * PROGRAMS)))
        count = -(-size // per) or 1
    (of_tokens, of_segments), measurements, pitch = tape.registers, len(tape.kinds), -(-n // 4) * 4
    results = batch.targets.new_empty(measurements, dtype=torch.float64)
    shares = results if count == 1 else results.new_empty(measurements * count)
    scratch = results.new_empty(of_tokens * pitch + of_segments * size + 1, dtype=torch.float32)
    loss = scratch.new_empty(())
    vectors = index, ids, live, segments._local_counts
    places = [code if t is None else t.data_ptr() for t in vectors]
    if not (n and size):  # a null pointer would have another type
        addresses, places = [a or code for a in addresses], [a or code for a in places]
    given = [
        code, len(tape.phases), kinds, *places, shares.data_ptr(), loss.data_ptr(),
        tape.terms, 0 if live is None else 1, n, first, size, first_segment, batch._count,
        of_tokens, measurements, per, *addresses, *[code] * (INPUTS - len(addresses)), *floats,
        *[0.0] * (NUMBERS - len(floats))
    ]  # fmt: skip
    if known is not None:
        known.send(count, stream, (scratch.data_ptr(), *given))
    else:
        launch_tape(count, scratch, *given, BY_SEGMENT=by_segment, BLOCK=BLOCK)
    if count > 1:
        of_shares = kinds, shares.data_ptr(), count, loss.data_ptr(), tape.terms
        _fold(measurements, results, *of_shares, BLOCK=FOLD)
    return scratch, pitch, results, loss


launch_tape = OfNumbers(tape_kernel, num_warps=8, num_stages=1)
_fold = OfNumbers(fold_kernel, num_warps=4)
