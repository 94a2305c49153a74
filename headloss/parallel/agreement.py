"""`agree`: the ranks of a group check that their calls match, before any other collective of the
call.

Before a call, each rank of a group sends a few numbers from its CPU to all ranks of the group. The
numbers that a rank sends are an error flag, checksums of values that must be equal on all ranks,
and numbers that may differ between ranks and from which all ranks compute the plan. If a rank has
an error or the ranks' checksums differ, the ranks exchange error messages, and every rank raises an
error. In a group's first call, and in each call with `Options(check_ranks=True)`, the ranks also
compare checksums of tensors. A static call (fixed shapes, no device reads) reuses the numbers that
an equal earlier call exchanged, so that a CUDA graph can capture the call.

A call that uses two groups of ranks exchanges numbers twice, first within the group that shards the
vocabulary. In a call with two groups, an error in the first group is also sent to the second group,
so that every rank of a two-dimensional grid of ranks raises the error.
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
# Number of integers that each rank sends before a call: an error flag, two checksums, and numbers
# that may differ between ranks.
WORDS = 64
# Largest number of values that a rank can send to the other ranks before a call.
MOST_NUMBERS = WORDS - 4
# Name under which the ranks exchange their highest target or column id; no batch field can have
# this name.
HIGHEST = "highest id"
# Largest number of static calls per group for which the numbers that ranks exchanged are cached.
LEARNED = 256
# If a rank raises an error of a type in `ERRORS`, all ranks raise an error of this type; for any
# other error, the other ranks raise a RuntimeError.
ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)

OwnNumbers = dict[str, list[int]]  # Values of each named number on all ranks, in rank order.
Tensors = Mapping[str, list[Tensor]]
_LEARNED = weakref.WeakKeyDictionary[object, dict[str, dict[tuple[int, ...], OwnNumbers]]]()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about one rank's call, which the ranks of a group compare or exchange."""

    numbers: Mapping[str, int]  # Named numbers of this rank; other ranks may have different values.
    same: Mapping[str, object]  # Values on the CPU that must be equal on all ranks.
    # Function that receives the named numbers of all ranks and returns a dict from error texts to
    # tensors: an error text is raised if the text's tensors are not equal on all ranks.
    tensors: Callable[[OwnNumbers], Tensors]
    check: bool  # `Options.check_ranks`, which must be equal on all ranks.
    # Numbers read from the batch that must be equal on all ranks; empty in a static call (no device
    # reads).
    counts: Sequence[int] = ()
    highest: int = -1  # Largest target or column id, read from the batch; may differ between ranks.

    @property
    def key(self) -> tuple[int, ...]:
        """Return the key under which a cache stores the numbers that the ranks exchanged; equal
        calls have equal keys, static or not."""
        return _checksum(self.same), *self.numbers.values()


def agree(
    role: str,
    group: distributed.ProcessGroup,
    prepare: Callable[[], tuple[Facts, R]],
    static: bool = False,
) -> tuple[R, OwnNumbers]:
    """Return the result of `prepare` on this rank and, for each name in `Facts.numbers`, the list
    of the values of all ranks.

    Args:
        role: name of the group in error texts.
        prepare: function that returns the `Facts` of this rank's call (values that ranks compare or
            exchange), and a result for the caller of `agree`. If `prepare` raises an error, all
            ranks receive the error before this rank raises it. In a call with two groups of ranks,
            the first group's function `prepare` calls `agree` for the second group.
        static: True for a static call (fixed shapes, no device reads). In a static call, ranks may
            reuse the numbers that they exchanged in an earlier call, instead of exchanging numbers
            again; an error of one rank is then raised on that rank alone.

    Raises:
        Exception: if one rank has an error, every rank raises it; ranks without the error raise a
            RuntimeError in place of any error but a ValueError or a TypeError.
        ValueError: a value that must be equal differs between ranks, or the group does not contain
            this rank.
    """
    facts: Facts | None = None
    error: Exception | None = None
    prepared: Any = None
    try:
        facts, prepared = prepare()
    except Exception as caught:  # Catch all errors, because the other ranks wait.
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
    # The integers that this rank sends: 1 if this rank has an error, else 0, two checksums, and the
    # numbers of this rank.
    words = [1]
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
    """Return the integers that each rank of `group` sent as `words`, in rank order."""
    device = device_of(group)
    mine = torch.tensor(words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return HostCopy(gather(mine.to(device, non_blocking=True), group)).tolist()


def _explained(
    role: str, group: distributed.ProcessGroup, facts: Facts | None, error: Exception | None
) -> Exception:
    """Exchange the errors of all ranks, and return the error that this rank raises."""
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
    """Raise ValueError on every rank if tensors differ between ranks, by a comparison of gathered
    checksums."""
    names = sorted(tensors)  # Sort the names, because the order of a set differs between ranks.
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


# 2^64 divided by the golden ratio, the factor of Knuth's multiplicative hash.
MIX = -7046029254386353131
NARROW = {1: torch.uint8, 2: torch.int16}


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a checksum of the bits of all elements of `tensors`, which depends on the elements'
    order. The CPU waits until the GPU has computed the checksum."""
    if not any(tensor.numel() for tensor in tensors):
        return 0
    vectors = [tensor.detach().reshape(-1).contiguous() for tensor in tensors]
    words = [v.view(NARROW.get(v.element_size(), torch.int32)).to(torch.int32) for v in vectors]
    flat = torch.cat(words)
    # Sums of integers wrap and do not round. The checksum of a tensor is the sum of all elements,
    # each times a factor that depends on the element's position. An element's factor is not a
    # linear function of its position, because with linear factors a tensor and a permutation of the
    # tensor could have the same checksum.
    factors = torch.arange(1, len(flat) + 1, device=flat.device).mul_(MIX)
    return int(factors.bitwise_xor_(factors >> 29).mul_(flat).sum())
