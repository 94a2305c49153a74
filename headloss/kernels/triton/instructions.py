"""A tape's instructions on a GPU: one kernel that reads them, the same for every objective.

n tokens of a launch, S segments, G programs. A program takes a block of tokens; where values are
summed over segments, it takes whole segments and goes through the phases by itself. Registers lie
in global memory and stay in the cache: a program reads what its own threads wrote. Each program
leaves its share of a measurement; the shares are added in the order of the programs, in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..opcodes import INPUTS, MEASUREMENTS, NUMBERS, WIDTH, Op, Way

NUMBER, OUT = tl.constexpr(int(Op.NUMBER)), tl.constexpr(int(Op.OUT))
SUB, MUL, DIV, MIN = (tl.constexpr(int(op)) for op in (Op.SUB, Op.MUL, Op.DIV, Op.MIN))
MAX, GT, GE, EQ = (tl.constexpr(int(op)) for op in (Op.MAX, Op.GT, Op.GE, Op.EQ))
WHERE, EXP, LOG = (tl.constexpr(int(op)) for op in (Op.WHERE, Op.EXP, Op.LOG))
EXPM1, LOG1P = (tl.constexpr(int(op)) for op in (Op.EXPM1, Op.LOG1P))
SUM, LARGEST, SMALLEST = (tl.constexpr(int(op)) for op in (Op.SUM, Op.LARGEST, Op.SMALLEST))
COUNT, EXPAND, TOTAL = (tl.constexpr(int(op)) for op in (Op.COUNT, Op.EXPAND, Op.TOTAL))
FIRST, SECOND, PAIR = (tl.constexpr(int(op)) for op in (Op.FIRST, Op.SECOND, Op.PAIR))
LAUNCH, INDEX = tl.constexpr(int(Way.LAUNCH)), tl.constexpr(int(Way.INDEX))
SEGMENT, SCALAR = tl.constexpr(int(Way.SEGMENT)), tl.constexpr(int(Way.SCALAR))
ROW = tl.constexpr(WIDTH)
SLOTS = tl.constexpr(MEASUREMENTS)
# As `opcodes.DTYPES` counts them.
TYPES = (tl.float32, tl.float64, tl.bfloat16, tl.float16, tl.int64, tl.int32, tl.uint8)
TYPES = tl.constexpr(TYPES)
ADDRESSES, FLOATS = tl.constexpr(INPUTS), tl.constexpr(NUMBERS)


@triton.jit
def read_as(address, at, mask, dtype):
    """Values of an input of any dtype, in float32."""
    value = tl.zeros(at.shape, tl.float32)
    for i in tl.static_range(7):
        if dtype == i:
            place = address.to(tl.pointer_type(TYPES[i])) + at
            value = tl.load(place, mask=mask, other=0).to(tl.float32)
    return value


@triton.jit
def computed(op, x, y, z):
    """An elementwise instruction. What is not exact in few operations is made in float64."""
    value = x + y
    if op == SUB:
        value = x - y
    elif op == MUL:
        value = x * y
    elif op == DIV:
        value = tl.div_rn(x, y)
    elif op == MIN:
        value = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif op == MAX:
        value = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif op == GT:
        value = tl.where(x > y, 1.0, 0.0)
    elif op == GE:
        value = tl.where(x >= y, 1.0, 0.0)
    elif op == EQ:
        value = tl.where(x == y, 1.0, 0.0)
    elif op == WHERE:
        value = tl.where(x != 0, y, z)
    elif op >= EXP:
        wide = x.to(tl.float64)
        small = tl.abs(x) < 1e-5  # where the second term of the series is the last that counts
        if op == EXP:
            wide = tl.exp(wide)
        elif op == LOG:
            wide = tl.log(wide)
        elif op == EXPM1:
            wide = tl.where(small, wide + wide * wide * 0.5, tl.exp(wide) - 1)
        elif op == LOG1P:
            wide = tl.where(small, wide - wide * wide * 0.5, tl.log(1 + wide))
        else:
            wide = 1 / (1 + tl.exp(-wide))
        value = wide.to(tl.float32)
    return value


@triton.jit
def measured(op, x, y, kept, slot, segments, program):
    """Add a block's share to what this program has of a measurement."""
    if op == COUNT:
        tl.store(slot, tl.where(program == 0, segments, 0).to(tl.float64))
    elif op == SUM:
        share = tl.where(kept, x.to(tl.float64) * y.to(tl.float64), 0.0)
        tl.store(slot, tl.load(slot) + tl.sum(share, 0))
    else:
        sign = tl.where(op == LARGEST, 1.0, -1.0)
        value = tl.where(kept, x * sign, float("-inf"))
        best = tl.max(value, 0).to(tl.float64)
        unknown = tl.sum((value != value).to(tl.int32), 0) > 0
        best = tl.where(unknown, float("nan"), best)
        before = tl.load(slot) * sign.to(tl.float64)
        best = tl.where((before > best) | (before != before), before, best)
        tl.store(slot, best * sign.to(tl.float64))


@triton.jit
def over_segments(op, x, y, i, inside, size):
    """FIRST, SECOND and PAIR at segments i; x and y are registers."""
    first, second = i & ~1, i | 1
    paired = second < size
    if op == FIRST:
        value = tl.load(x + first, mask=inside, other=0.0)
    elif op == SECOND:
        value = tl.load(x + tl.where(paired, second, i), mask=inside, other=0.0)
    else:
        value = tl.load(tl.where(i == first, x, y) + i, mask=inside & paired, other=0.0)
    return value


@triton.jit
def store_totals(into, values, counts, low, high, start, BLOCK: tl.constexpr):
    """The sum of [n] `values` in each of the segments low..high, whose first token is `start`."""
    lane = tl.arange(0, BLOCK)
    for segment in range(low, high):
        end = start + tl.load(counts + segment).to(tl.int32)
        total = tl.zeros((BLOCK,), tl.float64)
        for at in range(start, end, BLOCK):
            total += tl.load(values + at + lane, mask=at + lane < end, other=0.0).to(tl.float64)
        tl.store(into + segment, tl.sum(total, 0).to(tl.float32))
        start = end


@triton.jit(do_not_specialize=range(20 + INPUTS + NUMBERS))  # none of its arguments
def tape_kernel(
    scratch,  # float32
    code, phases, kinds, index, ids, live, counts, shares, loss,  # addresses
    terms, has_live, n, first, size, first_segment, segments, token_registers, measurements, per,
    i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i15, i16, i17, i18, i19,
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, BY_SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    inputs = (i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i15, i16, i17, i18, i19)  # noqa: E501
    numbers = (f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11)
    program, programs = tl.program_id(0), tl.num_programs(0)
    code = code.to(tl.pointer_type(tl.int32))
    index, ids = index.to(tl.pointer_type(tl.int64)), ids.to(tl.pointer_type(tl.int64))
    counts = counts.to(tl.pointer_type(tl.int64)) + first_segment
    live, shares = live.to(tl.pointer_type(tl.uint8)), shares.to(tl.pointer_type(tl.float64))
    over_tokens, over_size, lane = scratch, tl.cdiv(n, 4).to(tl.int64) * 4, tl.arange(0, BLOCK)
    of_segments = scratch + token_registers * over_size
    # The tokens and the segments of this program.
    s_low, s_high, t_low = program * 0, program * 0, program * BLOCK
    t_high = tl.minimum(t_low + BLOCK, n)
    if BY_SEGMENT:
        s_low, t_low, t_high = program * per, program * 0, program * 0
        s_high = tl.minimum(s_low + per, size)
        for start in range(0, s_high, BLOCK):
            count = tl.load(counts + start + lane, mask=start + lane < s_high, other=0).to(tl.int32)
            t_high += tl.sum(count, 0)
            t_low += tl.sum(tl.where(start + lane < s_low, count, 0), 0)
    slots = tl.arange(0, SLOTS)
    kind = tl.load(kinds.to(tl.pointer_type(tl.int32)) + slots)
    none = tl.where(kind == SMALLEST, float("inf"), tl.where(kind == LARGEST, float("-inf"), 0.0))
    tl.store(shares + slots * programs + program, none.to(tl.float64), mask=slots < measurements)
    tl.debug_barrier()
    for phase in range(phases):
        over = tl.load(code + phase * ROW + 1)
        begin, end = tl.load(code + phase * ROW + 2), tl.load(code + phase * ROW + 3)
        own, length, low, high = over_tokens, over_size, t_low, t_high
        if BY_SEGMENT:
            if over != 0:
                own, length, low, high = of_segments, size.to(tl.int64), s_low, s_high
        for start in range(low, tl.maximum(high, low + 1), BLOCK):
            i = start + lane
            inside = i < high
            kept = inside & (first_segment + i < segments)
            if over == 0:
                kept = inside
                if has_live != 0:
                    kept = inside & (tl.load(live + first + i, mask=inside, other=0) != 0)
            for at in range(begin, end):
                row = code + at * ROW
                op, out, a, b = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
                c, constant = tl.load(row + 4), tl.load(row + 5).to(tl.float32, bitcast=True)
                if op <= NUMBER:
                    if op == NUMBER:
                        number = numbers[0]
                        for k in tl.static_range(1, FLOATS):
                            number = tl.where(a == k, numbers[k], number)
                        value = tl.zeros((BLOCK,), tl.float32) + number
                    else:
                        address = inputs[0]
                        for k in tl.static_range(1, ADDRESSES):
                            address = tl.where(a == k, inputs[k], address)
                        place = i.to(tl.int64)
                        if b == SCALAR:
                            place = place * 0
                        elif over != 0:
                            place += first_segment
                        elif b == INDEX:
                            place = tl.load(index + first + i, mask=kept, other=0)
                        elif b == SEGMENT:
                            place = tl.load(ids + first + i, mask=kept, other=0)
                        elif b != LAUNCH:
                            place += first
                        there = kept
                        if b == LAUNCH:
                            there = inside
                        value = read_as(address, place, there, c)
                    tl.store(own + out * length + i, value, mask=inside)
                elif op < EXPAND:
                    to = tl.where(a >= 0, high, low)  # nothing is read for a constant
                    x = tl.load(own + a * length + i, mask=i < to, other=constant)
                    to = tl.where(b >= 0, high, low)
                    y = tl.load(own + b * length + i, mask=i < to, other=constant)
                    to = tl.where(c >= 0, high, low)
                    z = tl.load(own + c * length + i, mask=i < to, other=constant)
                    if op > OUT:
                        slot = shares + out * programs + program
                        measured(op, x, y, kept & (z != 0), slot, segments, program)
                    elif op == OUT:
                        tl.store(own + out * length + i, tl.where(kept, x, 0.0), mask=inside)
                    else:
                        tl.store(own + out * length + i, computed(op, x, y, z), mask=inside)
                if BY_SEGMENT:
                    into = own + out * length
                    if op == EXPAND:
                        segment = tl.load(ids + first + i, mask=inside, other=0) - first_segment
                        value = tl.load(of_segments + a * size + segment, mask=inside, other=0.0)
                        tl.store(into + i, value, mask=inside)
                    elif op == TOTAL:
                        values = over_tokens + a * over_size
                        store_totals(into, values, counts, s_low, s_high, t_low, BLOCK)
                    elif op >= FIRST:
                        x, y = own + a * length, own + b * length
                        value = over_segments(op, x, y, i, inside, size)
                        tl.store(into + i, value, mask=inside)
                tl.debug_barrier()  # other threads may read what these wrote
    if programs == 1:
        tl.store(loss.to(tl.pointer_type(tl.float32)), tl.load(shares + terms).to(tl.float32))


@triton.jit(do_not_specialize=["results", "kinds", "shares", "programs", "loss", "terms"])
def fold_kernel(results, kinds, shares, programs, loss, terms, BLOCK: tl.constexpr):
    """A measurement from the programs' shares, added in order; that at `terms` is the loss."""
    at = tl.program_id(0)
    kind = tl.load(kinds.to(tl.pointer_type(tl.int32)) + at)
    shares = shares.to(tl.pointer_type(tl.float64)) + at * programs
    lane = tl.arange(0, BLOCK)
    if (kind == SUM) | (kind == COUNT):
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, programs, BLOCK):
            total += tl.load(shares + start + lane, mask=start + lane < programs, other=0.0)
        found = tl.sum(total, 0)
        tl.store(results + at, found)
        if at == terms:
            tl.store(loss.to(tl.pointer_type(tl.float32)), found.to(tl.float32))
    else:
        sign = tl.where(kind == LARGEST, 1.0, -1.0).to(tl.float64)
        best, unknown = tl.full((BLOCK,), float("-inf"), tl.float64), 0
        for start in range(0, programs, BLOCK):
            inside = start + lane < programs
            share = sign * tl.load(shares + start + lane, mask=inside, other=0.0)
            share = tl.where(inside, share, float("-inf"))
            unknown += tl.sum((share != share).to(tl.int32), 0)
            best = tl.maximum(best, share)
        found = tl.where(unknown > 0, float("nan"), sign * tl.max(best, 0))
        tl.store(results + at, found)
