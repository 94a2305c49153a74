"""Teachers: a full distribution or a stored top k, and the divergences that terms read from them.

T scored tokens, K ids that a top-k teacher stores per token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..arguments import IGNORE
from ..batch.batch import Batch, check_ids
from ..batch.packing import MissingField
from ..head.head import Head, check_head
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
    """Teacher distribution of a term; terms with equal teachers share one computation.

    Two `Teacher` objects are equal if they have the same `head`, `temperature` and `tail`. Keys of
    `Statistics.extras` are a `Teacher` for a stored top k, and a pair (teacher, divergence measure)
    for a full distribution.
    """

    temperature: float
    # repr=False, because the repr of a `Head` would copy its weight from the GPU to the CPU.
    head: Head | None = field(repr=False)
    tail: Tail = "bucket"

    def __post_init__(self) -> None:
        positive(temperature=self.temperature)
        if self.head is not None:
            check_head(self.head, "teacher_head")

    def identity(self) -> tuple[Any, ...]:
        """Return a key that is equal for two teachers with equal head, temperature and `tail`
        option."""
        head = None if self.head is None else tuple(map(_identity, vars(self.head).values()))
        return head, self.temperature, self.tail

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Teacher):
            return NotImplemented
        return self is other or self.identity() == other.identity()

    def __hash__(self) -> int:
        return hash(self.identity())

    def source(self, batch: Container[str]) -> str:
        """Return the form of the teacher's input in a batch: "logits", "hidden" or "topk"."""
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
        """Return the teacher's stored top-k ids, [T, K]; with the tail "sampled" [T, K + 1], where
        the last column is for the target.

        The option tail="sampled" appends a column: the target's id, or -1 (an unused entry) if the
        teacher's stored top k has the target.
        """
        ids: Tensor = batch.teacher_topk_ids
        if self.tail != "sampled":
            return ids
        target = batch.targets.unsqueeze(1).to(ids.dtype)
        stored = (ids == target).any(1, keepdim=True)
        return torch.cat([ids, target.masked_fill(stored, -1)], 1)


def _identity(value: object) -> object:
    """Return the comparison key of a field of a head, which is the object's id if the field is a
    tensor."""
    return value if value is None or isinstance(value, int | float | str) else id(value)


@with_floats
def teacher(head: Head | None = None, temperature: float = 1.0) -> Teacher:
    """Define the teacher whose divergences a term reads: `@hl.term(teacher=hl.teacher(head))`.

    A term with a teacher reads `stats.divergence(kind, beta=0.5)`, `stats.acceptance` and
    `stats.log_acceptance`, [T] each and with a gradient. Terms of equal teachers share one pass
    over the vocabulary.

    Args:
        head: the teacher's head, for `teacher_hidden`; None for `teacher_logits` or a stored top-k.
        temperature: temperature of teacher and student, in place of the heads' temperatures.

    Inputs: the inputs of `hl.distillation`.

    Raises:
        TypeError: `head` is neither None nor a `Head`, such as a weight.
        ValueError: the temperature is not a number > 0.

    >>> import headloss as hl
    >>> verifier = hl.teacher()
    >>> @hl.term(teacher=verifier)
    ... def rejected(stats, batch):
    ...     return -stats.log_acceptance
    >>> rejected()
    rejected()
    """
    with naming("teacher"):
        if head is not None:
            check_head(head)
        return Teacher(temperature=temperature, head=head)


def measure_of(kind: str, beta: float = 0.5) -> Measure:
    """Return the `Measure` for a divergence's name, as in `hl.distillation`; raise ValueError for
    an unknown name."""
    one_of(KINDS, kind=kind)
    if kind not in MIXED:
        return Measure(kind)
    number("between 0 and 1", lambda x: 0 < x < 1, beta=beta)
    return Measure(kind, 1 - beta if kind == "skew_reverse_kl" else beta)


class SharedRows(NamedTuple):
    """Row of `teacher_hidden` that each token reads; neighbouring tokens that read one row share
    its logits.

    Attributes:
        index: [T] the row that each token reads.
        rows: [R] the rows of `teacher_hidden` for R runs of neighbouring tokens, where all tokens
            of a run read one row; None if no two neighbouring tokens read one row.
        run: [T] the index of each token's run among the R runs.
        on_host: `run` in CPU memory, so that selecting a block of tokens reads nothing from the
            device.
    """

    index: Tensor
    rows: Tensor | None
    run: Tensor
    on_host: Tensor

    @classmethod
    def of(cls, index: Tensor, static: bool = False) -> SharedRows:
        """Group neighbouring tokens that read one row of `teacher_hidden`.

        With static shapes every token is a group of its own, because grouping would read the
        device.
        """
        if static:
            return cls(index, None, index, index)
        rows, run = index.unique_consecutive(return_inverse=True)
        return cls(index, rows, run, run.cpu())

    def take(self, index: Tensor) -> SharedRows:
        """Return the `teacher_hidden` rows of a subset of the tokens."""
        return self.of(self.index[index]) if len(index) else self

    def at(self, tokens: slice) -> tuple[Tensor, Tensor | None]:
        """Return the M rows of `teacher_hidden` that a slice of n tokens reads, and each token's
        index [n] into the M rows, with None in place of the index if each token has its own row.
        """
        if self.rows is None or not len(self.index):
            return self.index[tokens], None
        first, last = self.on_host[tokens][[0, -1]].tolist()
        return self.rows[first : last + 1], self.run[tokens] - first


def check_teachers(teachers: Sequence[Teacher], batch: Batch, static: bool) -> None:
    """Check the batch fields that describe teachers. Stored top-k token ids must be [.., K]
    integers with a log-prob each; `teacher_index` requires `teacher_hidden`; a batch cannot have
    both `teacher_lse` and stored top-k ids.

    Rows of `teacher_index` are not checked with static shapes, because the check makes the CPU wait
    for the GPU.
    """
    if not teachers:
        return
    fields = batch.fields
    ids, logps = (fields.get(name) for name in INPUTS["topk"])
    if isinstance(ids, Tensor) and isinstance(logps, Tensor):
        check_ids("teacher_topk_ids", ids, batch.targets.shape)
        if logps.shape != ids.shape:
            got, want = (t.shape[-1] if t.dim() else None for t in (logps, ids))
            raise ValueError(
                f"teacher_topk_logps: got a last dimension of {got}, want a log-prob for each of "
                f"teacher_topk_ids, {want}"
            )
    index, states = fields.get("teacher_index"), fields.get("teacher_hidden")
    if isinstance(index, Tensor):
        if not isinstance(states, Tensor):
            raise ValueError(
                "teacher_index: got rows of no teacher_hidden, want teacher_hidden [M, H]"
            )
        outside = ((index < 0) | (index >= len(states))) & (batch.targets != IGNORE)
        for row in [] if static else index[outside].tolist()[:1]:
            want = f"0 <= row < {len(states)} of teacher_hidden at a scored position"
            raise ValueError(f"teacher_index: got {row}, want {want}")
    if "teacher_lse" in fields:
        if isinstance(ids, Tensor):
            raise ValueError("teacher_lse: got stored outcomes, whose log-probs need none")
        if (several := len({teacher.identity()[:2] for teacher in teachers})) > 1:
            raise ValueError(
                f"teacher_lse: got {several} teachers, want one head and one temperature, to which "
                "the log-sum-exp belongs"
            )


def measures_by_name(teacher: Teacher | None, divergences: Collection[str]) -> dict[str, Measure]:
    """Return the value of a teacher's divergence by name; raise for an unknown divergence, or for a
    term without a teacher."""
    if not isinstance(teacher, Teacher | None):
        raise TypeError(f"teacher: got {type(teacher).__name__}, want hl.teacher(...)")
    if isinstance(divergences, str) or not isinstance(divergences, Collection):
        raise TypeError(f"divergences: got {divergences!r}, want a tuple of names")
    if (teacher is None) != (not divergences):
        raise ValueError(f"divergences: got {divergences!r} with teacher={teacher!r}, want both")
    for name in divergences:
        one_of((*KINDS, ACCEPTANCE.kind), divergences=name)
    return {
        name: ACCEPTANCE if name == ACCEPTANCE.kind else measure_of(name) for name in divergences
    }


class SampleExtras(dict[object, Tensor]):
    """Made-up statistics for running a term on a few sample tokens, to find out which statistics
    the term reads. Reading a teacher's divergence for the first time creates the divergence's
    tensor.

    Args:
        leaf: function that returns a new tensor of extra statistics, filled with the given number.
    """

    def __init__(self, leaf: Callable[[float], Tensor]) -> None:
        super().__init__()
        self.leaf = leaf

    def __missing__(self, key: object) -> Tensor:
        if not isinstance(key, tuple):
            raise KeyError(key)
        return self.setdefault(key, self.leaf(-0.3 if key[1] == ACCEPTANCE else 0.3))


class BesideTeacher:
    """Statistics of the student, with methods for the divergences between student and `Teacher`."""

    def __init__(self, stats: Statistics, teacher: Teacher, batch: PackedBatch) -> None:
        self._stats, self._teacher, self._batch = stats, teacher, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stats, name)

    def __len__(self) -> int:
        return len(self._stats)

    def divergence(self, kind: str, beta: float = 0.5) -> Tensor:
        """Return the divergence [T] of teacher and student, with a gradient.

        The arguments `kind` and `beta` are those of hl.distillation.
        """
        return self._measured(measure_of(kind, beta))

    @property
    def log_acceptance(self) -> Tensor:
        """Return log sum_j min(p_j, q_j), [T], with a gradient.

        sum_j min(p_j, q_j) is the probability that speculative sampling accepts a token drawn from
        the student's distribution p, for the teacher's distribution q.
        """
        return self._measured(ACCEPTANCE)

    @property
    def acceptance(self) -> Tensor:
        """Return sum_j min(p_j, q_j), [T], accurate to the last digits for small values too."""
        return self.log_acceptance.exp()

    def _measured(self, measure: Measure) -> Tensor:
        teacher, extras = self._teacher, self._stats.extras
        teacher.source(self._batch)  # raises MissingField if the batch has no teacher input
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
