"""The planner: chooses the schedule of a call, chunks and tiles, computes the bytes, and gives the
reason.

T scored tokens, H hidden width, V vocabulary, S segments.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

from ..batch.segments import Chunk
from ..head.products import GRAIN, PARTS
from ..options import Options
from .plan_inputs import EXP_ROWS, WAVE_TILE, PlanInputs, Schedule, Tile, bytes_by_part, peak_bytes

MIB = 1 << 20
CHUNK_WAVES = 0.3  # Overhead per chunk, in units of the time of one wave of matmul output tiles.
# Default memory of a chunk in bytes, on a CPU and on a GPU whose memory size is unknown. On a GPU
# of known memory size, a chunk may use 1 / GPU_SHARE of the GPU's memory.
CPU_BUDGET = 256 * MIB
GPU_BUDGET = 1200 * MIB
GPU_SHARE = 64
# Number of multiply-adds of a block's matmul above which skipping rows without a gradient saves
# time: a GPU waits until the CPU has read the number of these rows; a CPU needs extra operations.
SKIP_WORTH = 2 * 10**11
CPU_SKIP_WORTH = 1 << 24
FIXED_COLUMNS = 16384  # Vocabulary columns of a block if `Options.batch_invariant` is True.
# Working memory of a loop over tiles of logits that writes softmax terms or gradients in 16 bits,
# in bytes.
SWEEP_BYTES = 480 << 20
# Working memory of a loop over tiles of logits in a call with a teacher, in bytes.
TEACHER_BYTES = 660 << 20
# Lower and upper bound on the number of logits in one block of vocabulary columns, in loops over
# tiles of logits.
SLAB_ELEMENTS = (48 << 20, 192 << 20)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The schedule, block sizes and memory of a call, chosen before the call runs.

    Attributes:
        schedule: a schedule of `Options`, or "statistics" if no input requires a gradient.
        backend: "reference" or "triton".
        chunk_tokens: the number of tokens of a chunk. At most `chunk_tokens` tokens have logits
            over the whole vocabulary in memory at once.
        tile: rows and columns of logits in memory, for schedules that loop over tiles.
        sweep_rows: rows of a step that computes statistics over all columns; 0 if statistics are
            computed by tiles.
        exp_tiles: True if the matmul of logits writes exp(logits) in 16 bits in place of logits.
        on_chip: True if statistics come from the kernels for heads of a width of at most 256. The
            kernels for heads of a width of at most 256 write no logits to GPU memory.
        keeps_sums: True if the hidden gradient is computed from sums of the forward pass.
        in_place: True if kernels overwrite or read the caller's logits without a copy.
        bytes: working memory in bytes, by part, without the inputs and the returned gradients.
        peak_bytes: working memory plus returned gradients, as reported by a GPU's allocator.
        plain_bytes: bytes of stored logits, their softmax and their gradient, as in a plain
            implementation.
        budget: bytes for a chunk, or for the tensors that the `held` schedule keeps. The field
            `budget` also holds a text that says where the number of bytes comes from.
        reason: the reason why this schedule was chosen.
        skip_rows: True if the two backward matmuls skip rows without a gradient.
        single_block: True if one block holds all tokens, so that matmuls write the returned
            gradients.
        support: the number of (token, id) pairs in `support_ids`. The logit of each (token, id)
            pair costs a dot product.
        restricted: the number of tokens whose softmax is over `support_ids`.
    """

    schedule: Schedule
    backend: str
    chunk_tokens: int
    tile: Tile
    sweep_rows: int
    exp_tiles: bool
    on_chip: bool
    keeps_sums: bool
    in_place: bool
    bytes: dict[str, int]
    peak_bytes: int
    plain_bytes: int
    reason: str
    budget: tuple[int, str]
    chunks: tuple[Chunk, ...] = field(repr=False)
    tokens: int = field(repr=False)
    skip_rows: bool = field(repr=False)
    single_block: bool = field(repr=False)
    support: int
    restricted: int

    @property
    def keeps_tiles(self) -> bool:
        """True if logits stay in memory after the statistics are computed, because the gradient is
        computed from them; False if logits are recomputed or no gradient is needed."""
        return self.schedule in ("one_pass", "frozen", "held")

    @property
    def blocks(self) -> Sequence[Chunk]:
        """The chunks of tokens whose statistics the call computes, one after another."""
        if self.keeps_tiles:
            return self.chunks
        step = self.sweep_rows or max(1, self.tile.rows)
        return [  # Without tokens, return one empty chunk.
            Chunk(start, min(start + step, self.tokens), 0, 0)
            for start in range(0, max(1, self.tokens), step)
        ]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        steps = (
            f"{self.chunk_tokens} rows of the given logits, where they lie"
            if self.in_place
            else f"{len(self.chunks)} chunks of at most {self.chunk_tokens} tokens"
            if self.keeps_tiles
            else f"tiles of {self.tile.rows} tokens x {self.tile.columns} columns"
        )
        lines = [
            f"schedule   {self.schedule}: {self.reason}",
            f"backend    {self.backend}",
            f"steps      {steps}",
            f"budget     {self.budget[0] / MIB:10.1f} MiB  {self.budget[1]}",
        ]
        if self.restricted:
            lines.append(
                f"support    {self.support} dot products for {self.restricted} of {self.tokens} "
                "tokens"
            )
        lines += [f"memory     {n / MIB:10.1f} MiB  {name}" for name, n in self.bytes.items()]
        lines.append(f"total      {self.total_bytes / MIB:10.1f} MiB  beyond inputs and gradients")
        lines.append(f"peak       {self.peak_bytes / MIB:10.1f} MiB  returned gradients included")
        lines.append(f"plain      {self.plain_bytes / MIB:10.1f} MiB  logits and their gradient")
        return "\n".join(lines)


def make_plan(inputs: PlanInputs, options: Options, backend: str) -> Plan:
    """Return the plan of a call; ValueError for an explicit schedule that cannot serve the call."""
    p = inputs
    size = options.memory_budget
    least = inputs.token_bytes
    if size is not None and size < least and p.tokens and not p.in_place:
        warnings.warn(
            f"memory_budget: got {size} bytes, want at least {least}, the logits of one token, "
            "which are taken instead",
            stacklevel=2,
        )
    budget = _budget(p, options)
    # The most tokens of a chunk, if a chunk must hold whole segments.
    limit = max(1, budget[0] // max(1, p.token_bytes))
    rows = max(1, p.tokens) if p.in_place else _chunk_rows(p, options, limit)
    chunks = cut(p, rows, limit)
    if chunks and p.scope == "segment" and options.chunk_tokens is None:
        # Making chunks equal may add chunks, and each chunk adds to the float32 sum of dW.
        chunks = min(chunks, cut(p, limit, limit) or chunks, key=len)
    schedule, reason = _choose(p, options, chunks, budget[0])
    if not (p.input_gradient or p.weight_gradient):
        schedule = "statistics"
        reason = "nothing requires a gradient"
    # With a teacher, the divergences of all tokens are computed before any gradient.
    if schedule == "held":
        most = p.tokens if p.teachers else options.chunk_tokens or EXP_ROWS
        rows = max(1, min(p.tokens, most))
    if schedule in ("frozen", "held") or chunks is None:
        chunks = cut_anywhere(p, rows)
    if schedule == "one_pass" and chunks:
        rows = max(c.stop - c.start for c in chunks)
    tile = _tile(p, rows, options)
    if p.teachers and schedule in ("recompute", "statistics") and options.chunk_tokens is None:
        # The statistics use the memory that the gradient later needs for a block of columns.
        room = (tile.rows * tile.columns * p.slab_bytes + p.hidden_sums) // p.token_bytes
        rows = even(p, min(rows, max(1, room // GRAIN * GRAIN or room)))
    # One matmul writes the whole weight gradient, so that no float32 accumulator is needed.
    one = len(chunks) <= 1 if schedule in ("one_pass", "held") else p.tokens <= tile.rows
    wider = options.main_grad is not None or p.given or p.rescaled
    single_block = one and not (wider or 0 < p.restricted < p.tokens)
    exp_tiles = p.exp_tiles and not p.narrow
    on_chip = schedule == "narrow" or (p.by_sweeps and schedule in ("statistics", "recompute"))
    parts = bytes_by_part(p, schedule, rows, tile, options, single_block)
    least = SKIP_WORTH if p.on_gpu else 0 if p.thorough else CPU_SKIP_WORTH
    # The `frozen` schedule computes dlogp/dhidden before the gradient coefficients are known.
    all_rows = options.static or p.given or p.narrow or schedule in ("frozen", "statistics")
    skip_rows = options.skip_rows and p.sparse and not all_rows
    skip_rows &= rows * p.width * p.vocabulary >= least
    return Plan(
        schedule=schedule,
        backend=backend,
        chunk_tokens=rows,
        tile=tile,
        sweep_rows=rows if p.teachers else EXP_ROWS if exp_tiles or on_chip else 0,
        exp_tiles=exp_tiles,
        on_chip=on_chip,
        keeps_sums=p.multiples and not p.rescaled and schedule == "narrow",
        in_place=p.in_place,
        bytes=parts,
        peak_bytes=peak_bytes(p, parts, options),
        plain_bytes=p.tokens * p.vocabulary * (4 + 2 * p.element_size),
        reason=reason,
        budget=budget,
        chunks=tuple(chunks),
        tokens=p.tokens,
        skip_rows=skip_rows,
        single_block=single_block,
        support=p.support,
        restricted=p.restricted,
    )


def _choose(
    p: PlanInputs, options: Options, chunks: Sequence[Chunk] | None, budget: int
) -> tuple[Schedule, str]:
    """Return a schedule, and the reason for the choice."""
    named = options.schedule
    most = options.chunk_tokens
    size = p.tokens * p.token_bytes
    tiles = "softmax terms" if p.exp_tiles else "logits"
    tiles_size = f"the {tiles} of all tokens take {size / MIB:.1f} MiB"

    def error(schedule: str) -> str | None:
        """Return the reason why a schedule cannot serve the call; None if the schedule can."""
        if schedule == "one_pass":
            if p.scope == "external":
                return "the loss lives elsewhere and needs all statistics first"
            if chunks is None and p.grouped:
                return "segments run across ranks"
            if chunks is None:
                fits = "does not fit chunks within the budget"
                return f"the objective is {p.scope}-scoped and {fits}"
        elif schedule == "narrow":
            if not p.on_chip:
                return "want triton on a GPU, H <= 256, no lora, beside, teacher and logits_dtype"
            if p.candidates or p.support or options.main_grad is not None:
                return "want a call without candidates, support_ids and main_grad"
        elif p.given:
            return "the logits are given"
        elif schedule == "frozen":
            if p.weight_gradient:
                return "the head requires a gradient"
            if not p.logp_only:
                return "the objective needs the gradient of more than logp"
            if p.candidates and p.sharded:
                return "slopes of candidates would be summed over ranks in the backward pass"
        elif size > budget:
            return f"{tiles_size}, more than the budget of {budget / MIB:.1f} MiB"
        elif most and most < p.tokens:
            return f"no more than chunk_tokens={most} are to be held at once"
        return None

    if named in ("one_pass", "frozen", "narrow", "held"):
        reason = error(named)
        # If the caller asks for "held" without a budget, the call may keep logits of any number of
        # tokens.
        if reason and (named != "held" or p.given or options.memory_budget is not None):
            raise ValueError(f'schedule: got "{named}", but {reason}')
    if named != "auto":
        return cast(Schedule, named), "asked for"
    if p.given and not p.overwrites:
        return "recompute", "the gradient of given logits is written in the backward pass"
    if p.in_place:
        return "one_pass", "the gradient takes the logits' place"
    if p.by_sweeps:
        reason = error("narrow")
        return ("recompute", reason) if reason else ("narrow", "its logits stay on the chip")
    if not (reason := error("one_pass")):
        if chunks and p.sums_often(len(chunks)) and options.chunk_tokens is None:
            return "recompute", f"adding the weight's gradient up over {len(chunks)} chunks is slow"
        why = "token-scoped" if p.scope == "token" else f"chunk borders fall on {p.scope} borders"
        return "one_pass", why
    if not error("frozen"):
        return "frozen", "the head is frozen and the objective is one of logp"
    if too_large := error("held"):
        return "recompute", f"{reason}, and {too_large}"
    return "held", f"{reason}, and {tiles_size} within the budget"


def _budget(p: PlanInputs, options: Options) -> tuple[int, str]:
    """Return the memory budget in bytes, and a text that says where the number comes from."""
    if options.memory_budget is not None:
        return options.memory_budget, "asked for"
    if not (p.on_gpu and p.memory):
        return GPU_BUDGET if p.on_gpu else CPU_BUDGET, "by default"
    share = p.memory // GPU_SHARE
    whose = "smallest GPU of the group" if p.sharded else "GPU"
    return share, f"one part in {GPU_SHARE} of the {whose}'s memory, {p.memory / MIB:.0f} MiB"


def _chunk_rows(p: PlanInputs, options: Options, limit: int) -> int:
    if options.chunk_tokens is not None:
        return max(1, min(options.chunk_tokens, p.tokens))
    rows = limit - limit % GRAIN if limit > GRAIN else limit
    if p.tokens > rows:
        rows = whole_waves(p, rows) if p.multiprocessors and p.width else even(p, rows)
    return max(1, min(rows, p.tokens))


def _tile(p: PlanInputs, rows: int, options: Options) -> Tile:
    """Return the number of tokens and of vocabulary columns of a tile. The tile has at most `rows`
    * V logits, for a vocabulary of V columns."""
    if p.narrow or p.in_place:
        return Tile(rows, p.vocabulary)
    elements = rows * p.vocabulary
    explicit = options.chunk_tokens is not None
    if options.batch_invariant:
        # The number of columns of a tile must not depend on the number of tokens, so that the
        # hidden gradient is summed over blocks of columns in a fixed order. Without `exp_tiles`, a
        # tile has all columns.
        columns = min(p.vocabulary, FIXED_COLUMNS) if p.exp_tiles or p.teachers else p.vocabulary
        return Tile(max(1, min(p.tokens, elements // columns)), columns)
    if (p.exp_tiles or (p.teachers and p.on_gpu)) and not explicit:
        least, most = SLAB_ELEMENTS
        # Each block of columns reads and writes the whole hidden gradient: give a block at least as
        # many logits as the hidden gradient has elements.
        least = max(least, p.tokens * p.width)
        room = (TEACHER_BYTES if p.teachers else SWEEP_BYTES) - p.hidden_sums
        elements = min(elements, max(least, min(most, room // p.slab_bytes)))
    least = 1 if explicit else min(p.vocabulary, 4 * GRAIN)
    tall = max(1, min(p.tokens, elements // least))
    columns = max(1, min(p.vocabulary, elements // tall))
    if columns > WAVE_TILE[1]:
        columns -= columns % WAVE_TILE[1]
        # Choose a number of columns for which each wave of output tiles fills all multiprocessors.
        if p.teachers and p.multiprocessors:
            across = -(-tall // (WAVE_TILE[0] * PARTS))
            waves = round(across * columns / WAVE_TILE[1] / p.multiprocessors)
            full = waves * p.multiprocessors // across * WAVE_TILE[1]
            columns = min(columns, full or columns)
    return Tile(tall, columns)


def even(p: PlanInputs, rows: int) -> int:
    """Return the size of equal chunks, so that the last chunk is as efficient as the other
    chunks."""
    size = -(-p.tokens // (-(-p.tokens // rows) or 1)) or 1
    return min(rows, -(-size // GRAIN) * GRAIN) if size > GRAIN else size


def whole_waves(p: PlanInputs, most: int) -> int:
    """Return the chunk size, up to `most`, with the shortest time of the hidden gradient's matmuls.
    A matmul runs in waves of one output tile per multiprocessor. The hidden gradient's matmul alone
    has so few output tiles that idle multiprocessors in its last wave cost noticeable time."""
    across = -(-p.width // WAVE_TILE[1])

    def waves(rows: int) -> int:
        return -(-(-(-rows // WAVE_TILE[0]) * across) // p.multiprocessors)

    def cost(rows: int) -> float:
        full, remainder = divmod(p.tokens, rows)
        return full * waves(rows) + waves(remainder) + CHUNK_WAVES * (full + (remainder > 0))

    # Try only some chunk sizes if `most` (the largest number of rows) is large.
    step = GRAIN * (1 + (most >> 24))
    return min(range(most, most // 2, -step), key=lambda rows: (cost(rows), rows))


def cut_anywhere(p: PlanInputs, rows: int) -> list[Chunk]:
    """Return chunks of equal size, an empty chunk if there are no tokens; a border may fall inside
    a segment."""
    lengths = p.lengths or []
    if p.tokens <= rows:
        return [Chunk(0, p.tokens, 0, len(lengths))]
    ends = list(accumulate(lengths))
    return [
        Chunk.between(ends, start, min(start + rows, p.tokens))
        for start in range(0, p.tokens, rows)
    ]


def cut(p: PlanInputs, rows: int, limit: int) -> list[Chunk] | None:
    """Return chunks that fit the objective's scope (with scope="segment", a chunk holds whole
    segments); None if no such chunks fit."""
    lengths = p.lengths or []
    unit = p.segments_per_unit
    if p.in_place:  # The caller's logits are in memory already: chunks would save no memory.
        return cut_anywhere(p, p.tokens)
    if p.scope == "token":
        return cut_anywhere(p, rows)
    if p.grouped or p.scope == "external":
        return None
    if p.tokens <= rows or p.scope == "batch" or not lengths:
        return cut_anywhere(p, p.tokens) if p.tokens <= max(rows, limit) else None
    chunks = list[Chunk]()
    start = 0
    stop = 0
    first = 0
    # A chunk must hold whole units of segments, such as pairs of segments.
    for at in range(0, len(lengths), unit):
        tokens = sum(lengths[at : at + unit])
        if tokens > max(rows, limit):
            return None
        if stop > start and stop + tokens - start > rows:
            chunks.append(Chunk(start, stop, first, at))
            start = stop
            first = at
        stop += tokens
    return [*chunks, Chunk(start, stop, first, len(lengths))]
