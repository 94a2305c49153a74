"""The planner's record of a call, and the bytes that a call takes beyond its inputs, by part.

T scored tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..head.products import PARTS
from ..options import Options

Schedule = Literal["one_pass", "recompute", "frozen", "held", "narrow", "statistics"]
WAVE_TILE = (128, 256)  # rows x columns of a product that one multiprocessor computes at once
WORKING_BLOCK = 1 << 20  # logits that a reference act works on at once
CANDIDATE_BYTES = 24  # of a candidate: its id, its log-prob and its slope
PAIR_BYTES = 48  # of a pair of a support: its logit and gradient in float32, its places by column
EXP_ROWS = 16384  # tokens per product that writes statistics alone


class Tile(NamedTuple):
    """A sweep's step: rows x columns of the logits."""

    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The planner's record of a call."""

    tokens: int = 0  # T
    width: int = 0  # H
    vocabulary: int = 0  # V
    scope: str = "token"  # or "external": the loss is not known before all statistics are out
    lengths: list[int] | None = None  # scored tokens per segment; None with static shapes
    segments_per_unit: int = 1
    grouped: bool = False  # segments run across ranks
    sharded: bool = False  # hidden gradients are summed over ranks
    sparse: bool = True  # some tokens may be without a gradient
    thorough: bool = False  # a CPU leaves them out at any size: it is asked to, or they may be NaN
    logp_only: bool = False  # the gradient needs nothing but d/dlogp, or K of them per token
    input_gradient: bool = True
    weight_gradient: bool = True
    element_size: int = 4  # of hidden and weight
    weight_size: int = 4  # of the weight's own dtype
    on_chip: bool = False  # sweeps of a narrow head can serve, whose tiles never leave the chip
    by_sweeps: bool = False  # and do by default: they are faster, as the head alone says
    multiples: bool = False  # the gradient needs nothing but d/dlogp and d/dlse
    exp_tiles: bool = False  # the product writes exp(logits) in 16 bits in place of logits
    rescaled: bool = False  # gradients are scaled against underflow: dW sums in float32
    row_bytes: int = 4  # per token and vocabulary entry of a chunk, teachers included
    on_gpu: bool = False
    multiprocessors: int = 0  # of the GPU
    memory: int = 0  # bytes of the GPU, in a vocabulary group of the one that has least
    given: bool = False  # the logits exist already
    overwrites: bool = False  # and their gradient may overwrite them
    in_place: bool = False  # and a kernel works on them where they lie
    teachers: bool = False  # stand beside the logits
    candidates: int = 0  # columns of a token that are measured apart
    support: int = 0  # pairs of a token and a column of its support
    restricted: int = 0  # tokens that have one

    @property
    def narrow(self) -> bool:
        """True if all tokens have a support: no product runs over the vocabulary."""
        return 0 < self.restricted == self.tokens

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a chunk."""
        if self.narrow:
            return max(1, self.support * PAIR_BYTES // self.tokens)
        return self.vocabulary * self.row_bytes

    @property
    def hidden_sums(self) -> int:
        """Bytes of the hidden gradient of slabs, if summed apart."""
        apart = self.input_gradient and self.element_size < 4
        return self.tokens * self.width * 4 if apart else 0

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slab per token and column: its logits or, beside a teacher, its gradient and
        the logits of a part of the tokens."""
        if self.given or not self.teachers:
            return self.row_bytes
        gradient = self.element_size if self.on_gpu else max(4, self.element_size)
        return gradient + max(8, self.row_bytes) // PARTS


def bytes_by_part(
    p: PlanInputs, schedule: Schedule, rows: int, tile: Tile, options: Options, single_block: bool
) -> dict[str, int]:
    if p.in_place:
        return {"statistics": p.tokens * 64}
    sweeps = schedule in ("recompute", "statistics")
    slabs = schedule == "recompute" and not p.given
    elements = tile.rows * tile.columns if sweeps else rows * p.vocabulary
    logits = elements * (p.slab_bytes if sweeps else p.row_bytes)
    if sweeps and p.teachers:
        logits = max(logits, rows * p.token_bytes - p.hidden_sums)
    if schedule == "narrow":  # float32 sums of 16 parts of the vocabulary
        logits = min(p.tokens, EXP_ROWS) * 64 * (p.width + 4)
    if schedule == "held":
        logits = p.tokens * p.vocabulary * p.row_bytes
    widened = 3 * min(elements, WORKING_BLOCK) * max(4, p.element_size)  # a few blocks at a time
    if p.element_size < 4 and not p.given:  # and of a 16-bit weight
        widened += 4 * min(4 * WORKING_BLOCK, p.vocabulary * p.width)
    fused = schedule == "statistics" and (p.exp_tiles or p.by_sweeps) and not p.teachers
    if fused:  # the product leaves a maximum and a sum of each tile
        logits = 8 * min(p.tokens, EXP_ROWS) * -(-p.vocabulary // WAVE_TILE[1])
    wide = 8 if p.element_size == 8 else options.accumulate_dtype.itemsize
    # Of its own dtype or of one product, a sum is the returned gradient itself.
    apart = p.weight_gradient and not (p.given or single_block)
    summed = apart and schedule in ("one_pass", "held") and wide != p.weight_size
    wide_hidden = (slabs or schedule == "narrow") and p.hidden_sums
    fused |= schedule == "narrow"
    parts = [
        (not p.narrow, "partial statistics" if fused else "logits", logits),
        (p.support, "support", p.support * PAIR_BYTES),
        (True, "statistics", p.tokens * 64),
        (p.candidates, "candidates", p.tokens * p.candidates * CANDIDATE_BYTES),
        (not p.on_gpu, "working blocks", widened),
        (
            p.sharded and p.input_gradient and not p.given,
            "hidden gradient on its way",
            rows * p.width * max(4, p.element_size),
        ),
        (options.sequence_parallel, "gathered hidden states", p.tokens * p.width * p.element_size),
        (summed, "weight gradient accumulator", p.vocabulary * p.width * wide),
        (slabs and apart, "weight gradient slab", tile.columns * p.width * wide),
        (wide_hidden, "hidden gradient accumulator", p.hidden_sums),
    ]
    return {name: size for taken, name, size in parts if taken}


def peak_bytes(p: PlanInputs, parts: dict[str, int], options: Options) -> int:
    """Bytes with the returned gradients; a gradient that is summed apart is made after the logits
    have gone."""
    columns = p.vocabulary * (not p.overwrites) if p.given else p.width
    hidden = p.input_gradient * p.tokens * columns * p.element_size
    returned = p.weight_gradient and options.main_grad is None
    weight = returned * p.vocabulary * p.width * p.weight_size
    pairs = {"hidden gradient accumulator": hidden, "weight gradient accumulator": weight}
    late = sum(size for name, size in pairs.items() if name in parts)
    return hidden + weight + sum(parts.values()) - min(late, parts.get("logits", 0))
