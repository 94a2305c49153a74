"""The pieces of a call: chunks of tokens, and what decides how large they are.

T scored tokens, H hidden width, V vocabulary, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from ..batch.segments import Chunk
from ..softmax.products import GRAIN

WAVE_TILE = (128, 256)  # rows x columns of a product that one multiprocessor computes at once
CHUNK_WAVES = 0.3  # the fixed cost of a chunk, in waves of its products
PAIR_BYTES = 48  # of a pair of a support: its logit and gradient in float32, its places by column


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
    scope: str = "token"  # or "elsewhere": the loss is not known before all statistics are out
    lengths: list[int] | None = None  # scored tokens per segment; None with static shapes
    each: int = 0  # or all segments have this many, but for the last
    segments_per_unit: int = 1
    grouped: bool = False  # segments run across ranks
    spread: bool = False  # tokens do, chunk by chunk gathered
    gathered: bool = False  # or at once
    sharded: bool = False  # hidden gradients are summed over ranks
    sparse: bool = True  # some tokens may be without a gradient
    thorough: bool = False  # a CPU leaves them out at any size: it is asked to, or they may be NaN
    logp_only: bool = False  # the gradient needs nothing but d/dlogp, or K of them per token
    hidden_gradient: bool = True
    weight_gradient: bool = True
    element_size: int = 4  # of hidden and weight
    weight_size: int = 4  # of the weight's own dtype
    terms: bool = False  # the product writes softmax terms in place of logits
    rescaled: bool = False  # gradients are scaled against underflow: dW sums in float32
    row_bytes: int = 4  # per token and vocabulary entry of a chunk, teachers included
    on_gpu: bool = False
    multiprocessors: int = 0  # of the GPU
    memory: int = 0  # bytes of the GPU, in a vocabulary group of the one that has least
    given: bool = False  # the logits exist already
    inplace: bool = False  # and their gradient may overwrite them
    rows: bool = False  # and a kernel works on them where they lie
    main_grad: bool = False  # the weight gradient is added to a tensor of the caller's
    teachers: bool = False  # stand beside the logits
    differences: bool = False  # the teacher takes the place of the student's logits, in one pass
    candidates: int = 0  # columns of a token that are measured apart
    support: int = 0  # pairs of a token and a column of its support
    restricted: int = 0  # tokens that have one

    @property
    def narrow(self) -> bool:
        """Whether all tokens have a support: there is no product over the vocabulary."""
        return 0 < self.restricted == self.tokens

    @property
    def token_bytes(self) -> int:
        """What a token takes of a chunk."""
        if self.narrow:
            return max(1, self.support * PAIR_BYTES // self.tokens)
        return self.vocabulary * self.row_bytes


@dataclass(frozen=True)
class Even(Sequence[Chunk]):
    """Chunks that are made when they are read: a call that is only planned may have billions."""

    starts: range
    tokens: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple([self[i] for i in range(len(self))[at]])
        start, last = self.starts[at], self.starts[-1]
        return Chunk(start, self.tokens if start == last else start + self.starts.step, 0, 0)


def even(p: Problem, rows: int) -> int:
    """The size of equal chunks, so that the last one is as efficient as the others."""
    pieces = -(-p.tokens // rows) or 1
    even = -(-p.tokens // pieces) or 1
    return min(rows, -(-even // GRAIN) * GRAIN) if even > GRAIN else even


def whole_waves(p: Problem, most: int) -> int:
    """The size of chunk, up to `most`, with the least time in the hidden gradient's products, which
    come in waves of one output tile for each multiprocessor. (The other two products have so many
    tiles that their last wave does not count.)"""
    across = -(-p.width // WAVE_TILE[1])

    def waves(rows: int) -> int:
        return -(-(-(-rows // WAVE_TILE[0]) * across) // p.multiprocessors)

    def cost(rows: int) -> float:
        whole, rest = divmod(p.tokens, rows)
        return whole * waves(rows) + waves(rest) + CHUNK_WAVES * (whole + (rest > 0))

    step = GRAIN * (1 + (most >> 24))  # of a tiny vocabulary there may be very many sizes
    return min(range(most, most // 2, -step), key=lambda rows: (cost(rows), rows))


def cut_anywhere(p: Problem, rows: int) -> Sequence[Chunk]:
    """Chunks of equal size; a border may fall inside a segment."""
    starts = range(0, p.tokens, rows)
    if p.lengths is None:
        return Even(starts, p.tokens)
    ends = list(accumulate(p.lengths))
    return tuple([Chunk.between(ends, at, min(at + rows, p.tokens)) for at in starts])


def cut(p: Problem, rows: int, limit: int) -> Sequence[Chunk] | None:
    """Chunks that respect the objective's scope, or None where there are none."""
    if p.tokens == 0 and not p.grouped and p.scope != "elsewhere":
        return ()
    lengths, unit = p.lengths or [], p.segments_per_unit
    if p.rows:  # nothing is held
        return (Chunk(0, p.tokens, 0, len(lengths)),)
    if p.scope == "token":
        return cut_anywhere(p, rows)
    if p.grouped or p.scope == "elsewhere":
        return None
    if p.tokens <= rows or p.scope == "batch" or not (lengths or p.each):
        return (Chunk(0, p.tokens, 0, len(lengths)),) if p.tokens <= max(rows, limit) else None
    if p.each:  # what is left over may fit beside the last whole units
        tokens = min(p.each * unit, p.tokens)
        size = max(1, rows // tokens) * tokens
        starts = range(0, max(1, p.tokens - max(0, rows - size)), size)
        return Even(starts, p.tokens) if tokens <= max(rows, limit) else None
    chunks: list[Chunk] = []
    start = stop = first = last = 0
    for at in range(0, len(lengths), unit):  # may not be cut apart
        tokens = sum(lengths[at : at + unit])
        if tokens > max(rows, limit):
            return None
        if stop > start and stop + tokens - start > rows:
            chunks.append(Chunk(start, stop, first, last))
            start, first = stop, last
        stop, last = stop + tokens, min(last + unit, len(lengths))
    if last > first:
        chunks.append(Chunk(start, stop, first, last))
    return tuple(chunks)
