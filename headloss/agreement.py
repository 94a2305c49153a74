"""Ranks that must make the same call: what they say of it is compared, and errors are shared.

One all-gather of a record of fixed size per group and call. A rank that fails still takes part, so
that an error on one rank is raised on all of them, and no collective is left half attended.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from .parallel import gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

R = TypeVar("R")
FACTS = 24  # of a record, at most
TEXT = 64  # int64 words of an error message
ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)  # the last: any other


class Facts(NamedTuple):
    """What a rank says of its call.

    Attributes:
        same: numbers, flags, names and checksums that must be equal on all ranks.
        own: numbers that may differ; every rank gets those of all.
        read: [..] int64 that this rank alone wants to know: the device is read for it and for the
            records at once.
    """

    same: Mapping[str, Any]
    own: Mapping[str, int]
    read: Tensor | None = None


class Agreed(NamedTuple):
    """What the ranks found: each one's `own` facts, and the numbers that this one wanted read."""

    own: dict[str, list[int]]
    read: list[int]


def agree(
    name: str,
    group: ProcessGroup | None,
    act: Callable[[], R],
    describe: Callable[[R], Facts],
) -> tuple[R, Agreed]:
    """Run `act` on every rank of a group; its result, and what the exchange brought.

    Raises:
        ValueError, TypeError: what `act` raised on any of the ranks (another exception: as a
            RuntimeError on the others); a fact that is not the same on all of them; a rank outside
            of the group.
    """
    check_member(name, group)
    assert group is not None
    result, facts, error = None, Facts({}, {}), None
    try:
        result = act()
        facts = describe(result)
    except Exception as caught:  # whatever it is: the others must not wait for this rank
        error = caught
    records, read = _exchange(group, facts, error)
    me = distributed.get_rank(group)
    if error is not None:
        raise error
    for rank, record in enumerate(records):
        if record[0]:
            kind = ERRORS[record[0] - 1]
            raise kind(f"{_text(record)} (on rank {rank} of {name})")
    names = [*facts.same, *facts.own]
    for place, fact in enumerate(("call", *names), 1):
        found = [record[place] for record in records]
        if fact not in facts.own and len(set(found)) > 1:
            shown = facts.same.get(fact, 0)
            values = "" if isinstance(shown, Tensor | str) else f": got {found}"
            raise ValueError(
                f"{fact}: differs between the ranks of {name}{values}, want the same on all; "
                f"rank {next(r for r, x in enumerate(found) if x != found[me])} and this one, "
                f"rank {me}, do not agree"
            )
    own = {fact: [r[2 + names.index(fact)] for r in records] for fact in facts.own}
    return result, Agreed(own, read)  # type: ignore[return-value]


def check_member(name: str, group: Any) -> None:
    """ValueError for a process group that this rank is not in."""
    kind = getattr(distributed, "ProcessGroup", ())
    if not isinstance(group, kind) or distributed.get_rank(group) < 0:
        raise ValueError(
            f"{name}: got {group!r}, want a process group that this rank is in (new_group returns "
            "a placeholder to the ranks that it leaves out)"
        )


def checksum(*tensors: Tensor) -> Tensor:
    """[] int64 of the bits of tensors, in their order and places."""
    if not tensors:
        return torch.zeros((), dtype=torch.int64)
    flat = torch.cat([_bits(tensor.detach().reshape(-1)) for tensor in tensors])
    # Odd factors: each bit of each element shows. Sums of integers wrap and do not round.
    odd = torch.arange(1, 2 * flat.numel() + 1, 2, device=flat.device)
    return odd.mul_(flat).sum()


def _bits(flat: Tensor) -> Tensor:
    return flat.view(INTEGERS[flat.element_size()]) if flat.is_floating_point() else flat


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _number(value: Any) -> int:
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    return int(value)


def _exchange(
    group: ProcessGroup, facts: Facts, error: Exception | None
) -> tuple[list[list[int]], list[int]]:
    """Every rank's record: [error's kind, checksum of the facts' names, facts, message]; and the
    numbers that this rank wanted read."""
    device, code = _device(group), 0
    if error is not None:
        kinds = (i for i, kind in enumerate(ERRORS, 1) if isinstance(error, kind))
        code = next(kinds, len(ERRORS))
    named = {**facts.same, **facts.own}
    if len(named) > FACTS:
        raise AssertionError(f"facts: got {len(named)}, want at most {FACTS}")
    names = " ".join(f"{name} {isinstance(value, Tensor)}" for name, value in named.items())
    head = [code, zlib.crc32(names.encode())]
    head += [0 if isinstance(value, Tensor) else _number(value) for value in named.values()]
    head += [0] * (2 + FACTS - len(head))
    text = str(error or "").encode()[: 8 * TEXT].ljust(8 * TEXT, b"\0")
    words = [int.from_bytes(text[i : i + 8], "big", signed=True) for i in range(0, len(text), 8)]
    # Pinned, so that the host need not wait for the device before it may go on.
    known = torch.tensor([*head, *words], dtype=torch.int64, pin_memory=device.type == "cuda")
    sums = [value.to(device) for value in named.values() if isinstance(value, Tensor)]
    rest = torch.zeros(FACTS - len(sums), dtype=torch.int64, device=device)
    record = torch.cat([known.to(device, non_blocking=True), *(x.view(1) for x in sums), rest])
    found = gather(record, group)
    wanted = record[:0] if facts.read is None else facts.read.to(device)
    numbers = torch.cat([found.view(-1), wanted]).tolist()
    size, places = (
        len(record),
        [i for i, v in enumerate(named.values(), 2) if isinstance(v, Tensor)],
    )
    records = [numbers[i * size : (i + 1) * size] for i in range(len(found))]
    for one in records:
        for at, place in enumerate(places, size - FACTS):
            one[place] = one[at]
    return [one[: size - FACTS] for one in records], numbers[len(found) * size :]


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
