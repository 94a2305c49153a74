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


# In the order of their numbers, by which the kernel compares some of them.
Op = IntEnum(
    "Op",
    "LOAD NUMBER ADD SUB MUL DIV MIN MAX GT GE EQ WHERE EXP LOG EXPM1 LOG1P SIGMOID OUT SUM "
    "LARGEST SMALLEST COUNT EXPAND TOTAL FIRST SECOND PAIR PHASE",
    start=0,
)


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
