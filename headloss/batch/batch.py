"""The batch as a user gives it: N positions, S segments."""

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
    """`old_logps=hl.CURRENT`: the log-probs of this very call, without gradient."""

    def __repr__(self) -> str:
        return "headloss.CURRENT"

    def __reduce__(self) -> str:  # there is one, also after copying and pickling
        return "CURRENT"


CURRENT = Current()
LOGPS = ("old_logps", "ref_logps", "sampling_logps")
OF_TOKENS = (*LOGPS, "teacher_index", "teacher_lse")  # one value per token
REAL = ("advantages", *OF_TOKENS)
FLOATS = ("advantages", "teacher_logits", "teacher_hidden", "teacher_lse")  # and all log-probs


# A field as terms see it: its dtype (None: CURRENT), and its shape at each token, () for one value.
Kind = tuple[torch.dtype | None, tuple[int, ...]]


def kind_of(value: Tensor | Current, rank: int, wide: torch.dtype | None) -> Kind:
    """The kind of a field [.., K] with `rank` dimensions before K; floating vectors are read in
    `wide`."""
    if isinstance(value, Current):
        return None, ()
    more = tuple(value.shape[rank:])
    return (wide if wide and not more and value.is_floating_point() else value.dtype), more


class Batch:
    """Targets and everything else that terms read, in the caller's own shape.

    Shapes: [..] is that of the targets, say [T] packed or [B, T] padded; [.., K] has K values for
    each token, [S] one for each segment.

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
        candidate_ids: [.., K] int64, K <= 512, columns whose log-probs `stats.candidate_logps` are:
            distinct at each position; a negative id is an empty slot.
        support_ids: [.., K] integers, a negative one being an empty slot, or a pair of all ids [P]
            and offsets [N + 1]: the columns that the softmax of each position runs over, the ids
            that a sampler kept. They are distinct and hold the target. A position without ids has
            the whole vocabulary.
        ignore_index: a target that is not scored either, as the id of the padding token is.
        **fields: any further [..], [.., K] or [S] tensors, by name, for terms; not a name that a
            batch or what terms see of it has itself, nor one that begins with an underscore.
            `prompts`, [S] integers in any order, are equal where segments answer the same prompt.
            With `teacher_index` [..] integers, rows of `teacher_hidden` [M, H'], positions share
            rows; each is multiplied once for a chunk of tokens, in which those that share one
            should therefore be neighbours: [T, steps] and not [steps, T].

    Raises:
        TypeError: a field that is not a dense tensor of real numbers, targets that are not
            integers, advantages or log-probs that are boolean, candidate_ids that are not integers.
        ValueError: a shape that fits neither, a field that requires a gradient, a reserved name.

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
        self._masks_read: frozenset[str] = frozenset()  # by the terms of earlier calls
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
        """A batch from unshifted labels [..]: position t's target is the label at t + 1.

        The shift stays inside each segment: the last token of a document never predicts the next
        document's first, and padding with a negative id predicts nothing.

        Args:
            labels: [..] int64 token ids; -100 is not scored.
            segments: as of `Batch`.
            align: for fields of the labels' shape, [..] or [.., K]: "labels", value t belongs to
                label t and is shifted with it, as `apply` does; "targets", value t belongs to
                target t, as of `out.logps` of an earlier call; or one of the two by field name.
                Fields per segment and `hl.CURRENT` need none.
            fields: as of `Batch`.

        Raises:
            TypeError, ValueError: as `Batch`; a field of the labels' shape that `align` leaves out.

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
        """The same tokens with some fields added, replaced or (None) left out, their values beside
        the targets; what was found out about their order is shared.

        >>> batch = Batch(torch.tensor([3, 1])).with_fields(old_logps=torch.zeros(2))
        """
        batch = copy(self)
        batch.fields = {n: v for n, v in self.fields.items() if n not in fields}
        batch._set_fields(fields)
        if not fields.keys() & {"support_ids", *ID_FIELDS}:
            batch._last_survey = self._last_survey  # which a copy does not have
        return batch

    def _set_fields(self, fields: dict[str, Any]) -> None:
        """Check and take fields; None leaves one out. A row's number comes before the rows."""
        for name, value in sorted(fields.items(), key=lambda pair: pair[0] != "teacher_index"):
            if name == "support_ids":
                self.support = None if value is None else SupportIds(value, self.targets)
            elif value is not None:
                self.fields[name] = value
                self._check_field(name, value)

    def to(self, *args: Any, **options: Any) -> Batch:
        """The same batch elsewhere: every tensor moved as by `Tensor.to(device)`."""

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
        """Copies and pickles do not keep the order of the tokens; they find it again."""
        return {**self.__dict__, "_last_survey": None}

    def _survey(self) -> Survey:
        """Survey of the tokens, made now where there is none of these tensors.
        RuntimeError where targets, segments or stored ids were changed in place since."""
        survey = self._last_survey
        support = self.support
        fields = self.fields
        stored: Any = {name: fields[name] for name in ID_FIELDS if is_integers(fields.get(name))}
        ids = {n: v for n, v in stored.items() if v.shape[:-1] == self.targets.shape}
        columns = () if support is None else support.tensors
        beside: Any = {name: fields.get(ID_FIELDS[name]) for name in ids}
        probs = {n: x for n, x in beside.items() if getattr(x, "shape", None) == ids[n].shape}
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
        """Shapes, dtypes and the number of segments; nothing is read from the device."""
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
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, want {want}")

    def per_token(self, name: str) -> bool:
        """True for a field with one value (or row) per position, False for one per segment."""
        return self._fits(name)[0]

    def _fits(self, name: str) -> tuple[bool, bool]:
        """Tell whether a field's shape fits values per position, and values per segment."""
        value = self.fields[name]
        if isinstance(value, Current):
            return True, False
        as_segment = name not in OF_TOKENS and value.shape == (self.segments.count,)
        if name == "prompts":  # also where there are as many segments as positions
            return False, as_segment
        if name == "teacher_hidden" and "teacher_index" in self.fields:
            return False, value.dim() == 2  # rows that positions share
        rank = None if name in REAL else self.targets.dim()
        return value.shape[:rank] == self.targets.shape, as_segment

    def kinds(self, wide: torch.dtype) -> dict[str, Kind]:
        """The fields as terms see them, by name, with floating vectors in `wide`."""
        rank = self.targets.dim()
        fields = self.fields.items()
        return {n: kind_of(v, rank if self.per_token(n) else 1, wide) for n, v in fields}


MOST_IDS = 512  # of a position
# Names of the batch itself, as it is given and as terms see it.
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
    """Of targets or labels: as they are given, else each row is one."""
    if segments is None:
        *rows, length = value.shape
        if not rows:
            return Segments(torch.zeros_like(value, dtype=torch.int64), 1, row=length)
        return Segments.rows(math.prod(rows), length, device=value.device)
    if not isinstance(segments, Segments):
        raise TypeError(f"segments: got {type(segments).__name__}, want headloss.Segments")
    # A constructor that each cut of a batch calls checks nothing.
    ids = check_integers("segments.ids", segments.ids, "an integer tensor")
    check_integer("segments.count", segments.count, 0)
    if ids.numel() != value.numel():
        got = tuple(ids.shape)
        want = tuple(value.shape)
        raise ValueError(f"segments: got {got} tokens, want the {of}' shape {want}")
    check_device("segments", ids, value, f"the {of}'")
    return segments


def check_ids(name: str, ids: Tensor, shape: torch.Size, most: int | None = None) -> None:
    """ValueError or TypeError where ids of positions of a shape are not [.., K] integers."""
    if ids.shape[:-1] != shape or not 1 <= ids.shape[-1] <= (most or ids.shape[-1]):
        want = f"{(*shape, 'K')} with {'K >= 1' if most is None else f'1 <= K <= {most}'}"
        raise ValueError(f"{name}: got shape {tuple(ids.shape)}, want {want}")
    check_integers(name, ids)


def _may_ask_device() -> bool:
    """False while a graph is captured or compiled, and in a data loader's worker."""
    if torch.compiler.is_compiling() or torch.utils.data.get_worker_info():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
