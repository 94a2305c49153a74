"""The inputs of the function that plans a call, and the bytes of working memory that a call needs,
by name of the buffer.

T scored tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..head.products import PARTS
from ..options import Options

Schedule = Literal["one_pass", "recompute", "frozen", "held", "narrow", "statistics"]
# Rows x columns of a matmul's output that a multiprocessor computes at a time.
WAVE_TILE = (128, 256)
WORKING_BLOCK = 1 << 20  # Logits in a working block of the reference backend.
CANDIDATE_BYTES = 24  # Bytes per candidate (id, log-prob and its gradient).
# Bytes per pair of a token and an allowed column: float32 logit and gradient, and indices sorted by
# column.
PAIR_BYTES = 48
EXP_ROWS = 16384  # Number of tokens per matmul, in calls without a gradient.
# Largest mean number of tokens per chunk at which the schedule `one_pass`, which sums the weight
# gradient over chunks, is no faster than `recompute`, which computes the logits twice. The number
# was measured on a GPU with 16-bit dtypes (benchmarks/studies/schedules.py).
FEW_ROWS = 640


class Tile(NamedTuple):
    """Rows x columns of logits in one step of a loop over tiles."""

    rows: int
    columns: int


@dataclass(kw_only=True)
class PlanInputs:
    """The planner's inputs: sizes and properties of a call."""

    tokens: int = 0  # Scored tokens, T.
    width: int = 0  # Hidden width, H.
    vocabulary: int = 0  # Vocabulary, V.
    # Scope of the loss terms (such as "segment"); "external" if the caller's own code computes the
    # loss from the statistics, so that headloss needs the statistics of all tokens before any
    # gradient.
    scope: str = "token"
    lengths: list[int] | None = None  # Scored tokens per segment; None with static shapes.
    segments_per_unit: int = 1
    grouped: bool = False  # True if segments run across ranks.
    sharded: bool = False  # True if ranks shard the vocabulary.
    sparse: bool = True  # True if some tokens may have no gradient.
    # True if a CPU must leave tokens without a gradient out of all matmuls, even of small ones,
    # because `gradient_tolerance` is set or hidden states may hold NaN.
    thorough: bool = False
    # True if the gradient depends only on the loss's derivatives with respect to log-probs of the
    # target or of K candidates.
    logp_only: bool = False
    input_gradient: bool = True
    weight_gradient: bool = True
    element_size: int = 4  # Bytes per element of hidden states and weight in matmuls.
    weight_size: int = 4  # Bytes per element of the weight's own dtype.
    # True if the kernels of the `narrow` schedule, which keep tiles of logits on the chip, can be
    # used with this head.
    on_chip: bool = False
    # True if the `narrow` schedule is the default, because at the head's size it is faster than
    # schedules that write logits to memory.
    by_sweeps: bool = False
    # True if the gradient depends only on the loss's derivatives with respect to the target's
    # log-prob and the log-sum-exp.
    multiples: bool = False
    exp_tiles: bool = False  # The matmul writes exp(logits) in 16 bits in place of logits.
    # True if gradients are scaled against float16 underflow, and the weight gradient is summed in
    # float32.
    rescaled: bool = False
    # Bytes per logit of a chunk (per token and vocabulary entry), including teachers' logits.
    row_bytes: int = 4
    on_gpu: bool = False
    multiprocessors: int = 0  # Multiprocessors of the GPU.
    # GPU memory in bytes; if ranks shard the vocabulary, the memory of the smallest GPU among the
    # ranks.
    memory: int = 0
    given: bool = False  # True if the caller passes logits.
    overwrites: bool = False  # True if the gradient may overwrite the logits of the caller.
    in_place: bool = False  # True if a kernel reads and writes the caller's logits without a copy.
    # True if a teacher's logits are in memory together with the student's logits.
    teachers: bool = False
    candidates: int = 0  # Candidate columns per token.
    support: int = 0  # Pairs of a token and an allowed column.
    restricted: int = 0  # Number of tokens whose softmax is over `support_ids`.

    @property
    def narrow(self) -> bool:
        """True if all tokens have `support_ids`, so that no matmul runs over the vocabulary."""
        return 0 < self.restricted == self.tokens

    def sums_often(self, chunks: int) -> bool:
        """True if `one_pass` is no faster than `recompute`, because a chunk has so few tokens that
        the float32 sum of the weight gradient is read and written many times."""
        few = chunks > 1 and self.tokens <= FEW_ROWS * chunks
        return few and self.on_gpu and self.exp_tiles and self.weight_gradient

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's logits in a chunk."""
        if self.narrow:
            return max(1, self.support * PAIR_BYTES // self.tokens)
        return self.vocabulary * self.row_bytes

    @property
    def hidden_sums(self) -> int:
        """Bytes of the float32 accumulator of the hidden gradient over blocks of vocabulary
        columns; 0 if no accumulator is needed."""
        apart = self.input_gradient and self.element_size < 4
        return self.tokens * self.width * 4 if apart else 0

    @property
    def slab_bytes(self) -> int:
        """Bytes per token and column of a block of vocabulary columns. In a call without a teacher,
        a block of vocabulary columns takes memory for the block's logits. In a call with a teacher,
        a block of vocabulary columns takes memory for the gradient of the block's logits, and for
        the logits of a part of the tokens at a time."""
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
    # The kernel of the schedule "narrow" keeps float32 sums of each token for each of 16 slices of
    # the vocabulary.
    if schedule == "narrow":
        logits = min(p.tokens, EXP_ROWS) * 64 * (p.width + 4)
    if schedule == "held":
        logits = p.tokens * p.vocabulary * p.row_bytes
    # The reference backend converts a few blocks of logits at a time to float32 or float64.
    widened = 3 * min(elements, WORKING_BLOCK) * max(4, p.element_size)
    if p.element_size < 4 and not p.given:  # Blocks of a 16-bit weight, converted to float32.
        widened += 4 * min(4 * WORKING_BLOCK, p.vocabulary * p.width)
    fused = schedule == "statistics" and (p.exp_tiles or p.by_sweeps) and not p.teachers
    if fused:  # The matmul of logits writes only a maximum and a sum of exponentials for each tile.
        logits = 8 * min(p.tokens, EXP_ROWS) * -(-p.vocabulary // WAVE_TILE[1])
    wide = 8 if p.element_size == 8 else options.accumulate_dtype.itemsize
    # An accumulator in the weight's dtype is itself the returned gradient, and a weight gradient
    # from a single matmul needs no accumulator.
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
    """Return the peak bytes of a call's working memory, `parts`, together with the returned
    gradients. A gradient summed in a float32 accumulator is cast to its own dtype after the logits
    are freed."""
    columns = p.vocabulary * (not p.overwrites) if p.given else p.width
    hidden = p.input_gradient * p.tokens * columns * p.element_size
    returned = p.weight_gradient and options.main_grad is None
    weight = returned * p.vocabulary * p.width * p.weight_size
    pairs = {"hidden gradient accumulator": hidden, "weight gradient accumulator": weight}
    late = sum(size for name, size in pairs.items() if name in parts)
    return hidden + weight + sum(parts.values()) - min(late, parts.get("logits", 0))
