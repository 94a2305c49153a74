"""The batch as terms see it: packed to its T scored tokens (law 5).

N positions, T of them scored, S segments. Packing sorts the scored tokens by segment, gathers every
field to them and reads the device once. From there on there are no masks and no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batch import IGNORE, Batch, Current, count_kept
from .segments import Segments
from .stats import Statistics


class MissingField(ValueError):
    """A term reads a batch field that was not given."""


class PackedBatch:
    """What terms see: T scored tokens sorted by segment, every field a [T] (or [T, K]) tensor.

    Fields are attributes; a missing one raises by name. `get(name)` returns None instead, and
    `name in batch` asks. A per-segment field stands at each of its segment's tokens.
    """

    def __init__(
        self,
        targets: Tensor,  # [T] int64
        segments: Segments,  # sorted
        fields: dict[str, Tensor | Current],  # [T]
        wide: dict[str, Tensor],  # [N, ...], gathered only when read
        index: Tensor | None,  # [T] position of each token, None: all N in order
        stats: Statistics | None = None,
        live: Tensor | None = None,  # [T] bool, only with static shapes
    ) -> None:
        self.targets = targets
        self.segments = segments
        self.fields = fields
        self.wide = wide
        self.index = index
        self.stats = stats
        self.live = live

    def __len__(self) -> int:
        return len(self.targets)

    def __contains__(self, name: str) -> bool:
        return name in self.fields or name in self.wide

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or `default` where it was not given."""
        return getattr(self, name) if name in self else default

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "fields" not in self.__dict__:
            raise AttributeError(name)
        if name in self.fields:
            value = self.fields[name]
            if isinstance(value, Current):
                assert self.stats is not None and self.stats.logp is not None
                return self.stats.logp.detach()
            return value
        if name in self.wide:
            value = self.wide[name]
            return value if self.index is None else value[self.index]
        raise MissingField(f"reads batch.{name}, which was not given")

    def on(self, stats: Statistics) -> PackedBatch:
        """The same tokens beside their statistics (for CURRENT)."""
        return PackedBatch(
            self.targets, self.segments, self.fields, self.wide, self.index, stats, self.live
        )

    def slice(self, tokens: slice, first: int, last: int) -> PackedBatch:
        """The tokens in `tokens`, which lie in segments first..last (the outer two may be cut)."""
        return PackedBatch(
            self.targets[tokens],
            self.segments.slice(first, last, tokens),
            {k: v if isinstance(v, Current) else v[tokens] for k, v in self.fields.items()},
            {k: v[tokens] for k, v in self.wide.items()} if self.index is None else self.wide,
            None if self.index is None else self.index[tokens],
            live=None if self.live is None else self.live[tokens],
        )


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A packed batch and what the host knows of it.

    `lengths` are the scored tokens of each segment, or None with static shapes.
    """

    batch: PackedBatch
    positions: int  # N
    shape: torch.Size  # of the targets
    segments: int  # S
    lengths: list[int] | None
    unscored: Tensor | None = None  # [N - T] their positions

    @property
    def index(self) -> Tensor | None:
        return self.batch.index

    def __len__(self) -> int:
        return len(self.batch)

    def scatter(self, values: Tensor) -> Tensor:
        """[T] back to the caller's shape, 0 at unscored positions."""
        if self.batch.live is not None:
            values = values.masked_fill(~self.batch.live, 0)
        if self.index is None:
            return values.reshape(self.shape)
        return values.new_zeros(self.positions).index_copy_(0, self.index, values).view(self.shape)


def pack(
    batch: Batch,
    vocabulary: int,
    dtype: torch.dtype,
    static: bool = False,
    unit: int = 1,
    id_fields: tuple[str, ...] = (),
) -> Packed:
    """Drop unscored positions, sort by segment, gather the fields; one read of the device.

    With `static` nothing is read or dropped: unscored positions go last, into a segment of their
    own (`unit` of them, where pairs belong together); `live` marks the others.

    Args:
        vocabulary: V; targets lie below it, and so do the values of `id_fields`.
        dtype: of the packed float fields.

    Raises:
        ValueError: a target outside the vocabulary; at a scored position, a segment id outside its
            range or an id field's value beyond the vocabulary.
    """
    order = _static_order(batch, unit) if static else _order(batch, vocabulary, id_fields)
    index, ids = order.index, order.ids
    live = ids < batch.segments.count if static else None
    targets = batch.targets.reshape(-1).long()
    targets = targets if index is None else targets[index]
    fields, wide = _gather_fields(batch, index, ids, dtype, live)
    packed = PackedBatch(
        targets if live is None else targets.masked_fill(~live, 0),
        Segments(ids, len(order.counts), batch.segments.group, counts=order.counts),
        fields,
        wide,
        index,
        live=live,
    )
    return Packed(
        batch=packed,
        positions=batch.targets.numel(),
        shape=batch.targets.shape,
        segments=batch.segments.count,
        lengths=order.lengths,
        unscored=order.unscored,
    )


class _Order(NamedTuple):
    """Which position each packed token comes from."""

    index: Tensor | None  # [T], None: all N in order
    ids: Tensor  # [T] segments, ascending
    counts: Tensor  # [S] tokens of each
    lengths: list[int] | None = None
    unscored: Tensor | None = None  # [N - T]


def _static_order(batch: Batch, unit: int) -> _Order:
    """All positions, the scored ones first; nothing is read or checked."""
    targets, ids = batch.targets.reshape(-1), batch.segments.ids.reshape(-1)
    count = batch.segments.count
    ids = ids.masked_fill((targets == IGNORE) | (ids < 0) | (ids >= count), count)
    index = ids.argsort(stable=True)
    return _Order(index, ids[index], count_kept(ids, ids.new_ones(1), count + unit))


def _order(batch: Batch, vocabulary: int, id_fields: tuple[str, ...]) -> _Order:
    """The scored positions by segment; with the one read of the device, and every check of values.

    Few launches come before the read, since nothing else of the call can run until it is there.
    """
    targets, ids = batch.targets.reshape(-1), batch.segments.ids.reshape(-1)
    count, positions = batch.segments.count, targets.numel()
    if positions == 0:
        return _Order(None, ids, ids.new_zeros(count), [0] * count)
    unscored = targets == IGNORE
    # Bin 0 takes ids below 0, 1 to S the segments', S + 1 those beyond; the last is not scored.
    bins = ids.clamp(-1, count).add_(1).masked_fill_(unscored, count + 2)
    counts = count_kept(bins, ids.new_ones(1), count + 3)
    sorted_already = (bins[1:] >= bins[:-1]).all().long()
    facts = [sorted_already, *targets.masked_fill(unscored, 0).aminmax()]
    for name in id_fields:
        facts.append(_id_field(batch, name).masked_fill(unscored, 0).amax())
    read = torch.cat([torch.stack(facts), counts]).tolist()
    (in_order, lowest, highest, *largest), sizes = read[: len(facts)], read[len(facts) :]
    below, *lengths, beyond, out = sizes
    if lowest < 0 or highest >= vocabulary:
        wrong = (targets < 0) | (targets >= vocabulary)
        _refuse("targets", targets, wrong & ~unscored, f"-100 or 0 <= target < {vocabulary}")
    if below or beyond:
        wrong = (ids < 0) | (ids >= count)
        _refuse("segments", ids, wrong & ~unscored, f"0 <= id < {count} at a scored position")
    for name, value in zip(id_fields, largest, strict=True):
        if value >= vocabulary:
            values = _id_field(batch, name)
            _refuse(name, values, (values >= vocabulary) & ~unscored, f"id < {vocabulary}")
    counts = counts[1:-2]
    if in_order and not out:
        return _Order(None, ids, counts, lengths)
    order = bins.argsort(stable=True)
    index = order[: positions - out]
    return _Order(index, ids[index], counts, lengths, order[positions - out :])


def _id_field(batch: Batch, name: str) -> Tensor:
    """[N] the largest id at each position of a field [.., K]."""
    field = batch.fields[name]
    assert isinstance(field, Tensor)
    return field.reshape(-1, field.shape[-1]).amax(1)


def _refuse(name: str, values: Tensor, wrong: Tensor, want: str) -> None:
    position = int(wrong.nonzero()[0])
    raise ValueError(f"{name}: got {int(values[position])} at position {position}, want {want}")


def _gather_fields(
    batch: Batch, index: Tensor | None, ids: Tensor, dtype: torch.dtype, live: Tensor | None
) -> tuple[dict[str, Tensor | Current], dict[str, Tensor]]:
    """[T] fields, and those with more dimensions as they are."""
    fields: dict[str, Tensor | Current] = {}
    wide: dict[str, Tensor] = {}
    for name, value in batch.fields.items():
        if isinstance(value, Current):
            fields[name] = value
            continue
        if batch.per_token(name):
            value = value.reshape(-1, *value.shape[batch.targets.dim() :])
            if value.dim() > 1:
                wide[name] = value
                continue
            value = value if index is None else value[index]
        else:
            value = torch.cat([value, value.new_zeros(1)])[ids]
        if value.is_floating_point():
            value = value.to(dtype)
        fields[name] = value if live is None else value.masked_fill(~live, 0)
    return fields, wide
