"""Law 4: which schedule serves a call, in what pieces, in how many bytes; and why.

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
CHUNK_WAVES = 0.3  # the fixed cost of a chunk, in waves of its products
# For a chunk, where the call names none: on a CPU, a GPU of unknown memory, the part of another's.
CPU_BUDGET = 256 * MIB
GPU_BUDGET = 1200 * MIB
GPU_SHARE = 64
# Multiply-adds of a block's product: below it, reading which rows carry a gradient keeps a GPU
# waiting longer, and takes a CPU more operations, than leaving them out can save.
SKIP_WORTH = 2 * 10**11
CPU_SKIP_WORTH = 1 << 24
FIXED_COLUMNS = 16384  # of a slab, if a token's bits may not depend on other tokens
SWEEP_BYTES = 480 << 20  # of a sweep that writes terms or gradients in 16 bits
TEACHER_BYTES = 660 << 20  # the same beside a teacher
SLAB_ELEMENTS = (48 << 20, 192 << 20)  # of its slabs, least and most


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a call.

    Attributes:
        schedule: one that `Options` names, or "statistics" where nothing requires a gradient.
        backend: "reference" or "triton".
        chunk_tokens: most tokens of which all logits are held at once.
        tile: rows and columns of one step of a sweep, which holds as many logits.
        sweep_rows: of a step of a sweep for statistics that has all columns; 0: it is a tile.
        exp_tiles: whether the logits product writes exp(logits) in 16 bits in place of logits.
        on_chip: whether sweeps of a narrow head give the statistics, whose tiles of logits never
            leave the chip.
        keeps_sums: whether the hidden gradient is made of the forward sweep's sums.
        in_place: whether kernels read given logits, and write their gradient, where they lie.
        bytes: working memory beyond inputs and returned gradients, by part.
        peak_bytes: the same with returned gradients in it, as a GPU's allocator reports it.
        plain_bytes: what logits, their softmax and their gradient would take.
        budget: bytes for a chunk, or for what a held schedule keeps, and where that comes from.
        reason: why this schedule.
        skip_rows: whether rows without a gradient leave the last two products.
        single_block: one block holds all tokens, and its products are the returned gradients.
        support: pairs of a token and a column of its support, a dot product each.
        restricted: tokens that have a support.
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
        """True if the gradient takes the logits of the statistics: with each block, or once the
        coefficients of all tokens are there. Else they are made again, or there is none."""
        return self.schedule in ("one_pass", "frozen", "held")

    @property
    def blocks(self) -> Sequence[Chunk]:
        """The tokens of one step of the statistics, in order."""
        if self.keeps_tiles:
            return self.chunks
        step = self.sweep_rows or max(1, self.tile.rows)
        starts = range(0, max(1, self.tokens), step)  # a block without tokens, where there are none
        return [Chunk(start, min(start + step, self.tokens), 0, 0) for start in starts]

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
    """Choose a schedule; ValueError for an explicit one that cannot serve the call."""
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
    limit = max(1, budget[0] // max(1, p.token_bytes))  # of a chunk that has to hold a segment
    rows = max(1, p.tokens) if p.in_place else _chunk_rows(p, options, limit)
    chunks = cut(p, rows, limit)
    if chunks and p.scope == "segment" and options.chunk_tokens is None:
        # Equal chunks may be more of them, and each adds to the float32 sum of dW.
        chunks = min(chunks, cut(p, limit, limit) or chunks, key=len)
    schedule, reason = _choose(p, options, chunks, budget[0])
    if not (p.input_gradient or p.weight_gradient):
        schedule = "statistics"
        reason = "nothing requires a gradient"
    if schedule == "held":  # a teacher measures all tokens before it differentiates any
        most = p.tokens if p.teachers else options.chunk_tokens or EXP_ROWS
        rows = max(1, min(p.tokens, most))
    if schedule in ("frozen", "held") or chunks is None:
        chunks = cut_anywhere(p, rows)
    if schedule == "one_pass" and chunks:
        rows = max(c.stop - c.start for c in chunks)
    tile = _tile(p, rows, options)
    if p.teachers and schedule in ("recompute", "statistics") and options.chunk_tokens is None:
        # The logits of one sweep take the memory that the other has for a slab and sums of dX.
        room = (tile.rows * tile.columns * p.slab_bytes + p.hidden_sums) // p.token_bytes
        rows = even(p, min(rows, max(1, room // GRAIN * GRAIN or room)))
    # One product is the returned weight gradient, so that no wider sum is needed.
    one = len(chunks) <= 1 if schedule in ("one_pass", "held") else p.tokens <= tile.rows
    wider = options.main_grad is not None or p.given or p.rescaled
    single_block = one and not (wider or 0 < p.restricted < p.tokens)
    exp_tiles = p.exp_tiles and not p.narrow
    on_chip = schedule == "narrow" or (p.by_sweeps and schedule in ("statistics", "recompute"))
    parts = bytes_by_part(p, schedule, rows, tile, options, single_block)
    least = SKIP_WORTH if p.on_gpu else 0 if p.thorough else CPU_SKIP_WORTH
    # Of a frozen head dlogp/dhidden is made before any coefficient is known.
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
    """A schedule, and the reason for the choice."""
    named = options.schedule
    size = p.tokens * p.token_bytes
    most = options.chunk_tokens
    tiles_size = (
        f"the {'softmax terms' if p.exp_tiles else 'logits'} of all tokens take "
        f"{size / MIB:.1f} MiB"
    )
    too_long = f"the objective is {p.scope}-scoped and does not fit chunks within the budget"
    reasons = {
        "one_pass": [
            (p.scope == "external", "the loss lives elsewhere and needs all statistics first"),
            (chunks is None and p.grouped, "segments run across ranks"),
            (chunks is None, too_long),
        ],
        "frozen": [
            (p.given, "the logits are given"),
            (p.weight_gradient, "the head requires a gradient"),
            (not p.logp_only, "the objective needs the gradient of more than logp"),
            (
                p.candidates and p.sharded,
                "slopes of candidates would be summed over ranks in the backward pass",
            ),
        ],
        "narrow": [
            (not p.on_chip, "the head or the backend does not suit"),
            (
                p.candidates or p.support or options.main_grad is not None,
                "columns are measured apart, or main_grad is given",
            ),
        ],
        "held": [
            (p.given, "the logits are given"),
            (size > budget, f"{tiles_size}, more than the budget of {budget / MIB:.1f} MiB"),
            (
                most and most < p.tokens,
                f"no more than chunk_tokens={most} are to be held at once",
            ),
        ],
    }
    errors = {n: next((text for holds, text in r if holds), None) for n, r in reasons.items()}
    # Who asks for held without a budget may hold any number of tokens, in chunks of any size.
    if errors.get(named) and (named != "held" or p.given or options.memory_budget is not None):
        raise ValueError(f'schedule: got "{named}", but {errors[named]}')
    if named != "auto":
        return cast(Schedule, named), "asked for"
    if p.given and not p.overwrites:
        return "recompute", "the gradient of given logits is written in the backward pass"
    if p.in_place:
        return "one_pass", "the gradient takes the logits' place"
    if p.by_sweeps:
        error = errors["narrow"]
        return ("recompute", error) if error else ("narrow", "its logits stay on the chip")
    if not errors["one_pass"]:
        why = "token-scoped" if p.scope == "token" else f"chunk borders fall on {p.scope} borders"
        return "one_pass", why
    if not errors["frozen"]:
        return "frozen", "the head is frozen and the objective is one of logp"
    if not errors["held"]:
        return "held", f"{errors['one_pass']}, and {tiles_size} within the budget"
    return "recompute", f"{errors['one_pass']}, and {errors['held']}"


def _budget(p: PlanInputs, options: Options) -> tuple[int, str]:
    """Bytes, and their origin."""
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
    """A sweep's tile, of no more logits than `rows` tokens have over the whole vocabulary."""
    if p.narrow or p.in_place:
        return Tile(rows, p.vocabulary)
    elements = rows * p.vocabulary
    explicit = options.chunk_tokens is not None
    if options.batch_invariant:
        # A width that does not depend on the tokens: a slab of dX adds to the others' sum, and raw
        # logits give their statistics over all columns at once.
        columns = min(p.vocabulary, FIXED_COLUMNS) if p.exp_tiles or p.teachers else p.vocabulary
        return Tile(max(1, min(p.tokens, elements // columns)), columns)
    if (p.exp_tiles or (p.teachers and p.on_gpu)) and not explicit:
        least, most = SLAB_ELEMENTS
        least = max(least, p.tokens * p.width)  # a slab takes less, as it adds to all of dX
        room = (TEACHER_BYTES if p.teachers else SWEEP_BYTES) - p.hidden_sums
        elements = min(elements, max(least, min(most, room // p.slab_bytes)))
    least = 1 if explicit else min(p.vocabulary, 4 * GRAIN)
    tall = max(1, min(p.tokens, elements // least))
    columns = max(1, min(p.vocabulary, elements // tall))
    if columns > WAVE_TILE[1]:
        columns -= columns % WAVE_TILE[1]
        if p.teachers and p.multiprocessors:  # whole waves of a part of the tokens
            across = -(-tall // (WAVE_TILE[0] * PARTS))
            waves = round(across * columns / WAVE_TILE[1] / p.multiprocessors)
            full = waves * p.multiprocessors // across * WAVE_TILE[1]
            columns = min(columns, full or columns)
    return Tile(tall, columns)


def even(p: PlanInputs, rows: int) -> int:
    """The size of equal chunks, so that the last one is as efficient as the others."""
    size = -(-p.tokens // (-(-p.tokens // rows) or 1)) or 1
    return min(rows, -(-size // GRAIN) * GRAIN) if size > GRAIN else size


def whole_waves(p: PlanInputs, most: int) -> int:
    """The size of chunk, up to `most`, with the least time in the hidden gradient's products, which
    come in waves of one output tile for each multiprocessor. (The others have many tiles.)"""
    across = -(-p.width // WAVE_TILE[1])

    def waves(rows: int) -> int:
        return -(-(-(-rows // WAVE_TILE[0]) * across) // p.multiprocessors)

    def cost(rows: int) -> float:
        full, remainder = divmod(p.tokens, rows)
        return full * waves(rows) + waves(remainder) + CHUNK_WAVES * (full + (remainder > 0))

    step = GRAIN * (1 + (most >> 24))  # of a tiny vocabulary there may be very many sizes
    return min(range(most, most // 2, -step), key=lambda rows: (cost(rows), rows))


def cut_anywhere(p: PlanInputs, rows: int) -> list[Chunk]:
    """Chunks of equal size, one where there is no token; a border may fall inside a segment."""
    lengths = p.lengths or []
    if p.tokens <= rows:
        return [Chunk(0, p.tokens, 0, len(lengths))]
    ends = list(accumulate(lengths))
    starts = range(0, p.tokens, rows)
    return [Chunk.between(ends, start, min(start + rows, p.tokens)) for start in starts]


def cut(p: PlanInputs, rows: int, limit: int) -> list[Chunk] | None:
    """Chunks that respect the objective's scope, or None where there are none."""
    lengths = p.lengths or []
    unit = p.segments_per_unit
    single = cut_anywhere(p, p.tokens)
    if p.in_place:  # nothing is held
        return single
    if p.scope == "token":
        return cut_anywhere(p, rows)
    if p.grouped or p.scope == "external":
        return None
    if p.tokens <= rows or p.scope == "batch" or not lengths:
        return single if p.tokens <= max(rows, limit) else None
    chunks = list[Chunk]()
    start = 0
    stop = 0
    first = 0
    for at in range(0, len(lengths), unit):  # may not be cut apart
        tokens = sum(lengths[at : at + unit])
        if tokens > max(rows, limit):
            return None
        if stop > start and stop + tokens - start > rows:
            chunks.append(Chunk(start, stop, first, at))
            start = stop
            first = at
        stop += tokens
    return [*chunks, Chunk(start, stop, first, len(lengths))]
