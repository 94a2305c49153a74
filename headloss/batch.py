"""The batch as a user gives it: N positions, S segments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .reduction import Totals, count_totals
from .segments import Segments

IGNORE = -100  # the target of an unscored position, as in torch.nn.functional.cross_entropy


class Current:
    """`old_logps=hl.CURRENT`: the log-probs of this very call, without gradient."""

    def __repr__(self) -> str:
        return "headloss.CURRENT"

    def __reduce__(self) -> str:  # there is one, also after copying and pickling
        return "CURRENT"


CURRENT = Current()
LOGPS = ("old_logps", "ref_logps", "sampling_logps")
REAL = ("advantages", *LOGPS)


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
        **fields: any further [..], [.., K] or [S] tensors, by name, for terms; not a name that a
            batch or what terms see of it has itself, nor one that begins with an underscore.

    Raises:
        TypeError: a field that is not a tensor, targets that are not integers, advantages or
            log-probs that are complex or boolean.
        ValueError: a shape that fits neither, a field that requires a gradient, a reserved name.
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
        self.fields: dict[str, Tensor | Current] = {}
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
        if name in RESERVED or name.startswith("_"):
            raise ValueError(f"{name}: is a name of the batch itself, choose another")
        if value is CURRENT:
            if name != "old_logps":
                raise ValueError(f"{name}: got headloss.CURRENT, want a tensor")
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, want a tensor")
        if name in REAL and (value.is_complex() or value.dtype == torch.bool):
            raise TypeError(f"{name}: got {value.dtype}, want a floating tensor")
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
        if isinstance(value, Current):
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


# Attributes of a batch and of what terms see of it: a field of that name would be shadowed.
OF_TERMS = ("wide", "index", "stats", "live", "get", "on", "slice")
OF_BATCH = ("targets", "segments", "totals", "fields", "per_token", "from_labels")
RESERVED = frozenset([*OF_TERMS, *OF_BATCH, "totals_of_this_batch"])


def _default_segments(targets: Tensor) -> Segments:
    *rows, length = targets.shape
    return Segments.rows(math.prod(rows), length, device=targets.device)
