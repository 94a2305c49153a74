"""Law 4: which schedule serves a call, in what pieces, in how many bytes; and why.

T scored tokens, H hidden width, V vocabulary, S segments.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..options import Options

Schedule = Literal["one_pass", "recompute", "frozen", "statistics"]
Pull = Literal["now", "unit", "slabs", "blocks", "never"]
MIB = 1 << 20
TERMS_ROWS = 16384  # tokens per product that writes statistics alone
SKIP_WORTH = 2 * 10**11  # multiply-adds of a block's product: below it, reading which rows carry a
# gradient keeps a GPU waiting longer than leaving them out can save
WORKING_BLOCK = 1 << 20  # logits that a reference act works on at once
SWEEP_BYTES = 480 << 20  # of a sweep that writes terms or gradients in 16 bits
SLAB_ELEMENTS = (48 << 20, 192 << 20)  # of its slabs, least and most
WAVE_TILE = (128, 256)  # rows x columns of a product that one multiprocessor computes at once
CHUNK_WAVES = 0.3  # what a chunk costs beside its products, in waves
GRAIN = 128  # rows of a chunk and columns of a slab come in multiples of it, for the products' sake


class Chunk(NamedTuple):
    """Tokens [start, stop), which lie in segments [first, last)."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


class Tile(NamedTuple):
    """A sweep's step: rows x columns of the logits."""

    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the planner knows of a call."""

    tokens: int = 0  # T
    width: int = 0  # H
    vocabulary: int = 0  # V
    scope: str = "token"
    lengths: list[int] | None = None  # scored tokens per segment; None with static shapes
    segments_per_unit: int = 1
    grouped: bool = False  # segments run across ranks
    spread: bool = False  # tokens do, chunk by chunk gathered
    gathered: bool = False  # or at once
    sharded: bool = False  # hidden gradients are summed over ranks
    logp_only: bool = False  # the gradient needs nothing but d/dlogp
    hidden_gradient: bool = True
    weight_gradient: bool = True
    element_size: int = 4  # of hidden and weight
    weight_size: int = 4  # of the weight's own dtype
    terms: bool = False  # the product writes softmax terms in place of logits
    rescaled: bool = False  # gradients are scaled against underflow, and back in float32
    row_bytes: int = 4  # per token and vocabulary entry of a chunk, teachers included
    on_gpu: bool = False
    multiprocessors: int = 0  # of the GPU
    given: bool = False  # the logits exist already
    inplace: bool = False  # and their gradient may overwrite them
    rows: bool = False  # and a kernel works on them where they lie
    main_grad: bool = False  # the weight gradient is added to a tensor of the caller's


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will run.

    Attributes:
        schedule: "one_pass", "recompute", "frozen", or "statistics" where nothing needs a gradient.
        backend: "reference" or "triton".
        chunk_tokens: most tokens whose logits over the whole vocabulary are held at once; in a
            sweep, the same number of logits in another shape (`tile`).
        tile: rows and columns of one step of a sweep.
        terms: whether the logits product writes softmax terms in 16 bits in place of logits.
        rows: whether kernels read given logits, and write their gradient, where they lie.
        bytes: peak working memory beyond inputs and returned gradients, by part.
        plain_bytes: what logits, their softmax and their gradient would take.
        reason: why this schedule.
        skip_rows: whether rows without a gradient leave the last two products.
        once: one block holds all tokens, and its products are the returned gradients.
        pull: when the second act runs: with each block's statistics ("now", or "unit" coefficients
            that are scaled later), in the backward pass in "slabs" of columns or in "blocks" of
            tokens, or "never".
    """

    schedule: Schedule
    backend: str
    chunk_tokens: int
    tile: Tile
    terms: bool
    rows: bool
    bytes: dict[str, int]
    plain_bytes: int
    reason: str
    chunks: tuple[Chunk, ...] = field(repr=False)
    tokens: int = field(repr=False, default=0)
    skip_rows: bool = field(repr=False, default=False)
    once: bool = field(repr=False, default=False)
    pull: Pull = field(repr=False, default="now")

    @property
    def blocks(self) -> tuple[Chunk, ...]:
        """The tokens of one step of the statistics, in order."""
        if self.pull in ("now", "unit", "blocks"):
            return self.chunks
        step = TERMS_ROWS if self.terms else self.tile.rows
        starts = range(0, self.tokens, max(1, step))
        return tuple(Chunk(s, min(s + step, self.tokens), 0, 0) for s in starts)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        steps = (
            f"{self.chunk_tokens} rows of the given logits, where they lie"
            if self.rows
            else f"{len(self.chunks)} chunks of at most {self.chunk_tokens} tokens"
            if self.schedule in ("one_pass", "frozen")
            else f"tiles of {self.tile.rows} tokens x {self.tile.columns} columns"
        )
        lines = [
            f"schedule   {self.schedule}: {self.reason}",
            f"backend    {self.backend}",
            f"steps      {steps}",
        ]
        for name, size in self.bytes.items():
            lines.append(f"memory     {size / MIB:10.1f} MiB  {name}")
        lines.append(f"total      {self.total_bytes / MIB:10.1f} MiB")
        lines.append(f"plain      {self.plain_bytes / MIB:10.1f} MiB  logits and their gradient")
        return "\n".join(lines)


def make_plan(problem: Problem, options: Options, backend: str) -> Plan:
    """Choose a schedule; ValueError where an explicit one cannot serve the call."""
    p = problem
    rows = max(1, p.tokens) if p.rows else _chunk_rows(p, options)
    wants_gradient = p.hidden_gradient or p.weight_gradient
    chunks = _cut(p, rows, _limit(p, options))
    schedule, reason = _choose(p, options, chunks)
    if not wants_gradient:
        schedule, reason = "statistics", "nothing requires a gradient"
    if schedule == "frozen" or chunks is None or (schedule == "recompute" and p.spread):
        chunks = _cut_anywhere(p, rows)
    if schedule == "one_pass":
        rows = max((c.stop - c.start for c in chunks), default=rows)
    tile = _tile(p, rows, explicit=options.chunk_tokens is not None)
    if p.spread:  # no more tokens than a chunk's are gathered at once
        tile = Tile(rows, p.vocabulary)
    pull = _pull(p, schedule)
    once = _once(p, pull, len(chunks), tile)
    worth = not p.on_gpu or rows * p.width * p.vocabulary >= SKIP_WORTH
    return Plan(
        schedule=schedule,
        backend=backend,
        chunk_tokens=rows,
        tile=tile,
        terms=p.terms,
        rows=p.rows,
        bytes=_bytes(p, schedule, rows, tile, options, once),
        plain_bytes=p.tokens * p.vocabulary * (4 + 2 * p.element_size),
        reason=reason,
        chunks=chunks,
        tokens=p.tokens,
        skip_rows=options.skip_rows and not options.static and not p.given and worth,
        once=once,
        pull=pull,
    )


def _pull(p: Problem, schedule: Schedule) -> Pull:
    if schedule == "recompute":
        return "blocks" if p.spread else "slabs"
    pulls: dict[Schedule, Pull] = {"one_pass": "now", "frozen": "unit", "statistics": "never"}
    return pulls[schedule]


def _once(p: Problem, pull: Pull, chunks: int, tile: Tile) -> bool:
    """Whether one addition brings a weight gradient whole, so that it needs no wider sum: in
    float16 the sum is scaled, and rounded after it is scaled back."""
    if p.rescaled or p.main_grad or p.given:
        return False
    return chunks <= 1 if pull in ("now", "blocks") else p.tokens <= tile.rows


def _choose(p: Problem, options: Options, chunks: tuple[Chunk, ...] | None) -> tuple[Schedule, str]:
    frozen_error = None
    if p.weight_gradient:
        frozen_error = "the head requires a gradient"
    elif not p.logp_only:
        frozen_error = "the objective needs the gradient of more than logp"
    elif p.given:
        frozen_error = "the logits are given"
    one_pass_error = None
    if chunks is None:
        one_pass_error = (
            "segments run across ranks"
            if p.grouped
            else f"the objective is {p.scope}-scoped and does not fit chunks within the budget"
        )
    if options.schedule == "one_pass" and one_pass_error:
        raise ValueError(f'schedule: got "one_pass", but {one_pass_error}')
    if options.schedule == "frozen" and frozen_error:
        raise ValueError(f'schedule: got "frozen", but {frozen_error}')
    if options.schedule != "auto":
        return options.schedule, "asked for"
    if p.given and not p.inplace:
        return "recompute", "the gradient of given logits is written in the backward pass"
    if p.rows:
        return "one_pass", "the gradient takes the logits' place"
    if one_pass_error is None:
        why = "token-scoped" if p.scope == "token" else f"chunk borders fall on {p.scope} borders"
        return "one_pass", why
    if frozen_error is None:
        return "frozen", "the head is frozen and the objective is one of logp"
    return "recompute", one_pass_error


def _budget(p: Problem, options: Options) -> int:
    if options.memory_budget is not None:
        least = p.vocabulary * p.row_bytes
        if options.memory_budget < least and p.tokens and not p.rows:
            warnings.warn(
                f"memory_budget: got {options.memory_budget} bytes, want at least {least}, the "
                "logits of one token, which are taken instead",
                stacklevel=2,
            )
        return options.memory_budget
    return 1200 * MIB if p.on_gpu else 256 * MIB


def _limit(p: Problem, options: Options) -> int:
    """The most tokens that a chunk may grow to so as to hold a segment."""
    return max(1, _budget(p, options) // max(1, p.vocabulary * p.row_bytes))


def _chunk_rows(p: Problem, options: Options) -> int:
    if options.chunk_tokens is not None:
        return max(1, min(options.chunk_tokens, p.tokens))
    rows = _limit(p, options)
    if rows > GRAIN:
        rows -= rows % GRAIN
    if p.tokens > rows:
        rows = _whole_waves(p, rows) if p.multiprocessors and p.width else _even(p, rows)
    return max(1, min(rows, p.tokens))


def _even(p: Problem, rows: int) -> int:
    """Equal chunks: the last one is as efficient as the others."""
    pieces = -(-p.tokens // rows)
    even = -(-p.tokens // pieces)
    return min(rows, -(-even // GRAIN) * GRAIN) if even > GRAIN else even


def _whole_waves(p: Problem, most: int) -> int:
    """The size of chunk, up to `most`, with the least time in the hidden gradient's products, which
    come in waves of one output tile for each multiprocessor. (The other two products have so many
    tiles that their last wave does not count.)"""
    across = -(-p.width // WAVE_TILE[1])

    def waves(rows: int) -> int:
        return -(-(-(-rows // WAVE_TILE[0]) * across) // p.multiprocessors)

    def cost(rows: int) -> float:
        whole, rest = divmod(p.tokens, rows)
        return whole * waves(rows) + waves(rest) + CHUNK_WAVES * (whole + (rest > 0))

    return min(range(most, most // 2, -GRAIN), key=lambda rows: (cost(rows), rows))


def _cut_anywhere(p: Problem, rows: int) -> tuple[Chunk, ...]:
    """Chunks of equal size; a border may fall inside a segment."""
    chunks, segment, end = [], 0, 0
    lengths = p.lengths
    for start in range(0, p.tokens, rows):
        stop = min(start + rows, p.tokens)
        if lengths is None:
            chunks.append(Chunk(start, stop, 0, 0))
            continue
        while end <= start:  # the segment that holds `start`
            end += lengths[segment]
            segment += 1
        first = segment - 1
        while end < stop:
            end += lengths[segment]
            segment += 1
        chunks.append(Chunk(start, stop, first, segment))
    return tuple(chunks)


def _units(p: Problem) -> Iterator[tuple[int, int]]:
    """(segments, tokens) of each unit that may not be cut apart."""
    assert p.lengths is not None
    for first in range(0, len(p.lengths), p.segments_per_unit):
        unit = p.lengths[first : first + p.segments_per_unit]
        yield len(unit), sum(unit)


def _cut(p: Problem, rows: int, limit: int) -> tuple[Chunk, ...] | None:
    """Chunks that respect the objective's scope, or None where there are none."""
    if p.tokens == 0 and not p.grouped:
        return ()
    if p.rows:  # nothing is held
        return (Chunk(0, p.tokens, 0, len(p.lengths or ())),)
    if p.scope == "token":
        return _cut_anywhere(p, rows)
    if p.grouped:
        return None
    if p.tokens <= rows or p.scope == "batch" or p.lengths is None:
        whole = p.tokens <= max(rows, limit)
        return (Chunk(0, p.tokens, 0, len(p.lengths or ())),) if whole else None
    chunks: list[Chunk] = []
    start = stop = first = last = 0
    for segments, tokens in _units(p):
        if tokens > max(rows, limit):
            return None
        if stop > start and stop + tokens - start > rows:
            chunks.append(Chunk(start, stop, first, last))
            start, first = stop, last
        stop, last = stop + tokens, last + segments
    if last > first:
        chunks.append(Chunk(start, stop, first, last))
    return tuple(chunks)


def _tile(p: Problem, rows: int, explicit: bool) -> Tile:
    """A sweep's tile, of no more logits than `rows` tokens have over the whole vocabulary."""
    elements = rows * p.vocabulary
    if p.terms and not explicit:
        least, most = SLAB_ELEMENTS
        room = (SWEEP_BYTES - p.tokens * p.width * 4) // p.row_bytes  # beside the sums of dX
        elements = min(elements, max(least, min(most, room)))
    least = 1 if explicit else min(p.vocabulary, 4 * GRAIN)
    tall = max(1, min(p.tokens, elements // least))
    columns = max(1, min(p.vocabulary, elements // tall))
    if columns > GRAIN:
        columns = min(p.vocabulary, columns - columns % GRAIN)
    return Tile(tall, columns)


def _bytes(
    p: Problem, schedule: Schedule, rows: int, tile: Tile, options: Options, once: bool
) -> dict[str, int]:
    if p.rows:
        return {"statistics": p.tokens * 64}
    sweeps = schedule in ("recompute", "statistics")
    elements = tile.rows * tile.columns if sweeps else rows * p.vocabulary
    found = {"logits": elements * p.row_bytes, "statistics": p.tokens * 64}
    if not p.on_gpu:  # a few blocks of logits at a time, and of a 16-bit weight, widened
        found["working blocks"] = 3 * min(elements, WORKING_BLOCK) * max(4, p.element_size)
        if p.element_size < 4 and not p.given:
            found["working blocks"] += 4 * min(4 * WORKING_BLOCK, p.vocabulary * p.width)
    accumulate = 8 if p.element_size == 8 else options.accumulate_dtype.itemsize
    by_chunk = schedule == "one_pass" or (schedule == "recompute" and p.spread)
    if p.sharded and p.hidden_gradient and schedule != "statistics" and not p.given:
        found["hidden gradient on its way"] = rows * p.width * max(4, p.element_size)
    if p.spread or p.gathered:
        tokens = p.tokens if p.gathered else rows
        found["gathered hidden states"] = tokens * p.width * p.element_size
    if by_chunk and p.weight_gradient and not p.given:
        # An accumulator of the weight's own dtype is the returned gradient itself.
        if accumulate != p.weight_size and not once:
            found["weight gradient accumulator"] = p.vocabulary * p.width * accumulate
    if schedule == "recompute" and not by_chunk and not p.given:
        if p.weight_gradient and not once:
            found["weight gradient slab"] = tile.columns * p.width * accumulate
        if p.hidden_gradient and p.element_size < 4:
            found["hidden gradient accumulator"] = p.tokens * p.width * 4
    return found
