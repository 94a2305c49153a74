"""Ranks agree on a call before it makes any other collective: `agree`.

Each group of a call gathers one small record of what the host knows, and reads it. The record says
whether a rank has failed, what has to be equal on all (as a checksum), and numbers that may differ,
which all ranks plan by. Where something is wrong, the ranks exchange the words, and every one of
them raises. A group's first call, and each with `Options(check_ranks=True)`, also compares
tensors. A static call goes by what the same call has learned, so that it can be captured.

A call of two groups makes two records, the vocabulary's first. An error that a rank hears there
goes into its second record, so that on a grid every rank hears it.
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
WORDS = 64  # of a record: an error's mark, two checksums, and a rank's own numbers
MOST_NUMBERS = WORDS - 4  # of its own
HIGHEST = "highest id"  # no name that a field of a batch can have
LEARNED = 256  # calls that a static one can go by, of a group
ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)  # the last: any other

OwnNumbers = dict[str, list[int]]  # by name, of each rank
Tensors = Mapping[str, list[Tensor]]
_LEARNED = weakref.WeakKeyDictionary[object, dict[str, dict[tuple[int, ...], OwnNumbers]]]()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a rank's call, for the others of a group."""

    numbers: Mapping[str, int]  # of its own, that may differ between the ranks
    same: Mapping[str, object]  # has to be equal, known to the host
    # Makes, of each rank's own numbers, tensors that have to be equal too, by the error's words.
    tensors: Callable[[OwnNumbers], Tensors]
    check: bool  # `Options.check_ranks`, which has to be equal too
    counts: Sequence[int] = ()  # equal, too, and read of the batch: static calls read nothing
    highest: int = -1  # target or id of columns, read of the batch, which may differ

    @property
    def key(self) -> tuple[int, ...]:
        """The key of equal calls, static or not."""
        return _checksum(self.same), *self.numbers.values()


def agree(
    role: str,
    group: distributed.ProcessGroup,
    prepare: Callable[[], tuple[Facts, R]],
    static: bool = False,
) -> tuple[R, OwnNumbers]:
    """The preparation of this rank, and the own numbers of each.

    Args:
        role: the group's name in errors.
        prepare: returns this rank's facts, and whatever else the caller goes on with. An error is
            caught until the other ranks have heard of it. (Of two groups, the second one's
            preparation holds the agreement of the first.)
        static: of the call. Once the group has learned any call, the others may go on without a
            record: a rank that fails then raises alone.

    Raises:
        Exception: on every rank, the error of one (of another kind than ValueError and TypeError:
            a RuntimeError on the others).
        ValueError: a fact that is not the same on all, or a group that this rank is not in.
    """
    facts: Facts | None = None
    error: Exception | None = None
    prepared: Any = None
    try:
        facts, prepared = prepare()
    except Exception as caught:  # of any kind: the others must not wait for this rank
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
    words = [1]  # a failure; else 0, the checksums of equal facts, the rank's own numbers
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
    """The words of each rank, in rank order."""
    device = device_of(group)
    mine = torch.tensor(words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return HostCopy(gather(mine.to(device, non_blocking=True), group)).tolist()


def _explained(
    role: str, group: distributed.ProcessGroup, facts: Facts | None, error: Exception | None
) -> Exception:
    """The error of the call, after an exchange of all ranks' errors."""
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
    """ValueError on every rank for tensors that differ: their checksums are gathered."""
    names = sorted(tensors)  # of a set, which has another order on each rank
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


MIX = -7046029254386353131  # 2^64 over the golden ratio: Knuth's multiplicative hashing
NARROW = {1: torch.uint8, 2: torch.int16}


def checksum(tensors: Sequence[Tensor]) -> int:
    """A checksum of the bits of some tensors, in their order and places. Reads the device."""
    if not any(tensor.numel() for tensor in tensors):
        return 0
    flat = torch.cat([_words(tensor) for tensor in tensors])
    # Sums of integers wrap and do not round. The factors follow no line: values that change places
    # would give the same sum along one.
    factors = torch.arange(1, len(flat) + 1, device=flat.device).mul_(MIX)
    return int(factors.bitwise_xor_(factors >> 29).mul_(flat).sum())


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor, [..] int32."""
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.view(NARROW.get(flat.element_size(), torch.int32)).to(torch.int32)
