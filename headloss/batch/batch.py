"""The batch of a call, as given by the caller: N positions, S segments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arguments import IGNORE, brief, check_dense, check_device, check_integers, is_integers
from .labels import Shift, aligned, goes_on, next_in_row, next_inside
from .reduction import Totals
from .segments import Segments, check_integer
from .support import SupportIds
from .survey import ID_FIELDS, Survey


class Current:
    """The type of `headloss.CURRENT`: `old_logps=hl.CURRENT` means the log-probs of this call,
    detached."""

    def __repr__(self) -> str:
        return "headloss.CURRENT"

    def __reduce__(self) -> str:  # Copying or unpickling gives the global object `CURRENT` itself.
        return "CURRENT"


CURRENT = Current()
LOGPS = ("old_logps", "ref_logps", "sampling_logps")
OF_TOKENS = (*LOGPS, "teacher_index", "teacher_lse")  # Fields with one value per token.
REAL = ("advantages", *OF_TOKENS)
# Fields that must have a floating-point dtype, in addition to the fields of log-probs.
FLOATS = ("advantages", "teacher_logits", "teacher_hidden", "teacher_lse")


# Dtype of a batch field and shape of the field's value at one token, () for a number; the dtype is
# None for a field set to `headloss.CURRENT`.
Kind = tuple[torch.dtype | None, tuple[int, ...]]


def kind_of(value: Tensor | Current, rank: int, wide: torch.dtype | None) -> Kind:
    """Return the dtype of the batch field `value`, and its shape without the first `rank`
    dimensions, which index positions or segments. For floating-point numbers, one per position or
    segment, the returned dtype is `wide`, unless `wide` is None."""
    if isinstance(value, Current):
        return None, ()
    more = tuple(value.shape[rank:])
    return (wide if wide and not more and value.is_floating_point() else value.dtype), more


class Batch:
    """Targets and all other inputs of terms, in the caller's shape.

    Shapes: [..] is the shape of the targets, say [T] packed or [B, T] padded. [.., K] has K values
    for each token, [S] has a value for each segment.

    Args:
        targets: [..] int64, already shifted: position t's target is the next token. A position with
            target -100 is not scored.
        segments: the division of positions into sequences. By default, each row of a [B, T] batch
            is a segment, and a [T] vector is a single segment.
        advantages: [..] per token or [S] per segment. If S equals T in a [T] batch, [T] advantages
            are per token. If segments run across ranks, advantages are per token only if their
            shape is [..] on all ranks.
        old_logps, ref_logps, sampling_logps: [..] log-probs of the targets under the policy in the
            ratio's denominator, the reference model, and the sampler. `old_logps=hl.CURRENT` means
            the log-probs of this call, detached.
        totals: global denominators; default: the totals of this batch (over `segments.group`).
        candidate_ids: [.., K] int64, K <= 512: vocabulary ids whose log-probs a term reads as
            `stats.candidate_logps`. Ids are distinct at each position; a negative id is an unused
            entry.
        support_ids: the ids over which each position's softmax runs, such as the ids that a sampler
            kept: [.., K] integers with negative ids in unused entries, or a pair of all ids [P] and
            offsets [N + 1]. Each position's ids are distinct and include the target. The softmax of
            a position without ids runs over the whole vocabulary.
        ignore_index: a target value that marks unscored positions in addition to -100, such as the
            id of the padding token.
        **fields: further tensors [..], [.., K] or [S] for terms, by name. A field's name must not
            begin with an underscore or be an attribute of `Batch` or `PackedBatch`. `prompts` are
            [S] integers in any order, equal for segments that answer one prompt. `teacher_index`
            [..] gives each position's row of `teacher_hidden` [M, H'], so that several positions
            can share a row. Within a chunk of tokens, the product of a row of `teacher_hidden` with
            the teacher's weight is computed once for all neighbouring positions with this row:
            place such positions next to each other, as in [T, steps] and not [steps, T].

    Raises:
        TypeError: a field that is not a dense tensor of real numbers, targets that are not
            integers, advantages or log-probs that are boolean, candidate_ids that are not integers.
        ValueError: a field whose shape is neither per token nor per segment, a field that requires
            a gradient, a reserved name.

    >>> import torch, headloss as hl
    >>> hl.Batch(torch.tensor([[5, 3, -100], [7, 2, 9]]))  # [B, T]: a segment is a row
    Batch(targets=[2, 3] int64, 2 segments, on cpu)
    >>> hl.Batch(
    ...     torch.tensor([5, 3, -100, 7]),  # [T]
    ...     hl.Segments.from_lengths([2, 2]),
    ...     advantages=torch.tensor([1.0, -1.0]),  # one for each segment
    ... )
    Batch(targets=[4] int64, advantages=[2] float32, 2 segments, on cpu)
    """

    def __init__(
        self,
        targets: Tensor,
        segments: Segments | None = None,
        advantages: Tensor | None = None,
        old_logps: Tensor | Current | None = None,
        ref_logps: Tensor | None = None,
        sampling_logps: Tensor | None = None,
        totals: Totals | None = None,
        candidate_ids: Tensor | None = None,
        support_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        ignore_index: int = IGNORE,
        **fields: Tensor | None,
    ) -> None:
        _check_targets(targets)
        if check_integer("ignore_index", ignore_index) != IGNORE:
            targets = targets.masked_fill(targets == ignore_index, IGNORE)
        self.targets = targets
        self.segments = _segments_of("targets", targets, segments)
        if totals is not None and not isinstance(totals, Totals):
            raise TypeError(f"totals: got {type(totals).__name__}, want headloss.Totals")
        self.totals = totals
        self.support: SupportIds | None = None
        self.fields: dict[str, Tensor | Current] = {}
        named = {
            "support_ids": support_ids,
            "advantages": advantages,
            "old_logps": old_logps,
            "ref_logps": ref_logps,
            "sampling_logps": sampling_logps,
            "candidate_ids": candidate_ids,
            **fields,
        }
        self._set_fields(named)
        # Names of masks that the terms of earlier calls read.
        self._masks_read: frozenset[str] = frozenset()
        self._last_survey: Survey | None = None
        if _may_ask_device():
            self._survey()

    @classmethod
    def from_labels(
        cls,
        labels: Tensor,
        segments: Segments | None = None,
        *,
        align: str | Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Batch:
        """Make a batch from unshifted labels [..]: position t's target is the label at t + 1.

        The shift stays inside each segment: the last token of a document never predicts the next
        document's first, and padding with a negative id predicts nothing.

        Args:
            labels: [..] int64 token ids; -100 marks unscored positions.
            segments: as for `Batch`.
            align: the alignment of fields of the labels' shape, [..] or [.., K]. "labels": value t
                belongs to label t and is shifted with the labels. "targets": value t belongs to
                target t, as in `out.logps` of an earlier call. A dict from field names to "labels"
                or "targets" sets the alignment of each field. Fields with one value per segment,
                and fields set to `hl.CURRENT`, need no alignment with the labels.
            fields: as for `Batch`.

        Raises:
            TypeError, ValueError: as `Batch`; a field of the labels' shape without an alignment in
                `align`.

        >>> import torch, headloss as hl
        >>> weights = torch.tensor([0.0, 1.0, 2.0])
        >>> batch = hl.Batch.from_labels(torch.tensor([5, 3, 7]), w=weights, align="labels")
        >>> batch.targets.tolist(), batch.w.tolist()
        ([3, 7, -100], [1.0, 2.0, 0.0])
        """
        _check_targets(labels, "labels")
        shift: Shift = partial(next_in_row, dim=labels.dim() - 1)
        if segments is not None:
            segments = _segments_of("labels", labels, segments)
            shift = partial(next_inside, inside=goes_on(segments.ids, labels.shape))
        fields = aligned(fields, align, labels.shape, shift)
        return cls(shift(labels, fill=IGNORE), segments, **fields)

    def with_fields(self, **fields: Tensor | Current | None) -> Batch:
        """Return a batch of the same tokens with fields added, replaced or removed (None). The
        value of a field at position t belongs to the target at position t. The new batch shares the
        packing of this batch, unless a field of vocabulary ids (such as `candidate_ids` or
        `support_ids`) changes.

        >>> batch = Batch(torch.tensor([3, 1])).with_fields(old_logps=torch.zeros(2))
        """
        batch = copy(self)
        batch.fields = {n: v for n, v in self.fields.items() if n not in fields}
        batch._set_fields(fields)
        if not fields.keys() & {"support_ids", *ID_FIELDS}:
            # `Batch.__getstate__` leaves the survey (extremes and counts read from the device) out
            # of copies.
            batch._last_survey = self._last_survey
        return batch

    def _set_fields(self, fields: dict[str, Any]) -> None:
        """Check and store fields; a field of None is removed. `teacher_index` is stored before
        `teacher_hidden`, whose check depends on `teacher_index`."""
        for name, value in sorted(fields.items(), key=lambda pair: pair[0] != "teacher_index"):
            if name == "support_ids":
                self.support = None if value is None else SupportIds(value, self.targets)
            elif value is not None:
                self.fields[name] = value
                self._check_field(name, value)

    def to(self, *args: Any, **options: Any) -> Batch:
        """Return the batch on another device; arguments are as for `Tensor.to`."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return tuple(map(moved, value)) if isinstance(value, tuple) else value
            result = value.to(*args, **options)
            if result.is_floating_point() != value.is_floating_point():
                got = result.dtype
                want = f"a device: its {value.dtype} tensors stay what they are"
                raise TypeError(f"to: got {got} for a batch, want {want}")
            return result

        fields = {name: moved(value) for name, value in self.fields.items()}
        if self.support is not None:
            fields["support_ids"] = moved(self.support.value)
        segments = self.segments
        row = segments._row if segments._ascends else None
        segments = Segments(moved(segments.ids), segments.count, segments.group, row=row)
        return Batch(moved(self.targets), segments, totals=self.totals, **fields)

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for copies and pickles, without the batch's `Survey` (extremes and
        counts of the tokens), which is cheap to make again."""
        return {**self.__dict__, "_last_survey": None}

    def _survey(self) -> Survey:
        """Return the survey (extremes and counts read from the device) of the batch's tensors; make
        a survey now if the last survey is of other tensors. RuntimeError if targets, segments or
        stored ids were changed in place since the last survey."""
        survey = self._last_survey
        support = self.support
        fields = self.fields
        ids = dict[str, Any]()
        probs = dict[str, Any]()
        for name, name_of_probs in ID_FIELDS.items():
            value: Any = fields.get(name)
            if is_integers(value) and value.shape[:-1] == self.targets.shape:
                ids[name] = value
                stored = fields.get(name_of_probs)
                if getattr(stored, "shape", None) == value.shape:
                    probs[name] = stored
        columns = () if support is None else support.tensors
        tensors = self.targets, self.segments.ids, *ids.values(), *probs.values(), *columns
        if survey is None or not survey.is_of(tensors):
            of_support = support and support.survey(self.targets)
            survey = Survey(self.targets, self.segments, ids, probs, of_support, tensors)
            self._last_survey = survey
        return survey

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        support = self.__dict__.get("support")
        if name in fields:
            return fields[name]
        if name == "support_ids" and support is not None:
            return support.value
        raise AttributeError(f"batch has no field {name!r}; it has {sorted(fields)}")

    def __repr__(self) -> str:
        """Return shapes, dtypes and the number of segments, without a read from the device."""
        held = {"targets": self.targets, **self.fields}
        if self.support is not None:
            held["support_ids"] = self.support.value
        shown = ", ".join(f"{name}={brief(value)}" for name, value in held.items())
        return f"Batch({shown}, {self.segments.count} segments, on {self.targets.device})"

    def _check_field(self, name: str, value: object) -> None:
        if name in RESERVED or name.startswith("_"):
            raise ValueError(f"{name}: is a name of the batch itself, choose another")
        if value is CURRENT:
            if name != "old_logps":
                raise ValueError(f"{name}: got headloss.CURRENT, want a tensor")
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, want a tensor")
        check_dense(name, value)
        floats = name in FLOATS or name.endswith("_logps")
        if value.is_complex() or (floats and value.dtype == torch.bool):
            want = "a floating tensor" if floats else "real numbers"
            raise TypeError(f"{name}: got {value.dtype}, want {want}")
        if value.requires_grad:
            raise ValueError(f"{name}: requires a gradient, which would be lost: detach it")
        check_device(name, value, self.targets)
        if name in ("prompts", "teacher_index"):
            check_integers(name, value)
        if name == "candidate_ids":
            check_ids(name, value, self.targets.shape, MOST_IDS)
        shape = tuple(self.targets.shape)
        if 0 in value.shape[len(shape) :]:
            want = f"{(*shape, 'K')} with K >= 1"
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, want {want}")
        if not any(self._fits(name)):
            of_token = "" if name == "prompts" else f"{shape} per token"
            of_segment = "" if name in OF_TOKENS else f"({self.segments.count},) per segment"
            want = ", or ".join(filter(None, [of_token, of_segment]))
            if name == "teacher_hidden" and "teacher_index" in self.fields:
                want = "(M, H), rows for teacher_index"
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, want {want}")

    def per_token(self, name: str) -> bool:
        """True if the batch field `name` has one value (or row) per position; False if the field
        has one value per segment."""
        return self._fits(name)[0]

    def _fits(self, name: str) -> tuple[bool, bool]:
        """Return two flags: the field's shape fits a value per position; the shape fits a value per
        segment."""
        value = self.fields[name]
        if isinstance(value, Current):
            return True, False
        as_segment = name not in OF_TOKENS and value.shape == (self.segments.count,)
        # The field `prompts` always has one value per segment, even if its shape also fits one
        # value per position.
        if name == "prompts":
            return False, as_segment
        if name == "teacher_hidden" and "teacher_index" in self.fields:
            # `teacher_index` lets several positions share a row of `teacher_hidden`.
            return False, value.dim() == 2
        rank = None if name in REAL else self.targets.dim()
        return value.shape[:rank] == self.targets.shape, as_segment

    def kinds(self, wide: torch.dtype) -> dict[str, Kind]:
        """Return the dtype and the shape per token of each field, by the field's name. For
        floating-point vectors the dtype is the argument `wide`, because loss terms receive vectors
        in the dtype `wide`."""
        rank = self.targets.dim()
        fields = self.fields.items()
        return {n: kind_of(v, rank if self.per_token(n) else 1, wide) for n, v in fields}


MOST_IDS = 512  # Largest number of ids of a position.
# Names that fields must not have, because `Batch` or `PackedBatch` has an attribute of the name.
RESERVED = {*vars(Batch), "targets", "segments", "totals", "fields", "support", "support_ids"}
RESERVED |= {"get", "live", "on", "slice", "replacing", "wide", "index", "stats", "as_given"}


def _check_targets(targets: object, name: str = "targets") -> None:
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(f"{name}: got {got}, want an int64 tensor")
    check_dense(name, targets)
    if targets.dim() == 0:
        raise ValueError(f"{name}: got a 0-dim tensor, want at least one dimension")


def _segments_of(of: str, value: Tensor, segments: object) -> Segments:
    """Return the segments of targets or labels; by default, each row is a segment."""
    if segments is None:
        *rows, length = value.shape
        if not rows:
            return Segments(torch.zeros_like(value, dtype=torch.int64), 1, row=length)
        return Segments.rows(math.prod(rows), length, device=value.device)
    if not isinstance(segments, Segments):
        raise TypeError(f"segments: got {type(segments).__name__}, want headloss.Segments")
    # The segment ids are checked when a batch is made; the constructor `Segments()` has no checks,
    # because it also runs for every chunk of tokens.
    ids = check_integers("segments.ids", segments.ids, "an integer tensor")
    check_integer("segments.count", segments.count, 0)
    if ids.numel() != value.numel():
        got = tuple(ids.shape)
        want = tuple(value.shape)
        raise ValueError(f"segments: got {got} tokens, want the {of}' shape {want}")
    check_device("segments", ids, value, f"the {of}'")
    return segments


def check_ids(name: str, ids: Tensor, shape: torch.Size, most: int | None = None) -> None:
    """Raise ValueError or TypeError if ids are not integers of shape [.., K] with 1 <= K (<=
    `most`), where [..] is `shape`."""
    if ids.shape[:-1] != shape or not 1 <= ids.shape[-1] <= (most or ids.shape[-1]):
        want = f"{(*shape, 'K')} with {'K >= 1' if most is None else f'1 <= K <= {most}'}"
        raise ValueError(f"{name}: got shape {tuple(ids.shape)}, want {want}")
    check_integers(name, ids)


def _may_ask_device() -> bool:
    """True if the device may be read: False while a graph is captured or compiled, and in a data
    loader's worker."""
    if torch.compiler.is_compiling() or torch.utils.data.get_worker_info():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
