"""Calls that are invalid on one rank, for which every rank of a test world must raise an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from parallel_cases import groups
from torch import Tensor, distributed

import headloss as hl

if TYPE_CHECKING:
    from worlds import World

T, H, V = 6, 4, 10


@dataclass
class Setup:
    """Arguments of a valid call over several ranks, which each test case makes invalid on one
    rank."""

    rank: int
    group: Any
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor
    segments: hl.Segments
    objective: Any
    options: hl.Options
    head: dict[str, Any]

    @property
    def last(self) -> bool:
        return self.rank == distributed.get_world_size() - 1

    def run(self, verb: Callable[..., Any] = hl.head_loss) -> Any:
        batch = hl.Batch(
            self.targets,
            self.segments,
            advantages=self.advantages,
            old_logps=torch.full((T,), -1.0),
        )
        head = hl.Head(self.weight, **self.head)
        return verb(self.hidden, head, batch, self.objective, self.options)


Spoil = Callable[[Setup], None]


def setup(over: str) -> Setup:
    world = distributed.get_world_size()
    _, group = groups(1, world)
    segments = hl.Segments.from_lengths([4, 2])
    if over == "segments":
        segments = hl.Segments.from_ids(segments.ids, count=2, group=group)
    return Setup(
        rank=distributed.get_rank(),
        group=group,
        hidden=torch.ones(T, H).requires_grad_(),
        weight=torch.ones(V, H).requires_grad_(),
        targets=torch.arange(T) % V,
        advantages=torch.ones(2),
        segments=segments,
        objective=hl.gspo(),
        options=hl.Options(check_ranks=True),
        head={"vocab_group": group} if over == "vocabulary" else {},
    )


def targets(s: Setup) -> None:
    if s.last:
        s.targets = s.targets.flip(0)


def fields(s: Setup) -> None:
    if s.last:
        s.advantages = 2 * s.advantages


def candidates(s: Setup) -> None:
    ids = torch.arange(2).expand(T, 2) + s.last
    batch, head = hl.Batch(s.targets, candidate_ids=ids), hl.Head(s.weight, **s.head)
    s.run = lambda: hl.head_loss(  # type: ignore[method-assign]
        s.hidden, head, batch, hl.cross_entropy(), s.options
    )


def teacher_row(s: Setup) -> None:
    """Let the last rank's tokens read a row that `teacher_hidden` does not have."""
    fields = {"teacher_hidden": torch.ones(1, H), "teacher_index": torch.full((T,), int(s.last))}
    batch, head = hl.Batch(s.targets, s.segments, **fields), hl.Head(s.weight)  # type: ignore[arg-type]
    s.run = lambda verb=hl.head_loss: verb(  # type: ignore[method-assign,misc]
        s.hidden, head, batch, hl.nla(teacher_head=head), s.options
    )


def wide_field(s: Setup, k: int, more: int = 0) -> None:
    """Add a batch field with `k` values per token, or `k + more` on the last rank; if `more` is 0,
    the field's values differ on the last rank."""
    many = torch.full((T, k + more * s.last), float(s.last and not more))
    batch, head = hl.Batch(s.targets, many=many), hl.Head(s.weight, **s.head)
    s.run = lambda: hl.head_loss(  # type: ignore[method-assign]
        s.hidden, head, batch, hl.cross_entropy(), s.options
    )


def autocast(s: Setup) -> None:
    batch, head = hl.Batch(s.targets), hl.Head(s.weight, **s.head)

    def run() -> hl.Output:
        with torch.autocast("cpu", enabled=s.last):
            return hl.head_loss(s.hidden, head, batch, hl.cross_entropy())

    s.run = run  # type: ignore[method-assign]


def width(s: Setup) -> None:
    if s.last:
        s.hidden, s.weight = torch.ones(T, H + 1), torch.ones(V, H + 1)


def dtype(s: Setup) -> None:
    if s.last:
        s.hidden, s.weight = s.hidden.double(), s.weight.double()


def mismatch(s: Setup) -> None:
    if s.last:
        s.weight = torch.ones(V, H + 1)


def kind(s: Setup) -> None:
    if s.last:
        s.objective = "gspo"


def outside(s: Setup) -> None:
    s.targets = s.targets.clone()
    s.targets[2] = V * distributed.get_world_size()


def outside_on_one(s: Setup) -> None:
    if s.last:
        s.targets = s.targets.clone()
        s.targets[2] = V


def count(s: Setup) -> None:
    if s.last:
        s.segments = hl.Segments.from_ids(s.segments.ids, count=3, group=s.group)
        s.advantages = torch.ones(3)


def kinds_of_a_field(s: Setup) -> None:
    s.advantages = torch.ones(T if s.last else 2)


def objective(s: Setup) -> None:
    if s.last:
        s.objective = hl.gspo(epsilon_low=0.1)


def options(s: Setup) -> None:
    if s.last:
        s.options = hl.Options(chunk_tokens=2, check_ranks=True)


def gradient(s: Setup) -> None:
    if s.last:
        s.hidden = s.hidden.detach()


def temperature(s: Setup) -> None:
    s.head["temperature"] = 0.5 if s.last else 1.0


def vocab_size(s: Setup) -> None:
    s.head["vocab_size"] = V * distributed.get_world_size() + 1


def nothing_scored(s: Setup) -> None:
    s.head["vocab_size"] = V


def stranger(s: Setup) -> None:
    s.head["vocab_group"] = distributed.GroupMember.NON_GROUP_MEMBER


def stranger_of_segments(s: Setup) -> None:
    s.segments = hl.Segments.from_ids(
        s.segments.ids, count=2, group=distributed.GroupMember.NON_GROUP_MEMBER
    )


def tokens(s: Setup) -> None:
    s.options = hl.Options(sequence_parallel=True)


def alone(s: Setup) -> None:
    s.options, s.head = hl.Options(sequence_parallel=True), {}


def bad_k(s: Setup) -> None:
    s.run = lambda: hl.head_topk(  # type: ignore[method-assign]
        s.hidden, hl.Head(s.weight, **s.head), 3 if s.last else 4
    )


def bad_logits(s: Setup) -> None:
    batch = hl.Batch(s.targets)
    logits = torch.ones(T, V, dtype=torch.float64 if s.last else torch.float32)
    s.run = lambda: hl.logits_loss(  # type: ignore[method-assign]
        logits, batch, hl.cross_entropy(), vocab_group=s.group
    )


# By name: what the ranks split, the change that makes the call invalid, and a regex of the error.
INVALID_CALLS: dict[str, tuple[str, Spoil, str]] = {
    "targets": ("vocabulary", targets, "targets: differs between the ranks of vocab_group"),
    "fields": ("vocabulary", fields, "values of fields: differs"),
    "candidates": ("vocabulary", candidates, "candidate_ids: differs"),
    "narrow": ("vocabulary", lambda s: wide_field(s, 3), "values of fields: differs"),
    "wide": ("vocabulary", lambda s: wide_field(s, 600), "values of fields: differs"),
    "wider": ("vocabulary", lambda s: wide_field(s, 3, more=1), "fields: differs"),
    "autocast": ("vocabulary", autocast, "dtype: differs"),
    "width": ("vocabulary", width, r"hidden width: differs .*got \[4,.* 5\]"),
    "dtype": ("vocabulary", dtype, "dtype: differs"),
    "mismatch": ("vocabulary", mismatch, "hidden: got shape .*want .*5"),
    "kind": ("vocabulary", kind, "objective: got str"),
    "outside": ("vocabulary", outside, "targets: got .* at position 2, want -100 or 0 <= target"),
    "objective": ("vocabulary", objective, "objective: differs"),
    "teacher_row": ("segments", teacher_row, "teacher_index: got 1, want 0 <= row < 1"),
    "options": ("vocabulary", options, "options: differs"),
    "gradient": ("vocabulary", gradient, "hidden.requires_grad: differs"),
    "temperature": ("vocabulary", temperature, "temperature: differs"),
    "vocab_size": ("vocabulary", vocab_size, "vocab_size: got .* want at most"),
    "nothing_scored": ("vocabulary", nothing_scored, "weight: got .* at least one on each rank"),
    "stranger": ("vocabulary", stranger, "vocab_group: got .* want a process group that this rank"),
    "tokens": ("vocabulary", tokens, "hidden: got .* tokens on the ranks .* want 6 in all"),
    "alone": ("vocabulary", alone, "sequence_parallel: needs a head with a vocab_group"),
    "k": ("vocabulary", bad_k, "k: differs"),
    "logits": ("vocabulary", bad_logits, "dtype: differs"),
    "target of one": ("segments", outside_on_one, "targets: got 10 at position 2"),
    "kind of one": ("segments", kind, "objective: got str"),
    "count": ("segments", count, r"segments.count: differs between .*got \[2,.* 3\]"),
    "kinds of a field": ("segments", kinds_of_a_field, "advantages: is per token on some ranks"),
    "objective of segments": ("segments", objective, "objective: differs"),
    "gradients of segments": ("segments", lambda s: s.last and freeze(s), "a gradient is wanted"),
    "stranger of segments": ("segments", stranger_of_segments, "segments.group: got"),
}


INVALID_SEGMENTS = [name for name, (over, *_) in INVALID_CALLS.items() if over == "segments"]


def freeze(s: Setup) -> None:
    s.hidden, s.weight = s.hidden.detach(), s.weight.detach()


def refuse(name: str, *verb: Callable[..., Any]) -> tuple[str, str]:
    """Return this rank's error in a call of `INVALID_CALLS`, then check that a valid call works."""
    over, spoil, _ = INVALID_CALLS[name]
    spoiled = setup(over)
    spoil(spoiled)
    found = ("", "nothing was raised")
    try:
        spoiled.run(*verb)
    except (ValueError, TypeError) as error:
        found = (type(error).__name__, str(error))
    assert setup(over).run().loss.isfinite()
    return found


def assert_refused(
    world: World, name: str, *verb: Callable[..., Any], seconds: float = 60.0
) -> None:
    """Check that a call of `INVALID_CALLS` raises its error on every rank of a test world."""
    _, _, match = INVALID_CALLS[name]
    for kind, message in world.run(refuse, name, *verb, seconds=seconds):
        assert kind and re.search(match, message), (match, message)


def refusal(call: Callable[[], object]) -> str:
    """Return the error text of an invalid call, then check that the vocabulary group still
    works."""
    try:
        call()
    except ValueError as error:
        message = str(error)
    else:
        message = "nothing was raised"
    assert setup("vocabulary").run().loss.isfinite()
    return message
