"""`agree`: the ranks of a group check that their calls match, before any other collective of the
call.

Each group of a call gathers one small record of numbers from the host of every rank. A record
contains a flag for a failure of the rank, checksums of values that must be equal on all ranks, and
numbers that may differ between ranks and from which all ranks compute the plan. If a check fails,
the ranks exchange their error messages, and every rank raises. A group's first call, and each call
with `Options(check_ranks=True)`, also compares tensors. A static call (fixed shapes, no device
reads) reuses the record of an equal earlier call, so that a CUDA graph can capture the call.

A call of two groups makes two records, first in the vocabulary's group. An error in the first
group's record is copied into the rank's record for the second group, so that every rank of a grid
of ranks receives the error.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from ..collectives import PROCESS_GROUP, device_of, gather, together
from ..host_copy import HostCopy

R = TypeVar("R")
WORDS = 64  # Words of a record: an error's mark, two checksums, and a rank's own numbers.
# Largest number of values that a rank adds to a record for the other ranks to read.
MOST_NUMBERS = WORDS - 4
HIGHEST = "highest id"  # No field of a batch can have this name.
# Largest number of a group's calls whose records are stored for reuse by static calls.
LEARNED = 256
# Errors of these types keep their type on the other ranks; any other error becomes a RuntimeError.
ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)

OwnNumbers = dict[str, list[int]]  # Numbers of all ranks, by name.
Tensors = Mapping[str, list[Tensor]]
_LEARNED = weakref.WeakKeyDictionary[object, dict[str, dict[tuple[int, ...], OwnNumbers]]]()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a rank's call, for the other ranks of a group."""

    numbers: Mapping[str, int]  # Numbers of this rank, which may differ between ranks.
    same: Mapping[str, object]  # Values on the host that must be equal on all ranks.
    # Function from all ranks' numbers to tensors that must be equal, by the words of an error.
    tensors: Callable[[OwnNumbers], Tensors]
    check: bool  # `Options.check_ranks`, which must be equal on all ranks.
    # Numbers read from the batch that must be equal; static calls read nothing.
    counts: Sequence[int] = ()
    highest: int = -1  # Largest target or column id, read from the batch; may differ between ranks.

    @property
    def key(self) -> tuple[int, ...]:
        """Return the key of equal calls, static or not."""
        return _checksum(self.same), *self.numbers.values()


def agree(
    role: str,
    group: distributed.ProcessGroup,
    prepare: Callable[[], tuple[Facts, R]],
    static: bool = False,
) -> tuple[R, OwnNumbers]:
    """Return this rank's preparation, and the numbers of all ranks.

    Args:
        role: the group's name in errors.
        prepare: function that returns this rank's facts, and any result for the caller. An error is
            caught until the other ranks have heard of the error. (Of two groups, the second group's
            preparation contains the first group's agreement.)
        static: True for a static call. Once the group has learned any call, ranks may go on without
            a record; a rank that fails then raises the error alone.

    Raises:
        Exception: on every rank, the error of one rank (on the other ranks a RuntimeError, unless
            the error is a ValueError or a TypeError).
        ValueError: a fact that differs between ranks, or a group that does not contain this rank.
    """
    facts: Facts | None = None
    error: Exception | None = None
    prepared: Any = None
    try:
        facts, prepared = prepare()
    except Exception as caught:  # Of any kind, because the other ranks must not wait.
        error = caught
    if not isinstance(group, PROCESS_GROUP) or distributed.get_rank(group) < 0:
        raise error or ValueError(
            f"{role}: got {group!r}, want a process group that this rank is in (new_group returns "
            "a placeholder to the ranks that it leaves out)"
        )
    learned = _LEARNED.setdefault(group, {}).setdefault(role, {})
    if facts is not None and static and facts.key in learned:
        return prepared, learned[facts.key]
    if error is not None and static and learned:
        raise error
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise error or RuntimeError(
            f"{role}: a CUDA graph is being captured, in which the ranks cannot compare their "
            "sizes, and no call of this size has run before it; run it once, as a warm-up"
        )
    words = [1]  # Either 1 for a failure; or 0, the checksums, and the rank's own numbers.
    if facts is not None:
        sums = _checksum(facts.same), _checksum((facts.check, facts.counts))
        words = [0, *sums, facts.highest, *map(int, facts.numbers.values())]
    records = _gathered(group, words + [0] * (WORDS - len(words)))
    if facts is None or any(record[:3] != [0, *records[0][1:3]] for record in records):
        raise _explained(role, group, facts, error)
    of_ranks = {n: [r[at] for r in records] for at, n in enumerate((HIGHEST, *facts.numbers), 3)}
    if not learned or facts.check:
        _compare(role, group, facts.tensors(of_ranks))
    if len(learned) >= LEARNED:
        del learned[next(iter(learned))]
    learned[facts.key] = of_ranks
    return prepared, of_ranks


def _gathered(group: distributed.ProcessGroup, words: list[int]) -> list[list[int]]:
    """Return the words of each rank, in rank order."""
    device = device_of(group)
    mine = torch.tensor(words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return HostCopy(gather(mine.to(device, non_blocking=True), group)).tolist()


def _explained(
    role: str, group: distributed.ProcessGroup, facts: Facts | None, error: Exception | None
) -> Exception:
    """Return the error of the call, after an exchange of all ranks' errors."""
    read = {} if facts is None else {"check_ranks": [facts.check], "targets": facts.counts}
    same = {} if facts is None else {n: str(v) for n, v in {**facts.same, **read}.items()}
    kind = next((kind for kind in ERRORS if isinstance(error, kind)), RuntimeError)
    every: list[Any] = [None] * distributed.get_world_size(group)
    arguments = every, (None if error is None else (kind, str(error)), same), group
    together("an exchange of errors", group, distributed.all_gather_object, *arguments)
    if error is not None:
        return error
    for rank, (other, _) in enumerate(every):
        if other is not None:
            return other[0](f"{other[1]} (on rank {rank} of {role})")  # type: ignore[no-any-return]
    said = {name: [theirs.get(name) for _, theirs in every] for name in same}
    name, texts = next((name, texts) for name, texts in said.items() if len(set(texts)) > 1)
    brief = f": got [{', '.join(map(str, texts))}]"
    return _differs(role, group, f"{name}: differs", texts, brief if len(brief) < 200 else "")


def _compare(role: str, group: distributed.ProcessGroup, tensors: Tensors) -> None:
    """Raise ValueError on every rank for tensors that differ between ranks, by gathered
    checksums."""
    names = sorted(tensors)  # Sorted, because the order of a set differs between ranks.
    numbers = [1] * (1 + len(names))
    error = None
    try:
        numbers = [0, *(checksum(tensors[name]) for name in names)]
    except Exception as caught:
        error = caught
    sums = zip(*_gathered(group, numbers), strict=True)
    if error is not None:
        raise error
    for what, of_ranks in zip(("values: cannot be compared", *names), sums, strict=True):
        if len(set(of_ranks)) > 1:
            raise _differs(role, group, what, of_ranks)


def _differs(
    role: str,
    group: distributed.ProcessGroup,
    what: str,
    of_ranks: Sequence[object],
    values: str = "",
) -> ValueError:
    me = distributed.get_rank(group)
    other = next(rank for rank, value in enumerate(of_ranks) if value != of_ranks[me])
    return ValueError(
        f"{what} between the ranks of {role}{values}, want the same on all; rank {other} and this "
        f"one, rank {me}, do not agree"
    )


def _checksum(value: object) -> int:
    return zlib.crc32(str(value).encode())


MIX = -7046029254386353131  # The quotient 2^64 / golden ratio, of Knuth's multiplicative hashing.
NARROW = {1: torch.uint8, 2: torch.int16}


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a checksum of the bits of some tensors, in their order and places. Reads the
    device."""
    if not any(tensor.numel() for tensor in tensors):
        return 0
    vectors = [tensor.detach().reshape(-1).contiguous() for tensor in tensors]
    words = [v.view(NARROW.get(v.element_size(), torch.int32)).to(torch.int32) for v in vectors]
    flat = torch.cat(words)
    # Sums of integers wrap and do not round. The factors are not linear in the place, because with
    # linear factors two values that change places could give the same sum.
    factors = torch.arange(1, len(flat) + 1, device=flat.device).mul_(MIX)
    return int(factors.bitwise_xor_(factors >> 29).mul_(flat).sum())
