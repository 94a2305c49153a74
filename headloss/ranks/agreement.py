"""Ranks that must make the same call: what they say of it is compared, and errors are shared.

One all-gather of a record of fixed size per group and call. Where the records are not all fine,
the ranks say the rest in a second exchange. A rank that fails still takes part, so that an error on
one rank is raised on all of them, and no collective is left half attended. The host reads the
records late, as DESIGN.md says under Agreement: the device is busy with what came before the call.

Where segments run across ranks too, each rank is in two groups, and the second one's records come
behind the first one's. A rank may not raise what it hears in the first, since ranks of other rows
know nothing of it: its record in the second says so.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from ..host_copy import HostCopy
from .collectives import PROCESS_GROUP, Misguessed, device_of, gather, together

R = TypeVar("R")
WORDS = 128  # of a record: an error's mark, a checksum of facts, one of tensors, and own facts
ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)  # the last: any other
KNOWN = 256  # kinds of calls that are remembered of a group

Facts = dict[str, Any]  # by name: numbers, flags and names, or lists of tensors
Own = dict[str, list[int]]  # of each rank; of tensors a checksum


class Agreement:
    """What the ranks of a group say of a call, on its way to the host.

    Args:
        act: makes the call ready; facts are of what it returns.
        own: what may differ between ranks, tensors first; every rank gets those of all.
        same: what must be equal on all ranks, tensors to the bit.
        quiet: what is wrong is not raised here: another group's records follow and say so, or the
            call is made again.
        behind: the group whose records came before, which this one's follow.
        digest: what a call goes by, of what the ranks said; ValueError where nothing will do.
    """

    expected: Any  # what the call goes by, before it is read

    def __init__(
        self, name: str, group: distributed.ProcessGroup, act: Callable[[], R],
        own: Callable[[R], Facts], same: Callable[[R], Facts], quiet: bool = False,
        behind: distributed.ProcessGroup | None = None, digest: Callable[[Own], Any] | None = None
    ) -> None:
        self.name, self.group, self.quiet, self.digest = name, group, quiet, digest
        self.own: Facts = {}
        self.same: Facts = {}
        self.error: Exception | None = None
        try:
            self.result: Any = act()
            self.own, self.same = own(self.result), same(self.result)
            self.same = {"call": _layout(self.same | self.own), **self.same}
            record = self._record()
        except Exception as caught:  # whatever it is: the others must not wait for this rank
            self.own, self.same, self.error = {}, {}, caught
            record = self._record()
        before = _CALLS.get(behind)
        if before is not None:
            record[0] += before.is_wrong()
        self._gathered = gather(record, group)
        self._records = HostCopy(self._gathered)

    @property
    def kind(self) -> tuple:
        """Of the call: this rank's own numbers."""
        return tuple(value for value in self.own.values() if not isinstance(value, list))

    def _record(self) -> Tensor:
        """[WORDS] int64: whether the rank failed, a checksum of what must be the same and one of
        the tensors among it; then this rank's own tensors' and its own numbers; last, a checksum of
        what the call goes by, for those whom another group's records tell that it is wrong."""
        same, own = self.same.values(), self.own.values()
        sums = checksums(
            [tensor for value in same if isinstance(value, list) for tensor in value],
            *(value for value in own if isinstance(value, list)),
        )
        equal = [_number(value) for value in same if not isinstance(value, list)]
        numbers = [self.error is not None, zlib.crc32(str(equal).encode()), *map(int, self.kind)]
        told = _KNOWN[self.group].get(self.kind) if self.quiet and self.digest is None else None
        expects = 0 if told is None else _expects(tuple(zip(*told.values(), strict=True)))
        words = [*numbers, *[0] * (WORDS - 1 - len(sums) - len(numbers)), expects]
        # Pinned, so that the host need not wait for the device before it may go on.
        device = device_of(self.group)
        pinned = device.type == "cuda"
        known = torch.tensor(words, dtype=torch.int64, device="cpu", pin_memory=pinned)
        known = known.to(device, non_blocking=True)
        return torch.cat([known[:2], *(found.to(device) for found in sums), known[2:]])

    def is_wrong(self) -> Tensor:
        """[] of the device, the same on all ranks: not 0 if something is wrong, or other than a
        rank goes by."""
        found, expects = self._gathered, self._gathered[:, -1]
        differ = (found[:, :3] != found[:1, :3]).any()
        other = expects * (expects - _mixed(found[:, 3 : 3 + len(self.own)])) != 0
        return found[0, 0] + differ + other.any()

    @functools.cached_property
    def said(self) -> Own | None:
        """The `own` facts of each rank; None where something is wrong."""
        records = self._records.tolist()
        if any(record[0] or record[:3] != records[0][:3] for record in records):
            return None
        return {name: [record[at] for record in records] for at, name in enumerate(self.own, 3)}

    def read(self) -> Any:
        """The `own` facts of each rank, or their digest; raises this rank's error, or another's, or
        a ValueError for a fact that is not the same on all."""
        if self.said is None:
            raise self._trouble from None
        return self.said if self.digest is None else self.digest(self.said)

    def misguessed(self) -> Misguessed:
        return Misguessed(f"what the ranks of {self.name} say of their call")

    @functools.cached_property
    def _trouble(self) -> Exception:
        """What is wrong, of which the ranks tell each other."""
        kind = next((kind for kind in ERRORS if isinstance(self.error, kind)), RuntimeError)
        numbers = {name: _number(value) for name, value in self.same.items()}
        mine = (None if self.error is None else (kind, str(self.error)), numbers)
        every: list[Any] = [None] * distributed.get_world_size(self.group)
        given = every, mine, self.group
        together("an exchange of errors", self.group, distributed.all_gather_object, *given)
        if self.error is not None:
            return self.error
        for rank, (error, _) in enumerate(every):
            if error is not None:
                return error[0](f"{error[1]} (on rank {rank} of {self.name})")
        said = {fact: [theirs.get(fact) for _, theirs in every] for fact in numbers}
        fact, found = next((fact, found) for fact, found in said.items() if len(set(found)) > 1)
        me = distributed.get_rank(self.group)
        values = "" if isinstance(self.same[fact], list | str) else f": got {found}"
        return ValueError(
            f"{fact}: differs between the ranks of {self.name}{values}, want the same on all; rank "
            f"{next(r for r, x in enumerate(found) if x != found[me])} and this one, rank {me}, do "
            "not agree"
        )


# By group: what all ranks said of their own, by what this one said; and of the call that is being
# made, what the ranks say of it, None until they do.
_KNOWN: weakref.WeakKeyDictionary[Any, dict[tuple, Any]] = weakref.WeakKeyDictionary()
_CALLS: dict[Any, Agreement | None] = {}


def in_step(group: distributed.ProcessGroup | None, batch: Any, call: Callable[[], R]) -> R:
    """A call that may begin before it has read its batch, or what the other ranks of its groups
    say (the vocabulary's, and that of the batch's segments); made again where it went by something
    else. What ranks raise together, as `agree_early` does, comes first."""
    groups = [group, getattr(getattr(batch, "segments", None), "group", None)]
    groups = [g for g in groups if g is not None and isinstance(g, PROCESS_GROUP)]  # others raise
    if len(set(groups)) < len(groups):  # one in both roles: its ranks say two things
        groups = []
    before = {g: _CALLS[g] for g in groups if g in _CALLS}  # of the call whose loss makes this one
    _CALLS.update(dict.fromkeys(groups))
    try:
        while True:
            try:
                found = call()
            except Misguessed:
                _is_right(groups)
            except Exception:
                if _is_right(groups):
                    raise
            else:
                if _is_right(groups):
                    return found
    finally:
        for one in groups:
            _CALLS.pop(one, None)
        _CALLS.update(before)


def _is_right(groups: Sequence[Any]) -> bool:
    """Whether the other ranks said what a call went by; if not, it will go by what they said, or
    wait for them."""
    right, agreed = True, [found for group in groups if (found := _CALLS.get(group)) is not None]
    if agreed and agreed[-1].quiet and agreed[-1].said is None:  # as all ranks hear
        for group in groups:
            del _CALLS[group]
        return False
    for found in agreed:
        if (said := found.read()) != found.expected:
            found.expected = _KNOWN[found.group][found.kind] = said
            right = False
    return right


def agree_early(
    name: str, group: distributed.ProcessGroup, act: Callable[[], R],
    own: Callable[[R], Facts], same: Callable[[R], Facts], wait: bool = False, quiet: bool = False,
    **more: Any
) -> tuple[R, Any]:
    """Run `act` on every rank of a group; its result, and the `own` facts of each rank: inside
    `in_step`, and unless it has to `wait`, what they said when this one last said the same, if it
    ever has. That is all there is while a CUDA graph is captured.

    Arguments are those of `Agreement`; `quiet` holds inside `in_step` and without `wait`.

    Raises:
        ValueError, TypeError: what `act` raised on any of the ranks (another exception: as a
            RuntimeError on the others); a fact that is not the same on all of them; a rank outside
            of the group.
        RuntimeError: a capture without a call of this kind before it.
    """
    if not isinstance(group, PROCESS_GROUP) or distributed.get_rank(group) < 0:
        raise ValueError(
            f"{name}: got {group!r}, want a process group that this rank is in (new_group returns "
            "a placeholder to the ranks that it leaves out)"
        )
    found, known = _CALLS.get(group), _KNOWN.setdefault(group, {})
    if found is not None:  # the call is made again
        return act(), found.expected
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        result = act()
        said = known.get(tuple(own(result).values()))
        if said is None:
            raise RuntimeError(
                f"{name}: a CUDA graph is being captured, in which the ranks cannot compare "
                "their sizes, and no call of this size has run before it; run one with "
                "Options(static=True) first, as a warm-up"
            )
        return result, said
    early = group in _CALLS and not (quiet and wait)
    found = Agreement(name, group, act, own, same, quiet and early, **more)
    if early:
        _CALLS[group] = found
    if wait or not early or found.error is not None or found.kind not in known:
        if found.quiet and found.said is None:
            raise found.misguessed()
        if len(known) >= KNOWN:
            known.clear()
        known[found.kind] = found.read()
    found.expected = known[found.kind]
    return found.result, found.expected


def settle(group: distributed.ProcessGroup | None) -> None:
    """Read what the ranks of a call said, before its next collective."""
    found = _CALLS.get(group)
    if found is not None and (found.said is None or found.read() != found.expected):
        raise found.misguessed()


MIX = -7046029254386353131  # 2^64 over the golden ratio: Knuth's multiplicative hashing
NARROW = {1: torch.uint8, 2: torch.int16}


def _mixed(own: Tensor) -> Tensor:
    """[] checksum of [W, numbers] int64, by few operations."""
    return (own * _factors(*own.shape, own.device)).sum()


@functools.lru_cache(KNOWN)
def _factors(ranks: int, numbers: int, device: torch.device) -> Tensor:
    return torch.arange(1, ranks * numbers + 1, device=device).mul_(MIX).view(ranks, numbers)


@functools.lru_cache(KNOWN)
def _expects(said: tuple[tuple[int, ...], ...]) -> int:
    """The same on the host, of what the ranks said before."""
    return int(_mixed(torch.tensor(said, device="cpu")))


def checksums(*groups: Sequence[Tensor]) -> list[Tensor]:
    """[1] int64 each, of the bits of some tensors, in their order and places in their group."""
    words = [[_words(tensor) for tensor in group] for group in groups]
    if not any(words):
        return [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in groups]
    flat = torch.cat([word for group in words for word in group])
    sizes = [sum(word.numel() for word in group) for group in words]
    # Sums of integers wrap and do not round. The factors follow no line: values that change places
    # would give the same sum along one.
    factors = torch.arange(1, max(sizes) + 1, device=flat.device).mul_(MIX)
    factors.bitwise_xor_(factors >> 29)
    parts = torch.cat([factors[:size] for size in sizes]).mul_(flat).split(sizes)
    return [part.sum(0, keepdim=True) for part in parts]


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor, [..] int32."""
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.view(NARROW.get(flat.element_size(), torch.int32)).to(torch.int32)


def _layout(facts: Facts) -> int:
    """A checksum of the names, and of which of them are tensors."""
    return zlib.crc32(f"{[(n, isinstance(v, list)) for n, v in facts.items()]}".encode())


def _number(value: Any) -> int:
    if isinstance(value, list):
        return int(checksums(value)[0])
    return zlib.crc32(value.encode()) if isinstance(value, str) else int(value)
