"""The instructions of a tape (`objective.tape`), shared by what writes them and what runs them.

An instruction is a row of six int32: opcode, destination, three operands, and the bits of one
float32, which stands for every operand that is -1. A register is a vector over the tokens or over
the segments; booleans are 0 and 1.

    rows of code                    destination        operands
    LOAD                            register           input, way (see below), dtype
    NUMBER                          register           slot of an argument
    ADD .. SIGMOID                  register           registers
    EXPAND, TOTAL                   register           register of the other kind
    FIRST, SECOND, PAIR             register           registers over segments
    OUT                             register           register; 0 at tokens that are not scored
    SUM, LARGEST, SMALLEST, COUNT   measurement        values, factor, mask
    PHASE                           kind of vectors    first row, last row + 1
"""

from __future__ import annotations

from enum import IntEnum

import torch

WIDTH = 6
INPUTS = 20  # addresses that a launch takes
NUMBERS = 12  # and floats
MEASUREMENTS = 128  # sums and extremes of one tape


class Op(IntEnum):
    LOAD = 0
    NUMBER = 1
    ADD = 2
    SUB = 3
    MUL = 4
    DIV = 5
    MIN = 6
    MAX = 7
    GT = 8
    GE = 9
    EQ = 10
    WHERE = 11
    EXP = 12
    LOG = 13
    EXPM1 = 14
    LOG1P = 15
    SIGMOID = 16
    OUT = 17
    SUM = 18
    LARGEST = 19
    SMALLEST = 20
    COUNT = 21
    EXPAND = 22
    TOTAL = 23
    FIRST = 24
    SECOND = 25
    PAIR = 26
    PHASE = 27


class Way(IntEnum):
    """Where the value of token t (the i-th of the launch) or segment s is found in an input."""

    LAUNCH = 0  # [n] at i
    TOKEN = 1  # [T] at t
    INDEX = 2  # [N] at index[t]
    SEGMENT = 3  # [S] at ids[t], or at s
    SCALAR = 4  # []


DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int64: 4,
    torch.int32: 5, torch.bool: 6, torch.uint8: 6
}

ELEMENTWISE = frozenset(range(Op.ADD, Op.SIGMOID + 1))
MEASURED = frozenset({Op.SUM, Op.LARGEST, Op.SMALLEST, Op.COUNT})
