"""Packing: the batch as terms see it, with scored tokens only.

N positions, T scored positions, S segments. Packing drops unscored positions and sorts scored
positions by segment. Packed fields need no masks and no padding: every field has one row per scored
token, [T] or [T, K].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import IGNORE
from ..statistics.softmax import Statistics
from .batch import CURRENT, Batch, Current, Kind, kind_of
from .segments import Chunk, Segments, numbered
from .support import SupportIds, SupportPairs

NOT_GIVEN = "which was not given"
ALL = slice(None)


class MissingField(ValueError):
    """The error raised when a term reads a batch field that was not given."""


def missing(name: str, fields: Iterable[str]) -> str:
    """Return an error text for a field that a batch does not have."""
    return f"batch.{name}, {NOT_GIVEN}; it has {', '.join(sorted(fields)) or 'no fields'}"


def outside_inference(value: Tensor) -> Tensor:
    """Return the tensor, or a copy of an inference-mode tensor, since autograd cannot save
    inference-mode tensors."""
    if torch.is_inference_mode_enabled() or not value.is_inference():
        return value
    return value.clone()


@dataclass(eq=False, repr=False)
class PackedBatch:
    """The batch as terms see it: T scored tokens sorted by segment, every field a [T] (or [T, K])
    tensor.

    Each field of the batch is an attribute; reading a field that the batch lacks raises an error
    that names the field. `get(name)` returns None for a missing field, and `name in batch` tests
    for a field. A per-segment field is expanded to the segment's tokens.
    """

    targets: Tensor  # Shape [T], int64.
    segments: Segments  # Segments of sorted tokens.
    # Tensors whose first dimension is the number N of positions; gathered when a term reads them.
    _fields: Mapping[str, Tensor | Current]
    live: Tensor | None = None  # Shape [T], bool: True for scored tokens; None without `static`.
    # Shape [T]: position of each token; None if the tokens are all N positions in order.
    index: Tensor | None = None
    _per_segment: frozenset[str] = frozenset()  # Names of the fields with one value per segment.
    # Dtype of the floating vectors that terms read; None keeps each field's dtype.
    _dtype: torch.dtype | None = None
    _count: int = 0  # Number of segments S, without the extra segments that static shapes add.
    _read: dict[str, Any] = field(default_factory=dict)  # Gathered fields.
    _cut_of: tuple[PackedBatch, slice] | None = None

    def __len__(self) -> int:
        return self.targets.shape[0]

    def __contains__(self, name: str) -> bool:
        return name in self._read or name in self._fields

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field; `default` if the field was not given."""
        return getattr(self, name) if name in self else default

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self:
            raise MissingField(f"reads {missing(name, self.kinds())}")
        if name not in self._read:
            self._read[name] = self._gathered(name)
        return self._read[name]

    def _gathered(self, name: str) -> Tensor:
        if self._cut_of is not None:
            batch, tokens = self._cut_of
            return getattr(batch, name)[tokens]
        live = self.live
        value = self.as_given(name)
        if name in self._per_segment:
            ids = self.segments.ids
            # With static shapes (no device reads), unscored tokens lie in extra segments at the
            # end, and get the value 0 in every per-segment field.
            if live is not None:
                value, ids = pad(value, (0, 1)), ids.clamp_max(len(value))
            value = value[ids]
        elif self.index is not None:
            value = value[self.index]
        value = outside_inference(value)
        if value.dim() > 1:
            return value
        if value.is_floating_point() or name == "advantages":  # Advantages may be integers.
            value = value.to(self._dtype)
        return value if live is None else value.masked_fill(~live, 0)

    def as_given(self, name: str) -> Any:
        """Return a field before the selection of scored tokens: [N, ..], or [S] if per segment;
        None for a missing field."""
        return self._fields.get(name)

    def kinds(self) -> dict[str, Kind]:
        """Return the dtype and the shape per token of each field, by the field's name. For a
        floating-point field with one number per token, the returned dtype is the dtype of the
        softmax statistics."""
        fields = {**self._fields, **self._read}
        return {name: kind_of(value, 1, self._dtype) for name, value in fields.items()}

    def on(self, stats: Statistics) -> PackedBatch:
        """Return the batch with `old_logps` taken from the statistics if `old_logps` is CURRENT."""
        if self.as_given("old_logps") is not CURRENT:
            return self
        return self.replacing({"old_logps": stats.logp.detach()})

    def replacing(self, fields: Mapping[str, Tensor]) -> PackedBatch:
        """Return the batch with some fields replaced by [T] values."""
        return replace(self, _read={**self._read, **fields})

    def slice(self, chunk: Chunk) -> PackedBatch:
        """Return the part of this packed batch that belongs to the tokens of `chunk`."""
        tokens = chunk.rows
        return replace(
            self,
            targets=self.targets[tokens],
            segments=self.segments.slice(chunk),
            index=None if self.index is None else self.index[tokens],
            live=None if self.live is None else self.live[tokens],
            _fields={**self._fields, **self._read},
            _read={},
            _cut_of=(self, tokens),
        )


def answers(batch: PackedBatch) -> Segments:
    """Return a `Segments` object whose elements are the batch's S segments (answers) and whose
    groups are the prompts, for sums and means over all answers to a prompt. Segments without tokens
    are included; each extra segment that static shapes add counts as a prompt by itself."""
    of_tokens = batch.prompts
    segments = batch.segments
    prompts = batch.as_given("prompts")
    # The small sample batch on which a term is traced holds only vectors of tokens.
    if "prompts" not in batch._per_segment:
        first = segments.lengths.cumsum(0) - segments.lengths
        prompts = of_tokens[first.clamp_max(len(batch) - 1)]
    numbers, _ = numbered(prompts)
    if batch.live is not None:
        more = torch.arange(len(numbers), segments.count, device=numbers.device)
        numbers = torch.cat([numbers, more])
    return Segments(numbers, segments.count)


class Packing:
    """Positions of the scored tokens in the batch, and the number of scored tokens per segment, in
    CPU memory.

    Args:
        batch: the batch to pack; unless shapes are static, `Batch._survey` must have been called
            before.
        unit: for static shapes (no device reads), the number of extra segments appended to the
            batch's segments; else None. Positions without a target, or with an invalid segment id,
            are assigned to the extra segments appended for static shapes, so that packing need not
            read the device.
    """

    shape: torch.Size  # Shape of the targets as given.
    count: int  # Number S of the batch's segments, without extra segments.
    targets: Tensor  # Shape [T].
    segments: Segments  # Segments of sorted tokens.
    # Shape [T]: position of each token; None if the tokens are all N positions in order.
    index: Tensor | None = None
    scored: Tensor  # Shape [N], bool: True for a scored position; absent with static shapes.
    # Shape [T], bool: True for a scored token; None without static shapes.
    live: Tensor | None = None
    # Number of scored tokens of each segment; None with static shapes.
    lengths: list[int] | None = None
    support: SupportPairs | None = None  # Allowed ids; None if each token allows all ids.

    def __init__(self, batch: Batch, unit: int | None = None) -> None:
        count = batch.segments.count
        ids = batch.segments.ids.reshape(-1)
        restricted = None
        self.shape = batch.targets.shape
        self.count = count
        if unit is not None:
            bins = batch.segments._bins.masked_fill(batch.targets.reshape(-1) == IGNORE, count)
            self.index = _argsort(bins, count)
            ids = bins[self.index]
            self.live = ids < count
            # Find the segment starts by a search in sorted ids, because a GPU serializes atomic
            # additions to a few counters.
            numbers = torch.arange(count + unit + 1, device=ids.device)
            counts = torch.searchsorted(ids, numbers).diff()
        else:
            survey: Any = batch._last_survey
            (descents, *_), (*self.lengths, _, unscored), of_support = survey.numbers
            self.scored = survey.scored
            scored_count = ids.shape[0] - unscored
            counts = survey.counts
            restricted = of_support[-1] if of_support else None
            if descents:
                self.index = _argsort(survey.bins, count)[:scored_count]
            elif unscored:
                self.index = places(survey.scored, scored_count)
            if self.index is not None:
                ids = ids[self.index]
        ids = ids.contiguous()
        self.segments = Segments(ids, counts.shape[0], batch.segments.group, counts=counts)
        self.targets = outside_inference(self.gather(batch.targets.long()))
        if batch.support is not None and restricted != 0:
            self.support = batch.support.pack(self.index, self.live, restricted)
            self.support.ids = outside_inference(self.support.ids)

    @property
    def unscored(self) -> Tensor | None:
        """[N - T] positions without a score; None if all positions are scored."""
        left = 0 if self.live is not None else self.scored.shape[0] - len(self)
        return places(~self.scored, left) if left else None

    def __len__(self) -> int:
        return self.targets.shape[0]

    def view(
        self, batch: Batch, dtype: torch.dtype, per_segment: frozenset[str] | None = None
    ) -> PackedBatch:
        """Return the batch as terms see it, with float vectors in `dtype`. `per_segment` names the
        fields with one value per segment; with None, the shape of each field decides."""
        if per_segment is None:
            per_segment = frozenset(n for n in batch.fields if not batch.per_token(n))
        fields = dict(batch.fields)
        rank = batch.targets.dim()
        for name, value in batch.fields.items():
            if isinstance(value, Tensor):
                value = value.reshape(-1, *value.shape[1 if name in per_segment else rank :])
                fields[name] = value.contiguous() if value.dim() == 1 else value
        of_tokens = self.targets, self.segments, fields, self.live, self.index
        return PackedBatch(*of_tokens, per_segment, dtype, self.count)

    def scatter(self, values: Tensor, rows: slice = ALL) -> Tensor:
        """Return a new tensor in the caller's shape, with the values [n, ..] at the positions of
        the tokens `rows` and 0 at all further positions."""
        return scattered(values, self.shape, self.index, self.live, rows)

    def gather(self, values: Tensor) -> Tensor:
        """Return the values [T, ..] of the packed tokens, from values in the caller's shape; a
        packed token without a target gets 0 (static shapes pack unscored tokens too)."""
        values = values.reshape(self.shape.numel(), *values.shape[len(self.shape) :])
        values = values.contiguous() if self.index is None else values[self.index]
        return values if self.live is None else values.masked_fill(~as_wide(self.live, values), 0)


def scattered(
    values: Tensor,
    shape: torch.Size,
    index: Tensor | None,
    live: Tensor | None,
    rows: slice = ALL,
) -> Tensor:
    """Return the result of `Packing.scatter` from the packing's tensors alone, so that a closure
    need not keep the batch alive."""
    if live is not None:
        values = values.masked_fill(~as_wide(live[rows], values), 0)
    full = values.new_zeros(*shape, *values.shape[1:])
    flat = full.flatten(0, len(shape) - 1)
    if index is None:
        flat[rows] = values
    else:
        flat.index_copy_(0, index[rows], values)
    return full


def places(chosen: Tensor, count: int) -> Tensor:
    """[count] indices of the True elements of a [N] bool vector, in order; `count` must be the
    number of True elements. The CPU does not wait for the GPU."""
    return torch.nonzero_static(chosen, size=count).squeeze(1)


def as_wide(of_rows: Tensor, like: Tensor) -> Tensor:
    """Return a vector [n] as [n, 1, ..], for broadcasting with a tensor [n, ..]."""
    return of_rows.view(-1, *[1] * (like.dim() - 1))


def _argsort(bins: Tensor, count: int) -> Tensor:
    """Return the stable sort order [N] of integers below `count`, after a cast to int16 or int32,
    which a GPU sorts faster than int64."""
    return bins.to(torch.int16 if count < 1 << 14 else torch.int32).argsort(stable=True)


def packing_of(batch: Batch, vocabulary: float = torch.inf, unit: int | None = None) -> Packing:
    """Return the packing of a batch; reuse the packing of an earlier call if the batch is
    unchanged.

    Args:
        vocabulary: V, above all targets and all values of id fields.
        unit: None, or with static shapes the number of segments to add after the given segments.
            With static shapes, no value is read or checked, and no position is dropped.

    Raises:
        ValueError: an attribute of the batch was assigned after construction; a target, a segment
            id or an id of a field is outside of its range at a scored position; or `support_ids`
            are invalid.
        RuntimeError: a batch that was changed in place after construction.
    """
    # Refuse attributes assigned to a batch, since packing reads the fields given at construction.
    if assigned := {"support_ids", *batch.fields} & vars(batch).keys():
        raise ValueError(f"{min(assigned)}: was assigned to, want batch.with_fields(...)")
    if unit is not None:
        if batch.support is not None:
            _check_static(batch.support, batch.targets)
        return Packing(batch, unit)
    survey = batch._survey().check(vocabulary)
    if batch.support is not None:
        batch.support.check(survey.numbers[2], batch.targets, vocabulary)
    if survey.packing is None:
        survey.packing = Packing(batch)
    return survey.packing


def _check_static(support: SupportIds, targets: Tensor) -> None:
    """ValueError if only some of the scored tokens have `support_ids`: with static shapes, the CPU
    cannot find the tokens without `support_ids`. Reading `support_ids` makes the CPU wait for the
    GPU; during graph capture, nothing is checked."""
    if targets.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    restricted = int(support.survey(targets)[-1])
    scored = int((targets != IGNORE).sum())
    if restricted != scored:
        raise ValueError(
            f"static: got support_ids at {restricted} of {scored} scored tokens, want them at all"
        )


def pack(batch: Batch, vocabulary: float, dtype: torch.dtype) -> PackedBatch:
    """Return the packed form of a batch, with float vectors in `dtype`."""
    return packing_of(batch, vocabulary).view(batch, dtype)
