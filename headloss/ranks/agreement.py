"""Ranks that must make the same call: what they say of it is compared, and errors are shared.

One all-gather of a record of fixed size per group and call. Where the records are not all fine,
the ranks say the rest in a second exchange. A rank that fails still takes part, so that an error on
one rank is raised on all of them, and no collective is left half attended.

A record holds numbers of the device, which is busy with what came before the call. So the host need
not wait for the records of a call like one that it knows: it goes on as if the others said the same
as then, queues its first product, and reads what they said before its next collective (`settle`).
Where they said something else, `in_step` raises it, or makes the call again.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from .collectives import RankError, gather, together

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

R = TypeVar("R")
WORDS = 72  # of a record: an error's mark, a checksum of facts, one of tensors, and own facts
ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)  # the last: any other
KNOWN = 256  # kinds of calls that are remembered of a group

Own = dict[str, list[int]]  # of each rank


class Facts(NamedTuple):
    """What a rank says of its call.

    Attributes:
        same: numbers, flags and names that must be equal on all ranks, and lists of tensors that
            must hold the same bits.
        own: numbers, or tensors in a list, that may differ; every rank gets those of all, or
            their checksums.
    """

    same: Mapping[str, Any]
    own: Mapping[str, Any]


class Unsettled(RankError):
    """The ranks did not say what was expected of them: `in_step` finds out what they said."""


class Agreement:
    """What the ranks of a group say of a call, on its way to the host."""

    expected: Own | None = None  # what the call goes by until it is read

    def __init__(
        self, name: str, group: ProcessGroup, facts: Facts, error: Exception | None, record: Tensor
    ) -> None:
        self.name, self.group, self.facts, self.error = name, group, facts, error
        found, self._event = gather(record, group), None
        if found.is_cuda:
            self._records = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._records.copy_(found, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._records = found

    def _said(self) -> Own | None:
        """The `own` facts of each rank; None where something is wrong."""
        if self._event is not None:
            self._event.synchronize()
        same, sums = slice(3), [n for n, v in self.facts.own.items() if isinstance(v, list)]
        records = self._records.tolist()
        if any(record[0] or record[same] != records[0][same] for record in records):
            return None
        numbers = [name for name in self.facts.own if name not in sums]
        return {name: [r[at] for r in records] for at, name in enumerate((*numbers, *sums), 3)}

    def is_as_expected(self) -> bool:
        return self._said() == self.expected

    def read(self) -> Own:
        """The `own` facts of each rank.

        Raises:
            ValueError, TypeError, RuntimeError: this rank's error, or another's; a fact that is not
                the same on all.
        """
        own = self._said()
        if own is None:
            raise self._trouble() from None
        return own

    def _trouble(self) -> Exception:
        """What is wrong, of which the ranks tell each other."""
        kind, numbers = None, {"call": _layout(self.facts)}
        if self.error is None:
            numbers |= {name: _number(value) for name, value in self.facts.same.items()}
        else:
            kind = next((k for k in ERRORS if isinstance(self.error, k)), ERRORS[-1])
        mine = (kind and kind.__name__, str(self.error), numbers)
        every: list[Any] = [None] * distributed.get_world_size(self.group)
        together(
            "what is wrong with a call",
            self.group,
            lambda: distributed.all_gather_object(every, mine, group=self.group),
        )
        if self.error is not None:
            return self.error
        for rank, (error, text, _) in enumerate(every):
            if error is not None:
                kind = next(k for k in ERRORS if k.__name__ == error)
                return kind(f"{text} (on rank {rank} of {self.name})")
        said = {fact: [theirs.get(fact) for *_, theirs in every] for fact in numbers}
        return self._difference(next((f, s) for f, s in said.items() if len(set(s)) > 1))

    def _difference(self, which: tuple[str, list[int]]) -> ValueError:
        fact, found = which
        me = distributed.get_rank(self.group)
        values = "" if isinstance(self.facts.same.get(fact, 0), list | str) else f": got {found}"
        return ValueError(
            f"{fact}: differs between the ranks of {self.name}{values}, want the same on all; rank "
            f"{next(r for r, x in enumerate(found) if x != found[me])} and this one, rank {me}, do "
            "not agree"
        )


# By group: what all ranks said of their own, by what this one said; of a call that is under way,
# the agreement that is not read yet; and what it goes by where it is made again.
_KNOWN: weakref.WeakKeyDictionary[Any, dict[tuple, Own]] = weakref.WeakKeyDictionary()
_UNREAD: dict[Any, Agreement] = {}
_AGAIN: dict[Any, Own] = {}


def begin(
    name: str,
    group: ProcessGroup | None,
    act: Callable[[], R],
    describe: Callable[[R], Facts],
) -> tuple[R, Agreement]:
    """Run `act` on every rank of a group; its result, and what the ranks say of it.

    Raises:
        ValueError, TypeError: what `act` raised; a rank outside of the group.
    """
    check_member(name, group)
    assert group is not None
    result: Any = None
    facts, error = Facts({}, {}), None
    try:
        result = act()
        facts = describe(result)
        record = _record(facts, group)
    except Exception as caught:  # whatever it is: the others must not wait for this rank
        facts, error = Facts({}, {}), caught
        record = _record(facts, group, failed=True)
    found = Agreement(name, group, facts, error, record)
    if error is not None:
        found.read()
    return result, found


def agree(
    name: str,
    group: ProcessGroup | None,
    act: Callable[[], R],
    describe: Callable[[R], Facts],
) -> tuple[R, Own]:
    """Run `act` on every rank of a group; its result, and the `own` facts of each rank.

    Raises:
        ValueError, TypeError: what `act` raised on any of the ranks (another exception: as a
            RuntimeError on the others); a fact that is not the same on all of them; a rank outside
            of the group.
    """
    result, found = begin(name, group, act, describe)
    return result, found.read()


def agree_later(
    name: str,
    group: ProcessGroup,
    act: Callable[[], R],
    describe: Callable[[R], Facts],
    wait: bool,
) -> tuple[R, Own]:
    """`agree`, inside `in_step`; unless it has to `wait`, what the ranks said when this one last
    said the same, if it ever has."""
    check_member(name, group)
    if group in _AGAIN:
        again = _AGAIN.pop(group)
        return act(), again
    result, found = begin(name, group, act, describe)
    known = _KNOWN.setdefault(group, {})
    kind = tuple(found.facts.own.values())
    if wait or kind not in known:
        if len(known) >= KNOWN:
            known.clear()
        known[kind] = found.read()
    else:
        found.expected, _UNREAD[group] = known[kind], found
    return result, known[kind]


def known(group: ProcessGroup, own: Mapping[str, int]) -> Own | None:
    """What the ranks said of their own when this one last said this."""
    return _KNOWN.get(group, {}).get(tuple(own.values()))


def settle(group: ProcessGroup) -> None:
    """Read what was agreed; before a call's next collective."""
    found = _UNREAD.get(group)
    if found is not None:
        if not found.is_as_expected():
            raise Unsettled("headloss: the ranks of a vocab_group do not make the expected call")
        del _UNREAD[group]


def in_step(group: ProcessGroup | None, call: Callable[[], R]) -> R:
    """A call whose ranks agree; what is wrong comes before what it ran into by then.

    Raises:
        ValueError, TypeError, RuntimeError: as `agree`.
    """
    if group is None:
        return call()
    try:
        found = call()
    except Exception:
        if _is_as_expected(group):
            raise
    else:
        if _is_as_expected(group):
            return found
    return call()


def _is_as_expected(group: ProcessGroup) -> bool:
    """Whether a call was right to go on before it had read what the others said."""
    if not _UNREAD or group not in _UNREAD:
        return True
    unread = _UNREAD.pop(group)
    own = _KNOWN[group][tuple(unread.facts.own.values())] = unread.read()
    if own != unread.expected:
        _AGAIN[group] = own
    return own == unread.expected


def check_member(name: str, group: Any) -> None:
    """ValueError for a process group that this rank is not in."""
    kind = getattr(distributed, "ProcessGroup", ())
    if not isinstance(group, kind) or distributed.get_rank(group) < 0:
        raise ValueError(
            f"{name}: got {group!r}, want a process group that this rank is in (new_group returns "
            "a placeholder to the ranks that it leaves out)"
        )


def checksums(*groups: Sequence[Tensor]) -> list[Tensor]:
    """[1] int64 each, of the bits of some tensors, in their order and places in their group."""
    words = [[_words(tensor) for tensor in group] for group in groups]
    if not any(words):
        return [torch.zeros(1, dtype=torch.int64) for _ in groups]
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


NARROW = {1: torch.uint8, 2: torch.int16}
MIX = -7046029254386353131  # 2^64 over the golden ratio: Knuth's multiplicative hashing


def _number(value: Any) -> int:
    if isinstance(value, list):
        return int(checksums(value)[0])
    return zlib.crc32(value.encode()) if isinstance(value, str) else int(value)


def _layout(facts: Facts) -> int:
    """A checksum of the facts' names, and of which of them are tensors."""
    named = {**facts.same, **facts.own}
    lists = [name for name, value in named.items() if isinstance(value, list)]
    return zlib.crc32(f"{' '.join(named)} {lists}".encode())


def _record(facts: Facts, group: ProcessGroup, failed: bool = False) -> Tensor:
    """[WORDS] int64: whether the rank failed, a checksum of what must be the same and one of the
    tensors among it; then numbers that are this rank's own, and the checksums of tensors."""
    device = _device(group)
    plain = [_number(value) for value in facts.same.values() if not isinstance(value, list)]
    text = f"{_layout(facts)} {plain}"
    own = [int(value) for value in facts.own.values() if not isinstance(value, list)]
    tensors = [value for value in facts.own.values() if isinstance(value, list)]
    if 3 + len(facts.own) > WORDS:
        raise AssertionError(f"facts: got {len(facts.own)}, want at most {WORDS - 3}")
    rest = [0] * (WORDS - 3 - len(facts.own))
    # Pinned, so that the host need not wait for the device before it may go on.
    known = torch.tensor(
        [failed, zlib.crc32(text.encode()), *own, *rest],
        dtype=torch.int64,
        pin_memory=device.type == "cuda",
    ).to(device, non_blocking=True)
    same = [tensor for value in facts.same.values() if isinstance(value, list) for tensor in value]
    first, *sums = (found.to(device) for found in checksums(same, *tensors))
    head = 2 + len(own)
    return torch.cat([known[:2], first, known[2:head], *sums, known[head:]])


def _device(group: ProcessGroup) -> torch.device:
    """Where a group can send from."""
    backends = str(distributed.get_backend_config(group))
    if "nccl" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
