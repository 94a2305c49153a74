"""The batch as a user gives it, and as terms see it: packed to its T scored tokens (law 5).

N positions, T of them scored, S segments. Packing sorts the scored tokens by segment, gathers every
field to them and reads the device once. From there on there are no masks and no padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .reduction import Totals, count_totals
from .segments import Segments
from .stats import Statistics
from .survey import Survey

IGNORE = -100  # the target of an unscored position, as in torch.nn.functional.cross_entropy


class _Current:
    """`old_logps=hl.CURRENT`: the log-probs of this very call, without gradient."""

    def __repr__(self) -> str:
        return "headloss.CURRENT"


CURRENT = _Current()
LOGPS = ("old_logps", "ref_logps", "sampling_logps")


class Batch:
    """Targets and everything else that terms read, in the caller's own shape.

    Args:
        targets: [..] int64, already shifted: position t's target is the next token. -100 is not
            scored.
        segments: which positions form one sequence. Default: each row of a [B, T] batch is one, a
            [T] vector is one.
        advantages: [..] per token or [S] per segment (where both fit, the targets' shape wins; with
            segments that run across ranks, where it fits on all of them).
        old_logps, ref_logps, sampling_logps: [..] log-probs of the targets under the policy that
            the ratio starts from, the reference, and the sampler. `old_logps=hl.CURRENT` stands
            for this call's own, detached.
        totals: global denominators; default: this batch (over `segments.group`).
        **fields: any further [..], [.., K] or [S] tensors, by name, for terms.

    Raises:
        TypeError: a field that is not a tensor, targets that are not integers.
        ValueError: a shape that fits neither, a field that requires a gradient.
    """

    def __init__(
        self,
        targets: Tensor,
        segments: Segments | None = None,
        advantages: Tensor | None = None,
        old_logps: Tensor | _Current | None = None,
        ref_logps: Tensor | None = None,
        sampling_logps: Tensor | None = None,
        totals: Totals | None = None,
        **fields: Tensor | None,
    ) -> None:
        if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
            got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
            raise TypeError(f"targets: got {got}, want an int64 tensor")
        if targets.dim() == 0:
            raise ValueError("targets: got a 0-dim tensor, want at least one dimension")
        self.targets = targets
        self.segments = _default_segments(targets) if segments is None else segments
        if not isinstance(self.segments, Segments):
            raise TypeError(f"segments: got {type(segments).__name__}, want headloss.Segments")
        if self.segments.ids.numel() != targets.numel():
            raise ValueError(
                f"segments: got {tuple(self.segments.ids.shape)} tokens, want the targets' "
                f"shape {tuple(targets.shape)}"
            )
        if totals is not None and not isinstance(totals, Totals):
            raise TypeError(f"totals: got {type(totals).__name__}, want headloss.Totals")
        self.totals = totals
        self.fields: dict[str, Tensor | _Current] = {}
        named = {
            "advantages": advantages,
            "old_logps": old_logps,
            "ref_logps": ref_logps,
            "sampling_logps": sampling_logps,
            **fields,
        }
        for name, value in named.items():
            if value is not None:
                self._check_field(name, value)
                self.fields[name] = value

    @classmethod
    def from_labels(cls, labels: Tensor, segments: Segments | None = None, **fields: Any) -> Batch:
        """A batch from unshifted labels [..]: position t's target is the label at t + 1.

        The shift stays inside each segment: the last token of a document never predicts the next
        document's first. Other fields are taken as they are, aligned with the targets.
        """
        if not isinstance(labels, Tensor) or labels.dim() == 0:
            raise TypeError("labels: want an int64 tensor with at least one dimension")
        segments = _default_segments(labels) if segments is None else segments
        flat, ids = labels.reshape(-1), segments.ids.reshape(-1)
        if flat.shape != ids.shape:
            raise ValueError(
                f"segments: got {tuple(segments.ids.shape)} tokens, want the labels' shape "
                f"{tuple(labels.shape)}"
            )
        targets = torch.full_like(flat, IGNORE)
        targets[:-1] = torch.where(ids[1:] == ids[:-1], flat[1:], IGNORE)
        return cls(targets.reshape(labels.shape), segments, **fields)

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"batch has no field {name!r}; it has {sorted(fields)}")

    def _check_field(self, name: str, value: object) -> None:
        if name in RESERVED:
            raise ValueError(f"{name}: is a name of the batch itself, choose another")
        if value is CURRENT:
            if name != "old_logps":
                raise ValueError(f"{name}: got headloss.CURRENT, want a tensor")
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, want a tensor")
        if value.requires_grad:
            raise ValueError(f"{name}: requires a gradient, which would be lost: detach it")
        if value.device != self.targets.device:
            raise ValueError(
                f"{name}: got device {value.device}, want the targets' {self.targets.device}"
            )
        shape, targets = tuple(value.shape), tuple(self.targets.shape)
        per_segment = shape == (self.segments.count,) and name not in LOGPS
        if shape[: len(targets)] != targets and not per_segment:
            segment = "" if name in LOGPS else f", or ({self.segments.count},) per segment"
            raise ValueError(f"{name}: got shape {shape}, want {targets} per token{segment}")

    def per_token(self, name: str) -> bool:
        """Whether a field has one value (or row) per position; else it has one per segment."""
        return self._fits(name)[0]

    def _fits(self, name: str) -> tuple[bool, bool]:
        """Whether a field's shape is one of values per position, and one of values per segment."""
        value = self.fields[name]
        if isinstance(value, _Current):
            return True, False
        as_segment = name not in LOGPS and value.shape == (self.segments.count,)
        return value.shape[: self.targets.dim()] == self.targets.shape, as_segment

    def totals_of_this_batch(self) -> Totals:
        """Scored tokens and segments, and the same for each boolean field (see `Totals.of`)."""
        masks = {}
        for name, value in self.fields.items():
            if isinstance(value, Tensor) and value.dtype == torch.bool:
                as_token, as_segment = self._fits(name)
                masks[name] = (value if as_token else None, value if as_segment else None)
        return count_totals(self.targets.reshape(-1) != IGNORE, self.segments, masks)


RESERVED = frozenset(
    ["targets", "segments", "totals", "fields", "get", "slice", "per_token", "from_labels", "live"]
)


def _default_segments(targets: Tensor) -> Segments:
    *rows, length = targets.shape
    return Segments.rows(math.prod(rows), length, device=targets.device)


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
        fields: dict[str, Tensor | _Current],  # [T]
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
            if isinstance(value, _Current):
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
            {k: v if isinstance(v, _Current) else v[tokens] for k, v in self.fields.items()},
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
    doubtful: dict[str, Tensor] = field(default_factory=dict)  # [T]

    @property
    def index(self) -> Tensor | None:
        return self.batch.index

    def __len__(self) -> int:
        return len(self.batch)

    def with_fields(self, fields: dict[str, Tensor | _Current]) -> Packed:
        """With other [T] fields, of which none is doubtful."""
        b = self.batch
        batch = PackedBatch(b.targets, b.segments, fields, b.wide, b.index, live=b.live)
        return replace(self, batch=batch, doubtful={})

    def scatter(self, values: Tensor) -> Tensor:
        """[T] back to the caller's shape, 0 at unscored positions."""
        if self.batch.live is not None:
            values = torch.where(self.batch.live, values, 0)
        if self.index is None:
            return values.reshape(self.shape)
        return values.new_zeros(self.positions).index_copy_(0, self.index, values).view(self.shape)


def survey(
    batch: Batch, static: bool = False, unit: int = 1, id_fields: tuple[str, ...] = ()
) -> Survey:
    """What `pack` has to know of a batch; its facts may be read along with others."""
    targets, wide = batch.targets.reshape(-1), {}
    for name in id_fields:
        field = batch.fields[name]
        assert isinstance(field, Tensor)
        wide[name] = field.reshape(len(targets), field.shape[-1])
    return Survey.of(targets, targets != IGNORE, batch.segments, unit, static, wide)


def pack(
    batch: Batch,
    vocabulary: int,
    dtype: torch.dtype,
    static: bool = False,
    unit: int = 1,
    id_fields: tuple[str, ...] = (),
    known: Survey | None = None,
) -> Packed:
    """Drop unscored positions, sort by segment, gather the fields; one read of the device.

    With `static` nothing is read or dropped: unscored positions go last, into a segment of their
    own (`unit` of them, where pairs belong together); `live` marks the others.

    Args:
        vocabulary: V; targets lie below it, and so do the values of `id_fields`.
        dtype: of the packed float fields.
        known: `survey` of the batch, with the same arguments.

    Raises:
        ValueError: a target outside the vocabulary; at a scored position, a segment id outside its
            range or an id field's value beyond the vocabulary.
    """
    found = survey(batch, static, unit, id_fields) if known is None else known
    targets, count, positions = batch.targets.reshape(-1), batch.segments.count, len(found.key)
    key, order, counts = found.key, found.order, found.counts
    index: Tensor | None = order
    lengths = unscored = None
    if not static:
        in_place, lengths = found.check(vocabulary)
        index = None if in_place else order[: sum(lengths)]
        unscored = None if index is None else order[len(index) :]
        counts = counts[:count]

    ids = key if index is None else key[index]
    live = ids < count if static else None
    targets = targets.long() if index is None else targets.long()[index]
    fields, wide, doubtful = _gather_fields(batch, index, ids, dtype, live)
    packed = PackedBatch(
        targets if live is None else torch.where(live, targets, 0),
        Segments(ids, len(counts), batch.segments.group, counts=counts),
        fields,
        wide,
        index,
        live=live,
    )
    return Packed(
        batch=packed,
        positions=positions,
        shape=batch.targets.shape,
        segments=count,
        lengths=lengths,
        unscored=unscored,
        doubtful=doubtful,
    )


def _gather_fields(
    batch: Batch, index: Tensor | None, ids: Tensor, dtype: torch.dtype, live: Tensor | None
) -> tuple[dict[str, Tensor | _Current], dict[str, Tensor], dict[str, Tensor]]:
    """[T] fields, those with more dimensions as they are, and the other form of doubtful ones."""
    fields: dict[str, Tensor | _Current] = {}
    wide, doubtful = {}, {}

    def finished(value: Tensor) -> Tensor:
        if value.is_floating_point():
            value = value.to(dtype)
        return value if live is None else torch.where(live, value, 0).to(value.dtype)

    for name, value in batch.fields.items():
        if isinstance(value, _Current):
            fields[name] = value
            continue
        as_token, as_segment = batch._fits(name)
        if as_token:
            rows = value.reshape(-1, *value.shape[batch.targets.dim() :])
            if rows.dim() > 1:
                wide[name] = rows
                continue
            fields[name] = finished(rows if index is None else rows[index])
        if as_segment and (not as_token or batch.segments.group is not None):
            found = finished(torch.cat([value, value.new_zeros(1)])[ids])
            (doubtful if as_token else fields)[name] = found
    return fields, wide, doubtful
