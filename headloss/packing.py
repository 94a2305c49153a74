"""The batch as terms see it: packed to its T scored tokens (law 5).

N positions, T of them scored, S segments. Packing sorts the scored tokens by segment, gathers every
field to them and reads the device once. From there on there are no masks and no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .batch import IGNORE, Batch, Current
from .segments import Segments
from .stats import Statistics
from .survey import Order, Survey


class MissingField(ValueError):
    """A term reads a batch field that was not given."""


class Later:
    """A [T] field that is made when it is first read: a call's first product waits for none."""

    def __init__(self, dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        self.dtype = dtype
        self._make: Callable[[], Tensor] | None = make
        self._made: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._make is not None:
            self._made, self._make = self._make(), None
        assert self._made is not None
        return self._made


Field = Tensor | Current | Later


def mapped(value: Field, function: Callable[[Tensor], Tensor]) -> Field:
    """A field with `function`, which keeps its dtype, on its values."""
    if isinstance(value, Later):
        return Later(value.dtype, lambda: function(value()))
    return function(value) if isinstance(value, Tensor) else value


def outside_inference(value: Tensor) -> Tensor:
    """A tensor that may be saved for a backward pass, where one is wanted: a rollout's are made in
    inference mode."""
    if torch.is_inference_mode_enabled() or not value.is_inference():
        return value
    return value.clone()


class PackedBatch:
    """What terms see: T scored tokens sorted by segment, every field a [T] (or [T, K]) tensor.

    Fields are attributes; a missing one raises by name. `get(name)` returns None instead, and
    `name in batch` asks. A per-segment field stands at each of its segment's tokens.
    """

    def __init__(
        self,
        targets: Tensor,  # [T] int64
        segments: Segments,  # sorted
        fields: dict[str, Field],  # [T]
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
            return value() if isinstance(value, Later) else value
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
            {k: mapped(v, lambda t: t[tokens]) for k, v in self.fields.items()},
            {k: v[tokens] for k, v in self.wide.items()} if self.index is None else self.wide,
            None if self.index is None else self.index[tokens],
            live=None if self.live is None else self.live[tokens],
        )


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A packed batch and what the host knows of it.

    `lengths` are the scored tokens of each segment, or None with static shapes. `doubtful` holds
    the per-segment form of fields that may mean either, as segments run across ranks.
    """

    batch: PackedBatch
    positions: int  # N
    shape: torch.Size  # of the targets
    segments: int  # S
    lengths: list[int] | None
    unscored: Tensor | None = None  # [N - T] their positions
    doubtful: dict[str, Later] = field(default_factory=dict)  # [T]

    @property
    def index(self) -> Tensor | None:
        return self.batch.index

    def __len__(self) -> int:
        return len(self.batch)

    def with_fields(self, fields: dict[str, Field]) -> Packed:
        """With other [T] fields, of which none is doubtful."""
        b = self.batch
        batch = PackedBatch(b.targets, b.segments, fields, b.wide, b.index, live=b.live)
        return replace(self, batch=batch, doubtful={})

    def scatter(self, values: Tensor) -> Tensor:
        """[T] back to the caller's shape, 0 at unscored positions."""
        if self.batch.live is not None:
            values = values.masked_fill(~self.batch.live, 0)
        if self.index is None:
            return values.reshape(self.shape)
        return values.new_zeros(self.positions).index_copy_(0, self.index, values).view(self.shape)


def survey(
    batch: Batch,
    static: bool = False,
    unit: int = 1,
    id_fields: tuple[str, ...] = (),
    temperature: float | Tensor = 1.0,
) -> Survey:
    """What packing has to know of a batch; its facts may be read along with others.

    Args:
        static: nothing is to be read.
        unit: how many segments belong together.
        id_fields: fields [.., K] whose values lie below the size of the vocabulary.
        temperature: a number, which is right, or one value per token.
    """
    targets, wide = batch.targets, {}
    for name in id_fields:
        field = batch.fields[name]
        assert isinstance(field, Tensor)
        wide[name] = field.reshape(targets.numel(), field.shape[-1])
    heat = None
    if isinstance(temperature, Tensor):
        heat = temperature.detach().expand(targets.shape)
    return Survey.of(targets, batch.segments, IGNORE, unit, static, wide, heat)


class Packing:
    """A batch on its way to its packed form: all that needs no value of the device.

    Attributes:
        draft: its fields by name and kind; they have values once it is packed.
    """

    def __init__(self, batch: Batch, dtype: torch.dtype, known: Survey) -> None:
        self.batch, self.dtype, self.known = batch, dtype, known
        self.order: Order | None = None
        fields: dict[str, Field] = {}
        wide: dict[str, Tensor] = {}
        self.doubtful: dict[str, Later] = {}  # the other form of fields that may mean either
        for name, value in batch.fields.items():
            if isinstance(value, Current):
                fields[name] = value
                continue
            as_token, as_segment = batch._fits(name)
            if as_token and value.dim() > batch.targets.dim():
                wide[name] = value.reshape(-1, *value.shape[batch.targets.dim() :])
                continue
            if as_token:
                fields[name] = self._later(value, per_segment=False)
            if as_segment and (not as_token or batch.segments.group is not None):
                found = self._later(value, per_segment=True)
                (self.doubtful if as_token else fields)[name] = found
        self.draft = PackedBatch(batch.targets, batch.segments, fields, wide, None)

    def _later(self, value: Tensor, per_segment: bool) -> Later:
        dtype = self.dtype if value.is_floating_point() else value.dtype

        def make() -> Tensor:
            assert self.order is not None
            found, live = value.reshape(-1), self.order.live
            rows = self.order.ids if per_segment else self.order.index
            if per_segment and live is not None:  # of the segments that are not scored
                found = torch.cat([found, found.new_zeros(1)])
            found = outside_inference((found if rows is None else found[rows]).to(dtype))
            return found if live is None else found.masked_fill(~live, 0)

        return Later(dtype, make)

    def packed(self, vocabulary: int) -> Packed:
        """Drop unscored positions, sort by segment; one read of the device.

        With static shapes nothing is read or dropped: unscored positions go last, into segments of
        their own; `live` marks the others.

        Args:
            vocabulary: V; targets lie below it, and so do the values of id fields.

        Raises:
            ValueError: a target outside the vocabulary; at a scored position, a segment id outside
                its range or an id field's value beyond the vocabulary.
        """
        self.order = order = self.known.order(vocabulary)
        batch, targets = self.batch, order.targets
        if targets is None:
            targets = self.batch.targets.reshape(-1).long()
            targets = targets if order.index is None else targets.index_select(0, order.index)
        targets = outside_inference(targets)
        packed = PackedBatch(
            targets if order.live is None else targets.masked_fill(~order.live, 0),
            Segments(order.ids, len(order.counts), batch.segments.group, counts=order.counts),
            self.draft.fields,
            self.draft.wide,
            order.index,
            live=order.live,
        )
        return Packed(
            batch=packed,
            positions=batch.targets.numel(),
            shape=batch.targets.shape,
            segments=batch.segments.count,
            lengths=order.lengths,
            unscored=order.unscored,
            doubtful=self.doubtful,
        )


def pack(
    batch: Batch,
    vocabulary: int,
    dtype: torch.dtype,
    unit: int = 1,
    temperature: float | Tensor = 1.0,
) -> Packed:
    """A batch in its packed form, with float fields in `dtype`; see `Packing.packed`."""
    known = survey(batch, unit=unit, temperature=temperature)
    return Packing(batch, dtype, known).packed(vocabulary)
