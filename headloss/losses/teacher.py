"""A teacher: its full distribution, or its top k; and statistics beside its divergences.

T scored tokens, K stored outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..batch.packing import MissingField
from ..head.head import Head
from ..statistics.divergence import ACCEPTANCE, MIXED, Measure
from ..statistics.softmax import Statistics
from .arguments import naming, number, one_of, positive, with_floats
from .stored import divergence_of_stored

if TYPE_CHECKING:
    from ..batch.packing import PackedBatch

Tail = Literal["bucket", "renormalized", "truncated", "clamped", "generalized", "sampled"]
TAILS: tuple[Tail, ...] = get_args(Tail)
Kind = Literal[
    "forward_kl", "reverse_kl", "js", "skew_forward_kl", "skew_reverse_kl", "total_variation"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
INPUTS = {
    "logits": ("teacher_logits",),
    "hidden": ("teacher_hidden",),
    "topk": ("teacher_topk_ids", "teacher_topk_logps"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """A distribution to compare with; equal ones, of the same head at one temperature, are measured
    once. Key of `Statistics.extras`, alone of a stored top-k, else beside a measure."""

    temperature: float
    head: Head | None = field(repr=False)  # a repr would bring its weight from the device
    tail: Tail = "bucket"

    def _identity(self) -> tuple[Any, ...]:
        if not isinstance(self.head, Head):  # a call names an object of another type
            return self.temperature, id(self.head), self.tail
        return self.temperature, tuple(map(_identity, vars(self.head).values())), self.tail

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Teacher):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def source(self, batch: Container[str]) -> str:
        """Which of its inputs a batch holds, by its names: "logits", "hidden" or "topk"."""
        given = [form for form, names in INPUTS.items() if any(n in batch for n in names)]
        if len(given) != 1 or not all(name in batch for name in INPUTS[given[0]]):
            have = sorted(n for names in INPUTS.values() for n in names if n in batch)
            raise MissingField(
                f"got {have or 'no teacher'} in the batch, want one of teacher_logits; "
                "teacher_hidden (with teacher_head); teacher_topk_ids and teacher_topk_logps"
            )
        if given[0] == "hidden" and self.head is None:
            raise MissingField("got batch.teacher_hidden without a teacher_head")
        return given[0]

    def columns(self, batch: PackedBatch) -> Tensor:
        """[T, K] ids of stored outcomes; with the tail "sampled" [T, K + 1], of which the last is
        the target where it is not stored, and an empty slot where it is."""
        ids: Tensor = batch.teacher_topk_ids
        if self.tail != "sampled":
            return ids
        target = batch.targets.unsqueeze(1).to(ids.dtype)
        stored = (ids == target).any(1, keepdim=True)
        return torch.cat([ids, target.masked_fill(stored, -1)], 1)


def _identity(value: object) -> object:
    """Of a head's field: tensors are the same where they are one object."""
    return value if value is None or isinstance(value, int | float | str) else id(value)


@with_floats
def teacher(head: Head | None = None, temperature: float = 1.0) -> Teacher:
    """The teacher of a term, whose divergences it reads: `@hl.term(teacher=hl.teacher(head))`.

    A term of a teacher reads `stats.divergence(kind, beta=0.5)`, `stats.acceptance` and
    `stats.log_acceptance`, [T] each and with a gradient. Terms of equal teachers share one pass.

    Args:
        head: the teacher's head, for `teacher_hidden`; None for `teacher_logits` or a stored top-k.
        temperature: of both sides, in place of the heads' own.

    Inputs: as of hl.distillation.

    >>> import headloss as hl
    >>> verifier = hl.teacher()
    >>> @hl.term(teacher=verifier)
    ... def rejected(stats, batch):
    ...     return -stats.log_acceptance
    >>> rejected()
    rejected()
    """
    with naming("teacher"):
        positive(temperature=temperature)
    return Teacher(temperature=temperature, head=head)


def measure_of(kind: str, beta: float = 0.5) -> Measure:
    """By the names and the meaning of `distillation`; ValueError for others."""
    one_of(KINDS, kind=kind)
    if kind not in MIXED:
        return Measure(kind)
    number("between 0 and 1", lambda x: 0 < x < 1, beta=beta)
    return Measure(kind, 1 - beta if kind == "skew_reverse_kl" else beta)


class SharedRows(NamedTuple):
    """Rows of `teacher_hidden` by token; neighbours that read one row share its product."""

    index: Tensor  # [T] the row of each token
    rows: Tensor | None  # [R] the row of each run of neighbours; None: nothing is shared
    run: Tensor  # [T] of each token
    on_host: Tensor  # the same: a block of tokens asks the device for nothing

    @classmethod
    def of(cls, index: Tensor, count: int, static: bool = False) -> SharedRows:
        """Of the tokens' rows below `count`; ValueError for others. With static shapes, where
        nothing is read from the device, none are shared."""
        if static:
            return cls(index, None, index, index)
        rows, run = index.unique_consecutive(return_inverse=True)
        for row in rows[(rows < 0) | (rows >= count)].tolist()[:1]:
            want = f"0 <= row < {count} of teacher_hidden at a scored position"
            raise ValueError(f"teacher_index: got {row}, want {want}")
        return cls(index, rows, run, run.cpu())

    def take(self, index: Tensor) -> SharedRows:
        """Of some of the tokens."""
        part = self.index[index]
        return self.of(part, int(part.max()) + 1) if len(part) else self

    def at(self, tokens: slice | Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows [M] that some tokens read, and the place [n] of each token's; None: its own."""
        if self.rows is None or not len(self.index):
            return self.index[tokens], None
        if isinstance(tokens, Tensor):
            return self.index[tokens].unique_consecutive(return_inverse=True)
        first, last = self.on_host[tokens][[0, -1]].tolist()
        return self.rows[first : last + 1], self.run[tokens] - first


def measures_by_name(teacher: Teacher | None, divergences: Collection[str]) -> dict[str, Measure]:
    """Of a teacher; raises for other names, and for names without a teacher or the reverse."""
    if not isinstance(teacher, Teacher | None):
        raise TypeError(f"teacher: got {type(teacher).__name__}, want hl.teacher(...)")
    if isinstance(divergences, str) or not isinstance(divergences, Collection):
        raise TypeError(f"divergences: got {divergences!r}, want a tuple of names")
    if (teacher is None) != (not divergences):
        raise ValueError(f"divergences: got {divergences!r} with teacher={teacher!r}, want both")
    with naming("divergences"):
        return {
            name: ACCEPTANCE if name == ACCEPTANCE.kind else measure_of(name)
            for name in divergences
        }


class SampleExtras(dict[object, Tensor]):
    """What a trial reads beside the statistics; a teacher's measures are made as they are read.

    Args:
        leaf: makes a tensor of one value.
    """

    def __init__(self, leaf: Callable[[float], Tensor]) -> None:
        super().__init__()
        self.leaf = leaf

    def __missing__(self, key: object) -> Tensor:
        if not isinstance(key, tuple):
            raise KeyError(key)
        return self.setdefault(key, self.leaf(-0.3 if key[1] == ACCEPTANCE else 0.3))


class BesideTeacher:
    """Statistics, as a term sees them beside its teacher."""

    def __init__(self, stats: Statistics, teacher: Teacher, batch: PackedBatch) -> None:
        self._stats, self._teacher, self._batch = stats, teacher, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stats, name)

    def __len__(self) -> int:
        return len(self._stats)

    def divergence(self, kind: str, beta: float = 0.5) -> Tensor:
        """[T] of the teacher's distribution from the student's, with a gradient: kinds and `beta`
        as of hl.distillation."""
        return self._measured(measure_of(kind, beta))

    @property
    def log_acceptance(self) -> Tensor:
        """[T] log sum_j min(p_j, q_j), with a gradient: of the chance that speculative sampling
        accepts a token that the student drew."""
        return self._measured(ACCEPTANCE)

    @property
    def acceptance(self) -> Tensor:
        """[T] its exponential, sum_j min(p_j, q_j): to the last digits however small it is."""
        return self.log_acceptance.exp()

    def _measured(self, measure: Measure) -> Tensor:
        teacher, extras = self._teacher, self._stats.extras
        teacher.source(self._batch)  # raises where the batch holds none
        if teacher in extras:
            logps, logp = extras[teacher], self._stats.logp
            wide = logps.dtype if logp is None else logp.dtype
            return divergence_of_stored(logps, self._batch, measure, teacher.tail, wide)
        try:
            return extras[teacher, measure]
        except KeyError:
            raise ValueError(
                f"reads stats.{measure.kind}, but did not on a small sample of tokens; want a term "
                "that reads the same whatever the values are"
            ) from None
