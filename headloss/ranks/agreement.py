"""Ranks that must make the same call: what they say of it is compared, and errors are shared.

One all-gather of a record of fixed size per group and call. A rank that fails still takes part, so
that an error on one rank is raised on all of them, and no collective is left half attended.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from .vocabulary import gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

R = TypeVar("R")
FACTS = 72  # of a record, at most: among them a checksum for each field of 62
TEXT = 64  # int64 words of an error message
ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)  # the last: any other


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


def agree(
    name: str,
    group: ProcessGroup | None,
    act: Callable[[], R],
    describe: Callable[[R], Facts],
) -> tuple[R, dict[str, list[int]]]:
    """Run `act` on every rank of a group; its result, and the `own` facts of each rank.

    Raises:
        ValueError, TypeError: what `act` raised on any of the ranks (another exception: as a
            RuntimeError on the others); a fact that is not the same on all of them; a rank outside
            of the group.
    """
    check_member(name, group)
    assert group is not None
    device, me = _device(group), distributed.get_rank(group)
    result, facts, error = None, Facts({}, {}), None
    try:
        result = act()
        facts = describe(result)
        record = _record(facts, None, device)
    except Exception as caught:  # whatever it is: the others must not wait for this rank
        facts, error = Facts({}, {}), caught
        record = _record(facts, error, device)
    records = _exchange(group, record, facts)
    if error is not None:
        raise error
    for rank, said in enumerate(records):
        if said[0]:
            kind = ERRORS[said[0] - 1]
            raise kind(f"{_text(said)} (on rank {rank} of {name})")
    end = 2 + len(facts.same)
    if any(said[:end] != records[me][:end] for said in records):
        raise _difference(name, me, facts, records)
    own = {fact: [r[at] for r in records] for at, fact in enumerate(facts.own, end)}
    return result, own  # type: ignore[return-value]


def _difference(name: str, me: int, facts: Facts, records: list[list[int]]) -> ValueError:
    """What the first fact says that is not the same on all ranks."""
    said = zip(("call", *facts.same), list(zip(*records, strict=True))[1:], strict=False)
    fact, found = next((fact, found) for fact, found in said if len(set(found)) > 1)
    values = "" if isinstance(facts.same.get(fact, 0), list | str) else f": got {list(found)}"
    return ValueError(
        f"{fact}: differs between the ranks of {name}{values}, want the same on all; rank "
        f"{next(r for r, x in enumerate(found) if x != found[me])} and this one, rank {me}, do "
        "not agree"
    )


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
    if not groups:
        return []
    words = [[_words(tensor) for tensor in group] for group in groups]
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
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    return int(value)


def _record(facts: Facts, error: Exception | None, device: torch.device) -> Tensor:
    """[2 + FACTS + TEXT + FACTS]: the error's kind, a checksum of the facts' names, the facts, the
    message, and last the checksums of tensors, in the order of their facts."""
    code = 0
    if error is not None:
        kinds = (i for i, kind in enumerate(ERRORS, 1) if isinstance(error, kind))
        code = next(kinds, len(ERRORS))
    named, sums = {**facts.same, **facts.own}, _summed(facts)
    if len(named) > FACTS:
        raise AssertionError(f"facts: got {len(named)}, want at most {FACTS}")
    head = [code, zlib.crc32(f"{' '.join(named)} {list(sums)}".encode())]
    head += [0 if isinstance(value, list) else _number(value) for value in named.values()]
    words = [0] * TEXT if error is None else _words_of(str(error))
    # Pinned, so that the host need not wait for the device before it may go on.
    known = torch.tensor(
        [*head, *[0] * (2 + FACTS - len(head)), *words, *[0] * (FACTS - len(sums))],
        dtype=torch.int64,
        pin_memory=device.type == "cuda",
    ).to(device, non_blocking=True)
    return torch.cat([known, *(found.to(device) for found in checksums(*sums.values()))])


def _summed(facts: Facts) -> dict[int, Sequence[Tensor]]:
    """The facts that are tensors, by their places in a record."""
    values = (*facts.same.values(), *facts.own.values())
    return {at: v for at, v in enumerate(values, 2) if isinstance(v, list) and v}


def _exchange(group: ProcessGroup, record: Tensor, facts: Facts) -> list[list[int]]:
    """Every rank's record, each checksum in its fact's place."""
    records = gather(record, group).tolist()
    places = list(_summed(facts))
    for one in records:
        for at, place in enumerate(places, len(record) - len(places)):
            one[place] = one[at]
    return [one[: 2 + FACTS + TEXT] for one in records]


def _words_of(text: str) -> list[int]:
    """[TEXT] numbers that hold a message, or its beginning."""
    found = text.encode()[: 8 * TEXT].ljust(8 * TEXT, b"\0")
    return [int.from_bytes(found[i : i + 8], "big", signed=True) for i in range(0, len(found), 8)]


def _text(record: list[int]) -> str:
    words = record[2 + FACTS :]
    text = b"".join(word.to_bytes(8, "big", signed=True) for word in words)
    return text.rstrip(b"\0").decode(errors="ignore")


def _device(group: ProcessGroup) -> torch.device:
    """Where a group can send from."""
    backends = str(distributed.get_backend_config(group))
    if "nccl" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
